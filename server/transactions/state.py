"""The state of one transactional id, and the steps from one state to the next.

    EMPTY ──> ONGOING ──> PREPARE_COMMIT ──> COMPLETE_COMMIT
                     └──> PREPARE_ABORT ───> COMPLETE_ABORT

An init makes a completed id EMPTY again.  A completed or empty id becomes ONGOING with the first
partition that a leader asks about.  An abort without a transaction makes it COMPLETE_ABORT.

A `TransactionMetadata` is immutable.  Each step returns another one, and asserts that `STEPS` has
it.

Invariants
  D1  ONGOING and prepared ids have at least one partition; the other states have none.
  D2  `current` is the pair of the transaction that is open, or that is being ended; without one it
      is the pair of the next transaction.  An id never gets a pair again that it had: the epoch
      only grows, and a new producer id was never used before.
  D3  `next` is set while a transaction is prepared.  `previous` is set only while none is open.
  D4  A marker has the epoch after its transaction's, also if `next` has a new producer id (X1).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pk.types import NONE, Epoch, Offset, PartitionKey, ProducerId

#: Reasons of aborts that the producer did not ask for; an unclean election has its own words.
TIMED_OUT = "timed out"
NEWER_PRODUCER = "a newer producer with this transactional id began"
NEW_EPOCH = "the producer asked for another epoch"
BY_OPERATOR = "aborted by an operator"


class Phase(enum.Enum):
    """Whether a transaction of the id is open."""

    IDLE = "idle"  #: none: EMPTY, COMPLETE_COMMIT, COMPLETE_ABORT
    ONGOING = "ongoing"  #: partitions are registered, no decision is taken
    PREPARED = "prepared"  #: the decision is taken, markers are written


class TransactionState(enum.IntEnum):
    """The states of a transactional id; the numbers are those of `TransactionStateRecord`."""

    EMPTY = 1
    ONGOING = 2
    PREPARE_COMMIT = 3
    PREPARE_ABORT = 4
    COMPLETE_COMMIT = 5
    COMPLETE_ABORT = 6

    @property
    def label(self) -> str:
        """Kafka's name of the state."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def phase(self) -> Phase:
        """Whether a transaction is open."""
        return _PHASES.get(self, Phase.IDLE)

    @property
    def committed(self) -> bool:
        """Whether the last transaction is, or will be, committed."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)


_S = TransactionState
_PHASES: Mapping[TransactionState, Phase] = {
    _S.ONGOING: Phase.ONGOING,
    _S.PREPARE_COMMIT: Phase.PREPARED,
    _S.PREPARE_ABORT: Phase.PREPARED,
}
#: From each state to the ones that may follow it.
STEPS: Mapping[TransactionState, frozenset[TransactionState]] = {
    _S.EMPTY: frozenset({_S.EMPTY, _S.ONGOING, _S.COMPLETE_ABORT}),
    _S.ONGOING: frozenset({_S.ONGOING, _S.PREPARE_COMMIT, _S.PREPARE_ABORT}),
    _S.PREPARE_COMMIT: frozenset({_S.COMPLETE_COMMIT}),
    _S.PREPARE_ABORT: frozenset({_S.COMPLETE_ABORT}),
    _S.COMPLETE_COMMIT: frozenset({_S.EMPTY, _S.ONGOING, _S.COMPLETE_ABORT}),
    _S.COMPLETE_ABORT: frozenset({_S.EMPTY, _S.ONGOING, _S.COMPLETE_ABORT}),
}


class ProducerPair(NamedTuple):
    """A producer id and its epoch."""

    producer_id: ProducerId
    epoch: int

    def __str__(self) -> str:
        return f"({self.producer_id}, {self.epoch})"


NO_PAIR = ProducerPair(NONE, NONE)


class PairRelation(enum.Enum):
    """What a pair is to a transactional id."""

    CURRENT = "current"  #: of the open transaction, or of the next one if none is open
    NEXT = "next"  #: of the transaction after the prepared one
    PREVIOUS = "previous"  #: named by the last EndTxn or InitProducerId
    OTHER = "other"  #: an older one, of an older or a superseded producer


@dataclass(slots=True, frozen=True)
class TransactionMetadata:
    """A transactional id."""

    transactional_id: str
    current: ProducerPair
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    #: The registered partitions, sorted, each with its unclean epoch at registration (R3).
    partitions: Mapping[PartitionKey, Epoch] = field(default_factory=dict)
    started_ms: int = 0  #: when the open transaction began, by the wall clock
    updated_ms: int = 0  #: when the last record was decided: the expiration time counts from here
    reason: str = ""  #: why the coordinator aborted; "" = the producer asked
    previous: ProducerPair = NO_PAIR
    next: ProducerPair = NO_PAIR
    metadata_offset: Offset = 0  #: the highest that a leader which asked had applied
    fenced: bool = False  #: the transaction was aborted because a newer producer began

    def relation(self, pair: ProducerPair) -> PairRelation:
        """Return what `pair` is to this id."""
        if pair == self.current:
            return PairRelation.CURRENT
        if pair == self.next:
            return PairRelation.NEXT
        return PairRelation.PREVIOUS if pair == self.previous else PairRelation.OTHER

    @property
    def label(self) -> str:
        """The name of the state, for operators."""
        return self.state.label

    @property
    def marker_epoch(self) -> int:
        """The epoch of the prepared transaction's markers."""
        return self.current.epoch + 1

    @property
    def after_end(self) -> ProducerPair:
        """The pair of the producer's next transaction once no transaction is open."""
        return self.next if self.state.phase is Phase.PREPARED else self.current


