"""Simulated members of consumer groups: join, sync, heartbeat and commit on real streams.

World-generic.  A member has a stream of its own and sends what a consumer sends, but reads no
records: a consumer's fetcher and buffers would measure the client.  Member i of a group gets
partition i of the topic; the leader says so, as a consumer does.

A heartbeat waits at the coordinator for news (rule P5), and the next one follows its answer, but
not before its time.  A member that gets no answer asks where the coordinator is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.backoff import Backoff, client_jitter
from pk.group_ids import partition_of_group
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.world import World

SESSION_MS = 45_000
REBALANCE_MS = 60_000
_CALL_MS = 20_000
_BACKOFF_MS = (50, 1_000)
_LOST = (errors.UnknownMemberId, errors.IllegalGeneration, errors.FencedInstanceId)


@dataclass(slots=True)
class Counts:
    """What the members of one process have met."""

    joins: int = 0
    heartbeats: int = 0
    lookups: int = 0
    lost: int = 0  #: memberships that the coordinator had ended
    troubles: dict[str, int] = field(default_factory=dict)  #: retriable errors by name

    def forget(self) -> None:
        """Set all counts to 0."""
        self.joins = self.heartbeats = self.lookups = self.lost = 0
        self.troubles.clear()

    def met(self, failure: errors.PkError) -> None:
        name = type(failure).__name__
        self.troubles[name] = self.troubles.get(name, 0) + 1


class Coordinators:
    """Where each partition of `__consumer_offsets` is led, shared by the members of a process.

    One question for a partition is on its way at a time.
    """

    def __init__(self, world: World, bootstrap: Sequence[str], counts: Counts) -> None:
        self._world = world
        self._counts = counts
        self._callers = [caller_of(world, address) for address in bootstrap]
        self._known: dict[int, str] = {}
        self._asking: dict[int, asyncio.Lock] = {}

    async def address(self, group: str) -> str:
        """Return the address of a group's coordinator; asks until a broker knows it."""
        partition = partition_of_group(group)
        backoff = Backoff(_BACKOFF_MS, client_jitter(self._world.rng))
        async with self._asking.setdefault(partition, asyncio.Lock()):
            while partition not in self._known:
                for caller in self._callers:
                    try:
                        self._counts.lookups += 1
                        request = wire.FindCoordinatorRequest(key=group, key_type=0)
                        frame = await caller.call(request, timeout_ms=2_000)
                        self._known[partition] = frame.head.find_coordinator_reply.address
                        break
                    except errors.RetriableError as failure:
                        self._counts.met(failure)
                else:
                    await self._world.clock.sleep_ms(backoff.next_ms())
            return self._known[partition]

    def wrong(self, group: str, address: str) -> None:
        """Forget an address that did not answer for this group."""
        partition = partition_of_group(group)
        if self._known.get(partition) == address:
            del self._known[partition]

    async def close(self) -> None:
        for caller in self._callers:
            await caller.close()


def caller_of(world: World, address: str) -> Caller:
    """Return a stream of its own to a broker; it opens with its first call."""
    hello = wire.Hello(client_id="simulated", build="bench", protocol=PROTOCOL)
    return Caller(world.network, world.clock, address, hello)


