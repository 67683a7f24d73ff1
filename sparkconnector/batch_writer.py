"""A batch write: each task sends its rows with its own producer and reports what was stored.

The columns are those of Kafka's sink: `value` (string or binary, required), and optionally `key`,
`topic`, `partition`, `headers` and `timestamp`.  Other columns are ignored with a warning.  The
option `topic` wins over the column.  For a null partition, Kafka's rule chooses one (murmur2 of the
key; sticky without a key).  A null timestamp becomes the time of sending.

Delivery is at least once.  If Spark runs a task twice, or a task fails after it sent rows, those
rows are stored twice; `abort` removes nothing.  Each commit message holds the producer id, the
epoch and the offsets.  A two-phase commit over several tasks will need them.

`mode("overwrite")` is refused unless the option `truncateTopic` is true.  With it, the driver
deletes the records that the topic held before the job, after all new rows are stored.  A job that
fails therefore deletes nothing.

Invariants
  B1  A task returns only after all in-sync replicas acknowledged each of its rows; otherwise it
      raises.
  B2  Two tasks never share a producer id.
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
    """A task's commit message: by topic and partition, the first and last offset it stored."""

    producer_id: int
    epoch: int
    spans: WrittenOffsets = field(default_factory=dict)
    rows: int = 0


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
            # Fails within connectTimeoutMs for a dead address or an unknown topic; a send would
            # wait for its delivery timeout.
            self._producer.partitions_for(topic, self._sink.connect_timeout_ms / 1000)
            self._spans[topic] = {}
        self._waiting.append((topic, rows.num_rows, self._producer.send_batch(topic, rows)))
        while len(self._waiting) > SENDS_WAITING_MAX:
            self._settle()

    def finish(self) -> PkCommit:
        """Wait until all rows are acknowledged (B1); return what was stored or raise an error."""
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


def write_all(sink: SinkOptions, columns: Columns, batches: Iterator[pa.RecordBatch]) -> PkCommit:
    """Write one task's rows; batch and streaming writers share this function."""
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
    """Check the tasks' commit messages and return the number of rows they report.

    Raises `InternalError` if the messages contradict B1 or B2: that would be a bug of pk.
    """
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
    """The batch writer; Spark pickles it to the tasks and to the process that commits."""

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
