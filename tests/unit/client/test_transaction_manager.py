"""The machine of a producer's transactions: calls, answers, and a model of the coordinator."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pk import errors, transactional_ids
from pk.client.options import producer_options
from pk.client.transaction_manager import (
    BatchesSettled,
    BatchFailed,
    BatchHanded,
    CallGivenUp,
    CallMade,
    CoordinatorAddress,
    ManagerState,
    Replied,
    RetryDue,
    TransactionCall,
    TransactionManager,
)
from pk.effects import Publish, Respond, Send, SetTimer
from pk.wire import pk_pb2 as wire
from tests.kit.fake_coordinator import FakeCoordinator

INIT, BEGIN, SEND, COMMIT, ABORT = TransactionCall
PID = transactional_ids.producer_id(0, 1, 1)
FOUND = wire.FindCoordinatorReply(node_id=2, address="b2:9292", partition=0)
HOME = CoordinatorAddress(2, "b2:9292")


class Rig:
    """A machine, and what it asked for in its last step."""

    def __init__(self) -> None:
        options, _ = producer_options({"transactional_id": "id", "retry_backoff_ms": 100})
        self.manager = TransactionManager(options, random.Random(1))
        self.now_ms = 0
        self.effects: list[Any] = []

    def step(self, event: Any) -> list[Any]:
        self.effects = list(self.manager.step(event, self.now_ms))
        return self.effects

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.effects if isinstance(each, kind)]

    @property
    def sent(self) -> Any:
        """The only request of the last step."""
        (found,) = self.of(Send)
        return found.message

    @property
    def published(self) -> list[str]:
        return [each.name for each in self.of(Publish)]

    def outcome(self, call: TransactionCall) -> Any:
        """The outcome of a call in the last step; it must have one."""
        (found,) = [each.reply for each in self.of(Respond) if each.request is call]
        return found

    def call(self, call: TransactionCall) -> None:
        self.step(CallMade(call))

    def ready(self) -> Rig:
        self.call(INIT)
        self.step(Replied(FOUND))
        self.step(Replied(wire.InitProducerIdReply(producer_id=PID, producer_epoch=0)))
        assert self.outcome(INIT) is None
        return self

    def begun(self, *, handed: bool = True) -> Rig:
        self.call(BEGIN)
        assert self.outcome(BEGIN) is None
        if handed:
            self.step(BatchHanded())
        return self

    def ending(self, call: TransactionCall) -> Rig:
        """A call of COMMIT or ABORT, up to its request."""
        self.call(call)
        self.step(BatchesSettled())
        return self


@pytest.fixture
def rig() -> Rig:
    return Rig()


def ended(epoch: int, producer_id: int = PID) -> Replied:
    return Replied(wire.EndTxnReply(producer_id=producer_id, producer_epoch=epoch))


# -- the way of a transaction ----------------------------------------------------------------------


def test_init_looks_the_coordinator_up_and_asks_it_for_a_pair(rig: Rig) -> None:
    rig.call(INIT)
    assert rig.of(Send) == [Send(None, wire.FindCoordinatorRequest(key="id", key_type=1))]
    rig.step(Replied(FOUND))
    asked = wire.InitProducerIdRequest(
        transactional_id="id", producer_id=-1, producer_epoch=-1, transaction_timeout_ms=60_000
    )
    assert rig.of(Send) == [Send(HOME, asked)]
    rig.step(Replied(wire.InitProducerIdReply(producer_id=PID, producer_epoch=7)))
    assert rig.outcome(INIT) is None
    rig.call(BEGIN)
    assert rig.of(Publish) == [Publish("begin", (PID, 7))]


@pytest.mark.parametrize(("call", "commit"), [(COMMIT, True), (ABORT, False)])
def test_the_end_is_asked_for_once_every_batch_has_an_outcome(
    rig: Rig, call: TransactionCall, commit: bool
) -> None:
    """client/transaction_manager M1: not before."""
    rig.ready().begun().call(call)
    assert rig.published == ["commit" if commit else "discard"]
    assert not rig.of(Send)
    assert rig.manager.ending
    rig.step(BatchesSettled())
    assert rig.sent == wire.EndTxnRequest(
        transactional_id="id", producer_id=PID, producer_epoch=0, commit=commit
    )
    rig.step(BatchesSettled())
    assert not rig.effects, "asked once"
    rig.step(ended(1))
    assert rig.outcome(call) is None
    rig.call(BEGIN)
    assert rig.of(Publish) == [Publish("begin", (PID, 1))]


@pytest.mark.parametrize("call", [COMMIT, ABORT])
def test_a_transaction_without_batches_ends_without_a_request(
    rig: Rig, call: TransactionCall
) -> None:
    rig.ready().begun(handed=False).ending(call)
    assert not rig.of(Send)
    assert rig.outcome(call) is None
    rig.call(BEGIN)
    assert rig.of(Publish) == [Publish("begin", (PID, 0))], "the pair was not used"


# -- calls that do not fit -------------------------------------------------------------------------


def test_a_call_in_the_wrong_state_names_the_call_that_is_missing(rig: Rig) -> None:
    def refused(call: TransactionCall, words: str) -> None:
        rig.call(call)
        error = rig.outcome(call)
        assert type(error) is errors.InvalidTxnState
        assert words in error.message
        assert not rig.of(Send)
        assert not rig.of(Publish)

    for call in (BEGIN, COMMIT, ABORT):
        refused(call, "call init_transactions first")
    rig.call(INIT)
    for call in (BEGIN, COMMIT, ABORT):
        refused(call, "init_transactions has not succeeded yet")
    rig.step(Replied(FOUND))
    rig.step(Replied(wire.InitProducerIdReply(producer_id=PID)))
    refused(INIT, "call begin_transaction")
    for call in (COMMIT, ABORT):
        refused(call, "call begin_transaction first")
    rig.begun()
    refused(BEGIN, "call commit_transaction or abort_transaction first")
    rig.ending(COMMIT)
    refused(BEGIN, "call commit_transaction again")
    refused(ABORT, "call commit_transaction again")


def test_send_is_allowed_in_a_transaction_only(rig: Rig) -> None:
    def words() -> str:
        error = rig.manager.refusal(SEND)
        return "" if error is None else error.message

    assert "init_transactions" in words()
    rig.ready()
    assert "begin_transaction" in words()
    rig.begun()
    assert words() == ""
    rig.ending(COMMIT)
    assert "commit_transaction" in words()
    rig.step(ended(1))
    rig.begun()
    rig.step(BatchFailed(errors.RecordTooLarge("huge")))
    refused = rig.manager.refusal(SEND)
    assert isinstance(refused, errors.TransactionAborted)
    assert "huge" in refused.message
    assert "abort_transaction" in refused.message


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        errors.DeliveryTimedOut("late"), errors.OutOfOrderSequence("gap"),
        errors.InvalidProducerEpoch("older"), errors.UnknownProducerId("expired"),
        errors.OutcomeUnknown("perhaps"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("when", ["before the commit", "during the commit"])
def test_a_failed_batch_can_only_be_aborted(rig: Rig, error: errors.PkError, when: str) -> None:
    """client/transaction_manager M3: the cause is in the error of the commit."""
    rig.ready().begun()
    if when == "during the commit":
        rig.call(COMMIT)
        rig.step(BatchFailed(error))
    else:
        rig.step(BatchFailed(error))
        assert rig.published == ["discard"]
        rig.call(COMMIT)
    outcome = rig.outcome(COMMIT)
    assert type(outcome) is errors.TransactionAborted
    assert outcome.__cause__ is error
    assert type(error).__name__ in outcome.message
    rig.step(BatchesSettled())
    assert not rig.effects, "nothing is asked before the abort"
    rig.ending(ABORT)
    assert not rig.sent.commit
    rig.step(ended(1))
    assert rig.outcome(ABORT) is None
    rig.begun()


@pytest.mark.parametrize("kind", [errors.TransactionAborted, errors.TransactionTimedOut])
def test_a_commit_after_the_coordinators_abort_raises_its_error(
    rig: Rig, kind: type[errors.PkError]
) -> None:
    rig.ready().begun().ending(COMMIT)
    rig.step(Replied(kind("by the coordinator")))
    assert type(rig.outcome(COMMIT)) is kind
    rig.ending(ABORT)
    assert rig.sent.producer_epoch == 0, "the same pair: the coordinator returns the next one"
    assert not rig.sent.commit
    rig.step(ended(1))
    assert rig.outcome(ABORT) is None


@pytest.mark.parametrize("kind", [errors.ProducerFenced, errors.InvalidProducerEpoch])
def test_a_fenced_producer_is_at_its_end(rig: Rig, kind: type[errors.PkError]) -> None:
    rig.ready().begun().ending(COMMIT)
    rig.step(Replied(kind("newer")))
    assert type(rig.outcome(COMMIT)) is errors.ProducerFenced
    assert "close this producer" in rig.outcome(COMMIT).message
    assert rig.published == ["fatal"]
    for call in (INIT, BEGIN, COMMIT, ABORT):
        rig.call(call)
        assert type(rig.outcome(call)) is errors.ProducerFenced
    assert type(rig.manager.refusal(SEND)) is errors.ProducerFenced


@pytest.mark.parametrize("words", ["newer", "newer: close this producer"])
def test_the_advice_to_close_is_given_once(rig: Rig, words: str) -> None:
    rig.ready().begun().ending(COMMIT)
    rig.step(Replied(errors.ProducerFenced(words)))
    assert rig.outcome(COMMIT).message.count("close this producer") == 1


def test_a_leader_that_knows_of_a_newer_instance_ends_the_producer(rig: Rig) -> None:
    rig.ready().begun().step(BatchFailed(errors.ProducerFenced("newer")))
    assert rig.published == ["fatal"]


def test_an_unknown_failure_of_a_commit_says_that_it_may_be_committed(rig: Rig) -> None:
    rig.ready().begun().ending(COMMIT)
    rig.step(Replied(errors.InternalError("a bug")))
    outcome = rig.outcome(COMMIT)
    assert type(outcome) is errors.InternalError
    assert "may be committed or not" in outcome.message
    assert rig.manager.state is ManagerState.FATAL_ERROR


@pytest.mark.parametrize(
    "error", [errors.InvalidTransactionTimeout("above"), errors.UnsupportedFeature("older")]
)
def test_an_init_that_is_refused_is_fatal(rig: Rig, error: errors.PkError) -> None:
    rig.call(INIT)
    rig.step(Replied(error))
    assert type(rig.outcome(INIT)) is type(error)
    assert rig.published == ["fatal"]


@pytest.mark.parametrize(("producer_id", "epoch"), [(PID, 0), (1234, 0)])
def test_a_pair_that_is_not_newer_is_refused(rig: Rig, producer_id: int, epoch: int) -> None:
    """client/transaction_manager M4: under the same pair, the batches of the next transaction would
    count as duplicates.
    """
    rig.ready().begun().ending(COMMIT)
    rig.step(ended(epoch, producer_id))
    assert type(rig.outcome(COMMIT)) is errors.InternalError


# -- the search for the coordinator, and retries ---------------------------------------------------


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (errors.ConcurrentTransactions(), HOME), (errors.CoordinatorLoading(), HOME),
        (errors.NotCoordinator(), None), (errors.CoordinatorUnavailable(), None),
        (errors.BrokerUnavailable("gone"), None), (errors.RequestTimedOut("lost"), None),
    ],
)  # fmt: skip
def test_a_retriable_error_is_asked_again_with_the_same_pair(
    rig: Rig, error: errors.PkError, again: Any
) -> None:
    """client/transaction_manager M2: and until an answer comes."""
    rig.ready().begun().ending(COMMIT)
    request = rig.sent
    for _ in range(3):
        rig.step(Replied(error))
        assert not rig.of(Send)
        (timer,) = rig.of(SetTimer)
        least_ms = 16 if isinstance(error, errors.ConcurrentTransactions) else 80
        assert timer.at_ms >= rig.now_ms + least_ms
        rig.now_ms = timer.at_ms
        rig.step(RetryDue())
        (sent,) = rig.of(Send)
        assert sent.peer == again
        if again is None:
            rig.step(Replied(FOUND))
        assert rig.sent == request
    rig.step(ended(1))
    assert rig.outcome(COMMIT) is None


# -- time-outs of calls ----------------------------------------------------------------------------


def test_the_outcome_of_a_call_that_timed_out_is_kept_for_its_repetition(rig: Rig) -> None:
    rig.ready().begun().ending(COMMIT)
    rig.step(CallGivenUp(COMMIT))
    rig.step(ended(1))
    assert not rig.of(Respond)
    for call in (BEGIN, ABORT, INIT):
        rig.call(call)
        assert "call it again" in rig.outcome(call).message
    assert rig.manager.refusal(SEND) is not None
    rig.call(COMMIT)
    assert rig.outcome(COMMIT) is None
    rig.begun()


def test_a_repeated_call_joins_the_work_under_way(rig: Rig) -> None:
    rig.ready().begun().ending(COMMIT)
    rig.step(CallGivenUp(COMMIT))
    rig.call(COMMIT)
    assert not rig.effects
    rig.step(ended(1))
    assert rig.outcome(COMMIT) is None


def test_a_failed_commit_that_timed_out_can_be_aborted_at_once(rig: Rig) -> None:
    rig.ready().begun().call(COMMIT)
    rig.step(CallGivenUp(COMMIT))
    rig.step(BatchFailed(errors.DeliveryTimedOut("late")))
    rig.ending(ABORT)
    assert not rig.sent.commit


def test_a_commit_that_was_not_sent_can_be_aborted(rig: Rig) -> None:
    rig.ready().begun().call(COMMIT)
    rig.call(ABORT)
    assert type(rig.outcome(COMMIT)) is errors.TransactionAborted
    rig.step(BatchesSettled())
    assert not rig.sent.commit


# -- against a model of the coordinator ------------------------------------------------------------


ENDS = st.sampled_from([COMMIT, ABORT])
FATES = st.sampled_from(["answered", "request lost", "reply lost", "moved", "loading"])


class AgainstACoordinator(RuleBasedStateMachine):
    """Any history of calls, batches, lost requests and replies, time-outs and newer instances.

    `committed`: the transactions whose commit returned without an error.
    """

    @initialize(seed=st.integers(0, 1000), epoch_max=st.sampled_from([2, 2**15 - 2]))
    def begin(self, seed: int, epoch_max: int) -> None:
        options, _ = producer_options({"transactional_id": "id"})
        self.manager = TransactionManager(options, random.Random(seed))
        self.coordinator = FakeCoordinator(epoch_max=epoch_max)
        self.now_ms = 0
        self.request: Any = None
        self.timer: int | None = None
        self.pair: Any = None
        self.accepting = False
        self.batches = 0  #: of the open transaction, acknowledged
        self.pending = 0  #: of the open transaction, under way
        self.failed = False  #: a batch of the open transaction
        self.waiting: dict[TransactionCall, None] = {}
        self.committed: list[Any] = []
        self.aborted: list[Any] = []
        self.used: dict[Any, None] = {}

    def step(self, event: Any) -> None:
        for effect in self.manager.step(event, self.now_ms):
            if isinstance(effect, Send):
                assert self.request is None, "one request at a time"
                self.request = effect.message
            elif isinstance(effect, SetTimer):
                self.timer = effect.at_ms
            elif isinstance(effect, Respond):
                self.respond(effect.request, effect.reply)
            elif effect.name == "begin":
                self.pair, self.accepting = effect.value, True
                self.batches, self.failed = 0, False
                assert self.pair not in self.used, "M4"
            else:
                self.accepting = False

    def respond(self, call: TransactionCall, error: Any) -> None:
        self.waiting.pop(call, None)
        assert not (call is COMMIT and error is None and self.failed), "M3"
        if call is COMMIT and error is None and self.batches:
            self.committed.append(self.pair)
        if call is ABORT and error is None and self.batches:
            self.aborted.append(self.pair)

    @rule(call=st.sampled_from([INIT, BEGIN, COMMIT, ABORT]))
    def called(self, call: TransactionCall) -> None:
        self.waiting[call] = None
        self.step(CallMade(call))

    @rule(batches=st.integers(0, 2), fails=st.booleans(), call=ENDS, fate=FATES, then=ENDS)
    def next_call(
        self, batches: int, fails: bool, call: TransactionCall, fate: str, then: TransactionCall
    ) -> None:
        """What an application does: begin, send, end, and again if the end has no outcome."""
        for each in (INIT, BEGIN):
            if self.manager.refusal(each) is None:
                self.called(each)
                self.goes_on()
        for _ in range(batches if self.accepting else 0):
            self.batch_sent()
        if fails and self.pending:
            self.batch_answered(lost=True)
        self.called(call)
        while self.pending and not self.coordinator.busy:
            self.batch_answered(lost=False)
        self.settled()
        if self.request is not None:
            self.answered(fate)
        self.called(then)

    @rule()
    def goes_on(self) -> None:
        """Everything under way ends well."""
        for _ in range(10):
            if self.request is not None:
                self.answered("answered")
            elif self.timer is not None:
                self.timer_fires()
            elif self.pending:
                self.batch_answered(lost=False)
            else:
                self.settled()

    @precondition(lambda self: self.accepting)
    @rule()
    def batch_sent(self) -> None:
        self.used[self.pair] = None
        self.pending += 1
        self.step(BatchHanded())

    @precondition(lambda self: self.pending)
    @rule(lost=st.booleans())
    def batch_answered(self, lost: bool) -> None:
        """The leader asks the coordinator; an error, or a lost answer, fails the batch."""
        self.pending -= 1
        try:
            self.coordinator.verify(*self.pair, "t-0", 0)
            if lost:
                raise errors.DeliveryTimedOut("no answer")
        except errors.ConcurrentTransactions:
            self.pending += 1
        except errors.PkError as error:
            self.failed = True
            self.step(BatchFailed(error))
        else:
            self.batches += 1

    @rule()
    def settled(self) -> None:
        if self.manager.ending and not self.pending and not self.accepting:
            self.step(BatchesSettled())

    @precondition(lambda self: self.request is not None)
    @rule(fate=FATES)
    def answered(self, fate: str) -> None:
        request, self.request = self.request, None
        answer: Any
        try:
            if fate == "request lost":
                raise errors.BrokerUnavailable("the connection broke")
            if fate == "moved":
                raise errors.NotCoordinator("another broker")
            if fate == "loading":
                raise errors.CoordinatorLoading("it replays")
            answer = self.reply_to(request)
            if fate == "reply lost":
                raise errors.RequestTimedOut("no answer")
        except errors.PkError as error:
            answer = error
        self.step(Replied(answer))

    def reply_to(self, request: Any) -> Any:
        if isinstance(request, wire.FindCoordinatorRequest):
            return FOUND
        if isinstance(request, wire.InitProducerIdRequest):
            pair = self.coordinator.init(request.transactional_id)
            return wire.InitProducerIdReply(producer_id=pair[0], producer_epoch=pair[1])
        assert not self.pending, "M1"
        pair = self.coordinator.end(
            request.transactional_id, request.producer_id, request.producer_epoch, request.commit
        )
        return wire.EndTxnReply(producer_id=pair[0], producer_epoch=pair[1])

    @precondition(lambda self: self.timer is not None and self.request is None)
    @rule()
    def timer_fires(self) -> None:
        self.now_ms, self.timer = max(self.now_ms, self.timer or 0), None
        self.step(RetryDue())

    @rule(
        fault=st.sampled_from(["given up", "timed out", "busy", "fenced"]),
        call=st.sampled_from([INIT, COMMIT, ABORT]),
        answers=st.integers(1, 3),
    )
    def fault(self, fault: str, call: TransactionCall, answers: int) -> None:
        """What happens besides: a call times out, the transaction does, a newer instance begins."""
        if fault == "given up":
            self.waiting.pop(call, None)
            self.step(CallGivenUp(call))
        elif fault == "busy":
            self.coordinator.busy = answers
        elif "id" in self.coordinator.ids and fault == "timed out":
            self.coordinator.time_out("id")
        elif "id" in self.coordinator.ids and answers == 1:
            with contextlib.suppress(errors.ConcurrentTransactions):
                self.coordinator.init("id")

    @invariant()
    def outcomes_agree(self) -> None:
        """What commit returned is what the coordinator decided; nothing is decided twice."""
        if not hasattr(self, "coordinator"):
            return
        decided: dict[Any, bool] = {}
        for each in self.coordinator.ended:
            pair = (each.producer_id, each.epoch)
            assert pair not in decided
            decided[pair] = each.commit
        assert all(decided[pair] for pair in self.committed)
        assert not any(decided[pair] for pair in self.aborted)


TestAgainstACoordinator = AgainstACoordinator.TestCase
TestAgainstACoordinator.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
