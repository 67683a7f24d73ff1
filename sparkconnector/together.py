"""`commit_together`: a micro-batch in topics and a Delta table, both or neither (rule X11).

The tasks write the records to the topics as participants of one transaction.  The driver prepares
them, commits to the table with `txnAppId` and `txnVersion`, and commits the transaction.  The
table's commit is the decision: a driver that comes after a crash asks the log, then the table.

The order of the steps, and what each driver may do, is in client/table_driver.

A cluster that was restored from its tier has forgotten which batches the lost one committed (rule
X9).  The table has not: it decided them.

Invariants
  Y1  The rows are computed once: both sides read the same checkpointed rows.
  Y2  After a restore, a batch that the table lacks is written: the lost cluster cannot have
      committed it.  A batch that the table has, and the log does not know, is refused, because its
      records may be in the topic.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pk import errors, generations, transactional_ids
from pk.client import table_driver
from pk.client.participant import BatchOfRun
from pk.client.table_committer import TableBatchCommitter
from pk.client.table_driver import DecidingTable, WrittenLog
from pk.sparkconnector import batch_commit
from pk.sparkconnector.planner import warn
from pk.sparkconnector.sink_options import SinkOptions, job_name, sink
from pk.sparkconnector.task_writer import Columns, PkCommit, write_all
from pk.tiering.table_decision import has_batch
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

    Returns whether the batch was committed before; then nothing is written.

    Raises `ReplayDiffers` if it was committed with other rows, or if a restored cluster cannot know
    whether its topics have the batch (onLostHistory=write writes it there), and
    `UnsupportedFeature` for a table that forgets transactions.
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
    decides = DecidingTable(url, state.table_id, app_id, batch_id)
    unknown = settings.write_unknown or not has_batch(decides, state)  # Y2
    job, query = job_name(app_id, _TOGETHER), f"table {state.table_id}"
    batch = BatchOfRun(job, query, run, batch_id, write_unknown=unknown)
    with TableBatchCommitter(settings.bootstrap, batch, **settings.client) as driver:
        work = _Driver(driver, settings, batch, batch_df, topics, table, storage_options)
        return table_driver.driven(table_driver.steps(decides), work.perform)


class _Driver:
    """Does the steps of a driver (client/table_driver) with Spark."""

    def __init__(
        self,
        driver: TableBatchCommitter,
        settings: SinkOptions,
        batch: BatchOfRun,
        batch_df: DataFrame,
        topics: str | Mapping[str, TopicRows],
        table: str,
        storage_options: Mapping[str, str] | None,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._batch = batch
        self._batch_df = batch_df
        self._topics = topics
        self._table = table
        self._storage_options = storage_options
        self._frame = batch_df
        self._unknown_job = False

    def perform(self, step: table_driver.Step) -> Any:
        """Do a step and return its result."""
        driver, accept = self._driver, self._settings.accept_mismatch
        match step:
            case table_driver.AskJob():
                job = driver.job()
                self._unknown_job = job.last < 0 and job.awaited is None
                return job
            case table_driver.ReadTable(url, app):
                return _state(url, app, self._storage_options)
            case table_driver.WriteLog():
                self._frame = self._batch_df.localCheckpoint()  # Y1
                rows = _rows_of(self._frame, self._topics)
                written = _write_log(rows, self._settings, self._batch)
                self._check_history(written)
                return written
            case table_driver.Prepare(written, decides):
                return driver.prepare(*written, decides, accept_mismatch=accept)
            case table_driver.WriteTable(app, version):
                _write_table(self._frame, self._table, app, version)
            case table_driver.Decide(awaited, commit):
                warning = driver.decide(awaited, commit=commit)
                if warning:
                    name = f"batch {awaited.batch} of {awaited.table.app!r}"
                    warn(f"{name} is committed, but {warning}")
            case table_driver.CommitSums(sums):
                return driver.commit((), sums, accept_mismatch=accept)
        return None

    def _check_history(self, written: WrittenLog) -> None:
        """Abort batch 0, and raise `ReplayDiffers`, if a restore has lost whether the log has it.

        The coordinator refuses later batches.  It cannot refuse this one, which begins a new job,
        but the table shows that the job is not new (Y2).
        """
        batch = self._batch
        restored = any(
            generations.generation_of_epoch(transactional_ids.epoch_of_producer(producer_id))
            for producer_id, _ in written.participants
        )
        if restored and self._unknown_job and not batch.write_unknown:
            self._driver.abort()
            raise errors.ReplayDiffers(
                f"the table has batch {batch.batch} of {batch.job!r}, and this cluster, which was "
                "restored from its tier, does not know whether its topics have it, too. Look for "
                "the batch's rows there. If they are missing, onLostHistory=write writes them; if "
                "some are there, it writes them a second time"
            )


def _sink_of(options: Mapping[str, str], app_id: str) -> SinkOptions:
    given = {name: value for name, value in options.items() if name.lower() != "topic"}
    # the version of the options is not used: batch_id is checked by the coordinator
    found = sink({**given, "txnAppId": app_id, "txnVersion": "0"})
    for each in found.warnings:
        warn(each)
    return found


def _state(url: str, app: str, storage_options: Mapping[str, str] | None) -> ApplicationState:
    return state_of(url, app, dict(storage_options or {}))


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


def _write_log(records: DataFrame, settings: SinkOptions, batch: BatchOfRun) -> WrittenLog:
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
    return WrittenLog([(each.producer_id, each.epoch) for each in messages if each.joined], sums)


def _write_table(frame: DataFrame, table: str, app_id: str, batch_id: int) -> None:
    """Append the rows to the table.  Delta skips a version that the table has."""
    writer = frame.write.format("delta").mode("append")
    writer.option("txnAppId", app_id).option("txnVersion", str(batch_id)).save(table)
