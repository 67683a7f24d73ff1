"""Checks of batches that log and table get together, on plain values (rule X11).

Checked
  V34  The log has the rows of a batch if and only if the table has txn(application, batch).  The
       table has each row once.  While no driver returns, the table may have a batch that the log
       has not: a driver's commit was late, or the driver was lost before it committed an empty
       batch.  The log has no batch that the table has not.
  V35  A prepared batch ends by evidence only.  If its transaction commits, the table has the batch.
       If it aborts, the table was read without the batch, after the preparation was asked for.
       After all faults have ended, the resolvers end every prepared batch within the bound of V22.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Protocol

from pk.sim.checkers import require
from pk.sim.job_history import JobHistory
from pk.sim.oracle import RecordId


class TableRead(Protocol):
    """A read of the table that succeeded."""

    @property
    def at_ms(self) -> float: ...

    @property
    def app(self) -> str: ...

    @property
    def version(self) -> int: ...


class TableCommit(Protocol):
    """A commit of the table."""

    @property
    def app(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def rows(self) -> tuple[RecordId, ...]: ...


class EvidenceCheck:
    """Checks V35 on samples of what coordinators have decided; the job is the application.

    has: whether the table has txn(application, version) now.  reads: all reads so far
    """

    def __init__(self, has: Callable[[str, int], bool], reads: Iterable[TableRead]) -> None:
        self._has = has
        self._reads = reads
        #: (job, batch, run) → when its preparation was asked for
        self._asked_ms: dict[tuple[str, int, str], float] = {}
        #: (job, transaction) → batch and run of a prepared transaction that has not ended
        self._waiting: dict[tuple[str, int], tuple[int, str]] = {}
        self.ended_by = {True: 0, False: 0}  #: commit or abort → number of transactions

    def asked(self, job: str, batch: int, run: str, now_ms: float) -> None:
        """Note that the driver of a run asks for the preparation of a batch."""
        self._asked_ms.setdefault((job, batch, run), now_ms)

    def prepared(self, job: str, transaction: int, batch: int, run: str) -> None:
        """Note a transaction that waits for the table; `run` opened it."""
        self._waiting[job, transaction] = batch, run

    def ended(self, who: str, job: str, transaction: int, now_ms: float, *, commit: bool) -> None:
        """Check the end of a transaction, if it was seen waiting."""
        batch, run = self._waiting.pop((job, transaction), (-1, ""))
        if batch < 0:
            return
        self.ended_by[commit] += 1
        what = f"{who}: transaction {transaction} of batch {batch} of {job}"
        if commit:
            require(self._has(job, batch), "V35", "{} commits, the table lacks it", what)
            return
        since_ms = self._asked_ms[job, batch, run]
        seen = any(
            since_ms <= each.at_ms <= now_ms and each.version < batch
            for each in self._reads
            if each.app == job
        )
        words = "{} aborts at {}; prepared after {}, nobody found the table without it"
        require(seen, "V35", words, what, now_ms, since_ms)


def check_tables(
    history: JobHistory,
    jobs: Iterable[str],
    commits: Collection[TableCommit],
    decided: Mapping[str, Container[int]],
    *,
    complete: bool,
) -> None:
    """Check V34.  `decided`: the committed batches of each job, as its coordinator has them.

    complete: the drivers returned, and completed every batch
    """
    table = {(each.app, each.version) for each in commits}
    rows = Counter(row for each in commits for row in each.rows)
    for name in jobs:
        job = history.jobs.get(name)
        if job is None or job.given_up or history.coordinator_lost(name):
            continue
        for batch in job.batches:
            if history.may_be_torn(batch):
                continue
            what = f"batch {batch.number} of {name}"
            here, there = batch.number in decided.get(name, ()), (name, batch.number) in table
            require(there or not here, "V34", "{} is in the log, not in the table", what)
            wrong = {row.id: rows[row.id] for row in batch.rows if rows[row.id] != int(there)}
            require(not wrong, "V34", "{}: in the table {}, rows {}", what, there, wrong)
            if complete:
                require(here or not there, "V34", "{} is in the table, not in the log", what)
                require(here, "V34", "{} is in neither", what)


def check_visible(
    history: JobHistory,
    jobs: Iterable[str],
    commits: Iterable[TableCommit],
    visible: Container[RecordId],
    waiting: Container[RecordId],
) -> None:
    """Check V34 on the rows that the last read_committed reader got.

    A row that waits for the last stable offset is neither there nor missing.
    """
    table = {(each.app, each.version) for each in commits}
    for name in jobs:
        job = history.jobs.get(name)
        for batch in () if job is None or job.given_up else job.batches:
            if history.may_be_torn(batch):
                continue
            there = (name, batch.number) in table
            wrong = [
                row.id
                for row in batch.rows
                if row.id not in waiting and (row.id in visible) != there
            ]
            words = "batch {} of {}: in the table {}, in the log not so {}"
            require(not wrong, "V34", words, batch.number, name, there, wrong)
