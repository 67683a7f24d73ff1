"""Jobs: joins, commits, aborts and leases of a transaction with many producers (X4 to X10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from pk import errors, limits
from pk.server.transactions import commands as c
from pk.server.transactions.participants import records, state
from pk.server.transactions.participants.state import Job
from pk.server.transactions.state import ProducerPair, TransactionState
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.transactions.coordinator_bench import (
    ID,
    IDS,
    NOW,
    T0,
    T1,
    T2,
    TOPIC_ID,
    Bench,
    after,
    image_of,
)

S = TransactionState
JOB = ID
Sums = Mapping[str, tuple[int, int, int]]
NOTHING: Sums = MappingProxyType({})
WRITTEN: Sums = {TOPIC_ID: (10, 100, 7)}
OTHER: Sums = {TOPIC_ID: (11, 110, 8)}


class JobBench(Bench):
    """One machine, with the requests of tasks and drivers."""

    def asked(self, batch: int, run: str = "r1", query: str = "q", **more: Any) -> wire.JobBatch:
        return wire.JobBatch(job=JOB, query=query, run=run, batch=batch, **more)

    def join_reply(
        self, batch: int, run: str = "r1", query: str = "q", **more: Any
    ) -> wire.JoinTransactionReply:
        request = wire.JoinTransactionRequest(
            batch=self.asked(batch, run, query, **more), topic_ids=[TOPIC_ID], metadata_offset=2
        )
        reply: wire.JoinTransactionReply = self.run(
            c.JoinTransaction(request, self.image, self.fresh())
        )
        return reply

    def join(self, batch: int, run: str = "r1", query: str = "q", **more: Any) -> ProducerPair:
        reply = self.join_reply(batch, run, query, **more)
        assert not reply.committed
        return ProducerPair(reply.producer_id, reply.producer_epoch)

    def commit(
        self, batch: int, *named: ProducerPair, run: str = "r1", query: str = "q",
        sums: Sums = NOTHING, accept: bool = False,
    ) -> wire.CommitParticipantsReply:  # fmt: skip
        request = wire.CommitParticipantsRequest(
            batch=self.asked(batch, run, query), accept_mismatch=accept,
            participants=[
                wire.Participant(producer_id=each.producer_id, producer_epoch=each.epoch)
                for each in named
            ],
            sums=[
                wire.TopicSums(topic_id=topic, rows=rows, bytes=size, row_sum=total)
                for topic, (rows, size, total) in sums.items()
            ],
        )  # fmt: skip
        reply: wire.CommitParticipantsReply = self.run(c.CommitParticipants(request, self.image))
        return reply

    def give_up(self, batch: int, run: str = "r1") -> wire.AbortParticipantsReply:
        request = wire.AbortParticipantsRequest(batch=self.asked(batch, run))
        reply: wire.AbortParticipantsReply = self.run(c.AbortParticipants(request))
        return reply

    def lease_ends(self) -> int:
        count: int = self.run(c.ExpireBatches(((JOB, self.job.transaction),)))
        return count

    def marked(self) -> bool:
        done: bool = self.run(c.BatchMarked(JOB, self.job.transaction))
        return done

    def committed(self, batch: int, run: str = "r1", sums: Sums = WRITTEN) -> ProducerPair:
        """Write a batch with one participant, to its end."""
        pair = self.join(batch, run)
        self.commit(batch, pair, run=run, sums=sums)
        assert self.marked()
        return pair

    @property
    def job(self) -> Job:
        return self.machine.jobs.items()[JOB]


def refused(bench: JobBench, act: Callable[[], object], error: type[errors.PkError]) -> str:
    """The words of a refusal that changed nothing."""
    before = len(bench.log)
    with pytest.raises(error) as raised:
        act()
    assert type(raised.value) is error
    assert len(bench.log) == before
    return raised.value.message


# -- joins -----------------------------------------------------------------------------------------


def test_the_first_join_opens_the_batch_with_every_partition() -> None:
    bench = JobBench()
    pair = bench.join(0)
    assert pair.epoch == 0
    assert bench.job.state is S.ONGOING
    assert list(bench.job.partitions) == [T0, T1, T2]
    assert bench.effects[c.BATCH_BEGAN] == [c.BatchBegan(JOB, 1, NOW)]
    # a leader's question needs no record
    before = len(bench.log)
    bench.ask(pair, T0, T1)
    assert len(bench.log) == before


def test_each_task_has_a_producer_id_of_its_own() -> None:
    bench = JobBench()
    pairs = [bench.join(0) for _ in range(3)]
    assert len({pair.producer_id for pair in pairs}) == 3
    assert c.BATCH_BEGAN not in bench.effects
    # the second and third join wrote one record each
    assert len(bench.log) == 4


def test_the_pool_is_used_again_with_the_markers_epoch() -> None:
    """The marker of a participant leaves its epoch + 1 in each log (X1)."""
    bench = JobBench()
    first, second = bench.join(0), bench.join(0)
    bench.commit(0, first, sums=WRITTEN)
    assert bench.marked()
    again = {bench.join(1), bench.join(1)}
    assert again == {after(first), after(second)}
    assert bench.join(1).epoch == 0  # a third task needs another producer id


def test_no_join_before_the_markers_are_written() -> None:
    bench = JobBench()
    pair = bench.join(0)
    bench.commit(0, pair, sums=WRITTEN)
    refused(bench, lambda: bench.join(1), errors.ConcurrentTransactions)


def test_a_participant_at_the_last_epoch_leaves_the_pool() -> None:
    bench = JobBench()
    pair = bench.committed(0)
    record = records.participant_record(
        JOB, pair.producer_id, state.Participant(limits.PRODUCER_EPOCH_LAST, 1)
    )
    bench.machine.apply(len(bench.log), record)
    bench.log.append(record)
    assert bench.join(1).producer_id != pair.producer_id


def test_a_topic_that_does_not_exist_is_refused() -> None:
    bench = JobBench()
    request = wire.JoinTransactionRequest(batch=bench.asked(0), topic_ids=["none"])
    act = lambda: bench.run(c.JoinTransaction(request, bench.image, bench.fresh()))  # noqa: E731
    refused(bench, act, errors.UnknownTopicOrPartition)


@pytest.mark.parametrize(
    "asked",
    [
        wire.JobBatch(job=JOB, query="", run="r", batch=0),
        wire.JobBatch(job=JOB, query="q", run="r" * 250, batch=0),
        wire.JobBatch(job=JOB, query="q", run="r", batch=-1),
    ],
)
def test_names_that_cannot_be_are_refused(asked: wire.JobBatch) -> None:
    bench = JobBench()
    request = wire.JoinTransactionRequest(batch=asked, topic_ids=[TOPIC_ID])
    act = lambda: bench.run(c.JoinTransaction(request, bench.image, bench.fresh()))  # noqa: E731
    refused(bench, act, errors.InvalidRequest)


def test_too_many_participants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARTICIPANTS_MAX", 2)
    bench = JobBench()
    bench.join(0)
    bench.join(0)
    assert "fewer tasks" in refused(bench, lambda: bench.join(0), errors.InvalidTxnState)


def test_an_id_keeps_its_kind() -> None:
    bench = JobBench()
    bench.init(IDS[0])
    request = wire.JoinTransactionRequest(
        batch=wire.JobBatch(job=IDS[0], query="q", run="r"), topic_ids=[TOPIC_ID]
    )
    act = lambda: bench.run(c.JoinTransaction(request, bench.image, bench.fresh()))  # noqa: E731
    refused(bench, act, errors.InvalidTxnState)
    bench.join(0)
    refused(bench, lambda: bench.init(JOB), errors.InvalidTxnState)


# -- commits ---------------------------------------------------------------------------------------


def test_a_commit_ends_the_named_and_aborts_the_others() -> None:
    bench = JobBench()
    winner, loser = bench.join(0), bench.join(0)
    reply = bench.commit(0, winner, sums=WRITTEN)
    assert not reply.already_committed
    [event] = bench.effects[c.PREPARED]
    assert set(event.markers) == {
        c.ParticipantMarker(*after(winner), True),
        c.ParticipantMarker(*after(loser), False),
    }
    assert event.partitions == (T0, T1, T2)
    assert bench.verify(winner).status == 2
    assert bench.marked()
    assert bench.effects[c.ENDED] == [c.BatchEnded(JOB, 1, True)]
    assert bench.job.state is S.COMPLETE_COMMIT
    ended = bench.verify(winner)
    assert (ended.status, ended.commit, ended.producer_epoch) == (3, True, 1)
    assert not bench.verify(loser).commit


def test_markers_count_once() -> None:
    bench = JobBench()
    bench.committed(0)
    assert not bench.marked()


@pytest.mark.parametrize("named", ["of another batch", "of another epoch", "unknown"])
def test_a_participant_that_is_not_part_of_the_batch_commits_nothing(named: str) -> None:
    bench = JobBench()
    old, idle = bench.join(0), bench.join(0)
    bench.commit(0, old, sums=WRITTEN)
    bench.marked()
    new = bench.join(1)
    wrong = {
        "of another batch": idle if idle.producer_id != new.producer_id else old,
        "of another epoch": after(new),
        "unknown": ProducerPair(bench.fresh(), 0),
    }[named]
    words = refused(
        bench, lambda: bench.commit(1, new, wrong, sums=WRITTEN), errors.InvalidTxnState
    )
    assert "nothing was committed" in words
    assert bench.job.state is S.ONGOING


def test_a_participant_that_is_named_twice_commits_nothing() -> None:
    """Rule X7: its rows would be counted twice in the sums."""
    bench = JobBench()
    one, other = bench.join(0), bench.join(0)
    words = refused(
        bench, lambda: bench.commit(0, one, other, one, sums=WRITTEN), errors.InvalidRequest
    )
    assert "twice" in words
    assert bench.job.state is S.ONGOING
    bench.commit(0, one, other, sums=WRITTEN)


def test_an_empty_batch_is_recorded() -> None:
    bench = JobBench()
    bench.commit(0)
    assert (bench.job.state, bench.job.last_committed) == (S.COMPLETE_COMMIT, 0)
    assert bench.join_reply(0).committed
    refused(bench, lambda: bench.commit(0, sums=WRITTEN), errors.ReplayDiffers)


def test_an_empty_batch_does_not_revive_participants() -> None:
    bench = JobBench()
    pair = bench.committed(0)
    bench.commit(1)
    with pytest.raises(errors.InvalidProducerEpoch):
        bench.ask(pair, T0)
    assert bench.join(2) == after(pair)


def test_rows_without_an_open_batch_are_refused() -> None:
    bench = JobBench()
    pair = ProducerPair(bench.fresh(), 0)
    refused(bench, lambda: bench.commit(0, pair), errors.InvalidTxnState)
    refused(bench, lambda: bench.commit(0, sums=WRITTEN), errors.InvalidTxnState)


def test_a_repeated_commit_is_answered_with_the_history() -> None:
    bench = JobBench()
    pair = bench.join(0)
    bench.commit(0, pair, sums=WRITTEN)
    for _ in range(2):  # before and after the markers
        before = len(bench.log)
        reply = bench.commit(0, pair, sums=WRITTEN)
        assert reply.already_committed
        assert len(bench.log) == before
        bench.marked()


def test_an_unclean_election_aborts_the_commit() -> None:
    bench = JobBench()
    pair = bench.join(0)
    bench.image = image_of(p1=4)
    with pytest.raises(errors.TransactionAborted, match="t-1 had an unclean leader election"):
        bench.commit(0, pair, sums=WRITTEN)
    assert bench.job.state is S.PREPARE_ABORT
    assert bench.job.last_committed == NONE
    assert not bench.machine.jobs.history(JOB)
    assert not any(each.commit for each in bench.effects[c.PREPARED][0].markers)


def test_an_unclean_election_before_the_join_does_not_count() -> None:
    bench = JobBench()
    bench.image = image_of(p1=4)
    pair = bench.join(0)
    bench.commit(0, pair, sums=WRITTEN)
    assert bench.job.state is S.PREPARE_COMMIT


# -- the same batch again --------------------------------------------------------------------------


def test_a_committed_batch_is_not_opened_again() -> None:
    bench = JobBench()
    bench.committed(0)
    for run in ("r1", "r2"):
        reply = bench.join_reply(0, run)
        assert reply.committed
        assert reply.producer_id == NONE
        assert [(each.rows, each.bytes, each.row_sum) for each in reply.sums] == [(10, 100, 7)]
        assert bench.commit(0, run=run, sums=WRITTEN).already_committed


def test_other_rows_are_refused_with_what_differs() -> None:
    bench = JobBench()
    bench.committed(0)
    words = refused(bench, lambda: bench.commit(0, run="r1", sums=OTHER), errors.ReplayDiffers)
    assert "10 rows of 100 bytes" in words
    assert "11 rows of 110 bytes" in words
    assert "onReplayMismatch=accept" in words


def test_rows_of_another_topic_are_refused() -> None:
    bench = JobBench()
    bench.committed(0)
    words = refused(
        bench, lambda: bench.commit(0, sums={"another": (10, 100, 7)}), errors.ReplayDiffers
    )
    assert "topic id another: committed nothing" in words


def test_only_the_newest_batch_may_be_accepted() -> None:
    bench = JobBench()
    bench.committed(0)
    bench.committed(1)
    refused(bench, lambda: bench.commit(0, sums=OTHER, accept=True), errors.ReplayDiffers)
    assert bench.commit(1, sums=OTHER, accept=True).already_committed
    assert bench.machine.jobs.history(JOB)[1][TOPIC_ID].rows == 10


def test_the_history_is_bounded_and_older_batches_are_refused() -> None:
    bench = JobBench()
    for batch in range(0, 2 * (state.HISTORY_MAX + 1), 2):  # with gaps
        bench.committed(batch)
    assert len(bench.machine.jobs.history(JOB)) == state.HISTORY_MAX
    refused(bench, lambda: bench.join(0), errors.ReplayDiffers)  # fell out
    refused(bench, lambda: bench.join(101), errors.ReplayDiffers)  # in a gap
    assert bench.join_reply(102).committed


def test_another_query_is_refused() -> None:
    bench = JobBench()
    bench.committed(0)
    for act in (lambda: bench.join(1, query="q2"), lambda: bench.commit(1, query="q2")):
        assert "another transactional id" in refused(bench, act, errors.ReplayDiffers)


# -- runs ------------------------------------------------------------------------------------------


def test_a_new_run_aborts_the_open_batch_and_fences_the_old_run() -> None:
    bench = JobBench()
    old = bench.join(0)
    with pytest.raises(errors.ConcurrentTransactions):
        bench.join(0, "r2")
    assert bench.job.state is S.PREPARE_ABORT
    assert bench.job.reason == state.NEWER_RUN
    refused(bench, lambda: bench.commit(0, old, sums=WRITTEN), errors.ProducerFenced)
    bench.marked()
    refused(bench, lambda: bench.join(0), errors.ProducerFenced)
    new = bench.join(0, "r2")
    assert new == after(old)
    bench.commit(0, new, run="r2", sums=WRITTEN)
    assert bench.job.state is S.PREPARE_COMMIT


def test_a_late_commit_of_the_old_run_wins_or_loses_whole() -> None:
    """The old driver commits while the new run replays the batch before."""
    bench = JobBench()
    bench.committed(0)
    pair = bench.join(1)
    assert bench.join_reply(0, "r2").committed  # does not fence: batch 1 is open
    bench.commit(1, pair, sums=WRITTEN)
    bench.marked()
    assert bench.join_reply(1, "r2").committed


def test_the_newest_superseded_runs_are_kept() -> None:
    bench = JobBench()
    for number in range(state.SUPERSEDED_MAX + 2):
        bench.committed(number, f"r{number}")
    assert len(bench.job.superseded) == state.SUPERSEDED_MAX
    refused(bench, lambda: bench.join(99, "r1"), errors.ProducerFenced)


def test_a_second_batch_of_a_run_waits() -> None:
    bench = JobBench()
    bench.join(0)
    refused(bench, lambda: bench.join(1), errors.InvalidTxnState)


# -- aborts and leases -----------------------------------------------------------------------------


def test_a_driver_aborts_its_open_batch_only() -> None:
    bench = JobBench()
    assert not bench.give_up(0).committed
    bench.join(0)
    for batch, run in ((1, "r1"), (0, "r0")):
        bench.give_up(batch, run)
        assert bench.job.state is S.ONGOING
    bench.give_up(0)
    assert bench.job.state is S.PREPARE_ABORT
    bench.marked()
    refused(bench, lambda: bench.join(0), errors.TransactionAborted)
    bench.join(0, "r2")


def test_an_abort_cannot_undo_a_commit() -> None:
    bench = JobBench()
    bench.committed(0)
    before = len(bench.log)
    assert bench.give_up(0).committed
    assert len(bench.log) == before


def test_a_lease_that_ends_aborts_and_names_the_options() -> None:
    bench = JobBench()
    pair = bench.join(0)
    assert bench.lease_ends() == 1
    bench.marked()
    for act in (lambda: bench.join(0), lambda: bench.commit(0, pair, sums=WRITTEN)):
        words = refused(bench, act, errors.TransactionTimedOut)
        assert "participant_lease_ms" in words
        assert "participant_transaction_max_ms" in words
    assert bench.join(0, "r2") == after(pair)


def test_a_run_that_was_away_may_write_a_batch_that_another_run_lost() -> None:
    bench = JobBench()
    bench.committed(0)
    bench.join(1)
    bench.lease_ends()
    bench.marked()
    assert bench.join_reply(0, "r2").committed  # the new run begins with the batch before
    bench.join(1, "r2")


def test_a_lease_of_an_earlier_transaction_aborts_nothing() -> None:
    bench = JobBench()
    bench.committed(0)
    bench.join(1)
    assert bench.run(c.ExpireBatches(((JOB, 1), ("none", 1)))) == 0
    assert bench.job.state is S.ONGOING


def test_an_operator_aborts_and_forgets_a_job() -> None:
    bench = JobBench()
    bench.join(0)
    refused(bench, lambda: bench.forget(JOB), errors.InvalidTxnState)
    bench.abort(JOB)
    refused(bench, lambda: bench.abort(JOB), errors.ConcurrentTransactions)
    bench.marked()
    refused(bench, lambda: bench.abort(JOB), errors.InvalidTxnState)
    bench.forget(JOB)
    assert not bench.machine.jobs.items()
    assert not bench.machine.jobs.participants(JOB)
    bench.init(JOB)  # the name is free


# -- questions of leaders --------------------------------------------------------------------------


def test_a_partition_that_the_topic_gained_is_registered_by_its_question() -> None:
    bench = JobBench()
    pair = bench.join(0)
    added = PartitionKey(TOPIC_ID, 3)
    bench.ask(pair, added)
    assert added in bench.job.partitions
    bench.commit(0, pair, sums=WRITTEN)
    assert added in bench.effects[c.PREPARED][0].partitions
    with pytest.raises(errors.InvalidProducerEpoch):
        bench.ask(pair, T0)


def test_the_end_of_an_older_transaction_is_an_abort_that_changes_nothing() -> None:
    """Each partition had its marker before the next transaction began."""
    bench = JobBench()
    old = bench.committed(0)
    bench.join(1)
    answer = bench.verify(old)
    assert (answer.status, answer.commit, answer.producer_epoch) == (3, False, old.epoch + 1)


def test_after_an_unclean_election_of_the_coordinator_nothing_is_said() -> None:
    bench = JobBench(rules=JobBench().rules._replace(unclean_epoch=4))
    old = bench.committed(0)
    assert bench.verify(old).commit
    bench.commit(1)  # an empty batch is a transaction, too: the end of the one before is unknown
    with pytest.raises(errors.CoordinatorUnavailable):
        bench.verify(old)
    bench.join(2)
    with pytest.raises(errors.CoordinatorUnavailable):
        bench.verify(old)


def test_after_an_unclean_election_of_the_coordinator_tasks_get_other_producer_ids() -> None:
    """Rule X1: later epochs of the old ones may have been used, and their records are lost."""
    bench = JobBench()
    old = bench.committed(0)
    again = bench.elected_uncleanly()
    pair = again.join(1)
    assert pair.producer_id != old.producer_id
    assert pair.epoch == 0
    assert bench.join(1) == after(old), "without the election, the pool has it"


# -- reads and time --------------------------------------------------------------------------------


def test_resume_gives_open_and_prepared_jobs() -> None:
    bench = JobBench()
    pair = bench.join(0)
    assert bench.run(c.Resume()) == (c.BatchBegan(JOB, 1, NOW),)
    bench.commit(0, pair, sums=WRITTEN)
    [event] = bench.effects[c.PREPARED]
    assert bench.run(c.Resume()) == (event,)
    bench.marked()
    assert bench.run(c.Resume()) == ()


def test_a_job_is_described_and_listed() -> None:
    bench = JobBench()
    pairs = sorted([bench.join(0), bench.join(0)])
    [found] = bench.run(c.DescribeTransactions((JOB,)))
    assert (found.state, found.producer_id) == ("Ongoing", NONE)
    assert (found.job.query, found.job.run, found.job.batch) == ("q", "r1", 0)
    assert (found.job.participants, found.job.last_committed) == (2, NONE)
    assert [(e.producer_id, e.producer_epoch, e.heard_ago_ms) for e in found.job.joined] == [
        (*pair, NONE) for pair in pairs
    ]
    assert len(found.partitions) == 3
    bench.now += 5_000
    request = wire.ListTransactionsRequest(states=["Ongoing"], open_longer_ms=4_000)
    [row] = bench.run(c.ListTransactions(request))
    assert (row.transactional_id, row.producer_id, row.state) == (JOB, NONE, "Ongoing")
    assert row.job
    asked = [pairs[1].producer_id, pairs[0].producer_id, 1]
    rows = bench.run(c.ListTransactions(wire.ListTransactionsRequest(producer_ids=asked)))
    assert [(each.transactional_id, each.producer_id) for each in rows] == [
        (JOB, pair.producer_id) for pair in pairs
    ]
    bench.commit(0, *pairs, sums=WRITTEN)
    bench.marked()
    [found] = bench.run(c.DescribeTransactions((JOB,)))
    assert (found.job.last_committed, list(found.job.joined)) == (0, [])


def test_the_job_of_a_batch_write_expires_and_that_of_a_query_does_not() -> None:
    bench = JobBench()
    bench.committed(0)
    bench.now += 100 * c.BATCH_WRITE_EXPIRATION_MS
    assert bench.run(c.ForgetExpired()) == 0
    bench.forget(JOB)
    pair = bench.join(0, batch_write=True)
    bench.commit(0, pair, sums=WRITTEN)
    bench.marked()
    bench.now += c.BATCH_WRITE_EXPIRATION_MS
    assert bench.run(c.ForgetExpired()) == 1
    assert not bench.machine.jobs.items()
