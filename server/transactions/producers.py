"""Decisions about InitProducerId: a producer gets its pair, and the producers before it are fenced.

The table `_INIT` has a decision for each relation of the request's pair to the transactional id.  A
request without a pair is a new producer, and takes over the current pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pk import errors, limits
from pk.server.transactions import commands, state
from pk.server.transactions.ids import Out, TransactionalIds, decision, preparation, still_ending
from pk.server.transactions.state import (
    NO_PAIR,
    PairRelation,
    Phase,
    ProducerPair,
    TransactionMetadata,
)
from pk.types import NONE
from pk.wire import pk_pb2 as wire


def fenced(known: TransactionMetadata, pair: ProducerPair) -> errors.ProducerFenced:
    """Return the refusal of a pair that is neither the current nor the previous one."""
    return errors.ProducerFenced(
        f"a newer producer with the transactional id {known.transactional_id!r} took over from "
        f"{pair}: close this producer"
    )


def init_producer(ids: TransactionalIds, command: commands.InitProducer, now_ms: int) -> Out:
    """Give a producer its pair, and fence the producers before it."""
    request = command.request
    _check_id(request.transactional_id)
    known = ids.find(request.transactional_id)
    most = ids.rules.transaction_max_timeout_ms
    if not 1 <= request.transaction_timeout_ms <= most:
        raise errors.InvalidTransactionTimeout(
            f"transaction_timeout_ms is {request.transaction_timeout_ms}; the brokers accept 1 to "
            f"{most} (transaction_max_timeout_ms)"
        )
    ids.check_fresh(command.fresh_id)
    named = ProducerPair(request.producer_id, request.producer_epoch)
    if request.producer_id == NONE:
        named = NO_PAIR
    if known is None:
        fresh = ProducerPair(command.fresh_id, 0)
        return _initialized(
            TransactionMetadata(
                request.transactional_id,
                fresh,
                request.transaction_timeout_ms,
                updated_ms=now_ms,
            )
        )
    relation = PairRelation.CURRENT if named == NO_PAIR else known.relation(named)
    if named != NO_PAIR and known.fenced:
        relation = PairRelation.OTHER  # a newer producer aborted the transaction
    return _INIT[relation](ids, known, named, command, now_ms)


def _check_id(transactional_id: str) -> None:
    size = len(transactional_id.encode())
    if not 1 <= size <= limits.TRANSACTIONAL_ID_BYTES_MAX:
        raise errors.InvalidRequest(
            f"a transactional id has 1 to {limits.TRANSACTIONAL_ID_BYTES_MAX} bytes of utf-8, not "
            f"{size}: choose another transactional_id"
        )


def _initialized(known: TransactionMetadata) -> Out:
    return decision(_init_reply(known), [known])


def _init_reply(known: TransactionMetadata) -> wire.InitProducerIdReply:
    producer_id, epoch = known.current
    return wire.InitProducerIdReply(producer_id=producer_id, producer_epoch=epoch)


def _init_next(
    ids: TransactionalIds,
    known: TransactionMetadata,
    named: ProducerPair,
    command: commands.InitProducer,
    now_ms: int,
) -> Out:
    """Give the next pair; an open transaction is ended first."""
    if known.state.phase is Phase.PREPARED:
        raise still_ending(known)
    following = ids.next_pair(known, command.fresh_id)
    if known.state.phase is Phase.ONGOING:
        newer = named == NO_PAIR
        reason = state.NEWER_PRODUCER if newer else state.NEW_EPOCH
        ending = state.prepared(known, following, now_ms, commit=False, reason=reason, fenced=newer)
        return preparation(still_ending(ending), ending)
    timeout_ms = command.request.transaction_timeout_ms
    return _initialized(state.initialized(known, named, following, timeout_ms, now_ms))


def _init_again(
    ids: TransactionalIds,
    known: TransactionMetadata,
    named: ProducerPair,
    command: commands.InitProducer,
    now_ms: int,
) -> Out:
    """Repeat the reply to a request that named the previous pair.

    Only one producer ever had that pair, so it gets the pair that it has, or that it missed.  A
    delayed copy of its request therefore does not fence it.
    """
    return decision(_init_reply(known))


def _init_busy(
    ids: TransactionalIds,
    known: TransactionMetadata,
    named: ProducerPair,
    command: commands.InitProducer,
    now_ms: int,
) -> Out:
    raise still_ending(known)


def _init_fenced(
    ids: TransactionalIds,
    known: TransactionMetadata,
    named: ProducerPair,
    command: commands.InitProducer,
    now_ms: int,
) -> Out:
    raise fenced(known, named)


_INIT: Mapping[PairRelation, Callable[..., Out]] = {
    PairRelation.CURRENT: _init_next,  # also without a pair
    PairRelation.NEXT: _init_busy,
    PairRelation.PREVIOUS: _init_again,
    PairRelation.OTHER: _init_fenced,
}
