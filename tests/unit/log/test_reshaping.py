"""A log that is truncated or started again: after a write that failed, beside a flush, and when the
process dies in the middle of it.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import loading, writing
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.log.plan import RetentionPlan
from pk.log.storage import Storage
from pk.sim.disk import Crashed
from tests.unit.log.conftest import Bench, make_batch
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


def _fails_behind_a_roll(bench: Bench) -> None:
    """Return a log whose new segment is on the disk with a batch, while the plan that began it is
    undone.
    """
    roll = bench.log.segment_count
    bench.log.roll()
    bench.decide(make_batch(3, 100))
    bench.decide(make_batch(3, 100), epoch=1)  # its epoch comes after the first batch
    bench.storage.fault = lambda operation, path: (
        errors.StorageFull("full") if "leader-epoch" in path else None
    )
    assert bench.write().error is not None
    bench.storage.fault = None
    assert bench.log.segment_count == roll


def test_a_cut_carries_out_the_repair_that_is_due() -> None:
    bench = Bench()
    bench.fill(8)
    _fails_behind_a_roll(bench)
    bench.log.truncate_to(6)
    assert bench.values(0) == [0, 1, 2, 3, 4, 5]
    bench.fill(2)
    bench.open()
    assert bench.log.written_end == 8


def test_a_new_beginning_carries_out_the_repair_that_is_due() -> None:
    """Otherwise the undone records would be the new log."""
    bench = Bench()
    bench.fill(8)
    _fails_behind_a_roll(bench)
    bench.log.reset_to(9)
    assert (bench.log.local_log_start, bench.log.written_end) == (9, 9)


def test_sealed_segments_are_flushed_beside_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that is truncated after its flush does not count any more."""
    bench = Bench()
    bench.fill(30)
    assert bench.log.segment_count > 2
    sync = writing._sync_segment

    def meanwhile(storage: Storage, segment: Any) -> None:
        monkeypatch.setattr(writing, "_sync_segment", sync)
        sync(storage, segment)
        bench.log.truncate_to(3)

    monkeypatch.setattr(writing, "_sync_segment", meanwhile)
    bench.log.flush_sealed()
    assert bench.log.checkpoint() == 3
    assert bench.log.synced_end == bench.log.written_end == 3


