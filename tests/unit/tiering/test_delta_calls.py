"""Which calls of the store a table makes, and what it does when one of them fails (tiering/delta).

The store is a directory, behind a wrapper that notes each call and may fail it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from pk import errors, settings
from pk.clock import SystemClock
from pk.tiering import layout, log_reading
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.delta import DeltaTables
from pk.tiering.delta_checkpoint import (
    BYTES_SHARE,
    COMMITS_MOST,
    INTERVAL,
    RECENT_BYTES_MAX,
    RecentCommits,
)
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import Commit, CommitConflict, Snapshot, Table

TOPIC, TOPIC_ID = "flights", "2f1c6a2e-55a0-4c87-9a6d-0d6f4f7f8f10"


class NotedStore:
    """A store that notes its calls; `before` and `after` run around each, and may raise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda call, path: None
        self.after: Callable[[str, str], None] = lambda call, path: None

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._inner, name)
        if name in ("url", "close"):
            return work

        async def call(path: str, *more: Any) -> Any:
            self.calls.append((name, path.rpartition("/")[2]))
            self.before(name, path)
            result = await work(path, *more)
            self.after(name, path)
            return result

        return call

    def taken(self) -> list[tuple[str, str]]:
        calls, self.calls = self.calls, []
        return calls


class Kit:
    def __init__(self, root: Path) -> None:
        self.home = root / layout.table_path(TOPIC, TOPIC_ID)
        chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": root.as_uri()}))
        self.store = NotedStore(open_store(chosen, SystemClock()))
        self.tables = DeltaTables(chosen, self.store, SystemClock())

    def table(self) -> Table:
        return self.tables.table(TOPIC, TOPIC_ID)

    def log(self) -> set[str]:
        return {path.name for path in (self.home / "_delta_log").glob("*")}


def run(root: Path, test: Callable[[Kit], Awaitable[None]]) -> None:
    async def whole() -> None:
        kit = Kit(root)
        try:
            await test(kit)
        finally:
            await kit.tables.close()
            await kit.store.close()

    asyncio.run(whole())


def append(read: Snapshot) -> Commit:
    was = read.partition(0)
    end = was.end + 10
    path = layout.data_path(layout.DataName(0, was.end, end, 0, "a", 0, 0))
    file = DataFile(path, 0, was.end, end - 1, 1_700_000_000_003, 1_700_000_000_999, 10, 10)
    counters = was._replace(end=end, epoch=0, rows=was.rows + 10)
    return Commit(read, (NewFile(file, 1_700_000_001_000),), (), {0: counters})


def many(read: Snapshot, count: int) -> Commit:
    """Returns one commit of `count` files."""
    last, adds = read, []
    for _ in range(count):
        one = append(last)
        adds += one.adds
        last = Snapshot(0, "", {}, one.counters)
    return Commit(read, tuple(adds), (), last.counters)


async def known(kit: Kit, commits: int = 1) -> tuple[Table, Snapshot]:
    table = kit.table()
    await table.create()
    snapshot = await table.load([0])
    assert snapshot is not None
    for _ in range(commits):
        snapshot = await table.commit(append(snapshot))
    kit.store.taken()
    return table, snapshot


def json_of(version: int) -> str:
    return f"{version:020d}.json"


def test_a_commit_is_one_head_and_one_put(tmp_path: Path) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await known(kit)
        await table.commit(append(snapshot))
        assert kit.store.taken() == [("head", json_of(1)), ("put_if_absent", json_of(2))]
        assert DeltaTable(str(kit.home)).version() == 2

    run(tmp_path, test)


def test_a_look_asks_for_two_names(tmp_path: Path) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await known(kit)
        assert await table.load([0]) is snapshot
        assert sorted(kit.store.taken()) == [("head", json_of(1)), ("head", json_of(2))]
        await table.commit(append(snapshot))  # the look has seen the known version
        assert kit.store.taken() == [("put_if_absent", json_of(2))]

    run(tmp_path, test)


def test_a_commit_of_another_owner_is_followed_from_its_json(tmp_path: Path) -> None:
    async def test(kit: Kit) -> None:
        table, snapshot = await known(kit)
        other = kit.table()
        read = await other.load([0])
        assert read is not None
        await other.commit(append(read))
        kit.store.taken()
        with pytest.raises(CommitConflict):
            await table.commit(append(snapshot))
        kit.store.taken()
        found = await table.load([0])
        assert {call for call, _ in kit.store.taken()} == {"head", "get_range"}
        assert found is not None
        assert (found.version, found.partition(0).end) == (2, 20)

    run(tmp_path, test)


def test_a_commit_whose_reply_was_lost_is_found(tmp_path: Path) -> None:
    """Rule T5: the version after the known one names its file."""

    async def test(kit: Kit) -> None:
        table, snapshot = await known(kit)

        def lost(call: str, path: str) -> None:
            if call == "put_if_absent":
                raise errors.TierUnavailable("the reply was lost")

        kit.store.after = lost
        commit = append(snapshot)
        with pytest.raises(errors.TierUnavailable):
            await table.commit(commit)
        found = await table.load([0])
        assert found is not None
        assert commit.adds[0].file.path in found.files

    run(tmp_path, test)


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("what", ["deleted", "rolled back", "created again"])
def test_nothing_is_put_behind_a_table_that_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, looked: bool
) -> None:
    """tiering/delta E1: such a log would have a hole, and its owner would never see it.  A look
    that has seen the table proves nothing some time later.
    """

    async def test(kit: Kit) -> None:
        table, snapshot = await known(kit, 2)
        if looked:
            assert await table.load([0]) == snapshot
            now_ms = SystemClock.monotonic_ms
            monkeypatch.setattr(SystemClock, "monotonic_ms", lambda self: now_ms(self) + 2_000)
        if what == "rolled back":
            (kit.home / "_delta_log" / json_of(2)).unlink()
        else:
            shutil.rmtree(kit.home)
        if what == "created again":
            await known(kit, 2)
        with pytest.raises(CommitConflict):
            await table.commit(append(snapshot))
        assert json_of(3) not in kit.log()

    run(tmp_path, test)


