"""The Storage and Disk of the operating system: files, one writer thread per directory, and pools
for reads and computation.

The rules are those of `log/storage.py`: log/storage D1–D4.  `log/real_file` is an open file,
`log/descriptor_pool` bounds how many are open.

Threads (rule P2)
  F1  The writer drains every queued job per wake-up, in order.  Finished jobs reach the loop
      through one pending call_soon_threadsafe, however many they are.
  F2  A queued job runs even if its caller was cancelled, because later jobs rely on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, NoReturn, TypeVar

from pk import errors
from pk.log.descriptor_pool import POOL
from pk.log.real_file import EXHAUSTED, NO_DESCRIPTOR, RealFile
from pk.log.storage import File

T = TypeVar("T")

LOCK_NAME = ".lock"
READ_THREADS = 4
#: How many steps `sync_all` and `replace_all` run at once: file systems commit the syncs that wait
#: together as one.
SYNC_THREADS = 32
COMPUTE_THREADS = 2
#: Errors that pass and do not mean that the disk failed: no space, or those of `EXHAUSTED`.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *EXHAUSTED)
#: How many descriptors of the pool are closed if the process has none left.
_RELEASED = 16


def _opened(path: str, flags: int) -> int:
    """Open a file; if there is no free descriptor, the pool closes some first."""
    try:
        return os.open(path, flags, 0o644)
    except OSError as cause:
        if cause.errno not in NO_DESCRIPTOR or not POOL.release(_RELEASED):
            raise
        return os.open(path, flags, 0o644)


def _tmp(path: str) -> str:
    return path + ".tmp"


def _together(jobs: Iterable[Callable[[], None]]) -> None:
    """Run the jobs in at most SYNC_THREADS threads.  Raises the first failure; jobs that have not
    begun by then do not run.
    """
    left = deque(jobs)
    failures: list[BaseException] = []

    def work() -> None:
        while left and not failures:
            try:
                job = left.popleft()
            except IndexError:
                return  # another thread took the last one
            try:
                job()
            except BaseException as failure:  # the caller handles every error
                failures.append(failure)

    helpers = min(SYNC_THREADS, len(left)) - 1
    threads = [threading.Thread(target=work, name="pk-sync") for _ in range(helpers)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class RealStorage:
    """A directory of the operating system."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self.failed: Exception | None = None
        self._lock_fd = -1
        self._spare_fd = -1  #: a spare descriptor while the lock is held; see `_sync_with_spare`
        self._spare_guard = threading.Lock()
        os.makedirs(self.root, exist_ok=True)

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def check_writable(self) -> None:
        if self.failed is not None:
            raise errors.StorageFailed(f"{self.root} is offline: {self.failed}")

    def fail(self, cause: OSError, doing: str, torn: bool = False) -> NoReturn:
        """Raise the typed error of log/storage D2.  All errors but passing ones take the storage
        offline.  With `torn` every error does: it is unknown what a failed sync stored or what a
        failed cut left behind (log/storage D1).
        """
        if cause.errno in _FULL and not torn:
            raise errors.StorageFull(
                f"{self.root}: {doing}: {cause.strerror}", directory=self.root
            ) from cause
        error = errors.StorageFailed(
            f"{self.root}: {doing}: {cause.strerror or cause}", directory=self.root
        )
        self.failed = error
        raise error from cause

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        if create:
            self.check_writable()
        return RealFile(self, path, self.descriptor(path, flags), POOL, write=write)

    def descriptor(self, path: str, flags: int) -> int:
        """Open a file for the caller to close.  Raises `FileNotFoundError`, and as log/storage D2
        says.
        """
        try:
            return _opened(self._full(path), flags)
        except FileNotFoundError:
            self._check_there(f"opening {path}")
            raise
        except OSError as cause:
            self.fail(cause, f"opening {path}")

    def exists(self, path: str) -> bool:
        try:
            os.stat(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            self._check_there(f"looking for {path}")
            return False
        except OSError as cause:  # the file may exist
            self.fail(cause, f"looking for {path}")
        return True

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._full(path)))
        except (FileNotFoundError, NotADirectoryError):
            self._check_there(f"listing {path}")
            return []
        except OSError as cause:
            self.fail(cause, f"listing {path}")

    def stamp(self, path: str) -> str:
        full = self._full(path)
        try:
            mine = os.stat(full)
            with os.scandir(full) as found:
                seen = [(each.name, each.stat(follow_symlinks=False)) for each in found]
        except (FileNotFoundError, NotADirectoryError):
            self._check_there(f"looking at {path}")
            return ""
        except OSError as cause:
            self.fail(cause, f"looking at {path}")
        # the time of the last change cannot be set, as the time of the last write can
        rows = sorted((name, s.st_ino, s.st_size, s.st_ctime_ns) for name, s in seen)
        text = repr((mine.st_dev, mine.st_ino, rows))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def make_dir(self, path: str) -> None:
        self._do(lambda: os.makedirs(self._full(path), exist_ok=True), f"creating {path}")

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda: os.unlink(self._full(path)), f"removing {path}")

    def remove_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda: shutil.rmtree(self._full(path)), f"removing {path}")

    def rename(self, old: str, new: str) -> None:
        self._do(lambda: os.rename(self._full(old), self._full(new)), f"renaming {old} to {new}")

    def sync_dir(self, path: str) -> None:
        self.check_writable()
        try:
            try:
                os.close(self._synced_dir(path))
            except OSError as cause:
                if cause.errno not in NO_DESCRIPTOR:
                    raise
                self._sync_with_spare(path)
        except FileNotFoundError:
            self._check_there(f"syncing directory {path or '.'}")
            raise
        except OSError as cause:
            self.fail(cause, f"syncing directory {path or '.'}", torn=True)

    def _synced_dir(self, path: str) -> int:
        """Return the descriptor of a directory that was synced."""
        fd = _opened(self._full(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _sync_with_spare(self, path: str) -> None:
        """Sync a directory whose entry was just created.  The creation cannot be undone if there is
        no free descriptor (log/storage D2), so one spare descriptor is kept for this.
        """
        with self._spare_guard:
            spare, self._spare_fd = self._spare_fd, -1
            if spare >= 0:
                os.close(spare)
            try:
                self._spare_fd = self._synced_dir(path)
            except FileNotFoundError:
                self._keep_spare()
                raise

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare_fd = os.dup(self._lock_fd)

    def sync_all(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        _together(
            [file.sync for file in files] + [partial(self.sync_dir, path) for path in directories]
        )

    def read_file(self, path: str) -> bytes:
        try:
            with open(self._full(path), "rb", opener=_opened) as file:
                return file.read()
        except FileNotFoundError:
            self._check_there(f"reading {path}")
            raise
        except OSError as cause:
            if cause.errno in NO_DESCRIPTOR:  # log/storage D2: the file is opened for this
                self.fail(cause, f"reading {path}")
            raise errors.StorageFailed(f"{self.root}: reading {path}: {cause.strerror}") from cause

    def replace_file(self, path: str, data: bytes) -> None:
        self.replace_all({path: data})

    def replace_all(self, files: Mapping[str, bytes]) -> None:
        self.check_writable()
        self._check_there(f"replacing {', '.join(islice(files, 1))}")
        _together([partial(self._write_synced, _tmp(path), data) for path, data in files.items()])
        directories: dict[str, list[str]] = {}
        for path in files:
            directories.setdefault(os.path.dirname(path), []).append(path)
        _together([partial(self._rename_in, *each) for each in directories.items()])

    def _rename_in(self, directory: str, paths: Sequence[str]) -> None:
        """Put written files in the place of those of a directory.  ext4 waits for the disk while it
        frees what a rename replaces (2 ms), and in a sync: other directories do that meanwhile.
        """
        for path in paths:
            self.rename(_tmp(path), path)
        self.sync_dir(directory)

    def _write_synced(self, path: str, data: bytes) -> None:
        file = self.open(path, create=True)
        try:
            file.truncate(0)
            file.append([data])
            file.sync()
        finally:
            file.close()

    def _do(self, work: Callable[[], Any], doing: str) -> None:
        self.check_writable()
        try:
            work()
        except FileNotFoundError:
            self._check_there(doing)
            raise
        except OSError as cause:
            self.fail(cause, doing)

    def _check_there(self, doing: str) -> None:
        """Check that the root directory is still there (log/storage D2).  If it was unmounted or
        removed while the broker owns it, the storage has failed.

        Its path may lead to another directory by then, and a file that is missing there does not
        count as absent.
        """
        if self._lock_fd < 0:
            return  # not the owner: a reader, or before the lock
        try:
            if os.path.samestat(os.stat(self._full(LOCK_NAME)), os.fstat(self._lock_fd)):
                return
            why = errno.ESTALE
        except OSError as cause:
            why = cause.errno or errno.ENOENT
        self.fail(
            OSError(why, "its lock file is gone: it was unmounted, removed or replaced"), doing
        )

    def free_bytes(self) -> int:
        try:
            found = os.statvfs(self.root)
        except OSError as cause:
            self.fail(cause, "asking for its free space")
        return found.f_bavail * found.f_frsize

    def lock(self) -> None:
        if self._lock_fd >= 0:
            return
        self.check_writable()
        try:
            fd = os.open(self._full(LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as cause:
            self.fail(cause, "locking the directory")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise errors.DirectoryLocked(
                f"{self.root} is in use by process {holder}; stop it or use another directory",
                directory=self.root,
                pid=holder,
            ) from cause
        except OSError as cause:  # for example a file system without locks
            os.close(fd)
            self.fail(cause, "locking the directory")
        self._lock_fd = fd
        self._keep_spare()
        name = f"{os.getpid()}\n".encode()
        # for people to read; a full disk may have no room for it
        with contextlib.suppress(OSError):
            os.pwrite(fd, name, 0)
            os.ftruncate(fd, len(name))

    def unlock(self) -> None:
        held = self._lock_fd, self._spare_fd
        self._lock_fd = self._spare_fd = -1
        for fd in held:
            if fd >= 0:
                os.close(fd)


class _Job(NamedTuple):
    work: Callable[[], Any]
    future: asyncio.Future[Any]


class RealDisk:
    """The lanes of one data directory.  Belongs to the loop that first uses it."""

    def __init__(
        self, storage: RealStorage, *, read_threads: int = READ_THREADS, name: str = ""
    ) -> None:
        self.storage = storage
        name = name or os.path.basename(storage.root) or "disk"
        self._readers = ThreadPoolExecutor(read_threads, thread_name_prefix=f"pk-read-{name}")
        self._computers = ThreadPoolExecutor(
            COMPUTE_THREADS, thread_name_prefix=f"pk-compute-{name}"
        )
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._finished: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._announced = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = threading.Thread(target=self._run, name=f"pk-write-{name}", daemon=True)
        self._writer.start()

    async def write(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        self._loop = loop
        future: asyncio.Future[T] = loop.create_future()
        with self._wake:
            if self._closing:
                raise errors.StorageFailed(f"{self.storage.root} is closed")
            self._jobs.append(_Job(work, future))
            if len(self._jobs) == 1:
                self._wake.notify()
        return await future

    async def read(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._computers, work)

    async def close(self) -> None:
        """Finish the queued jobs, then stop the threads."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._writer.join)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._computers.shutdown(wait=False, cancel_futures=True)
        self._deliver()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    self._wake.wait()
                if not self._jobs:
                    return
                drained = list(self._jobs)
                self._jobs.clear()
            for job in drained:
                result: Any = None
                error: BaseException | None = None
                try:
                    result = job.work()
                except BaseException as raised:  # the caller handles every error
                    error = raised
                self._finished.append((job.future, result, error))
                self._announce()

    def _announce(self) -> None:
        """Wake the loop once for all jobs that finished since the last wake-up (F1)."""
        if self._announced or self._loop is None:
            return
        self._announced = True
        # the loop is closed, and with it everything that waited
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._announced = False
        while self._finished:
            future, result, error = self._finished.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
