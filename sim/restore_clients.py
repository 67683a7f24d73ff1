"""The clients of a run with restores: producers of a cluster, and readers that go on elsewhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from pk import errors
from pk.client.fetch_engine import FetchEngine
from pk.client.fetcher_events import Seek
from pk.client.offsets import EARLIEST
from pk.client.options import consumer_options, producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.client.record_set import OnDelivery
from pk.sim.checkers import ReadRow, Violation
from pk.sim.oracle import RecordId, digest_of, value_of
from pk.sim.readers import DRAIN_MS, rows_of, taken
from pk.sim.restore_history import KeptPosition, Place, RestoreHistory
from pk.sim.workload import RETRIES, OnTrouble, cluster_of, watched
from pk.types import TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

OPEN_MS, CALL_MS = 500, 1_500
PACE_MS = (10.0, 150.0)
BURST = (1, 6)
VALUE_BYTES = (20, 600)
#: Errors of a request of an administrator that pass, or that mean that the work was done.
_NOT_YET = (errors.InvalidReplicationFactor, errors.UnknownTopicOrPartition, errors.UnknownTopicId)
_DONE = (errors.TopicAlreadyExists, errors.InvalidPartitions)


class RestoreProducer:
    """A producer of cluster `number`; its records end with it."""

    def __init__(
        self,
        world: World,
        bootstrap: str,
        name: str,
        number: int,
        topic: str,
        history: RestoreHistory,
        rng: random.Random,
        trouble: OnTrouble,
    ) -> None:
        self._world, self._rng, self._trouble = world, rng, trouble
        self._name, self._number, self._topic = f"{name}@{number}", number, topic
        self._history = history
        self._count = 0
        self.pending = 0
        self.acknowledged = 0
        settings, _ = producer_options({"delivery_timeout_ms": 8_000, "linger_ms": 2, **RETRIES})
        self.engine = ProduceEngine(world, cluster_of(world, bootstrap, self._name), settings)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.engine.cluster.start()
        self._task = watched(self._run(), self._trouble)

    def stop(self) -> None:
        """Send no new records."""
        if self._task is not None:
            self._task.cancel()
        self.engine.begin_flush()

    async def _run(self) -> None:
        rng = self._rng
        while self.engine.fatal is None:
            await self._world.clock.sleep_ms(rng.uniform(*PACE_MS))
            try:
                accumulator = await self.engine.open(self._topic, OPEN_MS)
            except errors.PkError:
                continue  # no broker answers
            known = self.engine.cluster.metadata.topics.get(self._topic)
            if known is None:
                continue
            for _ in range(rng.randint(*BURST)):
                record = RecordId(self._name, self._count)
                self._count += 1
                value = value_of(record, rng.randint(*VALUE_BYTES))
                told = self._told(record, digest_of(None, value, []), known.topic_id)
                partition = rng.randrange(known.partitions)
                self.pending += 1
                size = record_size(value, None, [], self._topic)
                if accumulator.append(value, None, None, partition, None, told, size=size) is None:
                    self.pending -= 1  # buffer_memory is full
            self.engine.poke()
        self._trouble(f"V6: {self._name} can send no more: {self.engine.fatal!r}")

    def _told(self, record: RecordId, digest: int, topic_id: str) -> OnDelivery:
        def told(metadata: Any, error: errors.PkError | None) -> None:
            self.pending -= 1
            if error is not None:
                return
            self.acknowledged += 1
            row = ReadRow(metadata.offset, record, digest)
            try:
                self._history.acked(Place(topic_id, metadata.partition), row, self._number)
            except Violation as violation:
                self._trouble(str(violation))

        return told


class RestoreReader:
    """A reader of one topic that keeps its positions when it moves to another cluster."""

    def __init__(
        self, name: str, topic: str, topic_id: str, history: RestoreHistory, trouble: OnTrouble
    ) -> None:
        self._name, self._topic, self._topic_id = name, topic, topic_id
        self._history, self._trouble = history, trouble
        self.positions: dict[int, KeptPosition] = {}
        self.rows = 0
        self._engine: FetchEngine | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def told(self) -> int:
        """Number of errors that named a loss."""
        return sum(each.told for each in self.positions.values())

    def reached(self, partition: int) -> int:
        """Return up to which offset it has read, as its fetcher knows."""
        place = TopicPartition(self._topic, partition)
        found = None if self._engine is None else self._engine.fetcher.frontier(place)
        return EARLIEST if found is None else found

    def start(self, world: World, bootstrap: str) -> None:
        """Read from `bootstrap`, from the kept positions on; call it in the reader's node."""
        self._task = watched(self._run(world, bootstrap), self._trouble)

    def _open(self, world: World, bootstrap: str, count: int) -> FetchEngine:
        settings = consumer_options(
            {
                "auto_offset_reset": "none",
                "fetch_max_wait_ms": 200,
                "fetch_buffer_bytes": 40_000,
                "fetch_max_bytes": 20_000,
                "max_partition_fetch_bytes": 8_000,
                **RETRIES,
            }
        )
        engine = FetchEngine(world, cluster_of(world, bootstrap, self._name), settings)
        for number in range(count):
            place = Place(self._topic_id, number)
            self.positions.setdefault(number, KeptPosition(self._history, self._name, place))
        engine.assign([TopicPartition(self._topic, number) for number in range(count)])
        for number in range(count):
            at = self.positions[number].next
            engine.step(Seek(TopicPartition(self._topic, number), at))
        return engine

    async def _run(self, world: World, bootstrap: str) -> None:
        count = 1
        engine = self._engine = self._open(world, bootstrap, count)
        while True:
            await world.clock.sleep_ms(DRAIN_MS)
            try:
                self._drain(engine)
            except Violation as violation:
                self._trouble(str(violation))
            known = engine.cluster.metadata.topics.get(self._topic)
            if known is not None and known.partitions > count:
                await engine.close()
                count = known.partitions
                engine = self._engine = self._open(world, bootstrap, count)

    def _drain(self, engine: FetchEngine) -> None:
        told = engine.take_error()
        if told is not None:
            self._problem(told.error, told.place, engine)
        found, refused = taken(engine)
        for place, batch in found:
            for row in rows_of(batch):
                self.positions[place.partition].took(row)
                self.rows += 1
        for damage in refused:
            if not isinstance(damage.error, errors.DataLoss):
                raise Violation(f"V39: {self._name} at {damage.place}: {damage.error!r}")
            details = damage.error.details
            span = int(details["offset"]), int(details["next_offset"])
            self.positions[damage.place.partition].lost(*span)

    def _problem(
        self, error: errors.PkError, place: TopicPartition | None, engine: FetchEngine
    ) -> None:
        if isinstance(error, errors.NoOffsetForPartition) and place is not None:
            self.positions[place.partition].out_of_range()
            engine.step(Seek(place, EARLIEST))
        elif not isinstance(error, errors.RetriableError | errors.UnknownTopicId):
            raise Violation(f"V39: {self._name} at {place}: {error!r}")


