"""Makes snapshots of a controller's metadata log (KIP-630).

World-generic.  Every controller makes its own snapshots, leader or not, from committed records
only.  It replays the newest snapshot and the log behind it from the disk into an image, and writes
that image.  Nothing stays in memory between two snapshots.  The work is done in slices; between two
slices the loop serves votes and heartbeats (rule P1).

Invariants
  K1  A snapshot ends at or below the high watermark, so its content is committed.
  K2  The log is shortened only after the snapshot that replaces its beginning is SYNCED.
  K3  A snapshot that cannot be made now (no space, or the log was replaced meanwhile) is tried
      again later; nothing waits for it.
  K4  Every check notes the synced end, which may be above the newest snapshot (raft/log_writer W6).
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

#: Interval of the checks whether a snapshot is due.
TICK_MS = 1_000
#: A snapshot that is due because of its own size waits so long after the last one, and after the
#: start: at the start of the nodes there is other work.
REST_MS = 60_000
#: Wait after a failed snapshot.
AGAIN_MS = 10_000


class SnapshotGenerator:
    """Makes snapshots of one controller's log when they are due."""

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
        self._since_ms = clock.monotonic_ms()  #: time of the last snapshot, or of the start

    async def run(self) -> None:
        """Make due snapshots until cancelled.  Raises for damage and for a failed disk."""
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
        behind, rules = await self._reader.bytes_between(start, end), self._rules
        if behind >= rules.max_bytes:
            return True
        if behind < rules.bytes_due(0) or waited_ms < REST_MS:
            return False
        _, size = (b"", 0) if newest is None else await self._files.piece(newest, 0, 1)
        return behind >= rules.bytes_due(size)

    async def make(self) -> SnapshotId:
        """Make a snapshot of everything that is committed now (K1).

        Raises `SnapshotNotFound` if a later snapshot was loaded, whose end the source does not know
        yet.
        """
        source, image, newest = self._source, MetadataImage(), self._files.newest
        end, began_ms = source.committed, self._clock.monotonic_ms()
        if newest is not None and newest.end >= end:
            raise errors.SnapshotNotFound("a later snapshot was loaded meanwhile")
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
