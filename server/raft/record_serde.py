"""The interface by which the quorum reads and writes records (Kafka: `RecordSerde`).

The log is generic over its records.  The quorum appends and reads two kinds of records itself: the
leader of an epoch, and the voters (KIP-595, KIP-853).  A serde encodes and decodes these and all
other records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from pk.log.storage import Buffer
from pk.wire import pk_pb2 as wire

R = TypeVar("R")

#: The records that the quorum itself appends.
ControlRecord = wire.LeaderChangeRecord | wire.VotersRecord


class RecordSerde(Protocol[R]):
    """Encodes records to bytes and decodes them."""

    def record_of(self, body: ControlRecord) -> R:
        """Return the record of the log for `body`."""
        ...

    def voters_in(self, record: R) -> wire.VotersRecord | None:
        """Return the voters that `record` names; None if it is of another kind."""
        ...

    def level_in(self, record: R) -> int:
        """Return the level of formats that `record` sets; 0 = it sets none.

        Raises `NewerFormat` for a level that this node does not know (rule Q6).
        """
        ...

    def encode_batch(self, records: Sequence[R], now_ms: int) -> bytes:
        """Encode one batch.  The log sets its offsets and leader epoch."""
        ...

    def decode_batches(
        self, raw: Buffer, from_offset: int = 0, *, verify: bool = True
    ) -> Iterator[tuple[int, R]]:
        """Decode consecutive whole batches: records at and above `from_offset`, with offsets.

        Raises `CorruptBatch` or `InvalidRecord` if the bytes were damaged, `CorruptLog`,
        `NewerFormat`.
        """
        ...

    def decode_snapshot(self, raw: Buffer) -> Iterator[Sequence[tuple[int, R]]]:
        """Decode the rows of a verified snapshot, batch by batch.  Raises `NewerFormat`."""
        ...