class Member:
    """One member.  `number` counts within the group, from 0; `topic_id`: of TOPIC."""

    def __init__(
        self,
        world: World,
        coordinators: Coordinators,
        counts: Counts,
        group: str,
        number: int,
        topic: tuple[str, str],
        heartbeat_ms: int,
    ) -> None:
        self._world, self._coordinators, self._counts = world, coordinators, counts
        self._group, self._number = group, number
        self._topic, self._topic_id = topic
        self._heartbeat_ms = heartbeat_ms
        self._id = f"{group}-{number:02d}-{world.new_id()}"
        self._generation = NONE
        self._caller: Caller | None = None
        self._address = ""
        self._committer = world.rng.getrandbits(63) + 1
        self._commits = 0
        self.stable = asyncio.Event()  #: the member has its assignment

    async def run(self) -> None:
        """Be a member until cancelled."""
        backoff = Backoff(_BACKOFF_MS, client_jitter(self._world.rng))
        while True:
            try:
                if not self.stable.is_set():
                    await self._join_and_sync()
                await self._beat()
                backoff.reset()
            except errors.RebalanceInProgress:
                self.stable.clear()
            except _LOST:
                self._counts.lost += 1
                self._generation = NONE
                self.stable.clear()
            except errors.RetriableError as failure:
                self._counts.met(failure)
                await self._world.clock.sleep_ms(backoff.next_ms())

    async def commit(self, offset: int) -> int:
        """Commit an offset, and repeat it until it is stored; returns when, in ms.

        A member that is not stable waits until it is.
        """
        backoff = Backoff(_BACKOFF_MS, client_jitter(self._world.rng))
        while True:
            await self.stable.wait()
            self._commits += 1
            topic = wire.CommitTopic(topic_id=self._topic_id)
            topic.partitions.append(self._number)
            topic.offsets.append(offset)
            request = wire.OffsetCommitRequest(
                member=self._who(), topics=[topic],
                committer=self._committer, sequence=self._commits,
            )  # fmt: skip
            try:
                reply = await self._call(request, 5_000)
            except errors.RetriableError as failure:
                self._counts.met(failure)
            except _LOST:
                pass  # the next heartbeat says the same, and the member joins again
            else:
                if not reply.refused:
                    return self._world.clock.monotonic_ms()
            await self._world.clock.sleep_ms(backoff.next_ms())

    # -- requests ----------------------------------------------------------------------------------

    def _who(self) -> wire.GroupMember:
        return wire.GroupMember(
            group_id=self._group, member_id=self._id, generation=self._generation
        )

    async def _call(self, request: Message, timeout_ms: int) -> Any:
        """Return the coordinator's reply.  A coordinator that does not answer is looked up again.

        Raises the reply's error.
        """
        address = await self._coordinators.address(self._group)
        if self._caller is None or self._address != address:
            await self.close()
            self._caller, self._address = caller_of(self._world, address), address
        try:
            frame = await self._caller.call(request, timeout_ms=timeout_ms)
        except errors.RetriableError as failure:
            if not isinstance(failure, errors.RebalanceInProgress | errors.CoordinatorLoading):
                self._coordinators.wrong(self._group, address)
            raise
        return getattr(frame.head, frame.head.WhichOneof("body") or "")

    async def _join_and_sync(self) -> None:
        self._counts.joins += 1
        join = wire.JoinGroupRequest(
            member=self._who(),
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            assignors=["range"],
            client_id="simulated",
            subscription=wire.GroupSubscription(topics=[self._topic], owned_generation=NONE),
        )
        while (joined := await self._call(join, _CALL_MS)).pending:
            pass
        self._generation = joined.generation
        sync = wire.SyncGroupRequest(member=self._who())
        if joined.members and not joined.skip_assignment:
            sync.assignment.CopyFrom(
                assignment([each.member_id for each in joined.members], self._topic_id)
            )
        while (await self._call(sync, _CALL_MS)).pending:
            pass
        self.stable.set()

    async def _beat(self) -> None:
        clock = self._world.clock
        due_ms = clock.monotonic_ms() + self._heartbeat_ms
        self._counts.heartbeats += 1
        request = wire.GroupHeartbeatRequest(member=self._who(), wait_ms=self._heartbeat_ms)
        await self._call(request, self._heartbeat_ms + SESSION_MS // 3)
        await clock.sleep_ms(max(0, due_ms - clock.monotonic_ms()))

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()


def assignment(members: Sequence[str], topic_id: str) -> wire.GroupAssignment:
    """Return the assignment of a group: partition i for member i, whose id is `GROUP-i-…`."""
    found = wire.GroupAssignment()
    for member in sorted(members):
        number = int(member.rsplit("-", 2)[1])
        mine = wire.TopicPartitions(topic_id=topic_id, partitions=[number])
        found.members.add(member_id=member, partitions=[mine])
    return found
