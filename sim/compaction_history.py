"""The keyed records of a run's compacted topics, as known outside the cluster.

A record is identified by its header `id`, because a tombstone has no value.  A partition that may
have lost acknowledged records (an era ended, sim/oracle) promises less: compaction_checkers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from pk.sim.oracle import Oracle, Outcome, RecordId, digest_of
from pk.types import NONE, Offset, PartitionKey, TopicPartition

#: The header that names a record.
ID = "id"


class KeyedRow(NamedTuple):
    """One record, as a reader or a replica has it."""

    offset: Offset
    id: RecordId
    key: bytes
    tombstone: bool
    digest: int
    read_ms: float  #: when a reader got it


@dataclass(slots=True)
class Keyed:
    """One record that a producer was asked to send."""

    id: RecordId
    place: TopicPartition
    key: bytes
    tombstone: bool
    digest: int
    outcome: Outcome = Outcome.PENDING
    offset: Offset = NONE
    acked_ms: float = 0.0


class CompactionHistory:
    """Every keyed record of a run, and what each topic promises.

    known: topic ids and numbers of partitions
    eras: when acknowledged records of a partition may have been lost
    """

    def __init__(self, known: Oracle, eras: Oracle, retention_ms: dict[str, int]) -> None:
        self.known = known
        self._eras = eras
        self._retention_ms = retention_ms
        self.sent: dict[RecordId, Keyed] = {}
        self.acknowledgements = 0
        self.log_start_of: Callable[[PartitionKey], Offset] = lambda key: 0
        self._by_place: dict[TopicPartition, list[Keyed]] = {}
        self._numbers: dict[str, int] = {}

    def next_id(self, producer: str) -> RecordId:
        number = self._numbers[producer] = self._numbers.get(producer, -1) + 1
        return RecordId(producer, number)

    def send(self, record: Keyed) -> None:
        self.sent[record.id] = record
        self._by_place.setdefault(record.place, []).append(record)

    def acknowledged(self, record: Keyed, offset: Offset, now_ms: float) -> None:
        record.outcome, record.offset, record.acked_ms = Outcome.ACKNOWLEDGED, offset, now_ms
        self.acknowledgements += 1

    def failed(self, record: Keyed) -> None:
        if record.outcome is Outcome.PENDING:
            record.outcome = Outcome.UNKNOWN

    def forget_pending(self) -> None:
        """Set the outcome of all pending records to unknown: their client died."""
        for record in self.sent.values():
            self.failed(record)

    def pending(self) -> int:
        return sum(record.outcome is Outcome.PENDING for record in self.sent.values())

    def of(self, place: TopicPartition) -> list[Keyed]:
        return self._by_place.get(place, [])

    def places(self) -> Iterator[TopicPartition]:
        for topic in self.known.topics.values():
            for partition in range(topic.partitions):
                yield TopicPartition(topic.name, partition)

    def may_be_cut(self, place: TopicPartition) -> bool:
        """Return whether acknowledged records of the partition may be lost."""
        topic = self.known.topics[place.topic]
        return self._eras.era(topic.topic_id, place.partition) > 0

    def log_start(self, place: TopicPartition) -> Offset:
        """Return the largest known log_start of the partition: size retention moves it."""
        topic = self.known.topics[place.topic]
        return self.log_start_of(PartitionKey(topic.topic_id, place.partition))

    def retention_ms(self, place: TopicPartition) -> int:
        """Return delete_retention_ms of the topic."""
        return self._retention_ms[place.topic]


def id_header(name: RecordId) -> bytes:
    """Return the value of the header that names a record."""
    return f"{name.producer}/{name.number}".encode()


def keyed_rows_of(batch: pa.RecordBatch, now_ms: float) -> list[KeyedRow]:
    """Return the rows of a batch that a reader got at `now_ms`."""
    columns = [batch.column(name).to_pylist() for name in ("offset", "key", "value", "headers")]
    found = []
    for offset, key, value, headers in zip(*columns, strict=True):
        pairs: list[tuple[str, Any]] = [(each["key"], each["value"]) for each in headers or ()]
        producer, number = dict(pairs)[ID].decode().split("/")
        name = RecordId(producer, int(number))
        digest = digest_of(key, value, pairs)
        found.append(KeyedRow(offset, name, key, value is None, digest, now_ms))
    return found
