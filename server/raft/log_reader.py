"""Reads the log of the quorum from the disk: the newest snapshot, and the records behind it.

World-generic.  The controller replays the log here when its term begins, and so does the generator
of the next snapshot.

Invariants
  H1  In one turn of the loop at most `SLICE_RECORDS` records, or one batch of a snapshot, are
      applied (rule P1).
  H2  The whole snapshot is verified before its first row is applied.  If it is damaged, the reader
      uses the snapshot before it and the log, which begins at the older of the two snapshots.
  H3  The checksum of every batch is verified before the batch is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from pk import errors, limits
from pk.clock import Clock
from pk.log.partition_log import PartitionLog
from pk.log.storage import Disk
from pk.server.raft.record_serde import RecordSerde
from pk.server.raft.recovery import base_of
from pk.server.raft.snapshot_files import SnapshotFiles

READ_BYTES = 4 * limits.MIB
SLICE_RECORDS = 128

R = TypeVar("R")

Apply = Callable[[int, R], None]
Say = Callable[..., None]


class LogReader(Generic[R]):
    """Reads snapshots and log.

    `base`: the first offset of the log; records below it are only in snapshots.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        serde: RecordSerde[R],
        files: SnapshotFiles,
        log: PartitionLog,
        say: Say,
    ) -> None:
        self.log = log
        self._disk = disk
        self._clock = clock
        self._serde = serde
        self._files = files
        self._say = say
        self._replays = 0
        self.rebase()

    @property
    def busy(self) -> bool:
        """Whether a replay is running; the log is not shortened meanwhile."""
        return self._replays > 0

    def rebase(self) -> None:
        """Note that snapshots or segments changed.  Raises `CorruptLog` if they do not fit."""
        self.base = base_of(self._files.kept, self.log.segments[0].base_offset)
        # a damaged snapshot was dropped: the log must reach back to the one before it
        self.log.log_start = min(self.log.log_start, self.base.end)

    async def read(self, offset: int, bound: int, max_bytes: int) -> tuple[bytes, int]:
        """Return whole batches from `offset`, and the next offset.  Raises `CorruptLog` (H3)."""
        read = partial(self.log.read, offset, bound=bound, max_bytes=max_bytes, verify=True)
        found = await self._disk.read(read)
        return found.data, found.next_offset

    async def bytes_between(self, start: int, end: int) -> int:
        """The approximate number of log bytes between two offsets."""
        below, upto = await self._disk.read(partial(self.log.bytes_at, [start, end]))
        return upto - below

    async def replay(self, apply: Apply[R], end: int | None = None) -> None:
        """Call `apply` with every record below `end`, or with all: newest snapshot, then log.

        Raises `ControllerUnavailable` if the log is replaced meanwhile, `CorruptLog`.
        """
        self._replays += 1
        try:
            offset = await self._replay_snapshot(apply)
            await self._replay_log(offset, end, apply)
        except (errors.OffsetOutOfRange, errors.SnapshotNotFound) as gone:
            raise errors.ControllerUnavailable(f"the log was replaced: {gone.message}") from gone
        finally:
            self._replays -= 1

    async def _replay_snapshot(self, apply: Apply[R]) -> int:
        """Replay the newest undamaged snapshot (H2).  Returns its end."""
        while (newest := self._files.newest) is not None:
            try:
                raw = await self._files.read(newest)
            except errors.CorruptLog as damage:
                self._say("metadata_snapshot_damaged", why=damage.message)
                self._files.forget(newest)
                self.rebase()
                continue
            for rows in self._serde.decode_snapshot(raw):
                for offset, record in rows:
                    apply(offset, record)
                await self._clock.sleep_ms(0)
            return newest.end
        return 0

    async def _replay_log(self, offset: int, end: int | None, apply: Apply[R]) -> None:
        count = 0
        while offset < (upto := self.log.written_end if end is None else end):
            raw, following = await self.read(offset, upto, READ_BYTES)
            for at, record in self._serde.decode_batches(raw, offset):
                if end is None or at < end:
                    apply(at, record)
                count += 1
                if count % SLICE_RECORDS == 0:
                    await self._clock.sleep_ms(0)
            offset = following
