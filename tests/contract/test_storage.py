"""One suite for every Storage: the real one and the simulated one give the same guarantees
(log/storage D1, D2, L1).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pk import errors
from pk.clock import SystemClock
from pk.log.files import RealDisk, RealStorage
from pk.log.storage import Disk, Storage
from pk.sim.disk import Crashed, SimDisk, SimStorage


@pytest.fixture(params=["real", "simulated"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return RealStorage(str(tmp_path / "data")) if request.param == "real" else SimStorage()


def test_append_returns_where_it_began(storage: Storage) -> None:
    file = storage.open("a", create=True)
    assert file.append([b"ab", b"", memoryview(b"cd")]) == 0
    assert file.append([bytearray(b"e")]) == 4
    assert file.append([]) == 5
    assert file.size() == 5
    assert file.read(0, 100) == b"abcde"
    assert file.read(1, 2) == b"bc"
    assert file.read(5, 1) == file.read(99, 1) == b""
    assert file.path == "a"


def test_more_buffers_than_one_system_call_takes(storage: Storage) -> None:
    file = storage.open("a", create=True)
    pieces = [b"%04d" % number for number in range(3000)]
    file.append([b"x"])
    assert file.append(pieces) == 1
    assert file.read(1, 12_000) == b"".join(pieces)


def test_write_at_and_truncate(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.append([b"0123456789"])
    file.write_at(2, b"XY")
    file.write_at(9, b"ZZZ")
    assert file.read(0, 100) == b"01XY45678ZZZ"
    file.truncate(4)
    assert (file.size(), file.read(0, 100)) == (4, b"01XY")
    assert file.append([b"!"]) == 4
    file.truncate(7)
    assert file.read(0, 100) == b"01XY!\0\0"


def test_open_needs_a_file_or_create(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.open("a")
    storage.open("a", create=True).append([b"1"])
    assert storage.open("a", create=True).append([b"2"]) == 1
    assert storage.open("a", write=False).read(0, 9) == b"12"
    with pytest.raises(FileNotFoundError):
        storage.open("no/such/dir", create=True)


def test_two_handles_see_one_file(storage: Storage) -> None:
    writer, reader = storage.open("a", create=True), storage.open("a", write=False)
    writer.append([b"new"])
    assert reader.read(0, 9) == b"new"
    writer.close()
    assert reader.read(0, 9) == b"new"


def test_a_closed_file_is_not_used(storage: Storage) -> None:
    """log/storage D4: the error does not mean that the disk failed."""
    file = storage.open("a", create=True)
    file.append([b"kept"])
    file.close()
    file.close()
    for use in (
        lambda: file.read(0, 1),
        lambda: file.append([b"x"]),
        lambda: file.write_at(0, b"x"),
        lambda: file.truncate(0),
        file.sync,
        lambda: storage.sync_all([file, file]),
    ):
        with pytest.raises(FileNotFoundError):
            use()
    assert storage.failed is None
    assert storage.read_file("a") == b"kept"


def test_directories(storage: Storage) -> None:
    assert storage.list("") == storage.list("none") == []
    storage.make_dir("x/y")
    storage.make_dir("x/y")
    for name in ("b", "a", "c"):
        storage.open(f"x/{name}", create=True)
    assert storage.list("x") == ["a", "b", "c", "y"]
    assert storage.exists("x/a")
    assert storage.exists("x/y")
    assert not storage.exists("x/z")
    storage.remove("x/b")
    storage.remove("x/b")
    storage.remove("x/none")
    assert storage.list("x") == ["a", "c", "y"]
    storage.sync_dir("x")
    storage.sync_dir("")
    with pytest.raises(FileNotFoundError):
        storage.sync_dir("none")
    storage.remove_tree("x")
    storage.remove_tree("x")
    assert storage.list("") == []


def test_rename_replaces_and_keeps_open_files(storage: Storage) -> None:
    storage.open("a", create=True).append([b"a"])
    open_b = storage.open("b", create=True)
    open_b.append([b"b"])
    storage.rename("a", "b")
    assert storage.read_file("b") == b"a"
    assert open_b.read(0, 9) == b"b"
    assert not storage.exists("a")
    with pytest.raises(FileNotFoundError):
        storage.rename("a", "c")
    storage.make_dir("d")
    storage.open("d/f", create=True).append([b"f"])
    storage.rename("d", "e")
    assert storage.read_file("e/f") == b"f"


def test_a_removed_file_is_read_by_who_has_it_open(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.append([b"still here"])
    storage.remove("a")
    assert file.read(0, 100) == b"still here"
    with pytest.raises(FileNotFoundError):
        storage.read_file("a")


def test_replace_file(storage: Storage) -> None:
    storage.make_dir("d")
    storage.replace_file("d/f", b"one")
    storage.replace_file("d/f", b"2")
    assert storage.read_file("d/f") == b"2"
    assert storage.list("d") == ["f"]


def test_a_stamp_changes_with_every_change_of_a_file(storage: Storage) -> None:
    assert storage.stamp("d") == ""
    storage.make_dir("d")
    stamps = [storage.stamp("d")]
    file = storage.open("d/f", create=True)

    def swap() -> None:
        storage.rename("d", "e")
        storage.make_dir("d")

    changes: list[Callable[[], object]] = [
        lambda: None,  # the file was created
        lambda: file.append([b"abc"]),
        lambda: file.write_at(1, b"x"),
        lambda: file.truncate(1),
        lambda: storage.replace_file("d/f", b"a"),
        lambda: storage.rename("d/f", "d/g"),
        lambda: storage.open("d/h", create=True),
        lambda: storage.remove("d/h"),
        lambda: storage.remove("d/g"),
        swap,
    ]
    for change in changes:
        if isinstance(storage, RealStorage):
            time.sleep(0.012)  # a tick of the file system's clock: another process writes later
        change()
        stamps.append(storage.stamp("d"))
        assert stamps[-1] == storage.stamp("d")
    assert all(before != after for before, after in itertools.pairwise(stamps))
    assert not [each for each in stamps if not each or " " in each]


def test_one_lock(storage: Storage, tmp_path: Path) -> None:
    other = RealStorage(storage.root) if isinstance(storage, RealStorage) else storage
    storage.lock()
    with pytest.raises(errors.DirectoryLocked):
        other.lock()
    storage.unlock()
    other.lock()
    other.unlock()


def test_free_bytes(storage: Storage) -> None:
    assert storage.free_bytes() > 0


def test_sync_all_reaches_every_file_and_directory(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    if isinstance(storage, RealStorage):
        real_sync, real_dir = os.fdatasync, os.fsync

        def sync(fd: int) -> None:
            real_sync(fd)
            reached.append(os.readlink(f"/proc/self/fd/{fd}"))

        def sync_dir(fd: int) -> None:
            real_dir(fd)
            reached.append(os.readlink(f"/proc/self/fd/{fd}"))

        monkeypatch.setattr("os.fdatasync", sync)
        monkeypatch.setattr("os.fsync", sync_dir)
    else:
        assert isinstance(storage, SimStorage)
        storage.fault = lambda op, path: (
            reached.append(f"{storage.root}/{path}") if op.startswith("sync") else None
        )
    names = [f"d{number}" for number in range(20)]
    for name in names:
        storage.make_dir(name)
    files = [storage.open(f"{name}/f", create=True) for name in names]
    storage.sync_all([])
    assert not reached
    storage.sync_all(files[:1])
    assert reached == [f"{storage.root}/d0/f"]
    storage.sync_all(files[1:], names)
    wanted = [f"{storage.root}/{name}/f" for name in names]
    wanted += [f"{storage.root}/{name}" for name in names]
    assert sorted(reached) == sorted(wanted)


def test_one_failure_fails_all_that_is_synced_with_it(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/storage D2: every caller of the sync gets the error, and each call returns only when no
    sync is under way any more.
    """
    files = [storage.open(f"f{number}", create=True) for number in range(20)]
    if isinstance(storage, RealStorage):
        bad = files[7]
        running: list[int] = []

        def sync(fd: int) -> None:
            running.append(fd)
            try:
                if os.readlink(f"/proc/self/fd/{fd}").endswith(bad.path):
                    raise OSError(errno.EIO, "injected")
            finally:
                running.remove(fd)

        monkeypatch.setattr("os.fdatasync", sync)
    else:
        assert isinstance(storage, SimStorage)
        storage.fault = lambda op, path: OSError("injected") if path == "f7" else None
        running = []
    with pytest.raises(errors.StorageFailed):
        storage.sync_all(files)
    assert not running
    assert storage.failed is not None


