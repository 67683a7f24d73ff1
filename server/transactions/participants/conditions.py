"""The conditions that joins and commits share (X7, X8, X9); the first one that applies decides.

Invariants
  B1  A batch is opened at most once while it is not aborted: a batch that is committed, or is not
      above the last committed one, is never opened again.
"""

from __future__ import annotations

from typing import NamedTuple

from pk import errors, limits
from pk.server.transactions import state as plain
from pk.server.transactions.ids import Out, TransactionalIds
from pk.server.transactions.participants import state
from pk.server.transactions.participants.events import preparation, still_ending
from pk.server.transactions.participants.state import BatchSums, Job
from pk.server.transactions.state import Phase
from pk.wire import pk_pb2 as wire


class BatchCheck(NamedTuple):
    """The job of a request, in the run of the request.

    `sums`: of the batch, if it is committed already; else None.
    `open`: whether the open transaction is that of the request, and tasks write.
    `awaiting`: whether it is that of the request, and its participants are prepared (X11).
    """

    known: Job
    sums: BatchSums | None = None
    open: bool = False
    awaiting: bool = False


def checked(ids: TransactionalIds, asked: wire.JobBatch, now_ms: int) -> BatchCheck | Out:
    """Return what a request finds.  A `Decision` has an abort that must come first.

    Raises `ReplayDiffers`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState`,
    `TransactionTimedOut`, `TransactionAborted` and, for names that cannot be, `InvalidRequest`.
    """
    _check_names(asked)
    known = ids.find_job(asked.job)
    if known is None:
        return BatchCheck(
            Job(asked.job, asked.query, asked.run, asked.batch_write, updated_ms=now_ms)
        )
    if known.query != asked.query:
        raise errors.ReplayDiffers(
            f"{asked.job!r} belongs to query {known.query}, not to {asked.query}: the checkpoint "
            "was deleted, or two queries use one id.  Choose another transactional id; records "
            f"up to batch {known.last_committed} stay in the topic"
        )
    if asked.run in known.superseded:
        raise errors.ProducerFenced(
            f"run {asked.run} of {asked.job!r} was superseded by run {known.run}: end this query"
        )
    newer = known.run != asked.run
    sums = ids.jobs.history(known.job).get(asked.batch)
    if sums is not None:
        if newer and known.state.phase is not Phase.IDLE:
            return BatchCheck(known, sums)  # the run becomes current once the transaction has ended
        return BatchCheck(state.in_run(known, asked.run, now_ms), sums)
    if asked.batch <= known.last_committed:
        raise errors.ReplayDiffers(
            f"batch {asked.batch} of {asked.job!r} is not above batch {known.last_committed}, "
            "which is committed, and is not among the newest batches: a checkpoint was restored "
            "from too far back.  Restore a newer one, or choose another transactional id"
        )
    if known.state.phase is Phase.PREPARED:
        raise still_ending(known)
    if known.state.phase is Phase.ONGOING:
        if newer and known.awaited is not None:
            raise errors.ConcurrentTransactions(awaits_table(known))
        if newer:
            ending = state.prepared(
                state.in_run(known, asked.run, now_ms), now_ms, commit=False, reason=state.NEWER_RUN
            )
            return preparation(ids, still_ending(ending), ending)
        if known.batch != asked.batch:
            raise errors.InvalidTxnState(
                f"{known.name} is open in run {known.run}: batch {asked.batch} comes after its end"
            )
        return BatchCheck(known, open=known.open, awaiting=not known.open)
    if (known.opened_by, known.batch) == (asked.run, asked.batch):
        raise ended(known)
    return BatchCheck(state.in_run(known, asked.run, now_ms))


def awaits_table(known: Job) -> str:
    """Return why a request has to wait for the table of a prepared batch."""
    assert known.awaited is not None
    table = known.awaited.table
    return (
        f"{known.name} waits for {table}, which decides it: it commits if the table has version "
        f"{table.version} of the application id {table.app!r}, else it aborts.  Its driver decides "
        f"when it returns; an operator decides with pk transactions resolve {known.job}"
    )


def ended(known: Job) -> errors.TransactionAborted:
    """Return the refusal of a request for a batch that was aborted in its run."""
    if known.reason == plain.TIMED_OUT:
        return errors.TransactionTimedOut(
            f"{known.name} was aborted: no task was heard for participant_lease_ms, or it was open "
            "longer than participant_transaction_max_ms.  Start the query again"
        )
    reason = known.reason or "the driver asked for it"
    return errors.TransactionAborted(f"{known.name} was aborted: {reason}.  Start the query again")


def _check_names(asked: wire.JobBatch) -> None:
    sizes = {
        "transactional id": (asked.job, limits.TRANSACTIONAL_ID_BYTES_MAX),
        "query id": (asked.query, limits.JOB_NAME_BYTES_MAX),
        "run id": (asked.run, limits.JOB_NAME_BYTES_MAX),
    }
    for what, (name, most) in sizes.items():
        size = len(name.encode())
        if not 1 <= size <= most:
            raise errors.InvalidRequest(f"a {what} has 1 to {most} bytes of utf-8, not {size}")
    if asked.batch < 0:
        raise errors.InvalidRequest(f"batch {asked.batch}: batches count from 0")
