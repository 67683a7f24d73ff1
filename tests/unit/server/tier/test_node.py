"""Broker, controller and tier nodes in one simulated world: rules T1, T4, T6, T7, T9 end to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pk import errors, settings
from pk.log import batch as batches
from pk.server.broker.node import BrokerNode
from pk.server.tier.node import owner_settings
from pk.tiering.table import MemoryTable, Snapshot
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind

Cluster = Any  # conftest.py's
QUICK = {
    "segment_bytes": "14336",
    "local_retention_bytes": "20000",
    "tier_max_lag_ms": "200",
    "local_drop_delay_ms": "300",
    "file_delete_delay_ms": "500",
}


def partition_of(cluster: Cluster, topic_id: str) -> Any:
    return cluster.broker.core.partitions[PartitionKey(topic_id, 0)]


async def produce(
    cluster: Cluster, kit: Any, topic_id: str, count: int, *, age_ms: int = 0
) -> None:
    """Produce `count` batches of one 12 kB record."""
    stream = await cluster.stream(StreamKind.PRODUCE)
    for turn in range(count):
        stamp = cluster.client.clock.wall_ms() - age_ms
        raw = kit.batch(1, size=12_000, timestamp=stamp)
        await stream.send(kit.produce((0, raw), topic_id=topic_id, correlation_id=turn + 1))
        (answer,) = await kit.results(stream, 1)
        assert not answer.HasField("error"), answer
    stream.close()


def back_without_a_tier(cluster: Cluster, kit: Any) -> str:
    """Return the id of a topic whose 12 records the table has, after a power loss, on a server
    without a tier.
    """
    cluster.start()
    cluster.start_tier()
    topic_id: str = cluster.do(cluster.create("flights", **QUICK))
    cluster.do(produce(cluster, kit, topic_id, 12))
    partition = partition_of(cluster, topic_id)
    cluster.world.run_until(lambda: partition.tiered_end == 12)
    cluster.world.kill("tier")
    cluster.kill("broker", "d1", power=True)
    cluster.boot = "boot-2"
    cluster.start_broker()
    return topic_id


async def delete(cluster: Cluster, topic_id: str, before: int) -> int:
    """Delete records; return the log start afterwards."""
    caller = cluster.caller()
    request = wire.DeleteRecordsRequest()
    request.items.add(topic_id=topic_id, before_offset=before)
    frame = await caller.call(request, timeout_ms=5_000)
    await caller.close()
    return int(frame.head.delete_records_reply.results[0].log_start)


def test_a_server_without_its_tier_says_what_it_cannot_read(
    tiered: Cluster, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(BrokerNode, "_warn", lambda _, event, **facts: said.append(event))
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    tiered.world.run_until(lambda: partition_of(tiered, topic_id).log.local_log_start >= 9)
    tiered.world.loop.run_for_ms(1_000)  # the segments were removed, too
    for tier_url in (tiered.run.tier_url, ""):
        tiered.kill("broker", "d1")
        assert "tier_url_missing" not in said
        server = {**tiered.run.server, "tier_url": tier_url}
        tiered.run = dataclasses.replace(tiered.run, server=server)
        tiered.start_broker()
    assert said.count("tier_url_missing") == 1


def test_a_bound_that_is_lowered_stops_no_copying(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """L13: the bound is for new batches; stored batches were within the bound of their time."""
    cluster = make_cluster(12, tier_url="memory://tier")
    cluster.start()
    topic_id = cluster.do(cluster.create("flights", **QUICK))
    cluster.do(produce(cluster, kit, topic_id, 4))
    change = wire.AlterConfigsRequest()
    lower = change.changes.add(resource=wire.ConfigResource(type="topic", name="flights")).set
    lower["max_message_bytes"] = lower["decoded_bytes_max"] = "2048"

    async def alter() -> None:
        caller = cluster.caller()
        await caller.call(change, timeout_ms=10_000)
        await caller.close()

    cluster.do(alter())
    cluster.start_tier()
    partition = partition_of(cluster, topic_id)
    cluster.world.loop.run_for_ms(10_000)
    assert (partition.tiered_end, partition.tier.problem) == (4, None)


async def read(cluster: Cluster, kit: Any, topic_id: str, start: int, end: int) -> dict[int, bool]:
    """Return the offsets of every record in `[start, end)`, each with whether it came from the
    tier.
    """
    stream = await cluster.stream(StreamKind.FETCH)
    at = kit.position(offset=start)
    at.topic_id = topic_id
    await stream.send(kit.fetch(at))
    seen: dict[int, bool] = {}
    position = start
    while position < end:
        reply, payload = await kit.fetched(stream)
        taken = 0
        for entry in reply.partitions:
            assert not entry.HasField("error"), entry
            raw = payload[taken : taken + entry.payload_bytes]
            taken += entry.payload_bytes
            for _, header in batches.iter_headers(raw):
                for offset in range(header.base_offset, header.next_offset):
                    if offset >= start:
                        assert offset not in seen
                        seen[offset] = entry.cold
            assert entry.next_offset >= position
            position = entry.next_offset
        await stream.send(kit.fetch(credit=len(payload), max_bytes=0))
    stream.close()
    return seen


def test_one_line_of_offsets_across_tier_and_local_log(tiered: Cluster, kit: Any) -> None:
    """Local segments are dropped once the table covers them.

    A reader from 0 sees every record once, in order.
    """
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.local_log_start >= 9)
    assert partition.log.log_start == 0
    assert partition.tiered_end <= partition.last_stable_offset
    seen = tiered.do(read(tiered, kit, topic_id, 0, 12))
    assert list(seen) == list(range(12))
    local = partition.log.local_log_start
    assert [offset for offset, cold in seen.items() if cold] == list(range(local))

    async def describe() -> wire.DescribeTierReply:
        caller = tiered.caller()
        frame = await caller.call(wire.DescribeTierRequest(topic="flights"), timeout_ms=5_000)
        await caller.close()
        reply: wire.DescribeTierReply = frame.head.describe_tier_reply
        return reply

    described = tiered.do(describe())
    assert described.uri
    assert described.partitions[0].end == 12


def test_a_restart_finds_the_same_line(tiered: Cluster, kit: Any) -> None:
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.local_log_start >= 9)
    tiered.world.loop.run_for_ms(2_000)
    tiered.kill("broker", "d1")
    tiered.start_broker()
    partition = partition_of(tiered, topic_id)
    assert (partition.log.log_start, partition.log.local_log_start) == (0, 10)
    assert list(tiered.do(read(tiered, kit, topic_id, 0, 12))) == list(range(12))
    tiered.do(produce(tiered, kit, topic_id, 3))
    tiered.world.run_until(lambda: partition_of(tiered, topic_id).tiered_end == 15)


def test_a_tier_that_has_just_started_does_not_say_that_there_is_no_table(
    tiered: Cluster, kit: Any
) -> None:
    """A caller that asks before the owner has read the table gets an error to retry."""
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    node = tiered.tier

    def said() -> wire.DescribeTierReply:
        request = wire.DescribeTierRequest(topic="flights")
        reply: wire.DescribeTierReply = tiered.do(node._describe(request, None))
        return reply

    assert (said().status, said().HasField("problem")) == ("ok", False)
    node.worker.topics.clear()  # as at its start: the broker has told it no partitions yet
    node._session = ("", 0)
    assert said().problem.code == errors.TierUnavailable.code


def test_a_description_looks_at_the_table_first(
    tiered: Cluster, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule T3, Readers: an owner's own looks may be minutes apart."""
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    worker, looked = tiered.tier.worker, []
    look = worker.look

    async def recorded(topic: Any) -> None:
        looked.append(topic.topic)
        await look(topic)

    monkeypatch.setattr(worker, "look", recorded)
    tiered.do(tiered.tier._describe(wire.DescribeTierRequest(topic="flights"), None))
    assert looked == ["flights"]


