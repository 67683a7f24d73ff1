"""Questions of leaders, unclean elections, and reads (rules X3, X6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors, limits
from pk.server.transactions import commands as c
from pk.server.transactions.state import ProducerPair
from pk.transactional_ids import producer_id as allocated
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.transactions.coordinator_bench import (
    ID,
    IDS,
    NOW,
    PARTITION,
    RULES,
    T0,
    T1,
    T2,
    TOPIC_ID,
    Bench,
    after,
    image_of,
    question,
)

OPEN, PREPARED, ENDED = 1, 2, 3


# -- one request with many questions ---------------------------------------------------------------


def test_a_request_has_one_record_per_transaction_and_one_answer_per_question() -> None:
    bench = Bench()
    first, second = bench.init(IDS[0]), bench.init(IDS[1])
    records = len(bench.log)
    answers = bench.ask_all(
        [question(first, T0), question(second, T0), question(first, T1), question(second, T1, T2)]
    )
    assert [each.error.code for each in answers] == [0, 0, 0, 0]
    assert len(bench.log) == records + 2
    assert list(bench.known(IDS[0]).partitions) == [T0, T1]
    assert list(bench.known(IDS[1]).partitions) == [T0, T1, T2]
    assert [each.transactional_id for each in bench.effects[c.BEGAN]] == [IDS[0], IDS[1]]


def test_a_question_sees_what_the_one_before_it_registered() -> None:
    bench = Bench()
    pair = bench.init()
    answers = bench.ask_all([question(pair, T0), question(pair, T0, verify_only=True)])
    assert answers[1].status == OPEN


def test_a_refused_question_fails_no_other() -> None:
    bench = Bench()
    pair = bench.init()
    stranger = ProducerPair(allocated(PARTITION, 1, 9), 0)
    elsewhere = ProducerPair(allocated((PARTITION + 1) % 16, 1, 9), 0)
    plain = ProducerPair(1000, 0)
    answers = bench.ask_all(
        [
            question(stranger, T0),
            question(pair, T0),
            question(elsewhere, T0),
            question(after(pair, -1), T1),
            question(pair),
            question(plain, T0),
            question(pair, T2),
        ]
    )
    refusals = [
        errors.InvalidProducerEpoch, None, errors.NotCoordinator, errors.InvalidProducerEpoch,
        errors.InvalidRequest, errors.InvalidRequest, None,
    ]  # fmt: skip
    assert [each.error.code for each in answers] == [0 if e is None else e.code for e in refusals]
    assert list(bench.known().partitions) == [T0, T2]


def test_a_transaction_has_a_bounded_number_of_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_PARTITIONS_MAX", 2)
    bench = Bench()
    pair = bench.begun(ID, T0)
    bench.ask(pair, T1)
    with pytest.raises(errors.InvalidTxnState, match="more than 2 partitions"):
        bench.ask(pair, T2)
    bench.ask(pair, T0)  # registered already


# -- a transaction that is open in a leader's log --------------------------------------------------


def test_an_ongoing_transaction_is_open() -> None:
    bench = Bench()
    pair = bench.begun()
    assert bench.verify(pair).status == OPEN
    assert list(bench.known().partitions) == [T0]
    records = len(bench.log)
    assert bench.verify(pair, T1).status == OPEN
    assert len(bench.log) == records  # verify_only registers nothing


@pytest.mark.parametrize("commit", [True, False])
def test_a_prepared_transaction_gets_its_marker_and_a_complete_one_got_it(commit: bool) -> None:
    bench = Bench()
    pair = bench.begun()
    bench.end(pair, commit=commit)
    assert bench.verify(pair) == wire.TxnAnswer(status=PREPARED)
    bench.markers(pair)
    ended = wire.TxnAnswer(status=ENDED, commit=commit, producer_epoch=1)
    assert bench.verify(pair) == ended


def test_an_unknown_transaction_was_aborted() -> None:
    bench = Bench()
    stranger = ProducerPair(allocated(PARTITION, 1, 9), 4)
    aborted = wire.TxnAnswer(status=ENDED, commit=False, producer_epoch=5)
    assert bench.verify(stranger) == aborted
    pair = bench.begun()
    bench.end(pair, commit=True)
    bench.markers(pair)
    bench.init(pair=after(pair))
    assert bench.verify(pair) == wire.TxnAnswer(status=ENDED, commit=False, producer_epoch=1)


def test_only_the_partition_of_the_producer_id_answers() -> None:
    bench = Bench()
    with pytest.raises(errors.NotCoordinator):
        bench.verify(ProducerPair(allocated((PARTITION + 1) % 16, 1, 9), 0))
    with pytest.raises(errors.InvalidRequest):
        bench.verify(ProducerPair(7, 0))


def test_after_an_unclean_election_of_the_coordinator_unknown_is_no_abort() -> None:
    """Its records may be lost: the transaction may have been committed."""
    bench = Bench(RULES._replace(unclean_epoch=5), leader_epoch=6)
    lost = ProducerPair(allocated(PARTITION, 4, 1), 0)
    with pytest.raises(errors.CoordinatorUnavailable, match="operator must decide"):
        bench.verify(lost)
    later = ProducerPair(allocated(PARTITION, 5, 1), 0)
    assert bench.verify(later).status == ENDED


# -- unclean elections of a partition --------------------------------------------------------------


def test_an_unclean_election_since_the_registration_aborts_the_commit() -> None:
    bench = Bench()
    pair = bench.begun(ID, T0, T1)
    bench.image = image_of(p1=4)
    for _ in range(3):  # the first request, and repeated ones before and after the markers
        with pytest.raises(errors.TransactionAborted, match=r"t-1 had an unclean") as refused:
            bench.end(pair, commit=True)
        assert type(refused.value) is errors.TransactionAborted
        bench.markers(pair)
    assert bench.end(pair, commit=False) == after(pair)


def test_an_abort_does_not_need_the_image() -> None:
    bench = Bench()
    pair = bench.begun()
    bench.image = image_of(p0=4)
    bench.image.offset = 0
    assert bench.end(pair, commit=False) == after(pair)
    assert bench.known().reason == ""


@pytest.mark.parametrize(("at", "now", "commits"), [(4, 4, True), (4, 9, False), (-1, 0, False)])
def test_an_unclean_election_before_the_registration_does_not_count(
    at: int, now: int, commits: bool
) -> None:
    bench = Bench()
    pair = bench.init()
    bench.ask_all([question(pair, T0, unclean_epoch=at)])
    bench.image = image_of(p0=now)
    if commits:
        bench.end(pair, commit=True)
        return
    with pytest.raises(errors.TransactionAborted):
        bench.end(pair, commit=True)


def test_a_partition_that_is_asked_about_again_keeps_its_first_unclean_epoch() -> None:
    """The leader after the unclean election does not have the transaction open, and asks."""
    bench = Bench()
    pair = bench.begun()
    bench.ask_all([question(pair, T0, T1, unclean_epoch=6)])
    assert bench.known().partitions == {T0: -1, T1: 6}
    bench.image = image_of(p0=6, p1=6)
    with pytest.raises(errors.TransactionAborted, match=r"t-0 had"):
        bench.end(pair, commit=True)


def test_a_deleted_partition_is_dropped() -> None:
    bench = Bench()
    gone = PartitionKey(TOPIC_ID[:-1] + "b", 0)
    pair = bench.begun(ID, T0, gone)
    assert bench.end(pair, commit=True) == after(pair)


def test_an_image_older_than_a_leader_that_asked_does_not_decide() -> None:
    bench = Bench()
    pair = bench.init()
    bench.ask(pair, T0, metadata_offset=bench.image.offset + 1)
    before = bench.known()
    with pytest.raises(errors.CoordinatorLoading):
        bench.end(pair, commit=True)
    assert bench.known() == before
    bench.image.offset += 1
    bench.end(pair, commit=True)


# -- after a replay --------------------------------------------------------------------------------


def test_a_replay_finds_the_open_transactions_with_all_their_partitions() -> None:
    bench = Bench()
    pairs = {name: bench.begun(name, T0, T1) for name in IDS[:4]}
    bench.end(pairs[IDS[1]], commit=True, transactional_id=IDS[1])
    bench.time_out(pairs[IDS[2]], IDS[2])
    bench.end(pairs[IDS[3]], commit=True, transactional_id=IDS[3])
    bench.markers(pairs[IDS[3]], IDS[3])
    bench.init(IDS[4])
    bench.machine = bench.replayed()
    found = bench.run(c.Resume())
    partitions = (T0, T1)
    assert sorted(found, key=lambda each: IDS.index(each.transactional_id)) == [
        c.TransactionBegan(IDS[0], *pairs[IDS[0]], NOW, 60_000),
        c.TransactionPrepared(IDS[1], pairs[IDS[1]].producer_id, 1, True, partitions, 2),
        c.TransactionPrepared(IDS[2], pairs[IDS[2]].producer_id, 1, False, partitions, 2),
    ]


# -- ids that expire, and reads --------------------------------------------------------------------


def test_idle_ids_expire_and_open_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c, "FORGET_MAX", 2)
    bench = Bench()
    for name in IDS[:3]:
        bench.init(name)
    bench.begun(IDS[3])
    prepared = bench.begun(IDS[4])
    bench.end(prepared, commit=False, transactional_id=IDS[4])
    bench.now += RULES.transactional_id_expiration_ms - 1
    assert bench.run(c.ForgetExpired()) == 0
    bench.init(IDS[2])  # was used lately
    bench.init(IDS[5])
    bench.now += 1
    assert bench.run(c.ForgetExpired()) == 2
    assert set(bench.machine.transactions) == {IDS[2], IDS[3], IDS[4], IDS[5]}
    assert bench.run(c.ForgetExpired()) == 0
    bench.markers(prepared, IDS[4])
    bench.now += RULES.transactional_id_expiration_ms
    assert bench.run(c.ForgetExpired()) == 2
    assert bench.run(c.ForgetExpired()) == 1
    assert set(bench.machine.transactions) == {IDS[3]}


def test_a_description_names_state_pair_partitions_and_reason() -> None:
    bench = Bench()
    pair = bench.begun(IDS[0], T0, T1)
    bench.time_out(pair, IDS[0])
    found, unknown = bench.run(c.DescribeTransactions((IDS[0], IDS[1])))
    assert found == wire.TransactionDescription(
        transactional_id=IDS[0],
        state="PrepareAbort",
        producer_id=pair.producer_id,
        producer_epoch=0,
        timeout_ms=60_000,
        started_ms=NOW,
        reason="timed out",
        partitions=[wire.FetchPartition(topic_id=TOPIC_ID, partition=n) for n in (0, 1)],
    )
    assert unknown.transactional_id == IDS[1]
    assert unknown.error.code == errors.TransactionalIdNotFound.code


def test_listings_are_filtered() -> None:
    bench = Bench()
    first, second = bench.init(IDS[0]), bench.begun(IDS[1])
    third = bench.begun(IDS[2])
    bench.end(third, commit=True, transactional_id=IDS[2])
    bench.now += 100

    def names(**fields: Any) -> set[str]:
        request = wire.ListTransactionsRequest(**fields)
        listed = bench.run(c.ListTransactions(request))
        assert list(listed) == sorted(listed, key=lambda each: each.transactional_id)
        return {each.transactional_id for each in listed}

    assert names() == set(IDS[:3])
    assert names(states=["Empty", "PrepareCommit"]) == {IDS[0], IDS[2]}
    assert names(producer_ids=[first.producer_id, second.producer_id]) == {IDS[0], IDS[1]}
    assert names(open_longer_ms=99) == {IDS[1], IDS[2]}
    assert names(open_longer_ms=100) == set()
    assert names(states=["Ongoing"], producer_ids=[first.producer_id]) == set()
    with pytest.raises(errors.InvalidRequest, match="no state Sleeping: the states are Await"):
        names(states=["Sleeping"])


@pytest.mark.parametrize(
    "refused",
    [
        lambda bench, pair: bench.end(pair, commit=True),
        lambda bench, pair: bench.init(pair=pair),
    ],
)
def test_an_error_names_the_id_and_the_pair(refused: Callable[..., object]) -> None:
    bench = Bench()
    pair = bench.begun()
    bench.end(pair, commit=False)
    with pytest.raises(errors.PkError) as failure:
        refused(bench, pair)
    assert repr(ID) in failure.value.message
    assert str(pair) in failure.value.message
