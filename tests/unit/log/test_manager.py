"""Data directories: identity, lock, loading, checkpoints, deletion, and failures of single
directories.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns, directory, sealed
from pk.log.manager import LogManager
from pk.sim.disk import SimStorage
from pk.types import PartitionKey, TopicPartition
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


def test_a_life_and_the_next() -> None:
    async def main() -> None:
        house = House()
        manager = await house.opened()
        (first,) = manager.directories
        assert (first.clean, first.previous_broker_epoch, first.failed) == (False, -1, None)
        assert manager.get(KEY) is None
        log = await manager.create(TP, "tid", CONFIG)
        assert manager.get(KEY) is log
        assert manager.logs() == {KEY: log}
        assert manager.directory_of(KEY) is first
        await append(manager, KEY, 30)
        manager.set_high_watermark(KEY, 29)
        manager.remember_broker_epoch(7)
        log.advance_log_start(3)
        await manager.close()
        again = await house.opened(boot_id="boot-2", cluster_id="")
        (second,) = again.directories
        assert (second.clean, second.directory_id, second.previous_broker_epoch) == (
            True,
            first.directory_id,
            7,
        )
        assert again.cluster_id == "c"
        found = again.get(KEY)
        assert found is not None
        assert (found.log_start, found.written_end, found.synced_end, found.notes) == (
            3,
            30,
            30,
            (),
        )
        assert again.high_watermark(KEY) == 29
        await again.close()

    run(main)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"cluster_id": "other"}, errors.DirectoryOfAnotherCluster, "node 1 of cluster c"),
        ({"node_id": 2}, errors.DirectoryOfAnotherCluster, "not to node 2"),
    ],
)
def test_other_peoples_directories(
    given: dict[str, Any], kind: type[errors.PkError], words: str
) -> None:
    async def main() -> None:
        house = House(2)
        await (await house.opened()).close()
        before = [storage.files() for storage in house.storages]
        with pytest.raises(kind, match=words):
            await house.manager(**given).open()
        assert [storage.files() for storage in house.storages] == before
        await (await house.opened()).close()  # none stayed locked

    run(main)


def test_format_0_is_read_by_the_build_that_wrote_it_only() -> None:
    """Another build number does not mean another format."""

    async def main() -> None:
        house = House()
        (storage,) = house.storages
        await (await house.opened()).close()
        await (await house.opened(build="b2")).close()
        known = sealed.decode(storage.read_file("pk.json"))
        assert known["build"] == "b1"
        early = {**known, "format": 0, "layout": "0123456789abcdef"}
        for raw in (sealed.encode(early), json.dumps(early).encode()):  # the first had no seal
            storage.replace_file("pk.json", raw)
            with pytest.raises(
                errors.DirectoryOfAnotherBuild, match=r"of build b1, .*leave this"
            ) as told:
                await house.opened()
            assert told.value.acts == "operator"

    run(main)


def test_newer_damaged_and_foreign_directories() -> None:
    async def main() -> None:
        house = House()
        (storage,) = house.storages
        storage.replace_file("pk.json", json.dumps({"format": 2}).encode())
        with pytest.raises(errors.NewerFormat):
            await house.manager().open()
        for raw in (b"", b"[]", b'{"format": 1}', b'{"format": 0}'):
            storage.replace_file("pk.json", raw)
            with pytest.raises(errors.CorruptLog):
                await house.manager().open()
        storage.remove("pk.json")
        storage.replace_file("thesis.txt", b"years of work")
        with pytest.raises(errors.DirectoryOfAnotherCluster, match=r"thesis\.txt"):
            await house.manager().open()

    run(main)


def test_one_process_a_directory() -> None:
    async def main() -> None:
        house = House(2)
        manager = await house.opened()
        with pytest.raises(errors.DirectoryLocked):
            await house.manager().open()
        await append_after_create(manager)
        await manager.close()

    async def append_after_create(manager: LogManager) -> None:
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY)

    run(main)


@pytest.mark.parametrize(("boot", "clean"), [("boot-1", True), ("boot-2", False)])
def test_what_counts_as_clean_after_a_death(boot: str, clean: bool) -> None:
    """Rule L3: the same boot id means that the page cache outlived the process."""

    async def main() -> None:
        house = House()
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 5)
        manager.remember_broker_epoch(3)
        for _ in range(10):
            await asyncio.sleep(0)
        house.storages[0].crash()
        again = await house.opened(boot_id=boot)
        (found,) = again.directories
        assert (found.clean, found.closed_properly, found.previous_broker_epoch) == (
            clean,
            False,
            3,
        )
        log = again.get(KEY)
        assert log is not None
        assert log.written_end == 5
        await again.close()

    run(main)


def test_partitions_spread_by_count_then_space() -> None:
    async def main() -> None:
        house = House(3)
        house.storages[0].capacity, house.storages[1].capacity = 10**6, 10**9
        manager = await house.opened()
        roots = []
        for number in range(6):
            await manager.create(TopicPartition("t", number), "tid", CONFIG)
            roots.append(manager.directory_of(PartitionKey("tid", number)).disk.storage.root)
        assert roots[:3] == ["/d2", "/d1", "/d0"]
        assert sorted(roots[3:]) == sorted(roots[:3])
        await manager.close()
        again = await house.opened()
        assert len(again.logs()) == 6
        await again.close()

    run(main)


def test_a_failed_directory_takes_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        house = House(2)
        manager = await house.opened()
        for number in range(2):
            await manager.create(TopicPartition("t", number), "tid", CONFIG)
        bad = manager.directory_of(PartitionKey("tid", 0)).disk.storage
        assert isinstance(bad, SimStorage)
        bad.fault = lambda op, path: OSError("broken") if op == "append" else None
        log = manager.get(PartitionKey("tid", 0))
        assert log is not None
        raw = b"".join(columns.encode_lists([b"x"]))
        log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=0)
        plan = log.take_writes()
        assert plan is not None
        with pytest.raises(errors.StorageFailed):
            log.perform(plan)
        assert [d.failed is None for d in manager.directories].count(False) == 1
        await append(manager, PartitionKey("tid", 1))
        await manager.create(TopicPartition("t", 2), "tid", CONFIG)
        assert manager.disk_of(PartitionKey("tid", 2)).storage is not bad
        await manager.checkpoint()
        await manager.close()
        bad.fault = None
        bad.crash()
        again = await house.opened()
        assert {d.disk.storage.root: d.closed_properly for d in again.directories}[
            bad.root
        ] is False
        await again.close()

    run(main)


def test_a_directory_that_cannot_be_opened_is_kept_as_failed() -> None:
    async def main() -> None:
        house = House(2)
        await (await house.opened()).close()
        house.storages[1].fault = lambda op, path: OSError("dead disk") if op == "append" else None
        manager = await house.opened()
        assert [d.failed is None for d in manager.directories] == [True, False]
        await manager.close()
        house.storages[0].fault = house.storages[1].fault
        with pytest.raises(errors.StorageFailed):
            await house.opened()

    run(main)


def test_a_life_that_ends_before_its_repairs_leaves_no_word_of_its_boot() -> None:
    """Rule L3: the next process must not take the effects of a power loss for damage."""

    async def main() -> None:
        house = House()
        await (await house.opened()).close(clean=False)
        house.storages[0].power_loss()
        await house.manager(boot_id="boot-2").open()  # killed before it had loaded anything
        house.storages[0].crash()
        again = await house.opened(boot_id="boot-2")
        assert not again.directories[0].same_boot
        house.storages[0].crash()  # it was loaded: from now on this boot is known
        assert (await house.opened(boot_id="boot-2")).directories[0].same_boot

    run(main)


@pytest.mark.parametrize("end", ["killed", "registered and killed", "closed", "made up for"])
def test_a_tail_that_could_not_be_cut_yet_is_torn_to_the_next_life_too(end: str) -> None:
    """Rule L9: the disk was full after a power loss.  The next process in the same boot must not
    take the effects of the power loss for damage.
    """

    async def main() -> None:
        house = House()
        storage = house.storages[0]
        first = await house.opened()
        await first.create(TP, "tid", CONFIG)
        await append(first, KEY, 3)
        storage.power_loss()
        path = f"topics/{TP}/00000000000000000000.log"
        storage.open(path).truncate(0)
        storage.open(path).append([b"\x01" * 200])  # torn, and not where a write ended
        second = house.manager(boot_id="boot-2")
        await second.open()
        storage.fault = lambda operation, path: (
            errors.StorageFull("full") if operation != "read" and str(TP) in path else None
        )
        ((key, problem),) = await second.load(lambda topic_id, tp: CONFIG)
        assert key == KEY
        assert isinstance(problem, errors.StorageFull)
        storage.fault = None
        if end != "killed":
            second.remember_broker_epoch(4)
            await asyncio.sleep(0.01)
        if end == "made up for":
            await second.create(TP, "tid", CONFIG)
        if end in ("closed", "made up for"):
            await second.close()
        else:
            storage.crash()
        third = await house.opened(boot_id="boot-2")
        assert third.get(KEY) is not None
        assert third.directories[0].closed_properly == (end == "made up for")

    run(main)


@pytest.mark.parametrize("loaded", [False, True])
def test_who_never_registered_cannot_vouch_for_an_earlier_loss(loaded: bool) -> None:
    """Rule L3: the controller does not know of the power loss; a clean-shutdown file would
    hide it.
    """

    async def main() -> None:
        house = House()
        first = await house.opened()
        first.remember_broker_epoch(3)
        await asyncio.sleep(0.01)
        house.storages[0].power_loss()
        second = house.manager(boot_id="boot-2")
        await second.open()
        if loaded:
            await second.load(lambda topic_id, tp: CONFIG)
        await second.close()
        third = await house.opened(boot_id="boot-2")
        assert not third.directories[0].closed_properly
        third.remember_broker_epoch(4)
        await third.close()
        assert (await house.opened(boot_id="boot-3")).directories[0].closed_properly

    run(main)


def test_deletion_renames_now_and_removes_later() -> None:
    async def main() -> None:
        house = House()
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY)
        log = manager.get(KEY)
        assert log is not None
        await manager.delete(KEY)
        assert manager.get(KEY) is None
        raw = b"".join(columns.encode_lists([b"x"]))
        with pytest.raises(errors.NotLeaderOrFollower):
            log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=0)
        (name,) = house.storages[0].list("topics")
        assert name.startswith("t-0.")
        assert name.endswith("-delete")
        fresh = await manager.create(
            TP, "tid-2", CONFIG
        )  # re-created under the same name (rule L8)
        assert fresh.written_end == 0
        await house.clock.advance(51)
        assert house.storages[0].list("topics") == ["t-0"]
        await manager.delete(PartitionKey("tid-2", 0))
        house.storages[0].crash()
        again = await house.opened()
        assert house.storages[0].list("topics") == []
        await again.close()

    run(main)


def test_one_corrupt_partition_does_not_stop_the_others() -> None:
    async def main() -> None:
        house = House()
        (storage,) = house.storages
        manager = await house.opened()
        for number in range(3):
            await manager.create(TopicPartition("t", number), "tid", CONFIG)
            await append(manager, PartitionKey("tid", number), 20)
        await manager.close()
        for name in storage.list("topics/t-1"):
            if name.endswith(".log"):
                storage.open(f"topics/t-1/{name}").truncate(100)
            if name.endswith(".index"):
                storage.remove(f"topics/t-1/{name}")
        storage.remove("topics/t-2/partition.json")
        again = house.manager()
        await again.open()
        problems = await again.load(lambda topic_id, tp: CONFIG)
        assert sorted((key, type(error)) for key, error in problems) == [
            (PartitionKey("tid", 1), errors.CorruptLog),
        ]
        assert list(again.logs()) == [PartitionKey("tid", 0), PartitionKey("tid", 2)]
        assert list(again.restored) == ["/d0/topics/t-2"], "from the second copy (rule L15)"
        await again.close()

    run(main)


def test_an_unfinished_creation_is_removed() -> None:
    async def main() -> None:
        house = House()
        await (await house.opened()).close()
        house.storages[0].make_dir("topics/t-0")
        house.storages[0].open("topics/t-0/partition.json.tmp", create=True)
        manager = await house.opened()
        assert house.storages[0].list("topics") == []
        await manager.create(TP, "tid", CONFIG)
        await manager.close()

    run(main)


def test_checkpoints_name_only_what_is_true() -> None:
    """log/manager M2: after a power loss right after a checkpoint, everything below the recovery
    point exists.
    """

    async def main() -> None:
        for seed in range(10):
            house = House()
            manager = await house.opened()
            await manager.create(TP, "tid", CONFIG)
            for _ in range(4):
                await append(manager, KEY, 10)
            manager.set_high_watermark(KEY, 40)
            await manager.checkpoint()
            point = directory.read_offsets(house.storages[0], directory.RECOVERY_POINTS)[KEY]
            assert 0 < point < 40
            await append(manager, KEY, 3)
            house.storages[0].power_loss(random.Random(seed))
            again = await house.opened(boot_id="boot-2")
            log = again.get(KEY)
            assert log is not None
            assert log.written_end >= point
            kept = min(40, log.written_end)
            assert again.high_watermark(KEY) == kept
            known = directory.read_offsets(house.storages[0], directory.HIGH_WATERMARKS)
            assert known[KEY] == kept  # a process that dies now must not find more
            await again.close()

    run(main)


def test_lost_checkpoints_cost_time_only() -> None:
    async def main() -> None:
        house = House()
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 40)
        manager.set_high_watermark(KEY, 40)
        await manager.checkpoint()
        house.storages[0].crash()
        for name in (directory.RECOVERY_POINTS, directory.LOG_STARTS, directory.HIGH_WATERMARKS):
            file = house.storages[0].open(name)
            file.truncate(file.size() - 3)
        again = await house.opened()
        log = again.get(KEY)
        assert log is not None
        assert (log.written_end, log.log_start, again.high_watermark(KEY)) == (40, 0, 0)
        await again.close()

    run(main)


def test_log_starts_are_durable_before_the_rows_go() -> None:
    # rule T9

    async def main() -> None:
        house = House()
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 40)
        log.advance_log_start(25)
        await manager.checkpoint_log_starts()
        house.storages[0].power_loss()
        assert directory.read_offsets(house.storages[0], directory.LOG_STARTS) == {KEY: 25}

    run(main)


def test_a_log_start_is_seen_once_it_is_durable() -> None:
    """Rule T9: a full disk moves no log start, and a checkpoint written meanwhile moves none
    back.
    """

    async def main() -> None:
        house = House()
        storage = house.storages[0]
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 40)
        storage.capacity = storage.used_bytes()
        with pytest.raises(errors.StorageFull):
            await manager.move_log_starts({KEY: 10})
        assert log.log_start == 0
        storage.capacity = None
        moving = asyncio.ensure_future(manager.move_log_starts({KEY: 25}))
        await asyncio.sleep(0)
        assert log.log_start == 0  # no reader sees it yet
        await manager.checkpoint_log_starts()
        await moving
        assert log.log_start == 25
        assert directory.read_offsets(storage, directory.LOG_STARTS) == {KEY: 25}
        await manager.move_log_starts({KEY: 5})
        assert log.log_start == 25

    run(main)


def test_silent_producers_are_forgotten() -> None:
    async def main() -> None:
        house = House()
        manager = await house.opened(producer_id_expiration_ms=1000)
        log = await manager.create(TP, "tid", CONFIG)
        raw = b"".join(
            columns.encode_lists([b"x"], producer_id=4, producer_epoch=0, base_sequence=0)
        )
        log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=house.clock.now_ms)
        plan = log.take_writes()
        assert plan is not None
        log.perform(plan)
        log.complete(plan)
        await house.clock.advance(999)
        await manager.checkpoint(now_ms=house.clock.now_ms)
        assert len(log.producers) == 1
        await house.clock.advance(1)
        await manager.checkpoint()
        assert len(log.producers) == 1
        await manager.checkpoint(now_ms=house.clock.now_ms)
        assert len(log.producers) == 0
        await manager.close()

    run(main)


def test_a_recovery_point_found_before_a_cut_is_not_kept() -> None:
    """log/manager M2: it would cover truncated records, and the next opening would take their
    absence for damage.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 30)
        await manager.disk_of(KEY).write(log.flush)
        found = log.checkpoint
        cuts: list[asyncio.Task[None]] = []

        def checkpoint() -> int:  # runs in the lane while a truncation starts on the loop
            cuts.append(asyncio.get_running_loop().create_task(manager.cut(KEY, 5)))
            return found()

        log.checkpoint = checkpoint  # type: ignore[method-assign]
        await manager.checkpoint()
        await asyncio.gather(*cuts)
        await manager.checkpoint_log_starts()
        storage = house.storages[0]
        assert directory.read_offsets(storage, directory.RECOVERY_POINTS).get(KEY, 0) <= 5
        log.checkpoint = found  # type: ignore[method-assign]
        await manager.checkpoint()
        assert log.written_end == 5
        assert directory.read_offsets(storage, directory.RECOVERY_POINTS)[KEY] == 5
        await manager.close()

    run(main)


def test_a_partition_in_two_directories_is_not_served_from_either() -> None:
    """For example, a directory that was taken out is back: which of the two logs is newer is not
    known.
    """

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
        manager = house.manager()
        await manager.open()
        ((key, error),) = await manager.load(lambda topic_id, tp: CONFIG)
        assert key == KEY
        assert isinstance(error, errors.CorruptLog)
        assert "two directories" in error.message
        assert manager.get(KEY) is None
        await manager.close()

    run(main)
