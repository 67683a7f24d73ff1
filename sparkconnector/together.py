"""`commit_together`: a micro-batch in topics and a Delta table, both or neither (rule X11).

The tasks write the records to the topics as participants of one transaction.  The driver prepares
them, commits to the table with `txnAppId` and `txnVersion`, and commits the transaction.  The
table's commit is the decision: a driver that comes after a crash asks the log, then the table.

Invariants
  Y1  The log is asked first.  A batch that the log has is compared with its sums, and skipped in
      both, so `ReplayDiffers` is raised before Delta could skip it in silence.
  Y2  The rows are computed once: both sides read the same checkpointed rows.
  Y3  Once the batch is prepared, this driver aborts nothing.  If its commit to the table fails, the
      outcome may be unknown: the next driver or the resolver reads the table.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from pk import errors
from pk.client.participant import BatchOfRun
from pk.client.table_committer import AwaitedBatch, DecidingTable, TableBatchCommitter
from pk.sparkconnector import batch_commit
from pk.sparkconnector.planner import warn
from pk.sparkconnector.sink_options import SinkOptions, job_name, sink
from pk.sparkconnector.task_writer import Columns, PkCommit, write_all
from pk.tiering.table_evidence import ApplicationState, state_of
from pk.tiering.table_urls import normal_url
from pk.types import RowSums, TopicId

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

#: What a topic gets of a batch.
TopicRows = Callable[["DataFrame"], "DataFrame"]
#: Part of the job's name instead of a topic: no topic has this name.
_TOGETHER = "+table"


def commit_together(
    batch_df: DataFrame,
    batch_id: int,
    app_id: str,
    table: str,
    topics: str | Mapping[str, TopicRows],
    *,
    options: Mapping[str, str],
    storage_options: Mapping[str, str] | None = None,
) -> bool:
    """Write a micro-batch of `foreachBatch` to topics and to a Delta table, both or neither.

    app_id: names this writer; no other query and no other table has it.  batch_id: as Spark gives
    it.  table: URL of an existing Delta table, which gets `batch_df` as it is.  topics: one topic,
    if `batch_df` has the sink's columns; or for each topic a function that returns them.  options:
    as for `format("pk")`.  storage_options: deltalake's, to read the table's log.

    Returns whether the batch was committed before; then nothing is written.  Raises `ReplayDiffers`
    if it was committed with other rows, and `UnsupportedFeature` for a table that forgets
    transactions.
    """
    settings = _sink_of(options, app_id)
    url = normal_url(table)
    state = _state(url, app_id, storage_options)
    if state.retention:
        raise errors.UnsupportedFeature(
            f"{url} drops transactions after {state.retention}: unset "
            "delta.setTransactionRetentionDuration, or pk cannot tell whether it has a batch"
        )
    run = str(uuid.UUID(bytes=os.urandom(16), version=4))
    batch = BatchOfRun(job_name(app_id, _TOGETHER), f"table {state.table_id}", run, batch_id)
    decides = DecidingTable(url, state.table_id, app_id, batch_id)
    with TableBatchCommitter(settings.bootstrap, batch, **settings.client) as driver:
        last, awaited = driver.job()
        if awaited is not None:
            _decide(driver, awaited, decides, storage_options)
            last, _ = driver.job()
        frame = batch_df.localCheckpoint()
        pairs, sums = _write_log(_rows_of(frame, topics), settings, batch)
        accept = settings.accept_mismatch
        if not pairs and (sums or batch_id <= last):
            return driver.commit((), sums, accept_mismatch=accept)  # Y1
        if not pairs:  # without records there is nothing to prepare
            _write_table(frame, table, app_id, batch_id)
            return driver.commit((), {})
        prepared = driver.prepare(pairs, sums, decides, accept_mismatch=accept)
        if prepared is None:
            return True
        _write_table(frame, table, app_id, batch_id)  # Y3
        warning = driver.decide(prepared, commit=True)
        if warning:
            warn(f"batch {batch_id} of {app_id!r} is committed, but {warning}")
    return False


def _sink_of(options: Mapping[str, str], app_id: str) -> SinkOptions:
    given = {name: value for name, value in options.items() if name.lower() != "topic"}
    # the version of the options is not used: batch_id is checked by the coordinator
    found = sink({**given, "txnAppId": app_id, "txnVersion": "0"})
    for each in found.warnings:
        warn(each)
    return found


def _state(url: str, app: str, storage_options: Mapping[str, str] | None) -> ApplicationState:
    return state_of(url, app, dict(storage_options or {}))


def _decide(
    driver: TableBatchCommitter,
    awaited: AwaitedBatch,
    decides: DecidingTable,
    storage_options: Mapping[str, str] | None,
) -> None:
    """End the batch that an earlier driver prepared, by what the table has now."""
    before = awaited.table
    if before[:3] != decides[:3]:
        raise errors.InvalidTxnState(
            f"batch {awaited.batch} of {before.app!r} waits for the table {before.url} (id "
            f"{before.table_id}), not for {decides.url} (id {decides.table_id}): an operator "
            "decides with pk transactions resolve"
        )
    state = _state(before.url, before.app, storage_options)
    if state.table_id != before.table_id or state.retention:
        raise errors.InvalidTxnState(f"{before.url} was changed while it was read: start again")
    driver.decide(awaited, commit=state.version is not None and state.version >= before.version)


def _rows_of(frame: DataFrame, topics: str | Mapping[str, TopicRows]) -> DataFrame:
    """Return the records of all topics, with a column topic."""
    from pyspark.sql.functions import lit

    if isinstance(topics, str):
        return frame.withColumn("topic", lit(topics))
    parts = [rows(frame).withColumn("topic", lit(topic)) for topic, rows in topics.items()]
    if not parts:
        raise errors.InvalidOption("topics names no topic", option="topics")
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part, allowMissingColumns=True)
    return whole


def _write_log(
    records: DataFrame, settings: SinkOptions, batch: BatchOfRun
) -> tuple[list[tuple[int, int]], dict[TopicId, RowSums]]:
    """Write the records with Spark's tasks; return the participants, and the sums of all rows."""
    columns = Columns(records.schema, settings)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        message = write_all(settings, columns, batches, batch)
        yield pa.RecordBatch.from_pydict({"message": pa.array([pickle.dumps(message)])})

    rows = records.mapInArrow(write, "message binary").collect()
    messages: list[PkCommit] = [pickle.loads(row.message) for row in rows]
    batch_commit.check_messages(messages)
    sums: dict[TopicId, RowSums] = {}
    for each in messages:
        for topic_id, part in each.sums.items():
            sums[topic_id] = sums.get(topic_id, RowSums()).plus(part)
    return [(each.producer_id, each.epoch) for each in messages if each.joined], sums


def _write_table(frame: DataFrame, table: str, app_id: str, batch_id: int) -> None:
    """Append the rows to the table.  Delta skips a version that the table has."""
    writer = frame.write.format("delta").mode("append")
    writer.option("txnAppId", app_id).option("txnVersion", str(batch_id)).save(table)