def test_a_cut_between_a_flush_of_sealed_segments_and_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flush runs beside the lane.  At whatever step a truncation comes, the end that the flush
    reached does not count; otherwise the next opening would miss truncated records.
    """
    bench = Bench()
    bench.fill(30)
    bench.log.flush_sealed()
    assert bench.log.synced_end == 0, "not said beside the lane"
    bench.log.truncate_to(3)
    bench.log.flush_sealed()
    assert bench.log.checkpoint() == bench.log.synced_end == bench.log.written_end == 3
    bench.fill(30)
    load = loading.load

    def amid(*given: Any, **options: Any) -> Any:
        bench.log.flush_sealed()
        return load(*given, **options)

    monkeypatch.setattr(loading, "load", amid)
    bench.log.truncate_to(5)
    assert bench.log.checkpoint() == bench.log.synced_end == bench.log.written_end == 5
    bench.fill(30)
    bench.log.flush_sealed()
    assert bench.log.checkpoint() == bench.log.segments[-1].base_offset > 5


@pytest.mark.parametrize("behind", [0, 4])
def test_dying_while_it_begins_anew_where_it_ended_does_not_shorten_it(behind: int) -> None:
    """Rule R5 for a member of the ISR: it may lead next, and no offset is assigned twice."""
    for at in range(200):
        bench = Bench()
        bench.fill(30)
        bench.log.flush()
        offset = 30 - behind
        bench.storage.crash_at = at
        try:
            bench.log.reset_to(offset)
        except Crashed:
            bench.storage.crash()
            bench.open()
            assert bench.log.written_end >= offset, at
            continue
        assert (bench.log.local_log_start, bench.log.written_end) == (offset, offset)
        assert at > 5
        return
    raise AssertionError("it never ended")


async def _begun_anew(step: int, power: bool, filled: int, given: bytes) -> tuple[LogManager, bool]:
    """Open a copy of `filled` records that was to start again at 20 and died in its n-th operation,
    if it had as many.
    """
    house = House(seed=step)
    manager = await house.opened()
    await manager.create(TP, "tid", CONFIG)
    await append(manager, KEY, filled)
    await manager.checkpoint()
    house.storages[0].crash_at, done = step, False
    try:
        await manager.start_anew(KEY, 20, given, log_start=20)
        done = True
    except Crashed:
        pass
    storage = house.storages[0]
    if power:
        storage.power_loss(random.Random(step))
        return await house.opened(boot_id="boot-2"), done
    storage.crash()
    return await house.opened(), done


@pytest.mark.parametrize("filled", [10, 30])
@pytest.mark.parametrize("power", [False, True])
def test_who_dies_while_it_begins_anew_has_nothing_below_it(power: bool, filled: int) -> None:
    """Rule R5: a log start below the first segment would promise records that no tier has.  A log
    that begins there knows the producers, because its leader takes it for a log that agrees.
    """
    given = _written_by_one(20).producers.snapshot(20)

    async def main() -> None:
        for step in range(200):
            manager, done = await _begun_anew(step, power, filled, given)
            log = manager.get(KEY)
            assert log is not None
            assert log.log_start >= log.segments[0].base_offset, step
            assert power or log.written_end >= min(filled, 20), step
            if log.segments[0].base_offset == 20:
                assert log.producers.snapshot(20) == given, step
            if done:
                assert (log.log_start, log.written_end) == (20, 20)
                assert step > 10
                return
        raise AssertionError("it never ended")

    run(main)


@pytest.mark.parametrize("clean", [True, False])
def test_who_began_anew_where_it_was_told_is_not_blank(clean: bool) -> None:
    """log/loading O2: no records were written below; the replica may be in the ISR, and must not
    start again.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 10)
        await manager.start_anew(KEY, 20, log_start=20)
        await manager.close(clean)
        manager = await house.opened()
        log = manager.get(KEY)
        assert log is not None
        assert (log.written_end, log.blank) == (20, False)

    run(main)


def test_a_cut_syncs_the_sealed_segments_it_keeps() -> None:
    """Rule L1: the synced end covers them, and so does the next recovery point."""
    bench = Bench()
    bench.fill(30)
    sealed = [segment.path() for segment in bench.log._local.segments[:-1]]
    assert len(sealed) > 1
    assert bench.log.synced_end == 0
    bench.log.truncate_to(28)
    assert bench.log.synced_end == 28
    for path in sealed:
        assert bench.storage.synced_bytes(path) == len(bench.storage.peek(path)), path
    bench.storage.power_loss()
    bench.open(same_boot=False, recovery_point=28)
    assert bench.values(0) == list(range(28))


@pytest.mark.parametrize("dies", [True, False])
def test_an_epoch_whose_first_batch_was_not_stored_does_not_come_back(dies: bool) -> None:
    """The file of epochs is SYNCED before that batch is written.  Records of an older epoch, from
    another leader's log, may be appended above the start of the epoch (KIP-101).
    """
    bench = Bench()
    bench.fill(3)
    bench.storage.fault = lambda operation, path: (
        errors.StorageFull("full") if operation == "append" and path.endswith(".log") else None
    )
    bench.decide(make_batch(1, 100), epoch=5)
    assert bench.write().error is not None
    bench.storage.fault = None
    assert b"\n5 3\n" in bench.storage.peek("topics/t-0/leader-epoch-checkpoint")
    if dies:
        bench.storage.crash()
        bench.open()
    for offset in range(3, 6):
        raw = b"".join(batches.patched(make_batch(1, 100), offset, 0, None))
        bench.log.append_as_follower(batches.check(raw), raw, now_ms=0)
        assert bench.write().error is None
    bench.log.close(clean=False)
    bench.open()
    assert bench.log.written_end == 6
    assert bench.log.epochs.entries == ((0, 0),)


