"""A consumer with the calls of confluent-kafka's, so that a loop written for it runs on pk.

Change the import, and pass the configuration as keyword arguments, or keep the dict:

    from pk.client.confluent import Consumer, KafkaError, KafkaException, TopicPartition

`poll` returns one `Message` or None; `commit`, `seek` and the callbacks take the argument forms of
confluent-kafka.  docs/confluent.md has the differences that remain, and those between
confluent-kafka and `pk.Consumer`, which is faster: it returns all records that have arrived.

Invariants
  K1  Each poll returns at most one record, so the position, which commits and revocations use, is
      never ahead of what the application got.
  K2  An option or an argument that would mean something else here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar

from pk import errors
from pk.client.consumer import Consumer as PkConsumer
from pk.client.group_types import OffsetAndMetadata
from pk.client.offsets import EARLIEST, LATEST
from pk.types import Record
from pk.types import TopicPartition as Place

OFFSET_BEGINNING, OFFSET_END, OFFSET_STORED, OFFSET_INVALID = -2, -1, -1000, -1001
TIMESTAMP_NOT_AVAILABLE, TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME = 0, 1, 2

#: How long a poll without an end waits at a time, so that Ctrl-C ends it.
_FOREVER_S = 3_600.0
#: librdkafka's names and values for which pk has Kafka's.
_NAMES = {"fetch_wait_max_ms": "fetch_max_wait_ms", "metadata_broker_list": "bootstrap_servers"}
_RESETS = {
    "smallest": "earliest", "beginning": "earliest", "largest": "latest", "end": "latest",
    "error": "none",
}  # fmt: skip
#: Options of librdkafka that are accepted with the value that says what pk does, and no other.
_ONLY = {"enable_auto_offset_store": True, "enable_partition_eof": False}

Callback = Callable[["ConfluentConsumer", list["ConfluentPartition"]], Any]


class KafkaError:
    """An error as a value: `code`, `name`, `str`, `retriable`, `fatal`."""

    _PARTITION_EOF: ClassVar[int] = -191  #: no poll returns it
    _ALL_BROKERS_DOWN: ClassVar[int] = -187  #: no poll returns it
    NO_ERROR: ClassVar[int] = 0
    OFFSET_OUT_OF_RANGE: ClassVar[int] = errors.OffsetOutOfRange.code
    UNKNOWN_TOPIC_OR_PART: ClassVar[int] = errors.UnknownTopicOrPartition.code
    ILLEGAL_GENERATION: ClassVar[int] = errors.IllegalGeneration.code
    UNKNOWN_MEMBER_ID: ClassVar[int] = errors.UnknownMemberId.code
    REBALANCE_IN_PROGRESS: ClassVar[int] = errors.RebalanceInProgress.code

    def __init__(self, cause: errors.PkError) -> None:
        self.cause = cause  #: pk's error, with its details

    def code(self) -> int:
        """Return Kafka's number, or pk's own from 1000 on (docs/errors.md)."""
        return self.cause.code

    def name(self) -> str:
        """Return the name of pk's error."""
        return type(self.cause).__name__

    def str(self) -> str:
        """Return the message."""
        return self.cause.message

    def retriable(self) -> bool:
        """Whether the same call may succeed later."""
        return self.cause.retriable

    def fatal(self) -> bool:
        """Whether this consumer cannot go on: another one has its group_instance_id."""
        return isinstance(self.cause, errors.FencedInstanceId)

    def __str__(self) -> str:  # type: ignore[valid-type]
        return f"{self.name()}: {self.cause.message}"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.code() == other
        return isinstance(other, KafkaError) and self.code() == other.code()

    def __hash__(self) -> int:
        return hash(self.code())


class KafkaException(Exception):
    """Raised by calls; `args[0]` is the `KafkaError`."""


