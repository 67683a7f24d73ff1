"""Decisions about ids without an open transaction, and reads for operators and for the shell."""

from __future__ import annotations

from collections.abc import Iterable

from pk import errors
from pk.effects import Decision
from pk.server.transactions import commands
from pk.server.transactions.ids import (
    Out,
    TransactionalIds,
    began_event,
    decision,
    prepared_event,
)
from pk.server.transactions.participants import events as job_events
from pk.server.transactions.participants.records import table_to_wire
from pk.server.transactions.participants.state import AWAITING_TABLE, Job
from pk.server.transactions.records import forgotten
from pk.server.transactions.state import Phase, TransactionMetadata, TransactionState
from pk.types import NONE, ProducerId
from pk.wire import frames
from pk.wire import pk_pb2 as wire


def forget(ids: TransactionalIds, command: commands.ForgetTransaction, now_ms: int) -> Out:
    """Remove a transactional id for an operator."""
    name = command.request.transactional_id
    known: TransactionMetadata | Job = ids.jobs.items().get(name) or ids.known(name)
    if known.state.phase is not Phase.IDLE:
        raise errors.InvalidTxnState(
            f"{name!r} is {known.label}: abort its transaction, and wait until it is complete"
        )
    if isinstance(known, Job):
        return Decision(ids.jobs.forgotten(name), wire.ForgetTransactionReply())
    return Decision([forgotten(name)], wire.ForgetTransactionReply())


def forget_expired(ids: TransactionalIds, command: commands.ForgetExpired, now_ms: int) -> Out:
    """Remove ids that had no transaction for the expiration time.

    A job of batch writes expires after BATCH_WRITE_EXPIRATION_MS.  The job of a query does not
    expire by time: its history recognises a batch that is written again (X10).
    """
    before = now_ms - ids.rules.transactional_id_expiration_ms
    old = [
        known.transactional_id
        for known in ids.items().values()
        if known.updated_ms <= before and known.state.phase is Phase.IDLE
    ][: commands.FORGET_MAX]
    written = [forgotten(each) for each in old]
    count = len(old)
    for known in ids.jobs.items().values():
        idle = known.batch_write and known.state.phase is Phase.IDLE
        if not idle or known.updated_ms > now_ms - commands.BATCH_WRITE_EXPIRATION_MS:
            continue
        if count == commands.FORGET_MAX or len(written) > commands.FORGET_RECORDS_MAX:
            count = commands.FORGET_MAX  # the caller asks again
            break
        written += ids.jobs.forgotten(known.job)
        count += 1
    return Decision(written, count)


def describe(ids: TransactionalIds, command: commands.DescribeTransactions, now_ms: int) -> Out:
    """Describe transactional ids; an error is an answer."""
    return decision(tuple(_described(ids, each) for each in command.transactional_ids))


def _described(ids: TransactionalIds, transactional_id: str) -> wire.TransactionDescription:
    found = wire.TransactionDescription(transactional_id=transactional_id)
    job = ids.jobs.items().get(transactional_id)
    if job is not None:
        _describe_job(ids, job, found)
        return found
    try:
        known = ids.known(transactional_id)
    except errors.PkError as refusal:
        found.error.CopyFrom(frames.error_of(refusal))
        return found
    found.state, found.timeout_ms = known.state.label, known.timeout_ms
    found.producer_id, found.producer_epoch = known.current
    found.started_ms, found.reason = known.started_ms, known.reason
    for key in known.partitions:
        found.partitions.add(topic_id=key.topic_id, partition=key.partition)
    return found


def _describe_job(ids: TransactionalIds, known: Job, found: wire.TransactionDescription) -> None:
    found.state, found.producer_id, found.producer_epoch = known.label, NONE, NONE
    found.started_ms, found.reason = known.started_ms, known.reason
    for key in known.partitions:
        found.partitions.add(topic_id=key.topic_id, partition=key.partition)
    joined = [] if known.state.phase is Phase.IDLE else sorted(ids.jobs.joined(known))
    found.job.CopyFrom(
        wire.JobDescription(
            query=known.query,
            run=known.run,
            batch=known.batch,
            participants=len(joined),
            last_committed=known.last_committed,
            batch_write=known.batch_write,
            joined=[
                wire.JoinedParticipant(
                    producer_id=producer_id, producer_epoch=each.epoch, heard_ago_ms=NONE
                )
                for producer_id, each in joined
            ],
        )
    )
    if known.awaited is not None:
        found.job.awaited.CopyFrom(
            wire.AwaitedTable(
                table=table_to_wire(known.awaited.table),
                transaction=known.transaction,
                since_ms=known.awaited.since_ms,
            )
        )


def list_transactions(
    ids: TransactionalIds, command: commands.ListTransactions, now_ms: int
) -> Out:
    """List the transactional ids that match every filter of the request.

    A job has one row without a producer id.  If the request names producer ids, the job has a row
    for each of them that it owns.
    """
    request = command.request
    labels = {*(each.label for each in TransactionState), AWAITING_TABLE}
    unknown = [name for name in request.states if name not in labels]
    if unknown:
        raise errors.InvalidRequest(
            f"no state {', '.join(unknown)}: the states are {', '.join(sorted(labels))}"
        )
    rows: list[tuple[str, ProducerId, TransactionMetadata | Job]] = [
        (name, known.current.producer_id, known)
        for name, known in ids.items().items()
        if not request.producer_ids or known.current.producer_id in request.producer_ids
    ]
    rows += _jobs_listed(ids, request.producer_ids)
    found = tuple(
        wire.TransactionListing(
            transactional_id=name,
            producer_id=producer_id,
            state=known.label,
            job=isinstance(known, Job),
        )
        for name, producer_id, known in sorted(rows, key=lambda row: row[:2])
        if (not request.states or known.label in request.states)
        and (
            request.open_longer_ms <= 0
            or (
                known.state.phase is not Phase.IDLE
                and now_ms - known.started_ms > request.open_longer_ms
            )
        )
    )
    return decision(found)


def _jobs_listed(
    ids: TransactionalIds, producer_ids: Iterable[ProducerId]
) -> list[tuple[str, ProducerId, Job]]:
    """Return every job, or the owner of each of these producer ids."""
    asked = set(producer_ids)
    if not asked:
        return [(name, NONE, known) for name, known in ids.jobs.items().items()]
    owners = ((each, ids.jobs.owner(each)) for each in asked)
    return [(owner[0].job, each, owner[0]) for each, owner in owners if owner is not None]


def resume(ids: TransactionalIds, command: commands.Resume, now_ms: int) -> Out:
    """Return the open transactions of the log: timeouts to measure, and markers to send."""
    found: list[object] = [
        began_event(known) if known.state.phase is Phase.ONGOING else prepared_event(known)
        for _, known in sorted(ids.items().items())
        if known.state.phase is not Phase.IDLE
    ]
    for _, job in sorted(ids.jobs.items().items()):
        if job.awaited is not None:
            found.append(job_events.awaits_event(job))
        elif job.open:
            found.append(job_events.began_event(job))
        elif job.state.phase is Phase.PREPARED:
            found.append(job_events.prepared_event(ids, job))
    return decision(tuple(found))
