"""A snapshot of the cluster's metadata: the state that the records below an offset produce
(KIP-630).

A snapshot is a list of rows `(offset, record)`.  An empty image that applies the rows in order
equals the image of the log up to `end`.  Most rows describe the state at the end, and carry its
last offset.  Some offsets are themselves part of the state, and their rows carry them: a broker
epoch is the offset of the registration, and a leaderless partition has the offset of the record
that left it without a leader.  So the same `apply` with the same checks replays a log and a
snapshot.

raft/snapshot_framing.py defines the file.  Its batches are as in the log.  The value of a row is a
MetadataRecord.  The key is the offset (8 bytes, big endian); an empty key means end - 1.

Invariants
  N1  Equal images with equal ids have equal bytes on every node.  So a fetch that began at one
      leader can be finished at the next.
  N3  Rows have the order of the image, which is the order of the records.  A replay of the rows
      therefore gives an image of the same order.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from google.protobuf.message import Message

from pk import errors, formats
from pk.log import batch as batches
from pk.log import columns
from pk.log.storage import Buffer
from pk.server.metadata.image import BrokerState, MetadataImage, PartitionState, TopicState
from pk.server.metadata.records import (
    DECODED_BYTES_MAX,
    MetadataRecord,
    decode_record,
    encode_record,
    record_of,
)
from pk.server.raft.snapshot_framing import check, content_of, framed
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE, PartitionKey, TopicId
from pk.wire import pk_pb2 as wire

_OFFSET = struct.Struct(">q")
#: Rows of one batch, which one turn of the loop encodes or decodes.
BATCH_ROWS = 128

Row = tuple[int, MetadataRecord]


# -- image to rows ---------------------------------------------------------------------------------


def rows_of(image: MetadataImage) -> Iterator[Row]:
    """Yield the rows that produce `image` from an empty one.  `image` must not change meanwhile."""
    last = image.offset
    yield from cluster_rows(image)
    for broker in image.brokers.values():
        yield from broker_rows(broker)
    for topic in image.topics.values():
        yield last, record_of(topic_record(topic))
        for number, state in topic.partitions.items():
            since = image.leaderless.get(PartitionKey(topic.topic_id, number), last)
            yield since, record_of(partition_record(topic.topic_id, number, state))
    for (kind, name), values in image.configs.items():
        for option, value in values.items():
            config = wire.ConfigRecord(
                resource_type=kind, resource_name=name, name=option, value=value
            )
            yield last, record_of(config)
    for topic_id, name in image.purges.items():
        yield last, record_of(wire.TierPurgeRecord(topic_id=topic_id, name=name))
    yield last, record_of(wire.NoOpRecord())  # sets the offset of the image to `last`


def cluster_rows(image: MetadataImage) -> Iterator[Row]:
    """Yield the rows that exist once in a cluster."""
    for body in _cluster_bodies(image):
        yield image.offset, record_of(body)
    for offset, epoch in image.terms:
        ids = [voter.node_id for voter in image.voters]
        change = wire.LeaderChangeRecord(leader_id=image.leader_id, epoch=epoch, voters=ids)
        yield offset, record_of(change)


def _cluster_bodies(image: MetadataImage) -> Iterator[Message]:
    if image.cluster_id:
        yield wire.ClusterRecord(cluster_id=image.cluster_id, genesis=image.genesis)
    for name, level in image.features.items():
        yield wire.FeatureLevelRecord(name=name, level=level)
    if image.voters:
        voters = [wire.Voter(**voter._asdict()) for voter in image.voters]
        yield wire.VotersRecord(voters=voters)
    if image.next_producer_id:
        yield wire.ProducerIdsRecord(
            broker_id=NONE, broker_epoch=NONE, next_producer_id=image.next_producer_id
        )


def broker_rows(broker: BrokerState) -> Iterator[Row]:
    """Yield a registration at its own offset, and its last change if there was one."""
    yield broker.broker_epoch, record_of(register_record(broker))
    if broker.changed_offset != broker.broker_epoch:
        change = wire.BrokerRegistrationChangeRecord(
            broker_id=broker.broker_id,
            broker_epoch=broker.broker_epoch,
            fenced=broker.fenced,
            in_controlled_shutdown=broker.in_controlled_shutdown,
        )
        yield broker.changed_offset, record_of(change)


def register_record(broker: BrokerState) -> wire.RegisterBrokerRecord:
    """Return the registration record of a broker in its present state."""
    return wire.RegisterBrokerRecord(
        broker_id=broker.broker_id,
        broker_epoch=broker.broker_epoch,
        incarnation_id=broker.incarnation_id,
        boot_id=broker.boot_id,
        directory_ids=broker.directory_ids,
        address=broker.address,
        rack=broker.rack,
        fenced=broker.fenced,
        in_controlled_shutdown=broker.in_controlled_shutdown,
        clean=broker.clean,
        format_level=formats.level_field(broker.format_level),
    )


def topic_record(topic: TopicState) -> wire.TopicRecord:
    return wire.TopicRecord(name=topic.name, topic_id=topic.topic_id, request_id=topic.request_id)


def partition_record(topic_id: TopicId, number: int, state: PartitionState) -> wire.PartitionRecord:
    """Return the record of a partition in its present state."""
    record = wire.PartitionRecord(
        topic_id=topic_id,
        partition=number,
        replicas=state.replicas,
        directories=state.directories,
        isr=state.isr,
        elr=state.elr,
        last_known=state.last_known,
        adding=state.adding,
        removing=state.removing,
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.partition_epoch,
        unclean=state.unclean,
    )
    if state.unclean_epoch != NONE:
        record.unclean_epoch = state.unclean_epoch
    return record


# -- rows to bytes and back ------------------------------------------------------------------------


def encode(snapshot: SnapshotId, rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield the file in pieces: header, one piece per batch of `BATCH_ROWS` rows, footer."""
    return framed(snapshot, _encoded(rows, snapshot.end - 1))


