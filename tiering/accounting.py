"""Which rows a version of a table lacks (rule T17).  Pure.

The counters say how many rows the copier appended and how many left with retention.  What is left
must be in the live files, as numRecords says.  Fewer: another engine took rows away, with a DELETE
or by restoring an older version.  More: it put rows there, or brought back what had been settled.

Where rows are missing follows from the files.  A file of the copier's is whole: its name gives its
offsets, and its checksums its rows.  So is any file with as many rows as there are offsets between
its bounds.  Offsets that lie in no file's range are shown as missing.  Rows missing between the
bounds of a file that another engine wrote are counted, but nothing tells which they are.

Invariants
  N1  files that lie wholly below `:start` do not count: their rows left when `:start` passed them
  N2  missing rows are settled once `:start` has passed `below`: from there on every file is whole,
      and one follows the other up to the table's end
  N4  rows below `:start` that share a file with later ones may come and go: another engine may
      erase them, and restore a version that has them
  N3  a version with a file whose rows nothing tells is not judged
  N5  from `:start` to `first` whole files hold every offset, so that nothing is missing there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from pk import errors
from pk.tiering.data_files import DataFile
from pk.tiering.layout import PartitionCounters, parse_data_path
from pk.types import NONE, Offset


class Snapshot(Protocol):
    """What is asked of a version of a table (table.py)."""

    @property
    def version(self) -> int: ...

    @property
    def counters(self) -> Mapping[int, PartitionCounters]: ...

    def partition(self, partition: int) -> PartitionCounters: ...

    def files_of(self, partition: int) -> Sequence[DataFile]: ...

    def rows_missing(self, partition: int) -> RowsMissing | None: ...


class RowsMissing(NamedTuple):
    """What a partition of a version lacks."""

    rows: int
    first: Offset  #: no missing row lies below this: retention stops here (N5)
    below: Offset  #: every missing row lies below this (N2)
    ranges: tuple[tuple[Offset, Offset], ...]  #: `[start, end)` that no file holds


class Account(NamedTuple):
    """A partition's live files against its counters; `missing` below 0 = rows too many."""

    missing: int
    first: Offset
    below: Offset
    spare: int  #: rows that may stand below `:start`, in files that straddle it

    @property
    def settles(self) -> bool:
        """Whether the difference concerns rows below `:start` only, so that the next commit takes
        it into the counters (N2, N4)."""
        return -self.spare <= self.missing < 0


class Suspect(NamedTuple):
    """Offsets that no whole file holds, and the files that lie between them."""

    start: Offset
    end: Offset
    files: tuple[DataFile, ...]


def account(files: Sequence[DataFile], counters: PartitionCounters) -> Account | None:
    """How many rows `files` lack; None if that is not known (N3)."""
    live = [file for file in files if file.max_offset >= counters.start]
    if any(_unknown(file) for file in live):
        return None
    missing = counters.rows - counters.removed - sum(file.rows for file in live)
    spare = sum(min(file.rows, max(0, counters.start - held_by(file)[0])) for file in live)
    first, below = _whole_upto(live, counters.start), _whole_from(live, counters.end)
    return Account(missing, first, below, spare)


def _unknown(file: DataFile) -> bool:
    return not file.stats and not file.rows


def held_by(file: DataFile) -> tuple[Offset, Offset]:
    """The offsets `[start, end)` that a file answers for."""
    name = parse_data_path(file.path)
    if name is not None:
        return name.start, name.end
    return file.min_offset, file.max_offset + 1


def is_whole(file: DataFile) -> bool:
    """Whether no row between the file's bounds is missing."""
    if parse_data_path(file.path) is not None:
        return True
    return file.rows == file.max_offset - file.min_offset + 1


def _whole_upto(live: Sequence[DataFile], start: Offset) -> Offset:
    """Where the whole files that follow one another from `start` on end."""
    at = start
    for low, high in sorted(held_by(file) for file in live if is_whole(file)):
        if low > at:
            break
        at = max(at, high)
    return at


