"""The life of a partition log on a simulated disk: truncation, retention, opening."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.log.plan import Duplicate

NOW = 1_700_000_000_000
Make = Callable[..., Any]  #: conftest.Bench


def raw_batch(count: int = 1, size: int = 100, **options: Any) -> bytes:
    options.setdefault("default_timestamp", NOW)
    return b"".join(columns.encode_lists([b"v" * size] * count, **options))


def produced(sequence: int, count: int = 1, **options: Any) -> bytes:
    return raw_batch(count, producer_id=9, producer_epoch=0, base_sequence=sequence, **options)


# -- truncation, retention -------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 2, 7, 8, 12, 19, 20, 30])
def test_truncation(bench: Make, offset: int) -> None:
    b = bench(segment_bytes=600)
    for number in range(10):
        b.append(produced(2 * number, 2), epoch=number // 4)
    b.log.truncate_to(offset)
    end = min(20, offset - offset % 2)
    assert b.log.written_end == b.log.log_end == end
    assert b.log.synced_end == (end if offset < 20 else 0)
    assert b.values(0) == list(range(end))
    assert all(start < max(end, 1) for _, start in b.log.epochs.entries)
    if end:
        assert isinstance(b.decide(produced(end - 2, 2), epoch=9), Duplicate)
    b.append(produced(end, 2), epoch=9)
    b.log.close(clean=False)
    b.open()
    assert b.values(0) == list(range(end + 2))


def test_producers_read_back_after_a_truncation_do_not_expire(bench: Make) -> None:
    """L6: the time of their last batch still counts; otherwise a retry is stored twice."""
    b = bench()
    for number in range(3):
        b.append(produced(number))
    newest = b.log.producers.newest_ms
    b.log.truncate_to(2)
    assert b.log.producers.newest_ms == newest > 0
    assert b.log.producers.expire(newest + 1_000, 86_400_000) == 0
    assert isinstance(b.decide(produced(1)), Duplicate)


def test_what_the_loop_says_is_synced_is_not_unsaid_by_the_lane(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a follower confirms too little until the next append, and a producer may wait for
    it.
    """
    b = bench(flush_messages=1)
    b.append(produced(0))
    others = iter([1])

    class Reached(int):
        """While the lane computes how far it came, the loop receives further appends."""

        def _told(self) -> None:
            for number in others:
                b.append(produced(number))

        def __lt__(self, other: int) -> bool:
            self._told()
            return int(self) < other

        def __gt__(self, other: int) -> bool:
            self._told()
            return int(self) > other

    monkeypatch.setattr(b.log._writer, "_sync", lambda: Reached(1))
    b.log.flush()
    assert next(others, None) is None
    assert b.log.synced_end == 2


def test_a_truncation_to_where_the_local_log_begins_keeps_what_the_tier_has(bench: Make) -> None:
    """Rules R4, T1: the log start stays, although no record of the log is local any more."""
    b = bench()
    b.log.reset_to(100)
    b.log.log_start = 40
    b.append(produced(0, 2))
    b.log.truncate_to(100)
    assert (b.log.log_start, b.log.local_log_start, b.log.log_end) == (40, 100, 100)
    b.log.truncate_to(100)
    assert b.log.log_start == 40


def test_a_truncation_to_where_the_local_log_begins_keeps_the_producers(bench: Make) -> None:
    """Rule R5: the leader sent the producers of records that are not local.  Without them a retry
    is stored twice when this replica leads.
    """
    b = bench()
    b.append(produced(0))
    given = b.log.producers.snapshot(1)
    b.log.reset_to(0)
    b.log.reset_to(1, given)
    b.append(produced(1))
    b.log.truncate_to(1)
    for _ in range(2):
        assert (b.log.local_log_start, b.log.log_end) == (1, 1)
        assert isinstance(b.decide(produced(0)), Duplicate)
        b.open()