@pytest.mark.parametrize("begins", [0, 30])
def test_dying_while_it_begins_anew_where_it_ended_forgets_no_producers(begins: int) -> None:
    """Rule R5: the replica may lead next, and a retry is stored once."""
    for at in range(200):
        bench, given = Bench(), _written_by_one(30).producers.snapshot(30)
        if begins:
            bench.log.reset_to(begins, given)
            bench.append(make_batch(2, 100))
        else:
            bench.log = _written_by_one(30, bench)
        bench.storage.crash_at = at
        try:
            bench.log.reset_to(30, given)
        except Crashed:
            bench.storage.crash()
            bench.open(log_start=begins)
            assert bench.log.producers.snapshot(30) == given, at
            continue
        assert bench.log.producers.snapshot(30) == given
        return
    raise AssertionError("it never ended")


def _written_by_one(count: int, bench: Bench | None = None) -> PartitionLog:
    bench = bench or Bench()
    for sequence in range(count):
        rows = make_batch(1, 100, producer_id=9, producer_epoch=0, base_sequence=sequence)
        bench.append(rows)
    return bench.log


async def _reshape(manager: LogManager, end: int) -> None:
    if end > 50:
        await manager.start_anew(KEY, end, log_start=end)
    else:
        await manager.cut(KEY, end)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("end", [12, 45, 60])  # 60: the log starts again
def test_a_disk_that_is_full_half_way_is_no_damage(end: int, power: bool) -> None:
    """A truncation that touched nothing is tried again.  A log that was touched is left alone until
    it is opened again, and no checkpoint names it; otherwise its state would be reported as damage.
    """

    async def attempt(step: int) -> bool | None:
        """The disk is full from that operation on.  Whether the log was torn; None = no failure."""
        house = House(seed=step)
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 50)
        await manager.checkpoint()
        storage, steps = house.storages[0], 0

        def full(operation: str, path: str) -> Exception | None:
            nonlocal steps
            steps += 1
            return errors.StorageFull("full") if steps > step else None

        storage.fault = full
        try:
            await _reshape(manager, end)
            return None
        except errors.StorageFull:
            torn = log.torn
        finally:
            storage.fault = None
        if not torn:
            await _reshape(manager, end)
        await manager.checkpoint()
        await manager.checkpoint_log_starts()
        if power:
            storage.power_loss(random.Random(step))
            again = await house.opened(boot_id="boot-2")
        else:
            await manager.close()
            again = await house.opened()
        opened = again.get(KEY)
        assert opened is not None
        assert opened.log_start >= opened.segments[0].base_offset, step
        assert torn or opened.written_end == end, step
        return torn

    async def main() -> None:
        found = []
        while (torn := await attempt(len(found))) is not None:
            found.append(torn)
        assert found.count(False) >= 2 or end == 45  # no checkpoint is to be lowered
        assert found.count(True) >= 2

    run(main)


def _facts(log: PartitionLog) -> tuple[Any, ...]:
    end = log.written_end
    bases = [each.base_offset for each in log.segments]
    return bases, log.log_start, end, log.epochs.entries, log.producers.snapshot(end), log.blank


@pytest.mark.parametrize("end", [12, 45, 60])  # 60: the log starts again
def test_a_log_that_was_left_half_way_is_opened_once_there_is_room(end: int) -> None:
    """It is opened as at a start of the process, and not earlier; then it is an ordinary log."""

    async def attempt(step: int, later: int) -> bool | None:
        """The disk is full from an operation on, in the second try from a later one.  Whether that
        was not late enough; None = the log was never torn.
        """
        house = House(seed=step)
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 50)
        await manager.checkpoint()
        storage, left = house.storages[0], step

        def full(operation: str, path: str) -> Exception | None:
            nonlocal left
            left -= 1
            return errors.StorageFull("full") if left < 0 else None

        storage.fault = full
        with contextlib.suppress(errors.StorageFull):
            await _reshape(manager, end)
        if not log.torn:
            return None
        left, again = later, False
        try:
            await manager.reopen(KEY)
        except errors.StorageFull:
            again = True
        assert log.torn == again
        storage.fault = None
        if again:
            await manager.checkpoint()
            twin = House()
            twin.storages = [copy.deepcopy(storage)]
            twin.storages[0].crash()
            other = (await twin.opened()).get(KEY)
            await manager.reopen(KEY)
            assert other is not None
            assert _facts(log) == _facts(other)
        assert log.synced_end == log.written_end
        assert log.written_end >= end or end > 50
        assert all(each < end for _, each in log.epochs.entries)
        await _reshape(manager, end)
        assert (log.written_end, log.log_start) == (end, end if end > 50 else 0)
        await append(manager, KEY, 3)
        assert len(log.read(log.log_start, bound=end + 3, max_bytes=1 << 20).data) > 0
        log.flush()
        await manager.checkpoint()
        storage.power_loss(random.Random(step))
        opened = (await house.opened(boot_id="boot-2")).get(KEY)
        assert opened is not None
        assert opened.written_end == end + 3
        return again

    async def main() -> None:
        torn = 0
        for step in range(2, 52, 3):
            for later in range(0, 40, 3):
                found = await attempt(step, later)
                torn += found is not None
                if not found:
                    break
        assert torn > 3

    run(main)


