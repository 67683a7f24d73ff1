"""One suite for both tables: deltalake on a directory and on S3, and the fake
(tiering/table.py)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pk import errors, settings
from pk.clock import SystemClock
from pk.generations import EPOCHS
from pk.tiering import delta, layout
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.delta import DeltaLogTable, DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.layout import PartitionCounters
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import (
    Commit,
    Snapshot,
    Table,
    always,
    check_successor,
)
from tests.contract.table_kit import DAMAGE, TOPIC, TOPIC_ID, Kit, Run, alone

DAY_MS = 86_400_000


def add(partition: int, start: int, end: int, attempt: str = "a") -> NewFile:
    path = layout.data_path(layout.DataName(partition, start, end, 0, attempt, 0, 0))
    file = DataFile(
        path, partition, start, end - 1, 1_700_000_000_003, 1_700_000_000_999, end - start, 10
    )
    return NewFile(file, 1_700_000_001_000)


def append(read: Snapshot, partition: int, end: int, attempt: str = "a") -> Commit:
    was = read.partition(partition)
    counters = was._replace(end=end, epoch=0, rows=was.rows + end - was.end, sum=2**62 + end)
    return Commit(read, (add(partition, was.end, end, attempt),), (), {partition: counters})


async def created(kit: Kit) -> tuple[Table, Snapshot]:
    table = kit.table()
    assert await table.load([0, 1]) is None
    return table, await table.create()


def test_owners_that_create_a_table_at_once_get_the_same_one(run: Run) -> None:
    """An owner may be replaced while it creates the table: both are right, and both go on."""

    async def test(kit: Kit) -> None:
        for number in range(10):
            owners = [kit.factory.table(f"{TOPIC}-{number}", TOPIC_ID) for _ in range(3)]
            for owner in owners:
                assert await owner.load([0]) is None
            made = await asyncio.gather(*(owner.create() for owner in owners))
            assert [each.version for each in made] == [0, 0, 0]
            assert len({each.table_id for each in made}) == 1
            first = await owners[1].commit(append(made[1], 0, 100))
            seen = await owners[0].load([0])
            assert seen is not None
            assert seen.version == first.version == 1

    run(test)


def test_commits_follow_each_other_and_are_seen_by_another_handle(run: Run) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        assert snapshot.version == 0
        snapshot = await table.commit(append(snapshot, 0, 100))
        snapshot = await table.commit(append(snapshot, 1, 50))
        snapshot = await table.commit(append(snapshot, 0, 130))
        seen = await kit.table().load([0, 1])
        for found in (snapshot, seen):
            assert found is not None
            assert found.version == 3
            assert found.partition(0) == PartitionCounters(0, 130, 0, -1, 130, 2**62 + 130, 0)
            assert found.partition(1).end == 50
            assert [(f.min_offset, f.max_offset, f.rows) for f in found.files_of(0)] == [
                (0, 99, 100),
                (100, 129, 30),
            ]
        assert seen is not None
        assert seen.files == snapshot.files
        assert seen.table_id == snapshot.table_id

    run(test)


def test_what_was_committed_survives_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T6: local records are dropped because of it; loaded commits of others count, too."""
    sync = os.fsync
    synced: set[int] = set()

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("os.fsync", noted)
    clock = SystemClock()
    chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": tmp_path.as_uri()}))
    home = tmp_path / layout.table_path(TOPIC, TOPIC_ID)

    def unsynced() -> list[str]:
        above = [home, *(path for path in home.parents if path.is_relative_to(tmp_path))]
        wanted = [home / "_delta_log", *(home / "_delta_log").glob("*.json"), *above]
        return [path.name for path in wanted if path.stat().st_ino not in synced]

    async def test() -> None:
        store = open_store(chosen, clock)
        tables = DeltaTables(chosen, store, clock)
        kit = alone(tables)
        try:
            table, snapshot = await created(kit)
            assert unsynced() == []
            other = kit.table()
            await other.load([0])
            for end in (10, 20):
                synced.discard((home / "_delta_log").stat().st_ino)
                snapshot = await table.commit(append(snapshot, 0, end))
                assert unsynced() == []
            synced.clear()
            await other.load([0])
            seen = {path.name for path in (home / "_delta_log").iterdir()} - set(unsynced())
            assert seen == {f"{version:020}.json" for version in (1, 2)}
            await table.load([0])
            assert f"{0:020}.json" in unsynced()  # not again at each load

            def broken(_descriptor: int) -> None:
                raise OSError(errno.EIO, "injected")

            monkeypatch.setattr("os.fsync", broken)
            with pytest.raises(errors.TierUnavailable, match="injected"):
                await table.commit(append(snapshot, 0, 30))
        finally:
            await tables.close()
            await store.close()

    asyncio.run(test())