def test_reset_starts_elsewhere(bench: Make) -> None:
    b = bench(segment_bytes=300)
    b.fill(10)
    b.log.reset_to(100)
    assert (b.log.log_start, b.log.local_log_start, b.log.log_end, b.log.size_bytes) == (
        100,
        100,
        100,
        0,
    )
    b.append(produced(0, 2))
    assert b.values() == [100, 101]
    b.log.close()
    b.open(clean=True, log_start=40)
    assert (b.log.log_start, b.log.local_log_start, b.values(100)) == (40, 100, [100, 101])


def test_dropped_segments_serve_whoever_is_at_them(bench: Make) -> None:
    b = bench(segment_bytes=400, retention_bytes=0)
    b.fill(10)
    old = b.log._local.segments[0]
    plan = b.log.retention_plan(NOW)
    assert plan.drop == (0, 2, 4, 6)
    rename, remove = b.log.drop_segments(plan)
    assert (b.log.log_start, b.log.local_log_start) == (8, 8)
    assert old.read_at(0, 64)
    rename()
    assert old.read_at(0, 64)
    with pytest.raises(errors.OffsetOutOfRange):
        b.log.read(0, bound=10, max_bytes=1)
    remove()
    with pytest.raises(FileNotFoundError):
        old.read_at(0, 64)
    assert [name for name in b.storage.list("topics/t-0") if "00000.log" in name] == []
    assert b.values() == [8, 9]


@pytest.mark.parametrize("seed", range(20))
def test_dropped_segments_do_not_come_back_below_a_recovery_point(bench: Make, seed: int) -> None:
    """Rules L1, L9: the power is lost after a checkpoint that counts them as removed."""
    b = bench(segment_bytes=400, retention_bytes=0)
    for parent in ("topics", ""):
        b.storage.sync_dir(parent)
    b.fill(10)
    rename, _ = b.log.drop_segments(b.log.retention_plan(NOW))
    rename()
    b.log.flush_sealed()
    point = b.log.checkpoint()
    assert point == 8
    b.storage.power_loss(random.Random(seed))
    b.open(same_boot=False, recovery_point=point, log_start=8)
    assert b.log.local_log_start == 8
    assert b.values() == list(range(8, b.log.written_end))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("how", ["flush", "checkpoint"])
def test_a_recovery_point_waits_for_what_a_full_disk_kept(bench: Make, how: str, seed: int) -> None:
    """Rules L1, L9: segments that were dropped keep their file names, and their data were never
    synced.
    """
    b = bench(segment_bytes=400, retention_bytes=0)
    for parent in ("topics", ""):
        b.storage.sync_dir(parent)
    b.fill(10)

    def reached() -> int:
        b.log.flush_sealed()
        if how == "flush":
            b.log.flush()
        return int(b.log.checkpoint())

    def full(operation: str, path: str) -> Exception | None:
        return errors.StorageFull("full") if operation == "rename" else None

    rename, _ = b.log.drop_segments(b.log.retention_plan(NOW))
    b.storage.fault, point = full, 0
    with pytest.raises(errors.StorageFull):
        rename()
    with contextlib.suppress(errors.StorageFull):
        point = reached()
    b.storage.power_loss(random.Random(seed))
    b.storage.fault = None
    b.open(same_boot=False, recovery_point=point, log_start=8)
    assert b.log.written_end >= 8


def test_what_a_full_disk_kept_goes_with_the_next_checkpoint(bench: Make) -> None:
    """log/writing W2: the disk lacks the very space that these segments take."""
    b = bench(segment_bytes=400, retention_bytes=0)
    b.fill(10)
    rename, _ = b.log.drop_segments(b.log.retention_plan(NOW))
    b.storage.fault = lambda operation, path: (
        errors.StorageFull("full") if operation == "rename" else None
    )
    with pytest.raises(errors.StorageFull):
        rename()
    b.storage.fault = None
    b.log.flush_sealed()
    assert b.log.checkpoint() == 8
    assert not [name for name in b.storage.list("topics/t-0") if name < f"{8:020}"]


