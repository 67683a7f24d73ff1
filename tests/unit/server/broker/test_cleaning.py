"""The log cleaner of a broker: which log is cleaned, when, and when a cleaning is void."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.log.plan import RetentionPlan
from pk.log.segment import CLEANED
from pk.server.broker import cleaning
from pk.server.broker.cleaning import STEP_SEGMENTS, UNCLEANABLE_MS, LogCleaner
from pk.server.broker.clock_trust import Sample
from pk.server.replica.partition import Partition
from pk.world import StreamKind
from tests.kit.in_process_cleaner import InProcessCleaner

DAY = 86_400_000


@pytest.fixture
def mine() -> InProcessCleaner:
    return InProcessCleaner()


@pytest.fixture
def cleaner(rig: Any, mine: InProcessCleaner) -> LogCleaner:
    core = rig.core
    return LogCleaner(
        core.env, core.clocks, core.partitions, core.fetchers.changing, mine, core.holds
    )


def compacted(rig: Any, number: int = 0, **config: Any) -> Partition:
    given = {"cleanup_policy": "compact", "segment_bytes": 14 * 1024, **config}
    found: Partition = rig.partition(number, **given)
    return found


async def write(
    rig: Any, kit: Any, rounds: int, *, partition: int = 0, value: bytes | None = b"v" * 3000
) -> None:
    """Overwrite five keys; a round takes a segment."""
    stream = await rig.stream(StreamKind.PRODUCE)
    for turn in range(rounds):
        keys = [b"k%d" % n for n in range(4)]
        values = [value] * 4
        raw = b"".join(
            columns.encode_lists(values, keys, default_timestamp=rig.mine.clock.wall_ms())
        )
        await stream.send(kit.produce((partition, raw), correlation_id=turn + 1))
    await kit.results(stream, rounds)
    stream.close()


def offsets(partition: Partition) -> list[int]:
    log, found = partition.log, []
    at = log.local_log_start
    while at < log.written_end:
        read = log.read(at, bound=log.written_end, max_bytes=1 << 20, verify=True)
        for _, raw in batches.iter_batches(read.data):
            found += columns.decode(raw, decoded_bytes_max=1 << 24).column("offset").to_pylist()
        at = read.next_offset
    return found


def files(rig: Any, number: int = 0) -> list[str]:
    names: list[str] = rig.storage.names(f"topics/t-{number}")
    return names


def test_the_dirtiest_due_log_is_cleaned_first(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    one, two = compacted(rig), compacted(rig, 1)
    rig.partition(2, segment_bytes=14 * 1024)

    async def story() -> None:
        for number in range(3):
            await write(rig, kit, 5, partition=number)
        assert await cleaner.clean_one(mine)
        assert await cleaner.clean_one(mine)
        assert not await cleaner.clean_one(mine)
        for each in (one, two):
            assert offsets(each) == list(range(12, 20))
            assert each.log.cleaned.end == 16
        assert len(offsets(rig.core.partitions[one.key._replace(partition=2)])) == 20
        await write(rig, kit, 1)
        await write(rig, kit, 3, partition=1)
        assert await cleaner.clean_one(mine)  # the second is dirtier
        assert [job.path for job in mine.jobs][2:] == ["topics/t-1"]
        assert not [name for name in files(rig, 1) if name.endswith(CLEANED)]

    rig.run(story)


def test_a_clean_log_is_not_due(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """C1: the dirty share of the log decides."""
    compacted(rig, min_cleanable_dirty_ratio=0.6)

    async def story() -> None:
        await write(rig, kit, 5)
        assert await cleaner.clean_one(mine)
        await write(rig, kit, 1)
        assert not await cleaner.clean_one(mine)
        await write(rig, kit, 1)
        assert await cleaner.clean_one(mine)

    rig.run(story)


def test_an_old_record_is_cleaned_although_the_log_is_clean(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """KIP-354: also if it is in the active segment, which is rolled first."""
    partition = compacted(rig, max_compaction_lag_ms=1000, min_cleanable_dirty_ratio=1.0)

    async def story() -> None:
        await write(rig, kit, 1)
        assert not await cleaner.clean_one(mine)
        await rig.mine.clock.sleep_ms(1001)
        assert not await cleaner.clean_one(mine)
        await partition.writer.settled(partition)
        assert partition.log.segment_count == 2
        assert await cleaner.clean_one(mine)
        assert partition.log.cleaned.end == 4

    rig.run(story)


def test_tombstones_age_below_the_cleaned_ends_of_all_replicas(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """broker/cleaning K3: another replica may have an older record."""
    alone = compacted(rig, delete_retention_ms=DAY, min_cleanable_dirty_ratio=0.0)

    async def story() -> None:
        await write(rig, kit, 3)
        await write(rig, kit, 1, value=None)
        alone.log.roll()
        alone.writer.submit(alone, 0)
        await alone.writer.settled(alone)
        assert await cleaner.clean_one(mine)
        assert mine.jobs[-1].cleaning.settled_end > alone.log.log_end
        rig.lead(alone, 1, replicas=(1, 2, 3), partition_epoch=1)
        leader = alone.leader
        assert leader is not None
        for replica, cleaned_end, settled_end in ((2, 9, 0), (3, 7, 7), (3, 12, 9), (2, 0, 0)):
            leader.on_follower_cleaned(replica, cleaned_end)
            assert cleaner._settled_end(alone) == settled_end
        leader.on_follower_cleaned(2, 50)
        leader.on_follower_cleaned(3, 50)
        assert cleaner._settled_end(alone) == 50
        assert alone.settled_end == alone.log.cleaned.end < 50  # for followers
        rig.lead(alone, 1, replicas=(1, 2, 3, 4), partition_epoch=2)
        assert cleaner._settled_end(alone) == 0
        rig.lead(alone, 2, replicas=(1, 2, 3), partition_epoch=3)
        assert cleaner._settled_end(alone) == 0
        alone.step_down(2)
        assert cleaner._settled_end(alone) == 0
        alone.leader_settled_end = 8
        assert cleaner._settled_end(alone) == 8
        alone.cut_watermark(3)
        assert cleaner._settled_end(alone) == 3
        rig.core.partitions.clear()

    rig.run(story)


def test_tombstones_stay_while_only_a_table_has_the_first_offsets(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """broker/cleaning K7: the table has records that they delete."""
    alone = compacted(rig, delete_retention_ms=DAY, min_cleanable_dirty_ratio=0.0)

    async def story() -> None:
        await write(rig, kit, 3)
        assert cleaner._settled_end(alone) > alone.log.log_end
        first, *_ = alone.log.segments
        rename, _ = alone.log.drop_segments(
            RetentionPlan(alone.log.log_start, (first.base_offset,), False, "tiered")
        )
        rename()
        assert alone.log.log_start < alone.log.local_log_start
        assert cleaner._settled_end(alone) == 0

    rig.run(story)


def test_a_cleaning_during_which_a_replica_is_added_is_void(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """broker/cleaning K2: the replica may have an older record."""
    partition = compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)

        async def add() -> None:
            rig.lead(partition, 1, replicas=(1, 2), partition_epoch=1)

        mine.meanwhile = add
        assert not await cleaner.clean_one(mine)
        assert partition.log.cleaned.end == 0
        assert not [name for name in files(rig) if name.endswith(CLEANED)]

    rig.run(story)


def test_a_late_cleaning_is_void(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """broker/cleaning K2: horizons were counted from its deadline."""
    partition = compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)

        async def late() -> None:
            await rig.mine.clock.sleep_ms(100_000)

        mine.meanwhile = late
        assert not await cleaner.clean_one(mine)
        assert len(offsets(partition)) == 20

    rig.run(story)


def test_horizons_are_counted_by_the_median_of_the_nodes_clocks(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """Rule C4: this clock is 50 s ahead of those of the other nodes, which is tolerated."""
    compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)
        clock, trust = rig.mine.clock, rig.core.clocks.trust
        line_ms = clock.wall_ms() - clock.boottime_ms() - 50_000
        trust.compare([Sample(2, line_ms, True), Sample(3, line_ms, True)], (1, 2, 3))
        assert await cleaner.clean_one(mine)
        (job,) = mine.jobs
        assert job.cleaning.now_ms == pytest.approx(clock.wall_ms() - 50_000, abs=1_000)

    rig.run(story)


def test_a_cut_during_a_cleaning_makes_it_void(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    partition = compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)

        async def cut() -> None:
            await rig.disk.write(partial(partition.log.truncate_to, 9))

        mine.meanwhile = cut
        assert not await cleaner.clean_one(mine)
        assert partition.log.cleaned.end == 0
        assert offsets(partition) == list(range(8))
        assert not [name for name in files(rig) if name.endswith(CLEANED)]
        rig.core.partitions.clear()  # its high watermark is that of the log before

    rig.run(story)


def test_a_deleted_topic_is_left_alone(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """Another topic may have the directory's name by then: only the cleaning's files go."""
    partition = compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)

        async def delete() -> None:
            del rig.core.partitions[partition.key]

        mine.meanwhile = delete
        assert not await cleaner.clean_one(mine)
        assert not [name for name in files(rig) if name.endswith(CLEANED)]
        assert len(offsets(partition)) == 20

    rig.run(story)


@pytest.mark.parametrize("error", [errors.StorageFull("no room"), errors.InvalidOption("no key")])
def test_a_log_that_cannot_be_cleaned_is_tried_again_later(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner, error: errors.PkError
) -> None:
    """broker/cleaning K4: other logs are cleaned meanwhile."""
    partition = compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)
        mine.error = error
        assert await cleaner.clean_one(mine)
        mine.error = None
        assert not await cleaner.clean_one(mine)
        assert not [name for name in files(rig) if name.endswith(CLEANED)]
        await rig.mine.clock.sleep_ms(UNCLEANABLE_MS + 1)
        assert await cleaner.clean_one(mine)
        assert partition.log.cleaned.end == 16

    rig.run(story)


def test_a_log_that_cannot_be_planned_does_not_end_the_pass(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """broker/cleaning K4: the error of one log does not concern the others."""
    partitions = [compacted(rig, number) for number in range(3)]
    plan, failures = cleaner._plan, [errors.StorageFailed("no such disk"), ValueError("a bug")]

    async def failing(partition: Partition) -> Any:
        if partition is not partitions[2]:
            raise failures[partitions.index(partition)]
        return await plan(partition)

    async def story() -> None:
        for number in range(3):
            await write(rig, kit, 5, partition=number)
        cleaner._plan = failing  # type: ignore[method-assign]
        assert await cleaner.clean_one(mine)
        assert [job.path for job in mine.jobs] == ["topics/t-2"]
        assert not await cleaner.clean_one(mine)
        assert [str(each) for each in rig.bugs] == ["a bug"]
        rig.bugs.clear()

    rig.run(story)


def test_planning_many_logs_leaves_time_to_the_loop(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """broker/cleaning K1: 1,000 logs took 200 ms of the event loop at once."""
    for number in range(3 * STEP_SEGMENTS):
        compacted(rig, number)
    plan, steps = cleaner._plan, [0]
    clock: Any = rig.core.env.clock
    sleep_ms = clock.sleep_ms

    async def counting(partition: Partition) -> Any:
        steps[-1] += 1
        return await plan(partition)

    async def pausing(wait_ms: float) -> None:
        steps.append(0)
        await sleep_ms(wait_ms)

    async def story() -> None:
        cleaner._plan = counting  # type: ignore[method-assign]
        clock.sleep_ms = pausing
        assert not await cleaner.clean_one(mine)
        assert sum(steps) == 3 * STEP_SEGMENTS
        assert max(steps) <= STEP_SEGMENTS / 2

    rig.run(story)


def test_a_log_of_many_segments_is_planned_in_the_read_lane(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """broker/cleaning K1: the event loop does not walk over all of its segments."""
    partition = compacted(rig)
    monkeypatch.setattr(cleaning, "STEP_SEGMENTS", 3)
    reads: list[Any] = []

    async def story() -> None:
        await write(rig, kit, 5)
        read = rig.disk.read

        async def noted(work: Any) -> Any:
            reads.append(work)
            return await read(work)

        rig.disk.read = noted
        plan = await cleaner._plan(partition)
        assert (len(reads), plan.due) == (1, True)

    rig.run(story)


def test_a_cleaning_leaves_the_reserve_of_the_disk(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """Rule L16: a cleaning writes as much as it reads before anything is removed."""
    partition = compacted(rig)
    space = partition.writer.space

    async def story() -> None:
        await write(rig, kit, 5)
        space._reserve = 1 << 20
        space.measured((1 << 20) + 40_000, rig.core.env.now_ms)
        assert await cleaner.clean_one(mine)
        assert not mine.jobs
        assert not await cleaner.clean_one(mine)
        told = [facts for event, facts in rig.events if event == "log_not_cleaned"]
        assert len(told) == 1
        assert "disk_reserve_bytes" in told[0]["why"]
        space.measured((1 << 20) + 80_000, rig.core.env.now_ms)
        await rig.mine.clock.sleep_ms(UNCLEANABLE_MS + 1)
        assert await cleaner.clean_one(mine)
        assert partition.log.cleaned.end == 16

    rig.run(story)


@pytest.mark.parametrize("cut", [False, True])
def test_damage_that_a_cleaning_finds_is_reported_like_any_other(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner, cut: bool
) -> None:
    """broker/cleaning K6: unless the log was cut while it was read."""
    partition = compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)
        file = rig.storage.open("topics/t-0/00000000000000000004.log")
        file.write_at(3000, b"damage")
        file.close()

        async def meanwhile() -> None:
            if cut:
                await rig.disk.write(partial(partition.log.truncate_to, 9))

        mine.before = meanwhile
        assert await cleaner.clean_one(mine) is not cut
        for _ in range(100):
            await rig.mine.clock.sleep_ms(10)
        assert [(each.start, each.end) for each in partition.log.damage] == [(4, 8)] * (not cut)
        rig.core.partitions.clear()

    rig.run(story)


def interrupt_a_swap(rig: Any) -> None:
    """Let the disk be full once a swap is decided."""

    def full(operation: str, path: str) -> Exception | None:
        swaps = operation == "rename" and f"{CLEANED} " in path
        return errors.StorageFull("no room") if swaps else None

    rig.storage.fault = full


def test_an_interrupted_swap_is_finished_although_the_log_has_no_other_work(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """broker/cleaning K5: the pass of the cleaner finishes it."""
    partition = compacted(rig)

    async def story() -> None:
        await write(rig, kit, 5)
        interrupt_a_swap(rig)
        assert await cleaner.clean_one(mine)
        assert partition.log.cleaned.pending
        assert not await cleaner.clean_one(mine)
        assert partition.log.cleaned.pending
        rig.storage.fault = None
        assert not await cleaner.clean_one(mine)
        assert not partition.log.cleaned.pending
        assert offsets(partition) == list(range(12, 20))

    rig.run(story)


def test_retention_drops_nothing_while_a_swap_is_pending(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """log/swap W2: a plan that retention makes then is void, too."""
    partition = compacted(rig, cleanup_policy="compact,delete")

    async def story() -> None:
        await write(rig, kit, 5)
        interrupt_a_swap(rig)
        assert await cleaner.clean_one(mine)
        log = partition.log
        plan = log.retention_plan(None, partition.high_watermark)
        first = log.segments[0].base_offset
        plan = plan._replace(drop=(first,), log_start=log.segments[1].base_offset)
        await rig.core.retention._drop(partition, plan)
        assert log.segments[0].base_offset == first
        rig.storage.fault = None

    rig.run(story)


def test_retention_drops_nothing_by_a_plan_from_before_a_swap(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    """A merged segment has the name of one that had expired, and younger records."""
    partition = compacted(rig, cleanup_policy="compact,delete")
    retention = rig.core.retention

    async def story() -> None:
        await write(rig, kit, 5)
        log = partition.log
        plan = log.retention_plan(None, partition.high_watermark)
        plan = plan._replace(drop=(0, 4), log_start=8)
        moved = rig.manager.move_log_starts

        async def clean_first(moves: Any) -> None:
            assert await cleaner.clean_one(mine)
            await moved(moves)

        rig.manager.move_log_starts = clean_first
        await retention._drop(partition, plan)
        assert offsets(partition) == list(range(12, 20))

    rig.run(story)


def test_the_task_cleans_until_nothing_is_due(
    rig: Any, kit: Any, cleaner: LogCleaner, mine: InProcessCleaner
) -> None:
    one, two = compacted(rig), compacted(rig, 1)

    async def story() -> None:
        await write(rig, kit, 5)
        await write(rig, kit, 5, partition=1)
        cleaner.start()
        await rig.mine.clock.sleep_ms(rig.core.env.server["log_cleaner_backoff_ms"] + 1000)
        assert one.log.cleaned.end == two.log.cleaned.end == 16
        await cleaner.close()

    rig.run(story)
