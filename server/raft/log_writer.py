"""The only writer of the quorum's log and of its saved vote.

World-generic.  The writer appends, writes, SYNCs, truncates and undoes records.  The quorum
machine, or the controller that leads, decides what is written.

Invariants
  W4  The log is shortened, and snapshots are replaced, under the lock of the writes.
  W5  `quorum-state` never notes a synced end beyond the end of the log.  Records that a truncation
      removed must not be taken for damage at the next start.  After a truncation that a full disk
      stopped (`PartitionLog.torn`) the log in memory has records that its file may lack: they are
      not noted.
  W8  The writer notes a level of formats in `quorum-state`, SYNCED, before it writes the first byte
      of that level to the log or to a snapshot (rule Q6).  The record that sets the level is such a
      byte.  So an older build refuses the directory.  If the note finds no space, the level is not
      written.  A noted level is not lowered while the process runs, because a write may leave a
      part of it.
  W6  The synced end is noted soon, not only with the next vote, because damage above it is taken
      for a torn tail when the log is opened (raft/recovery O2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from pk import errors, formats
from pk.clock import Clock
from pk.log import batch as batches
from pk.log.partition_log import PartitionLog
from pk.log.plan import WritePlan
from pk.server.raft import recovery
from pk.server.raft.messages import FetchReply, Vote
from pk.server.raft.quorum_state_store import QUORUM_STATE, state_bytes
from pk.server.raft.record_serde import RecordSerde
from pk.server.raft.reserve import ReserveDisk
from pk.server.raft.voters import Voters
from pk.tasks import TaskRegistry, awaited

R = TypeVar("R")

#: Wait of a follower whose disk is full before it tries again.
FULL_WAIT_MS = 1_000


class LogWriter(Generic[R]):
    """Writes log and vote.  Calls `synced` with the job of a write once it is SYNCED or undone."""

    def __init__(
        self,
        disk: ReserveDisk,
        clock: Clock,
        serde: RecordSerde[R],
        log: PartitionLog,
        voters: Voters[R],
        vote: Vote,
        synced: Callable[[int], None],
    ) -> None:
        self.log = log
        self.lock = asyncio.Lock()  #: W4
        self._disk = disk
        self._clock = clock
        self._serde = serde
        self._voters = voters
        self._vote = vote  #: as it is saved
        self._noted = 0  #: the synced end that is saved beside it
        self._cut_end = 0  #: where the last truncation cut, finished or not
        self._level = 0  #: the level of formats that is saved beside it (W8)
        self._synced = synced
        #: Records that the quorum appended and that the term has not read yet.
        self._foreign: list[tuple[int, R]] = []
        self._writes = TaskRegistry(awaited)

    # -- the saved vote ----------------------------------------------------------------------------

    async def save_vote(self, vote: Vote) -> None:
        """Save the vote together with the synced end, SYNCED.  Raises `StorageFull`."""
        async with self.lock:
            await self._disk.write(partial(self._save, vote))

    async def note_synced(self) -> None:
        """Note the synced end (W6).  Raises `StorageFull`; a later note makes up for it."""
        if not self._disk.held:
            await self._disk.prepare()
        if self._noted < self.log.synced_end:
            async with self.lock:
                await self._disk.write(lambda: self._save(self._vote))

    def _save(self, vote: Vote) -> None:
        self._save_at(vote, max(self._level, self._voters.level))

    def _save_at(self, vote: Vote, level: int) -> None:
        log = self.log
        synced_end = min(log.synced_end, self._cut_end) if log.torn else log.flush()  # W5
        self._disk.storage.replace_file(QUORUM_STATE, state_bytes(vote, synced_end, level))
        self._vote, self._noted, self._level = vote, synced_end, level

    async def raise_level(self, level: int) -> None:
        """Note the level of a snapshot that is about to be loaded (W8).  Raises `StorageFull`."""
        async with self.lock:
            await self._disk.write(partial(self._raise_level, level))

    def _raise_level(self, level: int) -> None:
        if formats.number_of(level) > formats.number_of(self._level):
            self._save_at(self._vote, level)

    # -- records -----------------------------------------------------------------------------------

    def append(self, records: Sequence[R], epoch: int, now_ms: int) -> int:
        """Decide one batch; returns the offset of its first record."""
        raw = self._serde.encode_batch(records, now_ms)
        header = batches.check(raw)
        appended = self.log.decide(
            header, raw, leader_epoch=epoch, now_ms=now_ms, from_client=False
        )
        for at, record in enumerate(records, appended.base_offset):
            self._voters.note(at, record)
        return appended.base_offset

    def append_own(self, records: Sequence[R], epoch: int) -> None:
        """Decide a batch of the quorum itself, which the term reads by `take_foreign`."""
        base = self.append(records, epoch, self._clock.wall_ms())
        self._foreign += enumerate(records, base)

    def take_foreign(self) -> list[tuple[int, R]]:
        """Return the records that the quorum itself appended since the last call."""
        found, self._foreign = self._foreign, []
        return found

    def forget_foreign(self, end: int) -> None:
        """Drop the records of the quorum below `end`: a replay has applied them."""
        self._foreign = [each for each in self._foreign if each[0] >= end]

    async def append_fetched(self, reply: FetchReply, job: int) -> None:
        """Append batches of a leader.  If the write fails they are undone, and fetched again."""
        log, now_ms = self.log, self._clock.wall_ms()
        try:
            for header, view in batches.iter_batches(reply.payload):
                if header.leader_epoch > reply.epoch:
                    break  # the leader read it after its epoch ended
                batches.check(view)
                self._voters.find(view, header.base_offset)  # first: it refuses unknown levels
                log.append_as_follower(header, view, now_ms=now_ms)
            await self.write_out(job)
        except (errors.CorruptBatch, errors.FencedLeaderEpoch, errors.StorageFull):
            await self.undo(0)
            await self._clock.sleep_ms(FULL_WAIT_MS)
            self._synced(job)

    # -- writes ------------------------------------------------------------------------------------

    async def write_out(self, job: int = 0) -> None:
        """Write and SYNC everything that was decided.

        The caller may be cancelled when its term ends.  The write goes on: a plan that was taken
        from the log must be completed before another write.
        """
        await asyncio.shield(self._writes.spawn(self._write_plan(job)))

    async def _write_plan(self, job: int) -> None:
        log = self.log
        async with self.lock:
            plan = log.take_writes()
            if plan is None:
                if job:
                    self._synced(job)
                return
            failure: Exception | None = None
            try:
                await self._disk.write(partial(self._perform, plan))
            except Exception as cause:
                failure = cause
            done = log.complete(plan, failure)
        if done.error is not None:
            self._foreign = []
            self._voters.forget(log.log_end)
            raise done.error
        self._synced(job)

    def _perform(self, plan: WritePlan) -> None:
        self._raise_level(self._voters.level)  # W8
        self.log.perform(plan)

    async def undo(self, job: int) -> None:
        """Undo the records that were decided and not written."""
        log = self.log
        async with self.lock:
            plan = log.take_writes()
            if plan is not None:
                log.complete(plan, errors.ControllerUnavailable("another controller leads"))
        self._foreign = []
        self._voters.forget(log.log_end)
        self._synced(job)

    async def truncate(self, end: int) -> str:
        """Truncate the log to `end`; log the range."""
        log = self.log
        async with self.lock:
            what = f"offsets [{end}, {log.log_end}): the leader's log diverges from this one there"
            await self._disk.write(partial(self._cut, end))
        return what

    def _cut(self, end: int) -> None:
        """Lower the noted synced end, then truncate (W5)."""
        log, self._cut_end = self.log, end
        if end < log.synced_end:
            self._disk.storage.replace_file(
                QUORUM_STATE, state_bytes(self._vote, end, max(self._level, self._voters.level))
            )
            self._noted = end
        log.truncate_to(end)

    async def close(self, clean: bool) -> None:
        """Finish the running writes, then close the log."""
        await self._writes.wait()
        async with self.lock:
            level = max(self._level, self._voters.level)
            args = self._disk.storage, self.log, self._vote, clean, level
            await self._disk.write(partial(recovery.close_log, *args))
