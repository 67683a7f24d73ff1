"""The attempts of tasks in a simulated run: each has a producer of its own, as on an executor."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from pk import errors
from pk.client.options import producer_options
from pk.client.participant import BatchOfRun, ParticipantEngine
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.sim.job_history import Attempt, JobHistory, JobRow, PlannedBatch
from pk.sim.oracle import digest_of
from pk.sim.transaction_history import TransactionRecord
from pk.sim.transactions import FASTER, TransactionClient
from pk.sim.workload import OPEN_MS, RETRIES, cluster_of
from pk.types import RowSums
from pk.wire import pk_pb2 as wire
from pk.world import World

#: How long a task waits for an outcome of its calls.
JOIN_MS, FINISH_MS = 8_000, 12_000
DELIVERY_MS = (2_500, 10_000)
#: In so many attempts the join names the first topic only.
PARTIAL_JOINS = 0.1
#: In so many attempts a task computes for longer than a lease before it finishes.
SLOW = 0.03
SLOW_MS = (3_000.0, 12_000.0)
#: The header that names the attempt of a record, so that a reader knows its sender.
HEADER = "attempt"


class TaskResult(NamedTuple):
    """What a successful attempt tells the driver; `attempt` is None if it wrote nothing, because
    the batch was committed already."""

    attempt: Attempt | None


class JobClient(NamedTuple):
    """What all drivers and tasks of a run share."""

    shared: TransactionClient
    history: JobHistory

    @property
    def now_ms(self) -> float:
        return self.shared.oracle.now_ms()

    def problem(self, who: str, job: str, error: errors.PkError) -> None:
        """Check an error that ends an attempt or a run.

        Leases, drivers, newer runs and records that failed explain aborts.  A newer run explains
        that a run is fenced.  If a table decides batches, a slow attempt of a task finds its batch
        prepared, and a slow driver finds it ended by another driver or by the resolver.  A deposed
        coordinator may refuse a batch that it never heard of.
        """
        shared = self.shared
        shared.tell(f"{who}: {error!r}")
        shared.count(f"{type(error).__name__} of jobs")
        explained = isinstance(
            error, errors.RetriableError | errors.TransactionAborted | errors.ClosedError
        )
        if isinstance(error, errors.InvalidTxnState):
            explained = job in shared.options.together_job_ids or self.history.deposed(job)
        if isinstance(error, errors.ProducerFenced):
            explained = len(self.history.jobs[job].runs) > 1
        if not (explained or self.history.coordinator_lost(job)):
            shared.trouble(f"V25: {who}: nothing explains {error!r}")


class SimTask:
    """One attempt of a task."""

    def __init__(
        self, world: World, client: JobClient, batch: PlannedBatch, run: str, task: int, name: str,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.name = name
        self._world = world
        self._client = client
        self._batch = batch
        self._run = run
        self._task = task
        self._rng = rng
        options, _ = producer_options(
            {
                "transactional_id": batch.job,
                "delivery_timeout_ms": rng.choice(DELIVERY_MS),
                "linger_ms": 2,
                "batch_size": rng.choice([1_000, 20_000]),
                **RETRIES,
            }
        )
        cluster = cluster_of(world, client.shared.bootstrap, name)
        self._engine = ProduceEngine(world, cluster, options)
        of_run = BatchOfRun(batch.job, f"q-{batch.job}", run, batch.number)
        self._participant = ParticipantEngine(world, cluster, self._engine, options, of_run)

    async def execute(self) -> TaskResult | None:
        """Write the rows of the task; None: the attempt failed."""
        try:
            return await self._execute()
        except errors.PkError as error:
            self._client.problem(self.name, self._batch.job, error)
            return None
        finally:
            await self._participant.close()
            await self._engine.close()

    async def _execute(self) -> TaskResult | None:
        batch, rng, history = self._batch, self._rng, self._client.history
        self._engine.cluster.start()
        topics = batch.topics or sorted(history.topics)[:1]
        named = topics[:1] if rng.random() < PARTIAL_JOINS else topics
        reply = await self._participant.join(named, JOIN_MS)
        if reply.committed:
            self._committed_already(reply)
            return TaskResult(None)
        history.current(batch, self._run, self._client.now_ms)
        pair = reply.producer_id, reply.producer_epoch
        attempt = Attempt(self.name, self._run, self._task, pair)
        batch.attempts.append(attempt)
        for row in batch.tasks[self._task]:
            if not await self._send(attempt, row):
                return None
            if rng.random() < 0.5:
                self._engine.poke(flush=rng.random() < 0.3)
                pace_ms = rng.uniform(*self._client.shared.options.pace_ms)
                await self._world.clock.sleep_ms(pace_ms / FASTER)
        if rng.random() < SLOW and not self._client.shared.stopping:
            await self._world.clock.sleep_ms(rng.uniform(*SLOW_MS))
        await self._participant.finish(FINISH_MS)
        return TaskResult(attempt)

    def _committed_already(self, reply: wire.JoinTransactionReply) -> None:
        """Check the sums of a batch that is committed already, as tasks and driver do (X9)."""
        batch, client = self._batch, self._client
        batch.committed = True
        client.shared.count("batches committed before")
        sums = client.history.sums(batch)
        heard = {each.topic_id: RowSums(each.rows, each.bytes, each.row_sum) for each in reply.sums}
        if heard != sums and not client.history.may_be_torn(batch):
            client.shared.trouble(f"V25: {self.name}: the batch has {heard}, not {sums}")

    async def _send(self, attempt: Attempt, row: JobRow) -> bool:
        """Send a row to the partition that it belongs to; False: it was refused."""
        accumulator = await self._engine.open(row.topic, OPEN_MS)
        known = self._engine.cluster.metadata.topics.get(row.topic)
        if known is None:
            return False
        partition = row.spread % known.partitions
        headers: list[tuple[str, bytes | None]] = [(HEADER, self.name.encode())]
        digest = digest_of(None, row.value, headers)
        record = TransactionRecord(row.id, row.topic, partition, digest, self._client.now_ms)
        size = record_size(row.value, None, headers, row.topic)
        if accumulator.append(row.value, None, headers, partition, size=size) is None:
            return False
        self._client.history.send(self._batch, attempt, record)
        return True


async def first_of(tasks: list[asyncio.Task[TaskResult | None]]) -> TaskResult | None:
    """Return the result of the first attempt that succeeds; None if all fail or are lost."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:  # a set has no order that a second run repeats
            if task in done and not task.cancelled() and task.exception() is None:
                result = task.result()
                if result is not None:
                    return result
    return None
