"""Decisions that end transactions: EndTxn, timeouts, operators, and the markers that were written.

The table `_END` has the decisions about EndTxn, by the relation of the request's pair to the
transactional id and by the phase of the id.

Invariants
  N1  A transaction commits only if EndTxn(commit) finds it ongoing with the pair of the request.
      No registered partition may have had an unclean election since it was registered.
  N2  A repeated EndTxn succeeds only if it asks for the decision that was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pk import errors
from pk.effects import Publish
from pk.server.metadata.image import MetadataImage
from pk.server.transactions import commands, state
from pk.server.transactions.ids import Out, TransactionalIds, decision, preparation, still_ending
from pk.server.transactions.producers import fenced
from pk.server.transactions.state import (
    PairRelation,
    Phase,
    ProducerPair,
    TransactionMetadata,
    TransactionState,
)
from pk.types import NONE, Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire


def end_transaction(ids: TransactionalIds, command: commands.EndTransaction, now_ms: int) -> Out:
    """Commit or abort the transaction of the request's pair, or answer a repeated request."""
    request = command.request
    known = ids.known(request.transactional_id)
    pair = ProducerPair(request.producer_id, request.producer_epoch)
    if command.fresh_id != NONE:
        ids.check_fresh(command.fresh_id)
    decide = _END.get((known.relation(pair), known.state.phase))
    if decide is None:
        raise fenced(known, pair)
    return decide(ids, known, pair, command, now_ms)


def _end_reply(pair: ProducerPair) -> wire.EndTxnReply:
    return wire.EndTxnReply(producer_id=pair.producer_id, producer_epoch=pair.epoch)


def _end_ongoing(
    ids: TransactionalIds,
    known: TransactionMetadata,
    pair: ProducerPair,
    command: commands.EndTransaction,
    now_ms: int,
) -> Out:
    """Take the decision; a partition with an unclean election makes it an abort (N1)."""
    commit, reason = command.request.commit, ""
    if commit:
        reason = unclean_election(known, command.image)
    following = ids.next_pair(known, command.fresh_id)
    ending = state.prepared(known, following, now_ms, commit=commit and not reason, reason=reason)
    reply: Any = _end_reply(ending.next)
    if reason:
        reply = _aborted(ending, pair)
    return preparation(reply, ending)


class Registered(Protocol):
    """A transaction with its registered partitions."""

    @property
    def partitions(self) -> Mapping[PartitionKey, Epoch]: ...

    @property
    def metadata_offset(self) -> Offset: ...


def unclean_election(known: Registered, image: MetadataImage) -> str:
    """Return the reason to abort a transaction; "" if no partition had an unclean election since it
    was registered.

    Raises `CoordinatorLoading` while the image may be older than a registration.
    """
    if image.offset < known.metadata_offset:
        raise errors.CoordinatorLoading(
            f"the coordinator's metadata is at offset {image.offset}, a leader of the transaction "
            f"had applied {known.metadata_offset}: ask again"
        )
    for key, unclean_epoch in known.partitions.items():
        partition = image.partition(key)
        if partition is not None and partition.unclean_epoch > unclean_epoch:
            name = f"{image.topics[key.topic_id].name}-{key.partition}"
            return f"{name} had an unclean leader election, so records of it may be lost"
    return ""


def _end_idle(
    ids: TransactionalIds,
    known: TransactionMetadata,
    pair: ProducerPair,
    command: commands.EndTransaction,
    now_ms: int,
) -> Out:
    """End a transaction of which the coordinator has no partition."""
    if command.request.commit:
        raise _not_begun(known, pair)
    after = state.skipped(known, ids.next_pair(known, command.fresh_id), now_ms)
    return decision(_end_reply(after.current), [after])


def _not_begun(known: TransactionMetadata, pair: ProducerPair) -> errors.InvalidTxnState:
    return errors.InvalidTxnState(
        f"no leader has asked about the transaction {pair} of {known.transactional_id!r}, so there "
        "is nothing to commit: abort it, or send records first"
    )


