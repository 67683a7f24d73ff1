"""Reserved disk space for the metadata.

World-generic.  A controller must save a vote and begin an epoch when it starts.  Without reserved
space a controller that was killed on a full disk could not start again, and then no operator could
delete records to make room.  So a file of RESERVE_BYTES is kept in the metadata directory.  It is
removed when a write finds no space, and before a start on a full disk; the next attempt succeeds.

Invariants
  B1  The write that found no space still raises StorageFull.  The caller decides what to repeat.
  B2  The content of the file has no meaning; it may be incomplete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from pk import errors, limits
from pk.log.storage import Disk, Storage

T = TypeVar("T")

RESERVE_FILE = "reserve"
RESERVE_BYTES = limits.MIB // 4
#: The file is created only while this many times its size are free.
TIMES = 4


class ReserveDisk:
    """A Disk that removes the reserve file when a write finds no space."""

    def __init__(self, disk: Disk, size: int = RESERVE_BYTES) -> None:
        self._disk = disk
        self._size = size
        self.held = False

    @property
    def storage(self) -> Storage:
        return self._disk.storage

    async def write(self, work: Callable[[], T]) -> T:
        try:
            return await self._disk.write(work)
        except errors.StorageFull:
            await self._disk.write(self._release)  # B1
            raise

    async def read(self, work: Callable[[], T]) -> T:
        return await self._disk.read(work)

    async def compute(self, work: Callable[[], T]) -> T:
        return await self._disk.compute(work)

    async def close(self) -> None:
        await self._disk.close()

    async def prepare(self) -> None:
        """Create the reserve file if there is space; on a full disk, remove it."""
        await self._disk.write(self._prepare)

    def _prepare(self) -> None:
        storage, free = self.storage, self.storage.free_bytes()
        there = storage.exists(RESERVE_FILE)
        if there and free >= self._size:
            self.held = True
        elif there:
            self._release()
        elif free >= TIMES * self._size:
            file = storage.open(RESERVE_FILE, create=True)
            try:
                # Random bytes: a file system must not compress the reserve.
                file.append([hashlib.shake_128(b"reserve").digest(self._size)])
            finally:
                file.close()
            self.held = True

    def _release(self) -> None:
        self.held = False
        self.storage.remove(RESERVE_FILE)
