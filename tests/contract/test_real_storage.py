"""Properties of the real Storage only: descriptors, the lock, a directory that vanishes
(log/storage D2, D4).
"""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pk import errors
from pk.log.files import SYNC_THREADS, RealStorage


def test_a_full_disk_is_locked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a broker whose disk is full could not be started to free space."""

    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage, other = RealStorage(str(tmp_path)), RealStorage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        storage.lock()
        with pytest.raises(errors.DirectoryLocked, match="process unknown"):
            other.lock()
    storage.unlock()
    other.lock()
    with pytest.raises(errors.DirectoryLocked, match=f"process {os.getpid()}"):
        storage.lock()
    other.unlock()


def test_a_directory_that_cannot_be_locked_is_not_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    with pytest.raises(errors.StorageFailed, match="No locks available"):
        RealStorage(str(tmp_path)).lock()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_no_descriptor_for_now_says_nothing_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """log/storage D2: for example, there are too many connections; the directory must not fail
    because of it.
    """
    storage = RealStorage(str(tmp_path))
    storage.replace_file("a", b"kept")

    def none_left(*_args: object, **_options: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.open", none_left)
    monkeypatch.setattr("builtins.open", none_left)
    for use in (
        lambda: storage.read_file("a"),
        lambda: storage.open("a", write=False),
        lambda: storage.open("b", create=True),
        lambda: storage.replace_file("a", b"new"),
    ):
        with pytest.raises(errors.StorageFull, match="oo many open files"):
            use()
    assert storage.failed is None
    monkeypatch.undo()
    storage.replace_file("b", b"new")
    assert (storage.read_file("a"), storage.read_file("b")) == (b"kept", b"new")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_directory_can_be_synced_without_a_descriptor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """log/storage D2: a file name that was created cannot be taken back, so a descriptor is kept in
    reserve for the sync of its directory; also for many directories at once, and again later.
    """
    storage = RealStorage(str(tmp_path))
    storage.lock()
    storage.make_dir("a")
    real_open, real_close, left = os.open, os.close, [0]

    def few(*args: Any, **options: Any) -> int:
        if not left[0]:
            raise OSError(number, os.strerror(number))
        left[0] -= 1
        return real_open(*args, **options)

    def back(fd: int) -> None:
        real_close(fd)
        left[0] += 1

    monkeypatch.setattr("os.open", few)
    monkeypatch.setattr("os.close", back)
    for _ in range(3):
        storage.sync_dir("a")
        storage.sync_all((), ["a", "", "a", ""])
    assert storage.failed is None
    with pytest.raises(FileNotFoundError):
        storage.sync_dir("b")
    storage.sync_dir("a")
    assert storage.failed is None
    monkeypatch.setattr("os.open", real_open)
    monkeypatch.setattr("os.close", real_close)
    storage.unlock()
    RealStorage(str(tmp_path)).lock()


def test_reads_survive_a_close_in_between(tmp_path: Path) -> None:
    """A descriptor is never reused under a running read: the reader gets the data or
    FileNotFoundError.
    """
    storage = RealStorage(str(tmp_path))
    storage.open("a", create=True).append([b"a" * 4096])
    storage.open("b", create=True).append([b"b" * 4096])
    wrong: list[bytes] = []

    def reader(file: object) -> None:
        while True:
            try:
                data = file.read(0, 4096)  # type: ignore[attr-defined]
            except FileNotFoundError:
                return
            if data != b"a" * 4096:
                wrong.append(data)

    for _ in range(50):
        file = storage.open("a")
        threads = [threading.Thread(target=reader, args=(file,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        file.close()
        others = [storage.open("b") for _ in range(4)]
        for thread in threads:
            thread.join()
        for other in others:
            other.close()
    assert not wrong


def test_a_sync_survives_a_close_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/storage D4: it syncs the file that it was called for, not another one that got the
    descriptor meanwhile.
    """
    storage = RealStorage(str(tmp_path))
    file = storage.open("a", create=True)
    begun, closed = threading.Event(), threading.Event()
    synced: list[int] = []

    def slow(fd: int) -> None:
        begun.set()
        closed.wait()
        synced.append(os.fstat(fd).st_ino)

    monkeypatch.setattr("os.fdatasync", slow)
    thread = threading.Thread(target=file.sync)
    thread.start()
    begun.wait()
    file.close()
    other = storage.open("b", create=True)
    closed.set()
    thread.join()
    other.close()
    assert synced == [os.stat(tmp_path / "a").st_ino]
    with pytest.raises(FileNotFoundError):
        file.sync()


def test_a_directory_that_went_from_under_its_owner_has_failed(tmp_path: Path) -> None:
    """log/storage D2: it was unmounted, removed or replaced; nothing is written to its path any
    more.
    """
    home = tmp_path / "data"
    storage = RealStorage(str(home))
    storage.lock()
    try:
        storage.make_dir("topics")
        with pytest.raises(FileNotFoundError):
            storage.open("nothing")
        assert storage.failed is None
        home.rename(tmp_path / "elsewhere")
        home.mkdir()
        with pytest.raises(errors.StorageFailed, match="unmounted, removed or replaced"):
            storage.replace_file("checkpoint", b"1")
        assert storage.failed is not None
        assert list(home.iterdir()) == []
        storage.failed = None
        with pytest.raises(errors.StorageFailed, match="unmounted"):
            storage.open("topics/t-0/0.log", create=True)
        for look in (
            lambda: storage.exists("topics"),
            lambda: storage.list("topics"),
            lambda: storage.read_file("topics/t-0/0.snapshot"),
            lambda: storage.sync_dir("topics"),
        ):  # a file that is not found does not count as absent
            storage.failed = None
            with pytest.raises(errors.StorageFailed, match="unmounted"):
                look()
            assert storage.failed is not None
        home.rmdir()
        storage.failed = None
        with pytest.raises(errors.StorageFailed, match="free space"):
            storage.free_bytes()
        assert storage.failed is not None
    finally:
        storage.unlock()


def test_files_that_are_replaced_together_wait_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step waits until as many threads are in it as there are files.  The new content is
    SYNCED before a name leads to it.
    """
    storage = RealStorage(str(tmp_path))
    names = [f"d{number}/f" for number in range(SYNC_THREADS)]
    for name in names:
        storage.make_dir(name.partition("/")[0])
        storage.replace_file(name, b"before")
    steps: list[str] = []

    def waiting(step: str, real: Any, together: threading.Barrier, *args: Any) -> None:
        together.wait()
        real(*args)
        steps.append(step)

    for step in ("fdatasync", "rename", "fsync"):
        together = threading.Barrier(len(names), timeout=30)
        monkeypatch.setattr(f"os.{step}", partial(waiting, step, getattr(os, step), together))
    storage.replace_all(dict.fromkeys(names, b"after"))
    count = len(names)
    assert steps == ["fdatasync"] * count + ["rename"] * count + ["fsync"] * count
    assert [storage.read_file(name) for name in names] == [b"after"] * count
