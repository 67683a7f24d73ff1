"""The states of a transactional id: each command in each state (docs/design/0014)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from pk import errors
from pk.server.transactions import commands as c
from pk.server.transactions.state import NO_PAIR, STEPS, ProducerPair, TransactionState
from tests.unit.server.transactions.coordinator_bench import ID, IDS, T0, T1, Bench, after

S = TransactionState


def an_empty_id(bench: Bench) -> ProducerPair:
    return bench.init()


def ongoing(bench: Bench) -> ProducerPair:
    return bench.begun()


def prepared(bench: Bench, *, commit: bool) -> ProducerPair:
    pair = bench.begun()
    bench.end(pair, commit=commit)
    return pair


def completed(bench: Bench, *, commit: bool) -> ProducerPair:
    pair = prepared(bench, commit=commit)
    assert bench.markers(pair)
    return pair


#: State → how to get there; returns the pair of its last transaction, or of the empty id.
REACH: dict[TransactionState, Callable[[Bench], ProducerPair]] = {
    S.EMPTY: an_empty_id,
    S.ONGOING: ongoing,
    S.PREPARE_COMMIT: lambda bench: prepared(bench, commit=True),
    S.PREPARE_ABORT: lambda bench: prepared(bench, commit=False),
    S.COMPLETE_COMMIT: lambda bench: completed(bench, commit=True),
    S.COMPLETE_ABORT: lambda bench: completed(bench, commit=False),
}
OPEN = (S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT)
IDLE = (S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT)
PREPARED = (S.PREPARE_COMMIT, S.PREPARE_ABORT)
COMPLETE = (S.COMPLETE_COMMIT, S.COMPLETE_ABORT)


def at(state: TransactionState) -> tuple[Bench, ProducerPair]:
    bench = Bench()
    pair = REACH[state](bench)
    assert bench.known().state is state
    return bench, pair


def unchanged_by(bench: Bench, act: Callable[[], object], error: type[errors.PkError]) -> None:
    before = bench.known()
    with pytest.raises(error) as refused:
        act()
    assert type(refused.value) is error
    assert bench.known() == before
    assert not bench.effects


def test_every_step_of_the_table_has_a_state() -> None:
    assert set(STEPS) == set(S) == set(REACH)


def test_the_labels_are_kafkas() -> None:
    assert [each.label for each in S] == [
        "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort",
    ]  # fmt: skip


# -- InitProducerId --------------------------------------------------------------------------------


def test_a_new_id_gets_a_fresh_producer_id() -> None:
    bench = Bench()
    pair = bench.init()
    assert pair.epoch == 0
    assert bench.known().current == pair
    assert bench.known().state is S.EMPTY
    assert bench.known().timeout_ms == 60_000


def test_an_unknown_id_with_a_pair_begins_like_a_new_one() -> None:
    """Its state expired, so there is nothing that the pair could fence or repeat."""
    bench = Bench()
    stale = ProducerPair(bench.fresh(), 4)
    pair = bench.init(pair=stale)
    assert pair.epoch == 0
    assert pair.producer_id != stale.producer_id


@pytest.mark.parametrize("state", IDLE)
def test_a_new_producer_fences_the_one_before(state: TransactionState) -> None:
    bench, _ = at(state)
    current = bench.known().current
    pair = bench.init(timeout_ms=5)
    assert pair == after(current)
    assert (bench.known().state, bench.known().timeout_ms) == (S.EMPTY, 5)
    with pytest.raises(errors.InvalidProducerEpoch):
        bench.ask(current, T0)
    unchanged_by(bench, lambda: bench.end(current, commit=False), errors.ProducerFenced)
    unchanged_by(bench, lambda: bench.init(pair=current), errors.ProducerFenced)


def test_a_new_producer_aborts_the_ongoing_transaction() -> None:
    bench, pair = at(S.ONGOING)
    with pytest.raises(errors.ConcurrentTransactions):
        bench.init()
    assert (bench.known().state, bench.known().fenced) == (S.PREPARE_ABORT, True)
    [prepared_event] = bench.effects[c.PREPARED]
    assert prepared_event == c.TransactionPrepared(ID, pair.producer_id, 1, False, (T0,), 2)
    # the producer before is fenced, whatever it asks for
    for commit in (True, False):
        unchanged_by(bench, partial(bench.end, pair, commit=commit), errors.ProducerFenced)
    unchanged_by(bench, lambda: bench.init(pair=pair), errors.ProducerFenced)
    assert bench.markers(pair)
    for commit in (True, False):
        unchanged_by(bench, partial(bench.end, pair, commit=commit), errors.ProducerFenced)
    unchanged_by(bench, lambda: bench.init(pair=pair), errors.ProducerFenced)
    assert bench.init() == after(pair, 2)
    assert not bench.known().fenced


@pytest.mark.parametrize("state", PREPARED)
def test_a_new_producer_waits_for_the_markers(state: TransactionState) -> None:
    bench, pair = at(state)
    unchanged_by(bench, bench.init, errors.ConcurrentTransactions)
    unchanged_by(bench, lambda: bench.init(pair=pair), errors.ConcurrentTransactions)
    unchanged_by(bench, lambda: bench.init(pair=after(pair)), errors.ConcurrentTransactions)


@pytest.mark.parametrize("state", IDLE)
def test_the_current_pair_gets_the_next_epoch(state: TransactionState) -> None:
    bench, _ = at(state)
    current = bench.known().current
    assert bench.init(pair=current) == after(current)
    assert bench.known().state is S.EMPTY


def test_a_repeated_init_with_the_previous_pair_gets_the_same_reply() -> None:
    """A delayed copy of the request must not fence its own producer."""
    bench, _ = at(S.COMPLETE_COMMIT)
    current = bench.known().current
    gained = bench.init(pair=current)
    assert bench.init(pair=current) == gained
    assert bench.known().current == gained
    bench.ask(gained, T0)
    unchanged_by(bench, lambda: bench.init(pair=current), errors.ProducerFenced)


@pytest.mark.parametrize("state", COMPLETE)
def test_an_init_with_the_pair_of_the_ended_transaction_gets_the_pair_after_it(
    state: TransactionState,
) -> None:
    """The reply to EndTxn may be lost."""
    bench, pair = at(state)
    assert bench.init(pair=pair) == after(pair)
    assert bench.known().state is state


def test_the_current_pair_aborts_its_own_transaction_without_fencing() -> None:
    bench, pair = at(S.ONGOING)
    with pytest.raises(errors.ConcurrentTransactions):
        bench.init(pair=pair)
    assert (bench.known().state, bench.known().fenced) == (S.PREPARE_ABORT, False)
    bench.markers(pair)
    assert bench.init(pair=pair) == after(pair)


@pytest.mark.parametrize("state", list(S))
def test_another_pair_is_fenced(state: TransactionState) -> None:
    bench, _ = at(state)
    current = bench.known().current
    for pair in (ProducerPair(bench.fresh(), current.epoch), after(current, 7)):
        unchanged_by(bench, partial(bench.init, pair=pair), errors.ProducerFenced)


def test_behind_the_last_epoch_comes_a_fresh_producer_id() -> None:
    bench = Bench()
    pair = bench.at_epoch(32_765)
    assert bench.init() == after(pair)
    fresh = bench.init()
    assert fresh.epoch == 0
    assert fresh.producer_id != pair.producer_id


@pytest.mark.parametrize("name", ["", "x" * 250, "é" * 125])
def test_an_id_of_a_wrong_size_is_refused(name: str) -> None:
    bench = Bench()
    with pytest.raises(errors.InvalidRequest, match="1 to 249 bytes") as refused:
        bench.init(name)
    assert "choose another" in refused.value.message


@pytest.mark.parametrize("timeout_ms", [-1, 0, 900_001])
def test_a_timeout_out_of_bounds_is_refused(timeout_ms: int) -> None:
    bench = Bench()
    with pytest.raises(errors.InvalidTransactionTimeout, match="1 to 900000"):
        bench.init(timeout_ms=timeout_ms)
    for accepted in (1, 900_000):
        bench.init(timeout_ms=accepted)


def test_a_producer_id_that_an_id_has_is_not_fresh() -> None:
    bench = Bench()
    bench.init()
    bench.numbers -= 1
    with pytest.raises(errors.InternalError, match="is not fresh"):
        bench.init()


def test_a_coordinator_answers_about_ids_of_its_partition_only() -> None:
    bench = Bench(c.TransactionRules((Bench().rules.partition + 1) % 16, 900_000, 1))
    for act in (bench.init, bench.abort, bench.forget):
        with pytest.raises(errors.NotCoordinator):
            act()
    with pytest.raises(errors.NotCoordinator):
        bench.end(ProducerPair(1, 1), commit=True)
    [found] = bench.run(c.DescribeTransactions((ID,)))
    assert found.error.code == errors.NotCoordinator.code


# -- the first batch -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", IDLE)
def test_the_first_question_begins_the_transaction(state: TransactionState) -> None:
    bench, _ = at(state)
    pair = bench.known().current
    bench.now += 5
    bench.ask(pair, T1, T0)
    known = bench.known()
    assert (known.state, known.current, known.started_ms) == (S.ONGOING, pair, bench.now)
    assert list(known.partitions) == [T0, T1]
    assert (known.previous, known.reason, known.fenced) == (NO_PAIR, "", False)
    assert bench.effects == {c.BEGAN: [c.TransactionBegan(ID, *pair, bench.now, 60_000)]}


def test_a_further_partition_is_added() -> None:
    bench, pair = at(S.ONGOING)
    began = bench.known().started_ms
    bench.now += 5
    bench.ask(pair, T1, metadata_offset=1)
    assert list(bench.known().partitions) == [T0, T1]
    assert bench.known().started_ms == began
    assert bench.known().metadata_offset == 2
    assert not bench.effects
    records = len(bench.log)
    bench.ask(pair, T0, T1, metadata_offset=9)
    assert len(bench.log) == records  # both were registered


def test_the_newest_metadata_offset_is_kept() -> None:
    bench, pair = at(S.ONGOING)
    bench.ask(pair, T1, metadata_offset=77)
    assert bench.known().metadata_offset == 77


@pytest.mark.parametrize("state", PREPARED)
def test_the_next_transaction_waits_for_the_markers(state: TransactionState) -> None:
    bench, pair = at(state)
    unchanged_by(bench, lambda: bench.ask(after(pair), T0), errors.ConcurrentTransactions)
    unchanged_by(bench, lambda: bench.ask(pair, T1), errors.InvalidProducerEpoch)
    bench.markers(pair)
    bench.ask(after(pair), T0)
    assert bench.known().state is S.ONGOING


@pytest.mark.parametrize("state", list(S))
def test_an_older_pair_is_refused(state: TransactionState) -> None:
    bench, _ = at(state)
    current = bench.known().current
    for pair in (after(current, -1), after(current, 9)):
        unchanged_by(bench, partial(bench.ask, pair, T0), errors.InvalidProducerEpoch)


@pytest.mark.parametrize("state", COMPLETE)
def test_a_complete_transaction_never_becomes_ongoing_again(state: TransactionState) -> None:
    bench, pair = at(state)
    unchanged_by(bench, lambda: bench.ask(pair, T1), errors.InvalidProducerEpoch)


# -- EndTxn ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False])
def test_a_decision_is_prepared_and_names_the_next_pair(commit: bool) -> None:
    bench, pair = at(S.ONGOING)
    bench.ask(pair, T1)
    bench.now += 9
    assert bench.end(pair, commit=commit) == after(pair)
    known = bench.known()
    assert known.state is (S.PREPARE_COMMIT if commit else S.PREPARE_ABORT)
    assert (known.current, known.next, known.reason) == (pair, after(pair), "")
    assert bench.effects == {
        c.PREPARED: [c.TransactionPrepared(ID, pair.producer_id, 1, commit, (T0, T1), 2)]
    }


@pytest.mark.parametrize("state", IDLE)
def test_a_commit_without_a_partition_is_refused(state: TransactionState) -> None:
    bench, _ = at(state)
    current = bench.known().current
    unchanged_by(bench, lambda: bench.end(current, commit=True), errors.InvalidTxnState)


@pytest.mark.parametrize("state", IDLE)
def test_an_abort_without_a_partition_increases_the_epoch(state: TransactionState) -> None:
    """A batch under way must not open the next transaction."""
    bench, _ = at(state)
    pair = bench.known().current
    assert bench.end(pair, commit=False) == after(pair)
    assert bench.known().state is S.COMPLETE_ABORT
    assert not bench.effects  # no partition needs a marker
    unchanged_by(bench, lambda: bench.ask(pair, T0), errors.InvalidProducerEpoch)
    assert bench.end(pair, commit=False) == after(pair)  # repeated
    unchanged_by(bench, lambda: bench.end(pair, commit=True), errors.TransactionAborted)
    bench.ask(after(pair), T0)


@pytest.mark.parametrize(
    ("state", "commit", "outcome"),
    [
        (S.PREPARE_COMMIT, True, None),
        (S.PREPARE_COMMIT, False, errors.InvalidTxnState),
        (S.PREPARE_ABORT, True, errors.TransactionAborted),
        (S.PREPARE_ABORT, False, None),
        (S.COMPLETE_COMMIT, True, None),
        (S.COMPLETE_COMMIT, False, errors.InvalidTxnState),
        (S.COMPLETE_ABORT, True, errors.TransactionAborted),
        (S.COMPLETE_ABORT, False, None),
    ],
)
def test_a_repeated_end_gets_the_decision_that_was_taken(
    state: TransactionState, commit: bool, outcome: type[errors.PkError] | None
) -> None:
    bench, pair = at(state)
    before = bench.known()
    if outcome is None:
        assert bench.end(pair, commit=commit) == after(pair)
        assert bench.known() == before
        assert not bench.effects
    else:
        unchanged_by(bench, lambda: bench.end(pair, commit=commit), outcome)


@pytest.mark.parametrize("state", PREPARED)
@pytest.mark.parametrize("commit", [True, False])
def test_the_next_end_waits_for_the_markers(state: TransactionState, commit: bool) -> None:
    bench, pair = at(state)
    end = partial(bench.end, after(pair), commit=commit)
    unchanged_by(bench, end, errors.ConcurrentTransactions)


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("commit", [True, False])
def test_an_older_end_is_fenced(state: TransactionState, commit: bool) -> None:
    bench, _ = at(state)
    current = bench.known().current
    for pair in (after(current, -3), after(current, 5), ProducerPair(bench.fresh(), 0)):
        unchanged_by(bench, partial(bench.end, pair, commit=commit), errors.ProducerFenced)


@pytest.mark.parametrize("commit", [True, False])
def test_a_delayed_end_never_touches_the_next_transaction(commit: bool) -> None:
    bench, pair = at(S.COMPLETE_COMMIT)
    bench.ask(after(pair), T0)
    unchanged_by(bench, lambda: bench.end(pair, commit=commit), errors.ProducerFenced)


def test_an_end_that_names_the_pair_of_an_init_finds_nothing_to_commit() -> None:
    bench = Bench()
    pair = bench.init()
    gained = bench.init(pair=pair)
    unchanged_by(bench, lambda: bench.end(pair, commit=True), errors.InvalidTxnState)
    assert bench.end(pair, commit=False) == gained


def test_an_end_of_an_unknown_id_is_refused() -> None:
    bench = Bench()
    with pytest.raises(errors.TransactionalIdNotFound, match="init_transactions"):
        bench.end(ProducerPair(bench.fresh(), 0), commit=True)


def test_the_transaction_of_the_last_epoch_is_followed_by_another_producer_id() -> None:
    bench = Bench()
    pair = bench.at_epoch(32_766)
    bench.ask(pair, T0)
    fresh = bench.end(pair, commit=True)
    assert (fresh.producer_id != pair.producer_id, fresh.epoch) == (True, 0)
    [event] = bench.effects[c.PREPARED]
    assert (event.producer_id, event.marker_epoch) == (pair.producer_id, 32_767)
    unchanged_by(bench, lambda: bench.ask(fresh, T0), errors.ConcurrentTransactions)
    assert bench.end(pair, commit=True) == fresh
    assert bench.markers(pair)
    assert bench.end(pair, commit=True) == fresh
    assert bench.verify(pair).commit
    unchanged_by(bench, lambda: bench.ask(pair, T0), errors.InvalidProducerEpoch)
    bench.ask(fresh, T0)
    assert bench.known().current == fresh
    unchanged_by(bench, lambda: bench.ask(pair, T0), errors.InvalidProducerEpoch)


def test_an_empty_abort_at_the_last_epoch_gets_another_producer_id() -> None:
    bench = Bench()
    pair = bench.at_epoch(32_766)
    fresh = bench.end(pair, commit=False)
    assert fresh.epoch == 0
    assert bench.end(pair, commit=False) == fresh


def test_the_last_epoch_without_a_fresh_id_is_a_bug() -> None:
    bench = Bench()
    pair = bench.at_epoch(32_766)
    bench.ask(pair, T0)
    with pytest.raises(errors.InternalError, match="no fresh producer id"):
        bench.run(c.ExpireTransactions((c.TimedOut(ID, *pair),)))


# -- after an unclean election of the coordinator's partition --------------------------------------


def test_a_pair_whose_record_was_lost_is_not_given_again() -> None:
    """Rule X1: leaders may know the pair, and would take its next batches for repetitions."""
    bench = Bench()
    bench.init()
    lost = bench.init()
    bench = bench.elected_uncleanly(lost=1)
    pair = bench.init()
    assert pair.producer_id != lost.producer_id
    assert pair.epoch == 0
    assert bench.init() == after(pair), "this id was allocated since"


NEXT: dict[str, Callable[[Bench, ProducerPair], object]] = {
    "commit": lambda bench, pair: bench.end(pair, commit=True),
    "abort": lambda bench, pair: bench.end(pair, commit=False),
    "timeout": lambda bench, pair: bench.time_out(pair),
    "operator": lambda bench, pair: bench.abort(),
    "init": lambda bench, pair: unanswered(bench),
}


def unanswered(bench: Bench) -> None:
    with pytest.raises(errors.ConcurrentTransactions):
        bench.init()


@pytest.mark.parametrize("ended", NEXT.values(), ids=NEXT)
def test_the_pair_after_an_older_one_has_another_producer_id(
    ended: Callable[[Bench, ProducerPair], object],
) -> None:
    """Rule X1: the transaction ends with its own pair, and its markers have the next epoch."""
    bench = Bench()
    pair = bench.begun()
    bench = bench.elected_uncleanly()
    ended(bench, pair)
    fresh = bench.known().next
    assert fresh.producer_id != pair.producer_id
    assert fresh.epoch == 0
    (event,) = bench.effects[c.PREPARED]
    assert (event.producer_id, event.marker_epoch) == (pair.producer_id, pair.epoch + 1)
    assert bench.markers(pair)
    assert bench.known().current == fresh


def test_an_empty_abort_of_an_older_pair_gets_another_producer_id() -> None:
    bench = Bench()
    pair = bench.init()
    bench = bench.elected_uncleanly()
    fresh = bench.end(pair, commit=False)
    assert fresh.producer_id != pair.producer_id
    assert bench.end(pair, commit=False) == fresh


# -- timeouts, operators, markers ------------------------------------------------------------------


def test_a_timed_out_transaction_is_aborted_and_its_end_says_so() -> None:
    bench, pair = at(S.ONGOING)
    assert bench.time_out(pair) == 1
    assert (bench.known().state, bench.known().reason) == (S.PREPARE_ABORT, "timed out")
    assert c.PREPARED in bench.effects
    for _ in range(2):
        unchanged_by(bench, lambda: bench.end(pair, commit=True), errors.TransactionTimedOut)
        assert bench.end(pair, commit=False) == after(pair)
        bench.markers(pair)
    assert bench.known().state is S.COMPLETE_ABORT
    assert bench.init(pair=pair) == after(pair)


@pytest.mark.parametrize("state", [each for each in S if each is not S.ONGOING])
def test_a_timeout_without_an_ongoing_transaction_does_nothing(state: TransactionState) -> None:
    bench, pair = at(state)
    before = bench.known()
    assert bench.time_out(pair) == bench.time_out(before.current) == 0
    assert bench.known() == before
    assert not bench.effects


def test_a_late_timeout_does_not_end_the_next_transaction() -> None:
    bench, pair = at(S.COMPLETE_COMMIT)
    bench.ask(after(pair), T0)
    assert bench.time_out(pair) == 0
    assert bench.time_out(pair, IDS[0]) == 0
    assert bench.known().state is S.ONGOING


@pytest.mark.parametrize("state", PREPARED)
def test_written_markers_complete_the_transaction(state: TransactionState) -> None:
    bench, pair = at(state)
    began = bench.known().started_ms
    bench.now += 3
    assert bench.markers(pair)
    known = bench.known()
    assert known.state is (S.COMPLETE_COMMIT if state is S.PREPARE_COMMIT else S.COMPLETE_ABORT)
    assert (known.current, known.previous, known.next) == (after(pair), pair, NO_PAIR)
    assert (known.partitions, known.started_ms, known.updated_ms) == ({}, 0, bench.now)
    ended = c.TransactionEnded(ID, *pair, state is S.PREPARE_COMMIT, began)
    assert bench.effects == {c.ENDED: [ended]}


@pytest.mark.parametrize("state", [*IDLE, S.ONGOING])
def test_written_markers_of_another_transaction_do_nothing(state: TransactionState) -> None:
    bench, pair = at(state)
    before = bench.known()
    assert not bench.markers(pair)
    assert bench.known() == before
    assert not bench.effects


def test_late_markers_do_not_complete_the_next_transaction() -> None:
    bench, pair = at(S.COMPLETE_COMMIT)
    bench.ask(after(pair), T0)
    bench.end(after(pair), commit=False)
    before = bench.known()
    assert not bench.markers(pair)
    assert bench.known() == before
    assert not Bench().markers(pair)  # an id that is not known


def test_an_operator_aborts_an_ongoing_transaction() -> None:
    bench, pair = at(S.ONGOING)
    bench.abort()
    assert bench.known().state is S.PREPARE_ABORT
    assert c.PREPARED in bench.effects
    with pytest.raises(errors.TransactionAborted, match="by an operator"):
        bench.end(pair, commit=True)


@pytest.mark.parametrize("state", [each for each in S if each is not S.ONGOING])
def test_an_operator_cannot_abort_what_is_not_ongoing(state: TransactionState) -> None:
    bench, _ = at(state)
    error = errors.ConcurrentTransactions if state in PREPARED else errors.InvalidTxnState
    unchanged_by(bench, bench.abort, error)


def test_an_operator_cannot_abort_an_unknown_id() -> None:
    with pytest.raises(errors.TransactionalIdNotFound):
        Bench().abort()


@pytest.mark.parametrize("state", IDLE)
def test_an_idle_id_is_forgotten(state: TransactionState) -> None:
    bench, _ = at(state)
    pair = bench.known().current
    bench.forget()
    assert not bench.machine.transactions
    with pytest.raises(errors.InvalidProducerEpoch, match="was forgotten"):
        bench.ask(pair, T0)
    with pytest.raises(errors.TransactionalIdNotFound):
        bench.forget()
    assert bench.init().epoch == 0


@pytest.mark.parametrize("state", OPEN)
def test_an_open_transaction_is_not_forgotten(state: TransactionState) -> None:
    bench, _ = at(state)
    unchanged_by(bench, bench.forget, errors.InvalidTxnState)
