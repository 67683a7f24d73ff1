"""Jobs whose batch a Delta table decides: log and table together (X11)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pk import errors
from pk.server.transactions import commands as c
from pk.server.transactions.participants import records
from pk.server.transactions.participants.awaited_batches import REPEAT_MS, AwaitedBatches
from pk.server.transactions.participants.state import AWAITING_TABLE, PreparedTable
from pk.server.transactions.state import ProducerPair, TransactionState
from pk.transactional_ids import FoundBy
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.transactions.coordinator_bench import NOW, TOPIC_ID, after, image_of
from tests.unit.server.transactions.test_participants import (
    JOB,
    NOTHING,
    OTHER,
    WRITTEN,
    JobBench,
    Sums,
    refused,
)

S = TransactionState
TABLE = PreparedTable("file:///lake/t", "d1", "app", 0)


class TableBench(JobBench):
    """One machine, with the requests of drivers that commit to a table, too."""

    def prepare(
        self, batch: int, *named: ProducerPair, run: str = "r1", sums: Sums = WRITTEN,
        table: PreparedTable = TABLE, accept: bool = False,
    ) -> wire.PrepareParticipantsReply:  # fmt: skip
        request = wire.PrepareParticipantsRequest(
            batch=self.asked(batch, run), accept_mismatch=accept,
            participants=[
                wire.Participant(producer_id=each.producer_id, producer_epoch=each.epoch)
                for each in named
            ],
            sums=[
                wire.TopicSums(topic_id=topic, rows=rows, bytes=size, row_sum=total)
                for topic, (rows, size, total) in sums.items()
            ],
            table=records.table_to_wire(table),
        )  # fmt: skip
        reply: wire.PrepareParticipantsReply = self.run(c.PrepareParticipants(request, self.image))
        return reply

    def prepared(self, batch: int = 0, run: str = "r1") -> ProducerPair:
        """A prepared batch with one participant."""
        pair = self.join(batch, run)
        self.prepare(batch, pair, run=run)
        return pair

    def evidence(
        self, transaction: int = NONE, table: PreparedTable = TABLE, found_by: int = FoundBy.DRIVER
    ) -> wire.TableEvidence:
        number = self.job.transaction if transaction == NONE else transaction
        return wire.TableEvidence(
            table=records.table_to_wire(table), transaction=number, found_by=found_by
        )

    def table_has(self, batch: int, run: str = "r1", **said: Any) -> wire.CommitParticipantsReply:
        request = wire.CommitParticipantsRequest(
            batch=self.asked(batch, run), evidence=self.evidence(**said)
        )
        reply: wire.CommitParticipantsReply = self.run(c.CommitParticipants(request, self.image))
        return reply

    def table_has_not(
        self, batch: int, run: str = "r1", **said: Any
    ) -> wire.AbortParticipantsReply:
        request = wire.AbortParticipantsRequest(
            batch=self.asked(batch, run), evidence=self.evidence(**said)
        )
        reply: wire.AbortParticipantsReply = self.run(c.AbortParticipants(request))
        return reply


# -- preparing -------------------------------------------------------------------------------------


def test_a_prepared_batch_is_undecided_and_takes_no_more_tasks() -> None:
    bench = TableBench()
    winner, loser = bench.join(0), bench.join(0)
    reply = bench.prepare(0, winner)
    assert (reply.transaction, reply.already_committed) == (1, False)
    assert bench.effects == {c.BATCH_AWAITS: [c.BatchAwaits(JOB, 1, 0, TABLE.url, NOW)]}
    assert (bench.job.state, bench.job.open, bench.job.last_committed) == (S.ONGOING, False, NONE)
    assert not bench.machine.jobs.history(JOB)
    assert bench.verify(winner).status == 1
    refused(bench, lambda: bench.join(0), errors.InvalidTxnState)
    for pair in (winner, loser):
        with pytest.raises(errors.InvalidProducerEpoch):
            bench.ask(pair, PartitionKey(TOPIC_ID, 3))


def test_a_commit_on_evidence_ends_the_prepared_participants() -> None:
    bench = TableBench()
    winner, loser = bench.join(0), bench.join(0)
    bench.prepare(0, winner)
    assert not bench.table_has(0).already_committed
    [event] = bench.effects[c.PREPARED]
    assert set(event.markers) == {
        c.ParticipantMarker(*after(winner), True),
        c.ParticipantMarker(*after(loser), False),
    }
    assert bench.job.awaited is None
    assert bench.marked()
    assert bench.job.state is S.COMPLETE_COMMIT
    assert bench.machine.jobs.history(JOB)[0][TOPIC_ID].rows == 10
    assert bench.verify(winner).commit
    assert bench.table_has(0).already_committed
    assert bench.table_has_not(0).committed


def test_an_abort_on_evidence_lets_the_batch_be_written_again() -> None:
    bench = TableBench()
    pair = bench.prepared()
    assert not bench.table_has_not(0).committed
    assert not any(each.commit for each in bench.effects[c.PREPARED][0].markers)
    assert bench.marked()
    assert (bench.job.state, bench.job.awaited) == (S.COMPLETE_ABORT, None)
    assert "the table file:///lake/t did not have it" in bench.job.reason
    before = len(bench.log)
    assert not bench.table_has_not(0).committed
    assert len(bench.log) == before
    refused(bench, lambda: bench.table_has(0), errors.TransactionAborted)
    again = bench.join(0, "r2")
    assert again == after(pair)
    bench.prepare(0, again, run="r2")
    bench.table_has(0, "r2")
    assert bench.job.last_committed == 0


def test_evidence_of_an_earlier_transaction_changes_nothing() -> None:
    """The resolver read the table; meanwhile the driver aborted, and prepared the batch again."""
    bench = TableBench()
    bench.prepared()
    bench.table_has_not(0)
    bench.marked()
    bench.prepare(0, bench.join(0, "r2"), run="r2")
    for act in (
        lambda: bench.table_has_not(0, transaction=1),
        lambda: bench.table_has(0, transaction=1),
    ):
        refused(bench, act, errors.InvalidTxnState)
    assert bench.job.awaited is not None


@pytest.mark.parametrize(
    "table",
    [
        TABLE._replace(url="file:///lake/u"),
        TABLE._replace(table_id="d2"),
        TABLE._replace(app="other"),
        TABLE._replace(version=1),
    ],
)
def test_evidence_about_another_table_changes_nothing(table: PreparedTable) -> None:
    bench = TableBench()
    bench.prepared()
    refused(bench, lambda: bench.table_has(0, table=table), errors.InvalidTxnState)
    refused(bench, lambda: bench.table_has_not(0, table=table), errors.InvalidTxnState)


def test_evidence_about_a_batch_that_is_not_prepared_changes_nothing() -> None:
    bench = TableBench()
    bench.join(0)
    refused(bench, lambda: bench.table_has(0), errors.InvalidTxnState)
    refused(bench, lambda: bench.table_has_not(0), errors.InvalidTxnState)
    assert bench.job.open


def test_evidence_about_an_unknown_job_changes_nothing() -> None:
    bench = TableBench()
    refused(bench, lambda: bench.table_has(0, transaction=1), errors.InvalidTxnState)
    refused(bench, lambda: bench.table_has_not(0, transaction=1), errors.InvalidTxnState)


def test_nothing_but_evidence_ends_a_prepared_batch() -> None:
    bench = TableBench()
    pair = bench.prepared()
    bench.now += 10 * 86_400_000
    assert bench.lease_ends() == 0
    assert not bench.give_up(0).committed
    assert refused(bench, lambda: bench.commit(0, pair, sums=WRITTEN), errors.InvalidTxnState)
    assert "pk transactions resolve" in refused(
        bench, lambda: bench.abort(JOB), errors.InvalidTxnState
    )
    assert bench.run(c.ForgetExpired()) == 0
    refused(bench, lambda: bench.forget(JOB), errors.InvalidTxnState)
    for batch in (0, 1):  # of a new run
        words = refused(bench, lambda at=batch: bench.join(at, "r2"), errors.ConcurrentTransactions)
        assert TABLE.url in words
        assert f"pk transactions resolve {JOB}" in words
    refused(bench, lambda: bench.prepare(0, pair, run="r2"), errors.ConcurrentTransactions)
    refused(bench, lambda: bench.commit(0, run="r2"), errors.ConcurrentTransactions)
    assert bench.job.run == "r1"
    bench.table_has(0)
    assert bench.job.last_committed == 0


def test_an_unclean_election_before_the_preparation_aborts() -> None:
    bench = TableBench()
    pair = bench.join(0)
    bench.image = image_of(p1=4)
    with pytest.raises(errors.TransactionAborted, match="unclean leader election"):
        bench.prepare(0, pair)
    assert bench.job.state is S.PREPARE_ABORT
    assert bench.job.awaited is None


def test_an_unclean_election_after_the_preparation_is_reported() -> None:
    bench = TableBench()
    bench.prepared()
    bench.image = image_of(p1=4)
    assert "t-1 had an unclean leader election" in bench.table_has(0).warning
    assert bench.job.state is S.PREPARE_COMMIT


def test_a_repeated_preparation_is_answered_and_another_one_refused() -> None:
    bench = TableBench()
    pair, other = bench.join(0), bench.join(0)
    number = bench.prepare(0, pair).transaction
    before = len(bench.log)
    assert bench.prepare(0, pair).transaction == number
    assert len(bench.log) == before
    refused(bench, lambda: bench.prepare(0, pair, other), errors.InvalidTxnState)
    moved = TABLE._replace(url="file:///lake/u")
    refused(bench, lambda: bench.prepare(0, pair, table=moved), errors.InvalidTxnState)


def test_a_committed_batch_is_not_prepared_again() -> None:
    bench = TableBench()
    bench.prepared()
    bench.table_has(0)
    bench.marked()
    assert bench.join_reply(0, "r2").committed
    assert bench.prepare(0, run="r2").already_committed
    refused(bench, lambda: bench.prepare(0, run="r2", sums=OTHER), errors.ReplayDiffers)
    assert bench.prepare(0, run="r2", sums=OTHER, accept=True).already_committed


def test_a_preparation_needs_participants_of_the_open_batch() -> None:
    bench = TableBench()
    refused(bench, lambda: bench.prepare(0, sums=NOTHING), errors.InvalidTxnState)
    pair = bench.join(0)
    refused(bench, lambda: bench.prepare(0, sums=NOTHING), errors.InvalidTxnState)
    refused(bench, lambda: bench.prepare(0, after(pair)), errors.InvalidTxnState)
    assert bench.job.open


@pytest.mark.parametrize(
    "table",
    [
        TABLE._replace(url=""),
        TABLE._replace(url="x" * 2_049),
        TABLE._replace(table_id=""),
        TABLE._replace(app="x" * 250),
        TABLE._replace(version=-1),
    ],
)
def test_a_table_that_cannot_be_is_refused(table: PreparedTable) -> None:
    bench = TableBench()
    pair = bench.join(0)
    refused(bench, lambda: bench.prepare(0, pair, table=table), errors.InvalidRequest)


# -- reads -----------------------------------------------------------------------------------------


def test_a_prepared_batch_is_described_listed_and_resumed() -> None:
    bench = TableBench()
    bench.prepared()
    [found] = bench.run(c.DescribeTransactions((JOB,)))
    assert (found.state, found.job.batch, found.job.participants) == (AWAITING_TABLE, 0, 1)
    awaited = found.job.awaited
    assert records.table_of(awaited.table) == TABLE
    assert (awaited.transaction, awaited.since_ms) == (1, NOW)
    [row] = bench.run(c.ListTransactions(wire.ListTransactionsRequest(states=[AWAITING_TABLE])))
    assert (row.transactional_id, row.state) == (JOB, AWAITING_TABLE)
    assert not bench.run(c.ListTransactions(wire.ListTransactionsRequest(states=["Ongoing"])))
    assert bench.run(c.Resume()) == (c.BatchAwaits(JOB, 1, 0, TABLE.url, NOW),)
    bench.table_has_not(0, found_by=FoundBy.OPERATOR)
    [found] = bench.run(c.DescribeTransactions((JOB,)))
    assert (found.state, found.reason) == ("PrepareAbort", "aborted by an operator")
    assert not found.job.HasField("awaited")


def test_a_batch_is_late_by_either_clock_and_reported_once_a_minute() -> None:
    batches = AwaitedBatches(1_000)
    event = c.BatchAwaits("j", 3, 0, "u", 50_000)
    batches.began(event, 10)
    assert batches.late(51_000, 1_010) == []
    assert batches.late(51_001, 20) == [event]
    assert batches.late(60_000, 20 + REPEAT_MS - 1) == []
    batches.began(event, 9_999)  # known
    assert batches.late(60_000, 20 + REPEAT_MS) == [event]
    batches.ended("j", 2)
    assert len(batches) == 1
    batches.ended("j", 3)
    assert len(batches) == 0
    batches.began(event._replace(transaction=4), 0)  # prepared by a clock that was ahead
    assert batches.late(0, 1_000) == []
    assert len(batches.late(0, 1_001)) == 1


# -- histories -------------------------------------------------------------------------------------


ACTS = ("join", "prepare", "table", "has", "stale", "has not", "expire", "give up", "mark")


class History:
    """A job with a table that is read truly, at any time, and told late."""

    def __init__(self) -> None:
        self.bench = TableBench()
        self.bench.committed(0)
        self.pair = self.bench.join(1)
        self.run = 1
        self.in_table = {0}
        self.stale: list[tuple[int, int, bool]] = []  #: batch, transaction, the table had it

    def act(self, what: str, rng: random.Random) -> None:
        bench, job = self.bench, self.bench.job
        self.run += rng.random() < 0.1
        run = f"r{max(1, self.run - (rng.random() < 0.2))}"
        table = TABLE._replace(version=job.batch)
        if what == "join":
            reply = bench.join_reply(job.last_committed + 1, run)
            self.pair = ProducerPair(reply.producer_id, reply.producer_epoch)
        elif what == "prepare":
            bench.prepare(job.batch, self.pair, run=job.run, table=table)
        elif what == "expire":
            bench.lease_ends()
        elif what == "give up":
            bench.give_up(job.batch, run)
        elif what == "mark":
            bench.marked()
        elif what == "stale" and self.stale:
            batch, number, had = self.stale[max(0, len(self.stale) - 3)]
            self.tell(batch, number, had=had)
        elif job.awaited is not None:
            if what == "table":  # only the driver of a prepared batch commits to the table
                self.in_table.add(job.batch)
            had = job.batch in self.in_table
            self.stale.append((job.batch, job.transaction, had))
            if what == ("has" if had else "has not"):
                self.tell(job.batch, job.transaction, had=had)

    def tell(self, batch: int, number: int, *, had: bool) -> None:
        """Bring evidence.  What was read before the commit comes only after the transaction."""
        job, table = self.bench.job, TABLE._replace(version=batch)
        if had:
            self.bench.table_has(batch, transaction=number, table=table)
        elif batch not in self.in_table or job.transaction != number:
            self.bench.table_has_not(batch, transaction=number, table=table)


@pytest.mark.parametrize("seed", range(3))
def test_log_and_table_end_equal_in_every_history(seed: int) -> None:
    """Drivers, leases, markers and evidence in any order.

    Every replay, also of the compacted log, gives an equal machine (Bench.run).
    """
    history, rng = History(), random.Random(seed)
    for _ in range(400):
        try:
            history.act(rng.choice((*ACTS, *ACTS[:4])), rng)
        except errors.PkError:
            continue
    job = history.bench.job
    committed = set(history.bench.machine.jobs.history(JOB))
    waiting = {job.batch} if job.awaited is not None else set()
    assert committed <= history.in_table
    assert history.in_table - committed <= waiting
    assert len(committed) > 3
    assert len(history.stale) > 10
