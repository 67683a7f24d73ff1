"""The driver's requests about a batch that a Delta table decides (X11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from pk import errors
from pk.client.batch_committer import BatchCommitter
from pk.client.coordinator_calls import CoordinatorCalls
from pk.client.participant import BatchOfRun, named, sums_to_wire
from pk.transactional_ids import FoundBy
from pk.types import NONE, RowSums
from pk.wire import frames
from pk.wire import pk_pb2 as wire


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


class _Calls(CoordinatorCalls):
    """Calls that also ask again if the description of a job is a retriable error."""

    async def _attempt(self, request: Message) -> Message:
        reply = await super()._attempt(request)
        described: Any = reply
        for each in getattr(described, "transactions", ()):
            if each.HasField("error") and (error := frames.raise_error(each.error)).retriable:
                raise error
        return reply


class TableBatchCommitter(BatchCommitter):
    """Ends one batch together with a Delta table; see `BatchCommitter`."""

    def __init__(self, bootstrap: str | Iterable[str], batch: BatchOfRun, **options: Any) -> None:
        super().__init__(bootstrap, batch, **options)
        self._batch = batch
        world, attempt_ms = self._thread.world, self._options["request_timeout_ms"]
        self._coordinator = _Calls(world, self._cluster, batch.job, attempt_ms)

    def job(self) -> tuple[int, AwaitedBatch | None]:
        """Return the highest committed batch of the job (-1 = none), and its prepared batch."""
        request = wire.DescribeTransactionsRequest(transactional_ids=[self._batch.job])
        (found,) = self._ask(request).transactions
        if not found.HasField("job"):
            return NONE, None
        if not found.job.HasField("awaited"):
            return found.job.last_committed, None
        said = found.job.awaited
        table = said.table
        deciding = DecidingTable(table.url, table.table_id, table.app, table.version)
        return found.job.last_committed, AwaitedBatch(found.job.batch, deciding, said.transaction)

    def prepare(
        self,
        participants: Sequence[tuple[int, int]],
        sums: Mapping[str, RowSums],
        table: DecidingTable,
        *,
        accept_mismatch: bool = False,
    ) -> AwaitedBatch | None:
        """Prepare the named participants; None if the batch is committed already.

        Raises what `commit` raises.
        """
        request = wire.PrepareParticipantsRequest(
            batch=self._batch.to_wire(),
            participants=named(participants),
            sums=sums_to_wire(sums),
            accept_mismatch=accept_mismatch,
            table=wire.PreparedTable(**table._asdict()),
        )
        reply: wire.PrepareParticipantsReply = self._ask(request)
        if reply.already_committed:
            return None
        return AwaitedBatch(self._batch.batch, table, reply.transaction)

    def decide(self, awaited: AwaitedBatch, *, commit: bool) -> str:
        """End a prepared batch by what its table has; return the coordinator's warning, or ""."""
        batch = self._batch._replace(batch=awaited.batch).to_wire()
        evidence = wire.TableEvidence(
            table=wire.PreparedTable(**awaited.table._asdict()),
            transaction=awaited.transaction,
            found_by=FoundBy.DRIVER,
        )
        if not commit:
            self._ask(wire.AbortParticipantsRequest(batch=batch, evidence=evidence))
            return ""
        reply = self._ask(wire.CommitParticipantsRequest(batch=batch, evidence=evidence))
        return str(reply.warning)

    def _ask(self, request: Message) -> Any:
        if self._closed:
            raise errors.ClosedError("the driver's connection was closed")
        seconds = self._seconds(None)
        work = self._coordinator.call(request, max(1, int(seconds * 1000)))
        return self._thread.run(work, seconds)
