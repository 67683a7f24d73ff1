"""The transactional part of a run's client: producers with transactional ids, and their readers.

Each transactional id has one task.  It begins an instance of the producer, writes transactions with
it, and then ends the instance in one of several ways: cleanly, in the middle of a transaction, or
while it goes on as a fenced producer beside its successor.  The outcomes go to the history
(transaction_history.py).  An error that the faults of the run cannot explain is a violation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pk import errors
from pk.client.fetch_engine import FetchEngine
from pk.client.fetcher_events import Seek
from pk.client.offsets import EARLIEST
from pk.client.options import consumer_options, producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.client.transaction_engine import TransactionEngine
from pk.client.transaction_manager import TransactionCall
from pk.sim.checkers import Violation
from pk.sim.options import SimOptions
from pk.sim.oracle import Oracle, RecordId, digest_of, value_of
from pk.sim.readers import DRAIN_MS, _out_of_resources, rows_of, taken
from pk.sim.transaction_checkers import ReadersCheck
from pk.sim.transaction_history import (
    Transaction,
    TransactionEnd,
    TransactionHistory,
    TransactionRecord,
)
from pk.sim.workload import OPEN_MS, RETRIES, OnTrouble, cluster_of, watched
from pk.types import NONE, TopicPartition
from pk.world import World

INIT, BEGIN, _, COMMIT, ABORT = TransactionCall
#: How long a caller waits before it makes the same call again.
CALL_MS = 4_000
DELIVERY_MS = (2_500, 15_000)
TIMEOUT_MS = (1_500, 6_000, 30_000)
#: In so many cases a transaction stays open for longer than its timeout, if the timeout is short.
LINGERS = 0.15
LINGER_MAX_MS = 8_000
COMMITS = 0.7
#: For so long the first producers wait for brokers: an internal topic with one replica promises
#: little (loss_model.py).
ENOUGH_MS = 5_000
#: For so long an id may have no producer after one died within a transaction.
REST_MS = 20_000
#: The pauses of transactional producers are so many times shorter than those of other producers.
FASTER = 4


@dataclass(slots=True)
class TransactionClient:
    """What all transactional producers and readers of a run share."""

    bootstrap: str
    history: TransactionHistory
    oracle: Oracle
    options: SimOptions
    trouble: OnTrouble
    tell: OnTrouble
    count: Callable[[str], None]
    enough: Callable[[], bool]  #: whether pk's own topic would get all its replicas now
    stopping: bool = False


class SimTransactionalProducer:
    """One instance of a transactional id."""

    def __init__(
        self,
        world: World,
        shared: TransactionClient,
        transactional_id: str,
        name: str,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.transactional_id = transactional_id
        self._world = world
        self._shared = shared
        self._rng = rng
        self._timeout_ms = rng.choice(TIMEOUT_MS)
        options, _ = producer_options(
            {
                "transactional_id": transactional_id,
                "transaction_timeout_ms": self._timeout_ms,
                "delivery_timeout_ms": rng.choice(DELIVERY_MS),
                "linger_ms": 2,
                "batch_size": rng.choice([1_000, 20_000]),
                **RETRIES,
            }
        )
        cluster = cluster_of(world, shared.bootstrap, name)
        self.engine = ProduceEngine(world, cluster, options)
        self.calls = TransactionEngine(world, cluster, self.engine, options)
        self._instance = NONE
        self._sent = 0

    @property
    def _now_ms(self) -> float:
        return self._shared.oracle.now_ms()

    async def init(self) -> bool:
        """Call init_transactions; False: the instance cannot be used."""
        history = self._shared.history
        self.engine.cluster.start()
        if not await self._call(INIT):
            return False
        self._instance = history.initialized(self.transactional_id, self._now_ms)
        return True

    async def close(self) -> None:
        """End the instance as a process that dies: nothing is aborted."""
        await self.calls.close()
        await self.engine.close()

    async def _call(self, call: TransactionCall) -> bool:
        """Make a call until it has an outcome; False: the instance cannot go on.

        Raises `TransactionAborted`.
        """
        while True:
            try:
                await self.calls.call(call, CALL_MS)
            except errors.RequestTimedOut:
                if self._shared.stopping and call is INIT:
                    return False
                continue
            except errors.TransactionAborted:
                raise
            except errors.PkError as error:
                self._over(call, error)
                return False
            return True

    def _over(self, call: TransactionCall, error: errors.PkError) -> None:
        """Check the error that ends this instance.

        An instance may also be fenced by a repetition of its own InitProducerId that comes late.
        """
        shared = self._shared
        shared.tell(f"{self.name}: {call.value}: {error!r}")
        if isinstance(error, errors.ProducerFenced):
            shared.count("producers fenced")
        elif not shared.history.lossy:
            shared.trouble(f"V21: {self.name}: {call.value}: nothing explains {error!r}")

    async def transact(self, *, lasts_ms: float = 0.0) -> bool:
        """Write one transaction; False: the instance cannot go on.

        `lasts_ms`: the transaction goes on for so long.
        """
        rng, history = self._rng, self._shared.history
        if not await self._call(BEGIN):
            return False
        pair = self.calls.manager.pair
        transaction = Transaction(self.transactional_id, self._instance, pair, self._now_ms)
        history.begin(transaction)
        until_ms = self._now_ms + lasts_ms
        for _ in range(rng.randint(1, 3)):
            await self._burst(transaction)
        while self._now_ms < until_ms and not self._shared.stopping:
            await self._burst(transaction)
        if rng.random() < LINGERS and self._timeout_ms <= LINGER_MAX_MS:
            await self._world.clock.sleep_ms(self._timeout_ms + rng.uniform(-300, 3_000))
        if rng.random() < COMMITS:
            return await self._commit(transaction)
        return await self._abort()

    async def _burst(self, transaction: Transaction) -> None:
        """Send some records, and sometimes wait for their acknowledgements."""
        rng, shared = self._rng, self._shared
        topic = rng.choice(shared.options.transaction_topics).name
        partitions = shared.history.topics[topic].partitions
        try:
            accumulator = await self.engine.open(topic, OPEN_MS)
        except errors.PkError:
            await self._world.clock.sleep_ms(20)
            return
        known = self.engine.cluster.metadata.topics.get(topic)
        partitions = min(partitions, known.partitions if known is not None else 0)
        for _ in range(rng.randint(1, 4) if partitions else 0):
            partition = rng.randrange(partitions)
            name = RecordId(self.name, self._sent)
            value = value_of(name, rng.randint(*shared.options.value_bytes))
            record = TransactionRecord(
                name, topic, partition, digest_of(None, value, []), self._now_ms
            )
            size = record_size(value, None, None, topic)
            try:
                if accumulator.append(value, None, None, partition, size=size) is None:
                    break
            except errors.PkError:
                break  # the transaction failed: only abort_transaction is allowed
            self._sent += 1
            shared.history.send(transaction, record)
        self.engine.poke(flush=rng.random() < 0.3)
        await self._pause()

    async def _pause(self) -> None:
        pace_ms = self._rng.uniform(*self._shared.options.pace_ms)
        await self._world.clock.sleep_ms(pace_ms / FASTER)

    async def _commit(self, transaction: Transaction) -> bool:
        transaction.asked_ms, transaction.end = self._now_ms, TransactionEnd.UNKNOWN
        try:
            if not await self._call(COMMIT):
                return False
        except errors.TransactionAborted as error:
            transaction.end = TransactionEnd.ABORTED
            timed_out = isinstance(error, errors.TransactionTimedOut)
            self._shared.count("transactions timed out" if timed_out else "commits refused")
            self._shared.tell(f"{self.name}: {error!r}")
            return await self._abort()
        self._shared.history.committed(transaction)
        return True

    async def _abort(self) -> bool:
        try:
            return await self._call(ABORT)
        except errors.TransactionAborted as error:
            self._over(ABORT, error)
            return False


class TransactionWorkload:
    """The transactional producers of one life of the client."""

    def __init__(
        self, world: World, shared: TransactionClient, life: int, random_of: Callable[[str], Any]
    ) -> None:
        self._world = world
        self._shared = shared
        self._life = life
        self._random_of = random_of
        self._tasks: list[asyncio.Task[None]] = []
        self.readers = [
            TransactionReader(world, shared, f"{name}.{life}", committed=name == "rc")
            for name in ("rc", "ru")
        ]

    def start(self) -> None:
        for number in range(self._shared.options.transactions):
            work = self._drive(
                f"id{number}", self._random_of(f"transactions/{number}.{self._life}")
            )
            self._tasks.append(watched(work, self._shared.trouble))
        for reader in self.readers:
            reader.start()

    def unsettled(self) -> str:
        """Return how many tasks still wait for an outcome; '' = none."""
        left = sum(not each.done() for each in self._tasks)
        return f"{left} transactional producers wait for an outcome" if left else ""

    async def _drive(self, transactional_id: str, rng: random.Random) -> None:
        """Run one instance of an id after the other."""
        shared, clock = self._shared, self._world.clock
        while not all(topic.life for topic in shared.history.topics.values()):
            if shared.stopping:
                return
            await clock.sleep_ms(50)
        until_ms = shared.oracle.now_ms() + ENOUGH_MS
        while not shared.enough() and shared.oracle.now_ms() < until_ms:
            await clock.sleep_ms(50)
        number = 0
        while not shared.stopping:
            number += 1
            name = f"{transactional_id}.{self._life}.{number}"
            producer = SimTransactionalProducer(self._world, shared, transactional_id, name, rng)
            if await producer.init() and await self._used(producer, rng):
                how = rng.random()
                if how < 0.3:  # goes on beside its successor
                    self._tasks.append(watched(self._outlived(producer, rng), shared.trouble))
                    await clock.sleep_ms(rng.uniform(0, 400))
                    continue
                if how < 0.6:  # dies within a transaction
                    doomed = asyncio.ensure_future(producer.transact(lasts_ms=10_000))
                    await clock.sleep_ms(rng.uniform(5, 600))
                    doomed.cancel()
                    await asyncio.gather(doomed, return_exceptions=True)
                    await producer.close()
                    await self._rest(rng)
                    continue
            await producer.close()

    async def _rest(self, rng: random.Random) -> None:
        """Leave an open transaction alone; often only its timeout ends it."""
        until_ms = self._shared.oracle.now_ms() + rng.choice([0, rng.uniform(0, REST_MS)])
        while self._shared.oracle.now_ms() < until_ms and not self._shared.stopping:
            await self._world.clock.sleep_ms(100)

    async def _used(self, producer: SimTransactionalProducer, rng: random.Random) -> bool:
        """Write some transactions; False: the instance cannot go on."""
        for _ in range(rng.randint(1, 6)):
            if self._shared.stopping:
                return False
            if not await producer.transact():
                return False
            await self._world.clock.sleep_ms(rng.uniform(*self._shared.options.pace_ms) / FASTER)
        return True

    async def _outlived(self, producer: SimTransactionalProducer, rng: random.Random) -> None:
        """Let an instance go on for a while after its successor begins.

        The successor finds the transaction open, or it begins only afterwards.
        """
        await self._world.clock.sleep_ms(rng.choice([0, rng.uniform(0, 1_500)]))
        await producer.transact(lasts_ms=rng.uniform(100, 3_000))
        await producer.close()


class TransactionReader:
    """A consumer of the topics of transactions; every row passes through its check."""

    def __init__(
        self, world: World, shared: TransactionClient, name: str, *, committed: bool
    ) -> None:
        self.check = ReadersCheck(name, committed=committed)
        self._world = world
        self._shared = shared
        settings = consumer_options(
            {
                "auto_offset_reset": "earliest",
                "isolation_level": "read_committed" if committed else "read_uncommitted",
                "fetch_max_wait_ms": 200,
                "fetch_buffer_bytes": 40_000,
                "fetch_max_bytes": 20_000,
                "max_partition_fetch_bytes": 8_000,
                **RETRIES,
            }
        )
        self.engine = FetchEngine(world, cluster_of(world, shared.bootstrap, name), settings)

    def start(self) -> None:
        self.engine.subscribe([p.name for p in self._shared.options.transaction_topics], None)
        watched(self._run(), self._shared.trouble)

    async def _run(self) -> None:
        while True:
            await self._world.clock.sleep_ms(DRAIN_MS)
            try:
                self._drain()
            except Violation as violation:
                self._shared.trouble(str(violation))

    def _drain(self) -> None:
        told = self.engine.take_error()
        if told is not None:
            self._problem(told.error, told.place)
            return
        found, refused = taken(self.engine)
        for place, batch in found:
            self.check.took((place.topic, place.partition), rows_of(batch))
        for damage in refused:
            self._problem(damage.error, damage.place)

    def _problem(self, error: errors.PkError, place: TopicPartition | None) -> None:
        shared, oracle = self._shared, self._shared.oracle
        shared.tell(f"{self.check.name} was told {error!r}")
        if isinstance(error, errors.LogTruncated):
            at = error.details["topic"], int(error.details["partition"])
            if not shared.history.may_be_cut(*at):
                shared.trouble(f"V23: {self.check.name}: {error!r}")
            self.check.forget(at)
            self.engine.step(Seek(TopicPartition(*at), EARLIEST))
            return
        # a broker that is behind in the metadata log does not know the topic yet
        late = errors.RetriableError, errors.UnknownTopicId
        explained = isinstance(error, late) or _out_of_resources(error)
        if isinstance(error, errors.DamagedTierFile):
            explained = any(error.details["path"] in path for path in oracle.rotten_files)
        if not explained:
            shared.trouble(f"V23: {self.check.name} at {place} was told {error!r}")


async def read_transactions(
    world: World,
    shared: TransactionClient,
    check: ReadersCheck,
    ends: dict[TopicPartition, int],
) -> None:
    """Read every partition from its beginning to `ends`, through `check`."""
    isolation = "read_committed" if check.committed else "read_uncommitted"
    settings = consumer_options(
        {"auto_offset_reset": "earliest", "isolation_level": isolation, **RETRIES}
    )
    engine = FetchEngine(world, cluster_of(world, shared.bootstrap, check.name), settings)
    engine.assign(ends)
    try:
        while True:
            told = engine.take_error()
            if told is not None and not isinstance(told.error, errors.RetriableError):
                raise told.error
            for place, batch in taken(engine, insist=True)[0]:
                check.took((place.topic, place.partition), rows_of(batch))
            if all((engine.fetcher.frontier(place) or 0) >= end for place, end in ends.items()):
                return
            await world.clock.sleep_ms(DRAIN_MS)
    finally:
        await engine.close()
