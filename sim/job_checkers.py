"""Checks of jobs, on plain values; no code here knows how pk works inside.

Checked
  V24  A batch becomes visible once and whole.  Of a committed batch, a read_committed reader from
       offset 0 gets each planned row exactly once.  The rows are those of attempts that a single
       call of commit named.  Of any other batch the reader gets all rows or none (rules X5, X7).
       As in V19, a row above the last stable offset is in the log and not visible yet.
  V25  A batch is committed once.  A coordinator keeps each committed batch with its sums while it
       is among the newest 100, the last committed batch never goes back, and one transaction
       commits a batch.  At most one call of commit hears "committed", all others hear "already
       committed" (rules X7, X9).

V7, V20 and V21 hold for jobs as well.  V7: in the order of the log, the batches of a job stand in
their order, and the rows of a task in the order of their sends.  V20: the coordinator and all
markers commit the named participants, and abort every other participant.  V21: a fenced run sends
nothing that becomes visible, and commits nothing (rule X8).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from pk.sim.checkers import ReadRow, require
from pk.sim.job_history import Answer, Attempt, JobHistory, PlannedBatch
from pk.sim.oracle import RecordId
from pk.sim.transaction_checkers import DecisionsCheck, Rows
from pk.types import NONE, RowSums

#: The newest committed batches of a job that its coordinator keeps (rule X9).
KEPT_BATCHES = 100


def without_jobs(history: JobHistory, rows: Rows) -> Rows:
    """Return the rows that no job has planned."""
    return {
        place: [row for row in found if row.id not in history.ids] for place, found in rows.items()
    }


def check_jobs(history: JobHistory, committed: Rows, waiting: Container[RecordId] = ()) -> None:
    """Check V24, V21 and V7 on the rows of the last read_committed reader.

    `waiting`: the records above the last stable offsets (transaction_checkers.waiting_records).
    """
    found: dict[tuple[str, int], dict[RecordId, Attempt]] = {}
    for place, rows in committed.items():
        mine = [row for row in rows if row.id in history.ids]
        for row in mine:
            known = history.sent.get((row.id, row.digest))
            require(known is not None, "V24", "{}: no attempt sent {}", place, row)
            assert known is not None
            batch, attempt, sent = known
            same = (sent.topic, sent.partition) == place
            require(same, "V24", "{}: {} was sent elsewhere: {}", place, row, sent)
            here = found.setdefault((batch.job, batch.number), {})
            twice = row.id in here and not history.may_be_torn(batch)
            words = "{}: {} is there twice, of {} and of {}"
            require(not twice, "V24", words, place, row, attempt.name, here.get(row.id))
            here[row.id] = attempt
        if not history.may_be_cut(*place):
            _check_order(history, place, mine)
    for batch in history.batches():
        if not history.may_be_torn(batch):
            _check_batch(history, batch, found.get((batch.job, batch.number), {}), waiting)


def _check_batch(
    history: JobHistory,
    batch: PlannedBatch,
    found: Mapping[RecordId, Attempt],
    waiting: Container[RecordId],
) -> None:
    """Check the visible rows of one batch.

    A row that waits for the last stable offset is neither there nor missing.
    """
    what = f"batch {batch.number} of {batch.job}"
    first = [ask for ask in batch.asks if ask.answer is Answer.COMMITTED]
    require(len(first) <= 1, "V25", "{}: committed by each of {}", what, first)
    missing = [row.id for row in batch.rows if row.id not in found and row.id not in waiting]
    require(not (found and missing), "V24", "{}: torn, {} without {}", what, list(found), missing)
    require(not (batch.committed and missing), "V24", "{}: committed, without {}", what, missing)
    if not found:
        return
    visible = {attempt.name: attempt for attempt in found.values()}
    asks = [
        ask
        for ask in first or batch.asks
        if ask.answer is not Answer.REFUSED
        and visible.keys() <= {attempt.name for attempt in ask.attempts}
    ]
    require(bool(asks), "V24", "{}: no commit names {}", what, list(visible))
    sent = {each.id: (each, attempt) for attempt in visible.values() for each in attempt.records}
    for run in {attempt.run: None for attempt in visible.values()}:
        fenced_ms = history.fenced_ms(batch.job, run)
        if fenced_ms is None or history.coordinator_lost(batch.job):
            continue
        late = [each for each, by in sent.values() if by.run == run and each.sent_ms > fenced_ms]
        words = "{}: run {} was fenced at {}, and later sent {}"
        require(not late, "V21", words, what, run, fenced_ms, late)
        in_time = any(ask.asked_ms <= fenced_ms for ask in asks)
        words = "{}: run {} was fenced at {}, and later committed: {}"
        require(in_time, "V21", words, what, run, fenced_ms, asks)


def _check_order(history: JobHistory, place: tuple[str, int], rows: Iterable[ReadRow]) -> None:
    """Check V7 for the rows of jobs in one partition."""
    last: dict[str, tuple[int, ReadRow]] = {}
    last_of_task: dict[str, ReadRow] = {}
    for row in rows:
        batch = history.ids[row.id]
        before = last.get(batch.job, (NONE, row))
        task = last_of_task.get(row.id.producer)
        if not history.coordinator_lost(batch.job):
            words = "{}: {} stands before {}"
            require(before[0] <= batch.number, "V7", words, place, before[1], row)
            in_order = task is None or task.id.number < row.id.number
            require(in_order, "V7", words, place, task, row)
        last[batch.job] = batch.number, row
        last_of_task[row.id.producer] = row


class HistoriesCheck:
    """Checks V25 on samples of what coordinators have committed."""

    def __init__(self) -> None:
        #: job → batch → its sums, of all committed batches that were ever seen
        self._known: dict[str, dict[int, Mapping[str, RowSums]]] = {}
        self._transactions: dict[tuple[str, int], int] = {}

    def seen(
        self, who: str, job: str, last: int, history: Mapping[int, Mapping[str, RowSums]]
    ) -> None:
        """Check what the newest coordinator has of a job.  `last`: the last committed batch."""
        known = self._known.setdefault(job, {})
        newest = max(known, default=NONE)
        require(last >= newest, "V25", "{}: {} committed {} last, not {}", who, job, newest, last)
        require(last == max(history, default=NONE), "V25", "{}: {} lacks {}", who, job, last)
        for batch in sorted(known, reverse=True)[:KEPT_BATCHES]:
            if batch > last - KEPT_BATCHES:
                words = "{}: batch {} of {} has {}, and had {}"
                facts = who, batch, job, history.get(batch), known[batch]
                require(history.get(batch) == known[batch], "V25", words, *facts)
        known.update(history)

    def known(self, job: str) -> frozenset[int]:
        """Return the batches that a coordinator was ever seen to have committed."""
        return frozenset(self._known.get(job, ()))

    def committed(self, who: str, job: str, batch: int, transaction: int) -> None:
        """Check that a batch has a single transaction that commits it."""
        first = self._transactions.setdefault((job, batch), transaction)
        words = "{}: transactions {} and {} of {} committed batch {}"
        require(first == transaction, "V25", words, who, first, transaction, job, batch)

    def compare(self, history: JobHistory) -> None:
        """Compare with what was planned and heard."""
        for batch in history.batches():
            known = self._known.get(batch.job, {}).get(batch.number)
            if history.may_be_torn(batch):
                continue
            if known is not None:
                sums = history.sums(batch)
                words = "batch {} of {} has the sums {}, not {}"
                require(known == sums, "V25", words, batch.number, batch.job, known, sums)
            # of a coordinator that lost decisions no further sample is taken
            heard = batch.committed and known is None and not history.coordinator_lost(batch.job)
            words = "batch {} of {}: heard as committed, but no coordinator has it"
            require(not heard, "V25", words, batch.number, batch.job)


def check_decisions(history: JobHistory, decisions: DecisionsCheck) -> None:
    """Check V20: what a driver heard and what was decided about its participants agree."""
    for batch in history.batches():
        if history.may_be_torn(batch):
            continue
        for ask in batch.asks:
            if ask.answer is Answer.COMMITTED:
                _check_named(batch, {attempt.name for attempt in ask.attempts}, decisions)


def _check_named(batch: PlannedBatch, named: Container[str], decisions: DecisionsCheck) -> None:
    for attempt in batch.attempts:
        said = decisions.said(attempt.pair)
        if said is None:
            continue
        commit, who = said
        words = "{}: {} said commit={}; the commit named {}"
        require(commit == (attempt.name in named), "V20", words, attempt, who, commit, named)
