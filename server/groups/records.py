"""Encoding of the records of `__consumer_offsets`: a key of pk's own, and a `GroupRecord`.

    key     version u8 = 0 | kind u8 | length u16le of the group id | group id (utf-8) | rest
    kind 1  a group; the rest is empty
    kind 2  a member; the rest is its member id (utf-8)
    kind 3  the assignment of the newest generation that has one; the rest is empty
    kind 4  a committed offset; the rest is partition u32le | topic id (utf-8)

A null value removes the key.  The topic is compacted, so the newest record of each key is the
state.

Invariants
  E1  A key or value of another version, or of an unknown kind, state or field raises `NewerFormat`:
      this build would lose it from the next record of that key.
  E2  Equal states have equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from google.protobuf.message import DecodeError

from pk import errors, formats
from pk.log.control_rows import Marker
from pk.server.groups.state import (
    Assigned,
    CommittedOffset,
    GroupMetadata,
    GroupState,
    Member,
    keys_of,
    topics_of,
)
from pk.server.replica.replay_log import ProducerStamp
from pk.types import NONE, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

KEY_VERSION = 0
GROUP, MEMBER, ASSIGNMENT, OFFSET = 1, 2, 3, 4
#: The record that a key of each kind has.
_RECORDS = {GROUP: "group", MEMBER: "member", ASSIGNMENT: "assignment", OFFSET: "offset"}
_HEAD = struct.Struct("<BBH")
_PARTITION = struct.Struct("<I")
_WHAT = "a record of __consumer_offsets"


class GroupLogRecord(NamedTuple):
    """One record: `value` None = the key is removed.

    producer: the transaction that the record belongs to; None = it counts at once
    """

    key: bytes
    value: wire.GroupRecord | None
    producer: ProducerStamp | None = None


class EndedTransaction(NamedTuple):
    """The marker of a producer's transaction, as the machine applies it.

    producer_epoch: of the marker, above that of the transaction (X1)
    """

    producer_id: int
    producer_epoch: int
    commit: bool


class TransactionalOffsets:
    """How the log stores offsets that belong to transactions (replica/replay_log)."""

    def stamp_of(self, record: GroupLogRecord | EndedTransaction) -> ProducerStamp | None:
        """Return the transaction of a record; None = it belongs to none."""
        return record.producer if isinstance(record, GroupLogRecord) else None

    def stamped(
        self, record: GroupLogRecord | EndedTransaction, stamp: ProducerStamp
    ) -> GroupLogRecord | EndedTransaction:
        """Return a record that was read from a transactional batch.

        Raises `NewerFormat` unless it is a committed offset.
        """
        assert isinstance(record, GroupLogRecord)
        if decode_key(record.key).kind != OFFSET or record.value is None:
            raise errors.NewerFormat(f"{_WHAT} of a transaction is no committed offset")
        return record._replace(producer=stamp)

    def ended(self, marker: Marker) -> EndedTransaction:
        """Return the record of a marker."""
        return EndedTransaction(marker.producer_id, marker.producer_epoch, marker.commit)


class GroupKey(NamedTuple):
    """The parts of a key."""

    kind: int
    group_id: str
    member_id: str = ""  #: of kind MEMBER
    partition: PartitionKey | None = None  #: of kind OFFSET


def encode_key(kind: int, group_id: str, rest: bytes = b"") -> bytes:
    """Return the key of a kind."""
    name = group_id.encode()
    return _HEAD.pack(KEY_VERSION, kind, len(name)) + name + rest


def offset_key(group_id: str, key: PartitionKey) -> bytes:
    """Return the key of a committed offset."""
    return encode_key(OFFSET, group_id, _PARTITION.pack(key.partition) + key.topic_id.encode())


def decode_key(key: bytes | None) -> GroupKey:
    """Return the parts of a key.

    Raises `NewerFormat` for another version or kind, and `CorruptLog` for bytes that are no key.
    """
    if key is None or len(key) < _HEAD.size:
        raise errors.CorruptLog(f"{_WHAT} has the key {key!r}")
    formats.require_version(f"the key of {_WHAT}", key[0], KEY_VERSION)
    _, kind, length = _HEAD.unpack_from(key)
    if kind not in _RECORDS:
        raise errors.NewerFormat(f"{_WHAT} has the kind {kind}, which this pk does not know")
    name, rest = key[_HEAD.size : _HEAD.size + length], key[_HEAD.size + length :]
    try:
        group_id = name.decode()
        if len(name) != length or (kind in (GROUP, ASSIGNMENT)) != (not rest):
            raise ValueError("its length is wrong")
        if kind == MEMBER:
            return GroupKey(kind, group_id, rest.decode())
        if kind == OFFSET:
            (partition,) = _PARTITION.unpack_from(rest)
            return GroupKey(
                kind, group_id, "", PartitionKey(rest[_PARTITION.size :].decode(), partition)
            )
    except (ValueError, struct.error) as cause:
        raise errors.CorruptLog(f"{_WHAT} has the key {key!r}: {cause}") from cause
    return GroupKey(kind, group_id)


def to_row(record: GroupLogRecord | EndedTransaction) -> tuple[bytes, bytes | None]:
    """Return key and value as the log has them."""
    assert isinstance(record, GroupLogRecord), "the machine appends no markers"
    value = record.value
    return record.key, None if value is None else value.SerializeToString(deterministic=True)


def from_row(key: bytes | None, value: bytes | None) -> GroupLogRecord | EndedTransaction:
    """Return a record of the log.  Raises `CorruptLog` if it does not parse, `NewerFormat` if a
    newer build wrote it (E1).
    """
    kind = decode_key(key).kind
    assert key is not None
    if value is None:
        return GroupLogRecord(key, None)
    try:
        record = wire.GroupRecord.FromString(value)
    except DecodeError as cause:
        raise errors.CorruptLog(f"{_WHAT} does not parse: {cause}") from cause
    size = record.ByteSize()
    record.DiscardUnknownFields()
    known = kind != GROUP or record.group.state in GroupState.__members__.values()
    if record.WhichOneof("record") != _RECORDS[kind] or record.ByteSize() != size or not known:
        raise errors.NewerFormat(
            f"{_WHAT} has a kind, a field or a state that this pk does not know: use the pk that "
            "wrote it. Nothing here was changed"
        )
    return GroupLogRecord(key, record)


def removed(kind: int, group_id: str, rest: bytes = b"") -> GroupLogRecord:
    """Return the record that removes a key."""
    return GroupLogRecord(encode_key(kind, group_id, rest), None)


def group_record(known: GroupMetadata) -> GroupLogRecord:
    """Return the record of a group."""
    body = wire.GroupStateRecord(
        state=known.state,
        generation=known.generation,
        assignor=known.assignor,
        leader=known.leader,
        initial=known.initial,
        empty_since_ms=known.empty_since_ms,
        query_run=known.query_run,
        holds_retention=known.holds_retention,
    )
    return GroupLogRecord(encode_key(GROUP, known.group_id), wire.GroupRecord(group=body))


def group_of(group_id: str, body: wire.GroupStateRecord) -> GroupMetadata:
    """Return the group that a record has."""
    return GroupMetadata(
        group_id,
        GroupState(body.state),
        body.generation,
        body.assignor,
        body.leader,
        body.initial,
        body.empty_since_ms,
        body.query_run,
        body.holds_retention,
    )


def member_record(group_id: str, member: Member) -> GroupLogRecord:
    """Return the record of a member."""
    body = wire.GroupMemberRecord(
        group_instance_id=member.instance_id,
        client_id=member.client_id,
        session_timeout_ms=member.session_timeout_ms,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        assignors=member.assignors,
        subscription=member.subscription,
        joined=member.joined,
    )
    key = encode_key(MEMBER, group_id, member.member_id.encode())
    return GroupLogRecord(key, wire.GroupRecord(member=body))


def member_of(member_id: str, body: wire.GroupMemberRecord) -> Member:
    """Return the member that a record has."""
    return Member(
        member_id,
        body.group_instance_id,
        body.client_id,
        body.session_timeout_ms,
        body.rebalance_timeout_ms,
        tuple(body.assignors),
        body.subscription,
        body.joined,
    )


def assignment_record(
    group_id: str, generation: int, members: Mapping[str, Assigned]
) -> GroupLogRecord:
    """Return the record of a generation's assignment."""
    body = wire.GroupAssignmentRecord(
        generation=generation,
        members=[
            wire.AssignedMember(
                member_id=name,
                partitions=topics_of(each.partitions),
                released=topics_of(each.released),
            )
            for name, each in sorted(members.items())
        ],
    )
    return GroupLogRecord(encode_key(ASSIGNMENT, group_id), wire.GroupRecord(assignment=body))


def assignment_of(body: wire.GroupAssignmentRecord) -> dict[str, Assigned]:
    """Return the assignment that a record has."""
    return {
        each.member_id: Assigned(keys_of(each.partitions), keys_of(each.released))
        for each in body.members
    }


def offset_record(group_id: str, key: PartitionKey, committed: CommittedOffset) -> GroupLogRecord:
    """Return the record of a committed offset."""
    body = wire.OffsetRecord(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        committed_ms=committed.committed_ms,
        committer=committed.committer,
        sequence=committed.sequence,
    )
    return GroupLogRecord(offset_key(group_id, key), wire.GroupRecord(offset=body))


def offset_removed(group_id: str, key: PartitionKey) -> GroupLogRecord:
    """Return the record that removes a committed offset."""
    return GroupLogRecord(offset_key(group_id, key), None)


def offset_of(body: wire.OffsetRecord, at: Offset = NONE) -> CommittedOffset:
    """Return the committed offset that the record at `at` has."""
    return CommittedOffset(
        body.offset,
        body.leader_epoch,
        body.metadata,
        body.committed_ms,
        at,
        body.committer,
        body.sequence,
    )
