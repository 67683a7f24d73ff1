"""The files of a snapshot: read and written by executors, committed by the driver."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from pk import errors
from pk.clock import SystemClock
from pk.sparkconnector import table_store
from pk.sparkconnector.maintenance import tables
from pk.sparkconnector.maintenance.tables import TablePlace
from pk.tiering import convert, layout, snapshot_table
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.layout import FILE_SCHEMA, PARTITION_COLUMN, TABLE_SCHEMA, DataName
from pk.tiering.output_buffer import OutputBuffer, OutputBufferFull
from pk.tiering.row_groups import canonical
from pk.types import NONE, Offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Columns of a snapshot, in Spark; the partition and the columns of a file but the horizon.
COLUMNS = (
    "partition", "offset", "timestamp", "timestamp_type", "key", "value", "headers", "leader_epoch",
)  # fmt: skip
READ_SCHEMA = (
    "partition int, offset long, timestamp timestamp, timestamp_type int, key binary, "
    "value binary, headers array<struct<key: string, value: binary>>, leader_epoch int, buckets int"
)
WRITTEN_SCHEMA = "written binary"
#: Level of zstd: a bucket is rewritten when one of its keys changes.
LEVEL = 3
#: Replaced files stay for readers of older versions.
KEEP_HOURS = 7 * 24


class SnapshotPlace(NamedTuple):
    """A topic's table and its snapshot; executors get no more than this."""

    table: TablePlace
    uri: str
    options: dict[str, str]


class ReadFiles(NamedTuple):
    """A task: files of one partition, of which the rows with offsets in `span` are read."""

    place: SnapshotPlace
    partition: int
    files: tuple[DataFile, ...]
    span: tuple[Offset, Offset]
    buckets: int  #: of the partition's keys
    of_table: bool  #: of the topic's table; False = of the snapshot


class Written(NamedTuple):
    """A file that a task put into the store."""

    file: DataFile
    null_keys: int = 0


# -- reading ---------------------------------------------------------------------------------------


def frame(
    spark: SparkSession,
    tasks: Sequence[ReadFiles],
    read: Callable[[ReadFiles], Iterator[pa.RecordBatch]],
) -> DataFrame:
    """Return the rows that the tasks read, each task in a Spark task of its own."""
    if not tasks:
        return spark.createDataFrame([], READ_SCHEMA)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                yield from read(pickle.loads(row["task"]))

    numbered = [(number, bytearray(pickle.dumps(task))) for number, task in enumerate(tasks)]
    asked = spark.createDataFrame(numbered, "number long, task binary")
    return asked.repartitionByRange(len(tasks), "number").mapInArrow(run, READ_SCHEMA)


def read_with_buckets(task: ReadFiles) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task in the columns of READ_SCHEMA.

    Raises `InvalidRequest` for a row without a key, `DamagedTierFile`, `SnapshotUnusable`.
    """
    low, high = task.span
    for file in task.files:
        for batch in _batches(task, file):
            offsets = batch.column("offset").to_numpy()
            inside = (offsets >= low) & (offsets < high)
            kept = batch if inside.all() else batch.filter(pa.array(inside))
            if kept.num_rows:
                _check_keys(task, kept)
                yield _with_constants(kept, task)


def _batches(task: ReadFiles, file: DataFile) -> Iterator[pa.RecordBatch]:
    if task.of_table:
        return tables.rows_of(task.place.table, file)
    return snapshot_table.rows_of(task.place.uri, task.place.options, task.place.table.topic, file)


def _check_keys(task: ReadFiles, rows: pa.RecordBatch) -> None:
    if rows.column("key").null_count:
        at = np.flatnonzero(rows.column("key").is_null().to_numpy(zero_copy_only=False))[0]
        raise errors.InvalidRequest(
            f"topic {task.place.table.topic} has a record without a key (partition "
            f"{task.partition}, offset {rows.column('offset')[int(at)].as_py()}): a snapshot has "
            "the latest value of each key"
        )


def _with_constants(rows: pa.RecordBatch, task: ReadFiles) -> pa.RecordBatch:
    arrays = [rows.column(name) for name in COLUMNS if name != PARTITION_COLUMN]
    partition = pa.array(np.full(rows.num_rows, task.partition, np.int32))
    buckets = pa.array(np.full(rows.num_rows, task.buckets, np.int32))
    return pa.RecordBatch.from_arrays([partition, *arrays, buckets], [*COLUMNS, "buckets"])


# -- writing ---------------------------------------------------------------------------------------


def write(place: SnapshotPlace, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write one file for each bucket; the rows come by partition, bucket and offset.

    The rows of one bucket are in memory at a time.
    """
    bucket: tuple[int, int, int] | None = None
    pieces: list[pa.RecordBatch] = []
    for batch in batches:
        for key, piece in _by_bucket(batch):
            if key != bucket and pieces and bucket is not None:
                yield _put(place, bucket, pieces)
                pieces = []
            bucket = key
            pieces.append(piece)
    if pieces and bucket is not None:
        yield _put(place, bucket, pieces)


