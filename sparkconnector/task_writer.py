"""The tasks of a sink: each sends its rows with its own producer and reports what was stored.

The columns are those of Kafka's sink: `value` (string or binary, required), and optionally `key`,
`topic`, `partition`, `headers` and `timestamp`.  Other columns are ignored with a warning.  The
option `topic` wins over the column.  For a null partition, Kafka's rule chooses one (murmur2 of the
key; sticky without a key).  A null timestamp becomes the time of sending.

With a batch, the task is a participant of the batch's transaction (docs/design/0015).  It joins
with its first rows; a task without rows does not join.  If the batch is committed already, the task
sends nothing and only sums its rows, so that the driver can compare them.

Invariants
  B1  A task returns only after all in-sync replicas acknowledged each of its rows; otherwise it
      raises.
  B2  Two tasks never share a producer id and epoch.
  B3  The sums of a task depend on its rows only, not on how Spark divides them into batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import WriterCommitMessage

from pk import errors
from pk.client.participant import BatchOfRun
from pk.sparkconnector import worker
from pk.sparkconnector.planner import warn
from pk.sparkconnector.sink_options import SinkOptions
from pk.types import RowSums, TopicId

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

#: Sends of a task that are not acknowledged yet; each has at most the rows of one Spark batch.
SENDS_WAITING_MAX = 64
_TEXT = ("string", "binary")
_TYPES: dict[str, tuple[str, ...]] = {
    "value": _TEXT,
    "key": _TEXT,
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
    "timestamp": ("timestamp", "timestamp_ntz"),
}

WrittenOffsets = dict[str, dict[int, tuple[int, int]]]


@dataclass(slots=True)
class PkCommit(WriterCommitMessage):
    """A task's commit message.

    spans: by topic and partition, the first and last offset that the task stored.  rows: as many as
    it stored.  batch: the batch of which the task was, None if it wrote without a transaction.
    joined: it is a participant of the batch's transaction.  sums: of the rows that it read.
    """

    producer_id: int
    epoch: int
    spans: WrittenOffsets = field(default_factory=dict)
    rows: int = 0
    batch: BatchOfRun | None = None
    joined: bool = False
    sums: dict[TopicId, RowSums] = field(default_factory=dict)


class Columns:
    """The DataFrame's columns that the sink writes, checked once on the driver."""

    def __init__(self, schema: StructType, sink: SinkOptions) -> None:
        self.topic = sink.topic
        self.names: dict[str, str] = {}
        ignored = []
        for one in schema.fields:
            name = one.name.lower()
            if name not in _TYPES:
                ignored.append(one.name)
                continue
            if name in self.names:
                raise errors.InvalidOption(f"the DataFrame has two columns {name}")
            found = one.dataType.simpleString()
            if found not in _TYPES[name]:
                raise errors.InvalidOption(
                    f"column {one.name} is {found}; the sink takes {' or '.join(_TYPES[name])}"
                )
            self.names[name] = one.name
        if "value" not in self.names:
            raise errors.InvalidOption(
                f"the sink needs a column value; there are {', '.join(schema.fieldNames())}"
            )
        if self.topic is None and "topic" not in self.names:
            raise errors.InvalidOption("give the option topic, or a column topic")
        if ignored:
            warn(
                f"columns {', '.join(ignored)} are not written; the sink takes {', '.join(_TYPES)}"
            )

    def split(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield `(topic, rows)` for each topic of a Spark batch, the rows in their order."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kept = [name for name in self.names if name != "topic"]
        rows = pa.RecordBatch.from_arrays([batch.column(self.names[n]) for n in kept], names=kept)
        if self.topic is not None:
            yield self.topic, rows
            return
        topics = batch.column(self.names["topic"])
        if topics.null_count:
            raise errors.InvalidRecord(
                "column topic is null in some row, and the option topic is not set"
            )
        distinct = pc.unique(topics).to_pylist()
        for topic in distinct:
            yield topic, rows if len(distinct) == 1 else rows.filter(pc.equal(topics, topic))


class TaskWriter:
    """One task's rows on their way to the brokers; the producer is created at the first row."""

    def __init__(self, sink: SinkOptions, batch: BatchOfRun | None = None) -> None:
        self._sink = sink
        self._batch = batch
        self._producer: Any = None
        self._replayed = False  #: the batch is committed already
        self._waiting: list[tuple[str, int, Any]] = []
        self._spans: WrittenOffsets = {}
        self._topic_ids: dict[str, TopicId] = {}
        self._sums: dict[TopicId, RowSums] = {}
        self._rows = 0

    def write(self, topic: str, rows: pa.RecordBatch) -> None:
        """Send rows, or only sum them if the batch is committed already."""
        if self._producer is None:
            self._producer = self._open()
        if topic not in self._spans:
            # Fails within connectTimeoutMs for a dead address or an unknown topic; a send would
            # wait for its delivery timeout.
            self._producer.partitions_for(topic, self._sink.connect_timeout_ms / 1000)
            self._spans[topic] = {}
            if self._batch is not None:
                if not self._topic_ids:
                    self._replayed = self._producer.join([topic]).committed
                self._topic_ids[topic] = self._producer.topic_id(topic)
        if self._batch is not None:
            topic_id = self._topic_ids[topic]
            self._sums[topic_id] = self._sums.get(topic_id, RowSums()).plus(sums_of(rows))
        if self._replayed:
            return
        self._waiting.append((topic, rows.num_rows, self._producer.send_batch(topic, rows)))
        while len(self._waiting) > SENDS_WAITING_MAX:
            self._settle()

    def _open(self) -> Any:
        """Open the producer."""
        if self._batch is None:
            from pk.client.producer import Producer

            return Producer(self._sink.bootstrap, **self._sink.client)
        from pk.client.task_producer import TaskProducer

        return TaskProducer(self._sink.bootstrap, self._batch, **self._sink.client)

    def finish(self) -> PkCommit:
        """Wait until all rows are acknowledged (B1); return what was stored or raise an error."""
        joined = self._batch is not None and self._producer is not None and not self._replayed
        if self._producer is None or self._replayed:
            return PkCommit(-1, -1, batch=self._batch, sums=self._sums)
        self._producer.flush(self._producer_timeout_s())
        while self._waiting:
            self._settle()
        if joined:
            self._producer.finish()
        producer_id, epoch = identity(self._producer)
        spans = {topic: found for topic, found in self._spans.items() if found}
        return PkCommit(
            producer_id, epoch, spans, self._rows, self._batch, joined=joined, sums=self._sums
        )

    def close(self) -> None:
        """Close the producer without a further wait."""
        if self._producer is not None:
            self._producer.close(0)

    def _producer_timeout_s(self) -> float:
        """Return the time to wait in a flush: the delivery timeout and 10 s more.

        A send fails at its delivery timeout, so its error is raised before the flush gives up.
        """
        from pk.settings import PRODUCER

        return float(PRODUCER.resolve(self._sink.client)["delivery_timeout_ms"]) / 1000 + 10

    def _settle(self) -> None:
        topic, expected, future = self._waiting.pop(0)
        stored = 0
        for part in future.result():
            stored += part.record_count
            spans = self._spans.setdefault(topic, {})
            last = part.base_offset + part.record_count - 1
            first, before = spans.get(part.partition, (part.base_offset, last))
            spans[part.partition] = (min(first, part.base_offset), max(before, last))
        if stored != expected:
            raise errors.InternalError(f"{topic}: {expected} rows sent, {stored} acknowledged")
        self._rows += stored


def identity(producer: Any) -> tuple[int, int]:
    """Return the producer's id and epoch."""
    producer_id, epoch = producer.identity
    return int(producer_id), int(epoch)


def sums_of(rows: pa.RecordBatch) -> RowSums:
    """Return the sums of rows as Spark gave them: the bytes are those of keys and values (B3)."""
    import pyarrow.compute as pc

    from pk.tiering.rowhash import sink_sum

    size = 0
    for name in ("key", "value"):
        if name in rows.schema.names:
            size += pc.sum(pc.binary_length(rows.column(name))).as_py() or 0
    return RowSums(rows.num_rows, size, sink_sum(rows))


def write_all(
    sink: SinkOptions,
    columns: Columns,
    batches: Iterator[pa.RecordBatch],
    batch: BatchOfRun | None = None,
) -> PkCommit:
    """Write one task's rows; batch and streaming writers share this function."""
    worker.begin_task()
    task = TaskWriter(sink, batch)
    try:
        for each in batches:
            if each.num_rows:
                for topic, rows in columns.split(each):
                    task.write(topic, rows)
        return task.finish()
    finally:
        task.close()
