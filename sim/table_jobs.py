"""Maintenance jobs of a run: a compaction and a snapshot of each maintained table, again and again.

A job holds the lease, reads a version of the table, thinks, and hands files over to the owner; the
plan, the passes and the hand-over are production code.  Some drivers die, some are late: they lose
the lease, sleep, and hand over beside their successor; some send each hand-over twice.  Meanwhile
another engine rewrites files and deletes rows (table_faults.py), an operator asks for a repair,
which is refused in a compacted topic, and retention by size removes rows.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable
from typing import Any

from pk import errors
from pk.client.admin import described
from pk.client.admin.tier import ask_leaders
from pk.client.maintenance_lease import ask_owner, lowest_starts, time_of
from pk.clock import MedianTime
from pk.compaction.plan import CompactionLimits
from pk.sim.checkers import Violation
from pk.sim.objects import SimTable
from pk.sim.options import TopicPlan
from pk.sim.table_place import Passes, SimPlace, TableClient, place_of
from pk.sim.table_snapshots import SnapshotRuns
from pk.sim.workload import cluster_of, watched
from pk.sparkconnector.maintenance import compaction_plan, optimize_plan
from pk.sparkconnector.maintenance.compaction import hand_over
from pk.sparkconnector.maintenance.compaction_plan import PartitionCleaning, TopicLimits
from pk.sparkconnector.maintenance.compaction_rows import RewrittenRun
from pk.sparkconnector.maintenance.optimize import MergeTask, merge
from pk.sparkconnector.maintenance.optimize import hand_over as merged_over
from pk.sparkconnector.maintenance.tables import TableVersion
from pk.tiering.table import Snapshot
from pk.wire import pk_pb2 as wire
from pk.world import World

#: A cleaning must be in place within this time (machine.LANDS_WITHIN_MS).
CLEANING_MS = 4_500
LEASE_MS, CALL_MS, COMMIT_MS = 1_500, 1_000, 6_000
ROUNDS_MAX = 6
#: How long a driver thinks between two steps, and how long a late one sleeps.
THINKS_MS, SLEEPS_MS, LIVES_MS = (1.0, 600.0), (1_600.0, 6_000.0), (20.0, 3_000.0)
#: Files that a hand-over has: so few that a cleaning needs several, or as many as in production.
ACTIONS_MAX = (3, 8, 950)
TARGET_BYTES = 8_000
#: The shares of jobs that merge files, and of jobs that a snapshot follows.
MERGES, SNAPSHOTS = 0.3, 0.3
#: The share of jobs refused because rows are missing, after which an operator asks for a repair.
REPAIRS = 0.5
#: Errors that a job may end with: others change the table, the store or a clock is away.
EXPECTED = (
    errors.RetriableError,
    errors.LeaseHeld,
    errors.DamagedTierFile,
    errors.UnknownTopicId,
    errors.UnknownTopicOrPartition,
    errors.TierTableChanged,
)


class DriverFate(enum.Enum):
    """What becomes of a driver."""

    LIVES = "lives"
    DIES = "dies"
    LATE = "late"  #: it loses the lease, and hands over beside its successor
    TWICE = "twice"  #: it sends each hand-over twice


class SimLease:
    """The lease of one driver (client/maintenance_lease, without threads)."""

    def __init__(self, world: World, client: TableClient, topic: str, name: str) -> None:
        self._world, self._client, self._topic = world, client, topic
        self.cluster = cluster_of(world, client.shared.bootstrap, name)
        self._name = name
        self.token = 0
        self.lost = False
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """Ask for the lease.  Raises `LeaseHeld`."""
        request = wire.AcquireLeaseRequest(
            topic=self._topic, holder=self._name, kind="exclusive", ttl_ms=LEASE_MS
        )
        reply: Any = await self.cluster.call_any(request, timeout_ms=CALL_MS)
        self.topic_id, self.token = reply.topic_id, reply.token
        self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        while not self.lost:
            await self._world.clock.sleep_ms(LEASE_MS / 3)
            try:
                await self.now()
            except errors.LeaseHeld:
                self.lost = True
            except errors.PkError:
                continue

    async def now(self) -> MedianTime | None:
        """Renew the lease and return the time by the brokers' clocks; None = none is trusted."""
        request = wire.RenewLeaseRequest(topic_id=self.topic_id, token=self.token)
        reply: Any = await self.cluster.call_any(request, timeout_ms=CALL_MS)
        return time_of(reply)

    def sleep(self) -> None:
        """Renew no longer."""
        if self._renewing is not None:
            self._renewing.cancel()

    async def commit(self, change: wire.CommitToTableRequest) -> None:
        """Hand files over; V32 is checked if that changed the table."""
        client, topic = self._client, self._topic
        change.topic, change.topic_id, change.lease_token = topic, self.topic_id, self.token
        sent_ms = client.shared.now_ms()
        before = client.store.snapshot(topic, self.topic_id)
        there = before is not None and all(add.path in before.files for add in change.adds)
        await self.cluster.retrying(
            lambda ms: ask_owner(self.cluster, change, ms),
            COMMIT_MS,
            final=errors.UnknownTierRange,
        )
        client.count("hand-overs answered")
        if not there:
            epoch, now_ms = client.leader_epoch(topic), client.shared.now_ms()
            client.leases.taken(topic, self.token, sent_ms, now_ms, epoch)

    async def close(self, *, release: bool) -> None:
        """End the renewals; `release`: also the lease."""
        self.sleep()
        if release and self.token:
            request = wire.ReleaseLeaseRequest(topic_id=self.topic_id, token=self.token)
            try:
                await self.cluster.call_any(request, timeout_ms=CALL_MS)
            except errors.PkError:
                pass
        await self.cluster.close()


