"""The swap of cleaned segments: crashes, readers in between, cuts, full disks (log/swap)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pk import errors
from pk.compaction.cleaning_job import CleaningJob, CleaningResult, swap_of
from pk.log import batch as batches
from pk.log import dump, repair, swap
from pk.log.segment import CLEANED
from pk.log.swap import Replacement, Swap
from pk.sim.disk import Crashed
from tests.kit.cleaned_log import PATH, CleanedLog


def written(count: int = 18) -> tuple[CleanedLog, CleaningJob, CleaningResult]:
    """A log with a cleaning that is written and not in place."""
    log = CleanedLog()
    for n in range(count):
        log.write(1 + n % 2, [(b"a", b"%d" % n), (b"k%d" % (n % 3), b"v" * 50)])
        if n % 8 == 5:
            log.write(3, [(b"a", b"aborted")])
            log.finish(3, commit=False)
    log.roll()
    log.write(0, [(b"tail", b"1")])
    job = log.job()
    result = log.written(job)
    assert any(len(each.replaces) > 1 for each in result.segments)
    return log, job, result


def names(log: CleanedLog) -> list[str]:
    return log.storage.names(PATH)


def test_the_checkpoint_is_readable() -> None:
    made = Swap(70, ".c.cleaned", (Replacement(0, (0, 10)), Replacement(20, (20,))))
    assert swap.decode(swap.encode(made)) == made
    assert swap.decode(swap.encode(Swap(3))) == Swap(3)


def test_a_swap_leaves_only_the_files_of_the_log() -> None:
    log, job, result = written()
    log.put_in_place(job, result)
    assert not [name for name in names(log) if name.endswith(CLEANED)]
    assert len([name for name in names(log) if name.endswith(".log")]) == log.log.segment_count
    rows, raw = log.records(), log.raw()
    log.check()
    assert log.log.flush() == log.log.log_end
    log.reopen()
    assert (log.records(), log.raw()) == (rows, raw)
    assert log.log.cleaned.end == result.end
    log.check()


@pytest.mark.parametrize("power", [False, True])
def test_a_crash_at_any_point_leaves_the_old_log_or_the_new_one(power: bool) -> None:
    """log/swap W1: and every later opening finds the same log."""
    point, states = 0, set()
    while True:
        log, job, result = written()
        log.log.flush()
        old, end = log.raw(), log.log.log_end
        log.storage.crash_at = point
        try:
            log.put_in_place(job, result)
        except Crashed:
            pass
        else:
            break
        if power:
            log.storage.power_loss(random.Random(point))
        else:
            log.storage.crash()
        log.reopen(same_boot=not power)
        assert log.log.log_end == end
        new = log.log.cleaned.end == result.end
        assert log.log.cleaned.end in (0, result.end)
        if not new:
            assert log.raw() == old
        log.first_cleaned_ms = {}
        log.check()
        assert not [name for name in names(log) if name.endswith((CLEANED, ".tmp"))]
        rows = log.raw()
        log.reopen()
        assert log.raw() == rows
        states.add(new)
        point += 2
    assert states == {False, True}
    assert point > 20


def decided() -> tuple[CleanedLog, CleaningResult]:
    """A log whose process died once the checkpoint named the swap."""
    for at in range(100):
        log, job, result = written()
        log.log.flush()
        log.storage.crash_at = at
        with pytest.raises(Crashed):
            log.put_in_place(job, result)
        log.storage.crash()
        if swap.read(log.storage, PATH).replacements:
            return log, result
    raise AssertionError("no swap was decided")


def test_a_crash_while_an_opening_finishes_the_swap() -> None:
    """log/swap W1: the repetition is interrupted, too, again and again."""
    done, point = False, 0
    while not done:
        log, result = decided()
        log.storage.crash_at = point
        try:
            log.reopen()
            done = True
        except Crashed:
            log.storage.crash()
            log.reopen()
        log.storage.crash_at = None
        assert log.log.cleaned.end == result.end
        log.check()
        point += 3
    assert point > 20


def test_readers_in_the_middle_of_a_swap_see_one_log() -> None:
    """log/reading A4: before every operation of the swap a reader reads all of the log."""
    log, job, result = written()
    seen: list[list[int]] = []

    def read(operation: str, path: str) -> None:
        log.storage.fault = None
        seen.append([each.offset for each in log.records()])
        log.check()
        log.log.offset_for_time(log.now_ms, 10**6)
        log.log.bytes_at([0, 10, 30])
        log.storage.fault = read

    old = [each.offset for each in log.records()]
    log.storage.fault = read
    log.put_in_place(job, result)
    log.storage.fault = None
    new = [each.offset for each in log.records()]
    assert old != new
    assert [each for at, each in enumerate(seen) if not at or seen[at - 1] != each] == [old, new]
    assert len(seen) > 20


def test_a_read_during_which_a_swap_begins_is_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """log/reading A4: the reader has the old segments, and the files are the new ones."""
    log, job, result = written()
    made = swap_of(job, result)
    work = log.log.cleaned.begin(made, log.log.cleaned.open_written(made))
    assert work is not None
    index, done = log.log._reader._index, False

    def swap_first(segment: object) -> object:
        nonlocal done
        if not done:
            done = True
            work()
        return index(segment)  # type: ignore[arg-type]

    monkeypatch.setattr(log.log._reader, "_index", swap_first)
    before = log.log.segment_count
    sizes = log.log.bytes_at([8, 20])
    assert sizes == log.log.bytes_at([8, 20])
    read = log.log.read(20, bound=log.log.written_end, max_bytes=1, verify=True)
    assert done
    assert log.log.segment_count < before
    assert read == log.log.read(20, bound=log.log.written_end, max_bytes=1, verify=True)
    assert not batches.read_header(read.data).record_count
    log.log.cleaned.end_job()
    log.check()


def test_a_log_grows_during_a_swap() -> None:
    log, job, result = written()

    def more() -> None:
        for n in range(20):
            log.write(2, [(b"a", b"later%d" % n)])

    log.put_in_place(job, result, meanwhile=more)
    log.check()
    log.reopen()
    log.check()


def test_a_truncation_lowers_the_cleaned_end() -> None:
    """log/swap W4: otherwise new records below it would count as cleaned."""
    log, job, result = written()
    log.put_in_place(job, result)
    at = result.end - 7
    log.log.truncate_to(at)
    end = log.log.cleaned.end
    assert end == log.log.log_end <= at
    for n in range(20):
        log.write(4, [(b"a", b"%d" % n)])
    log.reopen()
    assert (log.log.cleaned.end, log.log.log_end) == (end, end + 20)


def test_a_log_that_begins_again_is_dirty() -> None:
    log, job, result = written()
    log.put_in_place(job, result)
    log.log.reset_to(10)
    assert log.log.cleaned.end <= 10
    log.log.reset_to(1000)
    assert log.plan().first_dirty == 1000


def test_a_truncation_after_the_job_began_waits_for_the_swap() -> None:
    """The loop has not settled the swap when the lane cuts the log."""
    log, job, result = written()
    kept = [each for each in log.every.values() if each.offset < 12]
    log.put_in_place(job, result, meanwhile=lambda: log.log.truncate_to(12))
    assert log.log.log_end <= 12
    log.reopen()
    assert {each.offset for each in log.records()} <= {each.offset for each in kept}


def test_a_cleaning_of_segments_that_are_gone_is_void() -> None:
    log, job, result = written()
    made = swap_of(job, result)
    opened = log.log.cleaned.open_written(made)
    log.log.truncate_to(20)
    assert log.log.cleaned.begin(made, opened) is None
    with pytest.raises(FileNotFoundError):  # the opening after the cut has removed the files
        log.log.cleaned.open_written(made)
    log.log.truncate_to(3)
    assert log.log.cleaned.open_written(made) is None
    swap.discard(log.storage, PATH, job.tail)
    assert not [name for name in names(log) if CLEANED in name]
    log.reopen()
    assert log.log.cleaned.end == 0


def full(after: int) -> Callable[[str, str], Exception | None]:
    """The disk has no room from the n-th operation on."""
    left = [after]

    def refuse(operation: str, path: str) -> Exception | None:
        left[0] -= 1
        writes = operation not in ("read", "remove")
        return errors.StorageFull("no room") if writes and left[0] < 0 else None

    return refuse


def test_a_full_disk_at_any_point_leaves_a_log_that_serves() -> None:
    """log/swap W2: a swap that is decided is finished before the next job."""
    pending = 0
    for point in range(2, 36):
        log, job, result = written()
        made = swap_of(job, result)
        work = log.log.cleaned.begin(made, log.log.cleaned.open_written(made))
        assert work is not None
        log.storage.fault = full(point)
        try:
            work()
            finished = True
        except errors.StorageFull:
            finished = False
        log.log.cleaned.end_job()
        log.storage.fault = None
        log.check()
        if log.log.cleaned.pending:
            pending += 1
            log.log.truncate_to(result.end - 5)
            assert not log.log.cleaned.pending
        elif not finished:
            swap.discard(log.storage, PATH, job.tail)
        end, rows = log.log.log_end, log.records()
        log.reopen()
        assert (log.log.log_end, log.records()) == (end, rows)
        assert not [name for name in names(log) if name.endswith(CLEANED)]
    assert pending


def test_the_checkpoint_can_be_dumped() -> None:
    made = Swap(70, ".c.cleaned", (Replacement(0, (0, 10)),))
    raw = swap.encode(made)
    kind = dump.kind_of(swap.FILE)
    assert kind is not None
    assert list(dump.dump(kind, lambda at, size: raw[at : at + size], len(raw))) == [
        {"cleaned_end": 70},
        {"swap": ".c.cleaned", "base_offset": 0, "replaces": (0, 10)},
    ]


def test_removed_offsets_are_no_damage_for_a_repair() -> None:
    log, job, result = written()
    log.put_in_place(job, result)
    log.log.close()
    assert repair.look(log.storage, PATH, trusted=True, floor=log.log.log_end) == []


def interrupted() -> tuple[CleanedLog, CleaningResult]:
    """A log with a swap that a full disk interrupted after it was decided."""
    for point in range(2, 36):
        log, job, result = written()
        made = swap_of(job, result)
        work = log.log.cleaned.begin(made, log.log.cleaned.open_written(made))
        assert work is not None
        log.storage.fault = full(point)
        with pytest.raises(errors.StorageFull):
            work()
        log.log.cleaned.end_job()
        if log.log.cleaned.pending:
            return log, result
    raise AssertionError("no swap was interrupted")


def test_a_pending_swap_counts_as_running() -> None:
    """log/swap W2: retention and the next cleaning wait for it."""
    log, _ = interrupted()
    assert log.log.cleaned.running
    assert log.log.cleaned.begin(Swap(0), {}) is None
    with pytest.raises(errors.StorageFull):
        log.log.cleaned.finish()
    assert log.log.cleaned.running
    log.storage.fault = None
    log.log.cleaned.finish()
    assert not log.log.cleaned.running


@pytest.mark.parametrize("what", ["append", "drop", "flush", "checkpoint", "cut", "reset", "close"])
def test_a_pending_swap_is_finished_before_any_other_job(what: str) -> None:
    log, result = interrupted()
    drop = log.log.drop_segments(log.log.retention_plan(None))[0]
    log.storage.fault = None
    if what == "append":
        log.write(0, [(b"a", b"1")])
    elif what == "drop":
        drop()
    else:
        jobs: dict[str, Callable[[], object]] = {
            "flush": log.log.flush,
            "checkpoint": log.log.checkpoint,
            "cut": lambda: log.log.truncate_to(result.end),
            "reset": lambda: log.log.reset_to(5),
            "close": log.log.close,
        }
        jobs[what]()
    assert not log.log.cleaned.pending
    assert not swap.read(log.storage, PATH).replacements
    assert not [name for name in names(log) if name.endswith(CLEANED)]


@pytest.mark.parametrize("seed", range(20))
def test_a_power_loss_does_not_take_the_newer_record_of_a_removed_one(seed: int) -> None:
    """log/swap W5: the newer record may lie in a segment that no cleaning wrote."""
    log = CleanedLog()
    log.write(0, [(b"a", b"old")])
    log.roll()
    log.log.flush()
    log.write(0, [(b"a", b"new"), (b"b", b"large" * 90)])
    log.roll()
    log.write(0, [(b"tail", b"1")])
    result = log.clean()
    assert [tuple(each.replaces) for each in result.segments] == [(0,)]
    log.storage.power_loss(random.Random(seed))
    log.reopen(same_boot=False)
    assert (b"a", b"new") in [(each.key, each.value) for each in log.records()]


def test_a_cut_waits_until_the_result_of_a_swap_is_taken_over() -> None:
    """log/swapping: otherwise the loop and the write lane replace the segments at once."""
    log, job, result = written()
    made = swap_of(job, result)
    work = log.log.cleaned.begin(made, log.log.cleaned.open_written(made))
    assert work is not None
    called: list[int] = []
    work()
    log.log.cleaned.when_taken_over(lambda: called.append(log.log.segment_count))
    assert not called
    log.log.cleaned.end_job()
    assert called == [log.log.segment_count]
    log.log.cleaned.when_taken_over(lambda: called.append(0))
    assert called[1:] == [0]