def test_a_log_begun_anew_has_its_start_at_once() -> None:
    """Rule T9: a checkpoint that is written just then, or when the broker stops, would otherwise
    give the start of the local log as the log start, and the tier's records below would be deleted.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 50)
        reset_to, seen = log.reset_to, []

        def noted(*given: Any, **more: Any) -> None:
            reset_to(*given, **more)
            seen.append(log.log_start)

        log.reset_to = noted  # type: ignore[method-assign]
        await manager.start_anew(KEY, 60, log_start=20)
        assert (seen, log.log_start, log.local_log_start) == ([20], 20, 60)
        await manager.close()
        again = await house.opened()
        opened = again.get(KEY)
        assert opened is not None
        assert (opened.log_start, opened.local_log_start) == (20, 60)
        await again.close()

    run(main)


@pytest.mark.parametrize("then", ["drop", "cut", "anew"])
@pytest.mark.parametrize("at", ["rename", "remove"])
def test_what_a_full_disk_kept_of_dropped_segments_leaves_no_hole(at: str, then: str) -> None:
    """In a full directory a new name takes a block, too: older segments are renamed before later
    ones.
    """
    bench = Bench()
    bench.fill(40, records=3)
    log = bench.log
    bases = [each.base_offset for each in log.segments]
    assert len(bases) > 5

    def drop(count: int) -> None:
        log.advance_log_start(bases[count])
        for job in log.drop_segments(RetentionPlan(bases[count], tuple(bases[:count]), False)):
            job()

    bench.storage.fault = lambda operation, path: (
        errors.StorageFull("full") if operation == at and f"{bases[1]:020}" in path else None
    )
    with pytest.raises(errors.StorageFull):
        drop(3)
    bench.storage.fault = None
    if then == "drop":
        drop(4)
    elif then == "cut":
        log.truncate_to(bases[4])
    else:
        log.reset_to(500)
    end, first = log.written_end, log.segments[0].base_offset
    expected = {"drop": (bases[4], 120), "cut": (bases[3], bases[4]), "anew": (500, 500)}
    assert (first, end) == expected[then]
    bench.storage.crash()
    bench.open(log_start=log.log_start, recovery_point=log.synced_end)
    assert (bench.log.segments[0].base_offset, bench.log.written_end) == (first, end)


@pytest.mark.parametrize("died", [False, True])
def test_a_log_that_was_left_without_a_segment_is_not_damaged(died: bool) -> None:
    """log/manager M2: its records were given up, so neither a start nor a later opening takes
    flushed records for missing.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await manager.start_anew(KEY, 32, log_start=32)
        await append(manager, KEY, 50)
        await manager.checkpoint()
        storage = house.storages[0]
        storage.fault = lambda operation, path: (
            errors.StorageFull("full") if operation == "create" and "epoch" in path else None
        )
        with pytest.raises(errors.StorageFull):
            await manager.start_anew(KEY, 200, log_start=150)
        storage.fault = None
        assert log.torn
        if died:
            storage.crash()
            manager = await house.opened()
        else:
            await manager.reopen(KEY)
        opened = manager.get(KEY)
        assert opened is not None
        assert opened.written_end <= 150
        await manager.start_anew(KEY, 200, log_start=150)
        assert (opened.log_start, opened.local_log_start) == (150, 200)
        await manager.close()

    run(main)