def test_expired_active_segment_is_rolled_then_dropped(bench: Make) -> None:
    # rule L10
    b = bench(retention_ms=1000)
    b.fill(3)
    plan = b.log.retention_plan(NOW + 1001)
    assert (plan.drop, plan.roll) == ((), True)
    assert b.log.roll()
    b.write()
    plan = b.log.retention_plan(NOW + 1001)
    assert (plan.drop, plan.log_start, plan.roll) == ((0,), 3, False)
    for job in b.log.drop_segments(plan):
        job()
    assert (b.log.log_start, b.log.size_bytes, b.log.log_end) == (3, 0, 3)
    b.append(raw_batch())
    b.log.close()
    b.open(clean=True, log_start=3)
    assert b.values() == [3]


def test_log_start_only_moves_forward_and_not_beyond(bench: Make) -> None:
    b = bench()
    b.fill(5)
    assert b.log.advance_log_start(3)
    assert not b.log.advance_log_start(2)
    with pytest.raises(errors.OffsetOutOfRange):
        b.log.advance_log_start(6)
    assert b.log.last_stable_offset(2) == 3


# -- opening ---------------------------------------------------------------------------------------


def tear(b: Any, name: str, size: int) -> None:
    b.storage.open(f"topics/t-0/{name}").truncate(size)


def test_a_torn_tail_is_cut(bench: Make) -> None:
    b = bench(segment_bytes=10**6)
    b.fill(5)
    tear(b, "00000000000000000000.log", b.log.size_bytes - 1)
    b.open(same_boot=True)
    assert any(note.startswith("H:") for note in b.log.notes)
    assert b.values() == [0, 1, 2, 3]
    b.append(raw_batch())
    assert b.values() == [0, 1, 2, 3, 4]


def test_damage_below_the_recovery_point_is_never_cut(bench: Make) -> None:
    b = bench(segment_bytes=10**6)
    b.fill(5)
    end = b.log.flush()
    size = b.log.size_bytes
    b.append(raw_batch())
    b.log.close(clean=False)
    tear(b, "00000000000000000000.log", size - 1)
    with pytest.raises(errors.CorruptLog):
        b.open(same_boot=False, recovery_point=end)
    b.storage.remove("topics/t-0/00000000000000000000.log")
    with pytest.raises(errors.CorruptLog):
        b.open(same_boot=False, recovery_point=end)


def test_same_boot_does_not_excuse_damage_in_the_middle(bench: Make) -> None:
    b = bench(segment_bytes=10**6)
    b.fill(5)
    b.storage.open("topics/t-0/00000000000000000000.log").write_at(250, b"\xff")
    b.log.close(clean=False)
    with pytest.raises(errors.CorruptLog):
        b.open(same_boot=True)
    b.open(same_boot=False)
    assert b.values() == [0]


def test_a_missing_segment_is_reported(bench: Make) -> None:
    b = bench(segment_bytes=400)
    b.fill(6)
    b.log.close()
    b.storage.remove("topics/t-0/00000000000000000002.log")
    with pytest.raises(errors.CorruptLog, match="begins at 4"):
        b.open(clean=True, recovery_point=6)


def test_a_cut_segment_of_a_clean_log_is_reported(bench: Make) -> None:
    b = bench(segment_bytes=300)
    b.fill(6)
    b.log.close()
    tear(b, "00000000000000000002.log", 10)
    with pytest.raises(errors.CorruptLog):
        b.open(clean=True, recovery_point=6)


def test_clean_opening_reads_no_data(bench: Make) -> None:
    b = bench(segment_bytes=500)
    b.fill(20)
    b.log.close()
    reads: list[str] = []
    b.storage.fault = lambda op, path: (
        reads.append(path) if op == "read" and path.endswith(".log") else None
    )
    b.open(clean=True, recovery_point=20)
    b.storage.fault = None
    assert len(reads) <= b.log.segment_count  # one header each: does the index belong to this log?
    assert b.log.synced_end == 20


def test_the_config_may_change_while_running(bench: Make) -> None:
    b = bench()
    b.fill(2)
    b.log.config = replace(b.config, max_message_bytes=50)
    with pytest.raises(errors.RecordTooLarge):
        b.decide(raw_batch())


