"""Look-ups by time, by epoch and by index at the edges of a log, of a batch and of a truncation."""

from __future__ import annotations

import pytest

from pk import errors
from pk.log.index_cache import IndexCache
from pk.log.segment import Segment
from tests.unit.log.conftest import NOW, Bench, make_batch

PATH = "topics/t-0"


def _stamped(bench: Bench, *stamps: int) -> None:
    for stamp in stamps:
        bench.append(make_batch(1, 100, default_timestamp=NOW + stamp))


def _newest(bench: Bench, bound: int) -> tuple[int, int] | None:
    found = bench.log.offset_of_max_timestamp(bound)
    return found and (found.offset, found.timestamp_ms - NOW)


def test_the_newest_record_is_one_that_is_there() -> None:
    """The largest timestamp in a segment's extent may be of a record that was deleted, or is not
    committed.
    """
    bench = Bench()
    _stamped(bench, 9, 5, 7, 7, 6, 8)
    assert [_newest(bench, bound) for bound in (6, 5, 1, 0)] == [(0, 9), (0, 9), (0, 9), None]
    bench.log.advance_log_start(1)
    assert [_newest(bench, bound) for bound in (6, 5, 3, 2, 1)] == [
        (5, 8), (2, 7), (2, 7), (1, 5), None,
    ]  # fmt: skip
    bench.log.roll()
    _stamped(bench, 3, 8)
    assert [_newest(bench, bound) for bound in (8, 6, 5)] == [(5, 8), (5, 8), (2, 7)]
    bench.log.advance_log_start(6)
    assert [_newest(bench, bound) for bound in (8, 7)] == [(7, 8), (6, 3)]


def test_the_newest_record_may_stand_in_a_batch_that_was_deleted_in_part() -> None:
    bench = Bench()
    bench.append(make_batch(3, 10, timestamps=[NOW + 9, NOW + 4, NOW + 6]))
    _stamped(bench, 5)
    bench.log.advance_log_start(1)
    assert _newest(bench, 4) == (2, 6)
    bench.log.advance_log_start(3)
    assert _newest(bench, 4) == (3, 5)


@pytest.mark.parametrize("part", ["timestamps", "lengths"])
def test_a_look_up_by_time_believes_no_damaged_batch(part: str) -> None:
    """Rule L9: damaged timestamps would give another offset, or blame the client elsewhere."""
    bench = Bench()
    bench.append(make_batch(2, 10, timestamps=[NOW + 4, NOW + 6]))
    bench.storage.rot(f"{PATH}/{0:020}.log", 64 if part == "timestamps" else 72, 1)
    with pytest.raises(errors.CorruptLog):
        bench.log.offset_for_time(NOW + 5, 2)
    bench.log.advance_log_start(1)
    with pytest.raises(errors.CorruptLog):
        bench.log.offset_of_max_timestamp(1 + 1)


def test_an_epoch_whose_first_batch_is_cut_in_its_middle_is_forgotten() -> None:
    """log/loading O4, without a restart in between: a follower that continues names the epoch of
    its last record.
    """
    bench = Bench()
    bench.append(make_batch(5), epoch=0)
    bench.append(make_batch(5), epoch=3)
    bench.log.truncate_to(7)
    assert (bench.log.written_end, bench.log.last_epoch) == (5, 0)
    entries = bench.log.epochs.entries
    assert bench.open().epochs.entries == entries


def test_who_loads_an_index_beside_another_counts_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cache would count itself full, and keep a single index from then on."""
    bench = Bench(index_interval_bytes=1, segment_bytes=500)
    bench.fill(12)
    first, second, third = bench.log._local.segments[:3]
    indexes = [each.load_index()[0] for each in (first, second, third)]
    cache = IndexCache(sum(each.nbytes() for each in indexes))
    load = Segment.load_index
    busy = True

    def both(segment: Segment) -> object:
        nonlocal busy
        if busy:
            busy = False
            cache.get(segment, 1)
        return load(segment)

    monkeypatch.setattr(Segment, "load_index", both)
    kept = [cache.get(segment, 1) for segment in (first, second, third)]
    assert all(each.nbytes() for each in indexes)
    assert [id(cache.get(each, 1)) for each in (first, second, third)] == [id(i) for i in kept]
