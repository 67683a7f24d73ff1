"""One version of a topic's table, as a maintenance job reads it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.clock import SystemClock
from pk.sparkconnector import table_files, table_store, tier_scan
from pk.sparkconnector.ranges import TierFile
from pk.tiering import layout
from pk.tiering.convert import BuiltFile
from pk.tiering.data_files import DataFile
from pk.tiering.layout import FILE_SCHEMA, DataName
from pk.tiering.table import Snapshot
from pk.wire import pk_pb2 as wire

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

DESCRIBE_TIMEOUT_S = 60.0


@dataclass(slots=True, frozen=True)
class TablePlace:
    """Where a table is; executors get no more than this."""

    topic: str
    topic_id: str
    uri: str
    storage_options: dict[str, str]
    bootstrap: str = ""

    def file_system(self) -> tuple[Any, str]:
        """Return an Arrow file system, and the table's root in it."""
        return table_store.file_system(self.uri, self.storage_options)

    def new_attempt(self) -> str:
        """Return a name that no other attempt of a task has: a speculative one must not overwrite
        a file that a version may name already."""
        return os.urandom(8).hex()

    def wall_ms(self) -> int:
        """Return the time that is stated for a file written now; it is informative."""
        return SystemClock().wall_ms()


@dataclass(slots=True, frozen=True)
class TableVersion:
    """One version of a topic's table."""

    place: TablePlace
    snapshot: Snapshot


def place_of(bootstrap: str, topic: str) -> tuple[TablePlace, list[int]]:
    """Return the place of a topic's table, and the topic's partitions.

    Raises `InvalidRequest` if the topic has no table, `UnknownTopicOrPartition` for an unknown
    topic, `TierTableChanged` if the table was altered, and the retriable `TierUnavailable` while no
    tier process can tell.
    """
    from pk.client.admin import AdminClient

    with AdminClient(bootstrap) as admin:
        found = admin.describe_tier(topic, timeout_s=DESCRIBE_TIMEOUT_S)
    if isinstance(found.problem, errors.TierTableChanged):
        raise found.problem
    if not found.uri or found.version < 0:
        if isinstance(found.problem, errors.RetriableError):
            raise found.problem  # the tier process restarts, or the store is away
        raise errors.InvalidRequest(f"topic {topic} has no table to maintain: {found.status}")
    options = dict(found.storage_options)
    place = TablePlace(topic, found.topic_id, found.uri, options, bootstrap)
    return place, [each.partition for each in found.partitions]


def newest(place: TablePlace, partitions: Sequence[int]) -> TableVersion:
    """Return the newest version of the table, compared with its checksums (rule T2)."""
    found = table_files.load_snapshot(place.uri, place.storage_options, place.topic_id, partitions)
    return TableVersion(place, found)


def listed(file: DataFile) -> TierFile:
    return TierFile(file.path, file.min_offset, file.max_offset, file.size, file.rows)


def rows_of(
    place: TablePlace, file: DataFile, schema: pa.Schema = FILE_SCHEMA
) -> Iterator[pa.RecordBatch]:
    """Yield every row of a file, as it is stored, in the columns of `schema`, a row group at a
    time.

    Raises `DamagedTierFile`.
    """
    source, root = place.file_system()
    return tier_scan.whole_file(place.uri, source, root, listed(file), file.partition, schema)


def put(place: TablePlace, name: DataName, built: BuiltFile) -> bytes:
    """Put the file of a job into the store; return the `wire.AddFile` that a hand-over has of it.

    Raises `TierUnavailable`.
    """
    source, root = place.file_system()
    path = layout.job_path(name)
    table_store.put_file(source, f"{root}/{path}", built.data)
    add = wire.AddFile(
        path=path,
        partition=name.partition,
        start=name.start,
        end=name.end,
        size=len(built.data),
        rows=built.rows,
        row_sum=built.row_sum,
        min_offset=built.min_offset,
        max_offset=built.max_offset,
        min_timestamp_ms=built.min_timestamp_ms,
        max_timestamp_ms=built.max_timestamp_ms,
        modified_ms=place.wall_ms(),
        null_keys=built.null_keys,
        null_values=built.null_values,
    )
    found: bytes = add.SerializeToString()
    return found


def run_tasks(
    spark: SparkSession, tasks: Sequence[Any], work: Callable[[Any], Any], name: str
) -> list[Any]:
    """Run `work(task)` on the executors, each task in a Spark task of its own.

    Returns the results in the order of the tasks.  Tasks and results are pickled.

    An error of pk that a task raised is raised here as it is.
    """
    if not tasks:
        return []

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            for row in batch.to_pylist():
                try:
                    result = work(pickle.loads(row["task"]))
                except errors.PkError as error:
                    result = error.with_traceback(None)
                data = pa.array([pickle.dumps(result)], pa.binary())
                yield pa.RecordBatch.from_arrays(
                    [pa.array([row["number"]], pa.int64()), data], ["number", "result"]
                )

    numbered = [(number, bytearray(pickle.dumps(task))) for number, task in enumerate(tasks)]
    frame = spark.createDataFrame(numbered, "number long, task binary")
    spread = frame.repartitionByRange(len(tasks), "number")
    describe_job(spark, name)
    rows = spread.mapInArrow(run, "number long, result binary").collect()
    found = {row.number: pickle.loads(bytes(row.result)) for row in rows}
    for number in range(len(tasks)):
        if isinstance(found[number], errors.PkError):
            raise found[number]
    return [found[number] for number in range(len(tasks))]


def describe_job(spark: SparkSession, name: str) -> None:
    """Name the jobs that follow in Spark's console."""
    if hasattr(spark, "sparkContext"):
        spark.sparkContext.setJobDescription(name)
