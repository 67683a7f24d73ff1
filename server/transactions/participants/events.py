"""What the decisions about jobs publish, and the records that go with it."""

from __future__ import annotations

from collections.abc import Sequence

from pk import errors
from pk.effects import Decision, Publish
from pk.server.transactions import commands
from pk.server.transactions.ids import Out, TransactionalIds
from pk.server.transactions.participants import records
from pk.server.transactions.participants.state import Job
from pk.server.transactions.records import TransactionLogRecord


def changed(before: Job | None, after: Job) -> list[TransactionLogRecord]:
    """Return the record of a job, if the decision changed it."""
    return [] if before == after else [records.job_record(after)]


def began_event(known: Job) -> commands.BatchBegan:
    """Return the event of an open job."""
    return commands.BatchBegan(known.job, known.transaction, known.started_ms)


def awaits_event(known: Job) -> commands.BatchAwaits:
    """Return the event of a job whose batch a table decides."""
    assert known.awaited is not None
    return commands.BatchAwaits(
        known.job, known.transaction, known.batch, known.awaited.table.url, known.awaited.since_ms
    )


def preparation(
    ids: TransactionalIds,
    reply: object,
    ending: Job,
    more: Sequence[TransactionLogRecord] = (),
) -> Out:
    """Return a `Decision` that writes a prepared job, and publishes it."""
    event = Publish(commands.PREPARED, prepared_event(ids, ending))
    return Decision([records.job_record(ending), *more], reply, [event])


def prepared_event(ids: TransactionalIds, known: Job) -> commands.BatchPrepared:
    """Return the event of a prepared job: a marker for each participant (X5)."""
    committed = known.state.committed
    markers = tuple(
        commands.ParticipantMarker(
            producer_id, each.epoch + 1, committed and producer_id in known.named
        )
        for producer_id, each in ids.jobs.joined(known)
    )
    return commands.BatchPrepared(
        known.job,
        known.transaction,
        known.batch,
        markers,
        tuple(known.partitions),
        known.metadata_offset,
    )


def still_ending(known: Job) -> errors.ConcurrentTransactions:
    """Return the refusal of a request that has to wait for the markers."""
    return errors.ConcurrentTransactions(f"{known.name} is still being ended: ask again")
