"""Retention, flushes and the wheel: rules T6, T9, L10, P6."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors
from pk.server.broker.retention import TICK_MS
from pk.server.broker.scheduler import GAUGES_MS, BrokerScheduler
from pk.server.replica.fetch_limits import FetchCredit
from pk.sim.disk import SimDisk, SimStorage
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind

HOUR = 3_600_000
#: Of a stream that no test looks at.
CREDIT = FetchCredit(1 << 20, lambda: None)


@pytest.fixture
def scheduler(rig: Any) -> BrokerScheduler:
    scheduler: BrokerScheduler = rig.core.scheduler
    return scheduler


async def segments(rig: Any, kit: Any, count: int, *, age_ms: int = 0, partition: int = 0) -> None:
    """Append `count` batches of 12 kB, each in a segment of its own."""
    stamp = rig.mine.clock.wall_ms() - age_ms
    stream = await rig.stream(StreamKind.PRODUCE)
    for turn in range(count):
        raw = kit.batch(1, size=12_000, timestamp=stamp)
        await stream.send(kit.produce((partition, raw), correlation_id=turn + 1))
    await kit.results(stream, count)
    stream.close()


def small(rig: Any, **config: Any) -> Any:
    return rig.partition(segment_bytes=14 * 1024, file_delete_delay_ms=1_000, **config)


async def visit(scheduler: BrokerScheduler, partition: Any) -> None:
    await scheduler._retention.retain(partition.key)


def covered(partition: Any, end: int) -> None:
    """Let the tier cover and confirm everything below `end`."""
    partition.log.tiered_end = partition.log.droppable_end = end
    partition.tier.tiered_end, partition.tier.tier_bytes = end, end * 12_000


def test_expired_segments_go_and_log_start_is_durable_first(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    partition = small(rig, retention_ms=HOUR)

    async def story() -> None:
        await segments(rig, kit, 3, age_ms=2 * HOUR)
        await segments(rig, kit, 2)
        await visit(scheduler, partition)
        assert (partition.log.log_start, partition.log.local_log_start) == (3, 3)
        assert rig.manager.log_start_checkpoints >= 1
        names = rig.storage.list("topics/t-0")
        assert sum(name.endswith(".log.deleted") for name in names) == 3
        await rig.mine.clock.sleep_ms(1_500)
        scheduler._retention.remove_pending_delete(rig.mine.clock.monotonic_ms())
        await scheduler._jobs._jobs.wait()
        assert not any(name.endswith(".deleted") for name in rig.storage.list("topics/t-0"))

    rig.run(story)


def test_an_active_segment_that_expired_is_rolled_and_goes(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    # rule L10
    partition = rig.partition(retention_ms=HOUR)

    async def story() -> None:
        await segments(rig, kit, 1, age_ms=2 * HOUR)
        await visit(scheduler, partition)
        await partition.writer.idle()
        assert partition.key in rig.core.due.retain_now
        await visit(scheduler, partition)
        assert partition.log.log_start == 1
        assert partition.log.segment_count == 1

    rig.run(story)


def test_nothing_above_the_watermark_goes(rig: Any, kit: Any, scheduler: BrokerScheduler) -> None:
    partition = rig.partition(
        replicas=(1, 2), retention_bytes=0, segment_bytes=14 * 1024, file_delete_delay_ms=0
    )

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        for turn in range(3):
            raw = kit.batch(1, size=12_000)
            await stream.send(kit.produce((0, raw), acks=1, correlation_id=turn + 1))
        await kit.results(stream, 3)
        await visit(scheduler, partition)
        assert partition.log.log_start == 0

    rig.run(story)


def test_local_data_goes_only_after_the_tier_confirmed_it(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    # rule T6
    partition = small(rig, tiered=True, local_retention_bytes=12_000)

    async def story() -> None:
        await segments(rig, kit, 5)
        await visit(scheduler, partition)
        assert partition.log.local_log_start == 0  # nothing is tiered yet
        covered(partition, 3)
        rig.tier.missing = ["part-1.parquet"]
        await visit(scheduler, partition)
        assert partition.log.local_log_start == 0
        assert rig.tier.confirmed == [(0, 3)]
        rig.tier.missing = []
        await visit(scheduler, partition)
        assert (partition.log.log_start, partition.log.local_log_start) == (0, 3)
        assert rig.manager.log_start_checkpoints == 1  # now only the checkpoint has the log start

    rig.run(story)


def test_topic_retention_counts_tier_and_local_log_together(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Rule T9: log_start moves first; then the owner removes the rows."""
    partition = small(rig, tiered=True, local_retention_bytes=12_000, retention_ms=HOUR)
    asked: list[int] = []

    def at(timestamp_ms: int) -> wire.TierOffsetForTimeReply:
        asked.append(timestamp_ms)
        return wire.TierOffsetForTimeReply(offset=2, timestamp_ms=timestamp_ms)

    async def story() -> None:
        await segments(rig, kit, 5)
        covered(partition, 4)
        await visit(scheduler, partition)
        assert (partition.log.log_start, partition.log.local_log_start) == (0, 4)
        rig.tier.times = at
        await visit(scheduler, partition)
        assert asked == 2 * [rig.mine.clock.wall_ms() - HOUR]
        assert rig.tier.known[-2:] == [True, False]
        assert (partition.log.log_start, partition.log.local_log_start) == (2, 4)
        await visit(scheduler, partition)
        assert rig.tier.known[-1], "log_start does not move: no look at the table is needed"
        assert rig.manager.log_start_checkpoints >= 1

    rig.run(story)


