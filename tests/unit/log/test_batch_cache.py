"""The ends of logs in memory (log/batch_cache.py): they return the bytes of the disk, or none, and
stay within their bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import batch_cache, columns
from pk.log.batch_cache import APPEND_BYTES_MAX, BATCH_OVERHEAD_BYTES, LOG_BYTES_MAX, BatchCache
from pk.log.plan import Appended, AppendOp, WritePlan

NOW = 1_700_000_000_000
Make = Callable[..., Any]  #: conftest.Bench


def raw_batch(count: int = 1, size: int = 100, **options: Any) -> bytes:
    options.setdefault("default_timestamp", NOW)
    return b"".join(columns.encode_lists([b"v" * size] * count, **options))


@pytest.fixture
def kept(bench: Make) -> Any:
    b = bench()
    b.log.recent = BatchCache()
    return b


def read(b: Any, offset: int, **limits: Any) -> Any:
    given = {"bound": b.log.written_end, "max_bytes": 10**6, **limits}
    return b.log.read_recent(offset, **given)


def test_what_was_appended_is_there_without_the_disk(kept: Any) -> None:
    kept.append(raw_batch(2), raw_batch(3), epoch=4)
    kept.append(raw_batch(1), epoch=5)
    same = kept.log.read(2, bound=6, max_bytes=10**6)
    kept.storage.fault = lambda op, path: errors.StorageFailed("no disk") if op == "read" else None
    assert read(kept, 2) == same
    assert (same.base_offset, same.next_offset, same.last_epoch) == (2, 6, 5)


def test_an_offset_inside_a_batch_gets_the_whole_batch(kept: Any) -> None:
    kept.append(raw_batch(3), raw_batch(3))
    assert read(kept, 4) == kept.log.read(4, bound=6, max_bytes=10**6)
    assert read(kept, 4).base_offset == 3


def test_nothing_at_or_above_the_bound(kept: Any) -> None:
    """A batch that reaches beyond the bound is not returned, nor one that alone exceeds the
    requested bytes.
    """
    kept.append(raw_batch(2), raw_batch(2), raw_batch(2))
    assert read(kept, 0, bound=4).next_offset == 4
    assert read(kept, 0, bound=5).next_offset == 4
    assert read(kept, 0, bound=1) is None
    assert read(kept, 4, bound=4) is None
    assert read(kept, 6, bound=10) is None  # and no batch that is not written


def test_the_bytes_asked_for_are_not_exceeded_but_by_one_batch_alone(kept: Any) -> None:
    kept.append(raw_batch(), raw_batch(), raw_batch())
    size = len(raw_batch())
    for room, end in ((0, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (3 * size, 3)):
        assert read(kept, 0, max_bytes=room).next_offset == end
    assert read(kept, 0, max_bytes=size - 1, min_one_batch=False) is None
    assert read(kept, 0, max_bytes=2 * size, min_one_batch=False).next_offset == 2


def test_only_what_was_completed_is_kept(kept: Any) -> None:
    """A batch that is only decided belongs to no log yet; a batch whose write failed never existed
    (rule L2).
    """
    kept.append(raw_batch(2))
    kept.decide(raw_batch(2, 50))
    plan = kept.log.take_writes()
    assert read(kept, 2) is None
    kept.log.perform(plan)
    assert read(kept, 2) is None
    kept.log.complete(plan, errors.StorageFull("full"))
    assert read(kept, 2) is None
    kept.append(raw_batch(2, 70))
    assert read(kept, 0) == kept.log.read(0, bound=4, max_bytes=10**6)


@pytest.mark.parametrize("to", [0, 2, 3])
@pytest.mark.parametrize("cut", ["truncate_to", "reset_to"])
def test_a_log_that_was_cut_back_has_no_recent_end(kept: Any, cut: str, to: int) -> None:
    """Even when the log has grown to the same end again: it holds other batches now (rule R4)."""
    for _ in range(4):
        kept.append(raw_batch(1), epoch=1)
    getattr(kept.log, cut)(to)
    for offset in range(5):
        assert read(kept, offset, bound=4) is None
    while kept.log.log_end < 4:
        kept.append(raw_batch(1, 99), epoch=2)
    assert read(kept, 3) == kept.log.read(3, bound=4, max_bytes=10**6)
    assert read(kept, to) == kept.log.read(to, bound=4, max_bytes=10**6)
    assert to == 0 or read(kept, to - 1) is None


def test_a_log_that_begins_anew_where_it_ended_is_kept_again(kept: Any) -> None:
    for _ in range(4):
        kept.append(raw_batch(1))
    kept.log.reset_to(4)
    kept.append(raw_batch(1))
    assert read(kept, 3) is None
    assert read(kept, 4) == kept.log.read(4, bound=5, max_bytes=10**6)


def test_truncating_at_the_end_keeps_it(kept: Any) -> None:
    kept.append(raw_batch(2))
    kept.log.truncate_to(2)
    assert read(kept, 0) is not None


def test_below_the_log_start_nothing_is_read(kept: Any) -> None:
    """Deleted records stay deleted (rule T9), and tiered offsets are read from the tier."""
    kept.append(raw_batch(2), raw_batch(2))
    kept.log.advance_log_start(2)
    assert read(kept, 1) is None
    assert read(kept, 2) == kept.log.read(2, bound=4, max_bytes=10**6)


def test_a_roll_does_not_end_what_is_kept(kept: Any) -> None:
    kept.append(raw_batch(1))
    kept.log.roll()
    kept.append(raw_batch(1))
    both = kept.log.read(0, bound=2, max_bytes=10**6).data
    both += kept.log.read(1, bound=2, max_bytes=10**6).data
    assert read(kept, 0).data == both


def test_a_retired_log_is_forgotten(kept: Any) -> None:
    kept.append(raw_batch(1))
    kept.decide(raw_batch(1))
    plan = kept.log.take_writes()
    kept.log.retire()
    assert (read(kept, 0), kept.log.recent.bytes) == (None, 0)
    kept.log.perform(plan)
    kept.log.complete(plan)
    assert (read(kept, 1), kept.log.recent.bytes) == (None, 0)


def test_a_large_append_ends_the_run(bench: Make) -> None:
    """log/batch_cache K2: later batches do not adjoin earlier ones, and no read crosses the gap."""
    b = bench(segment_bytes=10**6)
    b.log.recent = BatchCache()
    b.append(raw_batch(1))
    b.append(raw_batch(1, APPEND_BYTES_MAX))
    assert (read(b, 0), read(b, 1), b.log.recent.bytes) == (None, None, 0)
    b.append(raw_batch(1))
    assert (read(b, 0), read(b, 1)) == (None, None)
    assert read(b, 2) == b.log.read(2, bound=3, max_bytes=10**6)


def test_many_small_batches_at_once_are_a_large_append(bench: Make) -> None:
    b = bench(segment_bytes=10**6)
    b.log.recent = BatchCache()
    size = len(raw_batch(1, 1)) + BATCH_OVERHEAD_BYTES
    b.append(*[raw_batch(1, 1)] * (APPEND_BYTES_MAX // size))
    assert read(b, 0) is not None
    b.append(*[raw_batch(1, 1)] * (APPEND_BYTES_MAX // size + 1))
    assert b.log.recent.bytes == 0


def test_of_a_log_the_oldest_batches_go(bench: Make) -> None:
    # log/batch_cache K1
    b = bench(segment_bytes=10**6)
    b.log.recent = BatchCache()
    cost = len(raw_batch(1, 10_000)) + BATCH_OVERHEAD_BYTES
    fits = LOG_BYTES_MAX // cost
    for _ in range(fits + 2):
        b.append(raw_batch(1, 10_000))
        assert b.log.recent.bytes <= LOG_BYTES_MAX
    assert b.log.recent.bytes == fits * cost
    assert read(b, 1) is None
    assert read(b, 2) == b.log.read(2, bound=fits + 2, max_bytes=10**6)


def test_of_the_logs_the_one_appended_to_longest_ago_goes(bench: Make) -> None:
    # log/batch_cache K1
    cost = len(raw_batch(1)) + BATCH_OVERHEAD_BYTES
    shared = BatchCache(bytes_max=3 * cost)
    logs = [bench() for _ in range(3)]
    for b in logs:
        b.log.recent = shared
        b.append(raw_batch(1))
    logs[0].append(raw_batch(1))  # was the oldest until now
    assert shared.bytes == 3 * cost
    assert [read(b, 0) is not None for b in logs] == [True, False, True]


def test_it_is_held_in_memory_of_its_own(bench: Make) -> None:
    """log/batch_cache K3: a batch is a view into a frame of megabytes, whose memory must become
    free.
    """
    b = bench()
    b.log.recent = BatchCache()
    raw = raw_batch(1)
    frame = bytearray(raw)
    b.log.decide(batches.check(frame), memoryview(frame), leader_epoch=0, now_ms=NOW)
    b.write()
    frame[:] = bytes(len(frame))
    frame.clear()  # refused while a view of it is held
    assert read(b, 0).data[batches.HEADER_BYTES :] == raw[batches.HEADER_BYTES :]


def test_a_followers_batch_is_copied_too(bench: Make) -> None:
    """log/batch_cache K3: it is written as it arrived, in one part."""
    b = bench()
    b.log.recent = BatchCache()
    frame = bytearray(raw_batch(1))
    b.log.append_as_follower(batches.check(frame), memoryview(frame), now_ms=NOW)
    b.write()
    frame.clear()
    assert read(b, 0) == b.log.read(0, bound=1, max_bytes=10**6)


def test_a_run_has_no_holes() -> None:
    """log/batch_cache K2: an append that was not kept ends the run."""

    def plan(base: int) -> WritePlan:
        raw = raw_batch(1)
        done = Appended(base, base, NOW, -1, 0, len(raw))
        ops = [AppendOp(None, 0, [raw])]
        return WritePlan(0, base, base + 1, size=len(raw), ops=[*ops], appended=[done])

    found = BatchCache()
    for base in (0, 1, 3):
        found.keep("log", 0, plan(base))
    assert found.read("log", 0, 1, 9, 10**6, True) is None
    answer = found.read("log", 0, 3, 9, 10**6, True)
    assert answer is not None
    assert (answer.base_offset, answer.next_offset) == (3, 4)


def test_the_bounds_add_up() -> None:
    assert batch_cache.APPEND_BYTES_MAX <= batch_cache.LOG_BYTES_MAX <= batch_cache.BYTES_MAX
