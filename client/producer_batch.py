"""The batches of a partition (Kafka's ProducerBatch), and the requests that carry them.

A `ProducerBatch` gathers slices of a partition while it has room and is in no request.  A batch may
be sent when it is full or its oldest slice has lingered long enough.  Batches therefore grow while
a broker is slow.

Invariants
  A1  Slices leave a partition in the order they came.
  A2  A batch holds at most `batch_size` bytes, or a single slice.  The accumulator keeps slices
      within `batch_size`, unless they are a single row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pk import errors, limits
from pk.backoff import Retry
from pk.client.accumulator import FULL_SHARE
from pk.client.metadata import LeaderAndEpoch
from pk.client.record_set import RecordSlice
from pk.client.rows import FewRows
from pk.log import batch as batches
from pk.log.encoding import encode, fixed_column
from pk.log.small_batches import encode_few
from pk.log.storage import Buffer
from pk.transactional_ids import is_transactional
from pk.types import NONE, PartitionKey

#: A time later than every deadline.
FAR_MS = 1 << 62


@dataclass(slots=True, eq=False)
class ProducerBatch:
    """Slices that are sent together; the content is fixed once `sequence` is assigned."""

    partition: PartitionBatches
    created_ms: int  #: when its first slice was opened
    slices: list[RecordSlice] = field(default_factory=list)
    count: int = 0
    size: int = 0
    ready_ms: int = FAR_MS
    producer_id: int = NONE
    epoch: int = NONE
    sequence: int = NONE
    number: int = 0  #: how many batches of the partition were numbered before this one
    request: InFlightRequest | None = None  #: the request that contains it
    asked_epoch: int = NONE  #: the leader epoch of the last attempt
    #: the leader epoch of the first attempt that may have stored it
    unknown_epoch: int | None = None
    expired: bool = False  #: its futures failed with DeliveryTimedOut while it was in flight
    encoded: list[Buffer] | None = None
    encoded_as: tuple[int, int, int] | None = None  #: producer id, epoch and sequence of `encoded`
    encoding: Any = None  #: the shell's task that encodes it ahead of its turn

    def add(self, more: RecordSlice) -> None:
        self.slices.append(more)
        self.count += more.count
        self.size += more.size
        self.ready_ms = min(self.ready_ms, more.records.ready_ms)

    @property
    def unknown(self) -> bool:
        """Whether an earlier attempt may have stored the batch."""
        return self.unknown_epoch is not None

    def encode(self, codec: str, level: int) -> list[Buffer]:
        """Return the bytes of this batch under its current producer id, epoch and sequence."""
        mine = self.producer_id, self.epoch, self.sequence
        if self.encoded is None:
            self.encoded, self.encoded_as = self._encoded(codec, level), mine
            for each in self.slices:
                each.rows = None  # the encoded bytes replace the rows
        if self.encoded_as != mine:
            header = batches.read_header(self.encoded[0])._replace(
                producer_id=self.producer_id, producer_epoch=self.epoch, base_sequence=self.sequence
            )
            self.encoded, self.encoded_as = batches.seal(header, self.encoded[1:]), mine
        return self.encoded

    def _encoded(self, codec: str, level: int) -> list[Buffer]:
        transactional = is_transactional(self.producer_id)
        if all(type(each.rows) is FewRows for each in self.slices):
            rows, stamps = self._joined_few()
            return encode_few(
                rows.values, rows.keys, stamps, codec=codec, level=level,
                producer_id=self.producer_id, producer_epoch=self.epoch,
                base_sequence=self.sequence, transactional=transactional,
            )  # fmt: skip
        joined, stamp = self._joined()
        return encode(
            joined, codec=codec, level=level, default_timestamp=stamp,
            producer_id=self.producer_id, producer_epoch=self.epoch,
            base_sequence=self.sequence, transactional=transactional,
        )  # fmt: skip

    def _joined_few(self) -> tuple[FewRows, list[int] | int]:
        """Join the rows of all slices, which are all few; returns them and their create times."""
        first = self.slices[0]
        if len(self.slices) == 1:
            return first.rows, first.records.stamp_ms
        values: list[bytes | None] = []
        keys: list[bytes | None] = []
        stamps: list[int] = []
        for each in self.slices:
            values += each.rows.values
            keys += each.rows.keys or [None] * each.count
            stamps += [each.records.stamp_ms] * each.count
        return FewRows(values, keys), stamps

    def _joined(self) -> tuple[pa.RecordBatch, int]:
        """Join the rows of all slices; returns them and the create time of records without one."""
        stamps = [each.records.stamp_ms for each in self.slices]
        rows = [
            each.rows.columns() if type(each.rows) is FewRows else each.rows for each in self.slices
        ]
        if len(rows) == 1:
            return rows[0], stamps[0]
        if len(set(stamps)) > 1 or any(each.num_columns > 3 for each in rows):
            rows = [
                each if each.num_columns > 3 else _stamped(each, stamp)
                for each, stamp in zip(rows, stamps, strict=True)
            ]
        return pa.concat_batches(rows), stamps[0]


def _stamped(rows: pa.RecordBatch, stamp_ms: int) -> pa.RecordBatch:
    column = fixed_column(np.full(rows.num_rows, stamp_ms, np.int64))
    return rows.append_column("timestamp", column)


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A produce request: batches of partitions with the same leader."""

    correlation_id: int
    node: int
    deadline_ms: int
    batches: list[ProducerBatch] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  #: leader epoch of each batch
    size: int = 0
    open: int = 0  #: batches that wait for the response

    def add(self, batch: ProducerBatch, epoch: int) -> None:
        self.batches.append(batch)
        self.epochs.append(epoch)
        self.size += batch.size
        self.open += 1
        batch.request, batch.asked_epoch = self, epoch


