"""Partitions that the metadata do not know yet, or do not know any more (log/strays.py)."""

from __future__ import annotations

import asyncio

import pytest

from pk import errors
from pk.log import identity
from pk.log.creation import NewPartition
from pk.log.directory import Directory
from pk.log.identity import PARTITION_FILE, Identity
from pk.log.partition_log import PartitionLog
from pk.types import PartitionKey, TopicPartition
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


def test_strays_are_renamed_and_removed_later() -> None:
    """Rule Q2: a partition that the metadata do not know."""

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
        again.gone = lambda found: True
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
    """Rule Q2: the metadata that a broker gets at its start may be older than the logs it holds."""

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
        for storage in house.storages:  # in this boot: torn logs were repaired, known or not
            storage.crash()
        third = house.manager(boot_id=boot)
        await third.open()
        assert await third.load(lambda topic_id, tp: None) == []
        (log,) = await third.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(log, PartitionLog), log
        assert third.disk_of(KEY).storage is home
        assert 30 <= log.log_end <= 35 if power else log.log_end == 35
        assert third.high_watermark(KEY) <= log.log_end, "no checkpoint outlives what was torn"
        third.gone = lambda found: found.topic_partition.partition == 1
        await third.discard_strays()
        await house.clock.advance(0)
        await house.clock.advance(60_001)
        kept = [name for storage in house.storages for name in storage.list("topics")]
        assert kept == ["t-0"]
        await third.close()

    run(main)


@pytest.mark.parametrize("turns", [0, 12, 16, 20, 24, 40])
def test_a_new_life_that_takes_the_place_of_a_stray_is_not_taken_for_it(turns: int) -> None:
    """log/strays Y3: the new topic's creation is tried again while the strays are discarded, for
    example because there was no space before.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        for number in range(3):
            await manager.create(TopicPartition("s", number), "gone", CONFIG)
        await manager.create(TP, "old", CONFIG)
        await manager.close()
        again = house.manager()
        await again.open()
        assert await again.load(lambda topic_id, tp: None) == []
        again.gone = lambda found: True
        giving_up = asyncio.get_running_loop().create_task(again.discard_strays())
        for _ in range(turns):
            await asyncio.sleep(0)
        await again.create(TP, "tid", CONFIG)
        await append(again, KEY, 3)
        await giving_up
        await house.clock.advance(0)
        await house.clock.advance(60_001)
        assert "t-0" in house.storages[0].list("topics")
        await again.close()
        third = await house.opened()
        log = third.get(KEY)
        assert log is not None
        assert log.log_end == 3
        await third.close()

    run(main)


def test_a_stray_in_a_directory_that_failed_since_does_not_begin_anew() -> None:
    """log/creation N5: its records are in the failed directory."""

    async def main() -> None:
        house = House(disks=2)
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 30)
        home = manager.disk_of(KEY).storage
        await manager.close()
        again = house.manager()
        await again.open()
        assert await again.load(lambda topic_id, tp: None) == []
        home.failed = errors.StorageFailed("gone")
        (outcome,) = await again.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(outcome, errors.StorageFailed)
        home.failed = None
        await again.close()

    run(main)


def test_a_stray_that_cannot_be_opened_yet_is_tried_again_where_it_stands() -> None:
    """Rule Q2: the disk is full.  In another directory it would begin without its records, and
    count as the partition.
    """

    async def attempt(step: int) -> bool:
        """The disk is full in that operation and those after it.  False if there are no more."""
        house = House(disks=2)
        manager = await house.opened()
        await manager.create(TopicPartition("t", 1), "tid", CONFIG)
        await manager.create(TP, "tid", CONFIG)  # in the second: the first is where new ones go
        await append(manager, KEY, 30)
        home = manager.disk_of(KEY).storage
        manager.set_high_watermark(KEY, 35)  # more than is there: to be lowered when it is opened
        await manager.checkpoint()
        for storage in house.storages:
            storage.crash()
        again = house.manager()
        await again.open()
        assert await again.load(lambda topic_id, tp: None) == []
        steps = 0

        def full(operation: str, path: str) -> Exception | None:
            nonlocal steps
            steps += 1
            return errors.StorageFull("full") if steps > step else None

        home.fault = full
        (outcome,) = await again.create_all([NewPartition(TP, "tid", CONFIG)])
        home.fault = None
        if steps > step:
            assert isinstance(outcome, errors.StorageFull)
            assert again.get(KEY) is None
            again.gone = lambda found: found.topic_partition.partition == 1
            await again.discard_strays()
            (outcome,) = await again.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(outcome, PartitionLog)
        assert again.disk_of(KEY).storage is home
        assert (outcome.log_end, again.high_watermark(KEY)) == (30, 30)
        await house.clock.advance(0)
        await house.clock.advance(60_001)
        assert "t-0" in home.list("topics")
        await again.close()
        return steps > step

    async def main() -> None:
        step = 0
        while await attempt(step):
            step += 1
        assert step > 5

    run(main)


def test_what_could_not_be_opened_at_the_start_is_not_made_anew_elsewhere() -> None:
    """The disk is full again: the records are in this directory."""

    async def main() -> None:
        house = House(disks=2)
        manager = await house.opened()
        await manager.create(TopicPartition("t", 1), "tid", CONFIG)
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 30)
        home = manager.disk_of(KEY).storage
        home.crash()
        house.storages[0].crash()
        again = house.manager()
        await again.open()
        home.fault = lambda operation, path: (
            errors.StorageFull("full") if path.startswith("topics/t-0/0") else None
        )
        # The other directory is as empty, and the first: where a new one would go.
        ((key, failure),) = await again.load(lambda topic_id, tp: None if tp.partition else CONFIG)
        assert key == KEY
        assert isinstance(failure, errors.StorageFull)
        (outcome,) = await again.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(outcome, errors.StorageFull)
        home.fault = None
        (outcome,) = await again.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(outcome, PartitionLog)
        assert again.disk_of(KEY).storage is home
        assert outcome.log_end == 30
        await again.close()

    run(main)


def test_whose_identity_is_damaged_is_not_made_anew_elsewhere() -> None:
    """Rule L9: the identity cannot be read, but the directory's name is known."""

    async def main() -> None:
        house = House(disks=2)
        manager = await house.opened()
        await manager.create(TopicPartition("t", 1), "tid", CONFIG)
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 30)
        home = manager.disk_of(KEY).storage
        await manager.close()
        home.replace_file(f"topics/t-0/{PARTITION_FILE}", b"{")
        home.remove(identity.IDENTITIES)
        again = house.manager()
        await again.open()
        ((_, failure),) = await again.load(lambda topic_id, tp: None if tp.partition else CONFIG)
        (outcome,) = await again.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(failure, errors.LogUnidentified)
        assert isinstance(outcome, errors.LogUnidentified)
        await again.close()

    run(main)


