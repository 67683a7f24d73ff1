"""The job `snapshot`: the latest value of each key as of X, as a Delta table (rule C3).

    the newest version of the topic's table ─► plan (snapshot_plan) ─► rows behind X
      ─► the buckets of their keys ─► these files of the snapshot ─► latest row of each key ─► files
      ─► one exact commit with X (tiering/snapshot_table Z1)

Executors read with pk's own reader, which compares all checksums, and write with the builder of
tier files.  Spark shuffles the rows by bucket, so a bucket is in one task.  The job needs no lease:
of two runs on the same version the later commit is refused.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pk import errors
from pk.schedules import DONE
from pk.sparkconnector.maintenance import snapshot_files, snapshot_plan, tables
from pk.sparkconnector.maintenance.snapshot_files import WRITTEN_SCHEMA, ReadFiles, SnapshotPlace
from pk.sparkconnector.maintenance.snapshot_plan import SnapshotPlan
from pk.sparkconnector.maintenance.tables import TablePlace
from pk.sparkconnector.table_store import with_credentials
from pk.tiering import accounting, snapshot_table
from pk.tiering.data_files import DataFile
from pk.tiering.snapshot_table import SnapshotVersion
from pk.tiering.table import Snapshot
from pk.types import Offset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

#: Bytes of files that a task reads, about.
TASK_BYTES = 64 << 20
_PK_ERROR = re.compile(r"^pk\.[\w.]+\.(\w+): (.+)$", re.MULTILINE)


@dataclass(slots=True, frozen=True)
class SnapshotReport:
    """The result of one run."""

    topic: str
    uri: str
    version: int  #: of the snapshot
    kind: str  #: whole, increment or unchanged
    why: str  #: the reason for a whole run
    rows: int  #: of the snapshot
    written_files: int
    removed_files: int
    positions: dict[int, Offset]  #: X of each partition

    @property
    def outcome(self) -> str:
        return DONE

    def summary(self) -> str:
        """Return the result as one line."""
        why = f" ({self.why})" if self.why else ""
        return (
            f"version {self.version}, {self.kind}{why}: {self.rows} keys, {self.written_files} "
            f"files written, {self.removed_files} replaced"
        )


class _Run(NamedTuple):
    """What one run works on."""

    place: SnapshotPlace
    table: Snapshot
    before: SnapshotVersion | None
    planned: SnapshotPlan
    live: Mapping[str, DataFile]  #: files of the snapshot's newest version, usable or not


def snapshot(
    spark: SparkSession, bootstrap: str, topic: str, *, whole: bool = False
) -> SnapshotReport:
    """Bring the snapshot of a topic to the newest version of the topic's table.

    whole: read all rows, also if an increment would do

    Raises `InvalidRequest` if the topic has no table, or a record without a key; `DataLoss` if rows
    of the table are missing (T17); `DamagedTierFile`; `TierTableChanged`; the retriable
    `UnknownTierRange` if another run committed meanwhile.
    """
    found, partitions = tables.place_of(bootstrap, topic)
    table = tables.newest(found, partitions).snapshot
    _check_complete(found, table, partitions)
    options = with_credentials(found.storage_options)
    uri = snapshot_table.snapshot_uri(found.uri, topic, found.topic_id)
    place = SnapshotPlace(found, uri, options)
    handle = snapshot_table.opened(uri, options)
    before: SnapshotVersion | None = None
    live: Mapping[str, DataFile] = {}
    if handle is not None:
        live = snapshot_files.live_files(handle)
        try:
            before = snapshot_table.version_of(
                handle, uri, options, topic, found.topic_id, partitions
            )
        except errors.SnapshotUnusable:
            before = None  # a whole run replaces it
    planned = snapshot_plan.plan(table, before, whole=whole)
    run = _Run(place, table, before, planned, live)
    stale = [each for each in live.values() if snapshot_plan.is_stale(each, table)]
    if before is not None and not planned.why_whole and not planned.slices and not stale:
        return _report(run, before.version, "unchanged", before.rows, 0, 0)
    if handle is None:
        handle = snapshot_table.created(uri, options, found.topic_id)
    added, removed = _computed(spark, run, stale)
    version = snapshot_files.commit(handle, place, planned.ends, live, added, removed)
    snapshot_files.delete_old(handle, place)
    kind = "whole" if planned.why_whole else "increment"
    gone = {each.path for each in removed}
    rows = sum(each.rows for path, each in live.items() if path not in gone)
    rows += sum(each.file.rows for each in added)
    return _report(run, version, kind, rows, len(added), len(removed))


def _report(
    run: _Run, version: int, kind: str, rows: int, written: int, removed: int
) -> SnapshotReport:
    return SnapshotReport(
        run.place.table.topic, run.place.uri, version, kind, run.planned.why_whole, rows, written,
        removed, dict(run.planned.ends),
    )  # fmt: skip


def _check_complete(place: TablePlace, table: Snapshot, partitions: Sequence[int]) -> None:
    """Raise `DataLoss` if rows of the table are missing: a missing tombstone would be ignored."""
    accounting.check_rows(place.uri, table)
    for partition, missing in accounting.missing_of(table, partitions).items():
        raise errors.DataLoss(
            f"{place.uri}: {missing.rows} rows of partition {partition} are missing, because "
            "another engine deleted them: run `pk tier repair` or `pk tier accept` first"
        )


# -- the computation -------------------------------------------------------------------------------


def _computed(
    spark: SparkSession, run: _Run, stale: Sequence[DataFile]
) -> tuple[list[snapshot_files.Written], list[DataFile]]:
    """Write the files of the new version; return them and the files that they replace."""
    slice_ = _frame(spark, run, _table_tasks(run))
    try:
        if run.planned.why_whole:
            return _written(spark, run, slice_), list(run.live.values())
        slice_ = slice_.persist()
        changed = {
            (row.partition, row.bucket)
            for row in slice_.select("partition", "bucket").distinct().collect()
        }
        for file in stale:
            bucket = snapshot_table.bucket_of(file.path)
            if bucket is not None:
                changed.add((file.partition, bucket[0]))
        replaced = [
            file
            for path, file in run.live.items()
            if (bucket := snapshot_table.bucket_of(path)) is not None
            and (file.partition, bucket[0]) in changed
        ]
        old = _frame(spark, run, _snapshot_tasks(run, replaced))
        return _written(spark, run, slice_.unionByName(old)), replaced
    except Exception as cause:
        raise typed(cause) from cause
    finally:
        slice_.unpersist()


def typed(cause: Exception) -> Exception:
    """Return the error of pk that a Spark task raised; otherwise `cause` itself."""
    if isinstance(cause, errors.PkError):
        return cause
    for name, message in reversed(_PK_ERROR.findall(str(cause))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.PkError):
            return kind(message)
    return cause


def _written(spark: SparkSession, run: _Run, rows: DataFrame) -> list[snapshot_files.Written]:
    """Keep the latest row of each key, and write one file for each bucket that has rows."""
    from pyspark.sql import functions as F

    others = [name for name in snapshot_files.COLUMNS if name not in ("partition", "key")]
    buckets = sum(run.planned.buckets.values())
    tasks = max(1, min(buckets, 3 * _parallelism(spark)))
    latest = (
        rows.repartition(tasks, "partition", "bucket")
        .groupBy("partition", "bucket", "buckets", "key")
        .agg(F.max_by(F.struct(*others), F.col("offset")).alias("row"))
        .select("partition", "bucket", "buckets", "key", "row.*")
        .where(F.col("value").isNotNull())
        .sortWithinPartitions("partition", "bucket", "offset")
    )
    place = run.place

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from snapshot_files.write(place, batches)

    found = latest.mapInArrow(write, WRITTEN_SCHEMA).collect()
    return [pickle.loads(bytes(row.written)) for row in found]


def _parallelism(spark: SparkSession) -> int:
    if hasattr(spark, "sparkContext"):
        return int(spark.sparkContext.defaultParallelism)
    return os.cpu_count() or 1


def _frame(spark: SparkSession, run: _Run, tasks: Sequence[ReadFiles]) -> DataFrame:
    """Return the rows that the tasks read, each with its bucket."""
    from pyspark.sql import functions as F

    rows = snapshot_files.frame(spark, tasks, snapshot_files.read_with_buckets)
    return rows.withColumn(
        "bucket", F.expr("CAST(pmod(xxhash64(key), CAST(buckets AS BIGINT)) AS INT)")
    )


def _table_tasks(run: _Run) -> list[ReadFiles]:
    """Return the tasks that read the table's rows in `[since, end)` of each partition."""
    found: list[ReadFiles] = []
    for partition in run.planned.slices:
        since, end = run.planned.since[partition], run.planned.ends[partition]
        files = [f for f in run.table.files_of(partition) if f.max_offset >= since]
        found += _tasks(run, partition, files, (since, end), of_table=True)
    return found


