"""The protocol of a disk that the log needs.  `files.py` implements it with real files,
`sim/disk.py` simulates it.

Both pass one contract suite (tests/contract).  Every operation is WRITTEN when it returns: it
survives the death of the process.  `sync` and `sync_dir` make it SYNCED: it survives a power loss
(rule L1).  Paths are relative to the storage's root and use '/'.

Rules
  D1  A short write never stays: `append` writes all bytes, or cuts the file back to its old end and
      raises (L2).
  D2  If there is no space, or no descriptor to open a file, `StorageFull` is raised.  Any other
      failure raises `StorageFailed` and marks the storage as failed: every later write raises, too,
      and reads may continue (L2: a failed fsync is never retried).
  D3  A power loss keeps any subset of the unsynced 4 KiB blocks.  A rename or a creation is durable
      only after `sync_dir` of its directory.
  D4  A closed file is not used: every operation on it raises `FileNotFoundError`, which does not
      mean that the disk failed.  `read` and `sync` may run in any thread, beside a `close`.
  D5  A stamp changes with every creation, removal, renaming, write or cut of a file directly in the
      directory, and with every exchange of the directory for another one.  Bits that a disk loses
      by itself do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from pk.world import Buffer as Buffer

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
        """Return at most `size` bytes from `position`; fewer at the end of the file."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Make the file's content SYNCED (fdatasync)."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """One directory tree on one disk."""

    @property
    def root(self) -> str: ...

    @property
    def failed(self) -> Exception | None:
        """The failure that took this storage offline; None if there was none."""
        ...

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        """Open a file.  Raises `FileNotFoundError` if it is missing and `create` is false."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the path exists.  If that cannot be determined, the call raises (D2)."""
        ...

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a directory; [] if it does not exist (as for `exists`)."""
        ...

    def stamp(self, path: str) -> str:
        """Return a word that is the same while nothing in the directory changes (D5); it has no
        space.  "" if the directory does not exist.
        """
        ...

    def make_dir(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file; a missing file is no error."""
        ...

    def remove_tree(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...

    def sync_all(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        """`sync` all these files and `sync_dir` all these directories, in any order and in parallel
        where the disk allows it.  Raises if any fails (D2); then none counts as synced.
        """
        ...

    def read_file(self, path: str) -> bytes:
        """Return a file's content.  Raises `FileNotFoundError`."""
        ...

    def replace_file(self, path: str, data: bytes) -> None:
        """Replace a file's content atomically, SYNCED: temporary file, sync, rename, sync_dir."""
        ...

    def replace_all(self, files: Mapping[str, bytes]) -> None:
        """`replace_file` for all these files, by path, side by side where the disk allows it.  No
        name leads to new content before all files are written.  Raises if any step fails (D2); then
        none counts as replaced.
        """
        ...

    def free_bytes(self) -> int:
        """Return the free space of the disk.  Raises `StorageFailed`."""
        ...

    def lock(self) -> None:
        """Take the lock file `.lock`, held until `unlock` or the death of the process.

        Raises `DirectoryLocked`.
        """
        ...

    def unlock(self) -> None: ...


class Disk(Protocol):
    """A storage and the threads on which its operations run, never the event loop's (rule P2).

    `write` is one ordered lane per directory, `read` a small pool.  In the simulator both run in
    the loop after a delay drawn at random.
    """

    @property
    def storage(self) -> Storage: ...

    async def write(self, work: Callable[[], T]) -> T:
        """Run `work` after every earlier `write`; its exceptions are raised here."""
        ...

    async def read(self, work: Callable[[], T]) -> T: ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Run computation that releases the GIL (CRC, decompression, Parquet) off the loop."""
        ...

    async def close(self) -> None: ...
