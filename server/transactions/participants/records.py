"""Encoding of the records of jobs in `__transaction_state`.

    key kind  1 job            the name is the job (utf-8); the value is a JobRecord
              2 participant    u32 length of the job | job | producer id i64; a ParticipantRecord
              3 batch          u32 length of the job | job | batch i64; a CommittedBatchRecord

Numbers are big-endian.  Key 1 is shared with plain transactional ids (transactions/records.py), so
an id has one kind.  A null value removes the participant, or the batch from the history.

Separate keys keep the cost of a batch proportional to its tasks: one record with pool and history
would be written again for each join.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from pk import errors
from pk.server.transactions.participants.state import (
    Awaited,
    BatchSums,
    Job,
    Participant,
    PreparedTable,
)
from pk.server.transactions.records import (
    BATCH,
    KEY_VERSION,
    PARTICIPANT,
    TransactionLogRecord,
    encode_key,
    partitions_of,
    topics_of,
)
from pk.server.transactions.state import TransactionState
from pk.types import ProducerId, RowSums
from pk.wire import pk_pb2 as wire

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">q")


class MemberKey(NamedTuple):
    """The key of a participant or of a batch: `number` is its producer id or its batch."""

    kind: int
    job: str
    number: int


def member_key(kind: int, job: str, number: int) -> bytes:
    """Return the key of a participant (PARTICIPANT) or of a committed batch (BATCH)."""
    name = job.encode()
    return bytes((KEY_VERSION, kind)) + _LENGTH.pack(len(name)) + name + _NUMBER.pack(number)


def decode_member_key(key: bytes) -> MemberKey:
    """Return the parts of a key of kind PARTICIPANT or BATCH.  Raises `CorruptLog`."""
    try:
        (length,) = _LENGTH.unpack_from(key, 2)
        end = 2 + _LENGTH.size + length
        if len(key) != end + _NUMBER.size:
            raise errors.CorruptLog(f"a record of __transaction_state has the key {key!r}")
        (number,) = _NUMBER.unpack_from(key, end)
        return MemberKey(key[1], key[2 + _LENGTH.size : end].decode(), number)
    except (struct.error, UnicodeDecodeError) as cause:
        raise errors.CorruptLog(
            f"a record of __transaction_state has the key {key!r}: {cause}"
        ) from cause


def job_record(known: Job) -> TransactionLogRecord:
    """Return the record of a job."""
    body = wire.JobRecord(
        job=known.job,
        query=known.query,
        run=known.run,
        batch_write=known.batch_write,
        superseded=known.superseded,
        state=known.state,
        transaction=known.transaction,
        batch=known.batch,
        opened_by=known.opened_by,
        topics=topics_of(known.partitions),
        named=sorted(known.named),
        last_committed=known.last_committed,
        started_ms=known.started_ms,
        updated_ms=known.updated_ms,
        reason=known.reason,
        metadata_offset=known.metadata_offset,
    )
    if known.awaited is not None:
        body.awaited.CopyFrom(
            wire.AwaitedTableRecord(
                table=table_to_wire(known.awaited.table),
                since_ms=known.awaited.since_ms,
                sums=sums_to_wire(known.awaited.sums),
            )
        )
    return TransactionLogRecord(encode_key(known.job), wire.TransactionRecord(job=body))


def job_of(name: str, body: wire.JobRecord) -> Job:
    """Return the job of a record with the key of `name`.

    Raises `CorruptLog` if key and value name two ids, and `NewerFormat` for an unknown state.
    """
    if body.job != name:
        raise errors.CorruptLog(f"a record of __transaction_state has {body.job!r} under {name!r}")
    if body.state not in TransactionState.__members__.values():
        raise errors.NewerFormat(
            f"a record of __transaction_state has the state {body.state}: use the pk that wrote it"
        )
    return Job(
        body.job,
        body.query,
        body.run,
        body.batch_write,
        tuple(body.superseded),
        TransactionState(body.state),
        body.transaction,
        body.batch,
        body.opened_by,
        partitions_of(body.topics),
        frozenset(body.named),
        body.last_committed,
        body.started_ms,
        body.updated_ms,
        body.reason,
        body.metadata_offset,
        _awaited_of(body.awaited) if body.HasField("awaited") else None,
    )


def _awaited_of(body: wire.AwaitedTableRecord) -> Awaited:
    return Awaited(table_of(body.table), body.since_ms, sums_of(body.sums))


def participant_record(
    job: str, producer_id: ProducerId, participant: Participant
) -> TransactionLogRecord:
    """Return the record of a join."""
    body = wire.ParticipantRecord(
        producer_epoch=participant.epoch, transaction=participant.transaction
    )
    key = member_key(PARTICIPANT, job, producer_id)
    return TransactionLogRecord(key, wire.TransactionRecord(participant=body))


def participant_of(body: wire.ParticipantRecord) -> Participant:
    """Return the participant of a record."""
    return Participant(body.producer_epoch, body.transaction)


def batch_record(job: str, batch: int, sums: BatchSums) -> TransactionLogRecord:
    """Return the record of a committed batch in the history."""
    body = wire.CommittedBatchRecord(sums=sums_to_wire(sums))
    return TransactionLogRecord(
        member_key(BATCH, job, batch), wire.TransactionRecord(committed_batch=body)
    )


def removed(kind: int, job: str, number: int) -> TransactionLogRecord:
    """Return the record that removes a participant or a batch of the history."""
    return TransactionLogRecord(member_key(kind, job, number), None)


def table_to_wire(table: PreparedTable) -> wire.PreparedTable:
    """Return the table of a prepared batch as a message."""
    return wire.PreparedTable(
        url=table.url, table_id=table.table_id, app=table.app, version=table.version
    )


def table_of(body: wire.PreparedTable) -> PreparedTable:
    """Return the table of a message."""
    return PreparedTable(body.url, body.table_id, body.app, body.version)


def sums_to_wire(sums: BatchSums) -> list[wire.TopicSums]:
    """Return sums as messages, by topic id."""
    return [
        wire.TopicSums(topic_id=topic_id, rows=each.rows, bytes=each.bytes, row_sum=each.row_sum)
        for topic_id, each in sorted(sums.items())
    ]


def sums_of(items: Iterable[wire.TopicSums]) -> dict[str, RowSums]:
    """Return sums by topic id, without topics that got no rows."""
    return {
        each.topic_id: RowSums(each.rows, each.bytes, each.row_sum) for each in items if each.rows
    }
