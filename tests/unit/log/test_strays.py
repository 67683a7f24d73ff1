"""Partitions that nobody knows yet, or any more (log/strays.py)."""

from __future__ import annotations

import pytest

from pk.log.creation import NewPartition
from pk.log.partition_log import PartitionLog
from pk.types import PartitionKey, TopicPartition
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


def test_strays_are_renamed_and_removed_later() -> None:
    """Rule Q2: a partition that the metadata does not know."""

    async def main() -> None:
        house = House()
        manager = await house.opened()
        for number in range(2):
            await manager.create(TopicPartition("t", number), "tid", CONFIG)
        await manager.close()
        again = house.manager()
        await again.open()
        assert await again.load(lambda topic_id, tp: CONFIG if tp.partition else None) == []
        assert list(again.logs()) == [PartitionKey("tid", 1)]
        assert house.storages[0].list("topics") == ["t-0", "t-1"], "it may be known later"
        await again.discard_strays()
        assert len(house.storages[0].list("topics")) == 2
        assert "t-0" not in house.storages[0].list("topics")
        await house.clock.advance(0)
        await house.clock.advance(60_001)
        assert house.storages[0].list("topics") == ["t-1"]
        await again.close()

    run(main)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("power", [False, True])
def test_a_stray_that_is_known_later_goes_on_where_it_stands(power: bool, seed: int) -> None:
    """Rule Q2: what a broker is told at its start may be older than what it holds."""

    async def main() -> None:
        house = House(disks=2, seed=seed)
        manager = await house.opened()
        await manager.create(TopicPartition("t", 1), "tid", CONFIG)
        await manager.create(TP, "tid", CONFIG)
        disk, first = manager.disk_of(KEY), manager.get(KEY)
        assert first is not None
        home = disk.storage
        await append(manager, KEY, 30)
        await disk.write(first.flush)
        await append(manager, KEY, 5)
        manager.set_high_watermark(KEY, 35)
        await manager.checkpoint()
        for storage in house.storages:
            storage.power_loss() if power else storage.crash()
        boot = "boot-2" if power else "boot-1"
        again = house.manager(boot_id=boot)
        await again.open()
        assert await again.load(lambda topic_id, tp: None) == []
        assert again.logs() == {}
        assert again.is_stray(KEY)
        for storage in house.storages:  # in this boot: what was torn was repaired, known or not
            storage.crash()
        third = house.manager(boot_id=boot)
        await third.open()
        assert await third.load(lambda topic_id, tp: None) == []
        (log,) = await third.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(log, PartitionLog), log
        assert third.disk_of(KEY).storage is home
        assert 30 <= log.log_end <= 35 if power else log.log_end == 35
        assert third.high_watermark(KEY) <= log.log_end, "no checkpoint outlives what was torn"
        await third.discard_strays()
        await house.clock.advance(0)
        await house.clock.advance(60_001)
        kept = [name for storage in house.storages for name in storage.list("topics")]
        assert kept == ["t-0"]
        await third.close()

    run(main)
