"""Accounts for the rows of one version of a table: which rows are missing (rule T17).  Pure.

The table's counters say how many rows the copier appended and how many retention or compaction
removed.  The difference must equal the rows of the live files, as their numRecords state.  If the
files hold fewer rows, another engine removed some, with a DELETE or by restoring an older version.
If they hold more, another engine added rows, or restored rows that had been settled as missing.

The files show where rows are missing.  A file that pk wrote is whole: its name states its offsets,
and its checksums cover its rows.  A file with as many rows as there are offsets between
its bounds is whole, too.  Offsets that lie in no file's range are reported as missing.  Rows
missing between the bounds of a file that another engine wrote are counted, but cannot be located.

Invariants
  N1  Files that lie wholly below `:start` do not count: their rows were counted as removed when
      `:start` passed them.
  N2  Missing rows are settled once `:start` has passed `below`.  From there on every file is whole,
      and the files follow one another without gaps up to the table's end.
  N3  A version that contains a file with unknown rows is not judged.
  N4  The number of rows below `:start` that share a file with later rows may change: another engine
      may delete them, or restore a version that has them.
  N5  From `:start` to `first`, whole files hold every offset, so no row is missing there.
  N6  Unless rows are missing, the row hashes of the live files add up to sum - removed_sum.  What
      is counted as removed is summed at the same time.  If its sum cannot be known (rows that were
      missing, in a damaged file, or removed by an earlier build), removed_sum is set to sum - the
      live files' sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pk import errors
from pk.tiering.data_files import DataFile, held_by, is_whole
from pk.tiering.layout import SUM_MODULUS, PartitionCounters, parse_written_path
from pk.tiering.live_files import Columns, PartitionFiles
from pk.types import NONE, Offset

#: The row sum of a file that cannot be read.
UNREADABLE = -1


class SnapshotView(Protocol):
    """The parts of a table's version that the accounting needs (`table.Snapshot` has them)."""

    @property
    def version(self) -> int: ...

    @property
    def counters(self) -> Mapping[int, PartitionCounters]: ...

    def partition(self, partition: int) -> PartitionCounters: ...

    def files_of(self, partition: int) -> PartitionFiles: ...

    def rows_missing(self, partition: int) -> RowsMissing | None: ...


class RowsMissing(NamedTuple):
    """The missing rows of one partition in one version of the table."""

    rows: int
    first: Offset  #: no row below this offset is missing: retention stops here (N5)
    below: Offset  #: every missing row lies below this offset (N2)
    ranges: tuple[tuple[Offset, Offset], ...]  #: ranges `[start, end)` that no file holds


class RowBalance(NamedTuple):
    """The rows of a partition's live files compared with its counters; a negative `missing` means
    that the files hold too many rows."""

    missing: int
    first: Offset
    below: Offset
    spare: int  #: how many rows below `:start` may exist, in files that also hold later rows

    @property
    def settles(self) -> bool:
        """Returns whether the difference concerns only rows below `:start`.  The next commit then
        adjusts the counters (N2, N4)."""
        return -self.spare <= self.missing < 0


class Suspect(NamedTuple):
    """A range of offsets that no whole file holds, and the files that lie in it."""

    start: Offset
    end: Offset
    files: tuple[DataFile, ...]


def account(files: PartitionFiles, counters: PartitionCounters) -> RowBalance | None:
    """Returns how many rows `files` lack; None if that is unknown (N3)."""
    live = files.columns(counters.start)
    rows = live["rows"]
    if bool((~live["stats"] & (rows == 0)).any()):
        return None
    missing = counters.rows - counters.removed - int(rows.sum())
    spare = int(np.minimum(rows, np.maximum(0, counters.start - live["start"])).sum())
    first, below = _whole_upto(live, counters.start), _whole_from(live, counters.end)
    return RowBalance(missing, first, below, spare)


def _whole_upto(live: Columns, start: Offset) -> Offset:
    """Returns the offset where the run of adjoining whole files that begins at `start` ends."""
    whole = live[live["whole"]]
    order = np.lexsort((whole["end"], whole["start"]))
    lows, ends = whole["start"][order], whole["end"][order]
    reached = np.maximum.accumulate(np.concatenate(([start], ends)))
    return _where(reached, lows > reached[:-1])


