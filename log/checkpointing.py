"""Writes the checkpoints of a broker's open logs: recovery points, log starts, high watermarks.

A `Checkpointer` reads the logs that a `LogManager` has open and writes the checkpoint files of
their directories.  log/manager M2 and M4 hold here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from pk import errors
from pk.log import directory as files
from pk.log.directory import Directory
from pk.log.partition_log import PartitionLog
from pk.log.storage import Disk
from pk.types import Offset, PartitionKey

#: The open logs, each with its directory.
OpenLogs = dict[PartitionKey, tuple[PartitionLog, Directory]]


class Checkpointer:
    """Writes the checkpoint files of all data directories.

    directories, logs: the manager's own collections, which it changes
    producer_expiration_ms: a producer that was silent for longer is forgotten
    """

    def __init__(
        self,
        directories: Sequence[Directory],
        logs: OpenLogs,
        disks: Sequence[Disk],
        producer_expiration_ms: int,
    ) -> None:
        self._directories = directories
        self._logs = logs
        self._expiration_ms = producer_expiration_ms
        self._locks = {id(disk): asyncio.Lock() for disk in disks}
        #: Logs being cut or begun again: earlier recovery points are void (log/manager M2).
        self._reshaping: dict[PartitionKey, None] = {}

    @contextlib.asynccontextmanager
    async def reshaping(self, key: PartitionKey) -> AsyncIterator[None]:
        """While the context is open, the log's recovery point does not move: the log is cut, begun
        again or re-opened.  It opens once the loop has taken over the result of a swap (log/swap);
        the caller sees to it that no other swap begins.
        """
        taken_over = asyncio.Event()
        self._logs[key][0].cleaned.when_taken_over(taken_over.set)
        await taken_over.wait()
        self._reshaping[key] = None
        try:
            yield
        finally:
            del self._reshaping[key]

    async def lower(self, directory: Directory, ends: Mapping[PartitionKey, Offset]) -> None:
        """Lower the checkpoints of these logs to their ends, SYNCED.  A move of a log start that is
        under way does not raise them again.
        """
        for key, end in ends.items():
            log = self._logs[key][0]
            log.log_start = min(log.log_start, end)
            for named in (directory.recovery_points, directory.high_watermarks, *directory.moving):
                if named.get(key, 0) > end:
                    named[key] = end
        await self.write(directory)

    async def lower_all(self, directory: Directory) -> list[tuple[PartitionKey, Exception]]:
        """Lower the checkpoints of all logs of a directory to their ends, as `lower` does.  Returns
        the logs that may not be served, because a full disk has no room for the checkpoint.
        """
        logs = self._logs.items()
        ends = {key: log.written_end for key, (log, home) in logs if home is directory}
        try:
            await self.lower(directory, ends)
        except errors.StorageFull as full:
            waiting: list[tuple[PartitionKey, Exception]] = [
                (key, full) for key, end in ends.items() if directory.claims(key, end)
            ]
            for key, _ in waiting:
                directory.not_opened(key, full)
            return waiting
        return []

    def high_watermark(self, key: PartitionKey) -> int:
        """Return the checkpointed high watermark; 0 if there is none."""
        return self._logs[key][1].high_watermarks.get(key, 0)

    def set_high_watermark(self, key: PartitionKey, offset: int) -> None:
        """Remember the high watermark for the next checkpoint."""
        found = self._logs.get(key)
        if found is not None:
            found[1].high_watermarks[key] = offset

    async def checkpoint(self, of: Directory | None = None, now_ms: int | None = None) -> None:
        """Write recovery points, log starts and high watermarks, SYNCED, of one directory or of
        all, one after another.  Producers that were silent too long at `now_ms` are forgotten.

        Sealed segments are flushed first, in parallel to the writer, so that recovery points reach
        the active segments.  Raises the first storage error, after every directory was tried
        (log/manager M4).
        """
        problems: list[Exception] = []
        for each in self._directories if of is None else [of]:
            try:
                async with self._locks[id(each.disk)]:
                    if each.failed is None:
                        await self._checkpoint(each, now_ms)
            except errors.PkError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    async def _checkpoint(self, directory: Directory, now_ms: int | None) -> None:
        for key, (log, home) in list(self._logs.items()):
            if home is not directory or key not in self._logs:
                continue
            log.producers.expire(now_ms or 0, self._expiration_ms)
            if directory.recovery_points.get(key) == log.written_end:
                continue  # nothing new since the last checkpoint
            await directory.disk.read(log.flush_sealed)
            point = await directory.disk.write(log.checkpoint)
            # otherwise the log was begun again in the meantime (log/manager M2)
            mine = self._logs.get(key)
            same = mine is not None and mine[0] is log and not log.torn
            if same and key not in self._reshaping:
                directory.recovery_points[key] = point
        await self.write(directory)
        await directory.write_run()

    async def checkpoint_log_starts(self) -> None:
        """Write the log starts of all directories, and where their local logs begin, SYNCED."""
        for directory in self._directories:
            if directory.failed is None:
                await self.write_log_starts(directory)

    async def move_log_starts(self, moves: Mapping[PartitionKey, Offset]) -> None:
        """Move log starts up (first half of rule T9): the new starts are SYNCED before readers and
        the tier see them.

        A start that is not above the present one is ignored.  Raises the disk's failure; then
        nothing moved.
        """
        for directory in self._directories:
            mine = {key: to for key, to in moves.items() if self._home(key) is directory}
            if not mine or directory.failed is not None:
                continue
            with directory.moves(mine):
                await self.write_log_starts(directory)
            for key, to in mine.items():
                if key in self._logs:
                    self._logs[key][0].advance_log_start(to)

    def _home(self, key: PartitionKey) -> Directory | None:
        found = self._logs.get(key)
        return None if found is None else found[1]

    async def write(self, directory: Directory) -> None:
        """Write every checkpoint of a directory, SYNCED."""
        self._note_log_starts(directory)
        await directory.write_checkpoints()

    async def write_log_starts(self, directory: Directory) -> None:
        """Write the log starts of a directory, and where its local logs begin, SYNCED."""
        self._note_log_starts(directory)
        await directory.write_checkpoints(files.LOG_STARTS, files.LOCAL_STARTS)

    def _note_log_starts(self, directory: Directory) -> None:
        for key, (log, home) in self._logs.items():
            if home is directory and not log.start_unknown:
                moving = (each.get(key, 0) for each in directory.moving)
                directory.log_starts[key] = max(log.log_start, *moving, 0)
                anew = directory.begun_anew.get(key, 0)
                directory.local_starts[key] = max(log.reaches_back_to, anew)
