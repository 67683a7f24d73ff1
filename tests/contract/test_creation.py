"""Creating many partitions in one visit, on real files and on simulated ones: the logs and
directories are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pk import errors, settings
from pk.clock import SystemClock
from pk.log import batch as batches
from pk.log import columns
from pk.log.creation import VISIT_MAX, NewPartition
from pk.log.files import RealDisk, RealStorage
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.storage import Storage
from pk.sim.disk import SimDisk, SimStorage
from pk.types import PartitionKey, TopicPartition
from pk.world import World

CONFIG = LogConfig.of(settings.TOPIC.resolve({}))
WANTED = [NewPartition(TopicPartition("t", n), "tid", CONFIG) for n in range(VISIT_MAX)]
Open = Callable[[], LogManager]


@pytest.fixture(params=["real", "simulated"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return RealStorage(str(tmp_path / "data")) if request.param == "real" else SimStorage()


@pytest.fixture
def life(storage: Storage) -> Open:
    """Return the log manager of the next process."""

    def begin() -> LogManager:
        no_network: Any = None
        world = World(SystemClock(), no_network, random.Random(1), lambda: "id")
        if isinstance(storage, RealStorage):
            disk: Any = RealDisk(RealStorage(storage.root))
        else:
            assert isinstance(storage, SimStorage)
            lanes = random.Random(1)
            disk = SimDisk(storage, world.clock, lanes, write_ms=(0, 1), read_ms=(0, 1))
        return LogManager([disk], node_id=1, cluster_id="c", build="b", world=world, boot_id="boot")

    return begin


async def begun(life: Open) -> LogManager:
    manager = life()
    await manager.open()
    assert await manager.load(lambda topic_id, tp: CONFIG) == []
    return manager


async def ended(manager: LogManager, *, clean: bool) -> None:
    await manager.close(clean)
    await manager.directories[0].disk.close()


@pytest.mark.parametrize("clean", [True, False])
def test_what_one_life_creates_the_next_one_opens(
    storage: Storage, life: Open, clean: bool
) -> None:
    async def main() -> None:
        manager = await begun(life)
        made = await manager.create_all(WANTED)
        assert [log.log_end for log in made if isinstance(log, PartitionLog)] == [0] * VISIT_MAX
        names = sorted(str(new.tp) for new in WANTED)
        assert storage.list("topics") == names
        for name in names:
            kept = ["00000000000000000000.log", "partition.json"]
            assert storage.list(f"topics/{name}") == kept
        log = manager.logs()[PartitionKey("tid", 5)]
        raw = b"".join(columns.encode_lists([b"v"]))
        log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=5)
        plan = log.take_writes()
        assert plan is not None
        await manager.disk_of(PartitionKey("tid", 5)).write(partial(log.perform, plan))
        log.complete(plan)
        await ended(manager, clean=clean)
        again = await begun(life)
        ends = {key.partition: log.written_end for key, log in again.logs().items()}
        assert ends == {n: int(n == 5) for n in range(VISIT_MAX)}
        await ended(again, clean=True)

    asyncio.run(main())


def open_below(folder: Path) -> list[str]:
    """Return the files below `folder` that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(str(folder)))


def test_a_real_sync_that_fails_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: and no descriptor stays open."""
    storage = RealStorage(str(tmp_path / "data"))

    async def main() -> None:
        no_network: Any = None
        world = World(SystemClock(), no_network, random.Random(1), lambda: "id")
        disk = RealDisk(storage)
        manager = LogManager(
            [disk], node_id=1, cluster_id="c", build="b", world=world, boot_id="boot"
        )
        await manager.open()
        await manager.load(lambda topic_id, tp: CONFIG)
        await manager.create_all(WANTED[:1])
        before = open_below(tmp_path)

        def fails(fd: int) -> None:
            raise OSError(5, "injected")

        monkeypatch.setattr("os.fdatasync", fails)
        made = await manager.create_all(WANTED[1:])
        assert {type(each) for each in made} == {errors.StorageFailed}
        assert list(manager.logs()) == [WANTED[0].key]
        assert open_below(tmp_path) == before
        await ended(manager, clean=False)

    asyncio.run(main())
