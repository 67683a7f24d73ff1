"""Planning arithmetic: sparkconnector/ranges D1 to D4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import generations
from pk.sparkconnector import planner, ranges
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.ranges import Curve, TierFile

sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=8)


def make(lengths: list[int], start: int = 100) -> list[Range]:
    return [Range("t", "id", p, start * p, start * p + n) for p, n in enumerate(lengths)]


def offsets_of(pieces: list[Range]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for one in pieces:
        found.setdefault(one.partition, []).append((one.start, one.end))
    return found


def assert_same_union(whole: list[Range], pieces: list[Range]) -> None:
    by_partition = offsets_of(pieces)
    for one in whole:
        parts = by_partition.get(one.partition, [])
        at = one.start
        for start, end in parts:
            assert start == at
            assert end > start
            at = end
        assert at == one.end


@given(sizes, st.integers(0, 50), st.integers(0, 3000))
def test_splitting_covers_exactly_the_range(lengths, min_partitions, max_records):
    whole = make(lengths)
    pieces = ranges.split(whole, min_partitions=min_partitions, max_records=max_records)
    assert_same_union(whole, pieces)
    if max_records:
        assert all(one.size <= max_records for one in pieces)
    assert len(pieces) >= min(min_partitions, sum(lengths))


@given(sizes, st.integers(1, 20_000), st.integers(0, 100))
def test_a_record_limit_is_kept_and_something_goes_through(lengths, most, turn):
    whole = make(lengths)
    limited = ranges.limit_records(whole, most, turn)
    total = sum(one.size for one in limited)
    assert total == min(most, sum(lengths))
    for one, part in zip(whole, limited, strict=True):
        assert part.start == one.start
        assert part.end <= one.end


@given(sizes.filter(lambda s: sum(s) > 0), st.integers(1, 5))
def test_no_partition_starves_while_others_have_endless_backlog(lengths, most):
    """sparkconnector/ranges D3: the others' backlog stays as large as ever, and each partition
    still gets its turn."""
    whole = make(lengths)
    waiting = {one.partition for one in whole if one.size}
    for turn in range(len(whole)):
        limited = ranges.limit_records(whole, most, turn)
        waiting -= {one.partition for one in limited if one.size}
    assert not waiting


curve_points = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 5000)), min_size=1, max_size=9
)


def a_curve(start: int, steps: list[tuple[int, int]]) -> Curve:
    xs, ys = [start], [0]
    for records, size in steps:
        xs.append(xs[-1] + records)
        ys.append(ys[-1] + size)
    return Curve(xs, ys)


@given(st.lists(curve_points, min_size=1, max_size=5), st.integers(1, 30_000), st.integers(0, 20))
def test_a_byte_limit_is_passed_by_one_record_at_most(shapes, most, turn):
    curves = {("t", p): a_curve(10 * p, steps) for p, steps in enumerate(shapes)}
    whole = [Range("t", "id", p, c.offsets[0], c.offsets[-1]) for (_, p), c in curves.items()]
    limited = ranges.limit_bytes(whole, curves, most, turn)
    used = sum(curves["t", one.partition].bytes_at(one.end) for one in limited)
    largest = max(
        max((b - a) for a, b in zip(c.cumulative, c.cumulative[1:], strict=False))
        for c in curves.values()
    )
    assert sum(one.size for one in limited) > 0
    assert used <= most + largest
    for one, part in zip(whole, limited, strict=True):
        assert one.start == part.start <= part.end <= one.end


@given(st.lists(curve_points, min_size=1, max_size=4))
def test_bytes_starve_nobody(shapes):
    curves = {("t", p): a_curve(0, steps) for p, steps in enumerate(shapes)}
    whole = [Range("t", "id", p, 0, c.offsets[-1]) for (_, p), c in curves.items()]
    waiting = {one.partition for one in whole}
    for turn in range(len(whole)):
        waiting -= {one.partition for one in ranges.limit_bytes(whole, curves, 1, turn) if one.size}
    assert not waiting


@given(curve_points, st.integers(1, 4000))
def test_splitting_by_bytes_covers_exactly_the_range(steps, max_bytes):
    known = a_curve(7, steps)
    whole = [Range("t", "id", 0, 7, known.offsets[-1])]
    pieces = ranges.split(whole, max_bytes=max_bytes, curves={("t", 0): known})
    assert_same_union(whole, pieces)
    for one in pieces:
        assert one.size == 1 or known.bytes_at(one.end) - known.bytes_at(one.start) <= max_bytes


def test_without_a_curve_a_byte_limit_still_moves_on():
    whole = make([1000, 1000])
    limited = ranges.limit_bytes(whole, {}, 100, 0)
    assert 0 < sum(one.size for one in limited) <= 101


def test_the_brokers_samples_become_a_growing_curve():
    wanted = Range("t", "id", 0, 100, 200)
    known = ranges.curve([100, 120, 120, 150, 400], [0, 2000, 2000, 5000, 9000], wanted)
    assert list(known.offsets) == [100, 120, 150, 200]
    assert known.bytes_at(110) == 1000
    assert known.bytes_at(200) == 10_000
    assert known.offset_at(5000) == 150
    empty = ranges.curve([], [], wanted)
    assert empty.bytes_at(200) == 0


files = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 80), st.integers(1, 100)), max_size=12
)


@given(st.integers(0, 300), st.integers(1, 200), files, st.integers(1, 200), st.integers(0, 50))
def test_cold_tasks_cover_the_range_and_name_every_file_needed(start, length, drawn, budget, most):
    """Also for files that overlap, as an outside Z-order may leave them."""
    cold = Range("t", "id", 0, start, start + length)
    listed = [TierFile(f"f{n}", a, a + b, size, b + 1) for n, (a, b, size) in enumerate(drawn)]
    tasks = ranges.cold_tasks(cold, listed, budget, most)
    assert_same_union([cold], [one for one, _ in tasks])
    for one, here in tasks:
        assert set(here) == {
            f for f in listed if f.min_offset < one.end and f.max_offset >= one.start
        }


def test_disjoint_files_make_tasks_of_whole_files():
    listed = [TierFile(f"f{n}", n * 10, n * 10 + 9, 50, 10) for n in range(6)]
    tasks = ranges.cold_tasks(Range("t", "id", 0, 0, 60), listed, task_bytes=100)
    assert [(one.start, one.end, [f.path for f in here]) for one, here in tasks] == [
        (0, 20, ["f0", "f1"]),
        (20, 40, ["f2", "f3"]),
        (40, 60, ["f4", "f5"]),
    ]


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 120))
def test_cold_and_hot_are_adjacent(start, length, tiered_end):
    one = Range("t", "id", 0, start, start + length)
    cold, hot = ranges.cut_at(one, tiered_end)
    parts = [part for part in (cold, hot) if part is not None]
    assert_same_union([one], parts) if one.size else None
    assert cold is None or cold.end <= max(tiered_end, start)
    assert hot is None or hot.start >= min(tiered_end, one.end)


def test_a_gap_of_a_restore_is_not_the_work_of_another_engine():
    first = generations.OFFSETS
    gap, deleted = (100, first), ((20, 30), (first, first + 5))
    for start, end in (gap, (100, 120), (first - 5, first - 1), (first - 5, first)):
        assert "restored" in planner.taken(Range("t", "id", 0, start, end), (gap,)).message
    for start, end in deleted:
        found = planner.taken(Range("t", "id", 0, start, end), (gap, *deleted))
        assert "another engine" in found.message


BLOCK = generations.OFFSETS


@pytest.mark.parametrize(
    ("start", "end", "left"),
    [
        (0, 50, (0, 50)),
        (0, BLOCK + 40, (0, 100)),
        (100, BLOCK + 40, (BLOCK, BLOCK + 40)),
        (5000, BLOCK, (BLOCK, BLOCK)),
        (5000, BLOCK - 1, (BLOCK - 1, BLOCK - 1)),
        (BLOCK + 3, BLOCK + 40, (BLOCK + 3, BLOCK + 40)),
        (BLOCK + 3, 2 * BLOCK + 7, (BLOCK + 3, BLOCK + 60)),
        (BLOCK + 60, 2 * BLOCK + 7, (2 * BLOCK, 2 * BLOCK + 7)),
    ],
)
def test_a_limit_counts_no_gap_of_a_restore(start: int, end: int, left: tuple[int, int]) -> None:
    """sparkconnector/ranges D5.  Another engine deleted 10 to 20, which a limit does count."""
    missing = [(10, 20), (100, BLOCK), (BLOCK + 60, 2 * BLOCK)]
    found = ranges.without_gap(Range("t", "id", 0, start, end), missing)
    assert (found.start, found.end) == left