def test_replace_all(storage: Storage) -> None:
    names = [f"d{number}/f" for number in range(20)]
    for name in names:
        storage.make_dir(name.partition("/")[0])
    for turn in (b"one", b"two"):
        storage.replace_all({name: name.encode() + turn for name in names})
        assert [storage.read_file(name) for name in names] == [
            name.encode() + turn for name in names
        ]
        assert all(storage.list(f"d{number}") == ["f"] for number in range(20))
    storage.replace_all({})
    with pytest.raises(FileNotFoundError):
        storage.replace_all({"none/f": b"x", names[0]: b"three"})
    assert storage.failed is None
    assert storage.read_file(names[0]) == names[0].encode() + b"two"


# -- failures, provoked in each kind's own way -----------------------------------------------------


@pytest.fixture
def provoke(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int | None], None]:
    """`provoke("full" | "write" | "sync", None)` makes the next such operations fail; `provoke("",
    None)` ends that.
    """

    def simulated(what: str) -> None:
        assert isinstance(storage, SimStorage)
        storage.capacity = storage.used_bytes() + 5 if what == "full" else None
        wanted = {"write": "append", "sync": "sync"}.get(what)
        storage.fault = lambda op, path: OSError("I/O error") if op == wanted else None

    def real(what: str) -> None:
        monkeypatch.undo()
        write = os.pwritev

        def short(fd: int, buffers: list[bytes], position: int) -> int:
            if position > 10:
                raise OSError(errno.ENOSPC if what == "full" else errno.EIO, "injected")
            return write(
                fd, [b"".join(buffers)[:5]], position
            )  # a part is written, then every write fails

        def fails(fd: int) -> None:
            raise OSError(errno.EIO, "injected")

        if what in ("full", "write"):
            monkeypatch.setattr("os.pwritev", short)
        elif what == "sync":
            monkeypatch.setattr("os.fdatasync", fails)

    return real if isinstance(storage, RealStorage) else simulated  # type: ignore[return-value]


