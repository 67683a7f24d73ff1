"""Chooses the files that an optimize job merges.  Pure.

A run is a row of adjoining whole files of one partition.  Only runs are merged: a gap between two
files may be rows that another engine deleted, and a merged file would hide it (rule T17).

Invariants
  N1  The files of a run adjoin: each begins where the one before it ends.  Every file is whole.
  N2  No file lies wholly below the start of its partition: its rows are counted as removed.
  N3  A run has two or more files, at most FILES_PER_RUN_MAX, and at most `target_bytes`.  A file of
      half that size or more is left alone, so a byte is rewritten a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pk.tiering.data_files import DataFile, held_by, is_whole
from pk.tiering.table import Snapshot
from pk.types import Offset

FILES_PER_RUN_MAX = 500


class MergeRun(NamedTuple):
    """Files that become one: they hold the offsets `[start, end)` of a partition."""

    partition: int
    start: Offset
    end: Offset
    files: tuple[DataFile, ...]


def plan(
    snapshot: Snapshot,
    target_bytes: int,
    *,
    ends: Mapping[int, Offset] | None = None,
    left_alone: Mapping[int, int] | None = None,
) -> list[MergeRun]:
    """Return the runs to merge, by partition and offset.

    ends: files that reach beyond the end of their partition here are in no run
    left_alone: how many files at the begin of a partition are in no run
    """
    found: list[MergeRun] = []
    for partition in sorted(snapshot.counters):
        start = snapshot.partition(partition).start
        live = [f for f in snapshot.files_of(partition) if f.max_offset >= start]
        if ends is not None:
            live = [f for f in live if f.max_offset < ends.get(partition, start)]
        if left_alone is not None and (count := left_alone.get(partition)):
            live = sorted(live, key=held_by)[count:]
        found += _runs(partition, live, target_bytes)
    return found


def is_there(snapshot: Snapshot, run: MergeRun) -> bool:
    """Return whether `snapshot` has all files of a run, none below its partition's start."""
    return not files_expired(snapshot, run) and all(
        snapshot.files.get(file.path) == file for file in run.files
    )


def files_expired(snapshot: Snapshot, run: MergeRun) -> int:
    """Return how many files of a run lie wholly below the partition's start in `snapshot`."""
    start = snapshot.partition(run.partition).start
    return sum(file.max_offset < start for file in run.files)


def _runs(partition: int, files: Sequence[DataFile], target_bytes: int) -> list[MergeRun]:
    runs: list[MergeRun] = []
    run: list[DataFile] = []
    size = 0
    for file in sorted(files, key=held_by):
        small = is_whole(file) and file.size < target_bytes // 2
        adjoins = bool(run) and held_by(run[-1])[1] == held_by(file)[0]
        full = size + file.size > target_bytes or len(run) >= FILES_PER_RUN_MAX
        if run and not (small and adjoins and not full):
            _close(partition, run, runs)
            run, size = [], 0
        if small:
            run.append(file)
            size += file.size
    _close(partition, run, runs)
    return runs


def _close(partition: int, run: Sequence[DataFile], runs: list[MergeRun]) -> None:
    if len(run) > 1:
        start, end = held_by(run[0])[0], held_by(run[-1])[1]
        runs.append(MergeRun(partition, start, end, tuple(run)))
