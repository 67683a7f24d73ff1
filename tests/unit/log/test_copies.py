"""Directories that partition records name (rule R11), and logs that stand in two directories."""

from __future__ import annotations

from pk import errors
from pk.log.creation import NewPartition
from pk.types import NONE, PartitionKey, TopicPartition
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


def test_of_two_copies_the_one_is_served_whose_directory_the_metadata_name() -> None:
    """R11: a directory failed, its replica was begun again in the other one, and it returned."""

    async def main() -> None:
        house = House(disks=2)
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 2)
        home = manager.directory_of(KEY).disk.storage
        await manager.close()
        other = next(each for each in house.storages if each is not home)
        other.make_dir("topics/t-0")
        for name in home.list("topics/t-0"):
            other.replace_file(f"topics/t-0/{name}", home.read_file(f"topics/t-0/{name}"))
        for served, aside in ((home, other), (other, home)):
            manager = house.manager()
            await manager.open()
            ids = {each.disk.storage: each.directory_id for each in manager.directories}
            manager.named = {KEY: ids[served]}.__getitem__
            before = aside.list("topics/t-0")
            ((key, error),) = await manager.load(lambda topic_id, tp: CONFIG)
            assert key == PartitionKey("t-0", NONE)
            assert isinstance(error, errors.LogUnidentified)
            assert f"{aside.root}/topics/t-0 is an older copy" in error.message
            assert manager.directory_of(KEY).disk.storage is served
            assert aside.list("topics/t-0") == before
            await manager.close()

    run(main)


def test_a_log_is_created_in_the_directory_that_the_metadata_name() -> None:
    async def main() -> None:
        house = House(disks=2)
        manager = await house.opened()
        first, second = (each.directory_id for each in manager.directories)
        for number, wanted, found in ((0, second, second), (1, second, second), (2, "", first)):
            tp = TopicPartition("t", number)
            (log,) = await manager.create_all(
                [NewPartition(tp, "tid", CONFIG, directory_id=wanted)]
            )
            assert not isinstance(log, errors.PkError)
            assert manager.directory_of(PartitionKey("tid", number)).directory_id == found
        (log,) = await manager.create_all(
            [NewPartition(TopicPartition("t", 3), "tid", CONFIG, directory_id="gone")]
        )
        assert not isinstance(log, errors.PkError), "its directory is gone: any other will do"
        await manager.close()

    run(main)
