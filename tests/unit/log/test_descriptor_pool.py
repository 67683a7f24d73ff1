"""Files that stay open with fewer descriptors than files (log/descriptor_pool, log/real_file)."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pk import errors
from pk.log import files
from pk.log.descriptor_pool import DescriptorPool
from pk.log.files import RealStorage

LIMIT = 4


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> DescriptorPool:
    pool = DescriptorPool(LIMIT)
    monkeypatch.setattr(files, "POOL", pool)
    return pool


@pytest.fixture
def storage(tmp_path: Path, pool: DescriptorPool) -> RealStorage:
    return RealStorage(str(tmp_path))


def descriptors_below(path: Path) -> int:
    """Return how many descriptors of this process lead to files below `path`."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith(f"{path}/")
        except OSError:
            pass  # the descriptor of the listing itself
    return found


def test_many_files_are_written_and_read_with_few_descriptors(
    storage: RealStorage, tmp_path: Path
) -> None:
    opened = [storage.open(f"f{n}", create=True) for n in range(40)]
    for turn in range(3):
        for n, file in enumerate(opened):
            assert file.append([b"%d-%d " % (n, turn)]) == turn * len(b"%d-0 " % n)
            assert descriptors_below(tmp_path) <= LIMIT
    for n, file in enumerate(opened):
        expected = b"%d-0 %d-1 %d-2 " % (n, n, n)
        assert file.read(0, 100) == expected == (tmp_path / f"f{n}").read_bytes()
        file.write_at(0, b"X")
        file.truncate(3)
        assert file.read(0, 100) == b"X" + expected[1:3]
        file.sync()
    assert descriptors_below(tmp_path) <= LIMIT
    for file in opened:
        file.close()
        with pytest.raises(FileNotFoundError):
            file.read(0, 1)
    assert descriptors_below(tmp_path) == 0


def test_an_unsynced_file_is_synced_before_its_descriptor_is_closed(
    storage: RealStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/descriptor_pool K2: otherwise an error of the page cache would not be reported."""
    sync, synced = os.fdatasync, []

    def note(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    monkeypatch.setattr("os.fdatasync", note)
    clean = [storage.open(f"clean{n}", create=True) for n in range(2)]
    for file in clean:
        file.append([b"x"])
        file.sync()
    synced.clear()
    dirty = [storage.open(f"dirty{n}", create=True) for n in range(LIMIT)]
    for file in dirty:
        file.append([b"x"])
    assert synced == []  # the clean ones went first
    more = storage.open("more", create=True)
    assert synced == ["dirty0"]
    for file in (*clean, *dirty, more):
        file.close()


def test_a_sync_beside_a_write_does_not_cover_it(
    storage: RealStorage, pool: DescriptorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/real_file F3: the sync began before the write had ended."""
    file = storage.open("a", create=True)
    write, sync = os.pwritev, os.fdatasync
    begun, go_on, synced = threading.Event(), threading.Event(), []

    def slow(fd: int, *given: Any) -> int:
        begun.set()
        go_on.wait()
        return write(fd, *given)

    def note(fd: int) -> None:
        synced.append(fd)
        sync(fd)

    monkeypatch.setattr("os.pwritev", slow)
    monkeypatch.setattr("os.fdatasync", note)
    thread = threading.Thread(target=lambda: file.append([b"content"]))
    thread.start()
    begun.wait()
    file.sync()
    go_on.set()
    thread.join()
    synced.clear()
    assert pool.release(1) == 1
    assert len(synced) == 1
    file.close()


def test_a_sync_that_fails_there_takes_the_storage_offline(
    storage: RealStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/storage D2; the file that needed a descriptor is of this storage, too."""
    opened = [storage.open(f"f{n}", create=True) for n in range(LIMIT)]
    for file in opened:
        file.append([b"x"])

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fdatasync", broken)
    assert storage.open("more", create=True).size() == 0
    with pytest.raises(errors.StorageFailed, match="Input/output"):
        opened[-1].append([b"y"])
    assert opened[0].read(0, 9) == b"x"  # reads go on


def test_a_file_that_was_replaced_counts_as_closed(storage: RealStorage, tmp_path: Path) -> None:
    """log/real_file F2: bytes must not reach another file of the same name."""
    gone, other = storage.open("gone", create=True), storage.open("other", create=True)
    for file in (gone, other):
        file.sync()
    others = [storage.open(f"f{n}", create=True) for n in range(LIMIT)]
    (tmp_path / "gone").unlink()
    (tmp_path / "other").rename(tmp_path / "moved")
    (tmp_path / "other").write_bytes(b"another")
    for file in (gone, other):
        with pytest.raises(FileNotFoundError):
            file.append([b"x"])
    assert (tmp_path / "other").read_bytes() == b"another"
    assert storage.failed is None
    for file in others:
        file.close()


def test_a_descriptor_in_use_stays(
    storage: RealStorage, pool: DescriptorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = storage.open("a", create=True)
    file.append([b"content"])
    begun, go_on = threading.Event(), threading.Event()
    read = os.pread

    def slow(fd: int, size: int, position: int) -> bytes:
        begun.set()
        go_on.wait()
        return read(fd, size, position)

    monkeypatch.setattr("os.pread", slow)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(file.read(0, 7)))
    thread.start()
    begun.wait()
    assert pool.release(1) == 0
    go_on.set()
    thread.join()
    assert found == [b"content"]
    assert pool.release(1) == 1


def test_no_file_lives_on_because_the_pool_knows_it(storage: RealStorage, tmp_path: Path) -> None:
    storage.open("a", create=True)
    gc.collect()
    assert descriptors_below(tmp_path) == 0


def test_a_process_without_a_free_descriptor_closes_some_of_the_pool(
    storage: RealStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = [storage.open(f"f{n}", create=True) for n in range(LIMIT)]
    real, refusals = os.open, [errno.EMFILE]

    def scarce(path: str, flags: int, mode: int = 0o777) -> int:
        if refusals and path.endswith("/more"):
            raise OSError(refusals.pop(), "Too many open files")
        return real(path, flags, mode)

    monkeypatch.setattr("os.open", scarce)
    storage.open("more", create=True).close()
    assert refusals == []
    refusals[:] = [errno.EMFILE] * 2
    with pytest.raises(errors.StorageFull, match="Too many open files"):
        storage.open("more")
    refusals[:] = [errno.ENOMEM]
    with pytest.raises(errors.StorageFull):
        storage.open("more")
    assert storage.failed is None
    for file in opened:
        file.close()
