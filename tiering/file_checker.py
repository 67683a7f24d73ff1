"""Watches the data files of the tables: sends a HEAD before local data is deleted, and reads
damaged files again.

World-generic.  A read or a HEAD that fails makes a damaged file known (damage.py).  From then on
the file is read again every LOOK_AGAIN_MS until it is whole or the table no longer names it.  An
operator who restores a file need do nothing else.

Invariants
  A1  A file known as damaged counts as missing: the local log keeps the records that it covers
      (rule T6).
  A2  One file is read at a time, at most LOOKS_MAX of a table in one turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from pk import errors
from pk.clock import Clock
from pk.tasks import TaskRegistry
from pk.tiering.damage import DamagedFile, DamagedFiles, damaged
from pk.tiering.data_files import DataFile
from pk.tiering.objects import ObjectInfo, ObjectStore
from pk.tiering.reader import TablePartition, TierReader
from pk.tiering.table import Table
from pk.types import Offset
from pk.wire import pk_pb2 as wire

HEADS_MAX = 8
#: How often damaged files are read again, and how many of a table in one turn (A2).
LOOK_AGAIN_MS = 30_000
LOOKS_MAX = 4


class Watched(Protocol):
    """The parts of a topic that concern its files."""

    home: str
    table: Table
    damaged: DamagedFiles


class FileChecker:
    """Watches all tables of one tier process.  `place` returns a partition's newest version, `tell`
    reports its `damaged` files to its copier."""

    def __init__(
        self,
        store: ObjectStore,
        reader: TierReader,
        clock: Clock,
        place: Callable[..., Awaitable[TablePartition]],
        tell: Callable[[Any, int], None],
        tasks: TaskRegistry,
    ) -> None:
        self._store = store
        self._reader = reader
        self._clock = clock
        self._place = place
        self._tell = tell
        self._tasks = tasks
        self._heading = asyncio.Semaphore(HEADS_MAX)
        self._reading = asyncio.Semaphore(1)
        self._looking: dict[str, None] = {}  #: directories of tables that are being checked

    def damage_found(self, topic: Watched, file: DataFile, error: errors.DamagedTierFile) -> None:
        """Notes that a file of the newest version is damaged."""
        self._note(topic, file, error)
        self._tell(topic, file.partition)

    def _note(self, topic: Watched, file: DataFile, error: errors.DamagedTierFile) -> None:
        topic.damaged.note(file, error)
        if topic.home not in self._looking:
            self._looking[topic.home] = None
            self._tasks.spawn(self._look_again(topic))

    async def missing(
        self, topic: Watched, partition: int, start: Offset, end: Offset
    ) -> list[DamagedFile]:
        """Returns the files covering `[start, end)` that are damaged (A1) or do not answer a HEAD
        (rule T6).  A file counts as missing only if the table's newest version names it."""
        for fresh in (False, True):
            # the newest version is needed only if a file is lost
            place: TablePartition = await self._place(
                topic, partition, end, fresh=fresh, known=not fresh
            )
            files = place.snapshot.covering(partition, start, end)
            whole = await asyncio.gather(*(self._is_whole(topic, file) for file in files))
            lost = [file for file, there in zip(files, whole, strict=True) if not there]
            if not lost:
                break
        for file in lost:
            why = f"it is not in the store with its {file.size} bytes"
            self._note(topic, file, damaged(topic.table.uri, file, partition, why))
        covering = {file.path for file in files}
        return [each for each in topic.damaged.of(partition) if each.file.path in covering]

    async def check_uploads(self, topic: Watched, change: wire.CommitToTableRequest) -> None:
        """Raises `UnknownTierRange` if a file of a hand-over that replaces files is not in the
        store.

        A maker that slept may hand over an upload that a sweep has removed meanwhile.  The rows of
        the files that it replaces cannot be copied again; those of an append can.
        """
        if not change.removes:
            return
        heads = (self._head(topic, add.path) for add in change.adds)
        for add, found in zip(change.adds, await asyncio.gather(*heads), strict=True):
            if found is None or found.size != add.size:
                raise errors.UnknownTierRange(
                    f"{topic.table.uri}: {add.path} is not in the store with its {add.size} bytes: "
                    "plan again"
                )

    async def _head(self, topic: Watched, path: str) -> ObjectInfo | None:
        async with self._heading:
            return await self._store.head(f"{topic.home}/{path}")

    async def _is_whole(self, topic: Watched, file: DataFile) -> bool:
        found = await self._head(topic, file.path)
        return found is not None and found.size == file.size

    async def _look_again(self, topic: Watched) -> None:
        try:
            while len(topic.damaged):
                await self._clock.sleep_ms(LOOK_AGAIN_MS)
                await self.look_at(topic, [each.file for each in topic.damaged.next(LOOKS_MAX)])
        finally:
            del self._looking[topic.home]

    async def look_at(self, topic: Watched, files: Sequence[DataFile]) -> None:
        """Reads whole files, one after the other, and reports the result to their partitions'
        copiers."""
        for file in files:
            async with self._reading:
                await self._look_at(topic, file)
        for partition in sorted({file.partition for file in files}):
            self._tell(topic, partition)

    async def _look_at(self, topic: Watched, file: DataFile) -> None:
        try:
            place: TablePartition = await self._place(topic, file.partition)
            if file.path in place.snapshot.files:
                await self._reader.verify(place, file)
            topic.damaged.whole(file)
        except errors.DamagedTierFile as error:
            self._note(topic, file, error)
        except errors.PkError:
            pass  # the store is away or the table has a problem: the file's state is unknown
