"""Jobs in a simulated run: drivers that execute the batches of a query, with tasks (job_tasks.py).

Each job has one query, whose checkpoint survives (job_history.py).  A run executes one batch after
the other, each with the planned rows, and ends when its driver is lost.  The driver is lost before
the tasks join, while they write, after they finished, while it asks for the commit, and before it
notes the commit.  Sometimes the tasks of a lost driver go on, and sometimes the driver itself goes
on beside its successor.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable

from pk import errors
from pk.client.participant import BatchCalls, BatchOfRun
from pk.sim.job_history import Answer, Attempt, CommitAsk, PlannedBatch
from pk.sim.job_tasks import JobClient, SimTask, TaskResult, first_of
from pk.sim.transactions import CALL_MS, ENOUGH_MS, FASTER
from pk.sim.workload import RETRIES, cluster_of, watched
from pk.types import RowSums
from pk.world import World

#: A batch fails once a task has failed so often.
ATTEMPTS_MAX = 4
#: The shares of task attempts that have a second one beside them, and that are lost.
SPECULATES, LOST = 0.2, 0.1
#: The share of batches whose driver is lost, and how long it may be alive until then.
DRIVER_LOST = 0.35
ALIVE_MS = (5.0, 1_500.0)
#: How long after its tasks' end a lost driver may still wait for the commit.
ASKING_MS = (0.0, 60.0)
RESTS_MS = 500.0


class DriverLoss(enum.Enum):
    """Where a driver is lost."""

    BEFORE_JOIN = "before join"
    SOMEWHERE = "somewhere"
    AFTER_FINISH = "after finish"
    WITHIN_COMMIT = "within commit"
    AFTER_COMMIT = "after commit"
    OUTLIVED = "outlived"  #: it goes on beside its successor


class SimDriver:
    """The driver of one run of a job's query."""

    def __init__(
        self, world: World, client: JobClient, job: str, run: str, life: int, rng: random.Random
    ) -> None:
        self.name = f"{job}.{run}"
        self._world = world
        self._client = client
        self._job = job
        self._run = run
        self._rng = rng
        self._cluster = cluster_of(world, client.shared.bootstrap, f"{self.name}.{life}")
        self._tasks: list[asyncio.Task[TaskResult | None]] = []

    async def close(self) -> None:
        """End the driver, and sometimes its tasks."""
        if self._rng.random() < 0.5:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cluster.close()

    async def execute(self, batch: PlannedBatch, loss: DriverLoss | None = None) -> bool:
        """Execute a batch and note it as completed; False: the run ends."""
        if loss is DriverLoss.BEFORE_JOIN:
            return False
        found = await asyncio.gather(*(self._task(batch, n) for n in range(len(batch.tasks))))
        results = [each for each in found if each is not None]
        if len(results) < len(found):
            await self._abort(batch)
            return False
        if loss is DriverLoss.AFTER_FINISH:
            return False
        named = tuple(each.attempt for each in results if each.attempt is not None)
        if not await self._commit(batch, named, loss) or loss is DriverLoss.AFTER_COMMIT:
            return False
        self._client.history.complete(batch)
        return True

    # -- tasks -------------------------------------------------------------------------------------

    def _attempt(self, batch: PlannedBatch, number: int) -> asyncio.Task[TaskResult | None]:
        name = f"{self.name}.{batch.number}.{number}.{len(self._tasks)}"
        rng = random.Random(self._rng.getrandbits(64))
        work = SimTask(self._world, self._client, batch, self._run, number, name, rng)
        task = asyncio.get_running_loop().create_task(work.execute())
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[TaskResult | None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._client.shared.trouble(f"a task of {self.name} ended: {bug!r}")

    async def _task(self, batch: PlannedBatch, number: int) -> TaskResult | None:
        """Run attempts of a task until one succeeds; None: the task failed too often."""
        rng, calm = self._rng, self._client.shared.stopping
        for _ in range(ATTEMPTS_MAX):
            attempts = [self._attempt(batch, number)]
            if not calm and rng.random() < SPECULATES:
                await self._world.clock.sleep_ms(rng.uniform(0, 100))
                attempts.append(self._attempt(batch, number))
            if not calm and rng.random() < LOST:
                await self._world.clock.sleep_ms(rng.uniform(*ALIVE_MS) / FASTER)
                attempts[0].cancel()
            result = await first_of(attempts)
            if result is None:
                continue
            if rng.random() < 0.5:  # otherwise the slower attempt goes on
                for each in attempts:
                    each.cancel()
            return result
        return None

    # -- the driver's calls ------------------------------------------------------------------------

    def _calls(self, batch: PlannedBatch) -> BatchCalls:
        of_run = BatchOfRun(self._job, f"q-{self._job}", self._run, batch.number)
        return BatchCalls(self._world, self._cluster, of_run, RETRIES["request_timeout_ms"])

    async def _commit(
        self, batch: PlannedBatch, named: tuple[Attempt, ...], loss: DriverLoss | None
    ) -> bool:
        """Commit the named attempts; False: the driver gets no answer, or a refusal."""
        client = self._client
        sums = client.history.sums(batch)
        ask = CommitAsk(self._run, named, client.now_ms)
        batch.asks.append(ask)
        asking = asyncio.ensure_future(self._asked(batch, ask, sums))
        if loss is DriverLoss.WITHIN_COMMIT:
            await self._world.clock.sleep_ms(self._rng.uniform(*ASKING_MS))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return False
        try:
            return await asking
        except errors.PkError as error:
            unheard = isinstance(error, errors.ProducerFenced)
            ask.answer = ask.answer if unheard else Answer.REFUSED
            client.problem(f"{self.name}: commit", self._job, error)
            if isinstance(error, errors.ReplayDiffers):
                client.history.jobs[self._job].given_up = True
            return False
        finally:
            asking.cancel()

    async def _asked(self, batch: PlannedBatch, ask: CommitAsk, sums: dict[str, RowSums]) -> bool:
        """Ask for the commit until there is an answer."""
        client, calls = self._client, self._calls(batch)
        pairs = [attempt.pair for attempt in ask.attempts]
        while True:
            try:
                already = await calls.commit(pairs, sums, CALL_MS)
            except errors.RequestTimedOut:
                continue
            ask.answer = Answer.ALREADY if already else Answer.COMMITTED
            batch.committed = True
            client.shared.count(f"batches {ask.answer.value}")
            if not already:
                client.history.current(batch, self._run, client.now_ms)
            return True

    async def _abort(self, batch: PlannedBatch) -> None:
        """Abort a batch of which a task failed too often."""
        try:
            if await self._calls(batch).abort(CALL_MS):
                batch.committed = True
            self._client.shared.count("batches aborted")
        except errors.PkError as error:
            self._client.problem(f"{self.name}: abort", self._job, error)


class JobWorkload:
    """The drivers and tasks of one life of the client."""

    rests_ms = RESTS_MS  #: how long a query may be without a driver

    def __init__(
        self,
        world: World,
        client: JobClient,
        life: int,
        random_of: Callable[[str], random.Random],
    ) -> None:
        self._world = world
        self._client = client
        self._life = life
        self._random_of = random_of
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The jobs of the workload."""
        return self._client.shared.options.job_ids

    def driver(self, name: str, run: str, rng: random.Random) -> SimDriver:
        """Return the driver of a run."""
        return SimDriver(self._world, self._client, name, run, self._life, rng)

    def start(self) -> None:
        for name in self.names:
            work = self._drive(name, self._random_of(f"jobs/{name}.{self._life}"))
            self._tasks.append(watched(work, self._client.shared.trouble))

    def unsettled(self) -> str:
        """Return how many drivers have not ended; '' = none."""
        left = sum(not each.done() for each in self._tasks)
        return f"{left} drivers of jobs go on" if left else ""

    async def _drive(self, name: str, rng: random.Random) -> None:
        """Run the query of a job: one run after the other, until its last batch is completed."""
        shared, history, clock = self._client.shared, self._client.history, self._world.clock
        while not all(topic.life for topic in history.topics.values()):
            if shared.stopping:
                return
            await clock.sleep_ms(50)
        until_ms = shared.oracle.now_ms() + ENOUGH_MS
        while not shared.enough() and shared.oracle.now_ms() < until_ms:
            await clock.sleep_ms(50)
        while not self._over(name):
            run = history.begin_run(name, self._client.now_ms)
            shared.count("runs of jobs")
            await self._run(self.driver(name, run, rng), name, rng)
            await clock.sleep_ms(rng.choice([0, rng.uniform(0, self.rests_ms)]))

    def _over(self, name: str) -> bool:
        job = self._client.history.jobs.get(name)
        if job is None:
            return self._client.shared.stopping
        return job.given_up or (self._client.shared.stopping and not job.pending)

    async def _run(self, driver: SimDriver, name: str, rng: random.Random) -> None:
        """Execute batches until the driver is lost or a batch fails."""
        client, clock = self._client, self._world.clock
        options = client.shared.options
        topics = [plan.name for plan in options.transaction_topics]
        while not self._over(name):
            batch = client.history.next_batch(name, topics, options.value_bytes, client.now_ms)
            loss = None
            if rng.random() < DRIVER_LOST and not client.shared.stopping:
                loss = rng.choice(list(DriverLoss))
                client.shared.count(f"drivers {loss.value}")
            if loss is DriverLoss.OUTLIVED:
                work = self._outlived(driver, batch)
                self._tasks.append(watched(work, client.shared.trouble))
                await clock.sleep_ms(rng.choice([0, rng.uniform(0, 1_000)]))
                return
            if loss is DriverLoss.SOMEWHERE:
                doomed = asyncio.ensure_future(driver.execute(batch))
                await clock.sleep_ms(rng.uniform(*ALIVE_MS))
                doomed.cancel()
                await asyncio.gather(doomed, return_exceptions=True)
                break
            if not await driver.execute(batch, loss):
                break
            await clock.sleep_ms(rng.uniform(*options.pace_ms) / FASTER)
        await driver.close()

    async def _outlived(self, driver: SimDriver, batch: PlannedBatch) -> None:
        """Let a driver end its batch beside its successor."""
        await self._world.clock.sleep_ms(self._rng_of(driver).uniform(0, 1_500))
        await driver.execute(batch)
        await driver.close()

    def _rng_of(self, driver: SimDriver) -> random.Random:
        return self._random_of(f"jobs/outlived/{driver.name}")
