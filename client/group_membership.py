"""A consumer's membership of its group: join, sync, heartbeat, leave; commit and fetch of offsets.

World-generic; it runs on the client's loop.  The consumer applies a change of the assignment from
within its poll, in the application's thread, because listeners and commits belong there.

    join ──> sync ──> the consumer applies the change ──> heartbeats

The member joins again at a rebalance, for another subscription, if its topics get partitions, and
at once after it gave up a partition to another member (cooperative).

Invariants
  M1  At most one change waits.  Until the consumer has applied it, the member does not join again,
      but it sends heartbeats, for at most max_poll_interval_ms after the last poll.
  M2  A partition that the member has lost is reported as lost: its commits would be refused.
  M3  One commit at a time is on its way, so a repeated one never follows a later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from pk import errors
from pk.backoff import Backoff, client_jitter
from pk.client.assignors import ASSIGNORS, COOPERATIVE_STICKY, Subscriber
from pk.client.coordinator_calls import GROUP, CoordinatorCalls
from pk.client.network_client import NetworkClient
from pk.tasks import TaskRegistry
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

_log = logging.getLogger("pk.client")

BACKOFF_MS = (50, 1_000)
#: How often `close` looks for commits that are on their way.
COMMIT_CHECK_MS = 10
#: How long `close` waits for the coordinator.
LEAVE_MS = 3_000


class OffsetAndMetadata(NamedTuple):
    """An offset to commit: that of the next record to process, with a text of the application."""

    offset: int
    metadata: str = ""
    leader_epoch: int = NONE


class ConsumerGroupMetadata(NamedTuple):
    """Who commits: what a transactional producer needs to know of the consumer."""

    group_id: str
    generation: int
    member_id: str
    group_instance_id: str
    #: The ids of the topics that the consumer reads (L8).
    topic_ids: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class AssignmentChange:
    """A change of the assignment that the consumer has to apply."""

    lost: bool  #: the member does not own what it had any more
    assigned: dict[TopicPartition, int | None]  #: new, with the committed offset; None = no offset
    owned: tuple[TopicPartition, ...]  #: all, afterwards


class GroupMembership:
    """The membership of one consumer.  `options` are resolved (settings.CONSUMER)."""

    def __init__(self, world: World, cluster: NetworkClient, options: Mapping[str, Any]) -> None:
        self._world = world
        self._cluster = cluster
        self._options = options
        self.group_id: str = options["group_id"]
        self._calls = CoordinatorCalls(
            world, cluster, self.group_id, options["request_timeout_ms"], GROUP
        )
        self._eager = any(name != COOPERATIVE_STICKY for name in options["assignors"])
        self._names: list[str] = []
        self._pattern: re.Pattern[str] | None = None
        self._member_id = ""
        self._generation = NONE  #: of commits: the newest that a join returned
        self._completed = NONE  #: of joins: the last one with an applied assignment
        self._leads = False
        self._joining = False
        self._joined_topics: set[str] = set()  #: the own subscription at the last join
        #: Of the leader: the topics of all members, and their partitions, at the last assignment.
        self._group_topics: list[str] = []
        self._counts: dict[str, int] = {}
        self.applied: tuple[TopicPartition, ...] = ()  #: what the consumer reads
        self.change: AssignmentChange | None = None
        self.problem: errors.PkError | None = None  #: ends the membership; raised by the next poll
        self.on_change: Callable[[], None] = lambda: None
        self._applied = asyncio.Event()
        self._wake = asyncio.Event()
        self.polled_ms = 0  #: set by polls
        self._committing = asyncio.Lock()  # M3
        self._commits = 0  #: of `commit_soon`, not ended
        self._tasks = TaskRegistry()
        self._running = False

    @property
    def subscribed(self) -> bool:
        """Whether the consumer takes part in the group's assignment."""
        return bool(self._names) or self._pattern is not None

    def metadata(self) -> ConsumerGroupMetadata:
        """Return who commits now."""
        instance = self._options["group_instance_id"] if self._member_id else ""
        topics = self._cluster.metadata.topics
        ids = {
            name: topics[name].topic_id
            for name in sorted({place.topic for place in self.applied})
            if name in topics
        }
        return ConsumerGroupMetadata(
            self.group_id, self._generation, self._member_id, instance, ids
        )

    # -- what the consumer calls, on the loop ------------------------------------------------------

    def subscribe(self, names: list[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Take part with this subscription; join again if it is another one."""
        self._names, self._pattern = list(names or ()), pattern
        self._cluster.watch_topics(None if pattern is not None else names)
        self._cluster.start()
        self._wake.set()
        if not self._running:
            self._running = True
            self.polled()
            self._cluster.on_change.append(self._on_metadata)
            self._tasks.spawn(self._run())

    def polled(self) -> None:
        """Note that the application polls.  Polls call it in the application's thread."""
        self.polled_ms = self._world.clock.monotonic_ms()

    def has_applied(self, change: AssignmentChange) -> None:
        """Go on after the consumer has applied a change."""
        self.applied = change.owned
        if self.change is change:
            self.change = None
            self._applied.set()

    def _on_metadata(self) -> None:
        if self._leads or self._pattern is not None:
            self._wake.set()

    async def close(self, *, leave: bool = True) -> None:
        """Leave the group, unless the member is static, and stop.

        Commits that are on their way end first.
        """
        deadline_ms = self._world.clock.monotonic_ms() + LEAVE_MS
        while self._commits and self._world.clock.monotonic_ms() < deadline_ms:
            await self._world.clock.sleep_ms(COMMIT_CHECK_MS)
        await self._tasks.close()
        self._running = False
        if leave and not self._options["group_instance_id"]:
            await self._leave("the consumer was closed", LEAVE_MS)
        self._names, self._pattern = [], None
        self.change, self.applied = None, ()
        self._forget()

    # -- the loop of the membership ----------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff(BACKOFF_MS, client_jitter(self._world.rng))
        while True:
            try:
                await self._poll_awaited()
                if self.change is not None:
                    await self._until_applied(self.change, beat=False)
                await self._rebalance()
                backoff.reset()
                await self._until_rebalance()
            except (errors.UnknownMemberId, errors.IllegalGeneration) as lost:
                _log.info("group %s: %s", self.group_id, lost.message)
                self._forget()
                await self._lose()
            except errors.RetriableError as failure:
                _log.info("group %s: %s", self.group_id, failure.message)
                await self._world.clock.sleep_ms(backoff.next_ms())
            except errors.PkError as problem:
                self._forget()
                self.change, self.applied = None, ()
                self.problem, self._running = problem, False
                self.on_change()
                return

    def _forget(self) -> None:
        self._member_id, self._leads = "", False
        self._generation = self._completed = NONE

    async def _poll_awaited(self) -> None:
        """Wait for a poll if the application has not polled for too long."""
        while self._idle_ms() > self._options["max_poll_interval_ms"]:
            await self._world.clock.sleep_ms(BACKOFF_MS[0])

    def _idle_ms(self) -> int:
        return self._world.clock.monotonic_ms() - self.polled_ms

    async def _lose(self) -> None:
        """Let the consumer drop what the group has given to others (M2)."""
        if self.applied or self.change is not None:
            await self._apply(AssignmentChange(True, {}, ()), beat=False)

    async def _apply(self, change: AssignmentChange, *, beat: bool = True) -> None:
        """Have the consumer apply a change, from within its poll (M1)."""
        self.change = change
        self.on_change()
        await self._until_applied(change, beat=beat)

    async def _until_applied(self, change: AssignmentChange, *, beat: bool) -> None:
        """Wait until the consumer has applied the change; meanwhile send heartbeats."""
        self._applied.clear()
        while self.change is change:
            try:
                async with asyncio.timeout(self._options["heartbeat_interval_ms"] / 1000):
                    await self._applied.wait()
            except TimeoutError:
                if beat:
                    await self._beat(quiet=True)

    # -- join and sync -----------------------------------------------------------------------------

    async def _rebalance(self) -> None:
        """Join until the assignment is applied and the member has nothing to give up."""
        while True:
            if self._eager and self.applied:
                await self._apply(AssignmentChange(False, {}, ()))
            self._wake.clear()
            self._joining = True
            try:
                joined = await self._join()
                owned = await self._sync(joined)
            except errors.RebalanceInProgress:
                continue  # another member has joined or gone meanwhile
            finally:
                self._joining = False
            self._completed = joined.generation
            before = set(self.applied)
            starts = await self._starts([place for place in owned if place not in before])
            await self._apply(AssignmentChange(False, starts, owned))
            if before <= set(owned):
                return

    def _who(self, generation: int) -> wire.GroupMember:
        return wire.GroupMember(
            group_id=self.group_id,
            member_id=self._member_id,
            generation=generation,
            group_instance_id=self._options["group_instance_id"] if self._member_id else "",
        )

    async def _topics(self) -> list[str]:
        """Return the names of the subscribed topics."""
        if self._pattern is None:
            return self._names
        while not self._cluster.metadata.complete:
            await self._news(1_000)
        return self._cluster.metadata.matching(self._pattern)

    async def _join(self) -> wire.JoinGroupReply:
        """Join, and wait for the other members."""
        options = self._options
        if not self._member_id:
            client = options["client_id"] or "consumer"
            self._member_id = f"{client[:100]}-{self._world.new_id()}"
        topics = await self._topics()
        self._joined_topics = set(topics)
        request = wire.JoinGroupRequest(
            member=self._who(self._completed),
            session_timeout_ms=options["session_timeout_ms"],
            rebalance_timeout_ms=options["max_poll_interval_ms"],
            assignors=options["assignors"],
            client_id=options["client_id"][:100],
            subscription=wire.GroupSubscription(
                topics=topics,
                owned=self._by_topic(self.applied),
                owned_generation=self._completed,
            ),
        )
        while True:
            reply: wire.JoinGroupReply = await self._call(request)
            if not reply.pending:
                self._generation = reply.generation
                self._leads = reply.leader == self._member_id
                return reply

    async def _sync(self, joined: wire.JoinGroupReply) -> tuple[TopicPartition, ...]:
        """Return the member's assignment; the leader computes that of all."""
        request = wire.SyncGroupRequest(member=self._who(joined.generation))
        if joined.members:
            request.assignment.CopyFrom(await self._assignment(joined))
        while True:
            reply: wire.SyncGroupReply = await self._call(request, errors.RebalanceInProgress)
            if not reply.pending:
                return await self._places(reply.partitions)

    async def _assignment(self, joined: wire.JoinGroupReply) -> wire.GroupAssignment:
        """Compute the assignment of every member."""
        names = sorted({name for each in joined.members for name in each.subscription.topics})
        for name in names:
            try:
                await self._cluster.topic(name, self._options["request_timeout_ms"])
            except errors.PkError as absent:
                _log.warning("group %s: topic %s: %s", self.group_id, name, absent.message)
        self._group_topics, self._counts = names, self._counted(names)
        members = [
            Subscriber(
                each.member_id,
                frozenset(each.subscription.topics),
                each.group_instance_id,
                self._known(each.subscription.owned),
                each.subscription.owned_generation,
            )
            for each in joined.members
        ]
        found = ASSIGNORS[joined.assignor](members, self._counts)
        return wire.GroupAssignment(
            members=[
                wire.MemberAssignment(member_id=name, partitions=self._by_topic(places))
                for name, places in sorted(found.items())
            ],
            metadata_offset=max(0, self._cluster.metadata.offset),
        )

    def _counted(self, names: Iterable[str]) -> dict[str, int]:
        topics = self._cluster.metadata.topics
        return {name: topics[name].partitions for name in names if name in topics}

    def _by_topic(self, places: Iterable[TopicPartition]) -> list[wire.TopicPartitions]:
        found: dict[str, wire.TopicPartitions] = {}
        for place in sorted(places):
            topic = self._cluster.metadata.topics.get(place.topic)
            if topic is not None:
                item = found.setdefault(place.topic, wire.TopicPartitions(topic_id=topic.topic_id))
                item.partitions.append(place.partition)
        return list(found.values())

    def _known(self, topics: Iterable[wire.TopicPartitions]) -> tuple[TopicPartition, ...]:
        """Return the partitions of topics whose names the metadata has."""
        names = {each.topic_id: name for name, each in self._cluster.metadata.topics.items()}
        return tuple(
            sorted(
                TopicPartition(names[each.topic_id], number)
                for each in topics
                if each.topic_id in names
                for number in each.partitions
            )
        )

    async def _places(self, topics: Iterable[wire.TopicPartitions]) -> tuple[TopicPartition, ...]:
        """Return assigned partitions by name; waits for metadata that has all of them."""
        topics = list(topics)
        wanted = sum(len(each.partitions) for each in topics)
        deadline_ms = self._world.clock.monotonic_ms() + self._options["session_timeout_ms"] // 2
        while True:
            found = self._known(topics)
            if len(found) == wanted or self._world.clock.monotonic_ms() > deadline_ms:
                return found  # a topic that was deleted meanwhile has no name any more
            self._cluster.want_metadata()
            await self._news(200)

    async def _news(self, timeout_ms: int) -> None:
        """Wait for news of the metadata, at most so long."""
        with contextlib.suppress(TimeoutError):
            await self._cluster.news(timeout_ms)

    # -- heartbeats --------------------------------------------------------------------------------

    async def _until_rebalance(self) -> None:
        """Send heartbeats until the member has to join again."""
        while True:
            try:
                async with asyncio.timeout(self._options["heartbeat_interval_ms"] / 1000):
                    await self._wake.wait()
            except TimeoutError:
                if not await self._beat():
                    return
                continue
            self._wake.clear()
            if await self._subscription_changed():
                return

    async def _subscription_changed(self) -> bool:
        """Whether topics or partitions differ from those of the last join."""
        if set(await self._topics()) != self._joined_topics:
            return True
        return self._leads and self._counted(self._group_topics) != self._counts

    async def _beat(self, *, quiet: bool = False) -> bool:
        """Send a heartbeat; return False if the group is being rebalanced.

        Raises `UnknownMemberId` if the application has not polled for max_poll_interval_ms: the
        member has left.
        """
        limit_ms = self._options["max_poll_interval_ms"]
        if self._idle_ms() > limit_ms:
            await self._leave("max_poll_interval_ms has passed", LEAVE_MS)
            raise errors.UnknownMemberId(
                f"the application did not poll for max_poll_interval_ms ({limit_ms} ms), so the "
                "consumer left its group: poll more often, or raise the setting"
            )
        request = wire.GroupHeartbeatRequest(member=self._who(self._generation))
        try:
            await self._call(request, errors.RebalanceInProgress)
        except errors.RebalanceInProgress:
            return quiet
        return True

    async def _leave(self, reason: str, timeout_ms: int) -> None:
        if not self._member_id:
            return
        request = wire.LeaveGroupRequest(
            group_id=self.group_id, members=[self._who(self._generation)], reason=reason
        )
        try:
            await self._calls.call(request, timeout_ms)
        except errors.PkError as failure:  # its session ends
            _log.info("group %s: could not leave: %s", self.group_id, failure.message)

    async def _call(self, request: Any, *final: type[errors.PkError]) -> Any:
        return await self._calls.call(request, self._options["session_timeout_ms"], final)

    # -- offsets -----------------------------------------------------------------------------------

    async def _starts(self, places: list[TopicPartition]) -> dict[TopicPartition, int | None]:
        """Return the committed offsets of new partitions."""
        found = await self.committed(places, self._options["session_timeout_ms"])
        return {place: each and each.offset for place, each in found.items()}

    async def committed(
        self, places: list[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offset of each partition; None = there is none."""
        found: dict[TopicPartition, OffsetAndMetadata | None] = dict.fromkeys(places)
        if not places:
            return found
        for name in sorted({place.topic for place in places}):
            await self._cluster.topic(name, timeout_ms)
        # A transaction that has not ended may still change the offset (X2).
        stable = self._options["isolation_level"] == "read_committed"
        request = wire.OffsetFetchRequest(require_stable=stable)
        request.groups.add(group_id=self.group_id, topics=self._by_topic(places))
        keys = {self._cluster.metadata.key(place): place for place in places}
        reply = await self._calls.call_of_one(request, timeout_ms)
        for topic in reply.groups[0].topics:
            for row in zip(
                topic.partitions, topic.offsets, topic.metadata, topic.leader_epochs, strict=True
            ):
                place = keys.get(PartitionKey(topic.topic_id, row[0]))
                if place is not None and row[1] >= 0:
                    found[place] = OffsetAndMetadata(*row[1:])
        return found

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: int
    ) -> None:
        """Commit offsets.  Raises why the coordinator refuses the commit, or a partition of it."""
        if not offsets:
            return
        for name in sorted({place.topic for place in offsets}):
            await self._cluster.topic(name, timeout_ms)
        topics: dict[str, wire.CommitTopic] = {}
        for place, each in sorted(offsets.items()):
            key = self._cluster.metadata.key(place)
            topic = topics.setdefault(key.topic_id, wire.CommitTopic(topic_id=key.topic_id))
            topic.partitions.append(key.partition)
            topic.offsets.append(each.offset)
            topic.leader_epochs.append(each.leader_epoch)
            topic.metadata.append(each.metadata)
        request = wire.OffsetCommitRequest(
            topics=list(topics.values()), metadata_offset=max(0, self._cluster.metadata.offset)
        )
        async with self._committing:
            reply = await self._commit(request, timeout_ms)
        for refused in reply.refused:
            raise frames.raise_error(refused.error)

    async def _commit(
        self, request: wire.OffsetCommitRequest, timeout_ms: int
    ) -> wire.OffsetCommitReply:
        """Commit in the newest generation.  While the member joins, the coordinator may know a
        generation that the member does not know yet.
        """
        deadline_ms = self._world.clock.monotonic_ms() + timeout_ms
        while True:
            generation = self._generation
            request.member.CopyFrom(self._who(generation))
            left_ms = max(1, deadline_ms - self._world.clock.monotonic_ms())
            try:
                reply: wire.OffsetCommitReply = await self._calls.call(request, left_ms)
            except errors.IllegalGeneration:
                late = self._world.clock.monotonic_ms() >= deadline_ms
                if late or (generation == self._generation and not self._joining):
                    raise
                await self._world.clock.sleep_ms(BACKOFF_MS[0])
            else:
                return reply

    def commit_soon(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit offsets without waiting; a failure is logged, and a later commit covers it."""
        self._commits += 1
        self._tasks.spawn(self._commit_quietly(offsets))

    async def _commit_quietly(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        try:
            await self.commit(offsets, self._options["request_timeout_ms"])
        except errors.PkError as failure:
            self.report_uncommitted(failure)
        finally:
            self._commits -= 1

    def report_uncommitted(self, failure: errors.PkError) -> None:
        """Log that offsets were not committed: a later commit covers them, or they are read
        again.
        """
        _log.warning("group %s: offsets not committed: %s", self.group_id, failure.message)
