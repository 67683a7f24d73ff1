"""Whole consumers of a group (client/group_consumer) at a simulated broker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pk import Consumer, TopicPartition, errors
from pk.client import connection, consumer, group_consumer
from pk.wire import pk_pb2 as wire
from tests.unit.client.conftest import SimSignal, SimThread

SETTINGS = {"group_initial_rebalance_delay_ms": 200, "group_min_session_timeout_ms": 500}
OPTIONS = {
    "group_id": "g",
    "session_timeout_ms": 3_000,
    "heartbeat_interval_ms": 300,
    "auto_offset_reset": "earliest",
}
T = [TopicPartition("t", number) for number in range(4)]


class Place:
    """A broker with topic t, and consumers of group g in the test's thread."""

    def __init__(self, cluster: Any, kit: Any, patch: pytest.MonkeyPatch) -> None:
        self.cluster, self.kit = cluster, kit
        self.thread = SimThread(cluster.world, "client")
        patch.setattr(connection, "acquire", lambda: self.thread)
        patch.setattr(connection, "release", lambda held: None)
        patch.setattr(consumer, "monotonic_s", self.thread.now_s)
        patch.setattr(group_consumer, "monotonic_s", self.thread.now_s)
        patch.setattr(consumer, "WakeupSignal", lambda: SimSignal(cluster.world))
        cluster.start()
        self.topic_id = cluster.do(cluster.create("t", 4))
        self.opened: list[Consumer] = []

    def consumer(self, **options: Any) -> Consumer:
        found = Consumer("broker:9292", **{**OPTIONS, **options})
        self.opened.append(found)
        return found

    def produce(self, count: int) -> None:
        """Write batches to partition 0."""
        self.cluster.do(self.cluster.produce(self.kit, self.topic_id, count))

    def run_for_ms(self, duration_ms: int) -> None:
        self.cluster.world.loop.run_for_ms(duration_ms)

    def owns(self, member: Consumer, count: int) -> None:
        """Poll until the member has so many partitions."""
        for _ in range(200):
            member.poll(timeout_s=0.05)
            if len(member.assignment()) == count:
                return
        raise AssertionError(member.assignment())

    def next_offset(self, member: Consumer) -> int:
        """Poll until records of partition 0 come; return the offset behind them."""
        for _ in range(200):
            records = member.poll(timeout_s=0.05)
            if records:
                return records[-1].offset + 1
        raise AssertionError("no record came")

    def call(self, request: Any) -> None:
        async def call() -> None:
            caller = self.cluster.caller()
            await caller.call(request, timeout_ms=10_000)
            await caller.close()

        self.cluster.do(call())

    def create_again(self) -> None:
        """Delete topic t and create it again."""
        self.call(wire.DeleteTopicsRequest(names=["t"]))
        self.topic_id = self.cluster.do(self.cluster.create("t", 4))


