"""Decisions that end the transaction of a job: commits, aborts, leases, and the written markers.

Invariants
  N1  A batch commits only if its commit finds it open in the same run, and every named participant
      is part of it with its pair (X7).  No registered partition may have had an unclean election
      since it was registered.
  N2  The prepare record and the batch in the history are one decision.  So a batch is in the
      history if and only if it is committed.
  N3  A commit of a batch that is committed succeeds only with the sums of the history (X9).
"""

from __future__ import annotations

from collections.abc import Sequence

from pk import errors
from pk.effects import Decision, Effect, Publish
from pk.server.transactions import commands
from pk.server.transactions import state as plain
from pk.server.transactions.endings import unclean_election
from pk.server.transactions.ids import Out, TransactionalIds
from pk.server.transactions.participants import records, state
from pk.server.transactions.participants.conditions import (
    BatchCheck,
    awaits_table,
    checked,
    ended,
)
from pk.server.transactions.participants.events import (
    changed,
    preparation,
    prepared_event,
    still_ending,
)
from pk.server.transactions.participants.state import HISTORY_MAX, BatchSums, Job
from pk.server.transactions.records import BATCH, TransactionLogRecord
from pk.server.transactions.state import Phase
from pk.types import ProducerId
from pk.wire import pk_pb2 as wire


def commit(ids: TransactionalIds, command: commands.CommitParticipants, now_ms: int) -> Out:
    """Commit the named participants of a batch and abort its others."""
    request = command.request
    before = ids.jobs.items().get(request.batch.job)
    sums = records.sums_of(request.sums)
    found = checked(ids, request.batch, now_ms)
    if isinstance(found, Decision):
        return found
    if found.sums is not None:
        check_same(found, sums, request)
        reply = wire.CommitParticipantsReply(
            already_committed=True, sums=records.sums_to_wire(found.sums)
        )
        return Decision(changed(before, found.known), reply)
    if found.awaiting:
        raise errors.InvalidTxnState(f"a commit needs evidence: {awaits_table(found.known)}")
    if not found.open:
        return _commit_empty(ids, found.known, request, sums, now_ms)
    known = found.known
    named = named_by(ids, known, request.participants)
    reason = unclean_election(known, command.image)
    if reason:
        ending = state.prepared(known, now_ms, commit=False, reason=reason)
        return preparation(ids, ended(ending), ending)
    ending = state.prepared(known, now_ms, named=named, commit=True)
    return preparation(ids, wire.CommitParticipantsReply(), ending, remembered(ids, ending, sums))


def named_by(
    ids: TransactionalIds, known: Job, named: Sequence[wire.Participant]
) -> set[ProducerId]:
    """Return the named producer ids; each must be part of the open transaction (X7).

    A driver that names one twice has counted the rows of an attempt twice.
    """
    pool = ids.jobs.participants(known.job)
    seen: set[ProducerId] = set()
    for each in named:
        participant = pool.get(each.producer_id)
        if (
            participant is None
            or not known.joined(participant)
            or participant.epoch != each.producer_epoch
        ):
            raise errors.InvalidTxnState(
                f"({each.producer_id}, {each.producer_epoch}) is not part of {known.name}, so "
                "nothing was committed: abort the batch and write it again"
            )
        if each.producer_id in seen:
            raise errors.InvalidRequest(
                f"({each.producer_id}, {each.producer_epoch}) is named twice for {known.name}, so "
                "nothing was committed: name each attempt of a task once"
            )
        seen.add(each.producer_id)
    return seen


def _commit_empty(
    ids: TransactionalIds,
    known: Job,
    request: wire.CommitParticipantsRequest,
    sums: BatchSums,
    now_ms: int,
) -> Out:
    """Record a batch without participants."""
    if request.participants or sums:
        raise errors.InvalidTxnState(
            f"batch {request.batch.batch} of {known.job!r} is not open, so its participants cannot "
            "be committed: its coordinator aborted it, or they joined another batch"
        )
    after = state.recorded(known, request.batch.batch, now_ms)
    written = [records.job_record(after), *remembered(ids, after, sums)]
    return Decision(written, wire.CommitParticipantsReply())