def test_the_owner_looks_as_rarely_as_its_server_is_set_to() -> None:
    resolved = settings.SERVER.resolve({"tier_refresh_max_ms": 77_000})
    found = owner_settings(resolved, 3)
    assert (found.refresh_max_ms, found.name) == (77_000, "3")


def test_the_tier_dies_and_the_hot_log_goes_on(tiered: Cluster, kit: Any) -> None:
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.local_log_start >= 9)
    tiered.world.kill("tier")
    tiered.do(produce(tiered, kit, topic_id, 4))
    local = partition.log.local_log_start
    assert list(tiered.do(read(tiered, kit, topic_id, local, 16))) == list(range(local, 16))
    with pytest.raises(AssertionError, match=str(errors.TierUnavailable.code)):
        tiered.do(read(tiered, kit, topic_id, 0, 1))
    tiered.start_tier()
    tiered.world.run_until(lambda: partition.tiered_end == 16)
    assert list(tiered.do(read(tiered, kit, topic_id, 0, 16))) == list(range(16))


def test_a_cold_read_answers_in_time_with_what_it_has(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """tiering/reader H7: many small files, no cache and a slow store: a range that takes longer
    than one answer's time is read in several answers.
    """
    cluster = make_cluster(
        11,
        tier_url="memory://tier",
        log_retention_check_interval_ms=1_000,
        remote_fetch_max_wait_ms=1_000,
        cold_cache_bytes=0,
    )
    cluster.start()
    cluster.start_tier()
    topic_id = cluster.do(cluster.create("flights", **QUICK))
    partition = partition_of(cluster, topic_id)
    for end in range(1, 17):
        cluster.do(produce(cluster, kit, topic_id, 1))
        cluster.world.run_until(lambda end=end: partition.tiered_end == end)
    cluster.world.run_until(lambda: partition.log.local_log_start >= 13)
    files = [path for path in cluster.store.objects if path.endswith(".parquet")]
    get_range = cluster.store.get_range

    async def slow(path: str, start: int, size: int) -> bytes:
        await cluster.client.clock.sleep_ms(120)
        return await get_range(path, start, size)

    cluster.store.get_range = slow
    assert len(files) * 120 > 1_000  # one round trip for each is too much already
    assert list(cluster.do(read(cluster, kit, topic_id, 0, 16))) == list(range(16))


def test_tier_wins_after_a_power_loss(make_cluster: Callable[..., Cluster], kit: Any) -> None:
    """Rule T4: no record contradicts the table; the leader waits for the store."""
    for seed in range(4):
        cluster = make_cluster(
            seed, tier_url="memory://tier", log_retention_check_interval_ms=1_000
        )
        cluster.start()
        cluster.start_tier()
        topic_id = cluster.do(cluster.create("flights", **QUICK))
        cluster.do(produce(cluster, kit, topic_id, 12))
        partition = partition_of(cluster, topic_id)
        cluster.world.run_until(lambda p=partition: p.tiered_end == 12)  # type: ignore[misc]
        cluster.world.kill("tier")
        cluster.kill("broker", "d1", power=True)
        cluster.boot = f"boot-after-{seed}"
        cluster.start_broker()
        partition = partition_of(cluster, topic_id)
        with pytest.raises(errors.TierUnavailable):
            cluster.do(cluster.produce(kit, topic_id, 1))
        cluster.start_tier()
        cluster.world.run_until(lambda p=partition: p.leader is not None)  # type: ignore[misc]
        assert partition.log.written_end == 12
        assert list(cluster.do(read(cluster, kit, topic_id, 0, 12))) == list(range(12))
        cluster.do(produce(cluster, kit, topic_id, 2))
        cluster.world.run_until(lambda p=partition: p.tiered_end == 14)  # type: ignore[misc]
        state = cluster.broker.core.metadata.image.partition(partition.key)
        assert not state.unclean  # the controller knows that it has recovered


def test_a_recovery_that_is_not_heard_is_told_again(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """tier/epoch_fence K3: until the controller has the report, no preferred leader takes over."""
    cluster = make_cluster(3, tier_url="memory://tier")
    topic_id = back_without_a_tier(cluster, kit)
    served = partition_of(cluster, topic_id)
    core = cluster.broker.core
    call, lost = core.lifecycle.call, []

    async def lossy(request: Any, timeout_ms: int) -> Any:
        if isinstance(request, wire.AlterPartitionRequest) and len(lost) < 2:
            lost.append(request)
            raise errors.ControllerUnavailable("lost")
        return await call(request, timeout_ms)

    core.lifecycle.call = lossy
    cluster.start_tier()
    cluster.world.run_until(lambda: served.leader is not None)
    assert core.metadata.image.partition(served.key).unclean
    cluster.world.run_until(lambda: not core.metadata.image.partition(served.key).unclean)
    assert len(lost) == 2
    cluster.world.run_until(lambda: not core.epoch_fence._tasks)


def test_tier_wins_for_every_partition_of_a_topic(
    make_cluster: Callable[..., Cluster], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule T4: all partitions claim at the same time, while the store is slow (tiering/owner
    W6).
    """
    load = MemoryTable.load

    async def slow(table: MemoryTable, partitions: Sequence[int]) -> Snapshot | None:
        await cluster.client.clock.sleep_ms(100)
        return await load(table, partitions)

    monkeypatch.setattr(MemoryTable, "load", slow)
    cluster = make_cluster(3, tier_url="memory://tier", log_retention_check_interval_ms=1_000)
    cluster.start()
    cluster.start_tier()
    topic_id = cluster.do(cluster.create("flights", partitions=3, **QUICK))

    def partitions() -> list[Any]:
        keys = [PartitionKey(topic_id, number) for number in range(3)]
        return [cluster.broker.core.partitions[key] for key in keys]

    async def fill() -> None:
        stream = await cluster.stream(StreamKind.PRODUCE)
        for number in range(3):
            await stream.send(kit.produce((number, kit.batch(5)), topic_id=topic_id))
            await kit.results(stream, 1)
        stream.close()

    cluster.do(fill())
    cluster.world.run_until(lambda: all(each.tiered_end == 5 for each in partitions()))
    cluster.world.kill("tier")
    cluster.kill("broker", "d1", power=True)
    cluster.boot = "boot-after"
    cluster.start_tier()
    cluster.start_broker()
    cluster.world.run_until(lambda: all(each.leader is not None for each in partitions()))
    assert [each.log.written_end for each in partitions()] == [5, 5, 5]


def test_tier_wins_does_not_bring_deleted_records_back(tiered: Cluster, kit: Any) -> None:
    """Rule T9: log_start may be beyond the table's end; a claim leaves it there."""
    topic_id = tiered.do(tiered.create("flights", **QUICK, flush_on_ack="true"))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    tiered.world.kill("tier")
    tiered.do(produce(tiered, kit, topic_id, 6))
    tiered.do(delete(tiered, topic_id, 15))
    tiered.kill("broker", "d1", power=True)
    tiered.boot = "boot-2"
    tiered.start_broker()
    tiered.start_tier()
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.leader is not None)
    assert (partition.log.log_start, partition.log.written_end) == (15, 18)
    assert list(tiered.do(read(tiered, kit, topic_id, 15, 18))) == [15, 16, 17]
    tiered.world.run_until(lambda: partition.tiered_end == 18)


def test_a_log_whose_start_passed_the_tables_end_is_kept(tiered: Cluster, kit: Any) -> None:
    """Rules T4, T9: once the segments below log_start are dropped, an epoch later, the log's epochs
    do not reach back to the table's end.  The log's records are acknowledged, SYNCED, and nowhere
    else.
    """
    topic_id = tiered.do(tiered.create("flights", **QUICK, flush_on_ack="true"))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    tiered.world.kill("tier")
    tiered.do(produce(tiered, kit, topic_id, 6))
    tiered.do(delete(tiered, topic_id, 15))
    tiered.world.run_until(lambda: partition.log.local_log_start == 15)
    epoch = partition.leader_epoch
    tiered.world.network.cut("broker", "controller")
    tiered.world.run_until(lambda: not tiered.controller.machine.image.available(1))
    tiered.world.network.heal("broker", "controller")
    tiered.world.run_until(lambda: partition.leader_epoch > epoch)
    tiered.do(produce(tiered, kit, topic_id, 3))
    tiered.kill("broker", "d1", power=True)
    tiered.boot = "boot-2"
    tiered.start_broker()
    tiered.start_tier()
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.leader is not None)
    assert (partition.log.log_start, partition.log.written_end) == (15, 21)
    assert list(tiered.do(read(tiered, kit, topic_id, 15, 21))) == list(range(15, 21))
    tiered.world.run_until(lambda: partition.tiered_end == 21)


def test_a_lost_disk_does_not_go_below_a_table_that_was_emptied(tiered: Cluster, kit: Any) -> None:
    """Rules T4, T9: new records below the table's end would be taken for copied and deleted."""
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    tiered.do(delete(tiered, topic_id, -1))
    tiered.world.run_until(lambda: partition.tier.start == 12)
    tiered.kill("broker", "d1")
    tiered.replace_storage("d1")
    tiered.start_broker()
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.leader is not None)
    assert (partition.log.log_start, partition.log.written_end) == (12, 12)
    tiered.do(produce(tiered, kit, topic_id, 14))
    tiered.world.run_until(lambda: partition.tiered_end == 26)
    assert list(tiered.do(read(tiered, kit, topic_id, 12, 26))) == list(range(12, 26))