class ConfluentPartition:
    """A partition, with an offset where a call has one."""

    def __init__(
        self, topic: str, partition: int = -1, offset: int = OFFSET_INVALID, metadata: str = ""
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.metadata = metadata
        self.error: KafkaError | None = None

    @property
    def place(self) -> Place:
        """The partition as pk names it."""
        return Place(self.topic, self.partition)

    def at(self, offset: int) -> ConfluentPartition:
        """Return the partition with an offset."""
        return ConfluentPartition(self.topic, self.partition, offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfluentPartition) and self.place == other.place

    def __lt__(self, other: ConfluentPartition) -> bool:
        return self.place < other.place

    def __hash__(self) -> int:
        return hash(self.place)

    def __repr__(self) -> str:
        return f"TopicPartition({self.topic!r}, {self.partition}, offset={self.offset})"


class Message:
    """A record, or an error that a poll found."""

    def __init__(self, record: Record | None, failure: errors.PkError | None = None) -> None:
        self._record = record
        self._error = None if failure is None else KafkaError(failure)

    def error(self) -> KafkaError | None:
        """Return the error; None = the message is a record."""
        return self._error

    def topic(self) -> str | None:
        """Return the topic; None for an error."""
        return None if self._record is None else self._record.topic

    def partition(self) -> int | None:
        """Return the partition; None for an error."""
        return None if self._record is None else self._record.partition

    def offset(self) -> int | None:
        """Return the offset; None for an error."""
        return None if self._record is None else self._record.offset

    def key(self) -> bytes | None:
        """Return the key."""
        return None if self._record is None else self._record.key

    def value(self) -> bytes | None:
        """Return the value, or the words of an error."""
        if self._record is None:
            return None if self._error is None else str(self._error).encode()
        return self._record.value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Return the headers; None = there are none."""
        return None if self._record is None else list(self._record.headers) or None

    def timestamp(self) -> tuple[int, int]:
        """Return the type of the timestamp and its ms; pk's records do not tell the type."""
        if self._record is None:
            return TIMESTAMP_NOT_AVAILABLE, 0
        return TIMESTAMP_CREATE_TIME, self._record.timestamp_ms

    def __len__(self) -> int:
        return len(self.value() or b"")


class ConfluentConsumer:
    """confluent-kafka's consumer over `pk.Consumer`.  For one thread at a time.

    config: confluent-kafka's dict; options: the same as keyword arguments, dots as underscores

    Raises `KafkaException` with `InvalidConfig` for an option that is unknown or not supported.

        >>> consumer = Consumer({"bootstrap.servers": "localhost:9092", "group.id": "app"})
        >>> consumer.subscribe(["events"])
        >>> consumer.poll(timeout=0.0) is None
        True
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._within = ""  #: the callback that is called now
        given = _raising(lambda: _options({**(config or {}), **options}))
        self._has_group = bool(given.get("group_id"))
        self._consumer: PkConsumer = _raising(lambda: PkConsumer(**given))

    # -- what to read ------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: list[str],
        on_assign: Callback | None = None,
        on_revoke: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        """Subscribe; polls call the callbacks with this consumer and the partitions.

        A topic that begins with ^ is a pattern, and the only one of the list.
        """
        listeners: dict[str, Any] = {
            "on_assigned": self._listener("on_assign", on_assign),
            "on_revoked": self._listener("on_revoke", on_revoke),
            "on_lost": self._listener("on_lost", on_lost),
        }
        patterns = [each for each in topics if each.startswith("^")]
        if patterns and len(topics) > 1:
            raise KafkaException(
                KafkaError(errors.InvalidOption("subscribe takes topics, or one pattern"))
            )
        if patterns:
            _raising(lambda: self._consumer.subscribe(pattern=f"{patterns[0]}.*", **listeners))
        else:
            _raising(lambda: self._consumer.subscribe(topics, **listeners))

    def _listener(
        self, name: str, callback: Callback | None
    ) -> Callable[[list[Place]], Any] | None:
        if callback is None:
            return None

        def listen(places: list[Place]) -> None:
            self._within = name
            try:
                callback(self, [ConfluentPartition(*place) for place in places])
            finally:
                self._within = ""

        return listen

    def unsubscribe(self) -> None:
        """Leave the group; read no partition."""
        _raising(self._consumer.unsubscribe)

    def assign(self, partitions: list[ConfluentPartition]) -> None:
        """Read these partitions, from their offsets where they have one.

        Within on_assign it only sets the positions: the group has assigned the partitions.
        """
        if not self._within:
            _raising(lambda: self._consumer.assign([each.place for each in partitions]))
        for each in partitions:
            if each.offset not in (OFFSET_INVALID, OFFSET_STORED):
                self.seek(each)
            elif not self._within:
                self._seek_to_committed(each)

    incremental_assign = assign

    def _seek_to_committed(self, partition: ConfluentPartition) -> None:
        """Begin where the group has committed, as `assign` of confluent-kafka does."""
        if not self._has_group:
            return
        offset = self._committed(partition)
        if offset is not None:
            _raising(lambda: self._consumer.seek(partition.place, offset))

    def unassign(self) -> None:
        """Read no partition; within a callback the group does so."""
        if not self._within:
            _raising(lambda: self._consumer.assign([]))

    def assignment(self) -> list[ConfluentPartition]:
        """Return the partitions that are read now."""
        return [ConfluentPartition(*place) for place in _raising(self._consumer.assignment)]

    def seek(self, partition: ConfluentPartition) -> None:
        """Make the next poll of a partition begin at its offset."""
        consumer, place, offset = self._consumer, partition.place, partition.offset
        if offset == OFFSET_BEGINNING:
            _raising(lambda: consumer.seek_to_beginning(place))
        elif offset == OFFSET_END:
            _raising(lambda: consumer.seek_to_end(place))
        else:
            _raising(lambda: consumer.seek(place, offset))

    def pause(self, partitions: list[ConfluentPartition]) -> None:
        """Return no records of these partitions until `resume`."""
        _raising(lambda: self._consumer.pause(*(each.place for each in partitions)))

    def resume(self, partitions: list[ConfluentPartition]) -> None:
        """Let polls return records of these partitions again."""
        _raising(lambda: self._consumer.resume(*(each.place for each in partitions)))

    # -- reading -----------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> Message | None:
        """Return the next record or error; None if nothing came within `timeout` seconds.

        timeout: None or -1 = without an end.  Raises `RuntimeError` once the consumer is closed.
        """
        forever = timeout is None or timeout < 0
        while True:
            try:
                found = self._consumer.poll(_FOREVER_S if forever else timeout or 0.0)
            except errors.ClosedError as closed:
                raise RuntimeError("Consumer closed") from closed
            except errors.PkError as failure:
                return Message(None, failure)
            if found:
                return Message(found[0])  # K1
            if not forever:
                return None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Wait for a message, and return it with those that are there, up to `num_messages`."""
        found: list[Message] = []
        while len(found) < num_messages:
            message = self.poll(0.0 if found else timeout)
            if message is None:
                return found
            found.append(message)
        return found

    # -- offsets -----------------------------------------------------------------------------------

    def commit(
        self,
        message: Message | None = None,
        offsets: list[ConfluentPartition] | None = None,
        asynchronous: bool = True,
    ) -> list[ConfluentPartition] | None:
        """Commit the offset after `message`, or `offsets`, or the positions of all partitions.

        Returns the offsets if not asynchronous.  Raises `KafkaException`; an asynchronous failure
        is logged.
        """
        if message is not None and offsets is not None:
            raise ValueError("commit takes a message or offsets, not both")
        wanted: dict[Place, OffsetAndMetadata] | None = None
        if message is not None:
            record = message._record
            if record is None:
                raise ValueError("the message is an error")
            place = Place(record.topic, record.partition)
            wanted = {place: OffsetAndMetadata(record.offset + 1)}
        elif offsets is not None:
            wanted = {each.place: OffsetAndMetadata(each.offset, each.metadata) for each in offsets}
        _raising(lambda: self._consumer.commit(wanted, asynchronous=asynchronous))
        if asynchronous:
            return None
        if wanted is None:
            return self.position(self.assignment())
        return [ConfluentPartition(*place).at(each.offset) for place, each in wanted.items()]

    def committed(
        self, partitions: Iterable[ConfluentPartition], timeout: float | None = None
    ) -> list[ConfluentPartition]:
        """Return the committed offsets; OFFSET_INVALID = the group has none."""
        found = []
        for each in partitions:
            offset = self._committed(each, timeout)
            found.append(each.at(OFFSET_INVALID if offset is None else offset))
        return found

    def _committed(self, partition: ConfluentPartition, timeout: float | None = None) -> int | None:
        found: int | None = _raising(lambda: self._consumer.committed(partition.place, timeout))
        return found

    def position(self, partitions: Iterable[ConfluentPartition]) -> list[ConfluentPartition]:
        """Return the offsets at which the next polls begin."""
        return [each.at(self._position(each)) for each in partitions]

    def _position(self, partition: ConfluentPartition) -> int:
        found: int = _raising(lambda: self._consumer.position(partition.place))
        return found

    def get_watermark_offsets(
        self, partition: ConfluentPartition, timeout: float | None = None, cached: bool = False
    ) -> tuple[int, int]:
        """Return the first offset of a partition, and the one behind its last readable record."""
        place = partition.place
        first = _raising(lambda: self._consumer.beginning_offsets([place], timeout))
        end = _raising(lambda: self._consumer.end_offsets([place], timeout))
        return first[place], end[place]

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit (enable.auto.commit), call on_revoke, leave the group, disconnect."""
        _raising(self._consumer.close)

    def __enter__(self) -> ConfluentConsumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return pk's options for those of librdkafka (K2)."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        key = name.strip().lower().replace(".", "_").replace("-", "_")
        key = _NAMES.get(key, key)
        if key in _ONLY:
            if str(value).lower() not in (str(_ONLY[key]).lower(), str(int(_ONLY[key]))):
                raise errors.InvalidConfig(
                    f"{name}={value} is not supported: pk's only value is {_ONLY[key]}", option=name
                )
            continue
        if key in found:
            raise errors.InvalidConfig(f"{name} is given twice", option=name)
        found[key] = value
    if "max_poll_records" in found:
        raise errors.InvalidConfig("a poll returns one message here", option="max_poll_records")
    reset = found.get("auto_offset_reset")
    if reset is not None:
        found["auto_offset_reset"] = _RESETS.get(str(reset).lower(), reset)
    return {**found, "max_poll_records": 1}


def _raising(call: Callable[..., Any]) -> Any:
    """Return the result of a call; pk's errors become `KafkaException` and `RuntimeError`."""
    try:
        return call()
    except errors.ClosedError as closed:
        raise RuntimeError("Consumer closed") from closed
    except errors.PkError as failure:
        raise KafkaException(KafkaError(failure)) from failure


#: The names of confluent-kafka.
Consumer, TopicPartition = ConfluentConsumer, ConfluentPartition

assert (EARLIEST, LATEST) == (OFFSET_BEGINNING, OFFSET_END), "the special offsets are Kafka's"
