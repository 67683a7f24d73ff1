"""The producer's state of its transaction (Kafka's TransactionManager): which calls are allowed,
what the coordinator is asked, and how a call ends.

A Machine: calls, the coordinator's answers and news of the sender in; requests and outcomes out.
The shell is client/transaction_engine.py.  It sends one request at a time and reports one answer to
each.

Transactions of KIP-890: the leaders register partitions with the coordinator, so the producer only
asks for an epoch (InitProducerId) and ends transactions (EndTxn).  Each end returns the pair
(producer id, epoch) of the next transaction, in which every partition begins at sequence 0.

    UNINITIALIZED    init_transactions → INITIALIZING → READY
    READY            begin_transaction → IN_TRANSACTION
    IN_TRANSACTION   commit_transaction → COMMITTING, abort_transaction → ABORTING,
                     a batch fails → ABORTABLE_ERROR
    COMMITTING       EndTxn succeeds → READY, it or a batch fails → ABORTABLE_ERROR
    ABORTABLE_ERROR  abort_transaction → ABORTING
    ABORTING         EndTxn succeeds → READY
    FATAL_ERROR      a newer instance began, or an answer makes no sense: close the producer

A call has a time-out, and the work that it began goes on after it.  The outcome is kept until the
same call is made again; meanwhile the other calls are refused.

Invariants
  M1  EndTxn is sent once every batch of the transaction has an outcome, and only if a broker may
      have got one of them.  A commit is sent only if all of them are acknowledged.
  M2  An EndTxn without an answer is sent again with the same pair and the same decision, until an
      answer comes.  Once a commit was sent, the transaction is never aborted.
  M3  A batch that failed in any way prevents the commit.
  M4  Two transactions whose batches may have reached a broker have different pairs.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import Message

from pk import errors
from pk.backoff import Retry, client_jitter
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.transactional_ids import is_transactional
from pk.types import NONE
from pk.wire import pk_pb2 as wire

#: The first wait if the previous transaction is still being ended: this takes milliseconds.
CONCURRENT_MS = 20
#: The key type of transactional ids in FindCoordinator.
TRANSACTION = 1

#: These errors come from the coordinator itself; after any other, the producer looks it up again.
_SAME_COORDINATOR = (
    errors.ConcurrentTransactions, errors.CoordinatorLoading, errors.TransactionAborted,
)  # fmt: skip
#: A newer instance of the producer has taken over the transactional id.
_FENCED = (errors.ProducerFenced, errors.InvalidProducerEpoch)


class TransactionCall(enum.Enum):
    """A call of the application."""

    INIT = "init_transactions"
    BEGIN = "begin_transaction"
    SEND = "send"
    COMMIT = "commit_transaction"
    ABORT = "abort_transaction"


class ManagerState(enum.Enum):
    """The states of the module docstring."""

    UNINITIALIZED = enum.auto()
    INITIALIZING = enum.auto()
    READY = enum.auto()
    IN_TRANSACTION = enum.auto()
    COMMITTING = enum.auto()
    ABORTING = enum.auto()
    ABORTABLE_ERROR = enum.auto()
    FATAL_ERROR = enum.auto()


class CoordinatorAddress(NamedTuple):
    """The broker that coordinates a transactional id."""

    node: int
    address: str


# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class CallMade:
    """The application called; `Respond(call, None or error)` is the outcome."""

    call: TransactionCall


@dataclass(slots=True)
class CallGivenUp:
    """No thread waits for the outcome of this call any more."""

    call: TransactionCall


@dataclass(slots=True)
class SuccessLost:
    """The thread that made this call gave up when the call succeeded, and does not know it."""

    call: TransactionCall


@dataclass(slots=True)
class Replied:
    """The answer to the request that was sent last: a reply, or an error."""

    reply: Message | errors.PkError


@dataclass(slots=True)
class RetryDue:
    """The timer expired."""


@dataclass(slots=True)
class BatchHanded:
    """A broker may have got a batch of the transaction."""


@dataclass(slots=True)
class BatchFailed:
    """A batch of the transaction was not stored, or it is not known whether it was."""

    error: errors.PkError


@dataclass(slots=True)
class BatchesSettled:
    """Every record that `send` accepted has an outcome, and no batch waits for an answer."""


TransactionEvent = (
    CallMade
    | CallGivenUp
    | SuccessLost
    | Replied
    | RetryDue
    | BatchHanded
    | BatchFailed
    | BatchesSettled
)

# -- the calls -------------------------------------------------------------------------------------

_INIT, _BEGIN, _SEND, _COMMIT, _ABORT = TransactionCall
_S = ManagerState

_INIT_FIRST = "call init_transactions first"
_INIT_AGAIN = "init_transactions has not succeeded yet: call it again"
_BEGIN_FIRST = "no transaction is open: call begin_transaction first"
_END_FIRST = "a transaction is open: call commit_transaction or abort_transaction first"
_COMMIT_AGAIN = "the commit has no outcome yet: call commit_transaction again"
_ABORT_AGAIN = "the abort has no outcome yet: call abort_transaction again"
_ABORT_FIRST = "the transaction failed: call abort_transaction first"

#: (state, call) → what the caller must do first.  Calls that are not in the table are allowed, or
#: refused with the error of the state (ABORTABLE_ERROR, FATAL_ERROR).
REFUSALS: Mapping[tuple[ManagerState, TransactionCall], str] = {
    **{(_S.UNINITIALIZED, call): _INIT_FIRST for call in (_BEGIN, _SEND, _COMMIT, _ABORT)},
    **{(_S.INITIALIZING, call): _INIT_AGAIN for call in (_BEGIN, _SEND, _COMMIT, _ABORT)},
    (_S.READY, _INIT): "init_transactions was called already: call begin_transaction",
    **{(_S.READY, call): _BEGIN_FIRST for call in (_SEND, _COMMIT, _ABORT)},
    **{(_S.IN_TRANSACTION, call): _END_FIRST for call in (_INIT, _BEGIN)},
    **{(_S.COMMITTING, call): _COMMIT_AGAIN for call in (_INIT, _BEGIN, _SEND)},
    **{(_S.ABORTING, call): _ABORT_AGAIN for call in (_INIT, _BEGIN, _SEND, _COMMIT)},
    **{(_S.ABORTABLE_ERROR, call): _ABORT_FIRST for call in (_INIT, _BEGIN)},
}


#: The state after a call that succeeded.
_AFTER: Mapping[TransactionCall, ManagerState] = {
    _INIT: _S.READY, _BEGIN: _S.IN_TRANSACTION, _COMMIT: _S.READY, _ABORT: _S.READY,
}  # fmt: skip


def same_error(error: errors.PkError) -> errors.PkError:
    """Return a new exception like `error`: the same one must not be raised in several threads."""
    copy = type(error)(error.message, **error.details)
    copy.__cause__ = error.__cause__
    return copy


def only_abort(cause: errors.PkError) -> errors.TransactionAborted:
    """Return the error of a transaction that cannot be committed because of `cause`."""
    if isinstance(cause, errors.TransactionAborted):
        return cause
    found = errors.TransactionAborted(
        f"the transaction cannot be committed: {type(cause).__name__}: {cause.message}; "
        "call abort_transaction, then begin another one and send the records again",
        cause=type(cause).__name__,
    )
    found.__cause__ = cause
    return found


# -- the machine -----------------------------------------------------------------------------------


class TransactionManager:
    """The machine of one producer with a transactional id.

    `options` are resolved (settings.PRODUCER).  Effects: `Send(None, request)` to any broker,
    `Send(CoordinatorAddress, request)`, `Respond(call, outcome)`, `SetTimer("transaction", at_ms)`,
    and for the producer's other parts

        Publish("begin", (producer id, epoch))  records are accepted, for the pair's transaction
        Publish("commit", error)   records are refused with `error`; those accepted are sent
        Publish("discard", error)  the same, and those accepted fail unless a broker may have them
        Publish("fatal", error)    everything fails; nothing is sent any more
    """

    def __init__(self, options: Mapping[str, Any], rng: random.Random) -> None:
        self.state = ManagerState.UNINITIALIZED
        self.transactional_id: str = options["transactional_id"]
        self.pair = (NONE, NONE)  #: producer id and epoch of the open or the next transaction
        self.handed = False  #: a broker may have got a batch of the transaction
        self.error: errors.PkError | None = None  #: of ABORTABLE_ERROR and FATAL_ERROR
        self.problem: errors.PkError | None = None  #: why the coordinator is asked again
        self._timeout_ms: int = options["transaction_timeout_ms"]
        self._coordinator: CoordinatorAddress | None = None
        self._asked: Message | None = None  #: the request to the coordinator without an answer
        most_ms = max(options["retry_backoff_max_ms"], CONCURRENT_MS)
        self._bounds_ms = (options["retry_backoff_ms"], options["retry_backoff_max_ms"])
        self._early_ms = (CONCURRENT_MS, most_ms)
        self._retry = Retry(self._bounds_ms, client_jitter(rng))
        #: the call whose outcome was not returned, and its outcome
        self._unclaimed: tuple[TransactionCall, errors.PkError | None] | None = None
        self._waiting: dict[TransactionCall, None] = {}  #: calls that an application waits for
        self._effects: list[Effect] = []
        self._steps: dict[type, Callable[[Any, int], None]] = {
            CallMade: self._on_call, CallGivenUp: self._on_given_up, Replied: self._on_replied,
            RetryDue: self._on_retry, BatchHanded: self._on_handed, BatchFailed: self._on_failed,
            BatchesSettled: self._on_settled, SuccessLost: self._on_success_lost,
        }  # fmt: skip

    def step(self, event: TransactionEvent, now_ms: int) -> Sequence[Effect]:
        """Handle `event`; returns the effects that the shell performs in order."""
        self._effects = []
        self._steps[type(event)](event, now_ms)
        return self._effects

    @property
    def ending(self) -> bool:
        """Whether the end of the transaction waits for the outcomes of its batches."""
        return self.state in (_S.COMMITTING, _S.ABORTING) and self._asked is None

    @property
    def committable(self) -> bool:
        """Whether a failed batch would make the transaction abortable."""
        return self.state in (_S.IN_TRANSACTION, _S.COMMITTING)

    def refusal(self, call: TransactionCall) -> errors.PkError | None:
        """Return the error of this call in the present state; None if it is allowed.

        `send` asks in any thread, so each attribute is read once.
        """
        state, error, unclaimed = self.state, self.error, self._unclaimed
        if state is _S.FATAL_ERROR and error is not None:
            return same_error(error)
        if unclaimed is not None and call is not (taken := unclaimed[0]):
            late_abort = call is _ABORT and state is _S.ABORTABLE_ERROR
            if not late_abort:
                return errors.InvalidTxnState(
                    f"{call.value}: the last {taken.value} timed out: call it again for its outcome"
                )
        elif call is _ABORT and state is _S.COMMITTING and self._asked is not None:
            return errors.InvalidTxnState(f"{call.value}: {_COMMIT_AGAIN}")  # M2
        if state is _S.ABORTABLE_ERROR and call in (_SEND, _COMMIT):
            return errors.TransactionAborted() if error is None else same_error(error)
        words = REFUSALS.get((state, call))
        return None if words is None else errors.InvalidTxnState(f"{call.value}: {words}")

    # -- calls -------------------------------------------------------------------------------------

    def _on_call(self, event: CallMade, now_ms: int) -> None:
        call = event.call
        if self._unclaimed is not None and self._unclaimed[0] is call:
            outcome, self._unclaimed = self._unclaimed[1], None
            self._effects.append(Respond(call, outcome))
            return
        refused = self.refusal(call)
        if refused is not None:
            self._effects.append(Respond(call, refused))
            return
        self._waiting[call] = None
        if call is _INIT and self.state is _S.UNINITIALIZED:
            self.state = _S.INITIALIZING
            self._ask(self._init_request())
        elif call is _BEGIN:
            self.state = _S.IN_TRANSACTION
            self.handed, self.error = False, None
            self._effects.append(Publish("begin", self.pair))
            self._end_call(_BEGIN, None)
        elif call is _COMMIT and self.state is _S.IN_TRANSACTION:
            self.state = _S.COMMITTING
            self._effects.append(Publish("commit", self.refusal(_SEND)))
        elif call is _ABORT and self.state is not _S.ABORTING:
            self._begin_abort()

    def _begin_abort(self) -> None:
        """Begin to abort the transaction, also one whose commit has not been sent."""
        meanwhile = errors.TransactionAborted("abort_transaction was called")
        if self.state is _S.COMMITTING:
            self._end_call(_COMMIT, meanwhile)
        self._unclaimed = None
        self.state = _S.ABORTING
        self._effects.append(Publish("discard", meanwhile))

    def _on_given_up(self, event: CallGivenUp, now_ms: int) -> None:
        self._waiting.pop(event.call, None)

    def _on_success_lost(self, event: SuccessLost, now_ms: int) -> None:
        """Keep the outcome for the next such call, unless another thread has gone on meanwhile."""
        if self._unclaimed is None and self.state is _AFTER[event.call]:
            self._unclaimed = event.call, None

    def _end_call(self, call: TransactionCall, outcome: errors.PkError | None) -> None:
        """Return the outcome of a call, or keep it if no application waits for it."""
        if call in self._waiting:
            del self._waiting[call]
            self._effects.append(Respond(call, outcome))
        elif self.state is not _S.FATAL_ERROR:
            self._unclaimed = call, outcome

    # -- the sender --------------------------------------------------------------------------------

    def _on_handed(self, event: BatchHanded, now_ms: int) -> None:
        self.handed = True

    def _on_failed(self, event: BatchFailed, now_ms: int) -> None:
        if not self.committable:
            return  # a consequence of the abort
        assert self._asked is None, "M1"
        if isinstance(event.error, errors.ProducerFenced):
            self._become_fatal(event.error)
            return
        self._become_abortable(only_abort(event.error))

    def _become_abortable(self, error: errors.PkError) -> None:
        """Note that the transaction can only be aborted; a commit in progress ends."""
        committing = self.state is _S.COMMITTING
        self.error = error  # first: another thread may look (`refusal`)
        self.state = _S.ABORTABLE_ERROR
        self._effects.append(Publish("discard", error))
        if committing:
            self._end_call(_COMMIT, same_error(error))

    def _become_fatal(self, error: errors.PkError) -> None:
        self.error = error
        self.state = _S.FATAL_ERROR
        self._asked, self._unclaimed = None, None
        self._effects += [SetTimer("transaction", None), Publish("fatal", error)]
        for call in list(self._waiting):
            self._end_call(call, same_error(error))

    def _on_settled(self, event: BatchesSettled, now_ms: int) -> None:
        if not self.ending:
            return
        if self.handed:
            self._ask(self._end_request(commit=self.state is _S.COMMITTING))
        else:
            self._end()  # no partition has a record of the transaction

    # -- the coordinator ---------------------------------------------------------------------------

    def _init_request(self) -> wire.InitProducerIdRequest:
        return wire.InitProducerIdRequest(
            transactional_id=self.transactional_id, producer_id=NONE, producer_epoch=NONE,
            transaction_timeout_ms=self._timeout_ms,
        )  # fmt: skip

    def _end_request(self, *, commit: bool) -> wire.EndTxnRequest:
        producer_id, epoch = self.pair
        return wire.EndTxnRequest(
            transactional_id=self.transactional_id, producer_id=producer_id, producer_epoch=epoch,
            commit=commit,
        )  # fmt: skip

    def _ask(self, request: Message) -> None:
        self._asked, self.problem = request, None
        self._retry.reset()
        self._send()

    def _send(self) -> None:
        """Send the request to the coordinator; look the coordinator up first if it is not known."""
        assert self._asked is not None
        if self._coordinator is not None:
            self._effects.append(Send(self._coordinator, self._asked))
            return
        find = wire.FindCoordinatorRequest(key=self.transactional_id, key_type=TRANSACTION)
        self._effects.append(Send(None, find))

    def _on_retry(self, event: RetryDue, now_ms: int) -> None:
        if self._asked is not None:
            self._send()

    def _on_replied(self, event: Replied, now_ms: int) -> None:
        reply = event.reply
        if self._asked is None:  # a fatal error came first
            return
        if isinstance(reply, wire.FindCoordinatorReply):
            self._coordinator = CoordinatorAddress(reply.node_id, reply.address)
            self._send()
        elif isinstance(reply, errors.PkError):
            self._on_error(reply, now_ms)
        else:
            assert isinstance(reply, wire.InitProducerIdReply | wire.EndTxnReply)
            self._on_pair(reply.producer_id, reply.producer_epoch)

    def _on_error(self, error: errors.PkError, now_ms: int) -> None:
        """Handle an error of the coordinator, or of the search for it."""
        commit = self.state is _S.COMMITTING
        if not isinstance(error, _SAME_COORDINATOR):
            self._coordinator = None
        if error.retriable:
            self.problem = error
            early = isinstance(error, errors.ConcurrentTransactions)
            self._retry.bounds_ms = self._early_ms if early else self._bounds_ms
            self._retry.postpone(now_ms)
            self._effects.append(SetTimer("transaction", self._retry.at_ms))
        elif isinstance(error, _FENCED):
            advice = "close this producer"
            words = "" if advice in error.message else f"; {advice}"
            self._become_fatal(errors.ProducerFenced(error.message + words))
        elif commit and isinstance(error, errors.TransactionAborted):
            self._asked = None
            self._become_abortable(error)
        elif commit:
            self._become_fatal(
                type(error)(
                    f"{error.message}; the transaction may be committed or not: close this "
                    "producer, and read the records back before you send them again",
                    **error.details,
                )
            )
        else:
            self._become_fatal(error)

    def _on_pair(self, producer_id: int, epoch: int) -> None:
        """Take the pair of the next transaction."""
        known_id, known_epoch = self.pair
        newer = producer_id != known_id or epoch > known_epoch
        if not newer or not is_transactional(producer_id):  # M4
            self._become_fatal(
                errors.InternalError(
                    f"the coordinator answers with producer id {producer_id} and epoch {epoch} "
                    f"after {known_id} and {known_epoch}"
                )
            )
            return
        self._asked, self.pair = None, (producer_id, epoch)
        self._end()

    def _end(self) -> None:
        """End the call that the state stands for: the producer is ready for a transaction."""
        calls = {_S.INITIALIZING: _INIT, _S.COMMITTING: _COMMIT, _S.ABORTING: _ABORT}
        call = calls[self.state]
        self.state, self.error = _S.READY, None
        self._end_call(call, None)
