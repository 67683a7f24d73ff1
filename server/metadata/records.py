"""Encoding of the records of `__cluster_metadata-0`: the value of a record is a `MetadataRecord`.

A batch of the metadata log is an ordinary batch (docs/design/0001) without keys.  The controller,
brokers and the tier process decode it by `decode_batches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError, Message

from pk import errors, formats, limits
from pk.log import batch as batches
from pk.log import columns
from pk.log.storage import Buffer
from pk.wire import pk_pb2 as wire

MetadataRecord = wire.MetadataRecord

#: Most decoded bytes of one batch of metadata records.
DECODED_BYTES_MAX = 64 * limits.MIB

_FIELD_BY_TYPE: dict[str, str] = {
    field.message_type.name: field.name
    for field in wire.MetadataRecord.DESCRIPTOR.oneofs_by_name["record"].fields
    if field.message_type is not None
}


def record_of(body: Message) -> MetadataRecord:
    """Return a record with `body` in its oneof."""
    record = MetadataRecord()
    getattr(record, _FIELD_BY_TYPE[body.DESCRIPTOR.name]).CopyFrom(body)
    if not record.WhichOneof("record"):  # CopyFrom of an empty message sets nothing
        getattr(record, _FIELD_BY_TYPE[body.DESCRIPTOR.name]).SetInParent()
    return record


def encode_record(record: MetadataRecord) -> bytes:
    """Encode a record; equal records have equal bytes."""
    return record.SerializeToString(deterministic=True)


def decode_record(value: bytes | None) -> MetadataRecord:
    """Decode a record.  Raises `CorruptLog` if it does not parse, `NewerFormat` if its kind or one
    of its fields is not known.

    An unknown field would be lost from the next snapshot of this node (rule Q7).
    """
    try:
        record = MetadataRecord.FromString(value or b"")
    except DecodeError as cause:
        raise errors.CorruptLog(f"a metadata record does not parse: {cause}") from cause
    kind = record.WhichOneof("record")
    if kind is None:
        raise errors.NewerFormat("the metadata log holds a kind of record this build does not know")
    size = record.ByteSize()
    record.DiscardUnknownFields()
    if record.ByteSize() != size:
        raise errors.NewerFormat(
            f"a metadata record {kind!r} has a field that this build does not know: use the pk that"
            " wrote it. Nothing here was changed"
        )
    return record


def level_in(record: MetadataRecord, known: int) -> int:
    """Return the level of `pk.format` that the record sets; 0 = it sets none (rule Q6).

    Raises `NewerFormat` for a level above `known`, and for a feature that is not known.
    """
    if record.WhichOneof("record") != "feature_level":
        return 0
    name, level = record.feature_level.name, record.feature_level.level
    if name != formats.FEATURE or level > known:
        raise errors.NewerFormat(
            f"the metadata log has level {level} of {name}, this pk knows {known} of "
            f"{formats.FEATURE}: use a newer pk. Nothing here was changed"
        )
    return level


def encode_batch(records: Sequence[MetadataRecord], now_ms: int) -> bytes:
    """Encode one batch of `records`.  The log's `decide` sets offsets and leader epoch."""
    values = [encode_record(record) for record in records]
    return b"".join(columns.encode_lists(values, default_timestamp=now_ms))


def decode_batches(
    raw: Buffer, from_offset: int = 0, *, verify: bool = True
) -> Iterator[tuple[int, MetadataRecord]]:
    """Decode consecutive whole batches: records at and above `from_offset`, with offsets.

    Raises `CorruptBatch` or `InvalidRecord` if the bytes were damaged, and what `decode_record`
    raises.
    """
    for header, view in batches.iter_batches(raw):
        if header.next_offset <= from_offset:
            continue
        if verify:
            batches.check(view)
        for offset, value in columns.values_of(view, header, DECODED_BYTES_MAX):
            if offset >= from_offset:
                yield offset, decode_record(value)
