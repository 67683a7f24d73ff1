"""A streaming write: the batch write, once per trigger.

Spark gives `write` no batch id and creates a new writer for every commit, so the writer keeps
nothing between triggers.  Output mode complete sends the whole result at every trigger, as Kafka's
sink does, because a stream does not overwrite a log.  Delivery is at least once: a batch that Spark
replays after a crash is sent again.  `abort` removes nothing, because Spark may call it after a
commit that succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from pk.sparkconnector.batch_writer import Columns, PkCommit, check_messages, write_all
from pk.sparkconnector.options import SinkOptions
from pk.sparkconnector.planner import warn

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class PkStreamWriter(DataSourceStreamArrowWriter):
    """The streaming writer; Spark pickles it to the tasks and to the process that commits."""

    def __init__(self, sink: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._sink = sink
        self._columns = Columns(schema, sink)
        self.complete = overwrite

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_all(self._sink, self._columns, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        check_messages(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        stored = sum(message.rows for message in messages if isinstance(message, PkCommit))
        if stored:
            warn(f"batch {batchId} failed; {stored} rows of it stay and will come again")