def _encoded(rows: Iterable[Row], last: int) -> Iterator[tuple[int, bytes]]:
    count, left = 0, iter(rows)
    while part := list(islice(left, BATCH_ROWS)):
        yield len(part), _encode_batch(part, count, last)
        count += len(part)


def _encode_batch(rows: list[Row], base: int, last: int) -> bytes:
    keys = [b"" if offset == last else _OFFSET.pack(offset) for offset, _ in rows]
    values = [encode_record(record) for _, record in rows]
    raw = b"".join(columns.encode_lists(values, keys))
    return b"".join(batches.patched(raw, base, 0))


def batches_of(raw: Buffer) -> Iterator[list[Row]]:
    """Yield the rows of a verified snapshot, at most `BATCH_ROWS` at a time.

    Raises `NewerFormat` for a kind of record that this build does not know.
    """
    made, content = content_of(raw)
    last = made.end - 1
    for header, batch in batches.iter_batches(content):
        found = columns.decode(batch, decoded_bytes_max=DECODED_BYTES_MAX, header=header)
        keys, values = found.column("key").to_pylist(), found.column("value").to_pylist()
        yield [
            (_OFFSET.unpack(key)[0] if key else last, decode_record(value))
            for key, value in zip(keys, values, strict=True)
        ]


# -- for people ------------------------------------------------------------------------------------


def dump(raw: Buffer, *, records: bool = False) -> Iterator[dict[str, Any]]:
    """Yield what `pk log dump` prints: the snapshot's facts, and row counts by kind or each row.

    Never raises for damaged input; damage is reported as an object of its own.
    """
    try:
        found = check(raw)
        counts: Counter[str] = Counter()
        rows = []
        for part in batches_of(raw):
            for offset, record in part:
                kind = record.WhichOneof("record") or ""
                counts[kind] += 1
                rows.append({"offset": offset, "record": kind, **_fields(getattr(record, kind))})
    except errors.PkError as damage:
        yield {"corrupt": damage.message, "position": 0}
        return
    head = {"snapshot_end": found.id.end, "epoch": found.id.epoch, "bytes": len(raw)}
    yield {**head, "rows_in_all": found.rows, **counts}
    yield from rows if records else ()


def _fields(message: Message) -> dict[str, Any]:
    """Return the set fields of a message as plain values."""
    known: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.is_repeated:
            nested = field.message_type is not None
            known[field.name] = [_fields(each) if nested else each for each in value]
        else:
            known[field.name] = _fields(value) if field.message_type is not None else value
    return known
