"""The state of one job: the transactional id of a transaction with many producers (X5, X8, X9).

A job has one transaction at a time, the batch that a run of its query executes.  Its states and
steps are those of a plain transactional id (transactions/state.py).  An ONGOING job whose
participants are prepared has `awaited`: a Delta table decides its batch (X11).

A `Job` is immutable.  Each step returns another one, and asserts that `STEPS` has it.

Invariants
  J1  ONGOING and prepared jobs have at least one partition; the other states have none.
  J2  `transaction` counts the transactions of a job and never goes back.  A participant has joined
      the open transaction if its record has this number.
  J3  A participant's epoch grows with each join.  The marker that ends it has the next epoch, and
      the next join of its producer id has the same epoch (X1).
  J4  `last_committed` never goes back.  It is at least every batch of the history.
  J5  Only an ONGOING job has `awaited`.  From then on, `named` has the participants that commit if
      the table has the batch, and no task joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pk.server.transactions.state import STEPS, TransactionState
from pk.types import NONE, Epoch, Offset, PartitionKey, ProducerId, RowSums

#: How many runs before the current one are fenced by name (X8).
SUPERSEDED_MAX = 32
#: How many committed batches of a job are kept (X9).
HISTORY_MAX = 100

#: Reasons of aborts that the driver did not ask for; timeouts and operators have those of
#: transactions/state.py.
NEWER_RUN = "a newer run of the query began"
#: The name of the state of a job whose batch a table decides.
AWAITING_TABLE = "AwaitingTable"


class Participant(NamedTuple):
    """A producer id of a job."""

    epoch: int
    transaction: int  #: the last one that it joined


#: By topic id; topics without rows are left out.
BatchSums = Mapping[str, RowSums]


class PreparedTable(NamedTuple):
    """The Delta table that decides a batch: it commits if the table gets txn(app, version)."""

    url: str
    table_id: str  #: Delta's id of the table; another id at the URL is another table
    app: str
    version: int

    def __str__(self) -> str:
        return f"the table {self.url}"


class Awaited(NamedTuple):
    """The prepared batch of a job."""

    table: PreparedTable
    since_ms: int  #: when it was prepared, by the wall clock
    sums: BatchSums


@dataclass(slots=True, frozen=True)
class Job:
    """A transactional id of the kind *participants*."""

    job: str
    query: str
    run: str
    batch_write: bool = False
    superseded: tuple[str, ...] = ()
    state: TransactionState = TransactionState.EMPTY
    transaction: int = 0
    batch: int = NONE  #: of the open transaction, or of the last one
    opened_by: str = ""  #: the run that opened it
    #: The registered partitions, sorted, each with its unclean epoch at registration (R3).
    partitions: Mapping[PartitionKey, Epoch] = field(default_factory=dict)
    #: Committed by the prepared or the last transaction; if `awaited`, by the table's decision.
    named: frozenset[ProducerId] = frozenset()
    last_committed: int = NONE
    started_ms: int = 0  #: when the open transaction began, by the wall clock
    updated_ms: int = 0
    reason: str = ""  #: why the coordinator aborted; "" = the driver asked
    metadata_offset: Offset = 0  #: the highest that an asker of its partitions had applied
    awaited: Awaited | None = None  #: (J5)

    def joined(self, participant: Participant) -> bool:
        """Return whether a participant is part of the open transaction (J2)."""
        return participant.transaction == self.transaction

    @property
    def open(self) -> bool:
        """Return whether tasks write: no decision is taken, and no table is to take it."""
        return self.state is TransactionState.ONGOING and self.awaited is None

    @property
    def label(self) -> str:
        """The name of the state, for operators."""
        return self.state.label if self.awaited is None else AWAITING_TABLE

    @property
    def name(self) -> str:
        """The open or the last transaction, for messages."""
        return f"batch {self.batch} of {self.job!r}"


def _step(known: Job, to: TransactionState, **changes: Any) -> Job:
    assert to in STEPS[known.state], f"no step {known.state.name} -> {to.name}: {known}"
    return replace(known, state=to, **changes)


def in_run(known: Job, run: str, now_ms: int) -> Job:
    """Return the job with `run` as its current run; the one before it is superseded (X8)."""
    if known.run == run:
        return known
    superseded = (*known.superseded, known.run)[-SUPERSEDED_MAX:]
    return replace(known, run=run, superseded=superseded, updated_ms=now_ms)


def begun(
    known: Job,
    batch: int,
    partitions: Mapping[PartitionKey, Epoch],
    metadata_offset: Offset,
    now_ms: int,
) -> Job:
    """Return the idle job with an open transaction."""
    return _step(
        known,
        TransactionState.ONGOING,
        transaction=known.transaction + 1,
        batch=batch,
        opened_by=known.run,
        partitions=dict(sorted(partitions.items())),
        named=frozenset(),
        metadata_offset=metadata_offset,
        started_ms=now_ms,
        updated_ms=now_ms,
        reason="",
    )


def registered(
    known: Job, added: Mapping[PartitionKey, Epoch], metadata_offset: Offset, now_ms: int
) -> Job:
    """Return the open job with further partitions; known ones keep their first unclean epoch."""
    return _step(
        known,
        TransactionState.ONGOING,
        partitions=dict(sorted({**added, **known.partitions}.items())),
        metadata_offset=max(known.metadata_offset, metadata_offset),
        updated_ms=now_ms,
    )


def awaiting(
    known: Job, named: Iterable[ProducerId], sums: BatchSums, table: PreparedTable, now_ms: int
) -> Job:
    """Return the open job with its participants prepared: `table` decides whether they commit."""
    return _step(
        known,
        TransactionState.ONGOING,
        named=frozenset(named),
        awaited=Awaited(table, now_ms, sums),
        updated_ms=now_ms,
    )


def prepared(
    known: Job, now_ms: int, *, named: Iterable[ProducerId] = (), commit: bool, reason: str = ""
) -> Job:
    """Return the open job with its decision; `named`: the producer ids that commit."""
    return _step(
        known,
        TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT,
        named=frozenset(named),
        awaited=None,
        last_committed=known.batch if commit else known.last_committed,
        updated_ms=now_ms,
        reason=reason,
    )


def completed(known: Job, now_ms: int) -> Job:
    """Return the prepared job as ended.  Batch, run and reason stay for retries."""
    committed = known.state is TransactionState.PREPARE_COMMIT
    return _step(
        known,
        TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT,
        partitions={},
        started_ms=0,
        metadata_offset=0,
        updated_ms=now_ms,
    )


def recorded(known: Job, batch: int, now_ms: int) -> Job:
    """Return the idle job with a committed batch without participants.

    The number of the transaction grows: no participant of an earlier one is part of it.
    """
    return replace(
        known,
        state=TransactionState.COMPLETE_COMMIT,
        transaction=known.transaction + 1,
        batch=batch,
        opened_by=known.run,
        named=frozenset(),
        last_committed=batch,
        updated_ms=now_ms,
        reason="",
    )