def remembered(ids: TransactionalIds, known: Job, sums: BatchSums) -> list[TransactionLogRecord]:
    """Return the records that add the job's batch to the history, and drop the oldest ones."""
    kept = sorted(ids.jobs.history(known.job))
    surplus = kept[: max(0, len(kept) + 1 - HISTORY_MAX)]
    return [
        records.batch_record(known.job, known.batch, sums),
        *(records.removed(BATCH, known.job, each) for each in surplus),
    ]


def check_same(
    found: BatchCheck,
    sums: BatchSums,
    request: wire.CommitParticipantsRequest | wire.PrepareParticipantsRequest,
) -> None:
    """Raise `ReplayDiffers` unless the sums are those of the history (N3)."""
    assert found.sums is not None
    if sums == found.sums:
        return
    newest = request.batch.batch == found.known.last_committed
    if request.accept_mismatch and newest:
        return
    topics = sorted({*sums, *found.sums})
    lines = "; ".join(
        f"topic id {topic_id}: committed {found.sums.get(topic_id, 'nothing')}, now "
        f"{sums.get(topic_id, 'nothing')}"
        for topic_id in topics
        if sums.get(topic_id) != found.sums.get(topic_id)
    )
    advice = (
        "The query does not give the same rows for the same batch.  onReplayMismatch=accept keeps "
        "the committed rows and drops those of this run"
        if newest
        else "Only the newest committed batch may be accepted: restore a newer checkpoint"
    )
    raise errors.ReplayDiffers(
        f"batch {request.batch.batch} of {request.batch.job!r} is committed with other rows: "
        f"{lines}.  {advice}"
    )


def abort(ids: TransactionalIds, command: commands.AbortParticipants, now_ms: int) -> Out:
    """Abort the open batch of a run; a committed and a prepared batch stay what they are."""
    asked = command.request.batch
    known = ids.find_job(asked.job)
    if known is None or known.query != asked.query:
        return Decision([], wire.AbortParticipantsReply())
    if asked.batch in ids.jobs.history(asked.job):
        return Decision([], wire.AbortParticipantsReply(committed=True))
    ours = known.run == asked.run and known.batch == asked.batch
    if not ours or not known.open:
        return Decision([], wire.AbortParticipantsReply())
    ending = state.prepared(known, now_ms, commit=False)
    return preparation(ids, wire.AbortParticipantsReply(), ending)


def abort_for_operator(
    ids: TransactionalIds, command: commands.AbortTransaction, now_ms: int
) -> Out:
    """Abort the open transaction of a job for an operator."""
    name = command.request.transactional_id
    known = ids.jobs.items()[name]
    if known.state.phase is Phase.PREPARED:
        raise still_ending(known)
    if known.state.phase is Phase.IDLE:
        raise errors.InvalidTxnState(
            f"{name!r} is {known.state.label}: it has no transaction to abort"
        )
    if known.awaited is not None:
        raise errors.InvalidTxnState(f"no abort without evidence: {awaits_table(known)}")
    ending = state.prepared(known, now_ms, commit=False, reason=plain.BY_OPERATOR)
    return preparation(ids, wire.AbortTransactionReply(), ending)


def expire(ids: TransactionalIds, command: commands.ExpireBatches, now_ms: int) -> Out:
    """Abort the named transactions that are still open."""
    out: list[TransactionLogRecord] = []
    effects: list[Effect] = []
    for job, transaction in command.batches:
        known = ids.jobs.items().get(job)
        if known is None or known.transaction != transaction or not known.open:
            continue
        ending = state.prepared(known, now_ms, commit=False, reason=plain.TIMED_OUT)
        out.append(records.job_record(ending))
        effects.append(Publish(commands.PREPARED, prepared_event(ids, ending)))
    return Decision(out, len(out), effects)


def markers_written(ids: TransactionalIds, command: commands.BatchMarked, now_ms: int) -> Out:
    """Complete the prepared transaction of a job."""
    known = ids.jobs.items().get(command.job)
    if (
        known is None
        or known.state.phase is not Phase.PREPARED
        or known.transaction != command.transaction
    ):
        return Decision([], False)
    after = state.completed(known, now_ms)
    event = commands.BatchEnded(known.job, known.transaction, known.state.committed)
    return Decision([records.job_record(after)], True, [Publish(commands.ENDED, event)])