@pytest.mark.parametrize("broken", ["checkpoint.parquet", "_last_checkpoint"])
def test_a_checkpoint_that_fails_does_not_fail_its_commit(tmp_path: Path, broken: str) -> None:
    """tiering/delta E5: the table is opened again before the next commit."""

    async def test(kit: Kit) -> None:
        table, snapshot = await known(kit, INTERVAL - 2)

        def away(call: str, path: str) -> None:
            if call == "put" and path.endswith(broken):
                raise errors.TierUnavailable("the store is away")

        kit.store.before = away
        snapshot = await table.commit(append(snapshot))
        assert snapshot.version == INTERVAL - 1
        with pytest.raises(CommitConflict):
            await table.commit(append(snapshot))
        kit.store.before = lambda call, path: None
        again = await table.load([0])
        for _ in range(INTERVAL):
            assert again is not None
            again = await table.commit(append(again))
        assert f"{2 * INTERVAL - 1:020d}.checkpoint.parquet" in kit.log()
        seen = await kit.table().load([0])
        assert seen is not None
        assert again is not None
        assert (seen.files, seen.counters) == (again.files, again.counters)

    run(tmp_path, test)


@pytest.mark.parametrize("last", ["kept", "lost", "damaged"])
def test_checkpoints_of_several_owners_hold_the_whole_table(tmp_path: Path, last: str) -> None:
    """A table is read from its checkpoint alone, whichever owner made it."""

    async def test(kit: Kit) -> None:
        await known(kit)
        tables = [kit.table() for _ in range(3)]
        for turn in range(4 * INTERVAL):
            table = tables[turn % 3]
            read = await table.load([0])
            assert read is not None
            await table.commit(append(read))
            if turn == 2 * INTERVAL and last != "kept":
                path = kit.home / "_delta_log" / "_last_checkpoint"
                path.unlink()
                if last == "damaged":
                    path.write_text("{")
        made = max(name for name in kit.log() if name.endswith(".checkpoint.parquet"))
        for name in kit.log():
            if name.endswith(".json") and name[:20] < made[:20]:
                (kit.home / "_delta_log" / name).unlink()
        seen = await kit.table().load([0])
        assert seen is not None
        assert seen.partition(0).end == 10 * len(seen.files) == 10 * (4 * INTERVAL + 1)

    run(tmp_path, test)


def test_a_store_that_overwrites_is_refused_by_both_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule T14: deltalake's put-if-absent works, the store's does not."""

    async def test(kit: Kit) -> None:
        async def overwrites(path: str, data: bytes) -> object:
            await kit.store.put(path, data)
            return await kit.store.head(path)

        monkeypatch.setattr(kit.store, "put_if_absent", overwrites, raising=False)
        with pytest.raises(errors.StoreRefused, match="put-if-absent"):
            await kit.tables.probe("p1")

    run(tmp_path, test)


def test_a_large_table_has_fewer_checkpoints(tmp_path: Path) -> None:
    """Their cost grows with the table, so the commits between them do, too."""

    async def test(kit: Kit) -> None:
        table, snapshot = await known(kit, INTERVAL - 2)
        whole = many(snapshot, 800)
        snapshot = await table.commit(whole)
        made = kit.home / "_delta_log" / f"{INTERVAL - 1:020d}.checkpoint.parquet"
        size, spent, commits = made.stat().st_size, 0, 0
        while spent * BYTES_SHARE < size:
            assert sum("checkpoint.parquet" in name for name in kit.log()) == 1
            snapshot = await table.commit(append(snapshot))
            commits += 1
            spent += (kit.home / "_delta_log" / json_of(snapshot.version)).stat().st_size
        assert INTERVAL < commits < COMMITS_MOST
        assert f"{snapshot.version:020d}.checkpoint.parquet" in kit.log()
        seen = await kit.table().load([0])
        assert seen is not None
        assert (seen.files, seen.counters) == (snapshot.files, snapshot.counters)

    run(tmp_path, test)


def test_checkpoints_come_by_the_bytes_of_the_commits_and_by_their_number() -> None:
    recent = RecentCommits()
    assert [version for version in range(20) if recent.is_due(version)] == [4, 9, 14, 19]
    recent.made(9, 1_000 * BYTES_SHARE)

    def due_after(size: int) -> int:
        for version in range(10, 200):
            recent.add(version, bytes(size))
            if recent.is_due(version):
                return version - 9
        return -1

    assert due_after(1) == COMMITS_MOST
    recent.made(9, 1_000 * BYTES_SHARE)
    assert due_after(100) == 10
    recent.made(9, 1_000 * BYTES_SHARE)
    assert due_after(10_000) == INTERVAL


def test_a_damaged_commit_is_looked_for_among_all_since_a_checkpoint() -> None:
    assert log_reading.SUSPECTS_MAX > COMMITS_MOST


def test_kept_commits_have_a_bound() -> None:
    """tiering/delta_checkpoint K2: older commits are read again."""
    recent = RecentCommits()
    for version in range(100):
        recent.add(version, bytes(RECENT_BYTES_MAX // 10))
    assert [version for version in range(100) if recent.get(version)] == list(range(90, 100))
    recent.add(200, b"behind a gap")
    assert [version for version in range(201) if recent.get(version)] == [200]
