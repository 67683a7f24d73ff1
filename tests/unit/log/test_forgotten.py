"""What a compacted log remembers about removed tombstones, and about a cut (log/forgotten)."""

from __future__ import annotations

import random

import pytest

from pk.log import dump, forgotten, swap
from pk.log.forgotten import Forgotten
from pk.log.swap import Swap
from pk.sim.disk import Crashed, SimStorage
from tests.kit.cleaned_log import PATH, RETENTION_MS, CleanedLog


def with_old_tombstone() -> CleanedLog:
    """A log whose next cleaning removes the tombstone at offset 1."""
    log = CleanedLog()
    log.write(0, [(b"a", b"1")])
    log.write(0, [(b"a", None)])
    log.write(0, [(b"b", b"1")])
    log.roll()
    log.clean()
    assert log.log.cleaned.forgotten_end == 0
    log.now_ms += 100_000 + RETENTION_MS
    log.write(0, [(b"c", b"1")])
    log.roll()
    log.log.flush()
    return log


def tombstones(log: CleanedLog) -> list[int]:
    return [each.offset for each in log.records() if each.value is None]


@pytest.mark.parametrize(
    "found", [Forgotten(), Forgotten(7, 9), Forgotten(0, 0, incomplete=True), Forgotten(3, 2, True)]
)
def test_the_checkpoint_is_readable(found: Forgotten) -> None:
    raw = forgotten.encode(found)
    assert forgotten.decode(raw) == found
    kind = dump.kind_of(forgotten.FILE)
    assert kind is not None
    assert list(dump.dump(kind, lambda at, size: raw[at : at + size], len(raw))) == [
        found._asdict()
    ]


def test_the_file_of_a_log_is_as_it_was_stored_by_the_first_build() -> None:
    """Rule L21: another build reads these bytes."""
    raw = b"pk forgotten-offset-checkpoint 0\nforgotten_end 21 40\nincomplete\n"
    raw += b"crc32c 1b85eba3\n"
    assert forgotten.encode(Forgotten(21, 40, incomplete=True)) == raw


@pytest.mark.parametrize(
    ("stored", "cleaned_end", "end"),
    [
        (None, 0, 0),
        (None, 30, 30),  # an earlier build cleaned the log
        (Forgotten(5, 30), 30, 5),
        (Forgotten(5, 20), 30, 30),  # an earlier build cleaned it since
        (Forgotten(50, 0), 30, 50),  # copied from a log that had forgotten more
    ],
)
def test_logs_of_earlier_builds_have_forgotten_all_that_they_cleaned(
    stored: Forgotten | None, cleaned_end: int, end: int
) -> None:
    """log/forgotten H2: they removed tombstones and noted nothing."""
    storage = SimStorage()
    storage.make_dir(PATH)
    if stored is not None:
        forgotten.write(storage, PATH, stored)
    assert forgotten.read(storage, PATH, cleaned_end).forgotten_end == end


def test_the_highest_removed_tombstone_is_remembered() -> None:
    log = with_old_tombstone()
    assert tombstones(log) == [1]
    log.clean()
    assert tombstones(log) == []
    assert log.log.cleaned.forgotten_end == 2
    assert log.reopen().cleaned.forgotten_end == 2


def test_the_highest_removed_marker_is_remembered() -> None:
    """A replica with the records of the transaction and without the marker would keep it open."""
    log = CleanedLog()
    log.write(0, [(b"z", b"1")])
    log.write(3, [(b"a", b"1")])
    log.finish(3, commit=True)  # at 2
    log.write(3, [(b"a", b"2")])
    log.finish(3, commit=True)  # at 4: its epoch is the current one, and it stays
    log.write(0, [(b"a", b"3")])
    log.roll()
    log.clean()
    log.now_ms += 100_000 + RETENTION_MS
    log.write(0, [(b"c", b"1")])
    log.roll()
    log.clean()
    assert log.log.cleaned.forgotten_end == 3


@pytest.mark.parametrize("power", [False, True])
def test_no_crash_makes_a_log_forget_what_it_forgot(power: bool) -> None:
    """log/forgotten H1: the file is SYNCED before the swap is decided."""
    point, seen = 0, set()
    while True:
        log = with_old_tombstone()
        job = log.job()
        result = log.written(job)
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
        removed = not tombstones(log)
        assert not removed or log.log.cleaned.forgotten_end == 2
        seen.add(removed)
        point += 1
    assert seen == {False, True}


@pytest.mark.parametrize(
    ("offset", "known", "hidden"),
    [(0, 0, True), (0, 2, False), (1, 0, True), (1, 2, False), (2, 0, False), (0, None, False),
     (1, None, True)],
)  # fmt: skip
def test_which_logs_may_have_records_of_removed_tombstones(
    offset: int, known: int | None, hidden: bool
) -> None:
    log = with_old_tombstone()
    log.clean()
    assert log.log.cleaned.hides_from(offset, known) is hidden


def test_a_log_begun_again_takes_over_what_its_leader_forgot() -> None:
    """log/forgotten H3: once it is empty; until then it is begun again at the next start."""
    log = with_old_tombstone()
    log.log.reset_to(0, forgotten_end=17)
    assert log.log.cleaned.forgotten_end == 17
    assert log.reopen().cleaned.forgotten_end == 17
    point = 0
    while True:
        log = with_old_tombstone()
        log.storage.crash_at = point
        try:
            log.log.reset_to(0, forgotten_end=17)
        except Crashed:
            pass
        else:
            break
        log.storage.crash()
        log.reopen()
        assert log.log.log_end == 0 or log.log.cleaned.forgotten_end == 0
        point += 1
    assert point > 5


def test_a_cut_below_the_cleaned_end_makes_the_log_incomplete() -> None:
    """log/swap W4: also if the process dies before the end of the cut."""
    point = 0
    while True:
        log = with_old_tombstone()
        log.storage.crash_at = point
        try:
            log.log.truncate_to(1)
        except Crashed:
            pass
        else:
            break
        log.storage.crash()
        log.reopen()
        assert log.log.cleaned.incomplete is (log.log.log_end < 3)
        point += 1
    log.storage.crash_at = None
    assert log.log.cleaned.incomplete
    assert log.log.cleaned.end == log.log.log_end
    assert log.reopen().cleaned.incomplete
    log.log.reset_to(0)
    assert not log.log.cleaned.incomplete
    assert not log.reopen().cleaned.incomplete


def test_an_opening_notes_that_the_log_is_incomplete() -> None:
    log = with_old_tombstone()
    swap.write(log.storage, PATH, Swap(100))
    assert [note for note in log.reopen().notes if note.startswith("W4")]
    assert log.log.cleaned.incomplete
