"""Many partitions created in one visit: the files that a death inside it leaves, its cost, and
failures of single partitions (log/creation N1–N4).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors, settings
from pk.log import directory
from pk.log.creation import LogOrError, NewPartition
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.storage import Disk
from pk.sim.disk import Crashed, SimDisk, SimStorage
from pk.types import PartitionKey, TopicPartition
from pk.world import World
from tests.unit.log.house import append, run

CONFIG = LogConfig.of(settings.TOPIC.resolve({"file_delete_delay_ms": 50}))
KEY = PartitionKey("tid", 0)
FIRST = "00000000000000000000.log"


class Clock:
    """Time does not pass; every sleep ends at once."""

    wall_ms = monotonic_ms = staticmethod(lambda: 1_700_000_000_000)

    async def sleep_ms(self, duration_ms: float) -> None:
        await asyncio.sleep(3600 if duration_ms >= 50 else 0)


class House:
    """Some simulated disks, and one log manager after the other."""

    def __init__(self, disks: int = 1, seed: int = 0) -> None:
        self.storages = [SimStorage(f"/d{n}", random.Random(seed + n)) for n in range(disks)]
        self.clock: Any = Clock()
        ids = itertools.count()
        no_network: Any = None
        self.world = World(self.clock, no_network, random.Random(seed), lambda: f"id-{next(ids)}")

    async def opened(self, boot_id: str = "boot-1") -> LogManager:
        """Open the next log manager and check that it finds no damage."""
        manager = await self.begun(boot_id)
        assert await manager.load(lambda topic_id, tp: CONFIG) == []
        return manager

    async def begun(self, boot_id: str = "boot-1") -> LogManager:
        disks: list[Disk] = [SimDisk(s, self.clock, random.Random(1)) for s in self.storages]
        manager = LogManager(
            disks, node_id=1, cluster_id="c", build="b", world=self.world, boot_id=boot_id
        )
        await manager.open()
        return manager


def wanted(count: int, topic_id: str = "tid") -> list[NewPartition]:
    return [NewPartition(TopicPartition("t", n), topic_id, CONFIG) for n in range(count)]


def logs_of(outcomes: list[LogOrError]) -> list[PartitionLog]:
    return [outcome for outcome in outcomes if isinstance(outcome, PartitionLog)]


async def flushed(manager: LogManager, key: PartitionKey) -> int:
    log = manager.get(key)
    assert log is not None
    return await manager.disk_of(key).write(log.flush)


# -- dying inside ----------------------------------------------------------------------------------


async def died_at(point: int | None, seed: int) -> tuple[House, int]:
    """Return a house whose process died in the given mutation while it created four partitions, and
    how many exist.

    Every partition that counted as created had a flushed record when the process died.
    """
    house = House(seed=seed)
    (storage,) = house.storages
    manager = await house.opened()
    storage.mutations, storage.crash_at = 0, point
    try:
        made = logs_of(await manager.create_all(wanted(4)))
    except Crashed:
        return house, storage.mutations
    assert len(made) == 4
    assert point is None
    mutations = storage.mutations
    for new in wanted(4):
        await append(manager, new.key)
        await flushed(manager, new.key)
    return house, mutations


async def grown(manager: LogManager, floor: int) -> None:
    """Create the partitions that are missing, so that all four exist; append a record to each and
    flush it.
    """
    missing = [new for new in wanted(4) if manager.get(new.key) is None]
    assert len(logs_of(await manager.create_all(missing))) == len(missing)
    for new in wanted(4):
        log = manager.get(new.key)
        assert log is not None
        assert log.written_end >= floor
        await append(manager, new.key)
        assert await flushed(manager, new.key) == log.written_end


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("power", [False, True], ids=["process death", "power loss"])
def test_dying_anywhere_inside_leaves_no_damage_and_no_promise(power: bool, seed: int) -> None:
    """log/creation N1, N2: the next process finds whole partitions or none, and keeps what it
    flushes then.
    """

    async def main() -> None:
        _, total = await died_at(None, seed)
        assert total > 4 * 6
        for point in range(total):
            house, _ = await died_at(point, seed)
            (storage,) = house.storages
            storage.power_loss() if power else storage.crash()
            boot = "boot-2" if power else "boot-1"
            manager = await house.opened(boot)
            left = [name for name in storage.list("topics") if not name.endswith("-delete")]
            assert left == sorted(f"t-{key.partition}" for key in manager.logs())
            await grown(manager, 0)
            storage.power_loss()
            await grown(await house.opened("boot-3"), 1)

    run(main)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_created_survives_a_power_loss(seed: int) -> None:
    """The contract: a flush may confirm records from the first moment on (rule L1)."""

    async def main() -> None:
        house, _ = await died_at(None, seed)
        house.storages[0].power_loss()
        manager = await house.opened("boot-2")
        assert [manager.logs()[new.key].written_end for new in wanted(4)] == [1] * 4

    run(main)


def test_the_first_flush_after_a_death_syncs_names_too() -> None:
    """A segment is rolled and not flushed, the process dies and starts in the same boot; then a
    flush is promised.
    """

    async def main() -> None:
        for seed in range(10):
            house = House(seed=seed)
            manager = await house.opened()
            await manager.create_all(wanted(1))
            await append(manager, KEY, 3)
            assert manager.logs()[KEY].roll()
            await append(manager, KEY, 2)
            house.storages[0].crash()
            manager = await house.opened()
            await append(manager, KEY, 2)
            assert await flushed(manager, KEY) == 7
            house.storages[0].power_loss()
            assert (await house.opened("boot-2")).logs()[KEY].written_end == 7

    run(main)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, []),
        ({"partition.json.tmp": b"{"}, []),
        ({FIRST: b"", "partition.json.tmp": b""}, []),
        ({FIRST: b""}, []),
        ({FIRST: b"x"}, None),
        ({"00000000000000000007.log": b""}, None),
        ({FIRST: b"", "00000000000000000007.log": b""}, None),
        ({FIRST: b"", "leader-epoch-checkpoint": b"0"}, None),
        ({"thesis.txt": b"years of work"}, ["t-0"]),
    ],
)
def test_what_counts_as_unfinished(files: dict[str, bytes], left: list[str] | None) -> None:
    """log/creation N2, rule L15: a file that may hold a record is kept, and prevents a new
    partition of that name.
    """

    async def main() -> None:
        house = House()
        (storage,) = house.storages
        await (await house.opened()).close()
        storage.make_dir("topics/t-0")
        for name, raw in files.items():
            storage.open(f"topics/t-0/{name}", create=True).append([raw])
        manager = await house.begun()
        problems = await manager.load(lambda topic_id, tp: CONFIG)
        assert [type(error) for _, error in problems] == [errors.LogUnidentified] * (left is None)
        assert storage.list("topics") == (["t-0"] if left is None else left)
        (made,) = await manager.create_all(wanted(1))
        unfinished = left == []
        assert isinstance(made, PartitionLog if unfinished else errors.LogUnidentified)
        assert storage.list("topics") == ["t-0"], "nothing was renamed (rule L15)"
        for name, raw in files.items():
            assert unfinished or storage.read_file(f"topics/t-0/{name}") == raw

    run(main)


# -- what a visit costs ----------------------------------------------------------------------------


def test_syncs_and_commits_of_a_visit() -> None:
    async def main() -> None:
        house = House()
        (storage,) = house.storages
        manager = await house.opened()
        seen: Counter[str] = Counter()
        order: list[str] = []

        def note(operation: str, path: str) -> None:
            seen[operation] += 1
            if operation in ("create", "rename", "sync", "sync_dir"):
                order.append("sync_root" if path == "topics" else operation)

        storage.fault = note
        await manager.create_all(wanted(64))
        second = 1  # the second copies of all identities, in one file
        assert (seen["sync"], seen["sync_dir"]) == (64 + second, 65 + second)
        stages = [operation for operation, _ in itertools.groupby(order)]
        one = ["create", "sync", "rename", "sync_dir"]
        assert stages == [*one, "sync_root", *one]

    run(main)


def test_a_new_log_is_what_opening_it_would_find() -> None:
    async def main() -> None:
        house = House()
        manager = await house.opened()
        (made,) = logs_of(await manager.create_all(wanted(1)))
        opened = PartitionLog.open(
            house.storages[0], made.path, made.topic_partition, "tid", CONFIG, clean=True, now_ms=5
        )
        assert (made.log_end, made.segments) == (opened.log_end, opened.segments)
        parts = "_local", "_appender", "_writer", "_reader"
        elsewhere = {
            "storage",
            "_storage",
            "cache",
            "_decided",
            "cleaned",
            *parts,
        }  # two logs have two
        compared_below = {"_segments", "tail", "_unsynced", "epochs", "_epochs", "producers"}
        for part in ("", *parts):
            mine, theirs = (vars(getattr(log, part) if part else log) for log in (made, opened))
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - elsewhere - compared_below:
                assert mine[name] == theirs[name], (part, name)
        for new, old in zip(made._local.segments, opened._local.segments, strict=True):
            for slot in ("base_offset", "decided", "written", "synced", "dropped", "aborted"):
                assert getattr(new, slot) == getattr(old, slot), slot
            assert new.index is not None
            assert old.index is not None
            assert new.file is not None
        assert [each.base_offset for each in made._writer._unsynced] == [0]
        assert (made.epochs.entries, len(made.producers)) == (opened.epochs.entries, 0)

    run(main)


def test_a_visit_spreads_as_one_by_one() -> None:
    async def main() -> None:
        roots = []
        for together in (False, True):
            house = House(3)
            house.storages[0].capacity, house.storages[1].capacity = 10**6, 10**9
            manager = await house.opened()
            await manager.create(TopicPartition("s", 0), "sid", CONFIG)
            for new in [] if together else wanted(9):
                await manager.create_all([new])
            if together:
                await manager.create_all(wanted(9))
            roots.append([manager.disk_of(new.key).storage.root for new in wanted(9)])
        assert roots[0] == roots[1]
        assert Counter(roots[0]) == {"/d0": 3, "/d1": 3, "/d2": 3}

    run(main)


# -- who fails alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["make_dir", "create", "append", "rename"])
def test_a_full_disk_stops_whom_it_hits(step: str) -> None:
    """log/creation N3: a second attempt continues where the first one ended."""

    async def main() -> None:
        house = House()
        (storage,) = house.storages
        manager = await house.opened()

        def full(operation: str, path: str) -> Exception | None:
            hit = operation == step and "topics/t-2" in path
            return errors.StorageFull("no space") if hit else None

        storage.fault = full
        outcomes = await manager.create_all(wanted(5))
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [PartitionLog, PartitionLog, errors.StorageFull, PartitionLog, PartitionLog]
        assert list(manager.logs()) == [new.key for new in wanted(5) if new.tp.partition != 2]
        storage.fault = None
        (late,) = await manager.create_all(wanted(5)[2:3])
        assert isinstance(late, PartitionLog)
        assert storage.list("topics") == [f"t-{n}" for n in range(5)]
        for new in wanted(5):
            await append(manager, new.key)
            await flushed(manager, new.key)
        storage.power_loss()
        again = await house.opened("boot-2")
        assert [log.written_end for log in again.logs().values()] == [1] * 5

    run(main)


@pytest.mark.parametrize("step", ["append", "sync", "sync_dir"])
def test_a_failed_disk_stops_all_of_its_visit_and_no_others(step: str) -> None:
    """log/creation N3, rule L2: after a failed sync the contents of the disk are not known."""

    async def main() -> None:
        house = House(2)
        bad = house.storages[0]
        manager = await house.opened()
        hits = itertools.count()

        def broken(operation: str, path: str) -> Exception | None:
            return OSError("broken") if operation == step and next(hits) == 1 else None

        bad.fault = broken
        outcomes = await manager.create_all(wanted(6))
        assert len(logs_of(outcomes)) == 3
        assert {type(each) for each in outcomes} == {PartitionLog, errors.StorageFailed}
        for new, outcome in zip(wanted(6), outcomes, strict=True):
            assert (new.key in manager.logs()) == isinstance(outcome, PartitionLog)
        homes = {manager.disk_of(key).storage.root for key in manager.logs()}
        assert homes == {"/d1"}
        again = await manager.create_all(wanted(8)[6:])
        assert {manager.disk_of(new.key).storage.root for new in wanted(8)[6:]} == {"/d1"}
        assert len(logs_of(again)) == 2
        house.storages[1].failed = OSError("too")
        (none,) = await manager.create_all(wanted(9)[8:])
        assert isinstance(none, errors.StorageFailed)

    run(main)


def test_a_disk_that_fails_while_homes_are_sought_is_no_home() -> None:
    """log/manager M4: the other logs are created elsewhere, including those that no later call
    would try again.
    """

    async def main() -> None:
        house = House(2)
        bad = house.storages[0]
        manager = await house.opened()

        def gone() -> int:
            bad.failed = errors.StorageFailed("gone")
            raise bad.failed

        bad.free_bytes = gone  # type: ignore[method-assign]
        outcomes = await manager.create_all(wanted(3))
        assert len(logs_of(outcomes)) == 3
        assert {manager.disk_of(new.key).storage.root for new in wanted(3)} == {"/d1"}
        (tried,) = await manager.create_all([wanted(4)[3]._replace(again=True)])
        assert isinstance(tried, errors.StorageFailed)

    run(main)


def test_what_cannot_be_read_where_it_stands_does_not_begin_anew_elsewhere() -> None:
    """log/creation N5: the file does not show whose identity it is."""

    async def main() -> None:
        house = House(2)
        bad = house.storages[0]
        manager = await house.opened()
        await manager.create_all(wanted(1))
        await manager.close()
        manager = await house.begun()

        def broken(operation: str, path: str) -> Exception | None:
            hit = operation == "read" and path.startswith("topics/t-0/")
            return errors.StorageFailed("broken") if hit else None

        bad.fault = broken
        assert len(await manager.load(lambda topic_id, tp: CONFIG)) == 1
        outcomes = await manager.create_all(wanted(3))
        assert [type(each) for each in outcomes] == [errors.StorageFailed, *[PartitionLog] * 2]

    run(main)


def test_a_damaged_identity_is_one_partitions_matter() -> None:
    async def main() -> None:
        house = House()
        manager = await house.opened()
        house.storages[0].make_dir("topics/t-1")
        house.storages[0].replace_file("topics/t-1/partition.json", b"{")
        outcomes = await manager.create_all(wanted(3))
        assert [type(each) for each in outcomes] == [
            PartitionLog,
            errors.LogUnidentified,
            PartitionLog,
        ]

    run(main)


# -- earlier lives ---------------------------------------------------------------------------------


def test_an_earlier_topic_of_the_name_goes_out_of_the_way() -> None:
    """Rule L8: records of the earlier topic belong to no topic now; a log of this very topic is
    opened.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        await manager.create_all(wanted(2, "old"))
        await append(manager, PartitionKey("old", 0))
        await append(manager, PartitionKey("old", 1))
        house.storages[0].crash()
        manager = await house.begun()  # nothing is loaded: both directories are in the way
        manager.gone = lambda found: found.topic_id == "old"
        mine = [wanted(2, "old")[0], wanted(2, "new")[1]]
        first, second = logs_of(await manager.create_all(mine))
        assert (first.written_end, second.written_end) == (1, 0)
        left = house.storages[0].list("topics")
        assert [name for name in left if not name.endswith("-delete")] == ["t-0", "t-1"]
        assert len(left) == 3

    run(main)


