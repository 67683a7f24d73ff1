"""The first segments of a log are missing: the range is known, and the rest is served (rule L9)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pk import errors
from pk.log import damage, repair
from pk.log.directory import LOCAL_STARTS, LOG_STARTS
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.log.plan import RetentionPlan
from pk.log.segment import LOG, base_offset_of
from pk.sim.disk import Crashed
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run

PATH = "topics/t-0"
DAY_MS = 86_400_000
CONFIG_OF_A_DAY = replace(CONFIG, retention_ms=DAY_MS)


async def filled(house: House, count: int = 60) -> LogManager:
    """Return a log of some segments, checkpointed."""
    manager = await house.opened()
    await manager.create(TP, "tid", CONFIG)
    for _ in range(count // 10):
        await append(manager, KEY, 10)
    await manager.checkpoint()
    return manager


def of(manager: LogManager) -> PartitionLog:
    log = manager.get(KEY)
    assert log is not None
    return log


def bases(house: House) -> list[int]:
    names = house.storages[0].list(PATH)
    return sorted(base for name in names if (base := base_offset_of(name)) is not None)


def lose(house: House, count: int) -> int:
    """Remove the first segments; return where the log begins then."""
    found = bases(house)
    for base in found[:count]:
        house.storages[0].remove(f"{PATH}/{base:020}{LOG}")
    return found[count]


def lost_at(log: PartitionLog, offset: int) -> tuple[int, int]:
    """Return the range that a reader of `offset` gets as lost."""
    with pytest.raises(errors.DataLoss) as told:
        log.read(offset, bound=log.written_end, max_bytes=10**6)
    return int(told.value.details["offset"]), int(told.value.details["next_offset"])


def readable(log: PartitionLog, offset: int) -> bool:
    while offset < log.written_end:
        offset = log.read(offset, bound=log.written_end, max_bytes=10**6, verify=True).next_offset
    return True


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("count", "log_start"), [(1, 0), (2, 0), (1, 5)])
def test_what_is_missing_in_front_is_a_damaged_range(
    clean: bool, count: int, log_start: int
) -> None:
    """The range ends at the first remaining segment; it stays known over restarts until it is
    repaired.
    """

    async def main() -> None:
        house = House()
        manager = await filled(house)
        await manager.move_log_starts({KEY: log_start})
        await manager.close(clean)
        begins = lose(house, count)
        log = of(await house.opened())
        assert log.absent is not None
        assert (log.absent.start, log.absent.end) == (log_start, begins)
        log.accept_missing(log_start)()
        assert (log.absent, log.local_log_start) == (None, log_start)
        for offset in (log_start, begins - 1):
            assert lost_at(log, offset) == (log_start, begins)
        assert readable(log, begins)
        assert (log.log_start, log.written_end) == (log_start, 60)
        house.storages[0].crash()
        manager = await house.opened()
        log = of(manager)
        assert (log.absent, log.log_start) == (None, log_start)
        assert [each[:2] for each in log.damage] == [(log_start, begins)]
        await append(manager, KEY, 1)
        assert readable(log, begins)
        await manager.close()
        storage = house.storages[0]
        found = repair.look(storage, PATH, trusted=True, floor=61)
        assert [each.damage[:2] for each in found] == [(log_start, begins)]
        repair.go_past(storage, PATH, found)
        log = of(await house.opened())
        assert (log.damage, log.absent) == ([], None)
        assert (log.local_log_start, log.written_end) == (log_start, 61)
        assert readable(log, log_start)

    run(main)


def test_repair_needs_no_start_of_the_broker() -> None:
    async def main() -> None:
        house = House()
        await (await filled(house)).close()
        begins = lose(house, 2)
        storage = house.storages[0]
        assert repair.look(storage, PATH, trusted=True, floor=60) == []
        (found,) = repair.look(storage, PATH, trusted=True, floor=60, local_start=0)
        assert found.damage[:2] == (0, begins)
        repair.go_past(storage, PATH, [found])
        assert bases(house)[:2] == [0, begins]
        log = of(await house.opened())
        assert (log.absent, log.local_log_start) == (None, 0)
        assert readable(log, 0)

    run(main)


def test_a_log_without_any_segment_is_repaired_up_to_where_it_ended() -> None:
    """Until then it is offline: everything that was flushed is missing."""

    async def main() -> None:
        house = House()
        await (await filled(house)).close()
        for base in bases(house):
            house.storages[0].remove(f"{PATH}/{base:020}{LOG}")
        manager = house.manager()
        await manager.open()
        ((key, problem),) = await manager.load(lambda *_: CONFIG)
        assert key == KEY
        assert isinstance(problem, errors.CorruptLog)
        assert "pk log repair to go on without offsets [0, 60)" in problem.message
        await manager.close(clean=False)
        storage = house.storages[0]
        (found,) = repair.look(storage, PATH, trusted=True, floor=60, local_start=0)
        assert found.damage[:2] == (0, 60)
        repair.go_past(storage, PATH, [found])
        log = of(await house.opened())
        assert (log.local_log_start, log.written_end) == (0, 60)

    run(main)


def test_a_later_part_of_what_is_missing_may_be_all_that_is_lost() -> None:
    """The table has the other records (server/replica/corruption.py)."""

    async def main() -> None:
        house = House()
        await (await filled(house)).close()
        begins = lose(house, 2)
        log = of(await house.opened())
        log.tiered_end = log.droppable_end = begins
        log.accept_missing(7)()
        assert (log.local_log_start, log.tiered_end, log.droppable_end) == (7, 7, 7)
        assert lost_at(log, 8) == (7, begins)

    run(main)


def test_retention_passes_the_range_with_what_is_behind_it() -> None:
    """The range is at least as old; otherwise no later record would ever be deleted."""

    async def main() -> None:
        house = House()
        await (await filled(house)).close()
        lose(house, 1)
        log = of(await house.opened())
        log.accept_missing(0)()
        first = log.segments[1]
        log.config = CONFIG_OF_A_DAY
        early = log.retention_plan(first.max_timestamp + DAY_MS)
        assert early.drop == ()
        late = log.retention_plan(first.max_timestamp + DAY_MS + 1)
        assert late.drop[:2] == (0, first.base_offset)
        for job in log.drop_segments(late):
            job()
        assert log.damage == []
        assert 0 not in bases(house)

    run(main)


# -- no false alarm --------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [LOG_STARTS, LOCAL_STARTS])
def test_without_its_checkpoints_nothing_is_called_missing(lost: str) -> None:
    async def main() -> None:
        house = House()
        await (await filled(house)).close()
        lose(house, 1)
        house.storages[0].rot(lost, 40, 1)
        assert of(await house.opened()).absent is None

    run(main)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("story", ["dropped", "begun anew"])
def test_a_log_that_was_made_shorter_in_front_misses_nothing(story: str, power: bool) -> None:
    """Wherever the process dies: the checkpoint is SYNCED before the first segment is removed."""

    async def dropped(manager: LogManager) -> None:
        log = of(manager)
        log.tiered_end = log.droppable_end = 40
        gone = tuple(each.base_offset for each in log.segments if each.next_offset <= 40)
        await manager.move_log_starts({KEY: 0})
        for job in log.drop_segments(RetentionPlan(0, gone, False)):
            await manager.disk_of(KEY).write(job)

    async def begun_anew(manager: LogManager) -> None:
        await manager.start_anew(KEY, 100, log_start=20)

    async def main() -> None:
        for step in range(200):
            house = House(seed=step)
            manager = await filled(house)
            storage, done = house.storages[0], False
            storage.crash_at = step
            try:
                await (dropped if story == "dropped" else begun_anew)(manager)
                done = True
            except Crashed:
                pass
            if power:
                storage.power_loss(random.Random(step))
            else:
                storage.crash()
            log = of(await house.opened(boot_id="boot-2" if power else "boot-1"))
            assert log.absent is None, step
            if done:
                assert log.local_log_start > 0
                assert step > 3
                return
        raise AssertionError("it never ended")

    run(main)


def test_nothing_is_missing_of_a_log_that_begins_in_time() -> None:
    assert damage.missing_in_front(10, 10) is None
    assert damage.missing_in_front(10, 3) is None
    found = damage.missing_in_front(10, 11)
    assert found is not None
    assert found[:2] == (10, 11)


@pytest.mark.parametrize("opened", [True, False])
def test_a_log_that_a_full_disk_keeps_in_place_still_lacks_its_front(opened: bool) -> None:
    """A rebuild gives the log up, and its directory cannot be renamed.  The next opening must not
    take the first file that is left for the beginning of the log.
    """

    async def main() -> None:
        house = House()
        await (await filled(house)).close()
        begins = lose(house, 1)
        manager = house.manager()
        await manager.open()
        if opened:
            await manager.load(lambda topic_id, tp: CONFIG)
        house.storages[0].fault = lambda operation, path: (
            errors.StorageFull("full") if operation == "rename" and "-delete" in path else None
        )
        with pytest.raises(errors.StorageFull):
            await manager.set_aside(TP, "tid", 0)
        await manager.checkpoint()
        house.storages[0].fault = None
        log = of(manager) if manager.get(KEY) else await manager.create(TP, "tid", CONFIG)
        assert log.absent is not None
        assert (log.absent.start, log.absent.end) == (0, begins)
        await manager.close()
        again = await house.opened()
        assert of(again).absent == log.absent
        await again.set_aside(TP, "tid", 0)
        assert (await again.create(TP, "tid", CONFIG)).log_end == 0
        await again.close()

    run(main)
