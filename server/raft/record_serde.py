"""What the quorum has to know of the records that it replicates (Kafka: `RecordSerde`).

The log is generic over its records.  Two kinds of them the quorum appends and reads itself: who
leads an epoch, and who votes (KIP-595, KIP-853).  A serde knows how they, and all others, are
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from pk.log.storage import Buffer
from pk.wire import pk_pb2 as wire

R = TypeVar("R")

#: What the quorum itself appends.
ControlRecord = wire.LeaderChangeRecord | wire.VotersRecord


class RecordSerde(Protocol[R]):
    """Records as bytes and back."""

    def record_of(self, body: ControlRecord) -> R:
        """A record of the log that says `body`."""
        ...

    def voters_in(self, record: R) -> wire.VotersRecord | None:
        """The voters that `record` names; None if it is of another kind."""
        ...

    def encode_batch(self, records: Sequence[R], now_ms: int) -> bytes:
        """One batch; offsets and leader epoch are patched in by the log."""
        ...

    def decode_batches(
        self, raw: Buffer, from_offset: int = 0, *, verify: bool = True
    ) -> Iterator[tuple[int, R]]:
        """The records of consecutive whole batches at and above `from_offset`, with their offsets.

        Raises `CorruptBatch` or `InvalidRecord` if the bytes were damaged, `CorruptLog`,
        `NewerFormat`.
        """
        ...

    def decode_snapshot(self, raw: Buffer) -> Iterator[Sequence[tuple[int, R]]]:
        """The rows of a snapshot that was checked, batch by batch.  Raises `NewerFormat`."""
        ...