class SimCompaction:
    """One run of the job `compaction` on a table."""

    def __init__(
        self,
        world: World,
        client: TableClient,
        plan: TopicPlan,
        name: str,
        rng: random.Random,
        fate: DriverFate = DriverFate.LIVES,
    ) -> None:
        self._world, self._client, self._plan, self._rng = world, client, plan, rng
        self._fate = fate
        self._lease = SimLease(world, client, plan.name, name)
        self._ends: dict[int, int] = {}
        self._done: dict[int, None] = {}
        self._actions_max = rng.choice(ACTIONS_MAX)

    async def run(self) -> None:
        """Clean every partition.  Raises the errors of a job."""
        release = self._fate is not DriverFate.LATE
        try:
            await self._lease.acquire()
            topic_id = self._lease.topic_id
            place = place_of(self._client.store, self._world, self._rng, self._plan.name, topic_id)
            for _ in range(ROUNDS_MAX):
                if await self._round(place):
                    self._client.count("compactions of tables")
                    return
        except asyncio.CancelledError:
            release = False
            raise
        finally:
            await asyncio.shield(self._lease.close(release=release))

    async def _think(self) -> None:
        await self._world.clock.sleep_ms(self._rng.uniform(*THINKS_MS))

    async def _sleep(self) -> None:
        """Wait before a hand-over; a late driver loses its lease meanwhile."""
        if self._fate is DriverFate.LATE:
            self._lease.sleep()
            await self._world.clock.sleep_ms(self._rng.uniform(*SLEEPS_MS))
        else:
            await self._think()

    async def _commit(self, change: wire.CommitToTableRequest) -> None:
        """Hand over, once or twice."""
        await self._lease.commit(change)
        if self._fate is DriverFate.TWICE:
            await self._think()
            try:
                await self._lease.commit(change)
            except errors.PkError:
                self._client.count("hand-overs refused the second time")

    async def _round(self, place: SimPlace) -> bool:
        """Plan on the newest version and hand over; returns whether nothing is left."""
        table = SimTable(self._client.store, place.topic, place.topic_id)
        snapshot = await table.load(list(range(self._plan.partitions)))
        if snapshot is None:
            return True
        cleanings = await self._cleanings(snapshot)
        await self._think()
        try:
            await self._clean(place, snapshot, cleanings)
        except (errors.UnknownTierRange, errors.FencedLeaderEpoch):
            self._client.count("compactions planned again")
            return False
        return len(self._done) == self._plan.partitions

    async def _cleanings(self, snapshot: Snapshot) -> list[PartitionCleaning]:
        now = await self._lease.now()
        request = wire.DescribePartitionsRequest(topics=[self._plan.name])
        views = await described.everyone(self._lease.cluster, request, CALL_MS)
        starts = lowest_starts(self._lease.topic_id, views)
        retention_ms = int(self._plan.configs["delete_retention_ms"])
        limits = TopicLimits(CompactionLimits(0.0, 0, 2**53), retention_ms)
        found = []
        for partition in range(self._plan.partitions):
            if partition in self._done:
                continue
            each = compaction_plan.clean_partition(
                snapshot,
                partition,
                limits,
                now_ms=None if now is None else now.earliest_ms,
                deadline_ms=None if now is None else now.latest_ms + CLEANING_MS,
                settled_end=starts.get(partition, 0),
                hold=None,  # no query of these runs holds retention
                end=self._ends.get(partition),
            )
            self._ends.setdefault(partition, each.cleaning.end)
            found.append(each)
        return found

    async def _clean(
        self, place: SimPlace, snapshot: Snapshot, cleanings: list[PartitionCleaning]
    ) -> None:
        passes = Passes(place, snapshot, cleanings)
        passes.first()
        left = []
        for each in cleanings:
            if passes.finished(each):
                self._done[each.partition] = None
            else:
                left.append(each)
        portions = compaction_plan.portions(left, passes.changes, TARGET_BYTES, self._actions_max)
        for portion in portions:
            await self._think()
            results = passes.second(portion)
            await self._sleep()
            version = TableVersion(place, snapshot)
            await self._hand_over(version, cleanings, portion, results)
            self._done.update(dict.fromkeys(each.partition for each in portion.finished))

    async def _hand_over(
        self,
        version: TableVersion,
        cleanings: list[PartitionCleaning],
        portion: compaction_plan.Portion,
        results: list[RewrittenRun],
    ) -> None:
        aged = any(each.horizons or each.tombstones for each in results)
        deadline_ms = cleanings[0].cleaning.deadline_ms if aged else None
        change = hand_over(version, portion, results, deadline_ms)
        await self._commit(change)
        for each in results:
            self._client.count("hand-overs of compactions")
            if each.tombstones:
                self._client.count("tombstones of tables removed")


