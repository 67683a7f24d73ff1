"""Histories of log and table that each check must refuse, and their lawful neighbours."""

from __future__ import annotations

import random

import pytest

from pk.sim.checkers import Violation
from pk.sim.job_history import JobHistory, PlannedBatch
from pk.sim.lake import LakeCommit, LakeRead
from pk.sim.oracle import RecordId, Topic
from pk.sim.together_checkers import EvidenceCheck, check_tables, check_visible
from pk.types import NONE

JOB, STATE = "both0", ("state", 3)


class Bench:
    """A history with one batch that has rows, and a table."""

    def __init__(self) -> None:
        self.lost: dict[tuple[str, int], float] = {}
        topics = {"t": Topic("t", True, False, life=1, topic_id="id-t", partitions=2)}
        self.history = JobHistory(
            topics, lambda *key: self.lost.get(key, NONE), lambda _: STATE, random.Random
        )
        self.history.begin_run(JOB, 0)
        self.decided: set[int] = set()
        self.commits: list[LakeCommit] = []
        self.batch = self.planned()

    def planned(self) -> PlannedBatch:
        while True:
            batch = self.history.next_batch(JOB, ["t"], (20, 30), 10)
            if len(list(batch.rows)) > 1:
                return batch
            self.both(batch)

    def both(self, batch: PlannedBatch) -> None:
        self.decided.add(batch.number)
        self.append(batch)
        self.history.complete(batch)

    def append(self, batch: PlannedBatch, *, times: int = 1) -> None:
        rows: tuple[RecordId, ...] = tuple(row.id for row in batch.rows)
        self.commits.append(LakeCommit(20, JOB, batch.number, rows * times))

    def check(self, *, complete: bool = True) -> None:
        decided = {JOB: self.decided}
        check_tables(self.history, [JOB], self.commits, decided, complete=complete)

    def refused(self, words: str, *, complete: bool = True) -> None:
        with pytest.raises(Violation, match=rf"^V34: .*{words}"):
            self.check(complete=complete)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_batch_of_both_is_lawful(bench: Bench) -> None:
    bench.both(bench.batch)
    bench.check()


def test_a_batch_of_the_log_alone_is_refused(bench: Bench) -> None:
    bench.decided.add(bench.batch.number)
    bench.refused("not in the table", complete=False)


def test_a_batch_of_the_table_alone_is_lawful_until_its_query_returned(bench: Bench) -> None:
    bench.append(bench.batch)
    bench.check(complete=False)
    bench.refused("not in the log")


def test_a_batch_of_neither_is_lawful_until_its_query_returned(bench: Bench) -> None:
    bench.check(complete=False)
    bench.refused("in neither")


def test_rows_that_the_table_has_twice_are_refused(bench: Bench) -> None:
    bench.decided.add(bench.batch.number)
    bench.append(bench.batch, times=2)
    bench.refused("rows")


def test_rows_under_another_txn_are_refused(bench: Bench) -> None:
    rows = tuple(row.id for row in bench.batch.rows)
    bench.commits.append(LakeCommit(20, "other", bench.batch.number, rows))
    bench.refused("rows", complete=False)


def test_what_a_lost_coordinator_decided_is_not_judged(bench: Bench) -> None:
    bench.decided.add(bench.batch.number)
    bench.lost[STATE] = 15
    bench.check()


def test_visible_rows_are_those_of_the_table(bench: Bench) -> None:
    first, *others = (row.id for row in bench.batch.rows)

    def check(visible: list[RecordId], waiting: tuple[RecordId, ...] = ()) -> None:
        check_visible(bench.history, [JOB], bench.commits, visible, waiting)

    bench.both(bench.batch)
    every = [row.id for batch in bench.history.batches() for row in batch.rows]
    check(every)
    without = [each for each in every if each != first]
    check(without, (first,))
    with pytest.raises(Violation, match=r"^V34: "):
        check(without)
    bench.commits.clear()
    check([])
    with pytest.raises(Violation, match=r"^V34: "):
        check(others)


# -- V35 -------------------------------------------------------------------------------------------


class Evidence:
    """Transaction 5 of batch 2, asked for at 100 and seen waiting."""

    def __init__(self) -> None:
        self.there = False
        self.reads: list[LakeRead] = []
        self.check = EvidenceCheck(lambda *_: self.there, self.reads)
        self.check.asked(JOB, 2, "r1", 100)
        self.check.asked(JOB, 2, "r1", 180)
        self.check.prepared(JOB, 5, 2, "r1")

    def read(self, at_ms: float, version: int, app: str = JOB) -> None:
        self.reads.append(LakeRead(at_ms, app, version))

    def ends(self, *, commit: bool, at_ms: float = 300) -> None:
        self.check.ended("n1", JOB, 5, at_ms, commit=commit)

    def refused(self, *, commit: bool) -> None:
        with pytest.raises(Violation, match=r"^V35: "):
            self.ends(commit=commit)


def test_a_commit_needs_the_batch_in_the_table() -> None:
    Evidence().refused(commit=True)
    lawful = Evidence()
    lawful.there = True
    lawful.ends(commit=True)
    assert lawful.check.ended_by == {True: 1, False: 0}


@pytest.mark.parametrize("version", [NONE, 1])
def test_an_abort_needs_a_read_without_the_batch(version: int) -> None:
    evidence = Evidence()
    evidence.read(150, version)
    evidence.ends(commit=False)
    evidence.ends(commit=False)  # it is checked once
    assert evidence.check.ended_by == {True: 0, False: 1}


@pytest.mark.parametrize(
    ("at_ms", "version", "app"),
    [(99, NONE, JOB), (301, NONE, JOB), (150, 2, JOB), (150, 3, JOB), (150, NONE, "both1")],
)
def test_a_read_that_proves_nothing_is_none(at_ms: float, version: int, app: str) -> None:
    evidence = Evidence()
    evidence.read(at_ms, version, app)
    evidence.refused(commit=False)


def test_a_transaction_that_was_not_seen_waiting_is_not_judged() -> None:
    evidence = Evidence()
    evidence.check.ended("n1", JOB, 4, 300, commit=False)
    evidence.check.ended("n1", "both1", 5, 300, commit=True)
