"""A directory as a store: large objects are written past the page cache, whatever their memory and
length.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pk import errors, settings
from pk.clock import SystemClock
from pk.tiering import fsspec_store
from pk.tiering.fsspec_store import DIRECT_BYTES_MIN, DirectoryStore
from pk.tiering.output_buffer import BLOCK_BYTES, OutputBuffer
from pk.tiering.store_calls import StoreCalls
from pk.tiering.store_settings import StoreSettings


def store_in(folder: Path) -> DirectoryStore:
    given = settings.SERVER.resolve({"tier_url": folder.as_uri()})
    return DirectoryStore(StoreSettings.of(given), SystemClock(), StoreCalls())


def filled(size: int) -> OutputBuffer:
    buffer = OutputBuffer()
    buffer.write(np.random.default_rng(size).bytes(size))
    return buffer


def put(store: DirectoryStore, path: str, data: Any) -> None:
    async def story() -> None:
        await store.put(path, data)
        await store.close()

    asyncio.run(story())


@pytest.mark.parametrize("more", [0, 1, BLOCK_BYTES - 1, 3 * BLOCK_BYTES + 5])
@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_put_is_there(tmp_path: Path, more: int, aligned: bool) -> None:
    data = filled(DIRECT_BYTES_MIN + more).data()
    put(store_in(tmp_path), "a/b", data if aligned else data[1:])
    assert (tmp_path / "a/b").read_bytes() == bytes(data if aligned else data[1:])
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["b"]


def test_whole_blocks_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[bool, int]] = []
    real = os.pwrite

    def noted(descriptor: int, data: Any, at: int) -> int:
        directly = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        written.append((bool(directly), len(data)))
        return real(descriptor, data, at)

    monkeypatch.setattr(fsspec_store.os, "pwrite", noted)
    put(store_in(tmp_path), "large", filled(DIRECT_BYTES_MIN + 7).data())
    assert sum(size for directly, size in written if directly) == DIRECT_BYTES_MIN
    assert written[-1] == (False, 7)
    written.clear()
    put(store_in(tmp_path), "small", filled(DIRECT_BYTES_MIN - 7).data())
    assert written == [(False, DIRECT_BYTES_MIN - 7)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """EINVAL: the file is written through the cache; any other error is an ordinary failure."""
    real = fcntl.fcntl

    def refusing(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(descriptor, command, flags)

    monkeypatch.setattr(fsspec_store.fcntl, "fcntl", refusing)
    data = filled(DIRECT_BYTES_MIN + 7).data()
    if number == errno.EINVAL:
        put(store_in(tmp_path), "a", data)
        assert (tmp_path / "a").read_bytes() == bytes(data)
    else:
        with pytest.raises(errors.TierUnavailable):
            put(store_in(tmp_path), "a", data)
        assert list(tmp_path.iterdir()) == []
