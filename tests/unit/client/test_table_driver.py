"""The steps of a driver of log and table, in every state that it may find (rule X11)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from pk import errors
from pk.client import table_driver
from pk.client.table_driver import (
    AskJob,
    AwaitedBatch,
    CommitSums,
    Decide,
    DecidingTable,
    JobState,
    Prepare,
    ReadTable,
    WriteLog,
    WriteTable,
    WrittenLog,
)
from pk.types import NONE, RowSums

TABLE = DecidingTable("file:///lake/t", "id", "app", 4)
SUMS = {"topic": RowSums(2, 10, 7)}
SOME, REPEATED, EMPTY = WrittenLog([(7, 0)], SUMS), WrittenLog([], SUMS), WrittenLog([], {})
AWAITED = AwaitedBatch(4, TABLE, 9)
ASK, LOG, APPEND = AskJob(), WriteLog(), WriteTable("app", 4)
READ = ReadTable(TABLE.url, TABLE.app)


class State(NamedTuple):
    table_id: str = "id"
    version: int | None = None
    retention: str = ""


class Shell:
    """Does the steps: each has a prepared answer, or fails with one."""

    def __init__(self, *answers: Any) -> None:
        self.done: list[Any] = []
        self._left = list(answers)

    def perform(self, step: Any) -> Any:
        self.done.append(step)
        answer = self._left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def drive(self) -> bool:
        already = table_driver.driven(table_driver.steps(TABLE), self.perform)
        assert not self._left
        return already


def drive(*answers: Any) -> tuple[list[Any], bool]:
    """Return the steps that are answered so, and whether the batch was committed before."""
    shell = Shell(*answers)
    already = shell.drive()
    return shell.done, already


def fails(error: type[Exception], words: str, *answers: Any) -> list[Any]:
    """Return the steps, up to the step that fails."""
    shell = Shell(*answers)
    with pytest.raises(error, match=words):
        shell.drive()
    assert len(shell.done) == len(answers)
    return shell.done


def test_a_new_batch_is_prepared_written_and_committed() -> None:
    """The order is log, preparation, table, commit (client/table_driver D1, D3)."""
    steps, already = drive(JobState(3, None), SOME, AWAITED, None, None)
    assert steps == [ASK, LOG, Prepare(SOME, TABLE), APPEND, Decide(AWAITED, commit=True)]
    assert not already


def test_a_batch_that_the_log_has_is_compared_and_not_written() -> None:
    steps, already = drive(JobState(4, None), REPEATED, True)
    assert (steps, already) == ([ASK, LOG, CommitSums(SUMS)], True)
    steps, already = drive(JobState(4, None), EMPTY, True)
    assert (steps, already) == ([ASK, LOG, CommitSums({})], True)


def test_a_batch_that_was_committed_between_join_and_preparation_is_not_written() -> None:
    steps, already = drive(JobState(3, None), SOME, None)
    assert (steps, already) == ([ASK, LOG, Prepare(SOME, TABLE)], True)


@pytest.mark.parametrize("last", [NONE, 3])
def test_a_batch_without_records_is_written_to_the_table_first(last: int) -> None:
    """Without participants there is nothing to prepare, and nothing of the log is held."""
    steps, already = drive(JobState(last, None), EMPTY, None, False)
    assert steps == [ASK, LOG, APPEND, CommitSums({})]
    assert not already


def test_other_rows_are_refused_before_the_table_is_touched() -> None:
    differs = errors.ReplayDiffers("other rows")
    assert fails(errors.ReplayDiffers, "other", JobState(4, None), REPEATED, differs) == [
        ASK, LOG, CommitSums(SUMS),
    ]  # fmt: skip
    steps = fails(errors.ReplayDiffers, "other", JobState(3, None), SOME, differs)
    assert APPEND not in steps


@pytest.mark.parametrize("version", [4, 5])
def test_a_prepared_batch_that_the_table_has_is_committed(version: int) -> None:
    """Afterwards (client/table_driver D2) the log has it, and it is written to neither."""
    answers = JobState(3, AWAITED), State(version=version), None, JobState(4, None), REPEATED, True
    steps, already = drive(*answers)
    assert steps == [ASK, READ, Decide(AWAITED, commit=True), ASK, LOG, CommitSums(SUMS)]
    assert already


@pytest.mark.parametrize("version", [None, 3])
def test_a_prepared_batch_that_the_table_lacks_is_aborted_and_written_again(
    version: int | None,
) -> None:
    again = AwaitedBatch(4, TABLE, 10)
    answers = JobState(3, AWAITED), State(version=version), None, JobState(3, None)
    steps, already = drive(*answers, SOME, again, None, None)
    assert steps == [
        ASK, READ, Decide(AWAITED, commit=False), ASK,
        LOG, Prepare(SOME, TABLE), APPEND, Decide(again, commit=True),
    ]  # fmt: skip
    assert not already


def test_an_earlier_batch_is_ended_as_the_table_of_that_batch_says() -> None:
    before = AwaitedBatch(3, TABLE._replace(version=3), 8)
    answers = JobState(2, before), State(version=3), None, JobState(3, None)
    steps, _ = drive(*answers, SOME, AWAITED, None, None)
    assert Decide(before, commit=True) in steps


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State(table_id="other"), "created again"),
        (State(table_id="other", version=4), "created again"),
        (State(retention="interval 1 day"), "proves nothing"),
    ],
)
def test_a_table_that_cannot_tell_ends_the_driver(state: State, words: str) -> None:
    """Nothing is decided: the batch stays prepared."""
    steps = fails(errors.InvalidTxnState, words, JobState(3, AWAITED), state)
    assert steps == [ASK, READ]


def test_a_table_that_cannot_be_read_ends_the_driver() -> None:
    away = errors.TierUnavailable("away")
    assert fails(errors.TierUnavailable, "away", JobState(3, AWAITED), away) == [ASK, READ]


@pytest.mark.parametrize(
    "other",
    [
        TABLE._replace(url="file:///lake/u"),
        TABLE._replace(table_id="older"),
        TABLE._replace(app="app2"),
    ],
)
def test_a_batch_of_another_table_is_left_to_an_operator(other: DecidingTable) -> None:
    awaited = AwaitedBatch(4, other, 9)
    words = "pk transactions resolve"
    assert fails(errors.InvalidTxnState, words, JobState(3, awaited)) == [ASK]


@pytest.mark.parametrize("error", [errors.TierUnavailable("no answer"), RuntimeError("Spark")])
def test_after_the_preparation_a_failure_of_the_table_aborts_nothing(error: Exception) -> None:
    """The commit may have taken effect (client/table_driver D4)."""
    steps = fails(type(error), str(error), JobState(3, None), SOME, AWAITED, error)
    assert steps == [ASK, LOG, Prepare(SOME, TABLE), APPEND]
