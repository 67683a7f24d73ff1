"""Damage to the table or the store leads to typed errors that name the cause and who must act; no
record is lost.

Each test damages the table, sees the problem reported and copying stopped, then repairs the table
and finds every record in it once (rule T8, the bad-input list).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable, TableFeatures
from tier_bench import TOPIC, TOPIC_ID, Bench, LiveLog, bench

from pk import errors
from pk.clock import SystemClock
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings
from pk.wire import pk_pb2 as wire

pytestmark = pytest.mark.integration

QUICK = {"refresh_interval_ms": 100, "recheck_ms": 100}


def go(tmp_path: Path, test: Callable[[Bench, LiveLog], Awaitable[None]]) -> None:
    async def whole() -> None:
        given: dict[str, object] = {"tier_url": (tmp_path / "tier").as_uri()}
        async with bench(given, tmp_path / "log", **QUICK) as it:
            log = LiveLog(it.directory)
            for _ in range(2):
                log.append(500)
                it.tell(log)
                await it.tiered(log.end)
            await it.until(lambda: it.progress.droppable_end == log.end)
            await test(it, log)

    asyncio.run(whole())


def home(tmp_path: Path) -> Path:
    return tmp_path / "tier" / TOPIC / TOPIC_ID


async def refused(it: Bench, log: LiveLog, says: str) -> wire.Error:
    """Check that the problem is reported, that nothing more is committed or droppable, and that
    reads are refused.
    """
    before = log.end
    log.append(200)
    it.tell(log, tiered_end=before)

    def reported() -> bool:
        return it.progress.HasField("problem") and says in it.progress.problem.message

    await it.until(reported)
    problem = it.progress.problem
    assert problem.code == errors.TierTableChanged.code
    assert it.progress.tiered_end == before
    with pytest.raises(errors.TierTableChanged, match=says):
        await it.worker.fetch(TOPIC_ID, TOPIC, 0, 0, before, 10_000)
    with pytest.raises(errors.TierTableChanged):
        await it.worker.claim(TOPIC_ID, TOPIC, 0, 9, commit=True)
    return problem


async def healed(it: Bench, log: LiveLog) -> None:
    """Check after the repair that the problem ends by itself and every record is there once."""
    log.append(100)
    it.tell(log)
    await it.tiered(log.end)
    await it.until(lambda: not it.progress.HasField("problem"))
    assert await it.read_all(0, log.end, 50_000) == log.rows


def test_a_deleted_table(tmp_path: Path) -> None:
    async def test(it: Bench, log: LiveLog) -> None:
        home(tmp_path).rename(tmp_path / "aside")
        await refused(it, log, "the table is gone")
        log_of_it = home(tmp_path) / "_delta_log"
        assert not log_of_it.exists(), "pk made a new table in the old one's place"
        if home(tmp_path).exists():  # a file was uploaded before its commit met that
            home(tmp_path).rename(tmp_path / "uploaded")
        (tmp_path / "aside").rename(home(tmp_path))
        await healed(it, log)

    go(tmp_path, test)


def test_a_recreated_table(tmp_path: Path) -> None:
    async def test(it: Bench, log: LiveLog) -> None:
        schema = it.table().schema()
        home(tmp_path).rename(tmp_path / "aside")
        DeltaTable.create(home(tmp_path), schema=schema, partition_by=["partition"])
        await refused(it, log, "re-created")
        # The log writes into the directory all the time: it is moved, never emptied.
        home(tmp_path).rename(tmp_path / "recreated")
        (tmp_path / "aside").rename(home(tmp_path))
        await healed(it, log)

    go(tmp_path, test)


def test_a_table_at_a_lower_version(tmp_path: Path) -> None:
    async def test(it: Bench, log: LiveLog) -> None:
        newest = max((home(tmp_path) / "_delta_log").glob("*.json"))
        newest.rename(tmp_path / newest.name)
        await refused(it, log, "went back")
        (tmp_path / newest.name).rename(newest)
        await healed(it, log)

    go(tmp_path, test)


def test_an_old_copy_is_noticed_after_a_restart(tmp_path: Path) -> None:
    """The broker remembers how far the table reached, and refuses a restored backup that holds
    less.
    """

    async def test(it: Bench, log: LiveLog) -> None:
        (max((home(tmp_path) / "_delta_log").glob("*.json"))).unlink()

    go(tmp_path, test)

    async def again() -> None:
        given: dict[str, object] = {"tier_url": (tmp_path / "tier").as_uri()}
        async with bench(given, tmp_path / "log2", **QUICK) as it:
            log = LiveLog(it.directory)
            log.append(1_000)
            it.tell(log, tiered_end=1_000)
            await it.until(lambda: bool(it.worker.outbox) and it.progress.HasField("problem"))
            assert it.progress.problem.code == errors.TierTableChanged.code
            assert "the broker knows of 1000" in it.progress.problem.message

    asyncio.run(again())


def test_a_table_altered_to_a_protocol_pk_does_not_accept(tmp_path: Path) -> None:
    async def test(it: Bench, log: LiveLog) -> None:
        table = it.table()
        table.alter.add_feature(
            TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
        )
        altered = max((home(tmp_path) / "_delta_log").glob("*.json"))
        problem = await refused(it, log, "protocol")
        assert "deletionVectors" in problem.message
        assert max((home(tmp_path) / "_delta_log").glob("*.json")) == altered
        altered.rename(tmp_path / altered.name)
        log.append(100)
        it.tell(log)
        await it.tiered(log.end)
        assert await it.read_all(0, log.end, 50_000) == log.rows

    go(tmp_path, test)


def test_rows_deleted_by_someone_else_stay_deleted_and_nothing_stops(tmp_path: Path) -> None:
    """A DELETE from outside is the operator's right: the other rows are read, and copying
    continues.
    """

    async def test(it: Bench, log: LiveLog) -> None:
        outside = it.table()
        outside.delete('partition = 0 AND "offset" >= 100 AND "offset" < 300')
        outside.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        log.append(100)
        it.tell(log)
        await it.tiered(log.end)
        found = await it.read_all(0, log.end, 50_000)
        assert found == [row for row in log.rows if not 100 <= row[0] < 300]

    go(tmp_path, test)


def test_a_file_lost_for_good_is_named(tmp_path: Path) -> None:
    async def test(it: Bench, log: LiveLog) -> None:
        lost = next(iter((home(tmp_path) / "partition=0").glob("*.parquet")))
        lost.unlink()
        with pytest.raises(errors.DamagedTierFile, match=lost.name) as caught:
            await it.read_all(0, log.end, 50_000)
        assert caught.value.acts == "operator"

    go(tmp_path, test)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """file://: a file is at the tier's path; once the path is free, copying begins by itself."""
    (tmp_path / "tier").write_text("in the way")

    async def whole() -> None:
        given: dict[str, object] = {"tier_url": (tmp_path / "tier").as_uri()}
        async with bench(given, tmp_path / "log", **QUICK) as it:
            log = LiveLog(it.directory)
            log.append(300)
            it.tell(log)
            await it.until(lambda: bool(it.worker.outbox) and it.progress.HasField("problem"))
            assert it.progress.tiered_end <= 0
            (tmp_path / "tier").unlink()
            await it.tiered(log.end)
            assert await it.read_all(0, log.end, 50_000) == log.rows

    asyncio.run(whole())


def test_a_store_that_never_answers_costs_its_deadline_and_no_more(tmp_path: Path) -> None:
    """A listener accepts and does not answer: TierUnavailable, within the deadlines."""

    async def whole() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(64)
            chosen = StoreSettings(
                "s3://bucket/x",
                endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}",
                access_key_id="a",
                secret_access_key="b",
                timeout_ms=300,
                retry_backoff_ms=10,
            )
            clock = SystemClock()
            store = open_store(chosen, clock)
            tables = DeltaTables(chosen, store, clock)
            try:
                for call in (
                    store.put("a", b"x"),
                    store.get_range("a", 0, 1),
                    store.head("a"),
                    store.list("a"),
                    tables.table("t", "id").load([0]),
                    tables.probe("p"),
                ):
                    async with asyncio.timeout(10):
                        with pytest.raises(errors.TierUnavailable):
                            await call
            finally:
                await tables.close()
                await store.close()

    asyncio.run(whole())
