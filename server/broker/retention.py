"""Retention of a broker's partitions: what leaves the local log and the tier, and when.

World-generic.  The scheduler turns a *wheel* at each tick: every partition is visited once per
`log_retention_check_interval_ms`, and the visits are spread evenly over the ticks of that interval.
A visit runs beside the tick.

Retention of a partition, in this order (rules T6, T9, L10)
  1. The broker deletes segments beyond `retention_ms` or `retention_bytes`.  For a tiered topic
     these limits count tier and local log together, so it also deletes offsets that only the tier
     has.  It does not pass rows that another engine removed from the table (T17).
  2. Of a tiered topic the broker drops local segments only below `droppable_end`, after a HEAD of
     every file that covers them.
  3. log_start moves first and is SYNCED.  Then segments are renamed, and removed after
     `file_delete_delay_ms`.
  4. Nothing at or above a hold of a query expires (S1, hold_keeper.py).  A hold does not keep local
     segments that the tier has.
  5. While the wall clock is not trusted (clock_trust.py), no record and no producer expires by age.
     The log would not recognise a retry of an expired producer.  Requested deletions and retention
     by size need no clock and continue: a client waits until every in-sync follower has carried out
     its deletion.

Invariants
  U1  No data leaves the disk before log_start passed it durably, or the tier confirmed it.
  U2  A failure of one partition does not stop the retention of other partitions.
  U3  Only the leader that decided retention carries it out, and it checks this after every answer
      of the tier.  Meanwhile another broker may have become the leader, and the directory's writer
      may truncate the log.  A segment that is begun during the truncation would leave a hole.
  U4  A disk or store that hangs blocks at most VISITS_MAX visits of each directory.
  U5  A leader expires rows of the table, which all replicas share, only in contact with the
      controller.  Without contact, another broker may lead under other settings (rules T9, R6).
  U6  A log start moves in a visit of its own.  The client that asked for a deletion waits for every
      in-sync replica, so a visit that waits for the store (T6) must not delay it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from pk import errors
from pk.log.manager import LogManager
from pk.log.plan import RetentionPlan
from pk.log.storage import Disk
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.disk_jobs import DiskJobs
from pk.server.broker.due_work import DueWork
from pk.server.broker.hold_keeper import HoldKeeper
from pk.server.replica.context import ControllerContact, Environment
from pk.server.replica.partition import Partition
from pk.server.tier.client import TierClient
from pk.tasks import TaskRegistry
from pk.types import NONE, Offset, PartitionKey

#: Time between two turns of the wheel.
TICK_MS = 250
#: Later than any record: a look-up by this time reads no file.
TIME_MAX = 2**63 - 1
#: Partitions of one directory whose retention is under way at once.
VISITS_MAX = 16


#: Visits under way of each directory, named by partition.
_Visits = dict[Disk, TaskRegistry]


class RetentionVisits:
    """The wheel, and the visits under way."""

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        lifecycle: ControllerContact,
        clocks: ClockWatch,
        partitions: Mapping[PartitionKey, Partition],
        changing: TaskRegistry,
        tier: TierClient,
        due: DueWork,
        jobs: DiskJobs,
        holds: HoldKeeper,
    ) -> None:
        self._env = env
        self._manager = manager
        self._lifecycle = lifecycle
        self._clocks = clocks
        self._partitions = partitions
        self._changing = changing  #: logs that are being truncated or replaced
        self._tier = tier
        self._due = due
        self._jobs = jobs
        self._holds = holds
        self._queue: deque[PartitionKey] = deque()
        self._credit = 0.0  #: visits that are due by now
        #: (due, job): renamed segments that wait for their delay
        self._pending_delete: dict[Disk, deque[tuple[int, Callable[[], None]]]] = {}
        self._visits: _Visits = {}
        self._starts: _Visits = {}  #: log starts that are being written to a disk (U6)

    async def close(self) -> None:
        for each in (*self._visits.values(), *self._starts.values()):
            await each.close()

    def turn(self) -> None:
        """Start the visits that are due."""
        for key in list(self._due.retain_now):
            self._visit(key)
        if not self._queue:
            self._queue.extend(self._partitions)
            self._credit = 0.0
        interval_ms = self._env.server["log_retention_check_interval_ms"]
        owed = self._credit + len(self._partitions) * TICK_MS / interval_ms
        self._credit = min(owed, float(len(self._partitions)))
        while self._credit >= 1 and self._queue:
            self._credit -= 1
            self._visit(self._queue.popleft())

    def _visit(self, key: PartitionKey) -> None:
        """Start the visits of a partition, or later if too many are under way in its directory.

        A disk or store that hangs blocks at most VISITS_MAX visits of each directory (U4).
        """
        partition = self._partitions.get(key)
        if partition is None:
            self._due.retain_now.pop(key, None)
            return
        if _known_log_start(partition) > partition.log.log_start:
            self._begin(self._starts, partition, self.follow_log_start)  # asks for another visit
        self._begin(self._visits, partition, self.retain)

    def _begin(
        self,
        visits: _Visits,
        partition: Partition,
        work: Callable[[PartitionKey], Awaitable[None]],
    ) -> None:
        """Start a visit, unless one of its kind runs; if the directory has too many, do it
        later.
        """
        key = partition.key
        here = visits.setdefault(partition.writer.disk, TaskRegistry())
        if key in here:
            return
        if len(here) >= VISITS_MAX:
            self._due.retain_soon(key)
            return
        self._due.retain_now.pop(key, None)
        here.spawn(self._jobs.guarded("retention", work(key)), key)

    async def follow_log_start(self, key: PartitionKey) -> None:
        """Take over the log start of the leader or of the table; no call waits for the store (T9,
        U6)."""
        partition = self._partitions.get(key)
        if partition is None or not partition.online:
            return
        told = _known_log_start(partition)
        if told > partition.log.log_start:
            await self._manager.move_log_starts({key: told})
            partition.bounds_moved(urgent=partition.leader is not None)
            if partition.replica is not None:
                partition.replica.log_start_moved()
            self._due.retain_soon(key)  # the segments below the new log start may be dropped now

    async def retain(self, key: PartitionKey) -> None:
        """Apply retention to one partition."""
        partition = self._partitions.get(key)
        if partition is None or not partition.online:
            return
        await self._holds.visit(partition)
        leader = partition.leader
        if leader is None:
            await self._retain_replica(partition)
            return
        if partition.tiered and self._may_expire(partition):
            await self._expire_in_tier(partition)
        if partition.leader is not leader:
            return  # U3
        log = partition.log
        plan = self._plan(partition)
        if plan.roll and log.roll():
            partition.writer.submit(partition, 0)
            self._due.retain_soon(key)  # the next tick plans again, with the new segment written
            return
        if plan.drop:
            await self._drop(partition, plan)
        elif plan.log_start > log.log_start:  # T9: records below are no longer read
            await self._manager.move_log_starts({key: plan.log_start})
            partition.bounds_moved(urgent=True)

    def _may_expire(self, partition: Partition) -> bool:
        """Whether this broker may decide what expires (U5).

        Local data that the tier confirmed may be dropped in any case.
        """
        return partition.leader is not None and (
            not partition.tiered or self._lifecycle.in_contact()
        )

    def _plan(self, partition: Partition) -> RetentionPlan:
        log = partition.log
        self._holds.apply(partition)
        plan = log.retention_plan(self._clocks.trusted_ms(), partition.high_watermark)
        return plan if self._may_expire(partition) else plan._replace(log_start=log.log_start)

    async def _retain_replica(self, partition: Partition) -> None:
        """Drop a follower's records below the leader's log start (rule R5).

        It also drops tiered data that the local retention of this disk need not keep.  The leader
        reports its log start and the end of the tier.
        """
        log = partition.log
        plan = self._plan(partition)
        ends = {each.base_offset: each.next_offset for each in log.segments}
        drop = tuple(base for base in plan.drop if partition.tiered or ends[base] <= log.log_start)
        if drop and partition.replica is not None:
            await self._drop(partition, plan._replace(drop=drop))

    async def _expire_in_tier(self, partition: Partition) -> None:
        """Apply topic retention to tier and local log together.

        log_start moves, and the table's owner removes the rows (T9).  It stops at the first row
        that is missing from the table (T17), because the age of missing rows is unknown; a reader
        that asks for them gets DataLoss.
        """
        log, tier, wanted = partition.log, partition.tier, partition.settings
        leader = partition.leader
        if (
            tier.tiered_end == NONE
            or log.log_start >= log.local_log_start
            or "delete" not in wanted["cleanup_policy"]
        ):
            return
        target = await self._expired_in_tier(partition, known=True)
        if target > log.log_start:
            # the tier process may know an old version, which other engines have changed (T17)
            target = await self._expired_in_tier(partition, known=False)
        hold = self._holds.apply(partition)
        target = target if hold is None else min(target, hold)
        if target > log.log_start and partition.leader is leader and self._may_expire(partition):
            await self._manager.move_log_starts({partition.key: target})
            partition.bounds_moved(urgent=True)

    async def _expired_in_tier(self, partition: Partition, *, known: bool) -> Offset:
        """Return the offset up to which topic retention moves log_start: of the version that the
        tier process knows, or of the newest one."""
        log, tier, wanted = partition.log, partition.tier, partition.settings
        target: Offset = log.log_start
        missing_from = [NONE]
        now_ms = self._clocks.trusted_ms()
        by_age = wanted["retention_ms"] >= 0 and now_ms is not None
        if by_age or not known:
            cutoff = now_ms - wanted["retention_ms"] if by_age and now_ms is not None else TIME_MAX
            try:
                found = await self._tier.offset_for_time(partition, cutoff, known=known)
            except errors.TierUnavailable:
                if by_age:
                    raise
                return target  # local data goes on being dropped
            missing_from.append(found.missing_from if found.HasField("missing_from") else NONE)
            if by_age:
                local = log.local_log_start  # up to this offset the tier is asked
                target = local if found.offset == NONE else min(found.offset, local)
        if wanted["retention_bytes"] >= 0:
            target = max(target, await self._over_size(partition, wanted["retention_bytes"]))
        missing_from.append(tier.missing_from)
        return min([target, *(each for each in missing_from if each != NONE)])

    @staticmethod
    async def _over_size(partition: Partition, allowed: int) -> Offset:
        """Return the offset below which rows must be removed so that the log fits `allowed` bytes.

        Tier and local log count together, and records that both hold count once.  The size of the
        tier below an offset is interpolated linearly.
        """
        log, tier = partition.log, partition.tier
        marks = [max(tier.tiered_end, log.local_log_start), log.written_end]
        above, end = await partition.writer.disk.read(partial(log.bytes_at, marks))
        excess = tier.tier_bytes + (end - above) - allowed
        covered = tier.tiered_end - tier.start
        if excess <= 0 or covered <= 0 or tier.tier_bytes <= 0:
            return log.log_start
        return min(
            tier.start + covered * min(excess, tier.tier_bytes) // tier.tier_bytes,
            log.local_log_start,
        )

    async def _drop(self, partition: Partition, plan: RetentionPlan) -> None:
        log = partition.log
        made = log.cuts, log.cleaned.count
        end = max(each.next_offset for each in log.segments if each.base_offset in plan.drop)
        if partition.tiered and end > log.local_log_start:  # nothing below log_start needs the tier
            missing = await self._tier.confirm(partition, log.local_log_start, end)
            if missing:  # T6: the tier uploads them again; until then nothing is dropped
                self._env.metrics.tier_missing.inc(len(missing))
                return
            made = log.cuts, log.cleaned.count
            plan = self._plan(partition)
            plan = plan._replace(drop=tuple(base for base in plan.drop if base < end))
            if not plan.drop:
                return
        # U1; also for a start that does not move: once tiered data has left the disk, only the
        # checkpoint says that the log begins before its first segment.
        await self._manager.move_log_starts({partition.key: plan.log_start})
        if self._partitions.get(partition.key) is not partition:
            return  # the topic was deleted meanwhile
        changes = partition.key in self._changing or log.cleaned.running
        if changes or made != (log.cuts, log.cleaned.count):
            # the log is or was truncated, replaced or cleaned in its directory's writer: the plan
            # is void
            return
        rename, remove = log.drop_segments(plan)
        self._env.metrics.dropped.labels(plan.reason or "retention").inc(len(plan.drop))
        partition.bounds_moved()
        await partition.writer.disk.write(rename)
        due = self._env.clock.monotonic_ms() + log.config.file_delete_delay_ms
        self._pending_delete.setdefault(partition.writer.disk, deque()).append((due, remove))

    def remove_pending_delete(self, now_ms: int) -> None:
        for disk, pending_delete in self._pending_delete.items():
            if any(due <= now_ms for due, _ in pending_delete):
                self._jobs.beside("removing segments", disk, partial(self._remove, disk, now_ms))

    async def _remove(self, disk: Disk, now_ms: int) -> None:
        pending_delete = self._pending_delete[disk]
        for _ in range(len(pending_delete)):
            due, remove = pending_delete.popleft()
            if due > now_ms:
                pending_delete.append((due, remove))
                continue
            await disk.write(remove)


def _known_log_start(partition: Partition) -> Offset:
    """Return the log start that was given for `partition`, at most its high watermark."""
    return min(partition.leader_log_start, partition.high_watermark)
