"""The job `optimize`: fewer and larger files with the same rows, sorted by offset.

The driver plans on one version and holds the lease of the table.  Each executor task merges the
files of one run into one file and puts it into the store.  The driver hands the runs over in
portions.  The owner refuses a portion of which a file is gone meanwhile (another engine's OPTIMIZE,
retention).  The driver then hands over the runs that the newest version still has, and plans the
others again.

Invariants
  O1  Only files below the first version's ends are merged: the job ends however much comes.
  O2  After a refusal the driver plans again.  Where the start of a partition has passed files of
      the plan before, the next plan leaves twice as many files at its begin alone.  So under
      constant retention each plan holds for twice as long as the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pk import errors
from pk.schedules import DONE
from pk.sparkconnector.maintenance import optimize_plan, tables
from pk.sparkconnector.maintenance.optimize_plan import MergeRun
from pk.sparkconnector.maintenance.tables import TablePlace, TableVersion
from pk.tiering import convert, layout, row_groups, rowhash
from pk.tiering.data_files import DataFile
from pk.tiering.layout import SUM_MODULUS, parse_written_path
from pk.tiering.output_buffer import OutputBuffer, OutputBufferFull
from pk.types import NONE
from pk.wire import pk_pb2 as wire

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from pk.client.maintenance_lease import MaintenanceLease

TARGET_BYTES = 128 << 20
#: Level of zstd: the file is written once and read often.
LEVEL = 9
#: Files that a hand-over replaces, about.
FILES_PER_COMMIT = 400
#: Plans in a row of which nothing is merged.
ROUNDS_MAX = 8
#: How often the runs of one portion that are still in the table are handed over.
HAND_OVERS_MAX = 8


@dataclass(slots=True, frozen=True)
class OptimizeReport:
    """The result of one run."""

    topic: str
    version: int  #: of the table, after the run
    files_before: int
    files_after: int
    rewritten_rows: int
    rewritten_bytes: int  #: of the files that were replaced
    written_bytes: int
    plans: int  #: versions on which the job planned
    refused_runs: int = 0  #: that were merged, and not used because a file of theirs was gone

    @property
    def outcome(self) -> str:
        return DONE

    def summary(self) -> str:
        """Return the result as one line."""
        refused = f"; {self.refused_runs} runs lost files meanwhile" if self.refused_runs else ""
        return (
            f"version {self.version}: {self.files_before} files before, {self.files_after} after; "
            f"{self.rewritten_rows} rows rewritten, {self.rewritten_bytes} bytes became "
            f"{self.written_bytes}{refused}"
        )


class MergedRun(NamedTuple):
    """A run, the file that replaces it, and the row sums of its files as they were read."""

    run: MergeRun
    add: bytes  #: wire.AddFile
    sums: tuple[int, ...]


class MergeTask(NamedTuple):
    """What an executor does: merge the files of a run."""

    place: TablePlace
    run: MergeRun


def optimize(
    spark: SparkSession, bootstrap: str, topic: str, *, target_bytes: int = TARGET_BYTES
) -> OptimizeReport:
    """Merge the small files of a topic's table into files of about `target_bytes`.

    Raises `LeaseHeld` if another job has the lease of the table, `InvalidRequest` if the topic has
    no table, `DamagedTierFile` for a file that cannot be read, and the retriable `UnknownTierRange`
    if the files changed at every attempt.
    """
    from pk.client.maintenance_lease import MaintenanceLease

    if target_bytes < 1:
        raise errors.InvalidOption(f"target_bytes is positive, not {target_bytes}")
    place, partitions = tables.place_of(bootstrap, topic)
    with MaintenanceLease(bootstrap, topic, "optimize") as lease:
        if lease.topic_id != place.topic_id:
            raise errors.UnknownTopicId(
                f"topic {topic} was deleted and created again: run it again"
            )
        return _Optimize(spark, place, partitions, lease, target_bytes).run()


class _Optimize:
    """One run of the job."""

    def __init__(
        self,
        spark: SparkSession,
        place: TablePlace,
        partitions: Sequence[int],
        lease: MaintenanceLease,
        target_bytes: int,
    ) -> None:
        self._spark = spark
        self._place = place
        self._partitions = partitions
        self._lease = lease
        self._target_bytes = target_bytes
        self._done: list[MergedRun] = []
        self._refused = 0
        self._left_alone: dict[int, int] = {}  #: files at the begin of a partition (O2)

    def run(self) -> OptimizeReport:
        """Merge the files, and return the report."""
        first = version = tables.newest(self._place, self._partitions)
        ends = {each: first.snapshot.partition(each).end for each in self._partitions}
        plans = fruitless = 0
        while fruitless < ROUNDS_MAX:
            plans += 1
            runs = optimize_plan.plan(
                version.snapshot, self._target_bytes, ends=ends, left_alone=self._left_alone
            )
            done, refused = len(self._done), self._refused
            for some in _portions(runs):
                self._merge_and_commit(version, some)
                if self._refused != refused:
                    break
            version = tables.newest(self._place, self._partitions)
            if self._refused == refused:
                break
            self._leave_alone(version, runs)
            fruitless = 0 if len(self._done) > done else fruitless + 1
        if self._refused and not self._done:
            raise errors.UnknownTierRange(
                f"{self._place.uri}: the files changed during each of {ROUNDS_MAX} attempts: run "
                "the job again"
            )
        return OptimizeReport(
            self._place.topic,
            version.snapshot.version,
            len(first.snapshot.files),
            len(version.snapshot.files),
            sum(file.rows for each in self._done for file in each.run.files),
            sum(file.size for each in self._done for file in each.run.files),
            sum(wire.AddFile.FromString(each.add).size for each in self._done),
            plans,
            self._refused,
        )

    def _merge_and_commit(self, version: TableVersion, runs: Sequence[MergeRun]) -> None:
        self._lease.check()
        tasks = [MergeTask(self._place, run) for run in runs]
        merged: list[MergedRun] = tables.run_tasks(
            self._spark, tasks, merge, f"pk optimize {self._place.topic}"
        )
        for _ in range(HAND_OVERS_MAX):
            try:
                self._lease.commit(hand_over(version, merged))
            except (errors.UnknownTierRange, errors.FencedLeaderEpoch):
                version = tables.newest(self._place, self._partitions)
                merged = self._still_there(version, merged)
                if not merged:
                    return
            else:
                self._done += merged
                return
        self._refused += len(merged)

    def _still_there(self, version: TableVersion, merged: Sequence[MergedRun]) -> list[MergedRun]:
        """Return the runs whose files the table still has; count the others."""
        found = [each for each in merged if optimize_plan.is_there(version.snapshot, each.run)]
        self._refused += len(merged) - len(found)
        return found

    def _leave_alone(self, version: TableVersion, runs: Sequence[MergeRun]) -> None:
        """Note how many files retention may take before the next plan is done (O2)."""
        known = dict(self._left_alone)
        for run in runs:
            if expired := optimize_plan.files_expired(version.snapshot, run):
                count = 2 * (known.get(run.partition, 0) + expired)
                self._left_alone[run.partition] = max(count, self._left_alone.get(run.partition, 0))


def _portions(runs: Sequence[MergeRun]) -> Iterator[list[MergeRun]]:
    """Yield runs that are handed over together."""
    some: list[MergeRun] = []
    for run in runs:
        if some and sum(len(each.files) for each in (*some, run)) > FILES_PER_COMMIT:
            yield some
            some = []
        some.append(run)
    if some:
        yield some


def hand_over(version: TableVersion, merged: Sequence[MergedRun]) -> wire.CommitToTableRequest:
    """Return the request by which the merged files replace their runs."""
    snapshot = version.snapshot
    change = wire.CommitToTableRequest(version_read=snapshot.version, data_change=False)
    for partition in sorted({each.run.partition for each in merged}):
        change.counters.add(partition=partition, claim=max(0, snapshot.partition(partition).claim))
    for each in merged:
        change.adds.append(wire.AddFile.FromString(each.add))
        for file, row_sum in zip(each.run.files, each.sums, strict=True):
            change.removes.add(
                path=file.path, partition=file.partition, rows=file.rows, row_sum=row_sum
            )
    return change


# -- on the executors ------------------------------------------------------------------------------


def merge(asked: MergeTask) -> MergedRun:
    """Read the files of a run, write one file with their rows, and put it into the store."""
    buffer = OutputBuffer(2 * sum(file.size for file in asked.run.files) + (1 << 20))
    while True:
        try:
            built, sums = _build(asked, buffer)
            break
        except OutputBufferFull:
            buffer.grow()
    run = asked.run
    attempt = asked.place.new_attempt()
    name = layout.DataName(
        run.partition, run.start, run.end, NONE, attempt, built.footer_crc, built.row_sum
    )
    return MergedRun(run, tables.put(asked.place, name, built), sums)


def _build(asked: MergeTask, buffer: OutputBuffer) -> tuple[convert.BuiltFile, tuple[int, ...]]:
    builder = convert.FileBuilder(LEVEL, buffer)
    sums: list[int] = []
    for file in asked.run.files:
        total = 0
        for rows in _sorted_rows(asked.place, file):
            total += rowhash.row_sum(rows)
            builder.add(rows)
        sums.append(total % SUM_MODULUS)
    built = builder.finish()
    wanted = sum(file.rows for file in asked.run.files)
    if built is None or built.rows != wanted or built.row_sum != sum(sums) % SUM_MODULUS:
        raise errors.InternalError(f"{asked.place.uri}: the merged file lacks rows of {asked.run}")
    return built, tuple(sums)


def _sorted_rows(place: TablePlace, file: DataFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in offset order; those of another engine's file at once."""
    if parse_written_path(file.path) is not None:
        yield from tables.rows_of(place, file)
        return
    found: Any = row_groups.merge(tables.rows_of(place, file), file.min_offset, file.max_offset + 1)
    if found is not None:
        yield found
