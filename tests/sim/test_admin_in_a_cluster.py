"""Look-ups and descriptions in a cluster of several production brokers."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.client.admin.described import PartitionDescription, describe_partitions
from pk.client.offsets import lookup_offsets
from pk.types import TopicPartition
from tests.kit.cluster import SESSION_MS, Kit, Lines

#: Clients as people configure them, for the fixture `make`.
KIT = {"client_defaults": True}

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# -- look-ups --------------------------------------------------------------------------------------


def test_offsets_are_found_although_a_leader_is_silent(make: Any) -> None:
    kit = make(5)
    kit.spread("t", min_insync_replicas=1)
    lines = Lines(kit, "t", 3)
    for partition in range(3):
        lines.after(partition)
    lines.stop()
    places = [TopicPartition("t", p) for p in range(3)]
    cluster = kit.cluster("reader")

    async def ends() -> dict[TopicPartition, tuple[int, int]]:
        return await lookup_offsets(cluster, places, {}, 1, 60_000)

    before = kit.done("reader", ends())
    assert {at for at, _ in before.values()} == {lines.sent}
    kit.silence(2)
    begun = kit.now_ms
    assert kit.done("reader", ends()) == before
    assert kit.now_ms - begun < SESSION_MS + 1_000


# -- administration --------------------------------------------------------------------------------


def describe(kit: Kit, *names: str) -> list[PartitionDescription]:
    cluster = kit.cluster("admin")

    def attempt(timeout_ms: int) -> Any:
        return describe_partitions(cluster, list(names) or None, timeout_ms)

    work = cluster.retrying(attempt, 60_000, final=errors.UnknownTopicOrPartition)
    found: list[PartitionDescription] = kit.done("admin", work)
    kit.done("admin", cluster.close())
    return found


def test_partitions_are_described_by_their_leaders(make: Any) -> None:
    kit = make(6)
    kit.spread("t", min_insync_replicas=1)
    kit.create("u")
    lines = Lines(kit, "t", 3)
    for partition in range(3):
        lines.after(partition)
    lines.stop()
    for each, number in zip(describe(kit, "t"), range(3), strict=True):
        state = kit.state("t", number)
        assert (each.partition, each.leader, each.isr) == (number, state.leader, state.isr)
        assert each.log_end == each.high_watermark == lines.sent
        assert not each.under_replicated
        assert each.directory == f"d{state.leader}"
        assert each.error is None
    assert [(each.topic, each.partition) for each in describe(kit)][-1] == ("u", 0)
    with pytest.raises(errors.UnknownTopicOrPartition, match="nowhere"):
        describe(kit, "t", "nowhere")


def test_a_partition_without_leader_is_described_too(make: Any) -> None:
    kit = make(7)
    kit.create("one", factor=1)
    kit.create("all", min_insync_replicas=1)
    dead = kit.state("one").leader
    kit.kill(dead)
    kit.until(lambda: kit.state("one").leader == -1 and dead not in kit.state("all").isr)
    every, one = describe(kit)
    assert every.leader == kit.state("all").leader
    assert every.under_replicated
    assert every.offline_replicas == (dead,)
    assert one.leader == -1
    assert isinstance(one.error, errors.NotLeaderOrFollower)
    assert one.error.message == f"no leader: it waits for one of the brokers {dead}"


def test_a_silent_broker_delays_a_description_but_a_moment(make: Any) -> None:
    kit = make(8, broker_session_timeout_ms=60_000)  # no other broker reports that it is gone
    kit.spread("t")
    silent = kit.state("t").leader
    kit.silence(silent)
    begun = kit.now_ms
    first = describe(kit, "t")[0]
    assert kit.now_ms - begun < 8_000
    if first.leader == silent:
        assert isinstance(first.error, errors.BrokerUnavailable)
        assert f"broker {silent}" in first.error.message