def test_what_could_not_be_opened_is_not_made_anew_once_its_directory_has_failed() -> None:
    """log/creation N5: opening was tried again while the disk was full, and then the disk
    failed.
    """

    async def main() -> None:
        house = House(disks=2)
        manager = await house.opened()
        other = TopicPartition("t", 1)
        await manager.create(other, "tid", CONFIG)
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 30)
        home = manager.disk_of(KEY).storage
        home.crash()
        house.storages[0].crash()
        again = house.manager()
        await again.open()
        home.fault = lambda operation, path: (
            errors.StorageFull("full") if path.startswith("topics/t-0/0") else None
        )
        ((_, failure),) = await again.load(lambda topic_id, tp: None if tp.partition else CONFIG)
        assert isinstance(failure, errors.StorageFull)
        home.failed = errors.StorageFailed("gone")
        tries = [NewPartition(each, "tid", CONFIG, again=True) for each in (TP, other)]
        lost, found = await again.create_all(tries)
        assert isinstance(lost, errors.StorageFailed)
        assert isinstance(found, PartitionLog)  # the log in the other directory continues
        (new,) = await again.create_all([NewPartition(TopicPartition("t", 2), "tid", CONFIG)])
        assert isinstance(new, PartitionLog)
        await again.close()

    run(main)


@pytest.mark.parametrize("older", [0, 1])
def test_an_earlier_life_elsewhere_does_not_draw_a_partition_away(older: int) -> None:
    """log/creation N5, L8: a directory that was taken out and put back has a log of the same
    name.
    """

    async def main() -> None:
        house = House(disks=2)
        manager = await house.opened()
        placed = [TopicPartition("t", 1 - older), TopicPartition("t", older)]
        for tp in placed:  # t-0 in the disk that is not `older`
            await manager.create(tp, "tid", CONFIG)
        await append(manager, KEY, 30)
        home, storage = manager.disk_of(KEY).storage, house.storages[older]
        assert home is not storage
        storage.make_dir("topics/t-0")
        identity.begin(storage, "topics/t-0", Identity("earlier", TP)).close()
        identity.name(storage, "topics/t-0")
        for each in house.storages:
            each.crash()
        again = house.manager()
        await again.open()
        assert await again.load(lambda topic_id, tp: None) == []
        (outcome,) = await again.create_all([NewPartition(TP, "tid", CONFIG)])
        assert isinstance(outcome, PartitionLog)
        assert outcome.log_end == 30
        await again.close()

    run(main)


def test_strays_that_are_known_together_cost_one_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """log/creation N4: otherwise each of some thousand strays would wait for all the others."""

    async def main() -> None:
        house = House()
        manager = await house.opened()
        wanted = [NewPartition(TopicPartition("t", n), "tid", CONFIG) for n in range(50)]
        await manager.create_all(wanted)
        await manager.checkpoint()
        house.storages[0].crash()
        again = house.manager()
        await again.open()
        assert await again.load(lambda topic_id, tp: None) == []
        looks: list[tuple[str, ...]] = []
        write = Directory.write_checkpoints

        async def noted(self: Directory, *names: str) -> None:
            looks.append(names)
            await write(self, *names)

        monkeypatch.setattr(Directory, "write_checkpoints", noted)
        outcomes = await again.create_all(wanted)
        assert all(isinstance(each, PartitionLog) for each in outcomes)
        assert len(looks) == 1
        await again.close()

    run(main)
