"""The batches of a partition (Kafka's ProducerBatch), and the requests that carry them.

Slices of a partition are gathered into a `ProducerBatch` while it has room and no request has taken
it; a batch may go when it is full or its oldest slice has lingered long enough.  While a broker is
slow, batches therefore grow by themselves.

Invariants
  A1  slices leave a partition in the order they came.
  A2  a batch holds at most `batch_size` bytes, or a single slice; the accumulator keeps slices
      within it, unless they are a single row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pk import errors, limits
from pk.backoff import Backoff
from pk.client.accumulator import FULL_SHARE
from pk.client.metadata import LeaderAndEpoch, Metadata
from pk.client.record_set import RecordSlice
from pk.client.rows import int64_column
from pk.log import batch as batches
from pk.log.columns import encode
from pk.log.storage import Buffer
from pk.types import NONE, PartitionKey


class ProducerBatch:
    """Slices that travel together; once `sequence` is given its content is fixed."""

    __slots__ = (
        "asked_epoch", "count", "created_ms", "encoded", "encoding", "epoch", "expired", "number",
        "partition", "producer_id", "ready_ms", "request", "rows", "sequence", "size", "slices",
        "unknown_epoch",
    )  # fmt: skip

    def __init__(self, partition: PartitionBatches, first: RecordSlice) -> None:
        self.partition = partition
        self.slices: list[RecordSlice] = []
        self.rows: list[pa.RecordBatch] = []  #: of the slices, until they are encoded
        self.count = self.size = 0
        self.created_ms = first.records.opened_ms
        self.ready_ms = first.records.ready_ms
        self.producer_id = NONE
        self.epoch = NONE
        self.sequence = NONE
        self.number = 0  #: how many batches of the partition were numbered before it
        self.request: Any = None  #: the InFlightRequest it is in
        self.asked_epoch = NONE  #: the leader epoch of the last attempt
        self.unknown_epoch: int | None = None  #: of the first attempt that may have stored it
        self.expired = False  #: the caller got DeliveryTimedOut while it was in flight
        self.encoded: list[Buffer] | None = None
        self.encoding: Any = None  #: the shell's task that encodes it, or did so last
        self.add(first)

    def add(self, more: RecordSlice) -> None:
        self.slices.append(more)
        self.rows.append(more.rows)
        more.rows = None
        self.count += more.count
        self.size += more.size
        self.ready_ms = min(self.ready_ms, more.records.ready_ms)

    @property
    def next_sequence(self) -> int:
        following: int = (self.sequence + self.count) & 0x7FFFFFFF
        return following  # wraps as Kafka's (KIP-98)

    @property
    def unknown(self) -> bool:
        """Whether an earlier attempt may have stored it."""
        return self.unknown_epoch is not None

    def encode(self, codec: str, level: int) -> list[Buffer]:
        """The bytes of this batch under its present producer id, epoch and sequence."""
        if self.encoded is None:
            rows, stamp = self._joined()
            self.encoded = encode(
                rows, codec=codec, level=level, default_timestamp=stamp,
                producer_id=self.producer_id, producer_epoch=self.epoch,
                base_sequence=self.sequence,
            )  # fmt: skip
            self.rows = []  # the bytes stand for them from now on
        header = batches.read_header(self.encoded[0])
        mine = (self.producer_id, self.epoch, self.sequence)
        if (header.producer_id, header.producer_epoch, header.base_sequence) != mine:
            header = header._replace(
                producer_id=mine[0], producer_epoch=mine[1], base_sequence=mine[2]
            )
            self.encoded = batches.seal(header, self.encoded[1:])
        return self.encoded

    def _joined(self) -> tuple[pa.RecordBatch, int]:
        """The rows of all slices and the create time of those without one."""
        stamps = [each.records.stamp_ms for each in self.slices]
        rows = self.rows
        if len(rows) == 1:
            return rows[0], stamps[0]
        if len(set(stamps)) > 1 or any(each.num_columns > 3 for each in rows):
            rows = [
                each if each.num_columns > 3 else _stamped(each, stamp)
                for each, stamp in zip(rows, stamps, strict=True)
            ]
        return pa.concat_batches(rows), stamps[0]


def _stamped(rows: pa.RecordBatch, stamp_ms: int) -> pa.RecordBatch:
    column = int64_column(np.full(rows.num_rows, stamp_ms, np.int64))
    return rows.append_column("timestamp", column)


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A produce request: batches of partitions that one broker leads."""

    correlation_id: int
    node: int
    deadline_ms: int
    batches: list[ProducerBatch] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  #: leader epoch of each batch
    size: int = 0
    open: int = 0  #: batches that wait for its answer
    encoding: Any = None  #: the shell's task that encodes it

    def add(self, batch: ProducerBatch, epoch: int) -> None:
        self.batches.append(batch)
        self.epochs.append(epoch)
        self.size += batch.size
        self.open += 1
        batch.request, batch.asked_epoch = self, epoch


@dataclass(slots=True)
class PartitionResponse:
    """What became of a batch; from a broker: of batch `index` of a request."""

    index: int = NONE
    error: errors.PkError | None = None
    base_offset: int = NONE
    append_time_ms: int = NONE
    log_start: int = NONE


