"""The tier on a real S3 server: outages, refusals, and the state after them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tier_bench import LiveLog, bench
from versitygw import S3Server, binary_or_skip, free_port

from pk import errors, settings
from pk.clock import SystemClock
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings

pytestmark = [pytest.mark.s3, pytest.mark.integration]

QUICK = {"refresh_interval_ms": 200, "recheck_ms": 200, "retry_backoff_ms": 50}


@pytest.fixture
def own_server(s3_server: S3Server, tmp_path: Path) -> S3Server:
    """Return a server for this test, which can be stopped and started."""
    return S3Server(binary_or_skip(), tmp_path, free_port())


def chosen(server: S3Server, **more: object) -> StoreSettings:
    given = {
        **server.server_settings("x"),
        "tier_timeout_ms": 10_000,
        "tier_retry_backoff_ms": 20,
        **more,
    }
    return StoreSettings.of(settings.SERVER.resolve(given))


def test_kills_of_the_store_under_load_lose_and_double_nothing(
    own_server: S3Server, tmp_path: Path
) -> None:
    """SIGKILL of the store again and again while files and commits are in progress (rules T3,
    T5).
    """
    chance = random.Random(7)

    async def whole() -> None:
        given = {
            **own_server.server_settings("t"),
            "tier_timeout_ms": 2_000,
            "tier_retry_backoff_ms": 20,
        }
        async with bench(given, tmp_path / "log", **QUICK) as it:
            log = LiveLog(it.directory)
            it.configs["tier_file_bytes"] = "30000"
            for _ in range(6):
                own_server.start()
                for _ in range(chance.randint(3, 8)):
                    log.append(300)
                    it.tell(log)
                    await asyncio.sleep(chance.random() * 0.3)
                own_server.stop()
                await asyncio.sleep(0.2)
            own_server.start()
            log.append(10)
            it.tell(log)
            await it.tiered(log.end)
            rows = it.rows()
            assert rows.column("offset").to_pylist() == list(range(log.end))
            assert await it.read_all(0, log.end, 100_000) == log.rows
            topic = next(iter(it.worker.topics.values()))
            assert topic.owner.snapshot is not None
            assert topic.owner.snapshot.partition(0).rows == log.end
            await it.until(lambda: not it.progress.HasField("problem"))

    try:
        asyncio.run(whole())
    finally:
        own_server.stop()


def test_a_store_that_is_down_stops_tiering_only(own_server: S3Server, tmp_path: Path) -> None:
    async def whole() -> None:
        given = {
            **own_server.server_settings("t"),
            "tier_timeout_ms": 500,
            "tier_retry_backoff_ms": 20,
        }
        async with bench(given, tmp_path / "log", **QUICK) as it:
            log = LiveLog(it.directory)
            log.append(300)
            it.tell(log)
            await it.until(lambda: bool(it.worker.outbox) and it.progress.HasField("problem"))
            assert it.progress.problem.code == errors.TierUnavailable.code
            assert it.progress.droppable_end == -1
            own_server.start()
            await it.tiered(log.end)
            await it.until(lambda: not it.progress.HasField("problem"))

    try:
        asyncio.run(whole())
    finally:
        own_server.stop()


async def each_refuses(store_settings: StoreSettings, says: str) -> None:
    clock = SystemClock()
    store = open_store(store_settings, clock)
    tables = DeltaTables(store_settings, store, clock)
    try:
        with pytest.raises(errors.StoreRefused, match=says) as caught:
            await store.put("a/b", b"x")
        assert caught.value.acts == "operator"
        with pytest.raises(errors.StoreRefused):
            await tables.probe("p1")
        with pytest.raises(errors.StoreRefused):
            await tables.table("t", "id").create()
    finally:
        await tables.close()
        await store.close()


def test_wrong_credentials_are_refused_by_name(s3_server: S3Server) -> None:
    wrong = chosen(s3_server, tier_secret_access_key="wrong")
    asyncio.run(each_refuses(wrong, "check tier_secret_access_key"))


def test_a_look_is_refused_by_name(s3_server: S3Server) -> None:
    """HEAD requests go through another client, and their replies have no body."""

    async def whole() -> None:
        wrong = chosen(s3_server, tier_secret_access_key="wrong")
        store = open_store(wrong, SystemClock())
        try:
            with pytest.raises(errors.StoreRefused, match="looking at a/b: access is denied"):
                await store.head("a/b")
        finally:
            await store.close()

    asyncio.run(whole())


def test_a_look_at_a_dead_store_can_be_tried_again(own_server: S3Server) -> None:
    async def whole() -> None:
        store = open_store(chosen(own_server, tier_retry_backoff_ms=20), SystemClock())
        try:
            says = "looking at a/b: no connection to the store's endpoint"
            with pytest.raises(errors.TierUnavailable, match=says):
                await store.head("a/b")
            own_server.start()
            assert await store.head("a/b") is None
        finally:
            await store.close()
            own_server.stop()

    asyncio.run(whole())


def test_a_missing_bucket_is_refused_by_name(s3_server: S3Server) -> None:
    missing = chosen(s3_server, tier_url="s3://no-such-bucket/x")
    asyncio.run(each_refuses(missing, "no-such-bucket does not exist"))


def test_a_read_only_store_is_refused_by_name(own_server: S3Server) -> None:
    own_server.start("--readonly")
    try:
        asyncio.run(each_refuses(chosen(own_server), "write access"))
    finally:
        own_server.stop()


def test_large_objects_go_in_parts_and_come_back_whole(s3_server: S3Server) -> None:
    async def whole() -> None:
        store = open_store(chosen(s3_server), SystemClock())
        try:
            data = random.Random(1).randbytes(1_000_000) * 110
            await store.put("large", data)
            found = await store.head("large")
            assert found is not None
            assert found.size == len(data)
            assert (
                await store.get_range("large", 105_000_000, 1_000) == data[105_000_000:105_001_000]
            )
            await store.delete("large")
        finally:
            await store.close()

    asyncio.run(whole())