def test_a_log_that_lost_its_end_never_gives_an_offset_twice(bench: Make) -> None:
    """log/loading O2: records were deleted up to 8; then a power loss took the unsynced tail."""
    b = bench()
    b.fill(5)
    b.log.flush()
    b.fill(5)
    b.log.advance_log_start(8)
    b.log.close(clean=False)
    b.storage.open("topics/t-0/00000000000000000000.log").truncate(5 * len(raw_batch()))
    b.open(same_boot=False, recovery_point=5, log_start=8)
    assert (b.log.log_start, b.log.local_log_start, b.log.log_end) == (8, 8, 8)
    b.append(raw_batch())
    assert b.values() == [8]


@pytest.mark.parametrize(
    ("field", "number"),
    [("producer_id", 0), ("producer_id", 1), ("base_sequence", 2), ("producer_epoch", 1)],
)
def test_a_producers_batch_that_rotted_is_reported_when_its_state_is_read(
    bench: Make, field: str, number: int
) -> None:
    """L9: no other code checks checksums below the recovery point.  Otherwise the producer's next
    batch would be refused without an end, or a retry stored twice.
    """
    b = bench()
    for sequence in range(3):
        b.append(produced(sequence))
    b.log.flush()
    b.log.close(clean=False)
    path = "topics/t-0/00000000000000000000.log"
    raw = b.storage.peek(path)
    at = number * (len(raw) // 3)
    header = batches.read_header(raw, at)
    rotten = header._replace(**{field: getattr(header, field) ^ 4})
    b.storage.open(path).write_at(at, batches.HEADER.pack(*rotten))
    with pytest.raises(errors.CorruptLog, match="are damaged"):
        b.open(recovery_point=3)


@pytest.mark.parametrize("number", [0, 2])
def test_a_leader_epoch_that_rotted_does_not_fence_who_leads_next(bench: Make, number: int) -> None:
    """L9, log/loading O6: no checksum covers a batch's epoch, but one covers the file of epochs."""
    b = bench()
    b.append(raw_batch())
    b.append(raw_batch(), epoch=4)
    b.append(raw_batch(), epoch=5)
    b.log.flush()
    b.log.close(clean=False)
    path = "topics/t-0/00000000000000000000.log"
    at = number * (len(b.storage.peek(path)) // 3)
    header = batches.read_header(b.storage.peek(path), at)
    rotten = header._replace(leader_epoch=header.leader_epoch ^ 1 << 20)
    b.storage.open(path).write_at(at, batches.HEADER.pack(*rotten))
    with pytest.raises(errors.CorruptLog, match="leader epoch") as raised:
        b.open(recovery_point=3)
    assert raised.value.details["offset"] == str(number)


# -- epochs that rotted ----------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 900], ids=["older", "newer"])
def test_an_epoch_that_rotted_is_damage_where_a_reader_begins(bench: Make, epoch: int) -> None:
    """L9: no checksum covers the epoch; a follower that refuses the batch fetches from there
    again.
    """
    b = bench()
    for _ in range(3):
        b.append(raw_batch(), epoch=4)
    (path,) = [name for name in b.storage.list(b.log.path) if name.endswith(".log")]
    file = b.storage.open(f"{b.log.path}/{path}", write=True)
    file.write_at(file.size() // 3 + 12, epoch.to_bytes(4, "little"))
    file.close()
    assert b.log.read(0, bound=3, max_bytes=1, verify_first=True).next_offset == 1
    with pytest.raises(errors.CorruptLog, match=f"says leader epoch {epoch}, it is of 4"):
        b.log.read(1, bound=3, max_bytes=1, verify_first=True)


def test_a_follower_takes_no_epoch_beyond_its_leaders(bench: Make) -> None:
    """Such an epoch would fence every later leader."""
    b = bench()
    rotted = b"".join(batches.patched(raw_batch(), 0, 900))
    with pytest.raises(errors.CorruptBatch, match="epoch 900, the leader's epoch is 4"):
        b.log.append_as_follower(batches.check(rotted), rotted, now_ms=NOW, newest=4)
    good = b"".join(batches.patched(raw_batch(), 0, 4))
    b.log.append_as_follower(batches.check(good), good, now_ms=NOW, newest=4)
    assert b.log.epochs.latest == 4
