"""The fetch stream: rules P4, P6, L12, KIP-207, KIP-320, and cold reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log.aborted import AbortedPage
from pk.log.plan import RetentionPlan
from pk.server.handlers.offsets import DELETE_WAIT_MS
from pk.types import NONE, AbortedTransaction
from pk.wire import pk_pb2 as wire
from pk.world import Stream, StreamKind


async def fill(
    rig: Any, kit: Any, partition: int, count: int, *, records: int = 3, size: int = 10
) -> None:
    stream = await rig.stream(StreamKind.PRODUCE)
    for turn in range(count):
        await stream.send(
            kit.produce((partition, kit.batch(records, size=size)), correlation_id=turn + 1)
        )
    await kit.results(stream, count)
    stream.close()


def offsets(payload: memoryview) -> list[int]:
    return [header.base_offset for _, header in batches.iter_headers(payload)]


async def quiet(rig: Any, stream: Stream, kit: Any, ms: int) -> bool:
    """Check that nothing arrives for `ms` of virtual time."""
    try:
        async with asyncio.timeout(ms / 1000):
            await kit.fetched(stream)
    except TimeoutError:
        return True
    return False


def test_a_position_is_set_once_and_then_pushed(rig: Any, kit: Any) -> None:
    # rule P4
    rig.partition()

    async def story() -> None:
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(position_id=77)))
        reply, payload = await kit.fetched(stream)
        (entry,) = reply.partitions
        assert (entry.position_id, entry.high_watermark, entry.next_offset, len(payload)) == (
            77,
            0,
            0,
            0,
        )
        expected = 0
        for _ in range(3):
            await fill(rig, kit, 0, 1)
            reply, payload = await kit.fetched(stream)
            (entry,) = reply.partitions
            assert entry.position_id == 77
            assert offsets(payload) == [expected]
            expected += 3
            assert entry.next_offset == expected
        assert await quiet(rig, stream, kit, 2_000)

    rig.run(story)


def test_only_what_is_below_the_bound_is_sent(rig: Any, kit: Any) -> None:
    """The bound is the high watermark or the last stable offset, never the log's end."""
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        producer = await rig.stream(StreamKind.PRODUCE)
        for turn in range(2):
            await producer.send(kit.produce((0, kit.batch()), acks=1, correlation_id=turn + 1))
        await kit.results(producer, 2)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position()))
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].payload_bytes == 0
        partition.leader.on_follower_end(2, 3)
        partition.watermark_moved()
        reply, payload = await kit.fetched(stream)
        assert offsets(payload) == [0]
        assert reply.partitions[0].next_offset == 3

    rig.run(story)


def test_credits_bound_what_is_sent(rig: Any, kit: Any) -> None:
    rig.partition()

    async def story() -> None:
        await fill(rig, kit, 0, 8, records=1, size=1_000)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(), credit=2_500))
        got = 0
        reply, payload = await kit.fetched(stream)
        got += len(offsets(payload))
        while not await quiet(rig, stream, kit, 1_000):
            got += 1
        assert 2 <= got <= 3  # one batch may overdraw
        await stream.send(kit.fetch(credit=1 << 20, max_bytes=0))
        reply, payload = await kit.fetched(stream)
        assert reply.partitions[0].next_offset == 8

    rig.run(story)


def test_one_large_batch_always_travels(rig: Any, kit: Any) -> None:
    rig.partition()

    async def story() -> None:
        await fill(rig, kit, 0, 2, records=1, size=500_000)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(partition_max_bytes=100), max_bytes=100))
        for expected in (0, 1):
            _reply, payload = await kit.fetched(stream)
            assert offsets(payload) == [expected]

    rig.run(story)


def test_a_backlog_does_not_starve_another_partition(rig: Any, kit: Any) -> None:
    rig.partition(0)
    rig.partition(1)

    async def story() -> None:
        await fill(rig, kit, 0, 20, records=1, size=2_000)
        await fill(rig, kit, 1, 1, records=1, size=2_000)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0), kit.position(1), max_bytes=4_200))
        seen: list[int] = []
        for _ in range(2):
            reply, _ = await kit.fetched(stream)
            seen += [entry.partition for entry in reply.partitions]
        assert 1 in seen

    rig.run(story)


