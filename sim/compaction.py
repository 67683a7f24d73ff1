"""The clients of a run's compacted topics: writers of keyed records, and readers from any offset.

Their results go to the history (compaction_history.py) and to the checks (compaction_checkers.py).
An error that the faults of the run cannot explain is a violation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Any

from pk import errors
from pk.client.accumulator import RecordAccumulator
from pk.client.fetch_engine import FetchEngine
from pk.client.fetcher_events import Seek
from pk.client.options import consumer_options, producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.client.record_set import OnDelivery
from pk.sim.checkers import Violation
from pk.sim.compaction_checkers import check_rows
from pk.sim.compaction_history import (
    ID,
    CompactionHistory,
    Keyed,
    KeyedRow,
    id_header,
    keyed_rows_of,
)
from pk.sim.options import SimOptions, TopicPlan
from pk.sim.oracle import RecordId, digest_of, value_of
from pk.sim.readers import DRAIN_MS, _out_of_resources, taken
from pk.sim.workload import DELIVERY_MS, OPEN_MS, RETRIES, OnTrouble, cluster_of, watched
from pk.types import Offset, TopicPartition
from pk.world import World

#: Keys of a partition that are overwritten all the time.
HOT_KEYS = 8
#: Keys that are written seldom: their tombstones live long enough to age.
COLD_KEYS = 60
COLD = 0.25
TOMBSTONES = 0.3
VALUE_BYTES = (100, 1_500)
#: The pauses of these writers are so many times shorter than those of other producers.
FASTER = 3
#: A read that does not come to its end within this time is given up; the cluster may be down.
READ_MS = 20_000.0


@dataclass(slots=True)
class CompactionClient:
    """What the writers and readers of a run share."""

    bootstrap: str
    history: CompactionHistory
    options: SimOptions
    trouble: OnTrouble
    tell: OnTrouble
    now_ms: Callable[[], float]
    end_of: Callable[[TopicPartition], Offset]  #: the largest known high watermark
    deleted: Container[str]  #: topics of whose tables another engine has deleted rows
    rotten: Collection[str]  #: paths of damaged files of tables
    stopping: bool = False
    reads: int = 0


class KeyedWriter:
    """An idempotent producer that overwrites and deletes a few keys."""

    def __init__(
        self, world: World, shared: CompactionClient, name: str, rng: random.Random
    ) -> None:
        self.name = name
        self._world = world
        self._shared = shared
        self._rng = rng
        settings, _ = producer_options(
            {
                "batch_size": rng.choice([1_000, 20_000]),
                "delivery_timeout_ms": rng.choice(DELIVERY_MS),
                "linger_ms": 2,
                **RETRIES,
            }
        )
        self.engine = ProduceEngine(world, cluster_of(world, shared.bootstrap, name), settings)

    @property
    def over(self) -> bool:
        """Whether it can send no more: acknowledged records were lost."""
        return self.engine.fatal is not None

    def start(self) -> None:
        self.engine.cluster.start()
        watched(self._run(), self._shared.trouble)

    async def _run(self) -> None:
        rng, shared = self._rng, self._shared
        plans = shared.options.compacted_topics
        while not shared.stopping and not self.over:
            await self._world.clock.sleep_ms(rng.uniform(*shared.options.pace_ms) / FASTER)
            plan: TopicPlan = rng.choice(plans)
            if not shared.history.known.topics[plan.name].life:
                continue
            try:
                accumulator = await self.engine.open(plan.name, OPEN_MS)
            except errors.PkError:
                continue
            for _ in range(rng.randint(1, 8)):
                self._send(accumulator, TopicPartition(plan.name, rng.randrange(plan.partitions)))
            self.engine.poke()
        self.engine.begin_flush()

    def _send(self, accumulator: RecordAccumulator, place: TopicPartition) -> None:
        rng, history = self._rng, self._shared.history
        name: RecordId = history.next_id(self.name)
        cold = rng.random() < COLD
        key = f"c{rng.randrange(COLD_KEYS)}" if cold else f"k{rng.randrange(HOT_KEYS)}"
        tombstone = rng.random() < TOMBSTONES
        value = None if tombstone else value_of(name, rng.randint(*VALUE_BYTES))
        headers: list[tuple[str, bytes | None]] = [(ID, id_header(name))]
        raw = key.encode()
        record = Keyed(name, place, raw, tombstone, digest_of(raw, value, headers))
        history.send(record)
        size = record_size(value or b"", raw, headers, place.topic)
        try:
            future = accumulator.append(
                value, raw, headers, place.partition, None, self._told(record), size=size
            )
        except errors.PkError:  # a fatal error ended the producer
            history.failed(record)
            return
        if future is None:
            history.failed(record)

    def _told(self, record: Keyed) -> OnDelivery:
        def told(metadata: Any, error: errors.PkError | None) -> None:
            if error is None:
                now_ms = self._shared.now_ms()
                self._shared.history.acknowledged(record, metadata.offset, now_ms)
            else:
                self._shared.history.failed(record)

        return told


class CompactionReader:
    """Reads one partition after the other, each from a drawn offset to its high watermark."""

    def __init__(
        self, world: World, shared: CompactionClient, name: str, rng: random.Random
    ) -> None:
        self._world = world
        self._shared = shared
        self._name = name
        self._rng = rng
        self._read = 0

    def start(self) -> None:
        watched(self._run(), self._shared.trouble)

    async def _run(self) -> None:
        shared, rng = self._shared, self._rng
        while not shared.stopping:
            await self._world.clock.sleep_ms(rng.uniform(50, 1_500))
            places = list(shared.history.places())
            if not places:
                continue
            place = rng.choice(places)
            end = shared.end_of(place)
            start = 0 if rng.random() < 0.5 else rng.randint(0, end)
            slow_ms = rng.choice([0.0, 0.0, rng.uniform(10, 200)])
            self._read += 1
            who = f"{self._name}/{self._read}"
            try:
                await read_place(self._world, shared, place, start, who, slow_ms=slow_ms)
            except Violation as violation:
                shared.trouble(str(violation))


async def read_place(
    world: World,
    shared: CompactionClient,
    place: TopicPartition,
    start: Offset,
    who: str,
    *,
    slow_ms: float = 0.0,
    insist: bool = False,
) -> None:
    """Read a partition from `start` to the high watermark, and check what was read (V28).

    slow_ms: the pause after each round
    insist: go on until the end is reached; otherwise a read may be given up
    """
    settings = consumer_options(
        {
            "auto_offset_reset": "earliest",
            "fetch_max_wait_ms": 200,
            "fetch_buffer_bytes": 40_000,
            "fetch_max_bytes": 20_000,
            "max_partition_fetch_bytes": 8_000,
            **RETRIES,
        }
    )
    engine = FetchEngine(world, cluster_of(world, shared.bootstrap, who), settings)
    engine.assign([place])
    engine.step(Seek(place, start))
    began_ms, rows = shared.now_ms(), list[KeyedRow]()
    try:
        while True:
            told = engine.take_error()
            if told is not None and not _explained(shared, place, told.error):
                shared.trouble(f"V28: {who} of {place} was told {told.error!r}")
                return
            if told is not None and isinstance(told.error, errors.LogTruncated | errors.DataLoss):
                return  # records were lost while it read, or another engine has deleted them
            found, refused = taken(engine, insist=True)
            for _, batch in found:
                rows += keyed_rows_of(batch, shared.now_ms())
            for damage in refused:
                if not _explained(shared, place, damage.error):
                    shared.trouble(f"V28: {who} of {place} was told {damage.error!r}")
                return
            reached = engine.fetcher.frontier(place) or start
            if reached >= shared.end_of(place):
                break
            if not insist and (shared.stopping or shared.now_ms() > began_ms + READ_MS):
                return
            await world.clock.sleep_ms(DRAIN_MS + slow_ms)
    finally:
        await asyncio.shield(engine.close())
    shared.reads += 1
    check_rows(
        shared.history,
        place,
        rows,
        start=start,
        end=reached,
        began_ms=began_ms,
        now_ms=shared.now_ms(),
        who=who,
    )


def _explained(shared: CompactionClient, place: TopicPartition, error: errors.PkError) -> bool:
    if isinstance(error, errors.LogTruncated | errors.OffsetOutOfRange):
        return shared.history.may_be_cut(place)
    if isinstance(error, errors.DataLoss):
        return place.topic in shared.deleted
    if isinstance(error, errors.DamagedTierFile):
        return any(path in error.message for path in shared.rotten)
    late = errors.RetriableError, errors.UnknownTopicId
    return isinstance(error, late) or _out_of_resources(error)