class RestoreAdmin:
    """Creates the topic of a cluster, or more of its partitions."""

    def __init__(self, world: World, bootstrap: str) -> None:
        self._world = world
        self._cluster = cluster_of(world, bootstrap, "admin")

    async def create(self, name: str, partitions: int, factor: int, configs: dict[str, str]) -> str:
        """Create a topic; return its id."""
        request = wire.CreateTopicsRequest()
        request.topics.add(
            name=name, partitions=partitions, replication_factor=factor, configs=configs
        )
        await self._until_done(lambda: request)
        while True:
            reply = await self._ask(wire.MetadataRequest(topics=[name]))
            if not reply.topics[0].HasField("error"):
                return str(reply.topics[0].topic_id)
            await self._world.clock.sleep_ms(50)

    async def grow(self, name: str, total: int) -> None:
        """Add partitions."""
        request = wire.CreatePartitionsRequest()
        request.topics.add(name=name, total_count=total)
        await self._until_done(lambda: request)

    async def _ask(self, request: Any) -> Any:
        while True:
            try:
                return await self._cluster.call_any(request, timeout_ms=CALL_MS)
            except errors.RetriableError:
                await self._world.clock.sleep_ms(100)

    async def _until_done(self, make: Callable[[], Any]) -> None:
        while True:
            (result,) = (await self._ask(make())).results
            if not result.HasField("error"):
                return
            error = frames.raise_error(result.error)
            if isinstance(error, _DONE):
                return
            if not error.retriable and not isinstance(error, _NOT_YET):
                raise error
            await self._world.clock.sleep_ms(100)