def test_what_a_table_is_opened_by_is_synced_not_all_its_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syncing a month of commits took longer than a call may take: no table was opened."""
    clock = SystemClock()
    chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": tmp_path.as_uri()}))
    home = tmp_path / layout.table_path(TOPIC, TOPIC_ID) / "_delta_log"

    async def test() -> None:
        store = open_store(chosen, clock)
        tables = DeltaTables(chosen, store, clock)
        try:
            table, snapshot = await created(
                Kit(tables, lambda: None, lambda _: None, lambda _: lambda: None)
            )
            for end in range(1, 14):
                snapshot = await table.commit(append(snapshot, 0, end))
            synced: set[int] = set()

            def noted(descriptor: int) -> None:
                synced.add(os.fstat(descriptor).st_ino)

            monkeypatch.setattr("os.fsync", noted)
            assert (await tables.table(TOPIC, TOPIC_ID).load([0])).version == 13
            names = {path.name for path in home.iterdir() if path.stat().st_ino in synced}
            commits = {f"{version:020}.json" for version in range(9, 14)}
            assert names == {"_last_checkpoint", f"{9:020}.checkpoint.parquet", *commits}
        finally:
            await tables.close()
            await store.close()

    asyncio.run(test())


def test_a_stale_commit_is_refused_whatever_it_holds(run: Run) -> None:
    """tiering/table D1: appends, removals and txn-only commits alike."""

    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        first = await table.commit(append(snapshot, 0, 100))
        path = first.files_of(0)[0].path
        for stale in (
            lambda read: append(read, 1, 10),
            lambda read: Commit(read, (), (path,), {}, True),
            lambda read: Commit(read, counters={1: PartitionCounters(claim=4)}),
        ):
            other = kit.table()
            read = await other.load([0, 1])
            assert read is not None
            mine = await table.load([0, 1])
            assert mine is not None
            await table.commit(append(mine, 0, mine.partition(0).end + 10))
            with pytest.raises(errors.TierUnavailable):
                await other.commit(stale(read))
            again = await other.load([0, 1])
            assert again is not None
            assert path in again.files
            assert again.partition(1) == PartitionCounters()

    run(test)


def test_racing_owners_lose_nothing_and_double_nothing(run: Run) -> None:
    async def test(kit: Kit) -> None:
        await created(kit)

        async def owner(partition: int) -> None:
            table = kit.table()
            while True:
                read = await table.load([0, 1])
                assert read is not None
                if (end := read.partition(partition).end) >= 40:
                    return
                try:
                    await table.commit(append(read, partition, end + 10, f"o{partition}"))
                except errors.TierUnavailable:
                    continue

        await asyncio.gather(owner(0), owner(1))
        final = await kit.table().load([0, 1])
        assert final is not None
        for partition in (0, 1):
            starts = [file.min_offset for file in final.files_of(partition)]
            assert starts == [0, 10, 20, 30]
            assert final.partition(partition).rows == 40

    run(test)


def test_removed_files_leave_and_txn_only_commits_work(run: Run) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        snapshot = await table.commit(append(snapshot, 0, 100))
        snapshot = await table.commit(append(snapshot, 0, 200))
        pending_delete = snapshot.files_of(0)[0].path
        counters = snapshot.partition(0)._replace(start=100, removed=100)
        snapshot = await table.commit(Commit(snapshot, (), (pending_delete,), {0: counters}))
        claimed = snapshot.partition(0)._replace(claim=7)
        snapshot = await table.commit(Commit(snapshot, counters={0: claimed}))
        seen = await kit.table().load([0])
        assert seen is not None
        assert seen.partition(0) == snapshot.partition(0)
        assert seen.partition(0).claim == 7
        assert [file.min_offset for file in seen.files_of(0)] == [100]

    run(test)


def test_what_was_removed_is_vacuumed_once_whoever_removed_it(run: Run) -> None:
    async def remove(table: Table, read: Snapshot) -> Snapshot:
        path = read.files_of(0)[0].path
        counters = read.partition(0)._replace(start=read.files_of(0)[0].max_offset + 1)
        return await table.commit(Commit(read, (), (path,), {0: counters}, True))

    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        for end in (10, 20, 30, 40):
            snapshot = await table.commit(append(snapshot, 0, end))
        assert await table.vacuum(0, always) == 0
        snapshot = await remove(table, snapshot)
        assert [await table.vacuum(0, always), await table.vacuum(0, always)] == [1, 0]
        snapshot = await remove(table, snapshot)
        assert [await table.vacuum(0, always), await table.vacuum(0, always)] == [1, 0]
        other = kit.table()
        read = await other.load([0])
        assert read is not None
        await remove(other, read)
        # a new handle does not know which files are deleted already
        assert await table.vacuum(0, always) >= 1
        assert await table.vacuum(0, always) == 0
        newest = await table.load([0])
        assert newest is not None
        assert [file.min_offset for file in newest.files_of(0)] == [30]

    run(test)


def test_a_vacuum_asks_before_it_deletes(run: Run) -> None:
    """Rule L10: the next vacuum deletes the files that were kept."""

    async def never() -> bool:
        return False

    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        for end in (10, 20):
            snapshot = await table.commit(append(snapshot, 0, end))
        await table.vacuum(0, always)
        path = snapshot.files_of(0)[0].path
        counters = snapshot.partition(0)._replace(start=10)
        await table.commit(Commit(snapshot, (), (path,), {0: counters}, True))
        assert await table.vacuum(0, never) is None
        assert await table.vacuum(0, always) == 1

    run(test)


def test_a_file_that_is_live_again_is_not_vacuumed(run: Run) -> None:
    """A user restored the table's version before the removal."""

    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        snapshot = await table.commit(append(snapshot, 0, 10))
        (file,) = snapshot.files_of(0)
        await table.vacuum(0, always)
        await table.commit(Commit(snapshot, (), (file.path,), {}, True))
        other = kit.table()
        read = await other.load([0])
        assert read is not None
        await other.commit(Commit(read, (NewFile(file, 1_700_000_001_000),), (), {}))
        assert await table.vacuum(0, always) == 0

    run(test)


