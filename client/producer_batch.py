"""The batch of one partition that a request carries (Kafka's ProducerBatch).

A *piece* is a run of rows of one partition with the part of a delivery it answers for.  Pieces of a
partition are gathered into a `ProducerBatch` while it has room and no request has taken it; a batch
may go when it is full or its oldest piece has lingered long enough.  While a broker is slow,
batches therefore grow by themselves.

Invariants
  A1  pieces leave a partition in the order they came.
  A2  a batch holds at most `batch_size` bytes, or a single piece; `rows.cuts_by_size` keeps pieces
      within it, unless they are a single row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pk.client.futures import Part
from pk.client.rows import int64_column
from pk.log import batch as batches
from pk.log.columns import encode
from pk.log.storage import Buffer
from pk.types import NONE, PartitionKey

#: A batch to which less than 1/8 of its size could be added counts as full.
FULL_SHARE = 8


class Piece:
    """Rows of one partition and the part that answers for them."""

    __slots__ = ("count", "created_ms", "part", "ready_ms", "rows", "size", "stamp_ms")

    def __init__(
        self,
        rows: pa.RecordBatch,
        size: int,
        part: Part,
        stamp_ms: int,
        created_ms: int,
        ready_ms: int,
    ) -> None:
        self.rows = rows
        self.size = size
        self.count = rows.num_rows
        self.part = part
        self.stamp_ms = stamp_ms  #: wall clock; the create time of rows without one of their own
        self.created_ms = created_ms  #: monotonic; counts for delivery_timeout_ms
        self.ready_ms = ready_ms  #: monotonic; when it has lingered long enough


class ProducerBatch:
    """Pieces that travel together; once `sequence` is given its content is fixed."""

    __slots__ = (
        "asked_epoch", "count", "created_ms", "encoded", "epoch", "expired", "flight", "key",
        "number", "pieces", "producer_id", "ready_ms", "sequence", "size", "topic", "unknown",
        "unknown_epoch",
    )  # fmt: skip

    def __init__(self, topic: str, key: PartitionKey, piece: Piece) -> None:
        self.topic = topic
        self.key = key
        self.pieces = [piece]
        self.count = piece.count
        self.size = piece.size
        self.created_ms = piece.created_ms
        self.ready_ms = piece.ready_ms
        self.producer_id = NONE
        self.epoch = NONE
        self.sequence = NONE
        self.number = 0  #: how many batches of the partition were numbered before it
        self.flight: int | None = None  #: correlation id of the frame it is in
        self.asked_epoch = NONE  #: the leader epoch of the last attempt
        self.unknown = False  #: an earlier attempt may have stored it
        self.unknown_epoch = NONE  #: … the first of them in this leader epoch
        self.expired = False  #: the caller was told DeliveryTimedOut while it was in flight
        self.encoded: list[Buffer] | None = None

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.count += piece.count
        self.size += piece.size
        self.ready_ms = min(self.ready_ms, piece.ready_ms)

    @property
    def next_sequence(self) -> int:
        following: int = (self.sequence + self.count) & 0x7FFFFFFF
        return following  # wraps as Kafka's (KIP-98)

    def encode(self, codec: str, level: int) -> list[Buffer]:
        """The bytes of this batch under its present producer id, epoch and sequence."""
        if self.encoded is None:
            rows, stamp = _joined(self.pieces)
            self.encoded = encode(
                rows, codec=codec, level=level, default_timestamp=stamp,
                producer_id=self.producer_id, producer_epoch=self.epoch,
                base_sequence=self.sequence,
            )  # fmt: skip
            for piece in self.pieces:
                piece.rows = None  # the bytes stand for them from now on
        header = batches.read_header(self.encoded[0])
        mine = (self.producer_id, self.epoch, self.sequence)
        if (header.producer_id, header.producer_epoch, header.base_sequence) != mine:
            header = header._replace(
                producer_id=mine[0], producer_epoch=mine[1], base_sequence=mine[2]
            )
            self.encoded = batches.seal(header, self.encoded[1:])
        return self.encoded


def _joined(pieces: list[Piece]) -> tuple[pa.RecordBatch, int]:
    """The rows of all pieces and the create time of those without one."""
    first = pieces[0]
    if len(pieces) == 1:
        return first.rows, first.stamp_ms
    if all(p.rows.num_columns == 3 and p.stamp_ms == first.stamp_ms for p in pieces):
        return pa.concat_batches([p.rows for p in pieces]), first.stamp_ms
    stamped = [
        p.rows
        if p.rows.num_columns > 3
        else p.rows.append_column("timestamp", int64_column(np.full(p.count, p.stamp_ms, np.int64)))
        for p in pieces
    ]
    return pa.concat_batches(stamped), first.stamp_ms