@dataclass(slots=True)
class PartitionResponse:
    """The outcome of a batch.  In a broker's response, `index` is its place in the request."""

    index: int = NONE
    error: errors.PkError | None = None
    base_offset: int = NONE
    append_time_ms: int = NONE
    log_start: int = NONE


@dataclass(slots=True, eq=False)
class PartitionBatches:
    """A partition's batches and sequence numbers (KIP-98), as the sender keeps them."""

    topic: str
    key: PartitionKey
    retry: Retry
    batch_size: int = 0
    waiting: deque[ProducerBatch] = field(default_factory=deque)  #: batches without a sequence
    #: batches with a sequence, in its order
    unresolved: deque[ProducerBatch] = field(default_factory=deque)
    producer_id: int = NONE
    epoch: int = NONE
    sequence: int = 0  #: sequence of the next new batch
    number: int = 0  #: batches numbered so far
    acked: bool = False  #: a batch of this epoch was acknowledged
    acked_offset: int = NONE
    gap: bool = False  #: a sequence below an unresolved batch will never be stored
    leader: LeaderAndEpoch | None = None  #: the leader at the last step
    left_ms: int | None = None  #: since when the old leader's response is awaited
    problem: errors.PkError | None = None  #: the error of the last attempt

    def __str__(self) -> str:
        return f"{self.topic}-{self.key.partition}"

    @property
    def idle(self) -> bool:
        return not self.unresolved and not self.waiting

    def in_flight_to(self, node: int) -> bool:
        """Return whether all batches are in requests to this broker, and none waits."""
        if self.waiting:
            return False
        for batch in self.unresolved:
            if batch.request is None or batch.request.node != node:
                return False
        return True

    @property
    def pair(self) -> tuple[int, int]:
        return self.producer_id, self.epoch

    def add(self, more: RecordSlice, batch_size: int) -> None:
        """Add a slice to the last waiting batch, or to a new one if that has no room (A1, A2)."""
        self.batch_size = batch_size
        last = self.waiting[-1] if self.waiting else None
        if (
            last is None
            or last.size + more.size > batch_size
            or last.count + more.count > limits.BATCH_RECORDS_MAX
        ):
            last = ProducerBatch(self, more.records.opened_ms)
            self.waiting.append(last)
        last.add(more)

    @property
    def numbered(self) -> int:
        """The number of sequences in use: from the oldest unresolved batch on."""
        if not self.unresolved:
            return 0
        return max(self.number - self.unresolved[0].number, len(self.unresolved))

    def created_ms(self) -> int:
        """Return when the oldest batch without an outcome was created; the far future if there is
        none.
        """
        created_ms = self.waiting[0].created_ms if self.waiting else FAR_MS
        for batch in self.unresolved:
            if batch.created_ms < created_ms and not batch.expired:
                created_ms = batch.created_ms
        return created_ms

    def ready_ms(self) -> int:
        """Return when the first waiting batch may be sent; 0 = it is full."""
        first = self.waiting[0]
        full = first.size >= self.batch_size - self.batch_size // FULL_SHARE
        return 0 if full or len(self.waiting) > 1 else first.ready_ms

    def number_batch(self, batch: ProducerBatch) -> None:
        """Assign the next sequence to `batch`."""
        batch.producer_id, batch.epoch = self.producer_id, self.epoch
        batch.sequence, batch.number = self.sequence, self.number
        self.sequence = (
            self.sequence + batch.count
        ) & 0x7FFFFFFF  # wraps around as in Kafka (KIP-98)
        self.number += 1

    def begin_epoch(self, producer_id: int, epoch: int) -> None:
        """Close a gap: unresolved batches are renumbered from sequence 0 in a new epoch
        (KIP-360).
        """
        self.producer_id, self.epoch = producer_id, epoch
        self.gap = False
        self.acked = False
        self.sequence = 0
        for batch in self.unresolved:
            self.number_batch(batch)

    def acknowledge(self, batch: ProducerBatch, base_offset: int) -> None:
        self.unresolved.remove(batch)
        self.retry.reset()
        self.problem = None
        if batch.sequence != NONE and batch.epoch == self.epoch:
            self.acked = True
            self.acked_offset = max(self.acked_offset, base_offset + batch.count - 1)

    def remove(self, batch: ProducerBatch) -> None:
        """Remove a batch that failed; a batch that had a sequence leaves a gap."""
        if batch in self.unresolved:
            self.unresolved.remove(batch)
            self.gap = self.gap or batch.sequence != NONE
        else:
            self.waiting.remove(batch)

    def out_of_sight(self, leader: LeaderAndEpoch) -> list[ProducerBatch]:
        """Return the batches that may be stored only in the tier (rule T4).

        An earlier attempt may have stored them.  Since then this leader or an earlier leader was
        elected without all data, so no broker can tell whether they are stored.
        """
        if not self.unresolved:
            return []
        return [
            batch
            for batch in self.unresolved
            if batch.request is None
            and batch.unknown_epoch is not None
            and batch.unknown_epoch < leader.unclean_epoch
        ]
