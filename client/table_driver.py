"""What a driver does with a batch of log and table, step by step: a pure core (rule X11).

`steps` yields what is to be done next, and is sent its result.  Spark's driver
(sparkconnector/together.py) and the simulator's (sim/together_jobs.py) do it.  A step that raises
ends the driver: the next driver begins with the first step.

Invariants
  D1  The log is asked first.  A batch that the log has is compared with its sums, and written to
      neither side, so `ReplayDiffers` is raised before Delta could skip it in silence.
  D2  A batch that an earlier driver prepared is ended by what its table has, before anything is
      written.
  D3  The table gets a batch only after the log has prepared it, and always under
      txn(application, batch): Delta skips a batch that it has.
  D4  Once its batch is prepared, a driver aborts nothing.  If its commit to the table fails, the
      outcome may be unknown: the next driver or the resolver reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pk import errors
from pk.tiering.table_decision import has_batch
from pk.types import RowSums


class DecidingTable(NamedTuple):
    """The table that decides a batch: the batch commits if the table gets txn(app, version)."""

    url: str
    table_id: str
    app: str
    version: int


class AwaitedBatch(NamedTuple):
    """A prepared batch of the job, with the number of its transaction."""

    batch: int
    table: DecidingTable
    transaction: int


class JobState(NamedTuple):
    """What the coordinator says of a job.

    last: its highest committed batch; -1 = none.  awaited: its prepared batch
    """

    last: int
    awaited: AwaitedBatch | None


class WrittenLog(NamedTuple):
    """What the tasks wrote to the log.

    participants: (producer id, epoch) of each; none if the batch was committed before, or has no
    records.  sums: by topic id, of all rows
    """

    participants: Sequence[tuple[int, int]]
    sums: Mapping[str, RowSums]


@dataclass(slots=True, frozen=True)
class AskJob:
    """Ask the coordinator about the job → `JobState`."""


@dataclass(slots=True, frozen=True)
class ReadTable:
    """Read what the table says of the application → `TableState`."""

    url: str
    app: str


@dataclass(slots=True, frozen=True)
class WriteLog:
    """Let the tasks write the records → `WrittenLog`."""


@dataclass(slots=True, frozen=True)
class Prepare:
    """Prepare the participants → `AwaitedBatch`, or None if the batch was committed before."""

    written: WrittenLog
    table: DecidingTable


@dataclass(slots=True, frozen=True)
class WriteTable:
    """Append the rows to the table, under txn(app, version)."""

    app: str
    version: int


@dataclass(slots=True, frozen=True)
class Decide:
    """End a prepared batch by what its table has."""

    awaited: AwaitedBatch
    commit: bool


@dataclass(slots=True, frozen=True)
class CommitSums:
    """Commit a batch without participants → whether it was committed before."""

    sums: Mapping[str, RowSums]


Step = AskJob | ReadTable | WriteLog | Prepare | WriteTable | Decide | CommitSums
Steps = Generator[Step, Any, bool]


def steps(table: DecidingTable) -> Steps:
    """Yield the steps of one driver; the version of `table` is the batch.

    Returns whether the batch was committed before.  Raises `InvalidTxnState` if the job waits for
    another table, or if its table cannot tell.
    """
    job: JobState = yield AskJob()
    if job.awaited is not None:
        _check_same(job.awaited, table)
        before = job.awaited.table
        found = yield ReadTable(before.url, before.app)
        yield Decide(job.awaited, has_batch(before, found))  # D2
        job = yield AskJob()
    written: WrittenLog = yield WriteLog()
    if not written.participants and (written.sums or table.version <= job.last):
        compared: bool = yield CommitSums(written.sums)  # D1
        return compared
    if not written.participants:  # without records there is nothing to prepare
        yield WriteTable(table.app, table.version)
        known: bool = yield CommitSums({})
        return known
    prepared: AwaitedBatch | None = yield Prepare(written, table)
    if prepared is None:
        return True
    yield WriteTable(table.app, table.version)  # D3, D4
    yield Decide(prepared, commit=True)
    return False


def driven(work: Steps, perform: Callable[[Step], Any]) -> bool:
    """Do all steps, one after the other; return what `steps` returns."""
    answer: Any = None
    while True:
        try:
            step = work.send(answer)
        except StopIteration as end:
            return bool(end.value)
        answer = perform(step)


def _check_same(awaited: AwaitedBatch, table: DecidingTable) -> None:
    before = awaited.table
    if before[:3] != table[:3]:
        raise errors.InvalidTxnState(
            f"batch {awaited.batch} of {before.app!r} waits for the table {before.url} (id "
            f"{before.table_id}), not for {table.url} (id {table.table_id}): an operator "
            "decides with pk transactions resolve"
        )
