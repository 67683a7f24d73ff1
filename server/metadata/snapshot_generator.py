"""When a controller makes a snapshot of its metadata log, and how (KIP-630).

World-generic.  Every controller makes its own, leader or not, from committed records alone: an
image is built from the newest snapshot and the log behind it, read from the disk like any replay,
and written out again.  Nothing is kept in memory between two snapshots.  All of it is done in
slices; between two of them the loop serves votes and heartbeats (rule P1).

Invariants
  K1  a snapshot ends at or below the high watermark: what it says was committed
  K2  the log is made shorter only after the snapshot that stands for its beginning is SYNCED
  K3  a snapshot that cannot be made now (no space, the log was replaced meanwhile) is tried again;
      nothing waits for it
  K4  what is SYNCED and in no snapshot yet is noted at every look (raft/log.py, L6)
"""

from __future__ import annotations

from pk import errors
from pk.clock import Clock
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import MetadataRecord
from pk.server.raft.log_reader import LogReader, Say
from pk.server.raft.recovery import SnapshotRules
from pk.server.raft.snapshot_files import SnapshotFiles
from pk.server.raft.snapshot_generator import SnapshotSource
from pk.server.raft.snapshot_id import SnapshotId

#: How often is looked.
TICK_MS = 1_000
#: After one that could not be made.
AGAIN_MS = 10_000


class SnapshotGenerator:
    """See the module."""

    def __init__(
        self,
        source: SnapshotSource,
        reader: LogReader[MetadataRecord],
        files: SnapshotFiles,
        clock: Clock,
        rules: SnapshotRules,
        say: Say,
    ) -> None:
        self._source = source
        self._reader = reader
        self._files = files
        self._clock = clock
        self._rules = rules
        self._say = say
        self._since_ms = clock.monotonic_ms()  #: of the last one, or of the start

    async def run(self) -> None:
        """Look, for ever.  Raises what is no passing trouble: damage, a failed disk."""
        while True:
            await self._clock.sleep_ms(TICK_MS)
            try:
                await self._source.note_synced()
                if await self._due():
                    await self.make()
            except (errors.RetriableError, errors.OffsetOutOfRange) as trouble:  # K3
                self._say("metadata_snapshot_failed", why=trouble.message)
                await self._clock.sleep_ms(AGAIN_MS)

    async def _due(self) -> bool:
        source, newest = self._source, self._files.newest
        start, end = 0 if newest is None else newest.end, source.committed
        if end <= start or self._reader.busy:
            return False
        waited_ms = self._clock.monotonic_ms() - self._since_ms
        if 0 < self._rules.max_interval_ms <= waited_ms:
            return True
        return await self._reader.bytes_between(start, end) >= self._rules.max_bytes

    async def make(self) -> SnapshotId:
        """One of everything that is committed now (K1).  Raises `SnapshotNotFound` if a later one
        was loaded, whose end the source does not know yet.
        """
        source, image, newest = self._source, MetadataImage(), self._files.newest
        end, began_ms = source.committed, self._clock.monotonic_ms()
        if newest is not None and newest.end >= end:
            raise errors.SnapshotNotFound("a later one was loaded meanwhile")
        made = SnapshotId(end, source.epoch_at(end - 1))
        await self._reader.replay(image.apply, end)
        assert image.offset == end - 1, (image.offset, end)
        await self._files.write(made, snapshot.encode(made, snapshot.rows_of(image)))
        await source.begin_at(made)
        self._since_ms = self._clock.monotonic_ms()
        self._say(
            "metadata_snapshot", end=made.end, epoch=made.epoch, took_ms=self._since_ms - began_ms
        )
        return made
