"""The jobs of a run: what their queries planned, what their tasks sent, and what drivers heard.

A job is a transactional id of many producers (docs/design/0015-participants.md).  Each job has one
query, whose checkpoint is here: like Spark's, it survives the driver.  It has the content of each
planned batch, and says which batches are completed.

Words
  planned    the content of a batch is fixed before a run executes it for the first time.  Each
             execution writes the same rows.
  completed  the driver heard that the batch is committed, and noted it in the checkpoint.  A
             driver that is lost between commit and note leaves a batch that is executed again.
  ask        a driver's call of commit, with the attempts that it names.  It is repeated until an
             outcome is heard.
  fenced     a run is fenced from the time on when a later run was heard to be current.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.oracle import RecordId, Topic, digest_of, value_of
from pk.sim.transaction_history import LostMs, TransactionRecord
from pk.types import NONE, RowSums

#: The shares of batches without rows, and of these the share without tasks.
EMPTY, TASKLESS = 0.1, 0.5
TASKS, ROWS = (1, 4), (1, 6)


class JobRow(NamedTuple):
    """One row of a planned batch.  It goes to the partition `spread` modulo their number."""

    id: RecordId
    topic: str
    value: bytes
    spread: int


@dataclass(slots=True)
class Attempt:
    """One attempt of a task, in one run."""

    name: str
    run: str
    task: int
    pair: tuple[int, int]  #: of its join
    records: list[TransactionRecord] = field(default_factory=list)


class Answer(enum.Enum):
    """What a driver heard of its call of commit."""

    NONE = "none"  #: nothing, or an error that does not say what was decided
    COMMITTED = "committed"
    ALREADY = "already committed"
    REFUSED = "refused"  #: nothing was committed, and nothing will be


@dataclass(slots=True)
class CommitAsk:
    """One call of commit."""

    run: str
    attempts: tuple[Attempt, ...]
    asked_ms: float
    answer: Answer = Answer.NONE


@dataclass(slots=True)
class PlannedBatch:
    """One planned batch with its executions."""

    job: str
    number: int
    began_ms: float
    tasks: tuple[tuple[JobRow, ...], ...]
    asks: list[CommitAsk] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    committed: bool = False  #: a task or a driver heard that the batch is committed

    @property
    def rows(self) -> Iterator[JobRow]:
        for task in self.tasks:
            yield from task

    @property
    def topics(self) -> list[str]:
        """The topics that the batch writes to."""
        return sorted({row.topic for row in self.rows})


@dataclass(slots=True)
class JobRun:
    """When the requests of one run were sent, and when it was first heard to be current."""

    first_sent_ms: float
    current_ms: float = NONE


@dataclass(slots=True)
class JobQuery:
    """One job with its checkpoint."""

    name: str
    batches: list[PlannedBatch] = field(default_factory=list)
    runs: dict[str, JobRun] = field(default_factory=dict)
    completed: int = 0  #: number of the batches that the checkpoint has as completed
    given_up: bool = False  #: the query cannot go on, because its coordinator lost records

    @property
    def pending(self) -> bool:
        """Whether a planned batch is not completed."""
        return self.completed < len(self.batches)


class JobHistory:
    """All jobs of a run; the arguments are those of `TransactionHistory`.

    `random_of`: returns the random numbers of a name.  `deposed`: returns whether a deposed
    coordinator of a job may have answered lately.
    """

    def __init__(
        self,
        topics: Mapping[str, Topic],
        lost_ms: LostMs,
        coordinator_of: Callable[[str], tuple[str, int]],
        random_of: Callable[[str], random.Random],
        deposed: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.topics = topics
        self.jobs: dict[str, JobQuery] = {}
        #: identity and checksum of each record that was sent → its batch, attempt and place
        self.sent: dict[tuple[RecordId, int], tuple[PlannedBatch, Attempt, TransactionRecord]] = {}
        self.ids: dict[RecordId, PlannedBatch] = {}  #: every planned row
        self._lost_ms = lost_ms
        self._coordinator_of = coordinator_of
        self.deposed = deposed
        self._random_of = random_of

    # -- what queries do ---------------------------------------------------------------------------

    def begin_run(self, name: str, now_ms: float) -> str:
        """Return the id of a new run of a job."""
        runs = self.jobs.setdefault(name, JobQuery(name)).runs
        run = f"r{len(runs)}"
        runs[run] = JobRun(now_ms)
        return run

    def next_batch(
        self, name: str, topics: Sequence[str], value_bytes: tuple[int, int], now_ms: float
    ) -> PlannedBatch:
        """Return the first batch that is not completed; a new one is planned."""
        job = self.jobs[name]
        if not job.pending:
            number = len(job.batches)
            rng = self._random_of(f"jobs/{name}/{number}")
            tasks = _planned(rng, f"{name}.b{number}", topics, value_bytes)
            planned = PlannedBatch(name, number, now_ms, tasks)
            self.ids.update(dict.fromkeys((row.id for row in planned.rows), planned))
            job.batches.append(planned)
        return job.batches[job.completed]

    def complete(self, batch: PlannedBatch) -> None:
        """Note in the checkpoint that a batch is completed."""
        job = self.jobs[batch.job]
        job.completed = max(job.completed, batch.number + 1)

    def current(self, batch: PlannedBatch, run: str, now_ms: float) -> None:
        """Note that a run was heard to be current: it joined or committed."""
        known = self.jobs[batch.job].runs[run]
        if known.current_ms == NONE:
            known.current_ms = now_ms

    def send(self, batch: PlannedBatch, attempt: Attempt, record: TransactionRecord) -> None:
        attempt.records.append(record)
        self.sent[record.id, record.digest] = batch, attempt, record

    def sums(self, batch: PlannedBatch) -> dict[str, RowSums]:
        """Return rows, bytes and sum of a batch for each topic id."""
        found: dict[str, RowSums] = {}
        for row in batch.rows:
            topic_id = self.topics[row.topic].topic_id
            one = RowSums(1, len(row.value), digest_of(None, row.value, []))
            found[topic_id] = found.get(topic_id, RowSums()).plus(one)
        return found

    def fenced_ms(self, job: str, run: str) -> float | None:
        """Return from when on a run is fenced; None = never.

        A later run is one whose first request was sent after the run was heard to be current.
        """
        runs = self.jobs[job].runs
        since = runs[run].current_ms
        later = [
            each.current_ms
            for each in runs.values()
            if since != NONE and each.first_sent_ms > since and each.current_ms != NONE
        ]
        return min(later, default=None)

    # -- what may be lost --------------------------------------------------------------------------

    def may_be_torn(self, batch: PlannedBatch) -> bool:
        """Return whether records or decisions of the batch may be lost (sim/loss_model)."""
        keys = dict.fromkeys(
            (self.topics[each.topic].topic_id, each.partition)
            for attempt in batch.attempts
            for each in attempt.records
        )
        keys[self._coordinator_of(batch.job)] = None
        return any(self._lost_ms(*key) >= batch.began_ms for key in keys)

    def may_be_cut(self, topic: str, partition: int) -> bool:
        """Return whether records of the partition may be lost, and others stand in their place."""
        return self._lost_ms(self.topics[topic].topic_id, partition) != NONE

    def coordinator_lost(self, job: str) -> bool:
        """Return whether decisions of the job's coordinator may be lost."""
        return self._lost_ms(*self._coordinator_of(job)) != NONE

    def batches(self) -> Iterator[PlannedBatch]:
        for job in self.jobs.values():
            yield from job.batches


def _planned(
    rng: random.Random, name: str, topics: Sequence[str], value_bytes: tuple[int, int]
) -> tuple[tuple[JobRow, ...], ...]:
    """Draw the rows of each task of a batch."""
    empty = rng.random() < EMPTY
    if empty and rng.random() < TASKLESS:
        return ()
    tasks = []
    for number in range(rng.randint(*TASKS)):
        rows = []
        for count in range(0 if empty else rng.randint(*ROWS)):
            row = RecordId(f"{name}.t{number}", count)
            value = value_of(row, rng.randint(*value_bytes))
            rows.append(JobRow(row, rng.choice(topics), value, rng.randrange(1_000)))
        tasks.append(tuple(rows))
    return tuple(tasks)
