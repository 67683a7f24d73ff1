"""Encoding of the records of `__transaction_state`: a key of pk's own, and a `TransactionRecord`.

    key     version u8 = 0 | kind u8 | name
    kind 1  the name is a transactional id (utf-8), of a plain producer or of a job; the value is
            null once the id is forgotten
    kind 2  a participant of a job, kind 3 a committed batch of a job (participants/records.py)

The topic is compacted, so the newest record of each key is the state.

Invariants
  E1  A key or value of another version, or of an unknown kind, state or field raises `NewerFormat`:
      this build would lose it from the next record of that key.
  E2  Equal states have equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from google.protobuf.message import DecodeError

from pk import errors, formats
from pk.server.transactions.state import ProducerPair, TransactionMetadata, TransactionState
from pk.types import NONE, Epoch, PartitionKey
from pk.wire import pk_pb2 as wire

KEY_VERSION = 0
TRANSACTIONAL_ID, PARTICIPANT, BATCH = 1, 2, 3
#: The records that a key of each kind may have.
_RECORDS = {
    TRANSACTIONAL_ID: ("transaction", "job"),
    PARTICIPANT: ("participant",),
    BATCH: ("committed_batch",),
}

_WHAT = "a record of __transaction_state"


class TransactionLogRecord(NamedTuple):
    """One record: `value` None = the transactional id of the key is forgotten."""

    key: bytes
    value: wire.TransactionRecord | None


def encode_key(transactional_id: str) -> bytes:
    """Return the key of a transactional id."""
    return bytes((KEY_VERSION, TRANSACTIONAL_ID)) + transactional_id.encode()


def kind_of(key: bytes | None) -> int:
    """Return the kind of a key.  Raises `NewerFormat` for another version or kind, and `CorruptLog`
    for bytes that are no key.
    """
    if key is None or len(key) < 2:
        raise errors.CorruptLog(f"{_WHAT} has the key {key!r}")
    formats.require_version(f"the key of {_WHAT}", key[0], KEY_VERSION)
    if key[1] not in _RECORDS:
        raise errors.NewerFormat(f"{_WHAT} has the kind {key[1]}, which this pk does not know")
    return key[1]


def decode_key(key: bytes | None) -> str:
    """Return the transactional id of a key of kind TRANSACTIONAL_ID.

    Raises `CorruptLog` and `NewerFormat`.
    """
    if kind_of(key) != TRANSACTIONAL_ID or key is None:
        raise errors.CorruptLog(f"{_WHAT} has the key {key!r}, which names no transactional id")
    try:
        return key[2:].decode()
    except UnicodeDecodeError as cause:
        raise errors.CorruptLog(f"{_WHAT} has the key {key!r}: {cause}") from cause


def to_row(record: TransactionLogRecord) -> tuple[bytes, bytes | None]:
    """Return key and value as the log has them."""
    value = record.value
    return record.key, None if value is None else value.SerializeToString(deterministic=True)


def from_row(key: bytes | None, value: bytes | None) -> TransactionLogRecord:
    """Return a record of the log.  Raises `CorruptLog` if it does not parse, `NewerFormat` if a
    newer build wrote it (E1).
    """
    kind = kind_of(key)
    assert key is not None
    if kind == TRANSACTIONAL_ID:
        decode_key(key)
    if value is None:
        return TransactionLogRecord(key, None)
    try:
        record = wire.TransactionRecord.FromString(value)
    except DecodeError as cause:
        raise errors.CorruptLog(f"{_WHAT} does not parse: {cause}") from cause
    size = record.ByteSize()
    record.DiscardUnknownFields()
    if record.WhichOneof("record") not in _RECORDS[kind] or record.ByteSize() != size:
        raise errors.NewerFormat(
            f"{_WHAT} has a kind or a field that this pk does not know: use the pk that wrote it. "
            "Nothing here was changed"
        )
    return TransactionLogRecord(key, record)


def forgotten(transactional_id: str) -> TransactionLogRecord:
    """Return the record that removes a transactional id."""
    return TransactionLogRecord(encode_key(transactional_id), None)


def record_of(known: TransactionMetadata) -> TransactionLogRecord:
    """Return the record that has the state of a transactional id."""
    body = wire.TransactionStateRecord(
        transactional_id=known.transactional_id,
        producer_id=known.current.producer_id,
        producer_epoch=known.current.epoch,
        timeout_ms=known.timeout_ms,
        state=known.state,
        topics=topics_of(known.partitions),
        started_ms=known.started_ms,
        updated_ms=known.updated_ms,
        reason=known.reason,
        previous_producer_id=known.previous.producer_id,
        previous_producer_epoch=known.previous.epoch,
        next_producer_id=known.next.producer_id,
        next_producer_epoch=known.next.epoch,
        metadata_offset=known.metadata_offset,
        fenced=known.fenced,
    )
    key = encode_key(known.transactional_id)
    return TransactionLogRecord(key, wire.TransactionRecord(transaction=body))


def metadata_of(record: TransactionLogRecord) -> TransactionMetadata | None:
    """Return the state that a record has; None if it removes its transactional id.

    Raises `CorruptLog` if key and value name two ids, and `NewerFormat` for an unknown state.
    """
    transactional_id = decode_key(record.key)
    if record.value is None:
        return None
    body = record.value.transaction
    if body.transactional_id != transactional_id:
        raise errors.CorruptLog(f"{_WHAT} has {body.transactional_id!r} under {record.key!r}")
    if body.state not in TransactionState.__members__.values():
        raise errors.NewerFormat(f"{_WHAT} has the state {body.state}: use the pk that wrote it")
    return TransactionMetadata(
        transactional_id,
        ProducerPair(body.producer_id, body.producer_epoch),
        body.timeout_ms,
        TransactionState(body.state),
        partitions_of(body.topics),
        body.started_ms,
        body.updated_ms,
        body.reason,
        ProducerPair(body.previous_producer_id, body.previous_producer_epoch),
        ProducerPair(body.next_producer_id, body.next_producer_epoch),
        body.metadata_offset,
        body.fenced,
    )


def topics_of(partitions: Mapping[PartitionKey, Epoch]) -> list[wire.TxnTopic]:
    """Return the partitions by topic.  A topic whose partitions have no unclean epochs has none."""
    topics: dict[str, wire.TxnTopic] = {}
    for key, unclean_epoch in sorted(partitions.items()):
        topic = topics.setdefault(key.topic_id, wire.TxnTopic(topic_id=key.topic_id))
        topic.partitions.append(key.partition)
        topic.unclean_epochs.append(unclean_epoch)
    for topic in topics.values():
        if all(unclean_epoch == NONE for unclean_epoch in topic.unclean_epochs):
            del topic.unclean_epochs[:]
    return list(topics.values())


def partitions_of(topics: Iterable[wire.TxnTopic]) -> dict[PartitionKey, Epoch]:
    """Return partitions with their unclean epochs.  Raises `CorruptLog`."""
    found: dict[PartitionKey, Epoch] = {}
    for topic in topics:
        unclean_epochs = topic.unclean_epochs or [NONE] * len(topic.partitions)
        if len(unclean_epochs) != len(topic.partitions):
            raise errors.CorruptLog(f"{_WHAT} has {topic} with epochs of other partitions")
        for partition, unclean_epoch in zip(topic.partitions, unclean_epochs, strict=True):
            found[PartitionKey(topic.topic_id, partition)] = unclean_epoch
    return dict(sorted(found.items()))