def test_a_lost_disk_is_restored_from_the_tier(tiered: Cluster, kit: Any) -> None:
    """Rule T4 is also the rule for a lost disk with one replica."""
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    tiered.kill("broker", "d1")
    tiered.replace_storage("d1")
    tiered.start_broker()
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.leader is not None)
    assert list(tiered.do(read(tiered, kit, topic_id, 0, 12))) == list(range(12))
    tiered.do(produce(tiered, kit, topic_id, 1))
    assert partition.log.written_end == 13


def test_deleted_records_leave_the_table(tiered: Cluster, kit: Any) -> None:
    # rule T9
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.local_log_start >= 9)

    assert tiered.do(delete(tiered, topic_id, 5)) == 5
    tiered.world.run_until(lambda: partition.tier.start == 5)
    assert list(tiered.do(read(tiered, kit, topic_id, 5, 12))) == list(range(5, 12))
    assert tiered.do(delete(tiered, topic_id, -1)) == 12
    tiered.do(produce(tiered, kit, topic_id, 3))
    tiered.world.run_until(lambda: partition.tiered_end == 15 and partition.tier.start == 12)


@pytest.mark.parametrize("purge", [False, True])
def test_a_deleted_topic_keeps_its_table_unless_asked(
    tiered: Cluster, kit: Any, purge: bool
) -> None:
    # rule T7
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 4))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 4)

    async def delete() -> str:
        caller = tiered.caller()
        request = wire.DeleteTopicsRequest(names=["flights"], purge_tier=purge)
        frame = await caller.call(request, timeout_ms=5_000)
        await caller.close()
        return str(frame.head.delete_topics_reply.results[0].note)

    assert "memory://tier" in tiered.do(delete())
    tiered.world.loop.run_for_ms(70_000)
    left = [path for path in tiered.store.objects if topic_id in path]
    assert bool(left) is not purge