@pytest.mark.parametrize("power", [False, True], ids=["process death", "power loss"])
def test_a_checkpoint_of_an_earlier_life_says_nothing_of_this_one(power: bool) -> None:
    """log/manager M2: the partition was created again, and the process died before the next
    checkpoint: nothing is missing.
    """

    async def main() -> None:
        house = House()
        (storage,) = house.storages
        manager = await house.opened()
        other = PartitionKey("tid", 1)
        await manager.create_all(wanted(2))
        for key in (KEY, other):
            await append(manager, key, 30)
            await flushed(manager, key)
            manager.set_high_watermark(key, 30)
            manager.logs()[key].advance_log_start(20)
        await manager.checkpoint()
        await manager.delete(KEY)
        await manager.create_all(wanted(1))
        await append(manager, KEY, 3)
        await flushed(manager, KEY)
        storage.power_loss() if power else storage.crash()
        manager = await house.opened("boot-2" if power else "boot-1")
        log, kept = manager.logs()[KEY], manager.logs()[other]
        assert (log.written_end, log.log_start, manager.high_watermark(KEY)) == (3, 0, 0)
        assert (kept.written_end, kept.log_start, manager.high_watermark(other)) == (30, 20, 30)

    run(main)


def test_dying_between_two_lives_is_no_damage() -> None:
    """log/manager M2: the process dies at every point of the second creation."""

    async def main() -> None:
        for point in range(40):
            house = House(seed=point)
            (storage,) = house.storages
            manager = await house.opened()
            await manager.create_all(wanted(1))
            await append(manager, KEY, 5)
            await flushed(manager, KEY)
            await manager.checkpoint()
            await manager.delete(KEY)
            storage.crash_at = point
            try:
                await manager.create_all(wanted(1))
            except Crashed:
                storage.power_loss()
                await house.opened("boot-2")
                continue
            assert point > 10
            return
        raise AssertionError("it never got through")

    run(main)


def test_a_recovery_point_of_an_earlier_life_is_not_kept() -> None:
    """log/manager M2: a checkpoint was computed, and meanwhile the partition was deleted and
    created again.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        (log,) = logs_of(await manager.create_all(wanted(1)))
        await append(manager, KEY, 30)
        await flushed(manager, KEY)
        found = log.checkpoint
        gate, reached = asyncio.Event(), asyncio.Event()
        disk = manager.disk_of(KEY)
        write = disk.write

        async def late(work: Callable[[], Any]) -> Any:
            answer = await write(work)
            if work == found:
                reached.set()
                await gate.wait()
            return answer

        disk.write = late  # type: ignore[method-assign]
        checkpoint = asyncio.ensure_future(manager.checkpoint())
        await reached.wait()
        await manager.delete(KEY)
        await manager.create_all(wanted(1))
        gate.set()
        await checkpoint
        points = directory.read_offsets(house.storages[0], directory.RECOVERY_POINTS)
        assert points.get(KEY, 0) == 0

    run(main)
