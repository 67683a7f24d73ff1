"""The log cleaner of a broker: cleans the compacted logs without a tier, one after the other.

World-generic.  Every `log_cleaner_backoff_ms` the cleaner plans each compacted log
(compaction/plan.py) and cleans the dirtiest one that is due, until none is due.  A `Cleaner` reads
and writes the segments, in a process of its own (broker/cleaner_child.py).  The broker then swaps
the files on the directory's write lane (log/swap.py).

A leader and its followers clean their own logs, up to the last stable offset that each knows (C1).

Invariants
  K1  One log is cleaned at a time, and the event loop does none of the work.  Between two steps of
      the loop logs with at most STEP_SEGMENTS segments are planned, a larger log in the read lane.
  K2  A cleaning is void, and its files are removed, if the log was cut, replaced, closed or lost a
      segment in the meantime, if it is late (compaction/retain: `deadline_ms`), or if a replica was
      added.
  K3  Tombstones and markers age below the settled end (C4).  A leader knows it from the cleaned
      ends that the followers report, and a follower from the leader.
  K4  A log that cannot be planned or cleaned (damage, a full disk, a key that is too large) is
      tried again after UNCLEANABLE_MS, and the other logs are cleaned.  It counts as uncleanable
      until then.  So does a log whose cleaned files would not leave the reserve of the disk (L16).
  K5  A swap that a full disk interrupted is tried again in every pass, also in a log without any
      other work (log/swap W2).
  K6  Damage that a cleaning finds in the log takes the same way as damage that a reader finds (L9).
  K7  Nothing is settled either in a log whose first offsets are in a table only: the server was
      started without its tier_url, and the table has records that a tombstone deletes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from pk import errors
from pk.compaction.cleaning_job import CleaningJob, CleaningResult, make_job, swap_of
from pk.compaction.plan import CleanablePart, CompactionLimits, CompactionPlan, plan
from pk.log import swap
from pk.log.index import NO_TIMESTAMP
from pk.log.partition_log import PartitionLog
from pk.log.storage import Disk
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.hold_keeper import HoldKeeper
from pk.server.replica.context import Environment
from pk.server.replica.partition import Partition
from pk.tasks import TaskRegistry
from pk.types import Offset, PartitionKey

#: When a log that could not be cleaned is tried again.
UNCLEANABLE_MS = 600_000
#: Segments that are planned in one step of the event loop; a log counts as one more.
STEP_SEGMENTS = 100
_NEVER = 2**63 - 1


class Cleaner(Protocol):
    """Does the work of one cleaning at a time."""

    @property
    def least_ms(self) -> int:
        """The time limit of the cleaning of an empty log."""
        ...

    async def clean(self, disk: Disk, job: CleaningJob) -> CleaningResult:
        """Write the cleaned segments; see `local_cleaner.clean`, also for what is raised."""
        ...

    async def close(self) -> None: ...


class LogCleaner:
    """Cleans the compacted logs of one broker."""

    def __init__(
        self,
        env: Environment,
        clocks: ClockWatch,
        partitions: Mapping[PartitionKey, Partition],
        changing: TaskRegistry,
        cleaner: Cleaner | None,
        holds: HoldKeeper,
    ) -> None:
        self._env = env
        self._clocks = clocks
        self._partitions = partitions
        self._changing = changing  #: logs that are being truncated or replaced
        self._holds = holds
        self._cleaner = cleaner  #: None = this broker cleans nothing
        self._uncleanable: dict[PartitionKey, int] = {}  #: until when (K4)
        self._tasks = TaskRegistry()

    def start(self) -> None:
        """Start to clean, if the broker is to clean its logs."""
        if self._cleaner is not None and self._env.server["log_cleaner_enable"]:
            self._tasks.spawn(self._run(self._cleaner))

    async def close(self) -> None:
        await self._tasks.close()
        if self._cleaner is not None:
            await self._cleaner.close()

    async def _run(self, cleaner: Cleaner) -> None:
        while True:
            await self._env.clock.sleep_ms(self._env.server["log_cleaner_backoff_ms"])
            try:
                while await self.clean_one(cleaner):
                    pass
            except Exception as bug:
                self._env.bug("log cleaner", bug)

    async def clean_one(self, cleaner: Cleaner) -> bool:
        """Clean the dirtiest log that is due.  Returns False if none is due."""
        now_ms = self._env.now_ms
        known, self._uncleanable = self._uncleanable, {}
        for key, until_ms in known.items():
            if until_ms > now_ms and key in self._partitions:
                self._uncleanable[key] = until_ms
        partition = await self._dirtiest()
        self._env.metrics.uncleanable.set(len(self._uncleanable))
        if partition is None:
            return False
        try:
            return await self._clean(cleaner, partition)
        except (errors.PkError, FileNotFoundError) as error:
            self._not_cleaned(partition, error)
            return True

    async def _dirtiest(self) -> Partition | None:
        """Return the dirtiest log that is due.  Logs that must be rolled first are rolled."""
        dirtiest: Partition | None = None
        ratio = due_ratio = 0.0
        planned = 0
        for partition in list(self._partitions.values()):
            if planned >= STEP_SEGMENTS:  # K1
                planned = 0
                await self._env.clock.sleep_ms(0)
            planned += 1
            if partition.log.cleaned.pending and partition.online:
                await self._finish(partition)
            if not self._cleanable(partition):
                continue
            planned += partition.log.segment_count
            try:
                found = await self._plan(partition)
            except Exception as error:  # K4
                self._not_cleaned(partition, error)
                continue
            ratio = max(ratio, found.dirty_ratio)
            if found.roll and partition.leader is not None and partition.log.roll():
                partition.writer.submit(partition, 0)
            if found.due and (dirtiest is None or found.dirty_ratio > due_ratio):
                dirtiest, due_ratio = partition, found.dirty_ratio
        self._env.metrics.cleaner_dirty_ratio.set(ratio)
        return dirtiest

    def _not_cleaned(self, partition: Partition, error: Exception) -> None:
        """Note that a log cannot be planned or cleaned now (K4)."""
        self._uncleanable[partition.key] = self._env.now_ms + UNCLEANABLE_MS
        self._env.warn("log_not_cleaned", partition=str(partition), why=str(error))
        if not isinstance(error, errors.PkError | FileNotFoundError):
            self._env.bug("planning a cleaning", error)

    def _cleanable(self, partition: Partition) -> bool:
        """Whether the log may be cleaned now; note one that may not be cleaned as it is (K4)."""
        log, key = partition.log, partition.key
        if not log.config.compacted or partition.tiered or not partition.online:
            return False
        if log.damage or log.absent is not None:  # L9: it may hold a marker or a newer record
            self._uncleanable.setdefault(key, self._env.now_ms + UNCLEANABLE_MS)
        busy = key in self._changing or log.torn or log.blank or log.cleaned.running
        return not busy and key not in self._uncleanable

    async def _finish(self, partition: Partition) -> None:
        """Finish the swap that a full disk interrupted; other jobs of the log would do it (K5)."""
        try:
            await partition.writer.disk.write(partition.log.cleaned.finish)
        except errors.PkError as error:
            self._env.metrics.refused(error)

    async def _plan(self, partition: Partition) -> CompactionPlan:
        """Return what a cleaning of the log would do now (C1)."""
        log, wanted = partition.log, partition.settings
        limits = CompactionLimits(
            wanted["min_cleanable_dirty_ratio"],
            wanted["min_compaction_lag_ms"],
            wanted["max_compaction_lag_ms"],
        )
        self._holds.apply(partition)
        stable = log.last_stable_offset(partition.high_watermark)
        work = partial(_plan_of, log, limits, stable, self._clocks.trusted_ms())
        reads = limits.max_compaction_lag_ms < _NEVER
        if reads or log.segment_count > STEP_SEGMENTS:
            return await partition.writer.disk.read(partial(work, reads=reads))
        return work(reads=False)

    def _settled_end(self, partition: Partition) -> Offset:
        """Return the offset below which every copy of the log is cleaned (C4, K3)."""
        leader = partition.leader
        log = partition.log
        if log.log_start < log.local_log_start:
            return 0  # K7
        return partition.settled_end if leader is None else leader.settled_end

    async def _clean(self, cleaner: Cleaner, partition: Partition) -> bool:
        """Clean one log.  Returns False if the result is void: other work comes first then.

        Raises `StorageFull` if the files would not leave the reserve of the disk (L16), and what
        the cleaner and the disk raise.
        """
        env, log, disk = self._env, partition.log, partition.writer.disk
        cuts = log.cuts
        found = await self._plan(partition)  # the log may have been cut since it was chosen
        if not found.due or log.cuts != cuts or not self._cleanable(partition):
            return False
        began_ms, size, tail = env.now_ms, log.size_bytes, swap.tail_of(env.world.new_id())
        job = make_job(
            log,
            found,
            root=disk.storage.root,
            tail=tail,
            settled_end=self._settled_end(partition),
            delete_retention_ms=partition.settings["delete_retention_ms"],
            map_bytes=env.server["log_cleaner_dedupe_buffer_size"],
            now=self._clocks.median_time(),
            least_ms=cleaner.least_ms,
        )
        refusal = partition.writer.space.room_refusal(sum(each.size for each in job.segments))
        if refusal is not None:
            env.metrics.cleanings_without_room.inc()
            raise refusal
        try:
            result = await cleaner.clean(disk, job)
            done = await self._put_in_place(partition, job, result, cuts)
        except (errors.PkError, FileNotFoundError) as error:
            await self._discard(partition, tail)
            if self._changed(partition, cuts):
                return False
            if isinstance(error, errors.CorruptLog):  # K6
                partition.storage_failed(error)
            raise
        if not done:
            await self._discard(partition, tail)
            return False
        if partition.replica is not None:
            partition.replica.stored()  # reports the cleaned end, too
        else:
            partition.settled_end_moved()
        env.metrics.cleaned.labels("read").inc(result.bytes_read)
        env.metrics.cleaned.labels("written").inc(result.bytes_written)
        env.say(
            "log_cleaned",
            partition=str(partition),
            first_dirty=found.first_dirty,
            cleaned_end=result.end,
            size_before=size,
            size_after=log.size_bytes,
            keys=result.keys,
            superseded=result.superseded,
            aborted=result.aborted,
            tombstones=result.tombstones,
            without_key=result.without_key,
            took_ms=env.now_ms - began_ms,
        )
        return True

    async def _put_in_place(
        self, partition: Partition, job: CleaningJob, result: CleaningResult, cuts: int
    ) -> bool:
        """Swap the written files in, on the directory's write lane; False if the cleaning is void
        (K2).
        """
        log, disk = partition.log, partition.writer.disk
        if self._changed(partition, cuts):
            return False
        made = swap_of(job, result)
        segments = await disk.read(partial(log.cleaned.open_written, made))
        if self._changed(partition, cuts) or self._late(job):
            return False
        if self._settled_end(partition) < job.cleaning.settled_end:
            return False
        work = log.cleaned.begin(made, segments)  # at once, before a truncation is queued
        if work is None:
            return False
        try:
            await disk.write(work)
        finally:
            log.cleaned.end_job()
        return True

    def _changed(self, partition: Partition, cuts: int) -> bool:
        """Whether the log was closed, deleted or replaced, or is or was cut (K2)."""
        key = partition.key
        mine = self._partitions.get(key) is partition and partition.online
        return not mine or key in self._changing or partition.log.cuts != cuts

    def _late(self, job: CleaningJob) -> bool:
        deadline_ms, now = job.cleaning.deadline_ms, self._clocks.median_time()
        return deadline_ms is not None and (now is None or now.latest_ms > deadline_ms)

    async def _discard(self, partition: Partition, tail: str) -> None:
        """Remove the files of a cleaning, unless a full disk interrupted their swap."""
        if partition.log.cleaned.pending:
            return
        disk, path = partition.writer.disk, partition.log.path
        try:
            await disk.write(partial(swap.discard, disk.storage, path, tail))
        except (errors.PkError, FileNotFoundError) as error:  # the next opening removes them
            self._env.warn("cleaned_files_left", partition=str(partition), why=str(error))


def _plan_of(
    log: PartitionLog,
    limits: CompactionLimits,
    last_stable_offset: Offset,
    now_ms: int | None,
    *,
    reads: bool,
) -> CompactionPlan:
    """Plan a cleaning of one log, on any thread.

    reads: read the timestamp of each dirty segment's first batch, for max_compaction_lag_ms
    """
    first: Mapping[Offset, int] = log.cleaned.first_timestamps() if reads else {}
    parts = [
        CleanablePart(*each[:3], first.get(each.base_offset, NO_TIMESTAMP), each.max_timestamp)
        for each in log.segments
    ]
    return plan(
        parts[:-1],
        limits,
        active=parts[-1],
        log_start=log.local_log_start,
        cleaned_end=log.cleaned.end,
        last_stable_offset=last_stable_offset,
        hold=log.retention_hold,
        now_ms=now_ms,
    )
