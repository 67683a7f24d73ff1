"""A little room that a full disk leaves to the metadata.

World-generic.  A controller that starts saves a vote and begins an epoch, and cannot do without:
killed on a full disk it would not come back, and nobody could make room by deleting records.  So a
file of RESERVE_BYTES stands in its directory while there is room.  It is removed when a write finds
none, and before a start on a full disk; the next try has room.

Invariants
  B1  what found no room raises StorageFull all the same: whoever asked decides what to try again
  B2  the file holds nothing; whether it is whole does not matter
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
#: It is put there while so many times its size are free.
TIMES = 4


class ReserveDisk:
    """A Disk whose writes give up the reserve where they find no room."""

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
        """Put the reserve there if there is room; on a full disk, give it up at once."""
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
                # Nothing that a file system could compress.
                file.append([hashlib.shake_128(b"reserve").digest(self._size)])
            finally:
                file.close()
            self.held = True

    def _release(self) -> None:
        self.held = False
        self.storage.remove(RESERVE_FILE)