class Retry:
    """When a partition or a broker may be tried again."""

    __slots__ = ("at_ms", "backoff")

    def __init__(self, backoff: Backoff) -> None:
        self.at_ms = 0
        self.backoff = backoff

    def postpone(self, now_ms: int) -> None:
        """An attempt failed."""
        self.at_ms = now_ms + int(self.backoff.next_ms())

    def reset(self) -> None:
        self.at_ms = 0
        self.backoff.reset()


class PartitionBatches:
    """The batches of one partition, and its sequence (KIP-98): what the sender knows of it."""

    __slots__ = (
        "acked_offset", "acked_sequence", "batch_size", "epoch", "gap", "key", "leader", "left_ms",
        "number", "problem", "producer_id", "retry", "sequence", "topic", "unresolved", "waiting",
    )  # fmt: skip

    def __init__(self, topic: str, key: PartitionKey, retry: Retry) -> None:
        self.topic = topic
        self.key = key
        self.batch_size = 0
        self.waiting: deque[ProducerBatch] = deque()  #: have no sequence yet
        self.unresolved: deque[ProducerBatch] = deque()  #: in sequence order
        self.producer_id = NONE
        self.epoch = NONE
        self.sequence = 0  #: of the next new batch
        self.number = 0  #: batches numbered so far
        self.acked_sequence = NONE  #: last sequence acknowledged in this epoch
        self.acked_offset = NONE
        self.gap = False  #: a sequence below an unresolved one will never be stored
        self.retry = retry
        self.leader: LeaderAndEpoch | None = None  #: as of the last look at the metadata
        self.left_ms: int | None = None  #: since when the old leader owes an answer
        self.problem: errors.PkError | None = None  #: why the last attempt did not get through

    def __str__(self) -> str:
        return f"{self.topic}-{self.key.partition}"

    @property
    def idle(self) -> bool:
        return not self.unresolved and not self.waiting

    def add(self, more: RecordSlice, batch_size: int) -> None:
        """To the last batch that waits, if it has room (A1, A2)."""
        self.batch_size = batch_size
        if self.waiting:
            last = self.waiting[-1]
            room = last.size + more.size <= batch_size
            if room and last.count + more.count <= limits.BATCH_RECORDS_MAX:
                last.add(more)
                return
        self.waiting.append(ProducerBatch(self, more))

    @property
    def numbered(self) -> int:
        """Batches from the oldest unresolved one on that have a sequence, or are unresolved."""
        if not self.unresolved:
            return 0
        return max(self.number - self.unresolved[0].number, len(self.unresolved))

    def created_ms(self) -> int:
        """When the oldest batch was created that is to have an outcome; the far future = none."""
        created = [batch.created_ms for batch in self.unresolved if not batch.expired]
        created += [self.waiting[0].created_ms] if self.waiting else []
        return min(created, default=1 << 62)

    def ready_ms(self) -> int:
        """When the first batch that waits may go; 0 = it is full."""
        first = self.waiting[0]
        full = first.size >= self.batch_size - self.batch_size // FULL_SHARE
        return 0 if full or len(self.waiting) > 1 else first.ready_ms

    def number_batch(self, batch: ProducerBatch) -> None:
        """Give `batch` the next sequence."""
        batch.producer_id, batch.epoch = self.producer_id, self.epoch
        batch.sequence, batch.number = self.sequence, self.number
        self.sequence = batch.next_sequence
        self.number += 1

    def begin_epoch(self, producer_id: int, epoch: int) -> None:
        """Close a gap: what is unresolved is sent again from sequence 0 on (KIP-360)."""
        self.producer_id, self.epoch = producer_id, epoch
        self.gap = False
        self.acked_sequence = NONE
        self.sequence = 0
        for batch in self.unresolved:
            self.number_batch(batch)

    def acknowledge(self, batch: ProducerBatch, base_offset: int) -> None:
        self.unresolved.remove(batch)
        self.retry.reset()
        self.problem = None
        if batch.sequence != NONE and batch.epoch == self.epoch:
            self.acked_sequence = (batch.next_sequence - 1) & 0x7FFFFFFF
            self.acked_offset = max(self.acked_offset, base_offset + batch.count - 1)

    def remove(self, batch: ProducerBatch) -> None:
        """Of a batch that failed; one that had a sequence leaves a gap."""
        if batch in self.unresolved:
            self.unresolved.remove(batch)
            self.gap = self.gap or batch.sequence != NONE
        else:
            self.waiting.remove(batch)

    def out_of_sight(self, leader: LeaderAndEpoch) -> list[ProducerBatch]:
        """Batches that an earlier attempt may have stored before `leader`, or one before it, was
        elected without all data: they may lie in the tier, and no broker knows them (rule T4).
        """
        return [
            batch
            for batch in self.unresolved
            if batch.request is None
            and batch.unknown_epoch is not None
            and batch.unknown_epoch < leader.unclean_epoch
        ]

    def obstacle(self, metadata: Metadata, *, without_id: bool) -> str:
        """What keeps its batches from being stored, for the operator who must remove it; "" =
        nothing.
        """
        if metadata.leader(self.key) is None:
            absent = metadata.waits_for(self.key)
            names = f": it waits for one of the brokers {', '.join(map(str, absent))}"
            return "the partition has no reachable leader" + (names if absent else "")
        if without_id:
            return "no producer id could be had from the broker"
        return "" if self.problem is None else f"the last attempt: {self.problem.message}"
