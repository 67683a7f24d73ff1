"""Decisions about batches whose end a Delta table decides: log and table together (X11).

The driver prepares the participants, commits to the table, and then commits them here.  Between the
two commits only the table says how the batch must end.

Invariants
  W1  A batch is prepared only if it could commit: the conditions are those of a commit (X7).
  W2  A prepared batch ends only by evidence: a request that names its table and the number of its
      transaction.  Evidence about an earlier transaction of the same batch changes nothing: the
      batch was written again since the table was read.
  W3  Leases, the longest time, unclean elections and new runs do not end a prepared batch.  A
      commit reports an unclean election since the participants joined.
  W4  The participants and the sums of the commit are those that were prepared.
"""

from __future__ import annotations

from typing import TypeGuard

from pk import errors, limits
from pk.effects import Decision, Publish
from pk.server.transactions import commands
from pk.server.transactions import state as plain
from pk.server.transactions.endings import unclean_election
from pk.server.transactions.ids import Out, TransactionalIds
from pk.server.transactions.participants import records, state
from pk.server.transactions.participants.conditions import awaits_table, checked, ended
from pk.server.transactions.participants.endings import check_same, named_by, remembered
from pk.server.transactions.participants.events import awaits_event, changed, preparation
from pk.server.transactions.participants.state import Job, PreparedTable
from pk.transactional_ids import FoundBy
from pk.types import ProducerId
from pk.wire import pk_pb2 as wire


def prepare(ids: TransactionalIds, command: commands.PrepareParticipants, now_ms: int) -> Out:
    """Prepare the named participants of a batch; from then on a table decides its end (W1)."""
    request = command.request
    before = ids.jobs.items().get(request.batch.job)
    table, sums = records.table_of(request.table), records.sums_of(request.sums)
    _check_table(table)
    found = checked(ids, request.batch, now_ms)
    if isinstance(found, Decision):
        return found
    known = found.known
    if found.sums is not None:
        check_same(found, sums, request)
        reply = wire.PrepareParticipantsReply(
            already_committed=True, sums=records.sums_to_wire(found.sums)
        )
        return Decision(changed(before, known), reply)
    if found.awaiting:
        _check_repeated(known, table, {each.producer_id for each in request.participants})
        return Decision([], wire.PrepareParticipantsReply(transaction=known.transaction))
    if not found.open or not request.participants:
        raise errors.InvalidTxnState(
            f"batch {request.batch.batch} of {known.job!r} has no participants to prepare: its "
            "coordinator aborted it, or no task joined.  A batch without rows is committed to the "
            "table first and needs no preparation"
        )
    named = named_by(ids, known, request.participants)
    reason = unclean_election(known, command.image)
    if reason:
        ending = state.prepared(known, now_ms, commit=False, reason=reason)
        return preparation(ids, ended(ending), ending)
    after = state.awaiting(known, named, sums, table, now_ms)
    event = Publish(commands.BATCH_AWAITS, awaits_event(after))
    written = [records.job_record(after)]
    return Decision(written, wire.PrepareParticipantsReply(transaction=after.transaction), [event])


def _check_table(table: PreparedTable) -> None:
    """Raise `InvalidRequest` for names that no table can have."""
    sizes = {
        "URL": (table.url, limits.TABLE_URL_BYTES_MAX),
        "id": (table.table_id, limits.JOB_NAME_BYTES_MAX),
        "application id": (table.app, limits.JOB_NAME_BYTES_MAX),
    }
    for what, (name, most) in sizes.items():
        size = len(name.encode())
        if not 1 <= size <= most:
            raise errors.InvalidRequest(
                f"the {what} of a table has 1 to {most} bytes of utf-8, not {size}"
            )
    if table.version < 0:
        raise errors.InvalidRequest(f"version {table.version}: versions count from 0")


def _check_repeated(known: Job, table: PreparedTable, named: set[ProducerId]) -> None:
    """Raise `InvalidTxnState` unless a request repeats the one before it."""
    assert known.awaited is not None
    if table != known.awaited.table or named != known.named:
        raise errors.InvalidTxnState(f"it is prepared already: {awaits_table(known)}")


def commit_by_evidence(
    ids: TransactionalIds, command: commands.CommitParticipants, now_ms: int
) -> Out:
    """Commit a prepared batch, because its table has it (W2)."""
    request = command.request
    known = ids.find_job(request.batch.job)
    sums = ids.jobs.history(request.batch.job).get(request.batch.batch)
    if sums is not None:
        reply = wire.CommitParticipantsReply(
            already_committed=True, sums=records.sums_to_wire(sums)
        )
        return Decision([], reply)
    if not _is_named(known, request.batch, request.evidence):
        raise _not_awaited(known, request.batch)
    if known.awaited is None:
        raise ended(known)
    warning = unclean_election(known, command.image)  # W3
    ending = state.prepared(known, now_ms, named=known.named, commit=True)
    return preparation(
        ids,
        wire.CommitParticipantsReply(warning=warning),
        ending,
        remembered(ids, ending, known.awaited.sums),  # W4
    )


def abort_by_evidence(
    ids: TransactionalIds, command: commands.AbortParticipants, now_ms: int
) -> Out:
    """Abort a prepared batch, because its table does not have it (W2)."""
    request = command.request
    known = ids.find_job(request.batch.job)
    if request.batch.batch in ids.jobs.history(request.batch.job):
        return Decision([], wire.AbortParticipantsReply(committed=True))
    if not _is_named(known, request.batch, request.evidence):
        raise _not_awaited(known, request.batch)
    if known.awaited is None:
        return Decision([], wire.AbortParticipantsReply())  # it was aborted before
    reason = f"{known.awaited.table} did not have it"
    if request.evidence.found_by == FoundBy.OPERATOR:
        reason = plain.BY_OPERATOR
    ending = state.prepared(known, now_ms, commit=False, reason=reason)
    return preparation(ids, wire.AbortParticipantsReply(), ending)


def _is_named(
    known: Job | None, asked: wire.JobBatch, evidence: wire.TableEvidence
) -> TypeGuard[Job]:
    """Return whether evidence is about the prepared or the ended transaction of a job (W2)."""
    if known is None or known.open:
        return False
    if (known.batch, known.transaction) != (asked.batch, evidence.transaction):
        return False
    return known.awaited is None or known.awaited.table == records.table_of(evidence.table)


def _not_awaited(known: Job | None, asked: wire.JobBatch) -> errors.InvalidTxnState:
    name = f"batch {asked.batch} of {asked.job!r}"
    if known is None:
        return errors.InvalidTxnState(f"{name} is not prepared: the coordinator knows no such job")
    return errors.InvalidTxnState(
        f"{name} does not wait for this table in this transaction, so nothing was changed: the "
        f"job is {known.label} with batch {known.batch}.  Read the table again"
    )