def test_min_bytes_waits_at_most_max_wait(rig: Any, kit: Any) -> None:
    rig.partition()

    async def story() -> None:
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(), min_bytes=100_000, max_wait_ms=300))
        await kit.fetched(stream)
        started = rig.mine.clock.monotonic_ms()
        await fill(rig, kit, 0, 1)
        await kit.fetched(stream)
        assert 290 <= rig.mine.clock.monotonic_ms() - started <= 340
        started = rig.mine.clock.monotonic_ms()
        await fill(rig, kit, 0, 1, records=1, size=120_000)
        await kit.fetched(stream)
        assert rig.mine.clock.monotonic_ms() - started < 100

    rig.run(story)


@pytest.mark.parametrize("backlog", [(10,), (2, 2)])
def test_a_backlog_is_enough_for_min_bytes(rig: Any, kit: Any, backlog: tuple[int, ...]) -> None:
    """handlers/fetch_session F4: bytes that a frame had no room for, of its last position or of the
    next, count like new bytes.
    """

    async def story() -> None:
        for number, count in enumerate(backlog):
            rig.partition(number)
            await fill(rig, kit, number, count, size=1_000)
        stream = await rig.stream(StreamKind.FETCH)
        positions = map(kit.position, range(len(backlog)))
        given = {"min_bytes": 5_000, "max_bytes": 7_000, "max_wait_ms": 10_000}
        await stream.send(kit.fetch(*positions, **given))
        got = 0
        async with asyncio.timeout(1):
            while got < sum(backlog):
                got += len(offsets((await kit.fetched(stream))[1]))

    rig.run(story)


def test_what_is_urgent_while_a_disk_reads_does_not_wait(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """handlers/fetch_session F4: a position that is set while a frame is made is still answered at
    once.
    """
    rig.partition(0)
    rig.partition(1)
    reading, gate = asyncio.Event(), asyncio.Event()
    read = rig.disk.read

    async def slow(work: Any) -> Any:
        reading.set()
        await gate.wait()
        return await read(work)

    async def story() -> None:
        await fill(rig, kit, 0, 1)
        monkeypatch.setattr(rig.disk, "read", slow)
        stream = await rig.stream(StreamKind.FETCH)
        given = {"min_bytes": 100_000, "max_wait_ms": 10_000}
        await stream.send(kit.fetch(kit.position(0), **given))
        await reading.wait()
        await stream.send(kit.fetch(kit.position(1), **given))
        await asyncio.sleep(0.1)
        gate.set()
        seen: list[int] = []
        async with asyncio.timeout(1):
            while len(seen) < 2:
                reply, _ = await kit.fetched(stream)
                seen += [entry.partition for entry in reply.partitions]
        assert seen == [0, 1]

    rig.run(story)


def test_a_bounded_scan_ends(rig: Any, kit: Any) -> None:
    partition = rig.partition()

    async def story() -> None:
        await fill(rig, kit, 0, 5)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(end_offset=4), max_bytes=150))
        last = 0
        while last < 4:
            reply, _ = await kit.fetched(stream)
            last = reply.partitions[0].next_offset
        assert last == 6
        assert await quiet(rig, stream, kit, 1_000)
        assert not partition._watchers

    rig.run(story)


def test_typed_errors_end_the_position(rig: Any, kit: Any) -> None:
    partition = rig.partition(epoch=3)

    async def story() -> None:
        await fill(rig, kit, 0, 2)
        partition.log.advance_log_start(3)
        stream = await rig.stream(StreamKind.FETCH)

        async def refused(**fields: Any) -> int:
            await stream.send(kit.fetch(kit.position(**fields)))
            reply, _ = await kit.fetched(stream)
            code: int = reply.partitions[0].error.code
            return code

        assert await refused(offset=2) == errors.OffsetOutOfRange.code
        assert await refused(offset=7) == errors.OffsetOutOfRange.code
        assert await refused(partition=5) == errors.UnknownTopicId.code
        assert await refused(offset=3, current_leader_epoch=2) == errors.FencedLeaderEpoch.code
        assert await refused(offset=3, current_leader_epoch=4) == errors.UnknownLeaderEpoch.code
        assert await refused(offset=3) == 0
        partition.fail(errors.StorageFailed("the disk died"))
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].error.code == errors.StorageFailed.code

    rig.run(story)