def test_who_leads_no_more_when_the_tier_answers_changes_nothing(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """R4, T9: the log may be truncated in its directory's writer meanwhile."""
    partition = small(rig, tiered=True, local_retention_ms=HOUR, retention_ms=10 * HOUR)

    def deposed(timestamp_ms: int) -> wire.TierOffsetForTimeReply:
        partition.step_down(2)
        return wire.TierOffsetForTimeReply(offset=2, timestamp_ms=timestamp_ms)

    async def story() -> None:
        await segments(rig, kit, 5, age_ms=2 * HOUR)
        covered(partition, 4)
        await visit(scheduler, partition)
        log = partition.log
        assert (log.log_start, log.local_log_start) == (0, 4)
        covered(partition, 5)
        rig.tier.times = deposed
        await visit(scheduler, partition)
        assert log.idle(), "a segment was begun"
        assert log.log_start == 0

    rig.run(story)


def test_retention_bytes_counts_what_both_hold_once(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    partition = small(
        rig, tiered=True, local_retention_bytes=12_000, retention_bytes=40_000, retention_ms=-1
    )

    async def story() -> None:
        await segments(rig, kit, 5)
        covered(partition, 4)
        await visit(scheduler, partition)
        await visit(scheduler, partition)
        assert partition.log.log_start == 0, "the newest version of the table is not known"
        rig.tier.times = lambda timestamp_ms: wire.TierOffsetForTimeReply(offset=NONE)
        await visit(scheduler, partition)
        kept = (partition.log.written_end - partition.log.log_start) * 12_000
        assert 36_000 <= kept <= 48_000

    rig.run(story)


@pytest.mark.parametrize(
    ("wanted", "told_by"),
    [
        ({"retention_ms": HOUR}, "report"),
        ({"retention_ms": HOUR}, "answer"),
        ({"retention_ms": -1, "retention_bytes": 12_000}, "report"),
        ({"retention_ms": -1, "retention_bytes": 12_000}, "answer"),
    ],
)
def test_retention_stops_at_rows_missing_from_the_table(
    rig: Any, kit: Any, scheduler: BrokerScheduler, wanted: dict[str, int], told_by: str
) -> None:
    """Rule T17: a DELETE of another engine removed offset 1.  A look-up by time skips it, and the
    table's size does not show it.  The log starts there until the missing rows are settled.
    """
    partition = small(rig, tiered=True, local_retention_bytes=12_000, **wanted)
    answer = wire.TierOffsetForTimeReply(offset=3)
    rig.tier.times = lambda timestamp_ms: answer

    async def story() -> None:
        await segments(rig, kit, 5)
        covered(partition, 4)
        await visit(scheduler, partition)
        assert (partition.log.log_start, partition.log.local_log_start) == (0, 4)
        if told_by == "report":
            partition.tier.missing_from = 1
        else:
            answer.missing_from = 1
        for _ in range(3):
            await visit(scheduler, partition)
        assert partition.log.log_start == 1
        partition.tier.missing_from = NONE
        answer.ClearField("missing_from")
        await visit(scheduler, partition)
        assert partition.log.log_start >= 3

    rig.run(story)


def test_deleted_records_need_no_confirmation(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Records below log_start need not be in the tier."""
    partition = small(rig, tiered=True)

    async def story() -> None:
        await segments(rig, kit, 4)
        partition.log.advance_log_start(3)
        await visit(scheduler, partition)
        assert partition.log.segment_count == 1
        assert rig.tier.confirmed == []

    rig.run(story)


def test_a_clock_that_jumped_stops_retention(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    # rule L10
    partition = small(rig, retention_ms=HOUR)

    async def story() -> None:
        await segments(rig, kit, 3)
        scheduler.start()
        rig.core.lifecycle.fenced = False
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        rig.world.clocks["broker"].step(10 * HOUR)
        rig.core.due.retain_soon(partition.key)
        await rig.mine.clock.sleep_ms(10 * TICK_MS)
        assert partition.log.log_start == 0
        assert rig.core.clocks.trust.alert
        rig.world.clocks["broker"].step(-10 * HOUR)
        await rig.mine.clock.sleep_ms(10 * TICK_MS)
        assert not rig.core.clocks.trust.alert
        await scheduler.close()

    rig.run(story)


class Following:
    """Stands for the stream to a leader."""

    def __init__(self) -> None:
        self.told = 0  #: how often a log start was reported to the leader

    def stored(self) -> None: ...

    def log_start_moved(self) -> None:
        self.told += 1

    def not_stored(self, error: Exception) -> None: ...


def follows(partition: Any) -> Following:
    partition.step_down(2)
    partition.follow(Following())
    return partition.replica


def test_a_clock_that_jumped_holds_no_deletion_up(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Rules L10, T9: a deletion that the leader accepted needs no clock, and its client waits for
    it.
    """
    partition = small(rig)

    async def story() -> None:
        await segments(rig, kit, 4)
        leader = follows(partition)
        scheduler.start()
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        rig.world.clocks["broker"].step(-10 * HOUR)
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        assert rig.core.clocks.trust.alert
        partition.update_log_start(3)
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        assert (partition.log.log_start, leader.told) == (3, 1)
        assert partition.log.segment_count == 1
        await scheduler.close()

    rig.run(story)


def test_sizes_count_while_the_clock_cannot_be_trusted(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Rule L10: a disk fills up whatever the time is."""
    partition = small(rig, retention_ms=HOUR, retention_bytes=20_000)

    async def story() -> None:
        await segments(rig, kit, 4)
        rig.world.clocks["broker"].step(10 * HOUR)
        await visit(scheduler, partition)
        assert partition.log.log_start == 2

    rig.run(story)


def test_a_deletion_told_before_the_watermark_is_followed_with_it(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Rule T9: the wheel's next turn may be minutes away."""
    partition = small(rig)

    async def story() -> None:
        await segments(rig, kit, 4)
        follows(partition)
        scheduler.start()
        partition.cut_watermark(2)
        partition.update_retention(3, -1, 0)
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        assert partition.log.log_start == 2
        partition.update_high_watermark(4)
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        assert partition.log.log_start == 3
        await scheduler.close()

    rig.run(story)


def test_a_deletion_is_followed_as_the_log_is_written(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Rule T9: fetched records that are not written yet cannot be deleted."""
    partition = small(rig)

    async def story() -> None:
        await segments(rig, kit, 1)
        follows(partition)
        scheduler.start()
        partition.append_fetched(kit.batch(3, base_offset=1, leader_epoch=0), 0, 0, CREDIT)
        partition.update_high_watermark(4)
        partition.update_retention(3, -1, 0)
        rig.core.due.retain_now.clear()  # that visit came before the write
        await partition.writer.idle()
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        assert partition.log.log_start == 3
        await scheduler.close()

    rig.run(story)


@pytest.mark.parametrize("leads", [False, True])
def test_a_deletion_does_not_wait_for_a_store_that_hangs(
    rig: Any, kit: Any, scheduler: BrokerScheduler, leads: bool
) -> None:
    """Rules T9, T6: a running visit waits for a HEAD; log_start moves in another visit."""
    partition = small(rig, tiered=True, local_retention_bytes=12_000)
    hanging = asyncio.Event()

    async def hangs(*_: Any) -> list[str]:
        hanging.set()
        await rig.mine.clock.sleep_ms(60_000)
        return []

    async def story() -> None:
        await segments(rig, kit, 4)
        covered(partition, 3)
        rig.tier.confirm = hangs
        leader = None if leads else follows(partition)
        scheduler.start()
        rig.core.due.retain_soon(partition.key)
        await hanging.wait()
        partition.update_log_start(2)
        await rig.mine.clock.sleep_ms(3 * TICK_MS)
        assert partition.log.log_start == 2
        assert leader is None or leader.told == 1
        await scheduler.close()

    rig.run(story)


def test_flush_ms_makes_written_data_synced(rig: Any, kit: Any, scheduler: BrokerScheduler) -> None:
    partition = rig.partition(flush_ms=500)

    async def story() -> None:
        await segments(rig, kit, 1)
        assert partition.log.synced_end == 0
        scheduler.start()
        await rig.mine.clock.sleep_ms(1_500)
        assert partition.log.synced_end == 1
        await scheduler.close()

    rig.run(story)


def test_flush_ms_holds_for_replicas(rig: Any, kit: Any, scheduler: BrokerScheduler) -> None:
    partition = rig.partition(flush_ms=500)

    async def story() -> None:
        follows(partition)
        scheduler.start()
        await rig.mine.clock.sleep_ms(1_500)  # the records that it led with are flushed
        partition.append_fetched(kit.batch(3, leader_epoch=0), 0, 0, CREDIT)
        await rig.mine.clock.sleep_ms(1_500)
        assert partition.log.synced_end == 3
        await scheduler.close()

    rig.run(story)


def test_a_disk_that_hangs_holds_up_no_other(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """broker/scheduler U4: the work of the other directories runs before that of the hanging
    one.
    """
    known = rig.storage, rig.disk
    rig.storage = SimStorage("d2", rig.world.random("d2"))
    rig.disk = SimDisk(rig.storage, rig.mine.clock, rig.world.random("d2/lanes"))
    hangs, bad = rig.partition(1, flush_ms=400), rig.storage
    rig.storage, rig.disk = known
    works = rig.partition(flush_ms=500)

    async def story() -> None:
        await segments(rig, kit, 1, partition=1)
        await segments(rig, kit, 1)
        bad.lag_ms = 3_600_000
        scheduler.start()
        await rig.mine.clock.sleep_ms(1_500)
        assert (hangs.log.synced_end, works.log.synced_end) == (0, 1)
        await scheduler.close()

    rig.run(story)


def test_a_flush_that_fails_is_no_matter_of_the_next(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Two flushes are due together, and neither is requested again."""
    first, second = rig.partition(flush_ms=500), rig.partition(1, flush_ms=500)

    rig.core.metadata.image.elsewhere = (2,)

    async def story() -> None:
        await segments(rig, kit, 1)
        await segments(rig, kit, 1, partition=1)

        def torn() -> int:
            raise errors.CorruptLog("of this one alone")

        first.log.flush = torn
        scheduler.start()
        await rig.mine.clock.sleep_ms(1_500)
        assert isinstance(first.hosted.cause, errors.CorruptLog)
        assert second.log.synced_end == 1
        await scheduler.close()

    rig.run(story)


def test_a_flush_without_a_descriptor_is_made_once_there_is_one(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """log/storage D2: sealed segments are opened for the sync.  The lack of descriptors passes: the
    partition is served meanwhile, and needs no restart.
    """
    partition = small(rig, flush_ms=500)
    tried: list[str] = []

    def none_left(operation: str, path: str) -> Exception | None:
        if operation != "open" or not path.endswith("0.log"):
            return None
        tried.append(path)
        return errors.StorageFull("too many open files")

    async def story() -> None:
        await segments(rig, kit, 3)
        rig.storage.fault = none_left
        scheduler.start()
        await rig.mine.clock.sleep_ms(1_500)
        assert tried
        assert partition.online
        assert partition.leader is not None
        rig.storage.fault = None
        await rig.mine.clock.sleep_ms(2 * TICK_MS)
        assert partition.log.synced_end == 3
        await scheduler.close()

    rig.run(story)


def test_a_dead_store_does_not_stop_the_wheel(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    tiered = small(rig, tiered=True, local_retention_bytes=12_000)
    plain = rig.partition(1, segment_bytes=14 * 1024, retention_bytes=12_000)

    async def story() -> None:
        await segments(rig, kit, 4)
        await segments(rig, kit, 4, partition=1)
        covered(tiered, 3)

        async def hangs(*_: Any) -> list[str]:
            await rig.mine.clock.sleep_ms(60_000)
            return []

        rig.tier.confirm = hangs
        scheduler.start()
        rig.core.due.retain_soon(tiered.key)
        rig.core.due.retain_soon(plain.key)
        await rig.mine.clock.sleep_ms(4 * TICK_MS)
        assert plain.log.log_start == 3
        assert tiered.log.local_log_start == 0
        await scheduler.close()

    rig.run(story)


def test_a_directory_that_went_does_not_stop_the_wheel(
    rig: Any, kit: Any, scheduler: BrokerScheduler
) -> None:
    """Rule L2: the failed directory's free space is not known any more; the other directories are
    flushed as before.
    """
    partition = rig.partition(flush_ms=500)

    def gone() -> int:
        raise errors.StorageFailed("d2: asking for its free space")

    async def story() -> None:
        storage = SimStorage("d2", rig.world.random("d2"))
        storage.free_bytes = gone  # type: ignore[method-assign]
        rig.core.writers.of(SimDisk(storage, rig.mine.clock, rig.world.random("d2/lanes")))
        scheduler.start()
        await rig.mine.clock.sleep_ms(GAUGES_MS)
        await segments(rig, kit, 1)
        await rig.mine.clock.sleep_ms(1_500)
        assert partition.log.synced_end == 1
        await scheduler.close()

    rig.run(story)