def _end_again(
    ids: TransactionalIds,
    known: TransactionMetadata,
    pair: ProducerPair,
    command: commands.EndTransaction,
    now_ms: int,
) -> Out:
    """Answer a repeated request: a success only if it asks for the decision that was taken."""
    commit = command.request.commit
    if known.fenced:
        raise fenced(known, pair)
    if known.state is TransactionState.EMPTY and commit:  # the init that named `pair` ended nothing
        raise _not_begun(known, pair)
    if commit == known.state.committed:
        return decision(_end_reply(known.after_end))
    if known.state.committed:
        raise errors.InvalidTxnState(
            f"the transaction {pair} of {known.transactional_id!r} was committed and cannot be "
            "aborted"
        )
    raise _aborted(known, pair)


def _aborted(known: TransactionMetadata, pair: ProducerPair) -> errors.TransactionAborted:
    """Return the error of a commit that became an abort."""
    named = f"the transaction {pair} of {known.transactional_id!r}"
    if known.reason == state.TIMED_OUT:
        return errors.TransactionTimedOut(
            f"{named} was open longer than transaction_timeout_ms ({known.timeout_ms}), and the "
            "coordinator aborted it: abort, then begin another one"
        )
    reason = known.reason or "the producer asked for it"
    return errors.TransactionAborted(
        f"{named} was aborted: {reason}.  Abort, then begin another one and send its records again"
    )


def _end_busy(
    ids: TransactionalIds,
    known: TransactionMetadata,
    pair: ProducerPair,
    command: commands.EndTransaction,
    now_ms: int,
) -> Out:
    raise still_ending(known)


#: (relation, phase) → decision; anything else is `ProducerFenced`.
_END: Mapping[tuple[PairRelation, Phase], Callable[..., Out]] = {
    (PairRelation.CURRENT, Phase.IDLE): _end_idle,
    (PairRelation.CURRENT, Phase.ONGOING): _end_ongoing,
    (PairRelation.CURRENT, Phase.PREPARED): _end_again,
    (PairRelation.NEXT, Phase.PREPARED): _end_busy,
    (PairRelation.PREVIOUS, Phase.IDLE): _end_again,
}


def expire(ids: TransactionalIds, command: commands.ExpireTransactions, now_ms: int) -> Out:
    """Abort the named transactions that are still ongoing under the named pairs."""
    endings: dict[str, TransactionMetadata] = {}
    for item in command.transactions:
        known = ids.find(item.transactional_id)
        pair = ProducerPair(item.producer_id, item.producer_epoch)
        if known is None or known.state is not TransactionState.ONGOING or known.current != pair:
            continue
        if item.fresh_id != NONE:
            ids.check_fresh(item.fresh_id)
        following = ids.next_pair(known, item.fresh_id)
        endings[known.transactional_id] = state.prepared(
            known, following, now_ms, commit=False, reason=state.TIMED_OUT
        )
    return preparation(len(endings), *endings.values())


def markers_written(ids: TransactionalIds, command: commands.MarkersWritten, now_ms: int) -> Out:
    """Complete a prepared transaction."""
    known = ids.find(command.transactional_id)
    ending = command.producer_id, command.marker_epoch
    if known is None or known.state.phase is not Phase.PREPARED:
        return decision(False)
    if ending != (known.current.producer_id, known.marker_epoch):
        return decision(False)
    after = state.completed(known, now_ms)
    event = commands.TransactionEnded(
        known.transactional_id, *known.current, known.state.committed, known.started_ms
    )
    return decision(True, [after], Publish(commands.ENDED, event))


def abort(ids: TransactionalIds, command: commands.AbortTransaction, now_ms: int) -> Out:
    """Abort an ongoing transaction for an operator."""
    known = ids.known(command.request.transactional_id)
    if known.state.phase is Phase.PREPARED:
        raise still_ending(known)
    if known.state.phase is Phase.IDLE:
        raise errors.InvalidTxnState(
            f"{known.transactional_id!r} is {known.state.label}: it has no transaction to abort"
        )
    ids.check_fresh(command.fresh_id)
    following = ids.next_pair(known, command.fresh_id)
    ending = state.prepared(known, following, now_ms, commit=False, reason=state.BY_OPERATOR)
    return preparation(wire.AbortTransactionReply(), ending)
