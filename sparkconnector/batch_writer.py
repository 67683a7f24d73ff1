"""A batch write: the tasks send their rows, and the driver makes them visible together.

Delivery is exactly once: the records belong to one transaction, which `commit` ends.  A job that
fails leaves nothing visible.  The transaction is named by `txnAppId` and `txnVersion`, and a second
write with the same pair changes nothing.  Without them the name is a uuid.  Task properties of a
stream are never used, because a function of `foreachBatch` may write twice.

`mode("overwrite")` is refused unless the option `truncateTopic` is true.  With it, the driver
deletes the records that the topic held before the job, after the new rows are committed.  A job
that fails therefore deletes nothing.  A repeated write of a committed pair deletes nothing either,
because the new rows could be among those that the topic holds.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from pk import errors
from pk.client.participant import BatchOfRun
from pk.sparkconnector import batch_commit
from pk.sparkconnector.planner import warn
from pk.sparkconnector.sink_options import SinkOptions, job_name
from pk.sparkconnector.task_writer import Columns, write_all
from pk.sparkconnector.worker_errors import sentence_alone

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class PkWriter(DataSourceArrowWriter):
    """The batch writer; Spark pickles it to the tasks and to the process that commits."""

    def __init__(self, sink: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._sink = sink
        self._columns = Columns(schema, sink)
        self._batch = _batch_of(sink)
        self._before: Mapping[tuple[str, int], int] = {}
        if overwrite and not sink.truncate:
            raise errors.InvalidOption(
                'mode("overwrite") would delete what the topic holds: use mode("append"), or give '
                'option("truncateTopic", "true") beside it to delete the older records',
                option="truncateTopic",
            )
        if sink.truncate and not overwrite:
            warn('option truncateTopic has no effect without mode("overwrite")')
        if overwrite:
            self._before = self._ends()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_all(self._sink, self._columns, iterator, self._batch)

    @sentence_alone
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        already = batch_commit.commit(self._sink, messages)
        if self._before and already:
            warn("this write was committed before; the older records of the topic stay")
        elif self._before:
            from pk.sparkconnector.connection import cluster

            line = cluster(self._sink.bootstrap, None, self._sink.connect_timeout_ms)
            line.delete_before(self._before)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        batch_commit.abort(self._sink, messages, self._batch)

    def _ends(self) -> Mapping[tuple[str, int], int]:
        from pk.sparkconnector.connection import cluster

        if self._sink.topic is None:
            raise errors.InvalidOption(
                "mode overwrite needs the option topic: it says what to replace"
            )
        line = cluster(self._sink.bootstrap, None, self._sink.connect_timeout_ms)
        bounds = line.bounds(line.topics([self._sink.topic]), read_committed=False)
        return {(one.topic_id, one.partition): one.latest for one in bounds}


def _batch_of(sink: SinkOptions) -> BatchOfRun | None:
    """Return the batch of a new write; each write is a run of its own, which fences older ones."""
    if not sink.exactly_once:
        return None
    run = str(uuid.UUID(bytes=os.urandom(16), version=4))
    if not sink.app:
        return BatchOfRun(job_name(run, sink.topic), run, run, 0, batch_write=True)
    job, unknown = job_name(sink.app, sink.topic), sink.write_unknown
    return BatchOfRun(job, sink.app, run, sink.version, write_unknown=unknown)