def _whole_from(live: Columns, end: Offset) -> Offset:
    """Returns the offset where the run of adjoining whole files that ends at `end` begins."""
    order = np.lexsort((-live["end"], -live["start"]))
    starts, stops, whole = (live[name][order] for name in ("start", "end", "whole"))
    reached = np.concatenate(([end], starts))
    return _where(reached, (stops != reached[:-1]) | ~whole)


def _where(reached: npt.NDArray[np.int64], apart: npt.NDArray[np.bool_]) -> Offset:
    """Returns what was reached before the first file that lies apart, or by all files."""
    return int(reached[np.append(apart, True).argmax()])


def rows_missing(snapshot: SnapshotView, partition: int) -> RowsMissing | None:
    """Returns the missing rows of the partition that are not settled yet; None if no row is known
    to be missing."""
    counters = snapshot.partition(partition)
    found = account(snapshot.files_of(partition), counters)
    if found is None or found.missing <= 0 or found.below <= counters.start:
        return None
    gaps = tuple(_gaps(snapshot, partition))
    return RowsMissing(found.missing, found.first, found.below, gaps)


def first_missing(snapshot: SnapshotView, partition: int) -> Offset:
    """Returns the offset from which rows of the partition may be missing; NONE if no row is
    missing."""
    found = snapshot.rows_missing(partition)
    return NONE if found is None else found.first


def missing_of(snapshot: SnapshotView, partitions: Iterable[int]) -> dict[int, RowsMissing]:
    """Returns the missing rows of each of the `partitions`, by partition.

    Partitions without missing rows, and those whose counters the snapshot lacks, are left out.
    """
    found = {p: snapshot.rows_missing(p) for p in partitions if p in snapshot.counters}
    return {partition: each for partition, each in found.items() if each is not None}


def _gaps(snapshot: SnapshotView, partition: int) -> Iterator[tuple[Offset, Offset]]:
    counters = snapshot.partition(partition)
    at = counters.start
    held = snapshot.files_of(partition).columns()
    for start, stop in sorted(zip(held["start"].tolist(), held["end"].tolist(), strict=True)):
        if start > at:
            yield at, min(start, counters.end)
        at = max(at, stop)
    if at < counters.end:
        yield at, counters.end


def lost_in(
    missing: RowsMissing | None, start: Offset, end: Offset
) -> tuple[Offset, Offset] | None:
    """Returns the first missing range in `[start, end)`, cut to it."""
    for low, high in missing.ranges if missing is not None else ():
        if low < end and high > start:
            return max(low, start), min(high, end)
    return None


def data_loss(
    uri: str, partition: int, version: int, start: Offset, end: Offset
) -> errors.DataLoss:
    """Returns the error with which a read of a missing range fails."""
    return errors.DataLoss(
        f"{uri}: no file of version {version} holds offsets [{start}, {end}) of partition "
        f"{partition}: another engine deleted these rows, or restored an older version, or a "
        "restore of the cluster lost what was not in the table. "
        "`pk tier repair` brings back what the local log still has, `pk tier accept` settles it",
        offset=str(start),
        next_offset=str(end),
        partition=str(partition),
    )


def check_rows(uri: str, snapshot: SnapshotView) -> None:
    """Raises `TierTableChanged` if a partition holds rows that pk did not write."""
    for partition, counters in snapshot.counters.items():
        found = account(snapshot.files_of(partition), counters)
        if found is not None and found.missing < 0 and not found.settles:
            raise errors.TierTableChanged(
                f"{uri}: version {snapshot.version} holds {-found.missing} rows of partition "
                f"{partition} more than pk's counters say: another engine inserted them, or "
                "brought back rows that `pk tier accept` had settled; delete them, or restore "
                "the version before",
                uri=uri,
                version=str(snapshot.version),
            )