def test_no_space_leaves_nothing_behind(storage: Storage, provoke: Callable[[str], None]) -> None:
    """log/storage D1, D2: the file is as before, the storage continues, and works again once there
    is space.
    """
    file = storage.open("a", create=True)
    file.append([b"0123456789"])
    provoke("full")
    for _ in range(2):
        with pytest.raises(errors.StorageFull) as caught:
            file.append([b"abcdef", b"ghi"])
        assert caught.value.retriable
        assert (file.size(), file.read(0, 99)) == (10, b"0123456789")
    assert storage.failed is None
    provoke("")
    assert file.append([b"abc"]) == 10
    assert file.read(0, 99) == b"0123456789abc"


@pytest.mark.parametrize("what", ["write", "sync"])
def test_any_other_failure_takes_the_storage_offline(
    storage: Storage, provoke: Callable[[str], None], what: str
) -> None:
    """log/storage D2, L2: reads continue, and nothing is written any more, even if the disk would
    accept it.
    """
    file = storage.open("a", create=True)
    file.append([b"0123456789"])
    provoke(what)
    with pytest.raises(errors.StorageFailed):
        file.append([b"abcdef"]) if what == "write" else file.sync()
    provoke("")
    assert isinstance(storage.failed, Exception)
    for write in (
        lambda: file.append([b"x"]),
        lambda: file.truncate(1),
        file.sync,
        lambda: storage.rename("a", "b"),
        lambda: storage.remove("a"),
        lambda: storage.make_dir("d"),
        lambda: storage.replace_file("f", b""),
        lambda: storage.open("new", create=True),
        lambda: storage.sync_dir(""),
        lambda: storage.sync_all([file]),
        lambda: storage.sync_all((), ["", ""]),
        lambda: file.write_at(0, b"x"),
    ):
        with pytest.raises(errors.StorageFailed):
            write()
    assert file.read(0, 99) == storage.read_file("a") == b"0123456789"
    assert storage.list("") == ["a"]


