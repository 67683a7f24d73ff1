"""Which files an optimize job merges: adjoining whole files only, and each a few times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from pk.sparkconnector.maintenance.optimize_plan import (
    FILES_PER_RUN_MAX,
    files_expired,
    is_there,
    plan,
)
from pk.tiering import layout
from pk.tiering.data_files import DataFile, held_by
from pk.tiering.layout import DataName, PartitionCounters
from pk.tiering.table import Snapshot


def data(start: int, end: int, size: int = 10, partition: int = 0) -> DataFile:
    path = layout.data_path(DataName(partition, start, end, 0, "a", 0, 0))
    return DataFile(path, partition, start, end - 1, 0, 0, end - start, size)


def outside(low: int, high: int, rows: int) -> DataFile:
    return DataFile(f"partition=0/part-{low}.parquet", 0, low, high, 0, 0, rows, 10)


def runs(*files: DataFile, start: int = 0, target: int = 100) -> list[tuple[int, int]]:
    counters = {f.partition: PartitionCounters(start=start) for f in files}
    snapshot = Snapshot(1, "id", {f.path: f for f in files}, counters)
    return [(run.start, run.end) for run in plan(snapshot, target)]


def test_adjoining_files_become_one() -> None:
    assert runs(data(0, 10), data(10, 20), data(20, 30)) == [(0, 30)]


def test_one_file_is_left_alone() -> None:
    assert runs(data(0, 10)) == []


def test_a_gap_stays_visible() -> None:
    """Rows may be missing there; a file over the gap would hide them (T17)."""
    assert runs(data(0, 10), data(10, 20), data(25, 30), data(30, 40)) == [(0, 20), (25, 40)]


def test_a_file_that_another_engine_wrote_is_merged_if_it_is_whole() -> None:
    assert runs(data(0, 10), outside(10, 19, 10)) == [(0, 20)]
    assert runs(data(0, 10), outside(10, 19, 9)) == []


def test_files_below_the_start_wait_for_their_removal() -> None:
    assert runs(data(0, 10), data(10, 20), data(20, 30), start=10) == [(10, 30)]


def test_large_files_are_left_alone() -> None:
    assert runs(data(0, 10), data(10, 20, 50), data(20, 30), data(30, 40)) == [(20, 40)]


def test_partitions_are_not_mixed() -> None:
    assert runs(data(0, 10), data(10, 20, partition=1)) == []


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_runs_are_bounded_and_disjoint(sizes: list[int], target: int) -> None:
    files = [data(10 * n, 10 * n + 10, size) for n, size in enumerate(sizes)]
    snapshot = Snapshot(1, "id", {f.path: f for f in files}, {0: PartitionCounters()})
    at = 0
    for run in plan(snapshot, target):
        assert run.start >= at
        at = run.end
        assert 2 <= len(run.files) <= FILES_PER_RUN_MAX
        assert sum(f.size for f in run.files) <= target
        held = [held_by(f) for f in run.files]
        assert held[0][0] == run.start
        assert held[-1][1] == run.end
        assert all(a[1] == b[0] for a, b in pairwise(held))


def test_files_at_the_begin_can_be_left_alone() -> None:
    files = [data(0, 10), data(10, 20), data(20, 30), data(0, 10, partition=1)]
    files.append(data(10, 20, partition=1))
    counters = {0: PartitionCounters(), 1: PartitionCounters()}
    snapshot = Snapshot(1, "id", {f.path: f for f in files}, counters)
    found = [
        (each.partition, each.start, each.end) for each in plan(snapshot, 100, left_alone={0: 1})
    ]
    assert found == [(0, 10, 30), (1, 0, 20)]


def test_files_beyond_an_end_can_be_left_out() -> None:
    files = [data(0, 10), data(10, 20), data(20, 30), data(30, 40)]
    snapshot = Snapshot(1, "id", {f.path: f for f in files}, {0: PartitionCounters()})
    found = plan(snapshot, 100, ends={0: 30})
    assert [(each.start, each.end) for each in found] == [(0, 30)]
    assert plan(snapshot, 100, ends={}) == []


def test_a_run_is_used_as_long_as_all_its_files_are_there() -> None:
    """A file below the start is gone before a version drops it."""
    files = [data(0, 10), data(10, 20), data(20, 30)]
    first = Snapshot(1, "id", {f.path: f for f in files}, {0: PartitionCounters()})
    (run,) = plan(first, 100)
    left = {f.path: f for f in files[1:]}
    changed = {**first.files, files[1].path: replace(files[1], rows=9)}
    for found, start, there, expired in [
        (first.files, 0, True, 0),
        (left, 10, False, 1),
        (left, 20, False, 2),
        (changed, 0, False, 0),  # by another engine
        (dict(list(first.files.items())[:2]), 0, False, 0),
    ]:
        snapshot = Snapshot(2, "id", found, {0: PartitionCounters(start=start)})
        assert is_there(snapshot, run) == there
        assert files_expired(snapshot, run) == expired
