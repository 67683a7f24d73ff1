"""What a clean stop vouches for (log/closed_logs): the next start finds the same logs without a
look into their files, and looks if anything in a directory has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.log import checkpoints, closed_logs, closed_logs_file, closing, columns, directory
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.log.segment import INDEX, LOG, SNAPSHOT, Segment, file_name
from pk.sim.disk import SimStorage
from pk.types import PartitionKey, TopicPartition
from tests.unit.log.conftest import Bench
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run

PATH = f"topics/{TP}"
FILE = f"{PATH}/{file_name(0, LOG)}"


async def closed_house(partitions: int = 1, records: int = 1) -> House:
    """A house whose broker was stopped properly."""
    house = House()
    manager = await house.opened()
    for number in range(partitions):
        await manager.create(TopicPartition("t", number), "tid", CONFIG)
        if records:
            await append(manager, PartitionKey("tid", number), records)
    manager.remember_broker_epoch(1)
    await manager.close()
    return house


def counted(storage: SimStorage) -> Counter[tuple[str, str]]:
    """Count the operations from now on: (operation, partition directory or "")."""
    found: Counter[tuple[str, str]] = Counter()

    def note(operation: str, path: str) -> None:
        found[operation, path.split("/")[1] if path.startswith("topics/") else ""] += 1

    storage.fault = note
    return found


def facts_of(log: PartitionLog) -> dict[str, Any]:
    """Everything that an opening finds."""
    segments = log._local.segments  # what is compared here has no other name
    active = segments[-1].index
    assert active is not None
    return {
        "segments": [(each.base_offset, each.written, each.decided) for each in segments],
        "sealed": [each.index for each in segments[:-1]],
        "index": (active.base_offset, active.offsets, active.positions, active.times),
        "synced": [each.synced for each in segments[:-1]],
        "epochs": log.epochs.entries,
        "producers": log.producers.snapshot(log.log_end),
        "ends": (log.log_start, log.log_end, log.written_end, log.synced_end, log.size_bytes),
        "flags": (log.blank, log.torn, log.start_unknown, log.absent, log.last_epoch),
    }


@pytest.mark.parametrize("records", [0, 3])
def test_an_idle_partition_costs_one_look_at_start_and_stop(records: int) -> None:
    partitions = 2 * closing.VISIT_MAX + 5

    async def main() -> None:
        house = await closed_house(partitions, records)
        (storage,) = house.storages
        for _ in range(2):
            done = counted(storage)
            manager = await house.opened()
            manager.remember_broker_epoch(2)
            await manager.close()
            assert {operation for operation, where in done if where} == {"list"}
            assert {done["list", f"t-{number}"] for number in range(partitions)} == {2}

    run(main)


def test_a_written_partition_costs_one_sync_at_a_stop() -> None:
    """And no file: the line has all that the next opening needs (log/closed_logs B5).  Nor does a
    checkpoint make one.
    """

    async def main() -> None:
        house = await closed_house(3)
        (storage,) = house.storages
        manager = await house.opened()
        await append(manager, KEY)
        names = storage.names(PATH)
        done = counted(storage)
        await manager.checkpoint()
        await append(manager, KEY)
        await manager.close()
        mine = Counter({operation: done[operation, where] for operation, where in done if where})
        assert mine["sync"] == 1
        assert set(mine) == {"list", "exists", "read", "append", "sync"}
        assert not [
            operation for operation, where in done if where == "t-1" and operation != "list"
        ]
        assert storage.names(PATH) == names
        assert not [name for name in names if name.endswith((INDEX, SNAPSHOT))]

    run(main)


def test_indexes_that_exist_are_brought_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """log/closed_logs B6: one that ended before its log would hide the rest from a repair."""

    async def main() -> None:
        house = House()
        manager = await house.opened()
        await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY)
        with monkeypatch.context() as patched:
            patched.setattr(closed_logs, "WALKED_MAX", -1)
            await manager.checkpoint()
        await append(manager, KEY, 2)
        manager.remember_broker_epoch(1)
        await manager.close()
        (storage,) = house.storages
        _, extent = Segment(storage, PATH, 0).load_index()
        assert extent.next_offset == 3

    run(main)


def history(name: str, bench: Bench) -> None:
    """Give a log a past."""
    if name == "long":  # more entries than a line holds
        bench.log.config = bench.config
        bench.fill(closed_logs.ENTRIES_MAX * 4)
    if name == "rolled":
        bench.fill(12)
        bench.log.roll()
        bench.fill(1)
    if name == "epochs":
        for epoch in range(4):
            bench.append(*[b"".join(columns.encode_lists([b"v"] * 9))], epoch=epoch)
    if name == "producers":
        for each in range(30):
            for turn in range(3):
                options = {"producer_id": each, "producer_epoch": 0, "base_sequence": turn}
                bench.append(b"".join(columns.encode_lists([b"v"], **options)))
    if name == "rolled and empty":
        bench.fill(9)
        bench.log.roll()
        plan = bench.log.take_writes()
        assert plan is not None
        bench.log.perform(plan)
        bench.log.complete(plan)


@pytest.mark.parametrize("vouched", [True, False])
@pytest.mark.parametrize(
    "name", ["empty", "long", "rolled", "rolled and empty", "epochs", "producers"]
)
def test_a_line_says_what_an_opening_finds(
    name: str, vouched: bool, bench: Callable[..., Bench]
) -> None:
    b = bench(segment_bytes=100_000 if name == "long" else 2_000)
    history(name, b)
    b.storage.sync_all(*b.log.begin_close(vouched=vouched))
    line = b.log.end_close()
    end = b.log.written_end
    loaded = closed_logs.opened(line, b.storage, b.log.path, end, 0)
    assert loaded is not None
    told = facts_of(b.open(clean=True, recovery_point=end, log_start=0, loaded=loaded))
    b.log.close(False)
    assert told == facts_of(b.open(clean=True, recovery_point=end, log_start=0))
    # at the first use, the log goes on where it ended
    b.log.close(False)
    b.open(clean=True, recovery_point=end, log_start=0, loaded=loaded)
    before = b.values() if end else []
    b.append(b"".join(columns.encode_lists([b"v"] * 2)), epoch=9)
    assert b.values() == [*before, end, end + 1]
    b.open(clean=False, recovery_point=end)
    assert b.values() == [*before, end, end + 1]


def appended(storage: SimStorage) -> None:
    storage.open(FILE).append([b"x"])


def cut(storage: SimStorage) -> None:
    storage.open(FILE).truncate(10)


def written_over(storage: SimStorage) -> None:
    storage.open(FILE).write_at(70, b"x")


def replaced(storage: SimStorage) -> None:
    storage.replace_file(FILE, storage.peek(FILE))


def removed(storage: SimStorage) -> None:
    storage.remove(FILE)


def added(storage: SimStorage) -> None:
    storage.open(f"{PATH}/{file_name(700, LOG)}", create=True)


@pytest.mark.parametrize("change", [appended, cut, written_over, replaced, removed, added])
def test_a_change_of_the_directory_is_seen(change: Callable[[SimStorage], None]) -> None:
    async def main() -> None:
        house = await closed_house(2)
        (storage,) = house.storages
        change(storage)
        done = counted(storage)
        manager = house.manager()
        await manager.open()
        await manager.load(lambda topic_id, tp: CONFIG)
        assert done["read", "t-0"]
        assert not done["read", "t-1"]

    run(main)


def test_no_line_is_used_after_a_crash() -> None:
    async def main() -> None:
        house = await closed_house(2)
        (storage,) = house.storages
        manager = await house.opened()
        await append(manager, KEY, 2)
        storage.crash()
        done = counted(storage)
        manager = await house.opened()
        log = manager.get(KEY)
        assert log is not None
        assert log.log_end == 3
        assert done["read", "t-1"]

    run(main)


def test_what_an_opening_would_repair_has_no_line() -> None:
    async def lines(change: Callable[[House, LogManager], Any]) -> list[str]:
        house = await closed_house(2)
        (storage,) = house.storages
        manager = await house.opened()
        await append(manager, KEY)
        change(house, manager)
        manager.remember_broker_epoch(2)
        await manager.close()
        return sorted(closed_logs_file.read(storage))

    def leave(name: str) -> Callable[[House, LogManager], Any]:
        return lambda house, _: house.storages[0].open(f"{PATH}/{name}", create=True)

    def clean(_: House, manager: LogManager) -> None:
        log = manager.get(KEY)
        assert log is not None
        log._local.cleaned_end = 1

    async def main() -> None:
        assert await lines(lambda *_: None) == ["t-0", "t-1"]
        assert await lines(leave(f"{file_name(0, LOG)}.deleted")) == ["t-1"]
        assert await lines(leave("x.tmp")) == ["t-1"]
        assert await lines(clean) == ["t-1"]

    run(main)


@pytest.mark.parametrize("damage", ["missing", "damaged", "newer", "another topic", "behind"])
def test_lines_that_do_not_help_cost_time_only(damage: str) -> None:
    async def main() -> None:
        house = await closed_house(records=2)
        (storage,) = house.storages
        if damage == "missing":
            storage.remove(closed_logs_file.FILE)
        elif damage == "damaged":
            storage.exchange(closed_logs_file.FILE, storage.peek(closed_logs_file.FILE)[:-20])
        elif damage == "newer":
            lines = closed_logs_file.read(storage).values()
            raw = checkpoints.encode(closed_logs_file.FILE, lines, checkpoints.VERSION + 1)
            storage.exchange(closed_logs_file.FILE, raw)
        elif damage == "another topic":
            (line,) = closed_logs_file.read(storage).values()
            closed_logs_file.write(storage, {"": line.replace(" tid ", " other ")})
        else:  # a file that a full disk kept an earlier stop from replacing
            storage.open(f"{PATH}/{file_name(2, SNAPSHOT)}", create=True)
        manager = await house.opened()
        log = manager.get(KEY)
        assert log is not None
        assert (log.log_end, log.topic_id) == (2, "tid")

    run(main)


def test_a_failed_close_leaves_no_mark_and_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_logs, "WALKED_MAX", -1)  # the stop creates files

    async def main() -> None:
        house = await closed_house(3)
        (storage,) = house.storages
        manager = await house.opened()
        await append(manager, KEY)

        def full(operation: str, path: str) -> Exception | None:
            here = operation == "create" and path.startswith(f"{PATH}/")
            return errors.StorageFull("no room") if here else None

        storage.fault = full
        manager.remember_broker_epoch(2)
        await manager.close()
        storage.fault = None
        assert sorted(closed_logs_file.read(storage)) == ["t-1", "t-2"]
        assert not storage.exists(directory.CLEAN_FILE)
        log = (await house.opened()).get(KEY)
        assert log is not None
        assert log.log_end == 2

    run(main)