def test_a_new_leader_whose_watermark_lags_asks_for_patience(rig: Any, kit: Any) -> None:
    """KIP-207: the reader gets OFFSET_NOT_AVAILABLE, never older data, and never a reset."""
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        producer = await rig.stream(StreamKind.PRODUCE)
        await producer.send(kit.produce((0, kit.batch()), acks=1))
        await kit.results(producer, 1)
        rig.lead(partition, 1, replicas=(1, 2))
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(offset=2)))
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].error.code == errors.OffsetNotAvailable.code

    rig.run(story)


def test_a_new_leader_whose_watermark_lags_deletes_nothing_yet(rig: Any, kit: Any) -> None:
    """Records above its watermark may be committed, so the offset is not out of range."""
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        producer = await rig.stream(StreamKind.PRODUCE)
        await producer.send(kit.produce((0, kit.batch()), acks=1))
        await kit.results(producer, 1)
        rig.lead(partition, 1, replicas=(1, 2))
        request = wire.DeleteRecordsRequest()
        for before in (2, NONE):
            request.items.add(topic_id=partition.key.topic_id, partition=0, before_offset=before)
        reply = await rig.streams.offsets.delete_records(request)
        codes = [result.error.code for result in reply.results]
        assert codes == [errors.OffsetNotAvailable.code] * 2
        assert partition.log.log_start == 0

    rig.run(story)


def test_deletions_that_a_silent_replica_holds_up_wait_side_by_side(rig: Any, kit: Any) -> None:
    """Otherwise the answer to many of them comes after their clients have given up."""
    partitions = [rig.partition(number, replicas=(1, 2)) for number in range(8)]

    async def story() -> None:
        producer = await rig.stream(StreamKind.PRODUCE)
        request = wire.DeleteRecordsRequest()
        for number, partition in enumerate(partitions):
            await producer.send(kit.produce((number, kit.batch()), acks=1))
            await kit.results(producer, 1)
            partition.leader.on_follower_end(2, 3)
            request.items.add(topic_id=partition.key.topic_id, partition=number, before_offset=NONE)
        before_ms = rig.mine.clock.monotonic_ms()
        reply = await rig.streams.offsets.delete_records(request)
        codes = [result.error.code for result in reply.results]
        assert codes == [errors.RequestTimedOut.code] * len(partitions)
        assert rig.mine.clock.monotonic_ms() - before_ms < 2 * DELETE_WAIT_MS

    rig.run(story)


def test_a_reader_of_a_truncated_log_is_told_where_it_diverged(rig: Any, kit: Any) -> None:
    """KIP-320: the answer names the end of the last common epoch."""
    partition = rig.partition(epoch=1)

    async def story() -> None:
        await fill(rig, kit, 0, 1)
        rig.lead(partition, 4)
        await fill(rig, kit, 0, 3)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(offset=5, last_fetched_epoch=2)))
        reply, _ = await kit.fetched(stream)
        (entry,) = reply.partitions
        assert (entry.diverging.epoch, entry.diverging.end_offset) == (1, 3)
        await stream.send(kit.fetch(kit.position(offset=6, last_fetched_epoch=4)))
        reply, _ = await kit.fetched(stream)
        assert not reply.partitions[0].HasField("diverging")

    rig.run(story)


def test_a_reader_above_the_end_is_told_of_the_loss_not_reset(rig: Any, kit: Any) -> None:
    """Rule R4: epoch 0 is an epoch, too; a log that lost every record knows no epoch any more."""

    async def story() -> None:
        stream = await rig.stream(StreamKind.FETCH)
        for number, left in ((0, 0), (1, 3)):
            rig.partition(number, epoch=2)
            if left:
                await fill(rig, kit, number, 1)
            at = kit.position(number, offset=10, last_fetched_epoch=0)
            await stream.send(kit.fetch(at))
            reply, _ = await kit.fetched(stream)
            (entry,) = reply.partitions
            assert not entry.HasField("error"), entry
            assert (entry.diverging.epoch, entry.diverging.end_offset) == (0, 0)
        await stream.send(kit.fetch(kit.position(1, offset=10)))  # nothing fetched: only a number
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].error.code == errors.OffsetOutOfRange.code
        await stream.send(kit.fetch(kit.position(1, current_leader_epoch=0)))
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].error.code == errors.FencedLeaderEpoch.code

    rig.run(story)


