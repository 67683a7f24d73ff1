"""Jobs whose batches a Delta table decides, in a simulated run (rule X11).

Such a job is one of `jobs`, with the driver of `commit_together`: it does the production steps
(client/table_driver) over the topics of transactions and the simulated table (lake.py).  A driver
is lost before or within each step.  Sometimes it stops at a step for so long that the resolver
decides its batch, and goes on beside its successor.

When the faults of the run have ended, the drivers that work are lost or end, and no driver follows:
the resolvers alone end what is prepared.  Then every query is started again until its batches are
completed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from pk import errors
from pk.client import table_driver
from pk.client.participant import BatchOfRun, TableBatchCalls
from pk.client.table_driver import DecidingTable, WrittenLog
from pk.sim.job_history import Answer, CommitAsk, PlannedBatch
from pk.sim.job_tasks import JobClient
from pk.sim.jobs import ALIVE_MS, ASKING_MS, RESTS_MS, JobWorkload, SimDriver
from pk.sim.lake import TABLE_ID, URL, SimLake
from pk.sim.together_checkers import EvidenceCheck
from pk.sim.transactions import CALL_MS, FASTER
from pk.sim.workload import RETRIES, watched
from pk.types import RowSums
from pk.world import World

#: The share of batches whose driver is lost.
LOST = 0.5
#: Of so many prepared_max_ms: how long a query may be without a driver, and how long one may stop.
RESTS, STOPS = 2.5, 3
#: The steps at which a driver is lost or stops.  Between Prepare and Decide the batch is prepared.
PLACES = (
    table_driver.AskJob,
    table_driver.ReadTable,
    table_driver.WriteLog,
    table_driver.Prepare,
    table_driver.WriteTable,
    table_driver.WriteTable,
    table_driver.Decide,
    table_driver.Decide,
    table_driver.CommitSums,
)


class TogetherLoss(NamedTuple):
    """A driver is lost `before` a step, or `within` it; or it `stops` there for `ms` beside its
    successor.  Or it is lost `somewhere`, after `ms`.
    """

    how: str
    step: type = table_driver.AskJob
    ms: float = 0.0


class TaskFailed(Exception):
    """A task failed so often that the batch fails."""


class DecidingLake(NamedTuple):
    """The table of a run, and the check of what decides its batches."""

    lake: SimLake
    evidence: EvidenceCheck
    prepared_max_ms: int


class TogetherDriver(SimDriver):
    """The driver of one run, over log and table."""

    def __init__(
        self, world: World, client: JobClient, job: str, run: str, life: int, rng: random.Random,
        tables: DecidingLake,
    ) -> None:  # fmt: skip
        super().__init__(world, client, job, run, life, rng)
        self._tables = tables

    async def run(self, batch: PlannedBatch, loss: TogetherLoss | None = None) -> bool:
        """Execute a batch and note it as completed; False: the run ends."""
        try:
            return await self._steps(batch, loss)
        except TaskFailed:
            return False
        except errors.PkError as error:
            self._refused(error)
            return False

    async def _steps(self, batch: PlannedBatch, loss: TogetherLoss | None) -> bool:
        table = DecidingTable(URL, TABLE_ID, self._job, batch.number)
        work, answer = table_driver.steps(table), None
        while True:
            try:
                step = work.send(answer)
            except StopIteration:
                break
            here = loss is not None and isinstance(step, loss.step)
            how = loss.how if loss is not None and here else ""
            if how == "before":
                return False
            if how == "stops":
                assert loss is not None
                await self._world.clock.sleep_ms(loss.ms)
            doing = asyncio.ensure_future(self._perform(step, batch))
            try:
                if how == "within":
                    await self._world.clock.sleep_ms(self._rng.uniform(*ASKING_MS))
                    return False
                answer = await doing
            finally:
                doing.cancel()
                await asyncio.gather(doing, return_exceptions=True)
        self._client.history.complete(batch)
        return True

    def _refused(self, error: errors.PkError) -> None:
        """Check the error that ends a run."""
        self._client.problem(f"{self.name}: table", self._job, error)
        if isinstance(error, errors.ReplayDiffers):
            self._client.history.jobs[self._job].given_up = True

    # -- the steps ---------------------------------------------------------------------------------

    async def _perform(self, step: table_driver.Step, batch: PlannedBatch) -> Any:
        lake, calls = self._tables.lake, self._table_calls(batch)
        match step:
            case table_driver.AskJob():
                return await calls.job(CALL_MS)
            case table_driver.ReadTable(url, app):
                return await lake.read(url, app)
            case table_driver.WriteLog():
                return await self._write_log(batch)
            case table_driver.Prepare(written, table):
                self._tables.evidence.asked(self._job, batch.number, self._run, self._client.now_ms)
                batch.asks.append(self._ask(written, batch))
                awaited = await calls.prepare(*written, table, CALL_MS)
                if awaited is not None:
                    place = awaited.transaction, batch.number, self._run
                    self._tables.evidence.prepared(self._job, *place)
                return awaited
            case table_driver.WriteTable(app, version):
                await lake.append(app, version, tuple(row.id for row in batch.rows))
            case table_driver.Decide(awaited, commit):
                await calls.decide(awaited, CALL_MS, commit=commit)
                self._client.shared.count(f"both decided {'commit' if commit else 'abort'}")
                if commit:
                    self._client.history.jobs[self._job].batches[awaited.batch].committed = True
            case table_driver.CommitSums(sums):
                return await self._commit_empty(batch, dict(sums))
        return None

    def _table_calls(self, batch: PlannedBatch) -> TableBatchCalls:
        of_run = BatchOfRun(self._job, f"q-{self._job}", self._run, batch.number)
        return TableBatchCalls(self._world, self._cluster, of_run, RETRIES["request_timeout_ms"])

    async def _write_log(self, batch: PlannedBatch) -> WrittenLog:
        """Run the tasks that have rows; a task without rows does not join."""
        numbers = [number for number, rows in enumerate(batch.tasks) if rows]
        found = await asyncio.gather(*(self._task(batch, number) for number in numbers))
        results = [each for each in found if each is not None]
        if len(results) < len(found):
            raise TaskFailed
        named = [each.attempt.pair for each in results if each.attempt is not None]
        return WrittenLog(named, self._client.history.sums(batch))

    def _ask(self, written: WrittenLog, batch: PlannedBatch) -> CommitAsk:
        pairs = set(written.participants)
        named = tuple(each for each in batch.attempts if each.pair in pairs)
        return CommitAsk(self._run, named, self._client.now_ms)

    async def _commit_empty(self, batch: PlannedBatch, sums: dict[str, RowSums]) -> bool:
        """Commit a batch without participants, or compare a committed one."""
        ask = CommitAsk(self._run, (), self._client.now_ms)
        batch.asks.append(ask)
        already = await self._calls(batch).commit((), sums, CALL_MS)
        ask.answer = Answer.ALREADY if already else Answer.COMMITTED
        batch.committed = True
        return already


class TogetherWorkload(JobWorkload):
    """The drivers and tasks of these jobs, in one life of the client.

    again: the faults of the run are over, and the queries were started again
    """

    def __init__(
        self,
        world: World,
        client: JobClient,
        life: int,
        random_of: Callable[[str], random.Random],
        tables: DecidingLake,
    ) -> None:
        super().__init__(world, client, life, random_of)
        self._tables = tables
        self.again = self._begins = False
        self.rests_ms = RESTS * tables.prepared_max_ms

    @property
    def names(self) -> tuple[str, ...]:
        return self._client.shared.options.together_job_ids

    def driver(self, name: str, run: str, rng: random.Random) -> TogetherDriver:
        life = self._life
        return TogetherDriver(self._world, self._client, name, run, life, rng, self._tables)

    def begin_again(self) -> Coroutine[Any, Any, None]:
        """Start every query again, until its batches are completed.

        Returns what the node of the client runs.
        """
        self.again, self.rests_ms, self._begins = True, RESTS_MS, True
        return self._begin_again()

    async def _begin_again(self) -> None:
        self.start()
        self._begins = False

    def unsettled(self) -> str:
        return "queries begin again" if self._begins else super().unsettled()

    def _over(self, name: str) -> bool:
        if self._client.shared.stopping and not self.again:
            return True
        return super()._over(name)

    def _loss(self, rng: random.Random) -> TogetherLoss | None:
        if self.again or rng.random() >= LOST:
            return None
        how = rng.choice(("before", "before", "within", "within", "stops", "somewhere"))
        ms = rng.uniform(*ALIVE_MS)
        if how == "stops":
            ms = rng.choice([ms, rng.uniform(0, STOPS * self._tables.prepared_max_ms)])
        loss = TogetherLoss(how, rng.choice(PLACES), ms)
        self._client.shared.count(f"drivers of both: {how}")
        return loss

    async def _run(self, driver: SimDriver, name: str, rng: random.Random) -> None:
        """Execute batches until the driver is lost or a batch fails."""
        assert isinstance(driver, TogetherDriver)
        client, clock = self._client, self._world.clock
        options = client.shared.options
        topics = [plan.name for plan in options.transaction_topics]
        while not self._over(name):
            batch = client.history.next_batch(name, topics, options.value_bytes, client.now_ms)
            loss = self._loss(rng)
            doing = asyncio.ensure_future(driver.run(batch, loss))
            if loss is not None and loss.how == "stops":
                self._tasks.append(watched(self._ends(driver, doing), client.shared.trouble))
                await clock.sleep_ms(rng.uniform(0, 1_500))
                return
            if loss is not None and loss.how == "somewhere":
                await clock.sleep_ms(loss.ms)
                doing.cancel()
                await asyncio.gather(doing, return_exceptions=True)
                break
            if not await doing:
                break
            await clock.sleep_ms(rng.uniform(*options.pace_ms) / FASTER)
        await driver.close()

    async def _ends(self, driver: SimDriver, doing: asyncio.Future[bool]) -> None:
        """Let a driver end beside its successor."""
        await doing
        await driver.close()
