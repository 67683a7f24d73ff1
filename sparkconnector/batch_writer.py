"""A batch write: each task sends its rows with a producer of its own and reports what was stored.

Columns, as in Kafka's sink: `value` (string or binary, required), and any of `key`, `topic`,
`partition`, `headers`, `timestamp`; others are ignored with a warning.  The option `topic` wins
over the column.  A null partition is chosen by Kafka's rule (murmur2 of the key, else sticky), a
null timestamp is the time of sending.

At least once: a task that fails after it sent, or is run twice, leaves its rows twice; `abort`
undoes nothing.  Each message names the producer id and epoch and the offsets, which is what a
commit by participants will need.

`mode("overwrite")` is refused unless the option `truncateTopic` is true: it deletes, once
everything is stored, what the topic held before the job.  The new rows are there before the old
ones go, and a job that fails deletes nothing.

Invariants
  B1  a task that returns has every row acknowledged by all in-sync replicas; otherwise it raises.
  B2  two tasks never share a producer id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from pk import errors
from pk.sparkconnector import worker
from pk.sparkconnector.options import SinkOptions
from pk.sparkconnector.planner import warn
from pk.sparkconnector.worker_errors import sentence_alone

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

#: Unresolved sends per task; each is at most one of Spark's batches.
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
    """What one task stored: by topic and partition the first and last offset."""

    producer_id: int
    epoch: int
    spans: WrittenOffsets = field(default_factory=dict)
    rows: int = 0


class Columns:
    """Which of the DataFrame's columns go where; judged once, on the driver."""

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
        """`(topic, rows)` of one of Spark's batches; rows of a topic keep their order."""
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
    """One task's producer, from its first row on."""

    def __init__(self, sink: SinkOptions) -> None:
        self._sink = sink
        self._producer: Any = None
        self._waiting: list[tuple[str, int, Any]] = []
        self._spans: WrittenOffsets = {}
        self._rows = 0

    def write(self, topic: str, rows: pa.RecordBatch) -> None:
        if self._producer is None:
            from pk.client.producer import Producer

            self._producer = Producer(self._sink.bootstrap, **self._sink.client)
        if topic not in self._spans:
            # A dead address and a topic that does not exist are said soon; a send would wait.
            self._producer.partitions_for(topic, self._sink.connect_timeout_ms / 1000)
            self._spans[topic] = {}
        self._waiting.append((topic, rows.num_rows, self._producer.send_batch(topic, rows)))
        while len(self._waiting) > SENDS_WAITING_MAX:
            self._settle()

    def finish(self) -> PkCommit:
        """Everything acknowledged (B1), or the first error."""
        if self._producer is None:
            return PkCommit(-1, -1)
        self._producer.flush(self._producer_timeout_s())
        while self._waiting:
            self._settle()
        producer_id, epoch = identity(self._producer)
        spans = {topic: found for topic, found in self._spans.items() if found}
        return PkCommit(producer_id, epoch, spans, self._rows)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close(0)

    def _producer_timeout_s(self) -> float:
        """No send outlives its delivery timeout; a little more, so that it speaks first."""
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
    """The producer's id and epoch."""
    producer_id, epoch = producer.identity
    return int(producer_id), int(epoch)


def write_all(sink: SinkOptions, columns: Columns, batches: Iterator[pa.RecordBatch]) -> PkCommit:
    """What both writers do on an executor."""
    worker.begin_task()
    task = TaskWriter(sink)
    try:
        for batch in batches:
            if batch.num_rows:
                for topic, rows in columns.split(batch):
                    task.write(topic, rows)
        return task.finish()
    finally:
        task.close()


def check_messages(messages: Sequence[WriterCommitMessage | None]) -> int:
    """The rows that the tasks report; B1 and B2 hold for what they report, or it is a bug."""
    rows = 0
    seen: set[int] = set()
    for message in messages:
        if not isinstance(message, PkCommit):
            raise errors.InternalError(f"a task reported {message!r} instead of what it stored")
        room = sum(
            last - first + 1 for spans in message.spans.values() for first, last in spans.values()
        )
        if message.rows and (message.producer_id < 0 or message.producer_id in seen):
            raise errors.InternalError(f"two tasks wrote with producer id {message.producer_id}")
        if message.rows > room:
            raise errors.InternalError(f"a task reported {message.rows} rows in {room} offsets")
        if message.rows:
            seen.add(message.producer_id)
        rows += message.rows
    return rows


class PkWriter(DataSourceArrowWriter):
    """Pickled to the tasks and to the process that commits."""

    def __init__(self, sink: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._sink = sink
        self._columns = Columns(schema, sink)
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
        return write_all(self._sink, self._columns, iterator)

    @sentence_alone
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        check_messages(messages)
        if self._before:
            from pk.sparkconnector.connection import cluster

            line = cluster(self._sink.bootstrap, None, self._sink.connect_timeout_ms)
            line.delete_before(self._before)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        stored = sum(message.rows for message in messages if isinstance(message, PkCommit))
        if stored:
            warn(f"the write failed; {stored} rows of its finished tasks stay (at least once)")

    def _ends(self) -> Mapping[tuple[str, int], int]:
        from pk.sparkconnector.connection import cluster

        if self._sink.topic is None:
            raise errors.InvalidOption(
                "mode overwrite needs the option topic: it says what to replace"
            )
        line = cluster(self._sink.bootstrap, None, self._sink.connect_timeout_ms)
        bounds = line.bounds(line.topics([self._sink.topic]), read_committed=False)
        return {(one.topic_id, one.partition): one.latest for one in bounds}