def configure(cluster: Cluster, **values: str) -> None:
    async def story() -> None:
        caller = cluster.caller()
        request = wire.AlterConfigsRequest()
        resource = wire.ConfigResource(type="topic", name="flights")
        request.changes.add(resource=resource, set=values)
        reply = (await caller.call(request, timeout_ms=5_000)).head.alter_configs_reply
        assert not reply.results[0].HasField("error"), reply
        await caller.close()

    cluster.do(story())


def test_a_look_up_by_time_finds_what_leaves_the_local_log_meanwhile(
    tiered: Cluster, kit: Any
) -> None:
    """T11: the tier's answer referred the offset to the local log, which has dropped it since."""
    topic_id = tiered.do(tiered.create("flights", **{**QUICK, "local_retention_bytes": "60000"}))
    tiered.do(produce(tiered, kit, topic_id, 9))
    tiered.world.loop.run_for_ms(1_000)
    between_ms = tiered.client.clock.wall_ms()
    tiered.do(produce(tiered, kit, topic_id, 3))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.droppable_end == 12)
    assert 0 < partition.log.local_log_start <= 9
    disk, looks = partition.writer.disk, []
    read_disk = disk.read

    async def later(work: Any) -> Any:
        looks.append(work)
        if len(looks) == 1:
            low = dataclasses.replace(partition.log.config, local_retention_bytes=20_000)
            partition.log.config = low
            await tiered.broker.core.retention.retain(partition.key)
            assert partition.log.local_log_start == 10
        return await read_disk(work)

    disk.read = later

    async def story() -> wire.OffsetAnswer:
        caller = tiered.caller()
        request = wire.ListOffsetsRequest()
        request.queries.add(topic_id=topic_id, current_leader_epoch=-1, timestamp_ms=between_ms)
        reply = (await caller.call(request, timeout_ms=5_000)).head.list_offsets_reply
        await caller.close()
        return reply.answers[0]

    assert tiered.do(story()).offset == 9


def test_old_records_that_come_late_do_not_take_what_is_in_the_tier_with_them(
    tiered: Cluster, kit: Any
) -> None:
    """Rule T9, log/retention E5: local segments with old timestamps have expired; records below
    them, which only the tier has, have not.
    """
    hour_ms = 3_600_000
    slow = {**QUICK, "local_drop_delay_ms": "20000", "local_retention_ms": "1000"}
    topic_id = tiered.do(tiered.create("flights", **slow, retention_ms=str(hour_ms)))
    tiered.do(produce(tiered, kit, topic_id, 4))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.local_log_start == 4)
    tiered.do(produce(tiered, kit, topic_id, 4, age_ms=2 * hour_ms))
    tiered.world.run_until(lambda: partition.tiered_end == 8)
    tiered.world.loop.run_for_ms(10_000)
    assert (partition.log.log_start, partition.log.local_log_start) == (0, 4)
    assert list(tiered.do(read(tiered, kit, topic_id, 0, 8))) == list(range(8))
    tiered.world.run_until(lambda: partition.log.log_start == 8)
