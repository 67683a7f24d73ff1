"""The job `compaction`: the table of a compacted topic keeps the latest record of each key.

The driver holds the lease of the table and plans on one version (compaction_plan).  The executors
find the rows that leave, and write the files that change (compaction_rows).  The driver hands them
over to the owner of the table in portions.  If the owner refuses one because the files have changed
meanwhile, the driver plans the partitions of this portion again on the newest version.  From then
on each partition has hand-overs of its own: retention that takes files of one does not undo the
work for the others.

Times are those of the active controller, which come with the lease; the driver's clock is not used.
Without a time no age is compared and no horizon is set; superseded rows leave all the same.

design/0018 has the histories that the order of the hand-overs survives.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.compaction.plan import CompactionLimits
from pk.schedules import DONE
from pk.sparkconnector import table_files
from pk.sparkconnector.maintenance import compaction_plan, compaction_rows, tables
from pk.sparkconnector.maintenance.compaction_plan import (
    FileChange,
    PartitionCleaning,
    Portion,
    TopicLimits,
)
from pk.sparkconnector.maintenance.compaction_rows import (
    FirstPass,
    RewrittenRun,
    ScannedFile,
    SecondPass,
)
from pk.sparkconnector.maintenance.tables import TablePlace, TableVersion
from pk.tiering.data_files import DataFile
from pk.tiering.layout import SUM_MODULUS
from pk.tiering.rewrites import LANDS_WITHIN_MS
from pk.types import Offset
from pk.wire import pk_pb2 as wire

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pk.client.maintenance_lease import MaintenanceLease

#: Bytes of the files of a run, which become one file.
TARGET_BYTES = 128 << 20
#: Rows of one task of the first pass, about.
ROWS_PER_BUCKET = 500_000
TASKS_MAX = 2_000
#: Plans on a newer version that finish no partition, before the job gives up.
ROUNDS_MAX = 16
#: A cleaning must be in place within this time and a second for each megabyte.
CLEANING_MS = 600_000
#: The files or a leader changed meanwhile: plan again on the newest version.
_CHANGED = (errors.UnknownTierRange, errors.FencedLeaderEpoch)


@dataclass(slots=True, frozen=True)
class PartitionReport:
    """What a run did with one partition."""

    partition: int
    status: str  #: `cleaned`, `not due` or `nothing to do`
    dirty_ratio: float  #: before the run
    cleaned_end: Offset  #: after the run: offsets below it are cleaned
    files_before: int
    files_after: int
    rows_before: int
    rows_after: int
    bytes_before: int
    bytes_after: int
    superseded: int = 0  #: rows that left, by reason
    without_key: int = 0
    tombstones: int = 0
    horizons: int = 0  #: tombstones that got a delete horizon


@dataclass(slots=True, frozen=True)
class CompactionReport:
    """The result of one run."""

    topic: str
    version: int  #: of the table, after the run
    plans: int  #: versions on which the job planned
    rewritten_bytes: int  #: of the files that were replaced
    written_bytes: int
    partitions: tuple[PartitionReport, ...]

    @property
    def outcome(self) -> str:
        return DONE

    def summary(self) -> str:
        """Return the result as one line."""
        cleaned = sum(each.status == "cleaned" for each in self.partitions)
        left = sum(each.rows_after for each in self.partitions)
        return (
            f"version {self.version}: {cleaned} of {len(self.partitions)} partitions cleaned; "
            f"{self.removed_rows} rows removed, {left} are left; {self.rewritten_bytes} bytes "
            f"became {self.written_bytes}"
        )

    @property
    def removed_rows(self) -> int:
        """Return how many rows left the table."""
        return sum(p.superseded + p.without_key + p.tombstones for p in self.partitions)


def compaction(
    spark: SparkSession,
    bootstrap: str,
    topic: str,
    *,
    force: bool = False,
    target_bytes: int = TARGET_BYTES,
    rows_per_bucket: int = ROWS_PER_BUCKET,
    progress: Callable[[int, str], None] = lambda partition, status: None,
) -> CompactionReport:
    """Remove superseded records and expired tombstones from a compacted topic's table.

    A partition is cleaned if it is due by min_cleanable_dirty_ratio or max_compaction_lag_ms.

    force: clean the partitions that are not due, too
    target_bytes: adjoining files that change become files made of about this many bytes
    rows_per_bucket: rows whose keys one task of the first pass holds, about
    progress: called with a partition and its status when the partition is done

    Raises `LeaseHeld` if another job has the lease of the table, `InvalidRequest` if the topic has
    no table or is not compacted, or if rows of the table are missing, `InvalidOption` if keys do
    not fit into memory, `DamagedTierFile` for a file that cannot be read, and the retriable
    `UnknownTierRange` if the files changed at every attempt.

    Example::

        report = compaction(spark, "broker:9292", "customers")
        print(report.removed_rows, [p.dirty_ratio for p in report.partitions])
    """
    from pk.client.maintenance_lease import MaintenanceLease

    if target_bytes < 1 or rows_per_bucket < 1:
        raise errors.InvalidOption("target_bytes and rows_per_bucket are positive")
    place, partitions = tables.place_of(bootstrap, topic)
    limits = _limits_of(bootstrap, topic)
    with MaintenanceLease(bootstrap, topic, "compaction") as lease:
        if lease.topic_id != place.topic_id:
            raise errors.UnknownTopicId(
                f"topic {topic} was deleted and created again: run it again"
            )
        job = _Compaction(spark, place, partitions, lease, limits, target_bytes, rows_per_bucket)
        return job.run(force, progress)


def _limits_of(bootstrap: str, topic: str) -> TopicLimits:
    from pk.client.admin import AdminClient

    with AdminClient(bootstrap) as admin:
        found = {each.name: each.value for each in admin.describe_configs(topic)}
    if "compact" not in found["cleanup_policy"]:
        raise errors.InvalidRequest(
            f"topic {topic} is not compacted: its cleanup_policy is {found['cleanup_policy']}"
        )
    limits = CompactionLimits(
        float(found["min_cleanable_dirty_ratio"]),
        int(found["min_compaction_lag_ms"]),
        int(found["max_compaction_lag_ms"]),
    )
    return TopicLimits(limits, int(found["delete_retention_ms"]))


class _Round:
    """One version, its cleanings, and what the first pass found."""

    def __init__(self, version: TableVersion, cleanings: Sequence[PartitionCleaning]) -> None:
        self.version = version
        self.cleanings = cleanings
        self.files: tuple[DataFile, ...] = tuple(f for each in cleanings for f in each.files)
        self.changes: dict[str, FileChange] = {}

    def finished(self, done: PartitionCleaning) -> bool:
        """Whether the partition needs no hand-over."""
        counters = self.version.snapshot.partition(done.partition)
        return done.cleaning.end <= counters.cleaned and not any(
            file.path in self.changes for file in done.files
        )


class _Compaction:
    """One run of the job."""

    def __init__(
        self,
        spark: SparkSession,
        place: TablePlace,
        partitions: Sequence[int],
        lease: MaintenanceLease,
        limits: TopicLimits,
        target_bytes: int,
        rows_per_bucket: int,
    ) -> None:
        self._spark = spark
        self._place = place
        self._partitions = partitions
        self._lease = lease
        self._limits = limits
        self._target_bytes = target_bytes
        self._rows_per_bucket = rows_per_bucket
        self._secret = os.urandom(32)
        #: where the cleaning of each partition ends: the same on every version
        self._ends: dict[int, Offset] = {}
        self._status: dict[int, str] = {}
        self._ratios: dict[int, float] = {}
        self._results: dict[int, list[RewrittenRun]] = {partition: [] for partition in partitions}
        self._rewritten = self._written = 0
        self._refused = False  #: whether a hand-over was refused

    def run(self, force: bool, progress: Callable[[int, str], None]) -> CompactionReport:
        """Clean the partitions, and return the report."""
        first: TableVersion | None = None
        plans = fruitless = 0
        while fruitless < ROUNDS_MAX:
            plans += 1
            version = tables.newest(self._place, self._partitions)
            first = first or version
            finished = len(self._status)
            cleanings = self._cleanings(version, force, progress)
            if cleanings:
                with contextlib.suppress(*_CHANGED):
                    self._clean(_Round(version, cleanings), progress)
            if len(self._status) == len(self._partitions):
                last = tables.newest(self._place, self._partitions)
                return self._report(first, last, plans)
            fruitless = 0 if len(self._status) > finished else fruitless + 1
        raise errors.UnknownTierRange(
            f"{self._place.uri}: the files changed during each of {ROUNDS_MAX} attempts: run the "
            "job again"
        )

    # -- the plan ----------------------------------------------------------------------------------

    def _cleanings(
        self, version: TableVersion, force: bool, progress: Callable[[int, str], None]
    ) -> list[PartitionCleaning]:
        """Return the cleanings of the partitions that are due and not done yet."""
        self._lease.check()
        snapshot = version.snapshot
        now, starts = self._lease.now(), self._lease.local_log_starts()
        holds = self._lease.retention_holds(self._partitions)
        size = sum(file.size for file in snapshot.files.values())
        now_ms = None if now is None else now.earliest_ms
        deadline_ms = None if now is None else now.latest_ms + CLEANING_MS + size // 1000
        found = []
        for partition in self._partitions:
            if partition in self._status:
                continue
            each = compaction_plan.clean_partition(
                snapshot,
                partition,
                self._limits,
                now_ms=now_ms,
                deadline_ms=deadline_ms,
                settled_end=starts.get(partition, 0),
                hold=holds.get(partition),
                end=self._ends.get(partition),
            )
            self._ratios.setdefault(partition, each.plan.dirty_ratio)
            if partition in self._ends or each.plan.due or (force and each.files):
                self._ends.setdefault(partition, each.cleaning.end)
                found.append(each)
            else:
                self._done(partition, "not due", progress)
        return found

    def _done(self, partition: int, status: str, progress: Callable[[int, str], None]) -> None:
        self._status[partition] = status
        progress(partition, status)

    # -- the passes --------------------------------------------------------------------------------

    def _clean(self, one: _Round, progress: Callable[[int, str], None]) -> None:
        with self._decisions(one) as decisions:
            for row in _counts(decisions):
                change = FileChange(row.superseded, row.without_key, row.tombstones, row.horizons)
                one.changes[one.files[row.file].path] = change
            left = []
            for each in one.cleanings:
                if one.finished(each):
                    idle = not self._results[each.partition]
                    self._done(each.partition, "nothing to do" if idle else "cleaned", progress)
                else:
                    left.append(each)
            self._rewrite_and_hand_over(one, left, decisions, progress)

    def _rewrite_and_hand_over(
        self,
        one: _Round,
        left: Sequence[PartitionCleaning],
        decisions: DataFrame,
        progress: Callable[[int, str], None],
    ) -> None:
        """Clean partitions in portions.  What is refused is left to a plan on a newer version: its
        files, or a leader, changed meanwhile.
        """
        refused: set[int] = set()
        for portion in compaction_plan.portions(
            left, one.changes, self._target_bytes, apart=self._refused
        ):
            if not portion.partitions.isdisjoint(refused):
                continue  # its earlier part is missing (maintenance/compaction_plan N4)
            self._lease.check()
            try:
                results = self._rewrite(one, portion, decisions) if portion.runs else []
                self._hand_over(one, portion, results)
            except _CHANGED:
                refused |= portion.partitions
                self._refused = True
                continue
            for each in portion.finished:
                self._done(each.partition, "cleaned", progress)

    @contextlib.contextmanager
    def _decisions(self, one: _Round) -> Iterator[DataFrame]:
        """Yield the decisions about the rows of all files, as compaction_rows has them."""
        nulls = table_files.null_values(
            self._place.uri, self._place.storage_options, one.version.snapshot.version
        )
        rows = sum(file.rows for file in one.files)
        given = FirstPass(
            self._place,
            tuple(ScannedFile(file, nulls.get(file.path) != 0) for file in one.files),
            {c.partition: (c.plan.first_dirty, c.cleaning) for c in one.cleanings},
            max(1, min(TASKS_MAX, -(-rows // self._rows_per_bucket))),
            self._secret,
            {c.partition: one.version.snapshot.partition(c.partition).start for c in one.cleanings},
        )
        tables.describe_job(self._spark, f"pk compaction {self._place.topic}: keys")
        numbers = self._spark.range(0, len(one.files), 1, max(1, min(TASKS_MAX, len(one.files))))
        scanned = numbers.mapInArrow(partial(compaction_rows.scan, given), compaction_rows.ROWS)
        moved = scanned.repartition(given.buckets, "bucket")
        decisions = moved.mapInArrow(
            partial(compaction_rows.decide, given), compaction_rows.DECISIONS
        ).persist()
        try:
            failed = decisions.where("error IS NOT NULL").select("error").head()
            if failed is not None:
                raise pickle.loads(bytes(failed.error))
            yield decisions
        finally:
            decisions.unpersist()

    def _rewrite(self, one: _Round, portion: Portion, decisions: DataFrame) -> list[RewrittenRun]:
        """Write the files of the runs of a portion; return the results in their order."""
        numbers = {file.path: number for number, file in enumerate(one.files)}
        of_files = [(numbers[f.path], run.number) for run in portion.runs for f in run.files]
        horizons = {}
        if portion.times:
            timed = [c for c in one.cleanings if c.cleaning.now_ms is not None]
            horizons = {each.partition: each.cleaning.new_horizon for each in timed}
        given = SecondPass(
            self._place, {run.number: run for run in portion.runs}, horizons, portion.times
        )
        tables.describe_job(self._spark, f"pk compaction {self._place.topic}: files")
        runs = self._spark.createDataFrame(of_files, "file int, run int")
        wanted = decisions.join(runs.hint("broadcast"), "file")
        spread = wanted.select("run", "offsets", "codes").repartitionByRange(
            min(TASKS_MAX, len(portion.runs)), "run"
        )
        rows = (
            spread.sortWithinPartitions("run")
            .mapInArrow(partial(compaction_rows.rewrite, given), compaction_rows.RESULTS)
            .collect()
        )
        found = {row.run: pickle.loads(bytes(row.result)) for row in rows}
        for result in found.values():
            if isinstance(result, errors.PkError):
                raise result
        return [found[run.number] for run in portion.runs]

    # -- the hand-over -----------------------------------------------------------------------------

    def _hand_over(self, one: _Round, portion: Portion, results: Sequence[RewrittenRun]) -> None:
        aged = any(each.horizons or each.tombstones for each in results)
        deadline_ms = one.cleanings[0].cleaning.deadline_ms
        if aged:
            assert deadline_ms is not None
            now = self._lease.now()
            if now is None or now.latest_ms + 2 * LANDS_WITHIN_MS > deadline_ms:
                raise errors.UnknownTierRange("the cleaning is late: plan again")
        change = hand_over(one.version, portion, results, deadline_ms if aged else None)
        self._lease.commit(change)
        for run, result in zip(portion.runs, results, strict=True):
            self._results[run.partition].append(result)
            self._rewritten += sum(file.size for file in run.files)
            self._written += wire.AddFile.FromString(result.add).size

    def _report(self, first: TableVersion, last: TableVersion, plans: int) -> CompactionReport:
        found = []
        for partition in self._partitions:
            results = self._results[partition]
            before = first.snapshot.files_of(partition)
            after = last.snapshot.files_of(partition)
            found.append(
                PartitionReport(
                    partition,
                    self._status[partition],
                    self._ratios[partition],
                    last.snapshot.partition(partition).cleaned,
                    len(before),
                    len(after),
                    sum(file.rows for file in before),
                    sum(file.rows for file in after),
                    sum(file.size for file in before),
                    sum(file.size for file in after),
                    sum(each.superseded for each in results),
                    sum(each.without_key for each in results),
                    sum(each.tombstones for each in results),
                    sum(each.horizons for each in results),
                )
            )
        return CompactionReport(
            self._place.topic,
            last.snapshot.version,
            plans,
            self._rewritten,
            self._written,
            tuple(found),
        )


def hand_over(
    version: TableVersion,
    portion: Portion,
    results: Sequence[RewrittenRun],
    deadline_ms: int | None,
) -> wire.CommitToTableRequest:
    """Return the request by which the written files replace those of the runs.

    deadline_ms: of the horizons; None = no row's horizon is set or compared
    """
    snapshot = version.snapshot
    change = wire.CommitToTableRequest(
        version_read=snapshot.version,
        data_change=any(each.removed for each in results),
        deadline_ms=deadline_ms or 0,
    )
    counters: dict[int, wire.TierCounter] = {}
    for partition in sorted(portion.partitions):
        claim = max(0, snapshot.partition(partition).claim)
        counters[partition] = change.counters.add(partition=partition, claim=claim)
    for each in portion.finished:
        counters[each.partition].cleaned = each.cleaning.end
    for run, result in zip(portion.runs, results, strict=True):
        counter = counters[run.partition]
        counter.removed_added += result.removed
        counter.forgotten = max(counter.forgotten, result.forgotten)
        left = sum(row_sum for _, _, row_sum in result.read)
        if result.add:
            add = wire.AddFile.FromString(result.add)
            change.adds.append(add)
            left -= add.row_sum
        counter.removed_sum_added = (counter.removed_sum_added + left) % SUM_MODULUS
        for path, rows, row_sum in result.read:
            change.removes.add(path=path, partition=run.partition, rows=rows, row_sum=row_sum)
    return change


def _counts(decisions: DataFrame) -> list[Any]:
    """Return the numbers of decisions about each file."""
    names = ("superseded", "without_key", "tombstones", "horizons")
    return decisions.groupBy("file").agg(*(_sum(name) for name in names)).collect()


def _sum(name: str) -> Any:
    from pyspark.sql import functions

    return functions.sum(name).alias(name)