def _whole_from(live: Sequence[DataFile], end: Offset) -> Offset:
    at = end
    for file in sorted(live, key=held_by, reverse=True):
        start, stop = held_by(file)
        if stop != at or not is_whole(file):
            break
        at = start
    return at


def rows_missing(snapshot: Snapshot, partition: int) -> RowsMissing | None:
    """What the partition lacks and what nothing has settled; None = nothing, as far as known."""
    counters = snapshot.partition(partition)
    found = account(snapshot.files_of(partition), counters)
    if found is None or found.missing <= 0 or found.below <= counters.start:
        return None
    gaps = tuple(_gaps(snapshot, partition))
    return RowsMissing(found.missing, found.first, found.below, gaps)


def first_missing(snapshot: Snapshot, partition: int) -> Offset:
    """The offset from which rows of the partition may be missing; NONE = no row is missing."""
    found = snapshot.rows_missing(partition)
    return NONE if found is None else found.first


def missing_of(snapshot: Snapshot, partitions: Iterable[int]) -> dict[int, RowsMissing]:
    """Those of `partitions` that lack rows, as far as the snapshot knows their counters."""
    found = {p: snapshot.rows_missing(p) for p in partitions if p in snapshot.counters}
    return {partition: each for partition, each in found.items() if each is not None}


def _gaps(snapshot: Snapshot, partition: int) -> Iterator[tuple[Offset, Offset]]:
    counters = snapshot.partition(partition)
    at = counters.start
    for start, stop in sorted(map(held_by, snapshot.files_of(partition))):
        if start > at:
            yield at, min(start, counters.end)
        at = max(at, stop)
    if at < counters.end:
        yield at, counters.end


def lost_in(
    missing: RowsMissing | None, start: Offset, end: Offset
) -> tuple[Offset, Offset] | None:
    """The first missing range in `[start, end)`, cut to it."""
    for low, high in missing.ranges if missing is not None else ():
        if low < end and high > start:
            return max(low, start), min(high, end)
    return None


def data_loss(
    uri: str, partition: int, version: int, start: Offset, end: Offset
) -> errors.DataLoss:
    """What a reader of a missing range gets."""
    return errors.DataLoss(
        f"{uri}: no file of version {version} holds offsets [{start}, {end}) of partition "
        f"{partition}: another engine deleted these rows, or restored an older version. "
        "`pk tier repair` brings back what the local log still has, `pk tier accept` settles it",
        offset=str(start),
        next_offset=str(end),
        partition=str(partition),
    )


def check_rows(uri: str, snapshot: Snapshot) -> None:
    """Raises `TierTableChanged` if a partition holds rows that pk did not put there."""
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
    files: Sequence[DataFile], counters: PartitionCounters, start: Offset
) -> PartitionCounters:
    """The counters once `:start` moves to `start`: what lies wholly below has left (N1), and what
    is missing below is settled (N2)."""
    left = sum(file.rows for file in files if counters.start <= file.max_offset < start)
    found = account(files, counters)
    if found is not None and ((found.missing > 0 and found.below <= start) or found.settles):
        left += found.missing
    return counters._replace(start=start, removed=counters.removed + left)


def is_due(files: Sequence[DataFile], counters: PartitionCounters) -> bool:
    """Whether a commit would settle missing rows where `:start` is now (N2)."""
    found = account(files, counters)
    if found is None:
        return False
    return found.settles or (found.missing > 0 and found.below <= counters.start)


def suspects(snapshot: Snapshot, partition: int) -> list[Suspect]:
    """Where rows may be missing: what a repair copies again, with the files it replaces.

    A stretch with a file that reaches beyond it (an outside Z-order) is left out.
    """
    counters = snapshot.partition(partition)
    live = [file for file in snapshot.files_of(partition) if file.max_offset >= counters.start]
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
