"""The consumer group of a run: members with the client's own membership, under churn.

Each slot has one member after the other.  A member's application polls, counts the offsets of its
partitions upwards, and commits them; the content of the topics does not matter.  Sometimes it works
for longer than its membership lasts, and commits before it polls again.  A member ends cleanly, or
dies.  Some slots have static members, whose successors have the same instance id.

A watcher fetches all offsets again and again.  The rules are in group_history.py,
group_heartbeats.py and offset_copies.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pk import errors
from pk.client.assignors import ASSIGNORS
from pk.client.coordinator_calls import GROUP, CoordinatorCalls
from pk.client.group_commits import GroupCommits
from pk.client.group_membership import GroupMembership
from pk.client.group_types import (
    AssignmentChange,
    ConsumerGroupMetadata,
    OffsetAndMetadata,
    OffsetsToCommit,
)
from pk.client.options import consumer_options
from pk.group_ids import TOPIC, partition_of_group
from pk.sim.checkers import Violation
from pk.sim.cluster import CLUSTER_ID, SimCluster
from pk.sim.group_heartbeats import HeartbeatCheck
from pk.sim.group_history import GroupHistory
from pk.sim.offset_copies import CopyCheck
from pk.sim.options import SimOptions
from pk.sim.oracle import Oracle
from pk.sim.workload import RETRIES, OnTrouble, cluster_of, watched
from pk.types import NONE, PartitionKey, TopicPartition
from pk.world import World

GROUP_ID = "group"
SESSION_MS = (1_000, 3_000)
POLL_INTERVAL_MS = (1_500, 5_000)
PACE_MS = (10.0, 120.0)
#: The share of polls after which the application works for long, and how long.
WORKS, WORK_MS = 0.05, (500.0, 9_000.0)
#: How long a member lives, and the share of members that die without leaving.
LIFE_MS, DIES = (1_000.0, 8_000.0), 0.5
#: How long a slot has no member.
REST_MS = (0.0, 2_000.0)
COMMIT_MS = 1_000
WATCH_MS = 150
WATCHER_MS = 5_000
#: Every third slot has static members.
STATIC_EVERY = 3


@dataclass(slots=True)
class GroupClient:
    """What all members of a run share."""

    bootstrap: str
    history: GroupHistory
    oracle: Oracle
    options: SimOptions
    trouble: OnTrouble
    assignor: str
    stopping: bool = False


class SimMember:
    """One member and its application."""

    def __init__(
        self, world: World, shared: GroupClient, name: str, instance: str, rng: random.Random
    ) -> None:
        self.name = name
        self.over = False  #: the membership has ended with an error
        self.positions: dict[TopicPartition, int] = {}
        self._world = world
        self._shared = shared
        self._rng = rng
        options = consumer_options(
            {
                "group_id": GROUP_ID,
                "group_instance_id": instance,
                "client_id": name,
                "session_timeout_ms": rng.choice(SESSION_MS),
                "heartbeat_interval_ms": 250,
                "max_poll_interval_ms": rng.choice(POLL_INTERVAL_MS),
                "partition_assignment_strategy": shared.assignor,
                **RETRIES,
            }
        )
        self._cluster = cluster_of(world, shared.bootstrap, name)
        self.member = GroupMembership(world, self._cluster, options)
        commits: Any = self.member.commits
        commits.fetched = checked(commits, shared, name)

    async def run(self) -> None:
        """Poll, process and commit until it is cancelled."""
        rng, shared = self._rng, self._shared
        self.member.subscribe([plan.name for plan in shared.options.topics], None)
        while not self.over:
            await self._world.clock.sleep_ms(rng.uniform(*PACE_MS))
            if not shared.stopping and rng.random() < WORKS:
                await self._world.clock.sleep_ms(rng.uniform(*WORK_MS))
                if rng.random() < 0.5:
                    await self._commit(self.positions)
            await self._poll()
            for place in self.positions:
                self.positions[place] += rng.randint(0, 3)
            choice = rng.random()
            if choice < 0.3:
                await self._commit(self.positions)
            elif choice < 0.5 and self.positions:
                self._commit_soon()

    async def _poll(self) -> None:
        """Apply a change that waits, as `Consumer` does (client/group_consumer)."""
        member = self.member
        member.polled()
        if member.problem is not None:
            self._ended(member.problem)
            return
        change = member.change
        if change is None:
            return
        before, after = member.applied, change.keys
        stays = {p for p in self.positions if p in after and before.get(p) == after[p]}
        if not change.lost:
            await self._commit({p: at for p, at in self.positions.items() if p not in stays})
        self.positions = {
            place: self.positions[place] if place in stays else change.assigned.get(place) or 0
            for place in after
        }
        self._owns(change)
        member.has_applied(change)

    def _owns(self, change: AssignmentChange) -> None:
        try:
            self._shared.history.owns(change.who, change.keys.values())
        except Violation as violation:
            self._shared.trouble(str(violation))

    def _ended(self, problem: errors.PkError) -> None:
        self.over = True
        self._shared.history.counts[f"members ended by {type(problem).__name__}"] += 1
        if not isinstance(problem, errors.FencedInstanceId):
            self._shared.trouble(f"group: {self.name} ended: {problem!r}")

    def _captured(self, positions: Iterable[TopicPartition]) -> OffsetsToCommit:
        keys = {place: self.member.applied[place] for place in positions}
        offsets = {place: OffsetAndMetadata(self.positions[place]) for place in keys}
        return OffsetsToCommit(offsets, keys, self.member.committer())

    async def _commit(self, positions: Iterable[TopicPartition]) -> None:
        """Commit, and note what is acknowledged; a refusal is no error of a run."""
        places = [place for place in positions if place in self.member.applied]
        if not places:
            return
        try:
            wanted = self._captured(places)
            await self.member.commits.commit(wanted, COMMIT_MS)
        except errors.PkError as refusal:
            self._shared.history.counts[f"commits refused: {type(refusal).__name__}"] += 1
            return
        offsets = {wanted.keys[place]: each.offset for place, each in wanted.offsets.items()}
        self._shared.history.acknowledged(offsets)

    def _commit_soon(self) -> None:
        try:
            wanted = self._captured([p for p in self.positions if p in self.member.applied])
        except errors.PkError:
            return
        self.member.commits.commit_soon(wanted, COMMIT_MS)

    async def close(self, *, dies: bool) -> None:
        """Leave the group, or end as a process that dies."""
        if dies:
            await self.member.commits.close()
            await self.member._tasks.close()
        else:
            await self._commit(self.positions)
            await self.member.close()
        await self._cluster.close()


def checked(
    commits: GroupCommits, shared: GroupClient, name: str
) -> Callable[[Iterable[PartitionKey], int], Awaitable[object]]:
    """Return `fetched` of these commits with a check of V26."""
    whole = commits.fetched

    async def fetched(
        keys: Iterable[PartitionKey], timeout_ms: int
    ) -> dict[PartitionKey, OffsetAndMetadata]:
        asked, before = list(keys), dict(shared.history.floors)
        found = await whole(asked, timeout_ms)
        offsets = {key: each.offset for key, each in found.items()}
        try:
            shared.history.fetched(name, asked, before, offsets)
        except Violation as violation:
            shared.trouble(str(violation))
        return found

    return fetched


class _NoMember:
    """The watcher commits nothing."""

    joining = False

    def commits_as(
        self, captured: ConsumerGroupMetadata, keys: Iterable[PartitionKey]
    ) -> ConsumerGroupMetadata:
        return captured

    def refused(self, refusal: errors.PkError, who: ConsumerGroupMetadata) -> None:
        raise AssertionError(refusal)


class SimWatcher:
    """Fetches the offsets of the group."""

    def __init__(self, world: World, shared: GroupClient, name: str) -> None:
        self._world = world
        self._shared = shared
        self.cluster = cluster_of(world, shared.bootstrap, name)
        calls = CoordinatorCalls(
            world, self.cluster, GROUP_ID, int(RETRIES["request_timeout_ms"]), GROUP
        )
        commits = GroupCommits(world, self.cluster, calls, _NoMember(), stable=False)
        self._fetched = checked(commits, shared, name)

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await self._world.clock.sleep_ms(WATCH_MS)
            try:
                await self.look()
            except errors.PkError:
                self._shared.history.counts["looks without an answer"] += 1

    async def look(self) -> None:
        """Fetch what was committed.  Raises why no coordinator answers."""
        self._shared.history.forget_deleted()
        keys = sorted(self._shared.history.floors)
        await self._fetched(keys, WATCHER_MS)
        self._shared.history.counts["looks at offsets"] += 1


@dataclass(slots=True)
class GroupRun:
    """The group of one run: its slots, watcher, and the judgement at the end."""

    shared: GroupClient
    random_of: Callable[[str], random.Random]
    heartbeats: HeartbeatCheck
    copies: CopyCheck | None  #: of the offsets in the tier; None = the run makes none
    members: dict[int, SimMember] = field(default_factory=dict)  #: by slot
    to_copy: dict[PartitionKey, int] | None = None  #: what was acknowledged when all was settled

    def start_client(self, world: World, life: int) -> None:
        """Start the slots of one life of the client; call it in its node."""
        self.members.clear()
        watcher = SimWatcher(world, self.shared, f"group.watcher.{life}")
        watched(watcher.run(), self.shared.trouble)
        for slot in range(self.shared.options.groups):
            watched(self._slot(world, slot, life), self.shared.trouble)

    async def _slot(self, world: World, slot: int, life: int) -> None:
        """Have one member after the other."""
        instance = f"instance{slot}" if slot % STATIC_EVERY == STATIC_EVERY - 1 else ""
        rng = self.random_of(f"group.{slot}.{life}")
        number = 0
        while True:
            number += 1
            name = f"group.{slot}.{life}.{number}"
            member = SimMember(world, self.shared, name, instance, rng)
            self.members[slot] = member
            running = watched(member.run(), self.shared.trouble)
            end_ms = world.clock.monotonic_ms() + rng.uniform(*LIFE_MS)
            while not running.done():
                if world.clock.monotonic_ms() >= end_ms and not self.shared.stopping:
                    break
                await world.clock.sleep_ms(20)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            dies = rng.random() < DIES
            self.shared.history.counts["members died" if dies else "members left"] += 1
            await member.close(dies=dies)
            self.members.pop(slot, None)
            if not self.shared.stopping:
                await world.clock.sleep_ms(rng.uniform(*REST_MS))

    def look(self, now_ms: float) -> None:
        """Check V36 and V37."""
        self.heartbeats.look(now_ms)
        if self.copies is not None:
            self.copies.look()

    def rest(self) -> None:
        """Let no member end, and no application work for long."""
        self.shared.stopping = True

    def unsettled(self) -> str:
        """Return what is not settled yet; '' = every partition has one owner."""
        owned = [place for each in self.members.values() for place in each.positions]
        wanted = [
            TopicPartition(topic.name, number)
            for topic in self.shared.oracle.topics.values()
            for number in range(topic.partitions)
        ]
        waits = [each.name for each in self.members.values() if each.member.change is not None]
        if sorted(owned) == sorted(wanted) and not waits:
            return self._uncopied()
        return f"{len(owned)} of {len(wanted)} partitions have owners; {waits} have a change"

    def _uncopied(self) -> str:
        """Return what the copies lack of the offsets that were acknowledged by now."""
        if self.copies is None or self.shared.history.lossy():
            return ""
        if self.to_copy is None:
            self.shared.history.forget_deleted()
            self.to_copy = dict(self.shared.history.floors)
        return self.copies.behind(self.to_copy)

    async def judge(self, world: World) -> None:
        """Fetch the offsets a last time."""
        watcher = SimWatcher(world, self.shared, "group.judge")
        await watcher.look()
        await watcher.cluster.close()

    def figures(self) -> dict[str, int]:
        """Return the counters of the history."""
        return dict(self.shared.history.counts)


def group_run(
    cluster: SimCluster,
    oracle: Oracle,
    options: SimOptions,
    trouble: OnTrouble,
    random_of: Callable[[str], random.Random],
    lost_ms: Callable[[str, int], float],
) -> GroupRun:
    """Return the group of a run.  Its assignor is drawn.

    `lost_ms`: the end of the last era of a partition of a topic, by name; NONE = none ended.
    """
    assignor = random_of("group").choice(sorted(ASSIGNORS))
    number = partition_of_group(GROUP_ID)
    history = GroupHistory(oracle.deletes, lambda: lost_ms(TOPIC, number) != NONE)
    shared = GroupClient(cluster.bootstrap, history, oracle, options, trouble, assignor)
    copies = None
    if options.server.get("tier_offsets_interval_ms"):
        objects = cluster.store.memory.objects
        copies = CopyCheck(
            objects, CLUSTER_ID, GROUP_ID, history.counts,
            lambda key: oracle.deletes(key) or history.lossy(),
        )  # fmt: skip
    return GroupRun(shared, random_of, HeartbeatCheck(cluster, history.counts), copies)
