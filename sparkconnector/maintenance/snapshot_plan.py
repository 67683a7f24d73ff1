"""Decides how a snapshot is brought to the newest version of its topic's table.  Pure.

A whole run reads every live row of the table.  An increment reads the rows behind X, and those
files of the snapshot that their keys or retention concern.

Invariants
  N1  An increment is refused if compaction has removed a tombstone at or above X (`forgotten`): the
      snapshot may have the key that this tombstone deleted.
  N2  An increment is refused if the table ends below X, or if a partition has no X: the table was
      restored to an older version, or the partition is new.
  N3  An increment is refused if the files behind X have INCREMENT_SHARE of the table's rows.
  N4  A row below the start of its partition is in no snapshot of the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pk.tiering.data_files import DataFile
from pk.tiering.snapshot_table import SnapshotVersion, bucket_of
from pk.tiering.table import Snapshot
from pk.types import Offset

INCREMENT_SHARE = 0.3
#: Bytes of the table's files for each bucket of keys, about; a bucket is one file of the snapshot.
BUCKET_BYTES = 64 << 20
BUCKETS_MAX = 10_000


class SnapshotPlan(NamedTuple):
    """What a run reads.

    why_whole: the reason to read all rows; "" = an increment.
    since: for each partition, the first offset that is read.
    ends: X of the new version.
    buckets: for each partition, how many buckets its keys have.
    """

    why_whole: str
    since: Mapping[int, Offset]
    ends: Mapping[int, Offset]
    buckets: Mapping[int, int]

    @property
    def slices(self) -> tuple[int, ...]:
        """The partitions that have rows to read."""
        return tuple(each for each in self.ends if self.since[each] < self.ends[each])


def plan(table: Snapshot, before: SnapshotVersion | None, *, whole: bool = False) -> SnapshotPlan:
    """Plan a run on a version of the table.  `before`: the newest usable snapshot."""
    ends = {each: counters.end for each, counters in sorted(table.counters.items())}
    starts = {each: table.partition(each).start for each in ends}
    why = "asked for" if whole else why_whole(table, before)
    if why or before is None:
        return SnapshotPlan(why, starts, ends, {each: buckets(table, each) for each in ends})
    known = {file.partition: bucket_of(path) for path, file in before.files.items()}
    counts = {
        each: found[1] if (found := known.get(each)) is not None else buckets(table, each)
        for each in ends
    }
    since = {each: max(before.positions[each], starts[each]) for each in ends}
    return SnapshotPlan("", since, ends, counts)


def why_whole(table: Snapshot, before: SnapshotVersion | None) -> str:
    """Return why an increment is refused; "" = it is not."""
    if before is None:
        return "there is no usable snapshot"
    for each, counters in sorted(table.counters.items()):
        at = before.positions.get(each)
        if at is None:
            return f"partition {each} is new"
        if at > counters.end:
            return f"partition {each} of the table ends at {counters.end}, below {at}"
        if at < counters.forgotten:
            return f"compaction forgot tombstones of partition {each} up to {counters.forgotten}"
    if any(bucket_of(path) is None for path in before.files):
        return "it has files of another build"
    total = sum(file.rows for file in table.files.values())
    behind = sum(
        file.rows
        for file in table.files.values()
        if file.max_offset >= before.positions.get(file.partition, 0)
    )
    if behind >= INCREMENT_SHARE * total and behind:
        return f"{behind} of {total} rows are new"
    return ""


def buckets(table: Snapshot, partition: int) -> int:
    """Return the number of buckets of a partition's keys."""
    size = sum(file.size for file in table.files_of(partition))
    return max(1, min(BUCKETS_MAX, -(-size // BUCKET_BYTES)))


def is_stale(file: DataFile, table: Snapshot) -> bool:
    """Whether a file of the snapshot has rows below the start of its partition (N4)."""
    return file.min_offset < table.partition(file.partition).start
