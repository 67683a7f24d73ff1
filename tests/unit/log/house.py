"""Simulated disks, the log managers that use them one after the other, and a clock."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any

from pk import settings
from pk.log import batch as batches
from pk.log import columns
from pk.log.manager import LogManager
from pk.log.plan import LogConfig
from pk.log.storage import Disk
from pk.sim.disk import SimDisk, SimStorage
from pk.types import PartitionKey, TopicPartition
from pk.world import World

CONFIG = LogConfig.of(
    settings.TOPIC.resolve({"segment_bytes": 14 * 1024, "file_delete_delay_ms": 50})
)


class FakeClock:
    """Time does not pass: `advance` wakes long sleeps, and waits for a disk end at once."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000
        self.sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def wall_ms(self) -> int:
        return self.now_ms

    monotonic_ms = wall_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        if duration_ms < 10:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now_ms + duration_ms, future))
        await future

    async def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        for due, future in self.sleepers:
            if due <= self.now_ms and not future.done():
                future.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)


class House:
    """Some simulated disks, and one log manager after the other."""

    def __init__(self, disks: int = 1, seed: int = 0) -> None:
        self.storages = [
            SimStorage(f"/d{number}", random.Random(number + 10 * seed)) for number in range(disks)
        ]
        self.clock = FakeClock()
        self.ids = itertools.count()
        no_network: Any = None
        new_id = lambda: f"id-{next(self.ids)}"  # noqa: E731 - the world's source of ids
        self.world = World(self.clock, no_network, random.Random(0), new_id)

    def manager(self, **given: Any) -> LogManager:
        disks: list[Disk] = [SimDisk(s, self.clock, random.Random(1)) for s in self.storages]
        options = {"node_id": 1, "cluster_id": "c", "build": "b1", "boot_id": "boot-1", **given}
        return LogManager(disks, world=self.world, **options)

    async def opened(self, **given: Any) -> LogManager:
        manager = self.manager(**given)
        await manager.open()
        assert await manager.load(lambda topic_id, tp: CONFIG) == []
        return manager


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


KEY = PartitionKey("tid", 0)
TP = TopicPartition("t", 0)


async def append(manager: LogManager, key: PartitionKey, count: int = 1) -> None:
    log = manager.get(key)
    assert log is not None
    for _ in range(count):
        raw = b"".join(columns.encode_lists([b"v" * 1000]))
        log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=5)
    plan = log.take_writes()
    assert plan is not None
    await manager.disk_of(key).write(lambda: log.perform(plan))
    log.complete(plan)