def test_a_table_made_anew_is_not_vacuumed_for_the_old_one(run: Run) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        snapshot = await table.commit(append(snapshot, 0, 10))
        await table.vacuum(0, always)
        path = snapshot.files_of(0)[0].path
        await table.commit(Commit(snapshot, (), (path,), {}, True))
        kit.drop()
        await created(kit)
        assert await table.vacuum(0, always) == 0

    run(test)


def test_only_what_was_asked_for_is_counted(run: Run) -> None:
    """A snapshot without a partition has no counters of it; otherwise bugs stay hidden."""

    async def test(kit: Kit) -> None:
        table, _ = await created(kit)
        both = await table.load([0, 1])
        assert both is not None
        await table.commit(append(both, 1, 50))
        other = kit.table()
        one = await other.load([0])
        assert one is not None
        assert set(one.counters) == {0}
        assert set((await other.commit(append(one, 0, 10))).counters) == {0}

    run(test)


def test_counters_and_claims_that_were_not_asked_for_at_first_are_loaded(run: Run) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        newest = await table.commit(append(snapshot, 5, 100))
        other, younger = kit.table(), kit.table()
        await asyncio.gather(other.load([0]), younger.load([7]))
        await table.commit(Commit(newest, counters={0: PartitionCounters(claim=EPOCHS)}))
        for handle, asked in ((other, [0, 5]), (younger, [7]), (kit.table(), [7])):
            seen = await handle.load(asked)
            assert seen is not None
            facts = (set(seen.counters), seen.restored, seen.partition(5).end)
            assert facts == (set(asked), EPOCHS, 100 * (5 in asked))

    run(test)


@pytest.mark.parametrize("files_max", [delta.HANDLE_FILES_MAX, 0], ids=["small", "large"])
def test_a_table_is_not_opened_again_for_a_partition_that_is_new_to_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_max: int
) -> None:
    """Ten owners make a version a second, and a job hands over files of every partition."""
    monkeypatch.setattr(delta, "HANDLE_FILES_MAX", files_max)
    opened: list[object] = []
    whole = DeltaLogTable._open_whole

    def counted(self: DeltaLogTable, partitions: Sequence[int]) -> Any:
        opened.append(partitions)
        return whole(self, partitions)

    monkeypatch.setattr(DeltaLogTable, "_open_whole", counted)

    async def test() -> None:
        clock = SystemClock()
        chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": tmp_path.as_uri()}))
        store = open_store(chosen, clock)
        real = DeltaTables(chosen, store, clock)
        table, other = real.table(TOPIC, TOPIC_ID), real.table(TOPIC, TOPIC_ID)
        snapshot = await table.create()
        assert await other.load([9]) is not None
        opened.clear()
        for partition in range(3):
            loaded = await table.load([*snapshot.counters, partition])
            assert loaded is not None
            snapshot = await table.commit(append(loaded, partition, 10 * (partition + 1)))
            seen = await other.load([9, *range(partition + 1)])
            assert seen is not None
            assert [seen.partition(each).end for each in range(partition + 1)] == [10, 20, 30][
                : partition + 1
            ]
            assert (seen.files, seen.version) == (snapshot.files, snapshot.version)
        await real.close()
        await store.close()

    asyncio.run(test())
    assert opened == []