def test_what_cannot_be_told_is_not_taken_for_absent(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/storage D2: a partition that is wrongly taken for absent would be created empty in
    another directory.
    """
    storage.make_dir("t-0")
    assert storage.exists("t-0")
    if isinstance(storage, SimStorage):
        storage.fault = lambda operation, path: OSError(errno.EIO, "injected")
    else:

        def broken(*_args: object, **_options: object) -> None:
            raise OSError(errno.EIO, "injected")

        monkeypatch.setattr("os.stat", broken)
    with pytest.raises(errors.StorageFailed):
        storage.exists("t-0")
    assert storage.failed is not None


# -- lanes -----------------------------------------------------------------------------------------


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Disk]:
    def build() -> Disk:
        if request.param == "real":
            return RealDisk(RealStorage(str(tmp_path / "data")))
        return SimDisk(
            SimStorage(), SystemClock(), random.Random(1), write_ms=(0, 1), read_ms=(0, 1)
        )

    return build


def test_writes_run_in_order_and_raise_to_their_caller(disk: Callable[[], Disk]) -> None:
    async def main() -> None:
        lane = disk()
        seen: list[int] = []

        def job(number: int) -> int:
            seen.append(number)
            if number % 10 == 3:
                raise errors.StorageFull(str(number))
            return number

        found = await asyncio.gather(
            *(lane.write(partial(job, n)) for n in range(50)), return_exceptions=True
        )
        assert seen == list(range(50))
        assert [f if isinstance(f, int) else int(str(f)) for f in found] == seen
        assert await lane.read(lambda: 7) == await lane.compute(lambda: 7) == 7
        await lane.close()
        with pytest.raises(errors.StorageFailed):
            await lane.write(lambda: 1)

    asyncio.run(main())


def test_a_cancelled_caller_does_not_cancel_its_job(disk: Callable[[], Disk]) -> None:
    """log/files F2: later jobs in the queue rely on it."""

    async def main() -> None:
        lane = disk()
        seen: list[str] = []
        task = asyncio.ensure_future(lane.write(lambda: seen.append("first")))
        await asyncio.sleep(0)
        task.cancel()
        await lane.write(lambda: seen.append("second"))
        assert seen == ["first", "second"]
        assert task.cancelled()
        await lane.close()

    asyncio.run(main())


def test_close_finishes_what_is_queued(disk: Callable[[], Disk]) -> None:
    async def main() -> None:
        lane = disk()
        seen: list[int] = []
        jobs = [asyncio.ensure_future(lane.write(partial(seen.append, n))) for n in range(20)]
        await asyncio.sleep(0)
        await lane.close()
        await asyncio.gather(*jobs)
        assert seen == list(range(20))

    asyncio.run(main())


def test_real_lanes_never_run_on_the_loop(tmp_path: Path) -> None:
    # rule P2

    async def main() -> None:
        lane = RealDisk(RealStorage(str(tmp_path)))
        names = {await lane.write(threading.get_ident) for _ in range(5)}
        assert len(names) == 1
        assert threading.get_ident() not in names | {
            await lane.read(threading.get_ident),
            await lane.compute(threading.get_ident),
        }
        await lane.close()

    asyncio.run(main())


# -- what only the simulator can show: death and power loss ----------------------------------------


def test_written_survives_the_process() -> None:
    storage = SimStorage()
    file = storage.open("a", create=True)
    file.append([b"abc"])
    storage.lock()
    storage.crash()
    storage.lock()
    assert storage.read_file("a") == b"abc"
    with pytest.raises(Crashed):
        file.read(0, 1)


def test_synced_survives_power_and_unsynced_may_not() -> None:
    """log/storage D3: any subset of the unsynced blocks may survive."""
    outcomes = set()
    for seed in range(60):
        storage = SimStorage(rng=random.Random(seed))
        file = storage.open("a", create=True)
        file.append([b"s" * 5000])
        file.sync()
        storage.sync_dir("")
        file.append([b"u" * 10_000])
        storage.power_loss()
        data = storage.read_file("a")
        assert data[:5000] == b"s" * 5000
        assert set(data[5000:]) <= {0, ord("u")}
        outcomes.add(tuple(data[at] if at < len(data) else -1 for at in (5000, 9000, 14_999)))
    assert len(outcomes) > 5


def test_names_are_durable_only_after_sync_dir() -> None:
    kept = set()
    for seed in range(40):
        storage = SimStorage(rng=random.Random(seed))
        storage.replace_file("old", b"1")
        file = storage.open("new", create=True)
        file.append([b"x"])
        file.sync()
        storage.rename("old", "moved")
        storage.power_loss()
        kept.add(tuple(storage.list("")))
    assert kept == {("old",), ("new", "old"), ("moved", "new")}
    storage = SimStorage()
    storage.replace_file("f", b"1")
    storage.replace_file("f", b"2")
    storage.power_loss()
    assert storage.read_file("f") == b"2"


def test_dying_in_an_append_leaves_a_prefix() -> None:
    lengths = set()
    for seed in range(60):
        storage = SimStorage(rng=random.Random(seed))
        file = storage.open("a", create=True)
        storage.crash_at = 0
        with pytest.raises(Crashed):
            file.append([b"0123456789"])
        with pytest.raises(Crashed):
            storage.list("")
        storage.crash()
        data = storage.read_file("a")
        assert b"0123456789".startswith(data)
        lengths.add(len(data))
    assert {0, 10} <= lengths
    assert len(lengths) > 5


def test_an_append_that_cannot_be_cut_back_takes_the_storage_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/storage D1: also if the truncation is refused for lack of space, as copy-on-write file
    systems do.  A later opening would take a torn batch in the middle for damage.
    """
    storage = RealStorage(str(tmp_path))
    file = storage.open("a", create=True)
    file.append([b"0123456789"])
    write = os.pwritev

    def short(fd: int, buffers: list[bytes], position: int) -> int:
        if position > 10:
            raise OSError(errno.ENOSPC, "injected")
        return write(fd, [b"".join(buffers)[:5]], position)

    def refused(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr("os.pwritev", short)
    monkeypatch.setattr("os.ftruncate", refused)
    with pytest.raises(errors.StorageFailed):
        file.append([b"abcdefghi"])
    assert storage.failed is not None


def test_a_full_disk_is_locked_like_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in the lock file is for people; only a start can free space on a full disk."""

    def full(fd: int, data: bytes, position: int) -> int:
        raise OSError(errno.ENOSPC, "injected")

    storage = RealStorage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        storage.lock()
    with pytest.raises(errors.DirectoryLocked):
        RealStorage(str(tmp_path)).lock()
    storage.unlock()
    (tmp_path / ".lock").write_text("12345678901\n")
    storage.lock()
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    storage.unlock()
