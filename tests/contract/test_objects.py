"""One suite for every object store: in memory, a directory, S3 through s3fs
(tiering/objects.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from pk import errors, settings
from pk.clock import SystemClock
from pk.tiering.fsspec_store import open_store
from pk.tiering.objects import MemoryStore, ObjectStore
from pk.tiering.store_settings import StoreSettings

Run = Callable[[Callable[[ObjectStore], Awaitable[None]]], None]


def server(**given: object) -> dict[str, object]:
    return settings.SERVER.resolve(given)


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.s3)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """Run a test's coroutine on a store of each kind."""
    if request.param == "s3":
        gateway = request.getfixturevalue("s3_server")
        given = gateway.server_settings(f"objects/{tmp_path.name}")
    else:
        given = {"tier_url": tmp_path.as_uri()}

    def go(test: Callable[[ObjectStore], Awaitable[None]]) -> None:
        async def whole() -> None:
            if request.param == "memory":
                await test(MemoryStore())
                return
            store = open_store(StoreSettings.of(server(**given)), SystemClock())
            try:
                await test(store)
            finally:
                await store.close()

        asyncio.run(whole())

    return go


def test_what_was_put_is_read_back(run: Run) -> None:
    async def test(store: ObjectStore) -> None:
        data = os.urandom(100_000)
        await store.put("a/b/c.bin", data)
        assert await store.get_range("a/b/c.bin", 0, 100_000) == data
        assert await store.get_range("a/b/c.bin", 500, 20) == data[500:520]
        assert await store.get_range("a/b/c.bin", 99_990, 100) == data[-10:]
        info = await store.head("a/b/c.bin")
        assert info is not None
        assert info.size == 100_000

    run(test)


def test_missing_objects_are_told_apart(run: Run) -> None:
    async def test(store: ObjectStore) -> None:
        assert await store.head("nothing/here") is None
        with pytest.raises(FileNotFoundError):
            await store.get_range("nothing/here", 0, 10)
        await store.delete("nothing/here")
        assert await store.list("nothing") == []

    run(test)


def test_put_replaces_whole_and_its_tag_changes(run: Run) -> None:
    async def test(store: ObjectStore) -> None:
        await store.put("x", b"one, longer")
        before = await store.head("x")
        await store.put("x", b"two")
        after = await store.head("x")
        assert before is not None
        assert after is not None
        assert await store.get_range("x", 0, 100) == b"two"
        assert before.tag != after.tag

    run(test)


def test_put_if_absent_has_one_winner(run: Run) -> None:
    async def test(store: ObjectStore) -> None:
        contents = [f"writer {i}".encode() for i in range(8)]
        won = await asyncio.gather(*(store.put_if_absent("race", c) for c in contents))
        (winner,) = [at for at, each in enumerate(won) if each is not None]
        assert await store.get_range("race", 0, 100) == contents[winner]
        found, made = await store.head("race"), won[winner]
        assert found is not None
        assert made is not None
        assert (made.size, made.tag) == (found.size, found.tag)
        assert await store.put_if_absent("race", b"late") is None

    run(test)


def test_list_is_recursive_sorted_and_bounded_by_the_directory(run: Run) -> None:
    async def test(store: ObjectStore) -> None:
        for path in ("t/b/2", "t/a/1", "t/0", "t2/9"):
            await store.put(path, path.encode())
        assert [found.path for found in await store.list("t")] == ["t/0", "t/a/1", "t/b/2"]
        assert [found.size for found in await store.list("t2")] == [4]
        await store.delete("t/a/1")
        assert [found.path for found in await store.list("t")] == ["t/0", "t/b/2"]

    run(test)


def test_an_upload_that_dies_leaves_no_object(tmp_path: Path) -> None:
    """file://: the name appears by rename, after fsync; a full disk leaves nothing behind."""

    async def test() -> None:
        store = open_store(StoreSettings.of(server(tier_url=tmp_path.as_uri())), SystemClock())
        try:
            with pytest.raises(errors.TierUnavailable, match="bytes-like"):
                await store.put("broken", "text, not bytes")  # type: ignore[arg-type]
            assert await store.head("broken") is None
            assert await store.list("") == []
        finally:
            await store.close()

    asyncio.run(test())


def test_an_object_is_found_after_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """file://: the names of the directories above it are synced, and synced again if they were
    created again.
    """
    sync = os.fsync
    synced: list[int] = []

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("os.fsync", noted)

    async def test() -> None:
        store = open_store(StoreSettings.of(server(tier_url=tmp_path.as_uri())), SystemClock())
        try:
            for _ in range(2):
                await store.put("a/b/c", b"1")
                for above in ("a/b/c", "a/b", "a", ""):
                    assert (tmp_path / above).stat().st_ino in synced
                await store.delete("a/b/c")
                assert not (tmp_path / "a").exists()
                synced.clear()
        finally:
            await store.close()

    asyncio.run(test())


def test_a_directory_that_is_emptied_under_an_upload_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """file://: a delete removes the empty directory; the upload does not end with
    FileNotFoundError.
    """
    mkdir, left = Path.mkdir, [2]

    def emptied(path: Path, *args: object, **options: object) -> None:
        mkdir(path, *args, **options)  # type: ignore[arg-type]
        if path.name == "d" and left[0]:
            left[0] -= 1
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", emptied)

    async def test() -> None:
        store = open_store(StoreSettings.of(server(tier_url=tmp_path.as_uri())), SystemClock())
        try:
            await store.put("d/x", b"1")
            assert await store.get_range("d/x", 0, 9) == b"1"
            assert [found.path for found in await store.list("")] == ["d/x"]
        finally:
            await store.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/x", "gs:// has not been tried"),
        ("az://c/x", "az:// has not been tried"),
        ("hdfs://n/x", "has not been tried"),
        ("s3a://bucket/x", "use s3://bucket/x"),
        ("ftp://x/y", "no known store"),
        ("/plain/path", "no known store"),
        ("file://relative/x", "absolute path"),
        ("s3:///x", "needs a bucket"),
    ],
)
def test_schemes_that_were_not_tried_are_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(errors.StoreRefused, match=says):
        StoreSettings.of(server(tier_url=url))


def test_secrets_stay_inside() -> None:
    given = StoreSettings.of(
        server(tier_url="s3://b/x", tier_access_key_id="id", tier_secret_access_key="SECRET")
    )
    assert "SECRET" in given.for_deltalake().values()
    assert given.for_s3fs()["secret"] == "SECRET"
    assert "SECRET" not in str(given.public())
