"""A broker that starts while its disk is full."""

from __future__ import annotations

import random

import pytest

from pk import errors
from pk.log import directory
from pk.log.creation import NewPartition
from pk.log.identity import PARTITION_FILE
from pk.types import PartitionKey, TopicPartition
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


@pytest.mark.parametrize("before", ["died", "closed", "lost power"])
def test_a_full_disk_does_not_end_a_start(before: str) -> None:
    """Only retention makes space.  L3: no file names this process, so the next start takes its end
    for a power loss.
    """

    async def main() -> None:
        house = House()
        storage = house.storages[0]
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 30)
        log.flush()
        await manager.checkpoint()
        if before == "closed":
            manager.remember_broker_epoch(7)
            await manager.close()
        elif before == "died":
            storage.crash()
        else:
            storage.power_loss(random.Random(1))
        boot = "boot-1" if before == "died" else "boot-2"
        storage.capacity = storage.used_bytes()
        again = await house.opened(boot_id=boot)
        found = again.get(KEY)
        assert found is not None
        assert found.written_end == 30
        assert not storage.exists(directory.CLEAN_FILE)
        storage.crash()
        (third,) = (await house.opened(boot_id=boot)).directories
        assert third.closed_properly is False
        assert third.same_boot == (before == "died")

    run(main)


def test_a_full_disk_keeps_closed_of_what_a_checkpoint_says_too_much() -> None:
    """log/manager M2: a power loss removed records below a checkpointed high watermark; records
    appended there later were not committed.
    """

    async def main() -> None:
        house = House()
        storage = house.storages[0]
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        other = TopicPartition("t", 1)
        await manager.create(other, "tid", CONFIG)
        await append(manager, KEY, 30)
        manager.set_high_watermark(KEY, 30)
        await manager.checkpoint()
        storage.power_loss(random.Random(3))
        storage.fault = lambda operation, path: (
            errors.StorageFull("full") if path.startswith(directory.HIGH_WATERMARKS + ".") else None
        )
        again = house.manager(boot_id="boot-2")
        await again.open()
        ((key, failure),) = await again.load(lambda topic_id, tp: CONFIG)
        assert key == KEY
        assert isinstance(failure, errors.StorageFull)
        assert list(again.logs()) == [PartitionKey("tid", 1)]
        assert KEY in again.directories[0].unrepaired  # it is not closed properly until then
        wanted = NewPartition(TP, "tid", CONFIG, again=True)
        (outcome,) = await again.create_all([wanted])
        assert isinstance(outcome, errors.StorageFull)
        storage.fault = None
        (outcome,) = await again.create_all([wanted])
        assert not isinstance(outcome, errors.PkError)
        assert 0 < outcome.written_end < 30
        known = directory.read_offsets(storage, directory.HIGH_WATERMARKS)
        assert known[KEY] == outcome.written_end
        await again.close()

    run(main)


@pytest.mark.parametrize("loss", ["missing", "damaged"])
def test_a_full_disk_does_not_leave_a_deleted_log_without_an_identity(loss: str) -> None:
    """Rule L15: an identity could not be restored for want of space, and the topic is deleted.
    Only the second copy says whose directory it is, and it must not be in the way of the next one.
    """

    async def main() -> None:
        house = House()
        storage = house.storages[0]
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 3)
        await manager.close()
        path = f"topics/t-0/{PARTITION_FILE}"
        if loss == "missing":
            storage.lose(path)
        else:
            storage.rot(path, 10, 1)
        again = house.manager()
        await again.open()
        storage.capacity = storage.used_bytes()
        ((_, failure),) = await again.load(lambda topic_id, tp: CONFIG)
        assert isinstance(failure, errors.StorageFull)
        again.gone = lambda found: found.topic_id == "tid"
        kept, discarded = await again.discard_strays()
        assert (kept, discarded) == ([], ["/d0/topics/t-0"])
        storage.capacity = None
        log = await again.create(TP, "new", CONFIG)
        assert log.log_end == 0
        await house.clock.advance(0)
        await house.clock.advance(60_001)
        assert storage.list("topics") == ["t-0"]
        await again.close()
        assert list((await house.opened()).logs()) == [PartitionKey("new", 0)]

    run(main)


def test_a_full_disk_does_not_keep_a_damaged_log_from_being_set_aside() -> None:
    async def main() -> None:
        house = House()
        storage = house.storages[0]
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 3)
        await manager.close()
        storage.lose(f"topics/t-0/{PARTITION_FILE}")
        again = house.manager()
        await again.open()
        storage.capacity = storage.used_bytes()
        await again.load(lambda topic_id, tp: CONFIG)
        await again.set_aside(TP, "tid", 1_000)
        storage.capacity = None
        assert (await again.create(TP, "tid", CONFIG)).log_end == 0

    run(main)


@pytest.mark.parametrize("opened", [False, True])
def test_a_log_that_waits_says_nothing_of_the_others(opened: bool) -> None:
    """Rules L3, L9: run.json lists the logs that could not be opened since a power loss.  Any other
    log was served in this boot; damage at its end is not what the power loss left.
    """

    async def main() -> None:
        house = House()
        storage = house.storages[0]
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        waits, served = PartitionKey("tid", 1), KEY
        other = TopicPartition("t", 1)
        await manager.create(other, "tid", CONFIG)
        storage.power_loss(random.Random(1))

        storage.fault = lambda operation, path: (
            errors.StorageFull("full") if path.startswith("topics/t-1/") else None
        )
        again = house.manager(boot_id="boot-2")
        await again.open()
        ((key, _),) = await again.load(lambda topic_id, tp: CONFIG)
        assert key == waits
        if opened:
            storage.fault = None
            await again.create_all([NewPartition(other, "tid", CONFIG, again=True)])
        storage.crash()
        storage.fault = None

        third = house.manager(boot_id="boot-2")
        await third.open()
        (found,) = third.directories
        assert found.same_boot
        assert found.outlived(served)
        assert found.outlived(waits) is opened
        assert await third.load(lambda topic_id, tp: CONFIG) == []
        storage.crash()
        fourth = house.manager(boot_id="boot-2")
        await fourth.open()
        assert fourth.directories[0].outlived(waits)

    run(main)


def test_a_full_disk_delays_run_json() -> None:
    """L3: the next checkpoint names this process, and the next start is in its boot."""

    async def main() -> None:
        house = House()
        storage = house.storages[0]
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        storage.power_loss(random.Random(1))
        storage.capacity = storage.used_bytes()
        again = await house.opened(boot_id="boot-2")
        again.remember_broker_epoch(7)
        storage.capacity = None
        await append(again, KEY, 3)
        await again.checkpoint()
        storage.crash()
        (third,) = (await house.opened(boot_id="boot-2")).directories
        assert third.same_boot
        assert third.previous_broker_epoch == 7

    run(main)
