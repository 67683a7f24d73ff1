"""The serde by which the quorum reads and writes records of `__cluster_metadata-0`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pk import formats
from pk.log.storage import Buffer
from pk.server.metadata import snapshot
from pk.server.metadata.records import (
    MetadataRecord,
    decode_batches,
    encode_batch,
    level_in,
    record_of,
)
from pk.server.raft.record_serde import ControlRecord
from pk.wire import pk_pb2 as wire


class MetadataRecordSerde:
    """A `RecordSerde[MetadataRecord]`; `level`: of `pk.format`, the highest that the node knows."""

    def __init__(self, level: int = formats.LEVEL) -> None:
        self._level = level

    def record_of(self, body: ControlRecord) -> MetadataRecord:
        return record_of(body)

    def voters_in(self, record: MetadataRecord) -> wire.VotersRecord | None:
        return record.voters if record.WhichOneof("record") == "voters" else None

    def level_in(self, record: MetadataRecord) -> int:
        return level_in(record, self._level)

    def encode_batch(self, records: Sequence[MetadataRecord], now_ms: int) -> bytes:
        return encode_batch(records, now_ms)

    def decode_batches(
        self, raw: Buffer, from_offset: int = 0, *, verify: bool = True
    ) -> Iterator[tuple[int, MetadataRecord]]:
        return decode_batches(raw, from_offset, verify=verify)

    def decode_snapshot(self, raw: Buffer) -> Iterator[list[tuple[int, MetadataRecord]]]:
        return snapshot.batches_of(raw)