class SimMerge(SimCompaction):
    """One run of the job `optimize` that merges one run of adjoining files."""

    async def _round(self, place: SimPlace) -> bool:
        table = SimTable(self._client.store, place.topic, place.topic_id)
        snapshot = await table.load(list(range(self._plan.partitions)))
        runs = [] if snapshot is None else optimize_plan.plan(snapshot, TARGET_BYTES)
        if snapshot is None or not runs:
            return True
        await self._think()
        merged = merge(MergeTask(place, self._rng.choice(runs)))
        await self._sleep()
        change = merged_over(TableVersion(place, snapshot), [merged])
        try:
            await self._commit(change)
        except errors.UnknownTierRange:
            self._client.count("merges planned again")
            return False
        self._client.count("merges of tables")
        return True


class TableJobs:
    """The jobs of one life of the client, one after the other for each maintained table."""

    def __init__(
        self,
        world: World,
        client: TableClient,
        life: int,
        random_of: Callable[[str], random.Random],
        snapshots: SnapshotRuns,
    ) -> None:
        self._world, self._client, self._life = world, client, life
        self._random_of, self._snapshots = random_of, snapshots
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0

    def start(self, plans: list[TopicPlan]) -> None:
        for plan in plans:
            work = self._drive(plan, self._random_of(f"tables/{plan.name}.{self._life}"))
            self._tasks.append(watched(work, self._client.shared.trouble))

    def unsettled(self) -> str:
        """Return how many drivers have not ended; '' = none."""
        left = sum(not each.done() for each in self._tasks)
        return f"{left} drivers of tables go on" if left else ""

    async def _drive(self, plan: TopicPlan, rng: random.Random) -> None:
        shared, clock = self._client.shared, self._world.clock
        while not shared.stopping:
            await clock.sleep_ms(rng.uniform(50, 1_000))
            if not self._client.topic_id(plan.name):
                continue
            fate = rng.choice(list(DriverFate))
            self._client.count(f"drivers of tables: {fate.value}")
            self._number += 1
            name = f"{plan.name}.{self._life}.{self._number}"
            kind = SimMerge if rng.random() < MERGES else SimCompaction
            job = kind(self._world, self._client, plan, name, rng, fate)
            task = watched(self._work(job, plan, rng), shared.trouble)
            self._tasks.append(task)
            if fate is DriverFate.DIES:
                await clock.sleep_ms(rng.uniform(*LIVES_MS))
                task.cancel()
            elif fate is DriverFate.LATE:
                await clock.sleep_ms(2 * LEASE_MS)
            await asyncio.wait([task], timeout=None if fate is not DriverFate.LATE else 0)

    async def _work(self, job: SimCompaction, plan: TopicPlan, rng: random.Random) -> None:
        client = self._client
        try:
            await job.run()
            if rng.random() < SNAPSHOTS:
                await self._snapshots.run(self._world, client, plan, rng)
        except EXPECTED as error:
            client.count(f"{type(error).__name__} of tables")
        except errors.InternalError as bug:
            client.shared.trouble(f"V30: a job of {plan.name}: {bug.message}")
        except Violation as violation:
            client.shared.trouble(str(violation))
        except errors.InvalidRequest as error:
            if plan.name not in client.shared.deleted or "missing" not in error.message:
                client.shared.trouble(f"a job of {plan.name}: {error!r}")
                return
            client.count("compactions of tables refused: rows are missing")
            if rng.random() < REPAIRS:
                await self._repair(plan)

    async def _repair(self, plan: TopicPlan) -> None:
        """Ask for a repair: a compacted topic has none, because superseded rows look deleted."""
        cluster = cluster_of(self._world, self._client.shared.bootstrap, f"repair {plan.name}")
        try:
            await ask_leaders(cluster, plan.name, False, CALL_MS)
        except errors.UnsupportedFeature:
            self._client.count("repairs refused")
        except errors.PkError:
            self._client.count("repairs that failed")
        finally:
            await asyncio.shield(cluster.close())
