"""What the log needs of a disk, as a protocol: the real one is `files.py`, the simulated one
`sim/disk.py`.

Both are held to one contract suite (tests/contract).  Every operation reaches WRITTEN when it
returns (it survives the death of the process); `sync` and `sync_dir` reach SYNCED (it survives a
power loss); rule L1.  Paths are relative to the storage's root and use '/'.

Rules
  D1  a short write never stays: `append` writes all or raises after cutting the file back to its
      old end (L2).
  D2  no space, and no descriptor for a file to be opened, raise `StorageFull`; any other failure
      raises `StorageFailed` and marks the storage failed: every later write raises too; reads may
      go on (L2: a failed fsync is never retried).
  D3  a power loss keeps any subset of unsynced 4 KiB blocks; a rename or create is durable only
      after `sync_dir` of its directory.
  D4  a closed file is not used: every operation on it raises `FileNotFoundError` and says nothing
      of the disk.  `read` and `sync` may run in any thread, beside a `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class File(Protocol):
    """One open file."""

    @property
    def path(self) -> str: ...

    def size(self) -> int: ...

    def append(self, buffers: Sequence[Buffer]) -> int:
        """Write all buffers at the end; returns the position they start at.  Rules D1, D2."""
        ...

    def write_at(self, position: int, data: Buffer) -> None: ...

    def read(self, position: int, size: int) -> bytes:
        """At most `size` bytes from `position`; shorter at the end of the file."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """fdatasync."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """One directory tree on one disk."""

    @property
    def root(self) -> str: ...

    @property
    def failed(self) -> Exception | None:
        """The failure that took this storage offline, if any."""
        ...

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        """Raises `FileNotFoundError` without `create`."""
        ...

    def exists(self, path: str) -> bool:
        """False only if it is known not to be there: what cannot be told raises (D2)."""
        ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; [] if it does not exist (as `exists` has it)."""
        ...

    def make_dir(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file; missing is fine."""
        ...

    def remove_tree(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...

    def sync_all(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        """`sync` of all these files and `sync_dir` of all these directories, in any order and side
        by side where the disk takes them so.  Raises if any fails (D2): then none counts.
        """
        ...

    def read_file(self, path: str) -> bytes:
        """Raises `FileNotFoundError`."""
        ...

    def replace_file(self, path: str, data: bytes) -> None:
        """Atomically and SYNCED: temporary file, sync, rename, sync_dir."""
        ...

    def free_bytes(self) -> int:
        """Raises `StorageFailed`."""
        ...

    def lock(self) -> None:
        """Take the lock file `.lock`, held until `unlock` or process death.

        Raises `DirectoryLocked`.
        """
        ...

    def unlock(self) -> None: ...


class Disk(Protocol):
    """A storage and the lanes its operations run on: never the event loop's thread (rule P2).

    `write` is one ordered lane per directory; `read` a small pool.  In the simulator both run in
    the loop after a drawn delay.
    """

    @property
    def storage(self) -> Storage: ...

    async def write(self, work: Callable[[], T]) -> T:
        """Run `work` after every earlier `write`; its exceptions are raised here."""
        ...

    async def read(self, work: Callable[[], T]) -> T: ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Run GIL-free computation (CRC, decompression, Parquet) off the loop."""
        ...

    async def close(self) -> None: ...
