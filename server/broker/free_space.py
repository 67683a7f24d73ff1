"""Measurements of the free space of a broker's directories (rule L16).

World-generic.
"""

from __future__ import annotations

from functools import partial

from pk.log.manager import LogManager
from pk.log.storage import Disk
from pk.server.broker.disk_jobs import DiskJobs
from pk.server.replica.context import Environment
from pk.server.replica.directory_writer import LogDirWriter
from pk.server.replica.directory_writers import LogDirWriters
from pk.types import NONE

#: Interval of a directory's free space measurements; a full one is measured at every tick (L16).
SPACE_MS = 1_000


class FreeSpace:
    """Measures each directory every SPACE_MS, and a full one at every tick."""

    def __init__(
        self, env: Environment, manager: LogManager, writers: LogDirWriters, jobs: DiskJobs
    ) -> None:
        self._env = env
        self._manager = manager
        self._writers = writers
        self._jobs = jobs
        self._measured_ms: dict[Disk, int] = {}  #: when the last measurement of each began

    async def measure_all(self) -> None:
        """Measure every directory before the first tick; a directory that gives an error has
        failed.
        """
        for each in self._manager.directories:
            await self._jobs.guarded("free space", self._measure(self._writers.of(each.disk)))

    def measure_due(self, now_ms: int) -> None:
        for writer in self._writers.all():
            wait_ms = 0 if writer.space.full else SPACE_MS
            if now_ms - self._measured_ms.get(writer.disk, NONE) >= wait_ms:
                self._jobs.beside("free space", writer.disk, partial(self._measure, writer))

    async def _measure(self, writer: LogDirWriter) -> None:
        """Measure the free space off the loop, because an unreachable file system may hang."""
        storage = writer.disk.storage
        self._measured_ms[writer.disk] = self._env.now_ms
        # Appends decided before or during the measurement may not be written yet.
        unwritten, spent = writer.queued_bytes, writer.space.spent
        free = 0 if storage.failed else await writer.disk.read(storage.free_bytes)
        self._env.metrics.free.labels(storage.root).set(free)
        if storage.failed is None:
            unwritten += writer.space.spent - spent
            writer.space.measured(free - unwritten, self._env.now_ms)
