"""The transaction of a batch: a producer for each attempt of a task, and the driver (X5, X9).

    driver                                task attempts
    BatchOfRun(job, query, run, batch)    TaskProducer(…, batch): join(topics)
                                          send, send_batch, finish() → (producer id, epoch)
    BatchCommitter.commit(participants)

`TaskProducer` (client/task_producer.py) is the façade of `ParticipantEngine`; `BatchCommitter` is
in client/batch_committer.py.  World-generic.

Invariants
  A1  Records are sent under the pair of the join only.  A record that fails in any way makes
      `finish` fail, so the attempt is never named in a commit.
  A2  `finish` returns once every record is acknowledged.
  A3  The lease is renewed until `finish` or `close`, by the loop of the client.  So a task that
      computes for a long time keeps it, and a dead process does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from pk import errors
from pk.client.coordinator_calls import CoordinatorCalls
from pk.client.network_client import NetworkClient
from pk.client.produce_engine import ProduceEngine
from pk.client.table_driver import AwaitedBatch, DecidingTable, JobState
from pk.client.transaction_manager import TransactionCall, only_abort, same_error
from pk.tasks import TaskRegistry
from pk.transactional_ids import FoundBy
from pk.types import NONE, RowSums
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

_log = logging.getLogger("pk.client")

#: A heartbeat is sent this often within a lease.
BEATS = 3


class BatchOfRun(NamedTuple):
    """A batch of a query, in one run of it.

    job: transactional id of the kind participants.  query, run: as Spark names them.  batch_write:
    the job is one batch write, and the brokers forget it after a day.  write_unknown: write the
    batch although a restore has lost whether it is committed (rule X9).
    """

    job: str
    query: str
    run: str
    batch: int
    batch_write: bool = False
    write_unknown: bool = False

    def to_wire(self) -> wire.JobBatch:
        """Return the batch as requests name it."""
        return wire.JobBatch(**self._asdict())


def named(participants: Iterable[tuple[int, int]]) -> list[wire.Participant]:
    """Return pairs (producer id, epoch) as requests name them."""
    return [
        wire.Participant(producer_id=each, producer_epoch=epoch) for each, epoch in participants
    ]


def sums_to_wire(sums: Mapping[str, RowSums]) -> list[wire.TopicSums]:
    """Return the sums by topic id, in the order of the ids."""
    return [
        wire.TopicSums(topic_id=each, **found._asdict()) for each, found in sorted(sums.items())
    ]


class BatchCalls:
    """The driver's requests about a batch.  attempt_ms: how long one attempt may take"""

    def __init__(
        self, world: World, cluster: NetworkClient, batch: BatchOfRun, attempt_ms: int
    ) -> None:
        self._cluster = cluster
        self._batch = batch
        self._calls = CoordinatorCalls(world, cluster, batch.job, attempt_ms)

    async def commit(
        self,
        participants: Iterable[tuple[int, int]],
        sums: Mapping[str, RowSums],
        timeout_ms: int,
        *,
        accept_mismatch: bool = False,
    ) -> bool:
        """Commit as `BatchCommitter.commit`; topics are named by topic id."""
        request = wire.CommitParticipantsRequest(
            batch=self._batch.to_wire(),
            participants=named(participants),
            sums=sums_to_wire(sums),
            accept_mismatch=accept_mismatch,
            metadata_offset=self._cluster.metadata.offset,
        )
        reply: wire.CommitParticipantsReply = await self._calls.call(request, timeout_ms)
        return reply.already_committed

    async def abort(self, timeout_ms: int) -> bool:
        """Abort as `BatchCommitter.abort`."""
        request = wire.AbortParticipantsRequest(batch=self._batch.to_wire())
        reply: wire.AbortParticipantsReply = await self._calls.call(request, timeout_ms)
        return reply.committed


class _DescribingCalls(CoordinatorCalls):
    """Calls that also ask again if the description of a job is a retriable error."""

    async def _attempt(self, request: Message) -> Message:
        reply = await super()._attempt(request)
        described: Any = reply
        for each in getattr(described, "transactions", ()):
            if each.HasField("error") and (error := frames.raise_error(each.error)).retriable:
                raise error
        return reply


class TableBatchCalls:
    """The driver's requests about a batch that a Delta table decides (X11).

    attempt_ms: how long one attempt may take
    """

    def __init__(
        self, world: World, cluster: NetworkClient, batch: BatchOfRun, attempt_ms: int
    ) -> None:
        self._batch = batch
        self._calls = _DescribingCalls(world, cluster, batch.job, attempt_ms)

    async def job(self, timeout_ms: int) -> JobState:
        """Return the highest committed batch of the job, and its prepared batch."""
        request = wire.DescribeTransactionsRequest(transactional_ids=[self._batch.job])
        (found,) = (await self._calls.call(request, timeout_ms)).transactions
        if not found.HasField("job"):
            return JobState(NONE, None)
        if not found.job.HasField("awaited"):
            return JobState(found.job.last_committed, None)
        said = found.job.awaited
        table = said.table
        deciding = DecidingTable(table.url, table.table_id, table.app, table.version)
        awaited = AwaitedBatch(found.job.batch, deciding, said.transaction)
        return JobState(found.job.last_committed, awaited)

    async def prepare(
        self,
        participants: Sequence[tuple[int, int]],
        sums: Mapping[str, RowSums],
        table: DecidingTable,
        timeout_ms: int,
        *,
        accept_mismatch: bool = False,
    ) -> AwaitedBatch | None:
        """Prepare as `TableBatchCommitter.prepare`."""
        request = wire.PrepareParticipantsRequest(
            batch=self._batch.to_wire(),
            participants=named(participants),
            sums=sums_to_wire(sums),
            accept_mismatch=accept_mismatch,
            table=wire.PreparedTable(**table._asdict()),
        )
        reply: wire.PrepareParticipantsReply = await self._calls.call(request, timeout_ms)
        if reply.already_committed:
            return None
        return AwaitedBatch(self._batch.batch, table, reply.transaction)

    async def decide(self, awaited: AwaitedBatch, timeout_ms: int, *, commit: bool) -> str:
        """Decide as `TableBatchCommitter.decide`."""
        batch = self._batch._replace(batch=awaited.batch).to_wire()
        evidence = wire.TableEvidence(
            table=wire.PreparedTable(**awaited.table._asdict()),
            transaction=awaited.transaction,
            found_by=FoundBy.DRIVER,
        )
        if not commit:
            abort = wire.AbortParticipantsRequest(batch=batch, evidence=evidence)
            await self._calls.call(abort, timeout_ms)
            return ""
        request = wire.CommitParticipantsRequest(batch=batch, evidence=evidence)
        reply = await self._calls.call(request, timeout_ms)
        return str(reply.warning)


