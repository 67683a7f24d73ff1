"""Batches of jobs that wait for a Delta table: what a coordinator tells, and an operator's word."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from pk import errors
from pk.transactional_ids import FoundBy
from pk.wire import pk_pb2 as wire

#: The state of a job with such a batch.
AWAITING_TABLE = "AwaitingTable"


@dataclass(slots=True, frozen=True)
class AwaitedTable:
    """The Delta table that decides the prepared batch of a job (X11).

    The batch commits if the table has `version` of the application id `app`, else it aborts.
    table_id: Delta's id of the table.  since_ms: when the batch was prepared, by the wall clock of
    its coordinator.
    """

    url: str
    table_id: str
    app: str
    version: int
    since_ms: int


def awaited_of(said: wire.JobDescription) -> AwaitedTable | None:
    """Convert the reply."""
    if not said.HasField("awaited"):
        return None
    table = said.awaited.table
    return AwaitedTable(table.url, table.table_id, table.app, table.version, said.awaited.since_ms)


def resolution(said: wire.TransactionDescription, *, commit: bool) -> Message:
    """Return the request that ends a prepared batch as an operator decided.

    Raises `InvalidTxnState` unless the id has one.
    """
    name, job = said.transactional_id, said.job
    if not job.HasField("awaited"):
        raise errors.InvalidTxnState(
            f"{name!r} is {said.state}: it has no prepared batch that waits for a table"
        )
    batch = wire.JobBatch(
        job=name, query=job.query, run=job.run, batch=job.batch, batch_write=job.batch_write
    )
    evidence = wire.TableEvidence(
        table=job.awaited.table, transaction=job.awaited.transaction, found_by=FoundBy.OPERATOR
    )
    if commit:
        return wire.CommitParticipantsRequest(batch=batch, evidence=evidence)
    return wire.AbortParticipantsRequest(batch=batch, evidence=evidence)
