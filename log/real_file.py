"""A file of the operating system that is open for a long time, with or without a descriptor.

The owner appends in the write lane of its directory.  Other threads read and sync meanwhile.  The
pool of descriptors (`log/descriptor_pool`) may close the descriptor between two operations.  The
next operation opens the file again.

Invariants
  F1  `close` does not wait for running operations.  The last of them closes the descriptor, so it
      is never used after the operating system has reused it (log/storage D4).
  F2  A file that is opened again must be the same file: same device, same inode.  Otherwise it was
      replaced or removed, and counts as closed (log/storage D4).
  F3  `_dirty` changes when a write begins and when it ends.  A sync clears it only if it has not
      changed since before the sync.  So a write that began before the sync ended, and ended after
      it began, stays unsynced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from typing import NoReturn, Protocol

from pk import errors
from pk.log.descriptor_pool import DescriptorPool
from pk.log.storage import Buffer

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 1024
#: Errors of a process or a machine without a free descriptor or memory.  They pass, and they do not
#: mean that the disk failed.
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
EXHAUSTED = (*NO_DESCRIPTOR, errno.ENOMEM)


class FileOwner(Protocol):
    """What a file needs of the storage that opened it."""

    root: str

    def check_writable(self) -> None: ...
    def fail(self, cause: OSError, doing: str, torn: bool = False) -> NoReturn: ...
    def descriptor(self, path: str, flags: int) -> int: ...


class RealFile:
    """One open file.  It keeps positions itself, so nothing depends on the descriptor's own
    position.
    """

    def __init__(
        self, storage: FileOwner, path: str, fd: int, pool: DescriptorPool, *, write: bool
    ) -> None:
        self.path = path
        self._storage = storage
        self._pool = pool
        self._flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        self._fd = fd  #: -1 while the pool has closed it
        found = os.fstat(fd)
        self._size = found.st_size
        self._identity = (found.st_dev, found.st_ino)
        self._guard = threading.Lock()
        self._users = 0  #: running operations
        self._closed = False
        self._dirty = 0  #: counts the beginnings and ends of writes since a sync covered all (F3)
        pool.opened(self)

    def size(self) -> int:
        return self._size

    def append(self, buffers: Sequence[Buffer]) -> int:
        start = self._size
        fd = self._begin_write()
        try:
            _write_all(fd, start, [memoryview(b) for b in buffers if len(b)])
        except OSError as cause:
            self._cut_back(fd, start, cause)
        finally:
            self._leave(write=True)
        self._size = start + sum(len(b) for b in buffers)
        return start

    def write_at(self, position: int, data: Buffer) -> None:
        fd = self._begin_write()
        try:
            _write_all(fd, position, [memoryview(data)])
        except OSError as cause:
            if position + len(data) > self._size:
                self._cut_back(fd, self._size, cause)
            self._storage.fail(cause, f"writing {self.path}")
        finally:
            self._leave(write=True)
        self._size = max(self._size, position + len(data))

    def _cut_back(self, fd: int, size: int, cause: OSError) -> NoReturn:
        """Remove from the file the part of a failed append that reached it (log/storage D1)."""
        try:
            os.ftruncate(fd, size)
        except OSError as worse:
            self._storage.fail(worse, f"cutting {self.path} back", torn=True)
        self._storage.fail(cause, f"appending to {self.path}")

    def read(self, position: int, size: int) -> bytes:
        fd = self._enter()
        try:
            data = os.pread(fd, size, position)
            if len(data) == size:
                return data
            parts = [data]  # pread is bounded by 2 GiB and may stop at a signal
            while data and sum(map(len, parts)) < size:
                got = sum(map(len, parts))
                data = os.pread(fd, size - got, position + got)
                parts.append(data)
            return b"".join(parts)
        except OSError as cause:
            raise errors.StorageFailed(
                f"{self._storage.root}: reading {self.path}: {cause.strerror}"
            ) from cause
        finally:
            self._leave()

    def truncate(self, size: int) -> None:
        fd = self._begin_write()
        try:
            os.ftruncate(fd, size)
        except OSError as cause:
            self._storage.fail(cause, f"truncating {self.path}")
        finally:
            self._leave(write=True)
        self._size = size

    def sync(self) -> None:
        self._storage.check_writable()
        fd = self._enter()
        try:
            covered = self._dirty
            os.fdatasync(fd)
        except OSError as cause:
            self._storage.fail(cause, f"syncing {self.path}", torn=True)
        else:
            with self._guard:
                if self._dirty == covered:  # otherwise a write began or ended meanwhile (F3)
                    self._dirty = 0
        finally:
            self._leave()

    def close(self) -> None:
        with self._guard:
            if self._closed:
                return
            self._closed = True
            fd = self._let_go() if not self._users else -1
        self._end(fd)

    # -- the descriptor ----------------------------------------------------------------------------

    def _begin_write(self) -> int:
        self._storage.check_writable()
        return self._enter(write=True)

    def _enter(self, *, write: bool = False) -> int:
        """Return the descriptor, which stays open until `_leave`.  The file is opened again if the
        pool closed it.
        """
        with self._guard:
            if self._closed:
                raise FileNotFoundError(f"{self.path} was closed")
            self._users += 1
            self._dirty += write
            fd = self._fd
        if fd >= 0:
            self._pool.used(self)
            return fd
        try:
            return self._reopen()
        except BaseException:
            self._leave()
            raise

    def _leave(self, *, write: bool = False) -> None:
        with self._guard:
            self._users -= 1
            self._dirty += write
            left = self._let_go() if self._closed and not self._users else -1
        self._end(left)

    def _reopen(self) -> int:
        fd = self._storage.descriptor(self.path, self._flags)
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != self._identity:
            os.close(fd)
            raise FileNotFoundError(f"{self.path} was replaced")
        with self._guard:
            other = self._fd
            if other < 0:
                self._fd = fd
        if other >= 0:  # another thread opened it meanwhile
            os.close(fd)
            return other
        self._pool.opened(self)
        return fd

    def park(self, *, sync: bool) -> bool:
        """Close the descriptor until the next operation (log/descriptor_pool K2)."""
        with self._guard:
            if self._users or self._fd < 0:
                return self._fd < 0
            dirty = bool(self._dirty)
            if not dirty:
                fd = self._let_go()
        if not dirty:
            os.close(fd)
            return True
        if not sync:
            return False
        try:
            self.sync()
        except (errors.PkError, FileNotFoundError):  # the storage notes that it failed
            return False
        return self.park(sync=False)

    def _let_go(self) -> int:
        """Return the descriptor for someone to close it (guard held)."""
        fd, self._fd = self._fd, -1
        return fd

    def _end(self, fd: int) -> None:
        if fd >= 0:
            self._pool.closed(self)
            os.close(fd)

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _write_all(fd: int, position: int, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        written = os.pwritev(fd, views[first : first + IOV_MAX], position)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        position += written
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