class ParticipantEngine:
    """The participant of one producer, beside its `ProduceEngine`.

    `options` are resolved (settings.PRODUCER).
    """

    def __init__(
        self,
        world: World,
        cluster: NetworkClient,
        engine: ProduceEngine,
        options: Mapping[str, Any],
        batch: BatchOfRun,
    ) -> None:
        self._world = world
        self._cluster = cluster
        self._engine = engine
        self._batch = batch
        self._calls = CoordinatorCalls(world, cluster, batch.job, options["request_timeout_ms"])
        self._tasks = TaskRegistry()
        self._error: errors.PkError | None = errors.InvalidTxnState("the task has not joined yet")
        self._stepped = asyncio.Event()
        self.joined: wire.JoinTransactionReply | None = None
        engine.on_step = self._on_engine_step
        engine.refuse(self._error)

    async def join(self, topics: Sequence[str], timeout_ms: int) -> wire.JoinTransactionReply:
        """Join the batch.  Raises the coordinator's refusal, or `RequestTimedOut`."""
        if self.joined is not None:
            raise errors.InvalidTxnState("the task has joined already")
        topic_ids = [(await self._cluster.topic(each, timeout_ms)).topic_id for each in topics]
        request = wire.JoinTransactionRequest(
            batch=self._batch.to_wire(),
            topic_ids=topic_ids,
            metadata_offset=self._cluster.metadata.offset,
        )
        reply: wire.JoinTransactionReply = await self._calls.call(request, timeout_ms)
        self.joined = reply
        if reply.committed:
            self._fail(errors.InvalidTxnState("the batch is committed already: write nothing"))
        else:
            self._error = None
            self._engine.begin_transaction(reply.producer_id, reply.producer_epoch)
            self._tasks.spawn(self._beat(reply))
        return reply

    def refusal(self, call: TransactionCall) -> errors.PkError | None:
        """Return the error of `send`, or of the calls that a task does not make."""
        if call is not TransactionCall.SEND:
            return errors.InvalidTxnState(f"{call.value}: the driver of a batch ends it")
        return None if self._error is None else same_error(self._error)

    async def finish(self, timeout_ms: int) -> None:
        """Wait until every record is acknowledged, and report that the task has finished (A2).

        Raises `TransactionAborted` if a record failed or the coordinator no longer has the
        participant, `RequestTimedOut`.
        """
        self._engine.poke(flush=True)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not self._engine.settled and self._error is None:
                    self._stepped.clear()
                    await self._stepped.wait()
        except TimeoutError:
            raise errors.RequestTimedOut(
                f"records of batch {self._batch.batch} of {self._batch.job!r} are not acknowledged "
                f"within {timeout_ms} ms"
            ) from None
        if self._error is not None:
            raise same_error(self._error)
        assert self.joined is not None
        self._fail(errors.InvalidTxnState("the task has finished"))
        refused = await self._heartbeat(self.joined, finished=True)
        if refused is not None:
            raise refused

    async def close(self) -> None:
        """End the heartbeats."""
        await self._tasks.close()

    # -- the state of the transaction --------------------------------------------------------------

    def _on_engine_step(self) -> None:
        if self._engine.sender.failed is not None and self._error is None:  # A1
            self._fail(only_abort(self._engine.sender.failed))
        self._stepped.set()

    def _fail(self, error: errors.PkError) -> None:
        self._error = error
        self._engine.discard(error)

    async def _beat(self, joined: wire.JoinTransactionReply) -> None:
        while self._error is None:
            await self._world.clock.sleep_ms(joined.lease_ms / BEATS)
            if self._error is None:
                refused = await self._heartbeat(joined, finished=False)
                if refused is not None and self._error is None:
                    self._fail(refused)

    async def _heartbeat(
        self, joined: wire.JoinTransactionReply, *, finished: bool
    ) -> errors.TransactionAborted | None:
        """Send a heartbeat; return the error of a task that is not a participant any more."""
        request = wire.ParticipantHeartbeatRequest(
            batch=self._batch.to_wire(),
            participant=wire.Participant(
                producer_id=joined.producer_id, producer_epoch=joined.producer_epoch
            ),
            finished=finished,
        )
        try:
            await self._calls.call(request, max(1, joined.lease_ms // BEATS))
        except errors.RetriableError as failure:
            _log.warning("%s: no heartbeat: %s", self._batch.job, failure.message)
        except errors.PkError as refusal:
            return only_abort(refusal)
        return None
