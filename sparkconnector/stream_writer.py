"""A streaming write: one transaction for each trigger, committed by the driver.

Spark gives `write` no batch id and creates a new writer for every commit, so the writer keeps
nothing between triggers.  The tasks take query id, run id and batch id from their local properties,
and pass them to the driver in their messages.  A batch that Spark replays after a crash is
recognised by the coordinator and not written again.  Output mode complete sends the whole result at
every trigger, as Kafka's sink does, because a stream does not overwrite a log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from pk import errors
from pk.client.participant import BatchOfRun
from pk.sparkconnector import batch_commit
from pk.sparkconnector.sink_options import SinkOptions, job_name
from pk.sparkconnector.task_writer import Columns, write_all

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

#: Local properties that Spark sets for the tasks of a streaming query.
QUERY, RUN, BATCH = "sql.streaming.queryId", "spark.jobGroup.id", "streaming.sql.batchId"


class PkStreamWriter(DataSourceStreamArrowWriter):
    """The streaming writer; Spark pickles it to the tasks and to the process that commits."""

    def __init__(self, sink: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._sink = sink
        self._columns = Columns(schema, sink)
        self.complete = overwrite

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batch = batch_of_task(self._sink) if self._sink.exactly_once else None
        return write_all(self._sink, self._columns, iterator, batch)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        batch_commit.commit(self._sink, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        batch_commit.abort(self._sink, messages)


def batch_of_task(sink: SinkOptions) -> BatchOfRun:
    """Return the batch that this task writes.  Raises `UnsupportedFeature` if Spark names none."""
    context = TaskContext.get()
    found = {
        name: None if context is None else context.getLocalProperty(name)
        for name in (QUERY, RUN, BATCH)
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise errors.UnsupportedFeature(
            f"Spark gives this task no property {missing[0]}, so pk cannot tell which batch it "
            "writes: use pk.delivery=at_least_once, or foreachBatch with txnAppId and txnVersion"
        )
    query, run, batch = (str(found[name]) for name in (QUERY, RUN, BATCH))
    job, unknown = job_name(query, sink.topic), sink.write_unknown
    return BatchOfRun(job, query, run, int(batch), write_unknown=unknown)
