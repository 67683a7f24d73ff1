"""Plans the compaction of a table: which offsets are dirty, which files are written again.  Pure.

A partition of a table is a log whose parts are its live files (compaction/plan).  The first pass of
the job counts for each file the rows that leave and those that get a horizon (`FileChange`).  From
these counts follow the *runs*: files that become one file, or none.

A version holds ACTIONS_MAX files.  A partition whose change fits is cleaned by one hand-over,
together with others.  A larger one is cleaned in two *steps*: the hand-overs of the first only
remove superseded rows.  Horizons are set, and tombstones removed, on a version that was read after
them and has no superseded row.  Otherwise a horizon could begin while an older record of its key is
still in the table (design/0018, C2).

Invariants
  N1  Only files with a row that leaves or gets a horizon are written again, except N3.
  N2  A run is a row of adjoining clusters.  Files of a cluster have offsets that overlap; pk's own
      files are clusters of one.
  N3  Offsets that no file holds mean that another engine removed rows (rule T17).  So a run that
      has no row left takes an adjoining file with it, if there is one.
  N4  `cleaned` moves with the last hand-over of a partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pk import errors
from pk.compaction.plan import CleanablePart, CompactionLimits, CompactionPlan, plan
from pk.compaction.retain import Cleaning
from pk.log.batch import TIMESTAMP_MS_MAX
from pk.tiering import rewrites
from pk.tiering.data_files import DataFile, held_by
from pk.tiering.table import Snapshot
from pk.types import Offset

#: Files that a hand-over adds and removes, at most.
ACTIONS_MAX = rewrites.ACTIONS_MAX - 50
FILES_PER_RUN_MAX = 400
#: Compressed bytes of files with overlapping offsets, which are sorted in memory.
CLUSTER_BYTES_MAX = 256 << 20


class TopicLimits(NamedTuple):
    """The settings of a topic that a compaction of its table uses."""

    compaction: CompactionLimits
    delete_retention_ms: int


class FileChange(NamedTuple):
    """How many rows of a file leave, by reason, and how many get a horizon."""

    superseded: int = 0
    without_key: int = 0
    tombstones: int = 0
    horizons: int = 0

    @property
    def aging(self) -> int:
        """Return how many of the changes depend on the time."""
        return self.tombstones + self.horizons


class PartitionCleaning(NamedTuple):
    """The cleaning of one partition of one version."""

    partition: int
    plan: CompactionPlan
    cleaning: Cleaning
    clusters: tuple[tuple[DataFile, ...], ...]  #: the live files, in offset order

    @property
    def files(self) -> list[DataFile]:
        return [file for cluster in self.clusters for file in cluster]


class RewriteRun(NamedTuple):
    """Files of the offsets `[start, end)` that become one file, or none if no row is left."""

    number: int
    partition: int
    start: Offset
    end: Offset
    clusters: tuple[tuple[DataFile, ...], ...]

    @property
    def files(self) -> list[DataFile]:
        return [file for cluster in self.clusters for file in cluster]


class Portion(NamedTuple):
    """The runs of one hand-over."""

    runs: tuple[RewriteRun, ...]
    finished: tuple[PartitionCleaning, ...]  #: partitions whose `cleaned` moves with it
    times: bool  #: it sets horizons and removes tombstones (the second step, or the only one)

    @property
    def partitions(self) -> frozenset[int]:
        """Return the partitions whose files or counters it changes."""
        return frozenset(
            {run.partition for run in self.runs} | {each.partition for each in self.finished}
        )


def clean_partition(
    snapshot: Snapshot,
    partition: int,
    limits: TopicLimits,
    *,
    now_ms: int | None,
    deadline_ms: int | None,
    settled_end: Offset,
    hold: Offset | None,
    end: Offset | None = None,
) -> PartitionCleaning:
    """Return what a cleaning of the partition does, whether it is due or not.

    now_ms, deadline_ms: in the controller's time; None = it is not trusted (rule L10)
    settled_end: the lowest local_log_start of all assigned replicas (rule C4)
    hold: the lowest offset that a query holds; None = none (rules C1, S1)
    end: where the job has begun to clean this partition; None = choose it

    Raises `InvalidRequest` if rows are missing, or if files of another engine cannot be sorted.
    """
    counters = snapshot.partition(partition)
    files = [f for f in snapshot.files_of(partition) if f.max_offset >= counters.start]
    _check(snapshot, partition, files)
    parts = [
        CleanablePart(*held_by(file), file.size, file.min_timestamp_ms, file.max_timestamp_ms)
        for file in files
    ]
    parts.sort()
    if parts:  # the table's last offsets may be in no file: markers, and aborted rows
        parts[-1] = parts[-1]._replace(next_offset=max(parts[-1].next_offset, counters.end))
    found = plan(
        parts,
        limits.compaction,
        active=None,
        log_start=counters.start,
        cleaned_end=counters.cleaned,
        last_stable_offset=counters.end,
        hold=hold,
        now_ms=now_ms,
    )
    if end is not None:
        found = found._replace(end=end)
    retention_ms = limits.delete_retention_ms
    if deadline_ms is not None:
        retention_ms = min(retention_ms, TIMESTAMP_MS_MAX - deadline_ms)
    cleaning = Cleaning(found.end, settled_end, retention_ms, now_ms, deadline_ms)
    return PartitionCleaning(partition, found, cleaning, _clusters(files))


def _check(snapshot: Snapshot, partition: int, files: Sequence[DataFile]) -> None:
    missing = snapshot.rows_missing(partition)
    if missing is not None:
        raise errors.InvalidRequest(
            f"{missing.rows} rows of partition {partition} are missing, and files that are written "
            "again would hide where: restore the table's version, or settle them with `pk tier "
            "accept`"
        )
    for file in files:
        if not file.stats:
            raise errors.InvalidRequest(
                f"the table's log does not state the rows and offsets of {file.path}: "
                "another engine wrote it. Rewrite it with statistics (OPTIMIZE)"
            )
    for cluster in _clusters(files):
        size = sum(file.size for file in cluster)
        if len(cluster) > 1 and size > CLUSTER_BYTES_MAX:
            raise errors.InvalidRequest(
                f"{len(cluster)} files of partition {partition} have overlapping offsets and "
                f"{size} bytes: another engine scattered the rows. Rewrite them sorted by offset"
            )


def _clusters(files: Iterable[DataFile]) -> tuple[tuple[DataFile, ...], ...]:
    found: list[list[DataFile]] = []
    most = -1
    for file in sorted(files, key=lambda f: (*held_by(f), f.path)):
        start, stop = held_by(file)
        if not found or start >= most:
            found.append([])
        found[-1].append(file)
        most = max(most, stop)
    return tuple(map(tuple, found))


# -- runs ------------------------------------------------------------------------------------------


class _Stretch(NamedTuple):
    """Adjoining clusters that are written again together, or one that is not."""

    start: Offset
    end: Offset
    clusters: tuple[tuple[DataFile, ...], ...]
    size: int
    rows_left: int
    changed: bool

    @property
    def file_count(self) -> int:
        return sum(map(len, self.clusters))

    def and_next(self, after: _Stretch) -> _Stretch:
        return _Stretch(
            self.start,
            after.end,
            (*self.clusters, *after.clusters),
            self.size + after.size,
            self.rows_left + after.rows_left,
            True,
        )


def runs_of(
    cleaning: PartitionCleaning,
    changes: Mapping[str, FileChange],
    target_bytes: int,
    *,
    times: bool,
    first_number: int = 0,
) -> list[RewriteRun]:
    """Return the runs of a partition (N1–N3).

    changes: by path; a file that is missing does not change
    target_bytes: a run ends before it has more bytes than this
    times: also set horizons and remove tombstones
    """
    found: list[_Stretch] = []
    for cluster in cleaning.clusters:
        one = _stretch(cluster, changes, times)
        if found and one.changed and found[-1].changed and _adjoin(found[-1], one):
            fits = found[-1].size + one.size <= target_bytes
            if fits and found[-1].file_count + one.file_count <= FILES_PER_RUN_MAX:
                found[-1] = found[-1].and_next(one)
                continue
        found.append(one)
    _fill_up(found)
    changed = [each for each in found if each.changed]
    return [
        RewriteRun(first_number + at, cleaning.partition, each.start, each.end, each.clusters)
        for at, each in enumerate(changed)
    ]


def _stretch(
    cluster: tuple[DataFile, ...], changes: Mapping[str, FileChange], times: bool
) -> _Stretch:
    bounds = [held_by(file) for file in cluster]
    rows, changed = 0, False
    for file in cluster:
        change = changes.get(file.path, FileChange())
        gone = change.superseded + change.without_key + (change.tombstones if times else 0)
        rows += file.rows - gone
        changed = changed or gone > 0 or (times and change.horizons > 0)
    start, end = min(low for low, _ in bounds), max(high for _, high in bounds)
    return _Stretch(start, end, (cluster,), sum(f.size for f in cluster), rows, changed)


def _adjoin(before: _Stretch, after: _Stretch) -> bool:
    return before.end == after.start


def _fill_up(found: list[_Stretch]) -> None:
    """Give each stretch that has no row left a neighbour that has some (N3)."""
    at = 0
    while at < len(found):
        partner = _partner(found, at) if found[at].changed and not found[at].rows_left else None
        if partner is None:
            at += 1
            continue
        at = min(at, partner)
        found[at : at + 2] = [found[at].and_next(found[at + 1])]


def _partner(found: Sequence[_Stretch], at: int) -> int | None:
    """Return the neighbour that costs the least to write again."""
    near = []
    if at and _adjoin(found[at - 1], found[at]):
        near.append(at - 1)
    if at + 1 < len(found) and _adjoin(found[at], found[at + 1]):
        near.append(at + 1)
    return min(near, key=lambda n: (not found[n].changed, found[n].size), default=None)


# -- portions --------------------------------------------------------------------------------------


def portions(
    cleanings: Sequence[PartitionCleaning],
    changes: Mapping[str, FileChange],
    target_bytes: int,
    actions_max: int = ACTIONS_MAX,
    *,
    apart: bool = False,
) -> list[Portion]:
    """Return the hand-overs that clean the partitions, in their order.

    apart: no hand-over has two partitions
    A partition that no portion finishes needs a second step on a newer version (see the module).
    """
    found: list[Portion] = []
    together = Portion((), (), True)
    number = 0
    for each in cleanings:
        of_files = [changes[file.path] for file in each.files if file.path in changes]
        superseded = any(change.superseded or change.without_key for change in of_files)
        aging = any(change.aging for change in of_files)
        runs = runs_of(each, changes, target_bytes, times=True, first_number=number)
        if _actions(runs) <= actions_max:
            too_many = _actions((*together.runs, *runs)) > actions_max
            if too_many or (apart and together.finished):
                found.append(together)
                together = Portion((), (), True)
            together = Portion((*together.runs, *runs), (*together.finished, each), True)
        else:
            times = not superseded
            if superseded and aging:
                runs = runs_of(each, changes, target_bytes, times=False, first_number=number)
            split = [Portion(some, (), times) for some in _split(runs, actions_max)]
            if not (superseded and aging):
                split[-1] = split[-1]._replace(finished=(each,))  # N4
            found += split
        number += len(runs)
    return [*found, together] if together.finished else found


def _actions(runs: Iterable[RewriteRun]) -> int:
    return sum(len(run.files) + 1 for run in runs)


def _split(runs: Sequence[RewriteRun], actions_max: int) -> list[tuple[RewriteRun, ...]]:
    found: list[tuple[RewriteRun, ...]] = [()]
    for run in runs:
        if found[-1] and _actions((*found[-1], run)) > actions_max:
            found.append(())
        found[-1] = (*found[-1], run)
    return found