def test_a_reader_of_an_epoch_that_was_lost_hears_of_it_before_the_next_one_writes(
    rig: Any, kit: Any
) -> None:
    """Rule R4: an unclean leader begins with a longer log of an older epoch; its records at these
    offsets are not those that the reader has read.
    """
    partition = rig.partition(epoch=1)

    async def story() -> None:
        await fill(rig, kit, 0, 2)
        rig.lead(partition, 4)
        stream = await rig.stream(StreamKind.FETCH)
        for offset in (3, 6):
            await stream.send(kit.fetch(kit.position(offset=offset, last_fetched_epoch=2)))
            reply, _ = await kit.fetched(stream)
            (entry,) = reply.partitions
            assert (entry.diverging.epoch, entry.diverging.end_offset) == (1, offset)
        anew = rig.partition(1, epoch=4)
        anew.log.reset_to(5)  # the reader knows no epoch: this one may belong to older records
        rig.lead(anew, 5)
        await stream.send(kit.fetch(kit.position(1, offset=5, last_fetched_epoch=2)))
        reply, _ = await kit.fetched(stream)
        assert not reply.partitions[0].HasField("diverging")

    rig.run(story)


def test_the_epoch_ends_under_a_reader(rig: Any, kit: Any) -> None:
    partition = rig.partition(epoch=1)

    async def story() -> None:
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(current_leader_epoch=1)))
        await kit.fetched(stream)
        rig.lead(partition, 2)
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].error.code == errors.FencedLeaderEpoch.code
        partition.step_down(2)
        await stream.send(kit.fetch(kit.position()))
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].error.code == errors.NotLeaderOrFollower.code
        assert reply.partitions[0].leader_hint == 2

    rig.run(story)


def test_aborted_transactions_are_told_to_read_committed(rig: Any, kit: Any) -> None:
    partition = rig.partition()
    log: Any = partition.log
    log.aborted_in = lambda start, end, limit: AbortedPage([AbortedTransaction(9, 0, 5)], end)

    async def story() -> None:
        await fill(rig, kit, 0, 1)
        stream = await rig.stream(StreamKind.FETCH)
        for isolation, told in ((1, 1), (0, 0)):
            await stream.send(kit.fetch(kit.position(), isolation=isolation))
            reply, _ = await kit.fetched(stream)
            assert len(reply.partitions[0].aborted) == told

    rig.run(story)


async def tiered_partition(rig: Any, kit: Any, number: int = 0) -> Any:
    """Return a partition with two batches of one record; the first has left the local log."""
    partition = rig.partition(number, tiered=True, segment_bytes=14 * 1024)
    await fill(rig, kit, number, 2, records=1, size=12_000)
    log = partition.log
    assert log.segment_count == 2
    log.tiered_end = log.droppable_end = 1
    rename, _ = log.drop_segments(RetentionPlan(0, (0,), False))
    await rig.disk.write(rename)
    assert (log.log_start, log.local_log_start, log.written_end) == (0, 1, 2)
    return partition


def test_cold_reads_never_delay_hot_ones(rig: Any, kit: Any) -> None:
    """A fetch below the local start is served from the tier; offsets are continuous over both."""
    hot = rig.partition(1)
    below = kit.batch(1, base_offset=0)

    async def story() -> None:
        await tiered_partition(rig, kit)
        await fill(rig, kit, 1, 1)
        rig.tier.gate = asyncio.Event()
        rig.tier.batches = lambda offset: (below, 1)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0), kit.position(1)))
        reply, _ = await kit.fetched(stream)
        assert [entry.partition for entry in reply.partitions] == [1]
        assert await quiet(rig, stream, kit, 100)
        rig.tier.gate.set()
        seen: list[tuple[bool, int]] = []
        at: list[int] = []
        while len(seen) < 2:
            reply, payload = await kit.fetched(stream)
            seen += [(entry.cold, entry.next_offset) for entry in reply.partitions]
            at += offsets(payload)
        assert seen == [(True, 1), (False, 2)]
        assert at == [0, 1]
        assert hot.high_watermark == 3

    rig.run(story)


