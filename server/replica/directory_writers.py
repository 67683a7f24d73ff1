"""The writers of a broker's data directories, one for each.

Pure.  A writer is made when the first log of its directory is opened, or when the free
space of the directory is first measured.
"""

from __future__ import annotations

from collections.abc import Callable

from pk.log.storage import Disk
from pk.server.replica.context import Environment
from pk.server.replica.directory_writer import LogDirWriter


class LogDirWriters:
    """One `LogDirWriter` per directory.

    `on_space` is called when the free space of a directory has crossed a bound (rule L16).
    """

    def __init__(self, env: Environment, on_space: Callable[[], None]) -> None:
        self._env = env
        self._on_space = on_space
        self._writers: dict[int, LogDirWriter] = {}
        #: writers of directories that were reported full
        self._full: dict[LogDirWriter, None] = {}

    def of(self, disk: Disk) -> LogDirWriter:
        """Return the one writer of a directory."""
        writer = self._writers.get(id(disk))
        if writer is None:
            writer = self._writers[id(disk)] = LogDirWriter(
                disk,
                on_bug=self._env.bug,
                reserve_bytes=self._env.server["disk_reserve_bytes"],
                on_space=self._space_changed,
            )
        return writer

    def all(self) -> list[LogDirWriter]:
        """Return the writers, oldest first."""
        return list(self._writers.values())

    def _space_changed(self, writer: LogDirWriter) -> None:
        """Report a directory that is full, or has room again, to the controller at once (L16)."""
        root, free = writer.disk.storage.root, writer.space.free
        if writer.space.full and writer not in self._full:
            self._full[writer] = None
            self._env.warn("directory_full", directory=root, free_bytes=free)
        elif not writer.space.full and writer in self._full:
            del self._full[writer]
            self._env.warn("directory_has_room", directory=root, free_bytes=free)
        self._on_space()
