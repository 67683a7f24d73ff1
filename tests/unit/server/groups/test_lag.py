"""The lag of groups, and its gauges (server/groups/lag, server/groups/lag_gauges)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.server.groups import lag, lag_gauges
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.lag import GroupLag
from pk.server.groups.state import CommittedOffset
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

KEYS = [PartitionKey("t", number) for number in range(4)]


def group(name: str, **offsets: int) -> ConsumerGroup:
    found = ConsumerGroup(name)
    for place, offset in offsets.items():
        found.offsets[KEYS[int(place[1:])]] = CommittedOffset(offset, -1, "", 0)
    return found


def test_a_lag_is_what_is_not_committed_of_the_stable_records() -> None:
    groups = {"a": group("a", p0=3, p1=10), "b": group("b", p2=0), "c": group("c")}
    assert lag.wanted(groups) == KEYS[:3]
    ends = {KEYS[0]: 5, KEYS[1]: 9, KEYS[2]: 8}
    assert lag.lags(groups, ends) == [GroupLag("b", 8, 8), GroupLag("a", 2, 2)]
    assert lag.lags(groups, {KEYS[0]: 5}) == [GroupLag("a", 2, 2)], "an end is not known"


def test_only_the_groups_with_the_largest_lags_have_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lag, "GROUPS_SHOWN", 3)
    monkeypatch.setattr(lag, "PARTITIONS_MAX", 2)
    groups = {f"g{number}": group(f"g{number}", p0=number) for number in range(10)}
    assert [each.group_id for each in lag.lags(groups, {KEYS[0]: 20})] == ["g0", "g1", "g2"]
    assert len(lag.wanted({"a": group("a", p0=1, p1=1, p2=1)})) == 2


class Peers:
    """The other brokers: 2 answers, 3 does not."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def call(self, node_id: int, request: Any, timeout_ms: int) -> Any:
        self.asked.append((node_id, len(request.queries)))
        if node_id == 3:
            raise errors.BrokerUnavailable("it does not answer")
        reply = wire.ListOffsetsReply()
        for each in request.queries:
            reply.answers.add(topic_id=each.topic_id, partition=each.partition, offset=100)
        return reply


def test_the_leaders_of_other_brokers_are_asked_once_each(make_cluster: Any) -> None:
    """One that does not answer leaves its partitions out."""
    cluster = make_cluster()
    cluster.start()

    async def story() -> None:
        await cluster.create("t")
        core = cluster.broker.core
        peers = Peers()
        groups = {"a": group("a", p0=1, p1=10, p2=20, p3=30)}
        leaders = dict(zip(KEYS, (1, 2, 2, 3), strict=True))
        gauges = lag_gauges.GroupGauges(
            core.env, SimpleNamespace(leader_of=leaders.get), core.lifecycle, peers,
            lambda: groups, lambda key: 5,
        )  # type: ignore[arg-type]  # fmt: skip
        await gauges.look()
        assert peers.asked == [(2, 2), (3, 1)]
        assert series(core) == {"a": 4 + 90 + 80}
        groups.clear()
        await gauges.look()
        assert series(core) == {}

    cluster.do(story())


def series(core: Any) -> dict[str, float]:
    """The series of group_lag."""
    (family,) = core.env.metrics.group_lag.collect()
    return {each.labels["group"]: each.value for each in family.samples}


def test_a_broker_has_gauges_of_the_groups_that_it_coordinates(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster()
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        await cluster.produce(kit, topic_id, 3)
        caller = cluster.caller()
        request = wire.OffsetCommitRequest(member=wire.GroupMember(group_id="g", generation=-1))
        request.topics.add(topic_id=topic_id, partitions=[0], offsets=[2])
        for _ in range(100):
            try:
                await caller.call(request, timeout_ms=5_000)
                break
            except (errors.NotCoordinator, errors.CoordinatorLoading):
                find = wire.FindCoordinatorRequest(key="g", key_type=0)
                await caller.call(find, timeout_ms=5_000)
                await asyncio.sleep(0.1)
        await cluster.client.clock.sleep_ms(2 * lag_gauges.LOOK_MS)
        core = cluster.broker.core
        (key,) = [key for key in core.partitions if key == PartitionKey(topic_id, 0)]
        end = core.partitions[key].last_stable_offset
        assert series(core) == {"g": end - 2}
        assert core.env.metrics.groups.labels("Empty")._value.get() == 1
        cluster.broker.core.groups._contact = SimpleNamespace(in_contact=lambda: False)
        core.group_gauges._contact = SimpleNamespace(in_contact=lambda: False)
        await cluster.client.clock.sleep_ms(2 * lag_gauges.LOOK_MS)
        assert series(core) == {}, "another broker may coordinate the group by now"
        await caller.close()

    cluster.do(story())
