"""Checks what a maintenance job hands over before it replaces files of a table.  Pure.

A job reads the files of one version, writes other files with the same rows, or with those that a
compaction keeps, and states the rows that it took away.  The owner takes the files only if rows and
row sums add up (rules T2, C5, C6).  The files that a job read may be gone; then the job plans again
on the newest version.
"""

from __future__ import annotations

from collections.abc import Callable

from pk import errors
from pk.tiering.data_files import DataFile, held_by
from pk.tiering.layout import SUM_MODULUS, parse_job_path, parse_written_path
from pk.tiering.table import Snapshot
from pk.types import Offset
from pk.wire import pk_pb2 as wire

#: Maximum number of files that a hand-over adds and removes.
ACTIONS_MAX = 1_000
#: A hand-over that an owner takes lands within this time, or is answered as failed.
LANDS_WITHIN_MS = 60_000


def check(snapshot: Snapshot, change: wire.CommitToTableRequest) -> None:
    """Raises `InvalidRequest` if the numbers of a hand-over contradict each other or the
    version."""
    if not change.removes and (change.adds or not all(c.cleaned for c in change.counters)):
        raise errors.InvalidRequest("the hand-over of a job replaces files, and it names none")
    if len(change.adds) + len(change.removes) > ACTIONS_MAX:
        raise errors.InvalidRequest(f"a hand-over has at most {ACTIONS_MAX} files")
    counted = {counter.partition for counter in change.counters}
    named = {add.partition for add in change.adds}
    named |= {remove.partition for remove in change.removes}
    if not named <= counted or len(counted) != len(change.counters):
        raise errors.InvalidRequest(f"files of {sorted(named)}, counters of {sorted(counted)}")
    for counter in change.counters:
        _check_partition(snapshot, change, counter)


def check_deadline(
    change: wire.CommitToTableRequest, now_ms: int | None, within_ms: int = LANDS_WITHIN_MS
) -> None:
    """Raises `UnknownTierRange` for delete horizons that may land after their deadline (C4).

    now_ms: None = the broker does not trust its clock (rule L10)
    within_ms: the time within which a hand-over lands that the owner takes
    """
    if change.deadline_ms and (now_ms is None or now_ms + within_ms > change.deadline_ms):
        why = "this broker does not trust its clock" if now_ms is None else "it is late"
        raise errors.UnknownTierRange(
            f"the delete horizons for {change.topic} are not taken, because {why}: plan again"
        )


def check_starts(
    snapshot: Snapshot, change: wire.CommitToTableRequest, start_of: Callable[[int], Offset]
) -> None:
    """Raises `UnknownTierRange` if a file lies wholly below the start of its partition.

    The rows of such a file count as removed.  If it leaves, they would be live again in a file that
    also has later rows.  If it comes, they would be missing.
    `start_of`: the start of a partition after the version that is being planned.
    """
    for remove in change.removes:
        start = start_of(remove.partition)
        if snapshot.files[remove.path].max_offset < start:
            raise errors.UnknownTierRange(
                f"{remove.path} lies below the start {start} of its partition: plan again"
            )
    for add in change.adds if change.removes else ():
        start = start_of(add.partition)
        if add.max_offset < start:
            raise errors.UnknownTierRange(
                f"{add.path} lies below the start {start} of its partition: plan again"
            )


def _check_partition(
    snapshot: Snapshot, change: wire.CommitToTableRequest, counter: wire.TierCounter
) -> None:
    partition = counter.partition
    if counter.start != counter.end or counter.rows_added or counter.sum_added:
        raise errors.InvalidRequest(f"partition {partition}: a job appends no rows")
    if counter.removed_added and not change.data_change:
        raise errors.InvalidRequest(f"partition {partition}: rows leave without data_change (T16)")
    end = snapshot.partition(partition).end
    if max(counter.cleaned, counter.forgotten) > end:
        raise errors.InvalidRequest(
            f"partition {partition}: it ends at {end} and was not cleaned above"
        )
    named = {each.partition for each in change.removes} | {a.partition for a in change.adds}
    if partition not in named:
        if counter.cleaned and not (counter.removed_added or counter.removed_sum_added):
            return  # only `cleaned` moves: the range has no row to remove
        raise errors.InvalidRequest(f"partition {partition}: counters without files")
    gone, rows, total = [], 0, 0
    for remove in change.removes:
        if remove.partition == partition:
            file = snapshot.files[remove.path]
            gone.append(file)
            rows += file.rows
            total += _sum_of(file, remove)
    span = _span(gone)
    for add in change.adds:
        if add.partition == partition:
            _check_add(add, span)
            rows -= add.rows
            total -= add.row_sum
    if rows != counter.removed_added or counter.removed_added < 0:
        raise errors.InvalidRequest(
            f"partition {partition}: the files lose {rows} rows, the counters say "
            f"{counter.removed_added}"
        )
    if total % SUM_MODULUS != counter.removed_sum_added % SUM_MODULUS:
        raise errors.InvalidRequest(f"partition {partition}: the row sums do not add up")


def _sum_of(file: DataFile, remove: wire.RemoveFile) -> int:
    """Returns the row sum of a file: from its name, or as the job found it."""
    name = parse_written_path(file.path)
    if remove.rows != file.rows or (name is not None and name.row_sum != remove.row_sum):
        raise errors.InvalidRequest(
            f"{file.path}: the job read {remove.rows} rows with the sum {remove.row_sum}, the "
            f"table says {file.rows} rows"
            + (f" with the sum {name.row_sum}" if name is not None else "")
        )
    return int(remove.row_sum)


def _span(files: list[DataFile]) -> tuple[Offset, Offset]:
    if not files:
        raise errors.InvalidRequest("the hand-over of a job adds rows")
    ranges = [held_by(file) for file in files]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _check_add(add: wire.AddFile, span: tuple[Offset, Offset]) -> None:
    name = parse_job_path(add.path)
    if name is None or (name.partition, name.start, name.end, name.row_sum) != (
        add.partition,
        add.start,
        add.end,
        add.row_sum,
    ):
        raise errors.InvalidRequest(f"{add.path[:300]} is no name of a job's file with these facts")
    inside = span[0] <= add.start <= add.min_offset <= add.max_offset < add.end <= span[1]
    if not inside or add.rows <= 0 or add.size <= 0:
        raise errors.InvalidRequest(f"{add.path} is empty, or lies outside of what it replaces")