def test_a_deleted_table_is_noticed_by_a_handle_that_was_open(run: Run) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        await table.commit(append(snapshot, 0, 100))
        kit.drop()
        assert await table.load([0]) is None

    run(test)


def test_a_table_made_anew_is_another_table(run: Run) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        old = await table.commit(append(snapshot, 0, 100))
        kit.drop()
        other = kit.table()
        await other.commit(append(await other.create(), 0, 100, "b"))
        new = await table.load([0])
        assert new is not None
        with pytest.raises(errors.TierTableChanged, match="re-created"):
            check_successor(table.uri, old, new)

    run(test)


def test_a_table_that_went_back_is_noticed(run: Run) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        snapshot = await table.commit(append(snapshot, 0, 100))
        old = await table.commit(append(snapshot, 0, 200))
        kit.roll_back(1)
        new = await table.load([0])
        assert new is not None
        with pytest.raises(errors.TierTableChanged, match="went back"):
            check_successor(table.uri, old, new)

    run(test)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_version_is_refused_until_it_is_mended(run: Run, what: str) -> None:
    """Rule T2: by a handle that knows the version before, and by a new one."""

    async def test(kit: Kit) -> None:
        table, snapshot = await created(kit)
        snapshot = await table.commit(append(snapshot, 0, 100))
        knows = kit.table()
        await knows.load([0])
        snapshot = await table.commit(append(snapshot, 0, 200))
        mend = kit.damage(what)
        for reader in (knows, kit.table()):
            for _ in range(2):
                with pytest.raises(errors.TierTableChanged, match="version 2"):
                    await reader.load([0])
        mend()
        for reader in (knows, kit.table()):
            seen = await reader.load([0])
            assert seen is not None
            assert (seen.files, seen.counters) == (snapshot.files, snapshot.counters)

    run(test)


def test_many_commits_survive_checkpoints(tmp_path: Path) -> None:
    """T2: counters are in txn actions; checkpoints keep them when the log is cleaned."""

    async def whole() -> None:
        clock = SystemClock()
        chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": tmp_path.as_uri()}))
        store = open_store(chosen, clock)
        real = DeltaTables(chosen, store, clock)
        table = real.table(TOPIC, TOPIC_ID)
        snapshot = await table.create()
        for end in range(10, 1_110, 10):
            snapshot = await table.commit(append(snapshot, 0, end))
        seen = await real.table(TOPIC, TOPIC_ID).load([0])
        assert seen is not None
        assert seen.version == 110
        assert seen.files == snapshot.files
        assert seen.counters == snapshot.counters
        await real.close()
        await store.close()

    asyncio.run(whole())
    log = tmp_path / layout.table_path(TOPIC, TOPIC_ID) / "_delta_log"
    assert list(log.glob("*.checkpoint.parquet"))
    first = [
        json.loads(line) for line in (log / layout.commit_file(1)[11:]).read_text().splitlines()
    ]
    info = next(action["commitInfo"] for action in first if "commitInfo" in action)
    assert info["isBlindAppend"] is True


class SetClock(SystemClock):
    """A wall clock that the test sets."""

    off_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.off_ms


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_removed_under_a_clock_that_was_behind_is_kept(
    tmp_path: Path, restarted: bool
) -> None:
    """Rule L10: the removal's date is not before the commits that the store already had."""

    async def whole() -> None:
        clock = SetClock()
        chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": tmp_path.as_uri()}))
        store = open_store(chosen, clock)
        real = DeltaTables(chosen, store, clock)
        table = real.table(TOPIC, TOPIC_ID)
        snapshot = await table.create()
        for end in (10, 20):
            snapshot = await table.commit(append(snapshot, 0, end))
        clock.off_ms = -DAY_MS
        path = snapshot.files_of(0)[0].path
        counters = snapshot.partition(0)._replace(start=10)
        await table.commit(Commit(snapshot, (), (path,), {0: counters}, True))
        clock.off_ms = 0
        if restarted:
            table = real.table(TOPIC, TOPIC_ID)
            await table.load([0])
        assert await table.vacuum(3_600_000, always) == 0
        table = real.table(TOPIC, TOPIC_ID)
        await table.load([0])
        assert await table.vacuum(0, always) == 1
        await real.close()
        await store.close()

    asyncio.run(whole())


def test_the_probe_passes_and_leaves_nothing(run: Run) -> None:
    async def test(kit: Kit) -> None:
        await kit.factory.probe("probe-1")
        assert "secret" not in json.dumps(kit.factory.describe())

    run(test)