def _snapshot_tasks(run: _Run, files: Sequence[DataFile]) -> list[ReadFiles]:
    """Return the tasks that read files of the snapshot, without rows below the start
    (maintenance/snapshot_plan N4)."""
    found: list[ReadFiles] = []
    for partition in sorted({file.partition for file in files}):
        of_partition = [file for file in files if file.partition == partition]
        span = run.table.partition(partition).start, run.planned.ends[partition]
        found += _tasks(run, partition, of_partition, span, of_table=False)
    return found


def _tasks(
    run: _Run,
    partition: int,
    files: Sequence[DataFile],
    span: tuple[Offset, Offset],
    *,
    of_table: bool,
) -> Iterator[ReadFiles]:
    some: list[DataFile] = []
    buckets = run.planned.buckets[partition]
    for file in files:
        if some and sum(each.size for each in (*some, file)) > TASK_BYTES:
            yield ReadFiles(run.place, partition, tuple(some), span, buckets, of_table)
            some = []
        some.append(file)
    if some:
        yield ReadFiles(run.place, partition, tuple(some), span, buckets, of_table)


# -- reading ---------------------------------------------------------------------------------------


def snapshot_version(bootstrap: str, topic: str) -> SnapshotVersion:
    """Return the newest version of a topic's snapshot: its X, its files.

    Raises `SnapshotUnusable` if there is none, or it was changed; `InvalidRequest` if the topic has
    no table.
    """
    place, partitions = tables.place_of(bootstrap, topic)
    uri = snapshot_table.snapshot_uri(place.uri, topic, place.topic_id)
    options = with_credentials(place.storage_options)
    return snapshot_table.load(uri, options, topic, place.topic_id, partitions)


def read_snapshot(
    spark: SparkSession, topic: str, bootstrap: str, *, version: SnapshotVersion | None = None
) -> DataFrame:
    """Return the snapshot of a topic: the latest row of each key as of X.

    version: of `snapshot_version`, whose X the caller wants to go on from; None = the newest

    The frame has the columns partition, offset, timestamp, timestamp_type, key, value, headers and
    leader_epoch.  Raises what `snapshot_version` raises; a damaged file fails the task that reads
    it, with SnapshotUnusable.
    """
    found, _ = tables.place_of(bootstrap, topic)
    version = version or snapshot_version(bootstrap, topic)
    place = SnapshotPlace(found, version.uri, with_credentials(found.storage_options))
    tasks = [
        ReadFiles(place, file.partition, (file,), (0, 2**63 - 1), 1, of_table=False)
        for file in version.files.values()
    ]
    read: Callable[[ReadFiles], Iterator[pa.RecordBatch]] = snapshot_files.read_with_buckets
    return snapshot_files.frame(spark, tasks, read).select(*snapshot_files.COLUMNS)