def _step(known: TransactionMetadata, to: TransactionState, **changes: Any) -> TransactionMetadata:
    assert to in STEPS[known.state], f"no step {known.state.name} -> {to.name}: {known}"
    return replace(known, state=to, **changes)


def initialized(
    known: TransactionMetadata,
    named: ProducerPair,
    following: ProducerPair,
    timeout_ms: int,
    now_ms: int,
) -> TransactionMetadata:
    """Return an idle id with the pair `following`.  `named`: that of the request, or NO_PAIR."""
    return _step(
        known,
        TransactionState.EMPTY,
        current=following,
        previous=named,
        timeout_ms=timeout_ms,
        updated_ms=now_ms,
        reason="",
        fenced=False,
    )


def registered(
    known: TransactionMetadata,
    added: Mapping[PartitionKey, Epoch],
    metadata_offset: Offset,
    now_ms: int,
) -> TransactionMetadata:
    """Return the id with further partitions; the first ones begin its transaction.

    A partition that is registered already keeps its first unclean epoch: an unclean election since
    then aborts the transaction.
    """
    begins = known.state is not TransactionState.ONGOING
    partitions = dict(sorted({**added, **known.partitions}.items()))
    return _step(
        known,
        TransactionState.ONGOING,
        partitions=partitions,
        metadata_offset=max(known.metadata_offset, metadata_offset),
        started_ms=now_ms if begins else known.started_ms,
        updated_ms=now_ms,
        reason="",
        fenced=False,
        previous=NO_PAIR,
    )


def prepared(
    known: TransactionMetadata,
    following: ProducerPair,
    now_ms: int,
    *,
    commit: bool,
    reason: str = "",
    fenced: bool = False,
) -> TransactionMetadata:
    """Return the ongoing transaction with its decision, and with the pair `following` it."""
    return _step(
        known,
        TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT,
        next=following,
        updated_ms=now_ms,
        reason=reason,
        fenced=fenced,
    )


def completed(known: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """Return the prepared transaction as ended.  The decision and its reason stay for retries."""
    committed = known.state is TransactionState.PREPARE_COMMIT
    return _step(
        known,
        TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT,
        current=known.next,
        previous=known.current,
        next=NO_PAIR,
        partitions={},
        started_ms=0,
        metadata_offset=0,
        updated_ms=now_ms,
    )


def skipped(
    known: TransactionMetadata, following: ProducerPair, now_ms: int
) -> TransactionMetadata:
    """Return an idle id after an abort of a transaction that had not begun here.

    The pair changes: a batch under way with the old one must not open the next transaction.
    """
    return _step(
        known,
        TransactionState.COMPLETE_ABORT,
        current=following,
        previous=known.current,
        updated_ms=now_ms,
        reason="",
        fenced=False,
    )
