"""Histories of jobs that each check must refuse, and their lawful neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pk.sim.checkers import ReadRow, Violation
from pk.sim.job_checkers import (
    KEPT_BATCHES,
    HistoriesCheck,
    check_decisions,
    check_jobs,
    without_jobs,
)
from pk.sim.job_history import Answer, Attempt, CommitAsk, JobHistory, PlannedBatch
from pk.sim.oracle import RecordId, Topic
from pk.sim.transaction_checkers import DecisionsCheck
from pk.sim.transaction_history import TransactionRecord
from pk.types import NONE, RowSums

JOB, PLACE, STATE = "job0", ("t", 0), ("state", 3)


class Bench:
    """A history of one job, whose rows are sent, and appear, as a test says."""

    def __init__(self) -> None:
        self.lost: dict[tuple[str, int], float] = {}
        topics = {"t": Topic("t", True, False, life=1, topic_id="id-t", partitions=2)}
        self.history = JobHistory(
            topics, lambda *key: self.lost.get(key, NONE), lambda _: STATE, random.Random
        )
        self.rows: dict[tuple[str, int], list[ReadRow]] = {PLACE: [], ("t", 1): []}
        self.run = self.history.begin_run(JOB, 0)

    def batch(self) -> PlannedBatch:
        """Plan a batch that has rows."""
        while True:
            batch = self.history.next_batch(JOB, ["t"], (20, 30), 10)
            if len(list(batch.rows)) > 1:
                return batch
            self.history.complete(batch)

    def attempt(
        self, batch: PlannedBatch, task: int = 0, *, at_ms: float = 20, run: str | None = None
    ) -> Attempt:
        """Send all rows of a task."""
        number = len(batch.attempts)
        made = Attempt(f"a{batch.number}.{number}", run or self.run, task, (7 + number, 1))
        batch.attempts.append(made)
        for row in batch.tasks[task]:
            sent = TransactionRecord(row.id, "t", 0, 100 + number, at_ms)
            self.history.send(batch, made, sent)
        return made

    def attempts(self, batch: PlannedBatch, at_ms: float = 20, run: str = "") -> list[Attempt]:
        tasks = range(len(batch.tasks))
        return [self.attempt(batch, each, at_ms=at_ms, run=run or None) for each in tasks]

    def ask(
        self, batch: PlannedBatch, named: Sequence[Attempt], answer: Answer, at_ms: float = 30
    ) -> None:
        batch.asks.append(CommitAsk(named[0].run, tuple(named), at_ms, answer))
        batch.committed = batch.committed or answer in (Answer.COMMITTED, Answer.ALREADY)

    def appear(self, named: Sequence[Attempt], *, without: int = 0) -> None:
        records = [each for attempt in named for each in attempt.records]
        for each in records[: len(records) - without]:
            rows = self.rows[PLACE]
            rows.append(ReadRow(len(rows), each.id, each.digest))

    def check(self) -> None:
        check_jobs(self.history, self.rows)

    def refused(self, rule: str) -> None:
        with pytest.raises(Violation, match=rf"^{rule}: "):
            self.check()


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("answer", [Answer.COMMITTED, Answer.ALREADY, Answer.NONE])
def test_a_batch_may_appear_whole(bench: Bench, answer: Answer) -> None:
    """Rule X7: nothing was heard, or that it is committed."""
    batch = bench.batch()
    named = bench.attempts(batch)
    bench.ask(batch, named, answer)
    bench.appear(named)
    bench.check()


def test_a_batch_appears_as_often_as_it_is_committed(bench: Bench) -> None:
    batch = bench.batch()
    one, two = bench.attempts(batch), bench.attempts(batch)
    bench.ask(batch, two, Answer.COMMITTED)
    bench.refused("V24")
    bench.appear(two)
    bench.check()
    bench.appear(one)
    bench.refused("V24")


def test_a_row_above_the_last_stable_offset_is_not_missing(bench: Bench) -> None:
    batch = bench.batch()
    named = bench.attempts(batch)
    bench.ask(batch, named, Answer.COMMITTED)
    bench.appear(named, without=1)
    bench.refused("V24")
    (last,) = [row.id for row in batch.rows if row.id not in {r.id for r in bench.rows[PLACE]}]
    check_jobs(bench.history, bench.rows, {last})


def test_rows_of_attempts_that_no_commit_names_are_refused(bench: Bench) -> None:
    batch = bench.batch()
    one, two = bench.attempts(batch), bench.attempts(batch)
    bench.appear(one)
    bench.refused("V24")
    bench.ask(batch, two, Answer.NONE)
    bench.refused("V24")
    bench.ask(batch, one, Answer.REFUSED)
    bench.refused("V24")
    bench.ask(batch, one, Answer.NONE)
    bench.check()
    bench.ask(batch, two, Answer.COMMITTED)
    bench.refused("V24")


def test_a_torn_batch_is_refused_unless_records_may_be_lost(bench: Bench) -> None:
    batch = bench.batch()
    named = bench.attempts(batch)
    bench.ask(batch, named, Answer.NONE)
    bench.appear(named, without=1)
    bench.refused("V24")
    bench.lost[STATE] = 25
    bench.check()
    bench.lost[STATE] = 5  # before the batch began
    bench.refused("V24")


def test_two_calls_of_commit_do_not_both_commit_a_batch(bench: Bench) -> None:
    batch = bench.batch()
    named = bench.attempts(batch)
    bench.ask(batch, named, Answer.COMMITTED)
    bench.ask(batch, named, Answer.ALREADY)
    bench.appear(named)
    bench.check()
    bench.ask(batch, named, Answer.COMMITTED)
    bench.refused("V25")


@pytest.mark.parametrize(("sent_ms", "asked_ms", "rule"), [(60, 70, "V21"), (20, 60, "V21")])
def test_nothing_of_a_fenced_run_appears(
    bench: Bench, sent_ms: float, asked_ms: float, rule: str
) -> None:
    """Rule X8: the later run was heard to be current at 50."""
    batch = bench.batch()
    bench.history.current(batch, bench.run, 15)
    later = bench.history.begin_run(JOB, 40)
    named = bench.attempts(batch, sent_ms)
    bench.ask(batch, named, Answer.NONE, asked_ms)
    bench.appear(named)
    bench.check()  # the later run was not heard yet
    bench.history.current(batch, later, 50)
    bench.refused(rule)
    batch.asks[0].asked_ms = 45
    if sent_ms < 50:
        bench.check()


def test_a_run_that_began_before_another_was_current_does_not_fence_it(bench: Bench) -> None:
    """Their order is not known."""
    batch = bench.batch()
    other = bench.history.begin_run(JOB, 10)
    bench.history.current(batch, bench.run, 15)
    bench.history.current(batch, other, 20)
    assert bench.history.fenced_ms(JOB, bench.run) is None


def test_batches_stand_in_their_order(bench: Bench) -> None:
    first = bench.batch()
    named = bench.attempts(first)
    bench.ask(first, named, Answer.COMMITTED)
    bench.history.complete(first)
    second = bench.batch()
    later = bench.attempts(second)
    bench.ask(second, later, Answer.COMMITTED)
    bench.appear(later)
    bench.appear(named)
    bench.refused("V7")
    bench.rows[PLACE].clear()
    bench.appear(named)
    bench.appear(later)
    bench.check()


def test_rows_that_no_job_planned_are_left_to_the_other_checks(bench: Bench) -> None:
    batch = bench.batch()
    named = bench.attempts(batch)
    bench.appear(named)
    plain = ReadRow(99, RecordId("id0.1.1", 0), 5)
    bench.rows[PLACE].append(plain)
    assert without_jobs(bench.history, bench.rows) == {PLACE: [plain], ("t", 1): []}


SUMS = {"id-t": RowSums(3, 30, 300)}


def test_a_coordinator_keeps_what_it_has_committed() -> None:
    """Rule X9: the history and the last committed batch."""
    check = HistoriesCheck()
    check.seen("n1", JOB, 1, {0: SUMS, 1: {}})
    check.seen("n2", JOB, 2, {0: SUMS, 1: {}, 2: SUMS})
    with pytest.raises(Violation, match=r"^V25: n1: job0 committed 2 last, not 1"):
        check.seen("n1", JOB, 1, {0: SUMS, 1: {}})
    with pytest.raises(Violation, match=r"^V25: .* batch 1 of job0"):
        check.seen("n1", JOB, 2, {0: SUMS, 2: SUMS})
    with pytest.raises(Violation, match=r"^V25: .* batch 0 of job0"):
        check.seen("n1", JOB, 2, {0: {}, 1: {}, 2: SUMS})
    with pytest.raises(Violation, match=r"^V25: .* lacks 2"):
        check.seen("n1", JOB, 2, {0: SUMS, 1: {}})


def test_a_coordinator_may_drop_batches_below_the_newest_hundred() -> None:
    check = HistoriesCheck()
    check.seen("n1", JOB, 1, {0: SUMS, 1: SUMS})
    check.seen("n1", JOB, KEPT_BATCHES, dict.fromkeys(range(1, KEPT_BATCHES + 1), SUMS))
    check.seen("n1", JOB, KEPT_BATCHES + 1, dict.fromkeys(range(2, KEPT_BATCHES + 2), SUMS))
    with pytest.raises(Violation, match=r"^V25: "):
        check.seen("n1", JOB, KEPT_BATCHES + 1, dict.fromkeys(range(3, 102), SUMS))


def test_one_transaction_commits_a_batch() -> None:
    check = HistoriesCheck()
    check.committed("n1", JOB, 4, 9)
    check.committed("n2", JOB, 4, 9)
    with pytest.raises(Violation, match=r"^V25: n2: transactions 9 and 10"):
        check.committed("n2", JOB, 4, 10)


def test_no_history_is_expected_of_a_coordinator_that_lost_decisions(bench: Bench) -> None:
    batch = bench.batch()
    batch.committed = True
    bench.lost[STATE] = batch.began_ms - 1
    HistoriesCheck().compare(bench.history)


def test_a_heard_commit_is_in_the_history_with_the_planned_sums(bench: Bench) -> None:
    batch = bench.batch()
    batch.committed = True
    check = HistoriesCheck()
    with pytest.raises(Violation, match="no coordinator has it"):
        check.compare(bench.history)
    check.seen("n1", JOB, batch.number, {batch.number: bench.history.sums(batch)})
    check.compare(bench.history)
    check = HistoriesCheck()
    check.seen("n1", JOB, batch.number, {batch.number: SUMS})
    with pytest.raises(Violation, match=r"^V25: .* has the sums"):
        check.compare(bench.history)


def test_a_decision_names_the_participants_of_the_commit(bench: Bench) -> None:
    """Rule X5: the commit decides about every participant of the batch."""
    batch = bench.batch()
    named, other = bench.attempts(batch), bench.attempt(batch)
    bench.ask(batch, named, Answer.COMMITTED)
    right, wrong = DecisionsCheck(), DecisionsCheck()
    right.decided(named[0].pair, True, "n1", lossy=False)
    right.decided(other.pair, False, "n1", lossy=False)
    check_decisions(bench.history, right)
    wrong.decided(other.pair, True, "n1", lossy=False)
    with pytest.raises(Violation, match=r"^V20: "):
        check_decisions(bench.history, wrong)