def settled(
    files: PartitionFiles,
    counters: PartitionCounters,
    start: Offset,
    sums: Mapping[str, int] | None = None,
) -> PartitionCounters:
    """Returns the counters after `:start` has moved to `start`.  Rows of files wholly below it
    count as removed (N1), and missing rows below it are settled (N2).  `sums`: row sums of files
    whose names do not state them (N6)."""
    passed = [file for file in files.below(start) if file.max_offset >= counters.start]
    left = sum(file.rows for file in passed)
    found = account(files, counters)
    moved = counters._replace(start=start, removed=counters.removed + left)
    if found is not None and ((found.missing > 0 and found.below <= start) or found.settles):
        moved = moved._replace(removed=moved.removed + found.missing)
        return rebased(files, moved, sums)
    unsummed = counters.removed and not counters.removed_sum  # by an earlier build
    if unsummed or any(row_sum_of(file, sums or {}) == UNREADABLE for file in passed):
        return rebased(files, moved, sums) if left else moved
    removed_sum = (counters.removed_sum + total_sum(passed, sums or {})) % SUM_MODULUS
    return moved._replace(removed_sum=removed_sum)


def rebased(
    files: PartitionFiles, counters: PartitionCounters, sums: Mapping[str, int] | None
) -> PartitionCounters:
    """Returns the counters with the removed_sum that makes the live files' sums add up (N6)."""
    live = files.live(counters.start)
    removed_sum = (counters.sum - total_sum(live, sums or {})) % SUM_MODULUS
    return counters._replace(removed_sum=removed_sum)


def row_sum_of(file: DataFile, sums: Mapping[str, int]) -> int | None:
    """Returns the sum of the file's row hashes: from its name, or else from `sums`; None = it must
    be read for that."""
    name = parse_written_path(file.path)
    return sums.get(file.path) if name is None else name.row_sum


def total_sum(files: Iterable[DataFile], sums: Mapping[str, int]) -> int:
    """Returns the sum of the row hashes of the files; a file of unknown sum or damaged counts 0."""
    return sum(max(0, row_sum_of(file, sums) or 0) for file in files) % SUM_MODULUS


def unsummed(
    files: PartitionFiles, counters: PartitionCounters, start: Offset, sums: Mapping[str, int]
) -> list[DataFile]:
    """Returns the files whose row sums `settled` needs and that are not known (N6)."""
    found = account(files, counters)
    settles = found is not None and (found.settles or (found.missing > 0 and found.below <= start))
    passed = [file for file in files.below(start) if file.max_offset >= counters.start]
    needed: Iterable[DataFile] = passed
    unknown = counters.removed and not counters.removed_sum
    unknown = unknown or any(row_sum_of(file, sums) == UNREADABLE for file in passed)
    unread = any(row_sum_of(file, sums) is None for file in passed)
    if settles or (passed and unknown and not unread):
        needed = files.live(start)
    return [file for file in needed if row_sum_of(file, sums) is None]


def is_due(files: PartitionFiles, counters: PartitionCounters) -> bool:
    """Returns whether a commit would settle missing rows with `:start` where it is now (N2)."""
    found = account(files, counters)
    if found is None:
        return False
    return found.settles or (found.missing > 0 and found.below <= counters.start)


def suspects(snapshot: SnapshotView, partition: int) -> list[Suspect]:
    """Returns the ranges where rows may be missing: a repair copies them again and replaces their
    files.

    A range with a file that reaches beyond it (written by another engine's Z-order) is left out.
    """
    counters = snapshot.partition(partition)
    live = list(snapshot.files_of(partition).live(counters.start))
    found: list[Suspect] = []
    at = counters.start
    bounds = [held_by(file) for file in live if is_whole(file)]
    for start, stop in [*sorted(bounds), (counters.end, counters.end)]:
        if start > at:
            inside = [file for file in live if held_by(file)[0] < start and held_by(file)[1] > at]
            broken = [file for file in inside if not is_whole(file)]
            if all(at <= file.min_offset and file.max_offset < start for file in broken):
                found.append(Suspect(at, start, tuple(broken)))
        at = max(at, stop)
    return found