def _by_bucket(batch: pa.RecordBatch) -> Iterator[tuple[tuple[int, int, int], pa.RecordBatch]]:
    """Yield the runs of rows of one partition and bucket: (partition, bucket, buckets), rows."""
    keys = [batch.column(name).to_numpy() for name in ("partition", "bucket", "buckets")]
    changes = np.flatnonzero((keys[0][1:] != keys[0][:-1]) | (keys[1][1:] != keys[1][:-1])) + 1
    bounds = [0, *changes.tolist(), batch.num_rows]
    for start, end in pairwise(bounds):
        if start < end:
            partition, bucket, buckets = (int(each[start]) for each in keys)
            yield (partition, bucket, buckets), batch.slice(start, end - start)


def _put(
    place: SnapshotPlace, bucket: tuple[int, int, int], pieces: Sequence[pa.RecordBatch]
) -> pa.RecordBatch:
    rows = pa.Table.from_batches(pieces)
    horizons = pa.nulls(rows.num_rows, pa.int64())
    ready = canonical(rows.append_column("delete_horizon_ms", horizons), FILE_SCHEMA)
    buffer = OutputBuffer(2 * ready.nbytes + (1 << 20))
    while True:
        try:
            builder = convert.FileBuilder(LEVEL, buffer)
            builder.add(ready)
            built = builder.finish()
            break
        except OutputBufferFull:
            buffer.grow()
    assert built is not None
    partition, number, count = bucket
    attempt = snapshot_table.attempt_of(number, count, os.urandom(8).hex())
    start, end = built.min_offset, built.max_offset + 1
    name = DataName(partition, start, end, NONE, attempt, built.footer_crc, built.row_sum)
    path = layout.job_path(name)
    source, root = table_store.file_system(place.uri, place.options)
    source.create_dir(f"{root}/{os.path.dirname(path)}")
    table_store.put_file(source, f"{root}/{path}", built.data)
    stamps = built.min_timestamp_ms, built.max_timestamp_ms
    file = DataFile(
        path, partition, built.min_offset, built.max_offset, *stamps, built.rows, len(built.data)
    )
    return pa.RecordBatch.from_arrays([pa.array([pickle.dumps(Written(file))])], ["written"])


# -- the commit ------------------------------------------------------------------------------------


def live_files(handle: Any) -> Mapping[str, DataFile]:
    """Return the live files of a version, whatever engine wrote them."""
    from pk.tiering.delta_actions import files_of

    return files_of(pa.table(handle.get_add_actions(flatten=True)))


def commit(
    handle: Any,
    place: SnapshotPlace,
    ends: Mapping[int, Offset],
    live: Mapping[str, DataFile],
    added: Sequence[Written],
    removed: Sequence[DataFile],
) -> int:
    """Commit files and X exactly on the version of `handle`; return the new version.

    Raises the retriable `UnknownTierRange` if another run committed meanwhile.
    """
    from deltalake import CommitProperties, Transaction
    from deltalake.transaction import RemoveAction

    from pk.tiering import log_check
    from pk.tiering.delta_actions import add_action
    from pk.tiering.delta_stats import stats_of

    now_ms = SystemClock().wall_ms()
    gone = {file.path for file in removed}
    after = [file for path, file in live.items() if path not in gone]
    after += [each.file for each in added]
    new = [NewFile(each.file, now_ms) for each in added]
    actions: list[Any] = [add_action(each, stats_of(each)) for each in new]
    for file in removed:
        values: dict[str, str | None] = {PARTITION_COLUMN: str(file.partition)}
        path = log_check.quoted(file.path)
        actions.append(RemoveAction(path, True, now_ms, file.size, values))
    topic_id = place.table.topic_id
    check = snapshot_table.check_of(ends, after)
    apps = {snapshot_table.app_id(topic_id, each): end for each, end in ends.items()}
    apps[snapshot_table.check_app_id(topic_id)] = check
    read = handle.version()
    try:
        handle.create_write_transaction(
            actions,
            mode="append",
            schema=TABLE_SCHEMA,
            partition_by=[PARTITION_COLUMN],
            commit_properties=CommitProperties(
                max_commit_retries=0,
                app_transactions=[Transaction(app, version) for app, version in apps.items()],
            ),
        )
        return int(read) + 1
    except Exception as cause:  # of deltalake: its outcome may be unknown, so the table decides
        partitions = list(ends)
        topic = place.table.topic
        try:
            now = snapshot_table.load(place.uri, place.options, topic, topic_id, partitions)
        except errors.SnapshotUnusable:
            now = None
        if now is not None and now.version > read and check == _check(now):
            return now.version
        raise errors.UnknownTierRange(
            f"{place.uri}: version {int(read) + 1} was not committed, another run may have "
            f"committed meanwhile ({cause}): run the job again"
        ) from cause


def _check(version: snapshot_table.SnapshotVersion) -> int:
    return snapshot_table.check_of(version.positions, list(version.files.values()))


def delete_old(handle: Any, place: SnapshotPlace) -> None:
    """Delete files that a version replaced at least KEEP_HOURS ago.

    A failure is not the job's: the next run tries again.
    """
    try:
        handle.update_incremental()
        old = handle.vacuum(
            retention_hours=KEEP_HOURS, dry_run=True, enforce_retention_duration=False, full=False
        )
        source, root = table_store.file_system(place.uri, place.options)
        for path in old:
            source.delete_file(f"{root}/{path}")
    except Exception:  # the commit is done; a file that stays costs storage only
        return
