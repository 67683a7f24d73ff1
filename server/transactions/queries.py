"""Decisions about ids without an open transaction, and reads for operators and for the shell."""

from __future__ import annotations

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
from pk.server.transactions.records import forgotten
from pk.server.transactions.state import Phase, TransactionState
from pk.wire import frames
from pk.wire import pk_pb2 as wire


def forget(ids: TransactionalIds, command: commands.ForgetTransaction, now_ms: int) -> Out:
    """Remove a transactional id for an operator."""
    known = ids.known(command.request.transactional_id)
    if known.state.phase is not Phase.IDLE:
        raise errors.InvalidTxnState(
            f"{known.transactional_id!r} is {known.state.label}: abort its transaction, and wait "
            "until it is complete"
        )
    return Decision([forgotten(known.transactional_id)], wire.ForgetTransactionReply())


def forget_expired(ids: TransactionalIds, command: commands.ForgetExpired, now_ms: int) -> Out:
    """Remove ids that had no transaction for the expiration time."""
    before = now_ms - ids.rules.transactional_id_expiration_ms
    old = [
        known.transactional_id
        for known in ids.items().values()
        if known.updated_ms <= before and known.state.phase is Phase.IDLE
    ][: commands.FORGET_MAX]
    return Decision([forgotten(each) for each in old], len(old))


def describe(ids: TransactionalIds, command: commands.DescribeTransactions, now_ms: int) -> Out:
    """Describe transactional ids; an error is an answer."""
    return decision(tuple(_described(ids, each) for each in command.transactional_ids))


def _described(ids: TransactionalIds, transactional_id: str) -> wire.TransactionDescription:
    found = wire.TransactionDescription(transactional_id=transactional_id)
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


def list_transactions(
    ids: TransactionalIds, command: commands.ListTransactions, now_ms: int
) -> Out:
    """List the transactional ids that match every filter of the request."""
    request = command.request
    labels = {each.label for each in TransactionState}
    unknown = [name for name in request.states if name not in labels]
    if unknown:
        raise errors.InvalidRequest(
            f"no state {', '.join(unknown)}: the states are {', '.join(sorted(labels))}"
        )
    found = tuple(
        wire.TransactionListing(
            transactional_id=name, producer_id=known.current.producer_id, state=known.state.label
        )
        for name, known in sorted(ids.items().items())
        if (not request.states or known.state.label in request.states)
        and (not request.producer_ids or known.current.producer_id in request.producer_ids)
        and (
            request.open_longer_ms <= 0
            or (
                known.state.phase is not Phase.IDLE
                and now_ms - known.started_ms > request.open_longer_ms
            )
        )
    )
    return decision(found)


def resume(ids: TransactionalIds, command: commands.Resume, now_ms: int) -> Out:
    """Return the open transactions of the log: timeouts to measure, and markers to send."""
    return decision(
        tuple(
            began_event(known) if known.state.phase is Phase.ONGOING else prepared_event(known)
            for _, known in sorted(ids.items().items())
            if known.state.phase is not Phase.IDLE
        )
    )