def test_a_position_is_read_from_the_tier_once_however_often_its_log_grows(
    rig: Any, kit: Any
) -> None:
    """An append marks the position while the tier is asked; that must not cause a second
    request.
    """
    below = kit.batch(1, base_offset=0)

    async def story() -> None:
        partition = await tiered_partition(rig, kit)
        rig.tier.gate = asyncio.Event()
        rig.tier.batches = lambda offset: (below, 1)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0)))
        assert await quiet(rig, stream, kit, 100)
        for _ in range(3):
            partition.bounds_moved()
            await rig.mine.clock.sleep_ms(5)
        rig.tier.gate.set()
        at: list[int] = []
        while len(at) < 2:
            _, payload = await kit.fetched(stream)
            at += offsets(payload)
        assert at == [0, 1]
        assert [offset for _, offset in rig.tier.fetches] == [0]

    rig.run(story)


def test_a_cold_read_that_waits_begins_when_another_ends(rig: Any, kit: Any) -> None:
    """The pump may send the tier's answers before the tasks that asked for them have ended."""
    below = kit.batch(1, base_offset=0)

    async def story() -> None:
        first, *_ = [await tiered_partition(rig, kit, number) for number in range(3)]
        rig.tier.gate = asyncio.Event()
        rig.tier.batches = lambda offset: (below, 1)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(*[kit.position(number, end_offset=1) for number in range(3)]))
        assert await quiet(rig, stream, kit, 100)
        assert len(rig.tier.fetches) == 2
        rig.tier.gate.set()
        first.bounds_moved()  # the pump's turn comes right after those of the two reads
        seen: list[int] = []
        async with asyncio.timeout(1):
            while len(seen) < 3:
                reply, _ = await kit.fetched(stream)
                seen += [entry.partition for entry in reply.partitions]
        assert seen == [0, 1, 2]

    rig.run(story)


def test_no_cold_read_begins_after_the_stream(rig: Any, kit: Any) -> None:
    async def story() -> None:
        for number in range(3):
            await tiered_partition(rig, kit, number)
        rig.tier.gate = asyncio.Event()
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(*map(kit.position, range(3))))
        assert await quiet(rig, stream, kit, 100)
        stream.close()
        await asyncio.sleep(1)
        assert len(rig.tier.fetches) == 2

    rig.run(story)


def test_a_dead_store_is_a_typed_error_for_cold_positions_only(rig: Any, kit: Any) -> None:
    rig.partition(1)

    async def story() -> None:
        await tiered_partition(rig, kit)
        await fill(rig, kit, 1, 1)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0), kit.position(1)))
        seen: dict[int, int] = {}
        while len(seen) < 2:
            reply, _ = await kit.fetched(stream)
            for entry in reply.partitions:
                seen[entry.partition] = entry.error.code
        assert seen == {0: errors.TierUnavailable.code, 1: 0}

    rig.run(story)


@pytest.mark.parametrize("replica", [-1, 2])
def test_a_partition_that_comes_after_its_position_wakes_the_reader(
    rig: Any, kit: Any, replica: int
) -> None:
    """handlers/fetch E5: a follower may fetch a topic that was just created before its leader has
    it.
    """

    async def story() -> None:
        stream = await rig.stream(StreamKind.FETCH)
        given = {"replica_id": 2, "replica_epoch": 5} if replica == 2 else {}
        position = kit.position()
        position.current_leader_epoch = 0
        await stream.send(kit.fetch(position, credit=0, **given))
        await asyncio.sleep(0.1)
        rig.partition(replicas=(1, 2) if replica == 2 else (1,))
        await stream.send(kit.fetch(**given))
        reply, payload = await kit.fetched(stream)
        assert (reply.partitions[0].next_offset, len(payload)) == (0, 0)
        producer = await rig.stream(StreamKind.PRODUCE)
        await producer.send(kit.produce((0, kit.batch()), acks=1))
        async with asyncio.timeout(1):
            _, payload = await kit.fetched(stream)
        assert offsets(payload) == [0]

    rig.run(story)
