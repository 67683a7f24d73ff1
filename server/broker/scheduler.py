"""The periodic work of a broker: retention, flushes, checkpoints, gauges, in one task (rule P6).

World-generic.  The task runs in ticks.  Each tick visits some of the partitions: every partition is
visited once per `log_retention_check_interval_ms`, and the visits are spread evenly over the ticks
of that interval (the *wheel*).  Work that needs a disk runs in jobs beside the tick, one job of a
kind at a time for each directory.  Work that becomes due during a job waits for the next one.

Retention of a partition, in this order (rules T6, T9, L10)
  1. Segments older or larger than the topic allows may go.  For a tiered topic so may the offsets
     that only the tier holds, because `retention_ms` and `retention_bytes` count tier and local log
     together, but not past rows that another engine removed from the table (T17).
  2. Local segments of a tiered topic go only below `droppable_end`, after a HEAD of every file that
     covers them.
  3. log_start moves first and is SYNCED.  Then segments are renamed, and removed after
     `file_delete_delay_ms`.
  4. While the wall clock is not trusted (clock_trust.py) nothing expires by age.  Nor do producers,
     because the log would not recognise a retry of an expired producer.  Requested deletions and
     retention by size need no clock and continue: a client waits until every in-sync follower has
     carried out its deletion.

Invariants
  U1  No data leaves the disk before log_start passed it durably, or the tier confirmed it.
  U2  A failure of one partition stops neither the wheel nor the retention of other partitions.
  U3  Only the leader that decided retention carries it out.  When the tier has answered, another
      broker may lead, and the log may be truncated in its directory's writer; a segment that is
      begun during that truncation would leave a hole.
  U4  No tick waits for a disk or a store.  If one hangs, a dead follower must still leave the ISR,
      because partitions of every other directory may wait for its confirmation.  The jobs of other
      directories do not wait either.
  U5  A leader expires rows of the table, which all replicas share, only in contact with the
      controller.  Without contact, another broker may lead under other settings (rules T9, R6).
  U6  A log start moves in a visit of its own.  The client that asked for a deletion waits for every
      in-sync replica, so a visit that waits for the store (T6) must not delay it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from pk import errors
from pk.log.plan import RetentionPlan
from pk.log.storage import Disk
from pk.server.replica.directory_writer import LogDirWriter
from pk.server.replica.partition import Partition
from pk.server.tier.health import TierHealth
from pk.tasks import TaskRegistry
from pk.types import NONE, Offset, PartitionKey

if TYPE_CHECKING:
    from pk.server.broker.core import BrokerCore

TICK_MS = 250
GAUGES_MS = 5_000
#: Interval of a directory's free space measurements; a full one is measured at every tick (L16).
SPACE_MS = 1_000
#: Interval at which the broker stores that it runs and trusts its clock.
NOTE_RUN_MS = 30_000
#: Partitions of one directory whose retention is under way at once.
VISITS_MAX = 16


#: Visits under way of each directory, named by partition.
_Visits = dict[Disk, TaskRegistry]


class BrokerScheduler:
    """Runs the periodic work of one broker.  Call `start` once the partitions are loaded."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        clock = core.clock
        self._queue: deque[PartitionKey] = deque()
        self._credit = 0.0  #: visits that are due by now
        #: (due, job): renamed segments that wait for their delay
        self._pending_delete: dict[Disk, deque[tuple[int, Callable[[], None]]]] = {}
        self._unflushed: dict[Disk, dict[PartitionKey, None]] = {}  #: whose flush is due
        self._visits: _Visits = {}
        self._starts: _Visits = {}  #: log starts on their way to a disk (U6)
        self._jobs = TaskRegistry()  #: U4; by kind of work and directory
        self._checkpoint_at = (
            clock.monotonic_ms() + core.server["log_flush_offset_checkpoint_interval_ms"]
        )
        self._gauges_at = 0
        self._tier_health = TierHealth()
        self._measured_ms: dict[Disk, int] = {}  #: when the last measurement of each began
        self._noted = 0  #: boottime of the last run that was stored; 0 = none by this process
        self._led: deque[PartitionKey] = deque()  #: led partitions, next to check first
        self._led_all = 0  #: the length of `_led` when the round began
        self._turns = 0.0
        self._tasks = TaskRegistry()

    def start(self) -> None:
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.close()
        for each in (*self._visits.values(), *self._starts.values(), self._jobs):
            await each.close()

    async def _run(self) -> None:
        clock = self._core.clock
        while True:
            await clock.sleep_ms(TICK_MS)
            try:
                self._tick(clock.monotonic_ms())
            except Exception as bug:  # U2
                self._core.bug("upkeep", bug)

    def _tick(self, now_ms: int) -> None:
        """Start the work that is due; nothing here waits for a disk or a store (U4)."""
        core = self._core
        core.clocks.gauges()
        self._note_run()
        self._flush_due(now_ms)
        self._remove_pending_delete(now_ms)
        self._consider_followers()
        core.notice_failed_directories()
        self._measure_due(now_ms)
        self._turn_wheel()
        if now_ms >= self._checkpoint_at:
            interval_ms = core.server["log_flush_offset_checkpoint_interval_ms"]
            self._checkpoint_at = now_ms + interval_ms
            forget_ms = core.clocks.forget_before_ms()
            for each in core.manager.directories:
                work = partial(core.manager.checkpoint, each, forget_ms)
                self._beside("checkpoint", each.disk, work)
        if now_ms >= self._gauges_at:
            self._gauges_at = now_ms + GAUGES_MS
            self._gauges()

    def _note_run(self) -> None:
        """Store, at once and then every NOTE_RUN_MS, that the broker trusts its clock (L10)."""
        core = self._core
        run = core.clocks.last_run()
        if run is None or (self._noted and run.boottime_ms - self._noted < NOTE_RUN_MS):
            return
        self._noted = run.boottime_ms
        for each in core.manager.directories:
            self._beside("last run", each.disk, partial(core.clocks.note, each, run))

    def _beside(self, what: str, disk: Disk, work: Callable[[], Awaitable[None]]) -> None:
        """Run a job beside the tick, unless the previous job of its kind still runs there (U4)."""
        job = (what, disk)
        if job not in self._jobs:
            self._jobs.spawn(self._guarded(what, work()), job)

    async def _guarded(self, what: str, work: Awaitable[None]) -> None:
        """Await `work`; count errors of pk as refusals and report other exceptions as bugs (U2)."""
        try:
            await work
        except errors.PkError as error:
            self._core.metrics.refused(error)
        except Exception as bug:
            self._core.bug(what, bug)

    def _consider_followers(self) -> None:
        """Have followers that make no progress removed from the ISR (replica/isr M1).

        Every led partition is checked twice per `replica_lag_time_max_ms`.
        """
        core = self._core
        if not self._led:
            self._led.extend(
                key
                for key, each in core.partitions.items()
                if each.leader is not None and len(each.leader.replicas) > 1
            )
            self._led_all = len(self._led)
        turns = 2 * self._led_all * TICK_MS / core.server["replica_lag_time_max_ms"]
        self._turns = min(self._turns + turns, float(len(self._led)))
        while self._turns >= 1 and self._led:
            self._turns -= 1
            partition = core.partitions.get(self._led.popleft())
            if partition is not None:
                core.alter_partition.consider(partition)

    # -- flush -----------------------------------------------------------------------------------

    def _flush_due(self, now_ms: int) -> None:
        core = self._core
        for key in core.flushes.pop_due(now_ms):
            partition = core.partitions.get(key)
            if partition is not None:
                self._unflushed.setdefault(partition.writer.disk, {})[key] = None
        for disk, due in self._unflushed.items():
            if due:
                self._beside("flush", disk, partial(self._flush, disk))

    async def _flush(self, disk: Disk) -> None:
        core = self._core
        due, self._unflushed[disk] = self._unflushed[disk], {}
        for key in due:
            partition = core.partitions.get(key)
            if partition is None or not partition.online:
                continue
            if partition.log.synced_end < partition.log.written_end:
                await flush(core, partition)
            else:  # a checkpoint synced it, which reports nothing
                partition.synced(partition.log.synced_end)
            if (
                partition.settings["flush_on_ack"]
                and partition.log.synced_end < partition.log.log_end
            ):
                core.flushes.set(key, core.now_ms)  # appends that were decided before the flush

    # -- retention -------------------------------------------------------------------------------

    def _turn_wheel(self) -> None:
        """Start the visits that are due."""
        core = self._core
        for key in list(core.retain_now):
            self._visit(key)
        if not self._queue:
            self._queue.extend(core.partitions)
            self._credit = 0.0
        interval_ms = core.server["log_retention_check_interval_ms"]
        owed = self._credit + len(core.partitions) * TICK_MS / interval_ms
        self._credit = min(owed, float(len(core.partitions)))
        while self._credit >= 1 and self._queue:
            self._credit -= 1
            self._visit(self._queue.popleft())

    def _visit(self, key: PartitionKey) -> None:
        """Start the visits of a partition, or later if too many are under way in its directory.

        A disk or store that hangs blocks at most VISITS_MAX visits of each directory (U4).
        """
        core = self._core
        partition = core.partitions.get(key)
        if partition is None:
            core.retain_now.pop(key, None)
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
        core, key = self._core, partition.key
        here = visits.setdefault(partition.writer.disk, TaskRegistry())
        if key in here:
            return
        if len(here) >= VISITS_MAX:
            core.retain_soon(key)
            return
        core.retain_now.pop(key, None)
        here.spawn(self._guarded("retention", work(key)), key)

    async def follow_log_start(self, key: PartitionKey) -> None:
        """Take over the log start of the leader, or of the table, without the store (T9, U6)."""
        partition = self._core.partitions.get(key)
        if partition is None or not partition.online:
            return
        told = _known_log_start(partition)
        if told > partition.log.log_start:
            await self._core.manager.move_log_starts({key: told})
            partition.bounds_moved(urgent=partition.leader is not None)
            if partition.replica is not None:
                partition.replica.log_start_moved()
            self._core.retain_soon(key)  # segments below may go now

    async def retain(self, key: PartitionKey) -> None:
        """Apply retention to one partition."""
        partition = self._core.partitions.get(key)
        if partition is None or not partition.online:
            return
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
            self._core.retain_soon(key)  # the next tick plans again, with the new segment written
            return
        if plan.drop:
            await self._drop(partition, plan)
        elif plan.log_start > log.log_start:  # T9: records below are no longer read
            await self._core.manager.move_log_starts({key: plan.log_start})
            partition.bounds_moved(urgent=True)

    def _may_expire(self, partition: Partition) -> bool:
        """Whether this broker may decide what expires (U5).

        Local data that the tier confirmed may be dropped in any case.
        """
        return partition.leader is not None and (
            not partition.tiered or self._core.lifecycle.in_contact()
        )

    def _plan(self, partition: Partition) -> RetentionPlan:
        log = partition.log
        plan = log.retention_plan(self._core.clocks.trusted_ms(), partition.high_watermark)
        return plan if self._may_expire(partition) else plan._replace(log_start=log.log_start)

    async def _retain_replica(self, partition: Partition) -> None:
        """Drop a follower's records below the leader's log start (rule R5).

        Of tiered data it also drops what its own disk need not keep.  The leader reports its log
        start and how far the tier has the log.
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
        target: Offset = log.log_start
        missing_from = [NONE]
        local = log.local_log_start  # up to where the tier is asked
        now_ms = self._core.clocks.trusted_ms()
        if wanted["retention_ms"] >= 0 and now_ms is not None:
            cutoff = now_ms - wanted["retention_ms"]
            found = await self._core.tier.offset_for_time(partition, cutoff)
            target = local if found.offset == NONE else min(found.offset, local)
            missing_from.append(found.missing_from if found.HasField("missing_from") else NONE)
        if wanted["retention_bytes"] >= 0:
            target = max(target, await self._over_size(partition, wanted["retention_bytes"]))
        missing_from.append(tier.missing_from)
        target = min([target, *(each for each in missing_from if each != NONE)])
        if target > log.log_start and partition.leader is leader and self._may_expire(partition):
            await self._core.manager.move_log_starts({partition.key: target})
            partition.bounds_moved(urgent=True)

    @staticmethod
    async def _over_size(partition: Partition, allowed: int) -> Offset:
        """Return the offset below which rows must go, so that the log fits into `allowed` bytes.

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
        core, log = self._core, partition.log
        cuts = log.cuts
        end = max(each.next_offset for each in log.segments if each.base_offset in plan.drop)
        if partition.tiered and end > log.local_log_start:  # nothing below log_start needs the tier
            missing = await core.tier.confirm(partition, log.local_log_start, end)
            if missing:  # T6: the tier uploads them again; until then nothing is dropped
                core.metrics.tier_missing.inc(len(missing))
                return
            cuts = log.cuts
            plan = self._plan(partition)
            plan = plan._replace(drop=tuple(base for base in plan.drop if base < end))
            if not plan.drop:
                return
        # U1; also for a start that does not move: once tiered data has left the disk, only the
        # checkpoint says that the log begins before its first segment.
        await core.manager.move_log_starts({partition.key: plan.log_start})
        if core.partitions.get(partition.key) is not partition:
            return  # the topic was deleted meanwhile
        if partition.key in core.fetchers.changing or log.cuts != cuts:
            # the log is or was truncated or replaced in its directory's writer: the plan is void
            return
        rename, remove = log.drop_segments(plan)
        core.metrics.dropped.labels(plan.reason or "retention").inc(len(plan.drop))
        partition.bounds_moved()
        await partition.writer.disk.write(rename)
        due = core.clock.monotonic_ms() + log.config.file_delete_delay_ms
        self._pending_delete.setdefault(partition.writer.disk, deque()).append((due, remove))

    def _remove_pending_delete(self, now_ms: int) -> None:
        for disk, pending_delete in self._pending_delete.items():
            if any(due <= now_ms for due, _ in pending_delete):
                self._beside("removing segments", disk, partial(self._remove, disk, now_ms))

    async def _remove(self, disk: Disk, now_ms: int) -> None:
        pending_delete = self._pending_delete[disk]
        for _ in range(len(pending_delete)):
            due, remove = pending_delete.popleft()
            if due > now_ms:
                pending_delete.append((due, remove))
                continue
            await disk.write(remove)

    # -- gauges ----------------------------------------------------------------------------------

    def _gauges(self) -> None:
        core, metrics = self._core, self._core.metrics
        hw_lag = lso_lag = tier_lag = problems = offline = leading = damaged = 0
        under = under_min = replica_lag = 0
        failing: dict[str, errors.PkError] = {}
        for partition in core.partitions.values():
            if not partition.online:
                offline += 1
            if partition.leader is None:
                continue
            leading += 1
            leader = partition.leader
            under += len(leader.isr) < len(leader.replicas)
            under_min += len(leader.isr) < leader.in_sync_required
            replica_lag += sum(
                leader.log_end - leader.end_of(each)
                for each in leader.replicas
                if each != core.node_id
            )
            for violation in partition.violations():
                metrics.violations.inc()
                core.warn("invariant_violated", what=violation)
            stable = partition.last_stable_offset
            hw_lag += partition.log.written_end - partition.high_watermark
            lso_lag += partition.high_watermark - stable
            if partition.tiered:
                tier_lag += max(0, stable - partition.log.tiered_end)
                if partition.tier.problem is not None:
                    problems += 1
                    failing[partition.topic] = partition.tier.problem
            damaged += bool(partition.log.damage)
        for event, facts in self._tier_health.observe(failing, core.clock.monotonic_ms()):
            core.warn(event, **facts)
        metrics.hw_lag.set(hw_lag)
        metrics.under_replicated.set(under)
        metrics.under_min_isr.set(under_min)
        metrics.replica_lag.set(replica_lag)
        metrics.lso_lag.set(lso_lag)
        metrics.tier_lag.set(tier_lag)
        metrics.tier_problems.set(problems)
        metrics.damaged_partitions.set(damaged)
        metrics.partitions.labels("leading").set(leading)
        metrics.partitions.labels("offline").set(offline + len(core.replicas.unopened()))
        metrics.offline_directories.set(len(core.offline_directories()))
        metrics.parked.set(len(core.purgatory))
        metrics.in_contact.set(core.lifecycle.in_contact())
        for writer in core.writers():
            disk = writer.disk
            metrics.write_queue.labels(disk.storage.root).set(writer.queued_bytes)
            metrics.full.labels(disk.storage.root).set(writer.space.full)

    # -- free space (rule L16) -------------------------------------------------------------------

    async def measure_all(self) -> None:
        """Measure every directory before the first tick; a directory that gives an error has
        failed.
        """
        core = self._core
        for each in core.manager.directories:
            await self._guarded("free space", self._measure(core.writer_of(each.disk)))

    def _measure_due(self, now_ms: int) -> None:
        for writer in self._core.writers():
            wait_ms = 0 if writer.space.full else SPACE_MS
            if now_ms - self._measured_ms.get(writer.disk, NONE) >= wait_ms:
                self._beside("free space", writer.disk, partial(self._measure, writer))

    async def _measure(self, writer: LogDirWriter) -> None:
        """Measure the free space off the loop, because an unreachable file system may hang (U4)."""
        core, storage = self._core, writer.disk.storage
        self._measured_ms[writer.disk] = core.now_ms
        # Appends decided before or during the measurement may not be written yet.
        unwritten, spent = writer.queued_bytes, writer.space.spent
        free = 0 if storage.failed else await writer.disk.read(storage.free_bytes)
        core.metrics.free.labels(storage.root).set(free)
        if storage.failed is None:
            unwritten += writer.space.spent - spent
            writer.space.measured(free - unwritten, core.now_ms)


def _known_log_start(partition: Partition) -> Offset:
    """Return the log start that was given for `partition`, at most its high watermark."""
    return min(partition.leader_log_start, partition.high_watermark)


async def flush(core: BrokerCore, partition: Partition) -> None:
    """Make everything that is written to the partition's log SYNCED.

    A failed fsync takes the directory offline and is never retried (L2).
    """
    try:
        synced_end = await partition.writer.disk.write(partition.log.flush)
    except errors.StorageFull as passing:  # no descriptor for a sealed segment: nothing is lost
        core.metrics.refused(passing)
        core.flushes.set(partition.key, core.now_ms)  # at the next tick
        return
    except errors.PkError as error:
        core.metrics.refused(error)
        core.storage_failed(partition, error)
        return
    partition.synced(synced_end)
