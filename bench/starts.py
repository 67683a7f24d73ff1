"""What a node's logs cost at a stop and at a start.

    python -m bench.starts [--partitions 2000] [--records 1] [--directory DIR]

A log manager on real files, without a broker around it: it creates the partitions, appends to each,
stops, starts, stops with nothing to write, and starts once more.  It prints one line of JSON: wall
seconds and CPU seconds of each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from pk import settings
from pk.clock import SystemClock
from pk.log import batch as batches
from pk.log import columns
from pk.log.creation import VISIT_MAX, NewPartition
from pk.log.files import RealDisk, RealStorage
from pk.log.manager import LogManager
from pk.log.plan import LogConfig
from pk.types import PartitionKey, TopicPartition
from pk.world import World

CONFIG = LogConfig.of(settings.TOPIC.resolve({}))


def manager_of(root: str) -> LogManager:
    """Return a manager of the directory `root`, as a process of its own would have it."""
    ids = (f"id-{number}" for number in range(10**9))
    no_network: Any = None
    world = World(SystemClock(), no_network, random.Random(0), lambda: next(ids))
    disk = RealDisk(RealStorage(root))
    return LogManager([disk], node_id=1, cluster_id="c", build="b", world=world, boot_id="boot")


async def measure(root: str, partitions: int, records: int) -> dict[str, list[float]]:
    """Return wall seconds and CPU seconds of each step."""
    found: dict[str, list[float]] = {}

    async def timed(step: str, work: Awaitable[Any]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        await work
        spent = time.perf_counter() - wall, time.process_time() - cpu
        found[step] = [round(each, 3) for each in spent]

    async def started(step: str) -> LogManager:
        manager = manager_of(root)
        await manager.open()
        await timed(step, manager.load(lambda topic_id, tp: CONFIG))
        manager.remember_broker_epoch(1)
        return manager

    manager = await started("start_empty")
    keys = [PartitionKey("tid", number) for number in range(partitions)]
    wanted = [NewPartition(TopicPartition("t", key.partition), "tid", CONFIG) for key in keys]
    for at in range(0, partitions, VISIT_MAX):
        await manager.create_all(wanted[at : at + VISIT_MAX])
    for key in keys:
        log = manager.get(key)
        assert log is not None
        for _ in range(records):
            raw = b"".join(columns.encode_lists([b"v" * 100]))
            log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=5)
        plan = log.take_writes()
        if plan is not None:
            log.perform(plan)
            log.complete(plan)
    await timed("stop_written", manager.close())
    manager = await started("start")
    assert len(manager.logs()) == partitions
    await timed("stop_idle", manager.close())
    await (await started("start_again")).close()
    return found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=2_000)
    parser.add_argument("--records", type=int, default=1, help="of 100 bytes, in each partition")
    parser.add_argument("--directory", type=Path, help="where the files are made; default: /tmp")
    given = parser.parse_args()
    root = tempfile.mkdtemp(prefix="pk-starts-", dir=given.directory)
    try:
        figures = asyncio.run(measure(root, given.partitions, given.records))
    finally:
        shutil.rmtree(root)
    print(json.dumps({"partitions": given.partitions, "records": given.records, **figures}))


if __name__ == "__main__":
    main()