@pytest.fixture
def place(
    make_cluster: Callable[..., Any], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    made = Place(make_cluster(**SETTINGS), kit, monkeypatch)
    yield made
    for each in made.opened:
        each.close()


def test_a_removed_member_does_not_move_offsets_back(place: Place) -> None:
    """Its application works for too long; others read on, commit, and leave the group."""
    place.produce(2)
    options = {"max_poll_interval_ms": 2_000, "max_poll_records": 3}
    slow = place.consumer(enable_auto_commit=False, **options)
    lost: list[TopicPartition] = []
    revoked: list[TopicPartition] = []
    slow.subscribe("t", on_revoked=revoked.extend, on_lost=lost.extend)
    behind = place.next_offset(slow)
    place.run_for_ms(4_000)  # the application works
    other = place.consumer(enable_auto_commit=False)
    other.subscribe("t")
    place.owns(other, 4)
    other.commit({T[0]: behind + 1})
    other.close()
    for given in (None, {T[0]: behind}):
        with pytest.raises(errors.UnknownMemberId, match="poll again"):
            slow.commit(given)
    slow.commit(asynchronous=True)
    place.run_for_ms(500)
    assert slow.committed(T[0]) == behind + 1
    slow.poll(timeout_s=0.05)
    assert (lost, revoked) == (T, [])
    with pytest.raises(errors.RebalanceInProgress, match="poll again"):
        slow.commit({T[0]: behind})
    with pytest.raises(errors.RebalanceInProgress, match="poll again"):
        slow.group_metadata()  # a transaction would commit as a tool
    assert place.next_offset(slow) > behind + 1
    assert slow.committed(T[0]) == behind + 1


def test_an_automatic_commit_of_lost_partitions_is_not_sent(place: Place) -> None:
    place.produce(2)
    options = {"max_poll_interval_ms": 2_000, "max_poll_records": 3}
    slow = place.consumer(auto_commit_interval_ms=1, **options)
    slow.subscribe("t")
    behind = place.next_offset(slow)
    place.run_for_ms(4_000)
    other = place.consumer(enable_auto_commit=False)
    other.subscribe("t")
    place.owns(other, 4)
    other.commit({T[0]: behind + 1})
    other.close()
    slow.poll(timeout_s=0.05)
    watcher = place.consumer()
    assert watcher.committed(T[0]) == behind + 1
    place.owns(slow, 4)
    slow.close()
    assert (watcher.committed(T[0]) or 0) > behind


@pytest.mark.parametrize("end", ["close", "unsubscribe", "assign"])
def test_the_end_commits_and_calls_the_listener_while_a_change_waits(
    place: Place, end: str
) -> None:
    place.produce(1)
    first = place.consumer()
    revoked: list[TopicPartition] = []
    first.subscribe("t", on_revoked=revoked.extend)
    behind = place.next_offset(first)
    second = place.consumer()
    second.subscribe("t")
    second.poll(timeout_s=0.5)
    place.run_for_ms(1_000)
    assert first._membership is not None
    assert first._membership.change is not None, "a change waits for the next poll"
    if end == "close":
        first.close()
    elif end == "unsubscribe":
        first.unsubscribe()
    else:
        first.assign([T[0]])
    assert revoked == T
    assert second.committed(T[0]) == behind


def test_lost_partitions_are_reported_at_the_end(place: Place) -> None:
    slow = place.consumer(max_poll_interval_ms=2_000)
    lost: list[TopicPartition] = []
    revoked: list[TopicPartition] = []
    slow.subscribe("t", on_revoked=revoked.extend, on_lost=lost.extend)
    place.owns(slow, 4)
    place.run_for_ms(4_000)
    slow.close()
    assert (lost, revoked) == (T, [])


def test_a_poll_may_wait_for_longer_than_max_poll_interval_ms(place: Place) -> None:
    member = place.consumer(max_poll_interval_ms=2_000)
    member.subscribe("t")
    place.owns(member, 4)
    before = member.group_metadata()
    assert member.poll(timeout_s=8.0) == []
    place.run_for_ms(1_000)
    assert member.poll(timeout_s=0.05) == []
    assert member.group_metadata() == before


def test_an_old_position_is_not_committed_for_a_topic_that_was_created_again(
    place: Place,
) -> None:
    """Rule L8: the partition is paused, so no fetch tells the consumer."""
    place.produce(3)
    member = place.consumer(enable_auto_commit=False)
    member.subscribe("t")
    behind = place.next_offset(member)
    member.commit()
    assert member.committed(T[0]) == behind
    member.pause(T[0])
    place.create_again()
    with pytest.raises(errors.UnknownTopicId):
        member.commit({T[0]: behind})
    with contextlib.suppress(errors.NotPartitionOwner):  # of partitions that are read already
        member.commit()
    watcher = place.consumer()
    assert watcher.committed(T[0]) is None


def test_a_topic_that_is_created_again_is_shared_again(place: Place) -> None:
    """It has as many partitions as before; each member begins at its first offset."""
    place.produce(2)
    members = [place.consumer(auto_commit_interval_ms=1) for _ in range(2)]
    for each in members:
        each.subscribe("t")
    while sum(len(each.assignment()) for each in members) < 4:
        for each in members:
            each.poll(timeout_s=0.05)
    before = members[0].group_metadata().generation
    place.create_again()
    place.produce(1)
    seen: set[int] = set()
    for _ in range(100):
        for each in members:
            try:
                seen |= {record.offset for record in each.poll(timeout_s=0.05)}
            except (errors.TopicRecreated, errors.UnknownTopicId):
                continue
    assert 0 in seen
    assert members[0].group_metadata().generation > before
    assert sorted([*members[0].assignment(), *members[1].assignment()]) == T
    watcher = place.consumer()
    assert watcher.committed(T[0]) == max(seen) + 1
