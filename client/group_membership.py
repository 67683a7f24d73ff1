"""A consumer's membership of its group: join, sync, heartbeat, leave.

World-generic; it runs on the client's loop.  The consumer applies a change of the assignment from
within its poll, in the application's thread, because listeners and commits belong there.  Commits
are sent by client/group_commits.

    join ──> sync ──> the consumer applies the change ──> heartbeats

The member joins again at a rebalance, for another subscription, if its topics change, and at once
after it gave up a partition to another member (cooperative).

Invariants
  M1  At most one change waits.  Until the consumer has applied it, the member does not join again,
      but it sends heartbeats, for at most max_poll_interval_ms after the last poll.
  M2  A partition that the member has lost is reported as lost: its commits would be refused.
  M3  Only its own period delays a heartbeat: no change of the metadata, no wait for a topic, no
      change that waits, no coordinator that does not answer another request.  It waits at the
      coordinator for news of the group (rule P5); the next one follows, and after a join at once.
  M4  A refusal of a heartbeat or of a commit counts only for the member and the generation that
      asked, if the member is still in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pk import errors
from pk.backoff import Backoff, client_jitter
from pk.client.assignors import ASSIGNORS, COOPERATIVE_STICKY, STICKY, Subscriber
from pk.client.coordinator_calls import GROUP, CoordinatorCalls
from pk.client.group_commits import GroupCommits, asked, topics_of
from pk.client.group_types import AssignmentChange, ConsumerGroupMetadata
from pk.client.network_client import NetworkClient
from pk.tasks import TaskRegistry
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire
from pk.world import World

_log = logging.getLogger("pk.client")

BACKOFF_MS = (50, 1_000)
#: How often `close` looks for commits that are on their way.
COMMIT_CHECK_MS = 10
#: How long `close` waits for the coordinator.
LEAVE_MS = 3_000


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
        stable = options["isolation_level"] == "read_committed"
        self.commits = GroupCommits(world, cluster, self._calls, self, stable=stable)
        self._eager = any(name != COOPERATIVE_STICKY for name in options["assignors"])
        self._names: list[str] = []
        self._pattern: re.Pattern[str] | None = None
        self._saw_all = False  #: since the last `subscribe`, the metadata had all topics once
        self._member_id = ""
        self._generation = NONE  #: the newest that a join returned
        self._completed = NONE  #: of joins: the last one with an assignment
        self._previous: tuple[PartitionKey, ...] = ()  #: the assignment of that generation
        self._leads = False
        self._asking = False  #: a join is on its way
        self._joined = asyncio.Event()  #: since the last heartbeat began, a join has ended
        self._joining = False  #: a join or a sync is on its way
        self._rejoin = False  #: the group is being rebalanced
        self._refusal: errors.PkError | None = None  #: why the membership ends (M4)
        self._joined_topics: set[str] = set()  #: the own subscription at the last join
        #: Of the leader: the topics of all members, and topic id → partitions of the assignment.
        self._group_topics: list[str] = []
        self._shared: dict[str, int] = {}
        self._absent: set[str] = set()  #: topics for which the leader has waited already
        self.applied: Mapping[TopicPartition, PartitionKey] = {}  #: what the consumer reads
        #: In which generation each partition came to the member, which has it since.
        self._since: dict[PartitionKey, int] = {}
        self._who = self._plain()  #: of the last change that the consumer has applied
        self.change: AssignmentChange | None = None
        self.problem: errors.PkError | None = None  #: ends the membership; raised by the next poll
        self._ended: errors.PkError | None = None  #: the same, until `subscribe`
        self.on_change: Callable[[], None] = lambda: None
        self._applied = asyncio.Event()
        self._wake = asyncio.Event()
        self.polled_ms = 0  #: set by polls
        self.polling = False  #: a poll waits
        self._tasks = TaskRegistry()
        self._running = False

    @property
    def subscribed(self) -> bool:
        """Whether the consumer takes part in the group's assignment."""
        return bool(self._names) or self._pattern is not None

    def _plain(self) -> ConsumerGroupMetadata:
        return ConsumerGroupMetadata(self.group_id, NONE, "", "")

    def metadata(self) -> ConsumerGroupMetadata:
        """Return the member and the generation of the assignment that the consumer reads."""
        return self._who

    # -- commits -----------------------------------------------------------------------------------

    def committer(self) -> ConsumerGroupMetadata:
        """Return in whose name the positions of this moment are committed.

        Raises `RebalanceInProgress` if the consumer has subscribed and has no assignment yet, and
        the error that has ended the membership.
        """
        if not self.subscribed:
            return self._plain()
        if self._ended is not None:
            raise self._ended
        if not self._who.member_id:
            raise errors.RebalanceInProgress(
                f"this consumer has no assignment of group {self.group_id!r} now: poll again, and "
                "commit what polls return then"
            )
        return self._who

    @property
    def joining(self) -> bool:
        """Whether the coordinator may know a generation that the member does not know yet."""
        return self._joining

    def commits_as(
        self, captured: ConsumerGroupMetadata, keys: Iterable[PartitionKey]
    ) -> ConsumerGroupMetadata:
        """Return who commits offsets that were captured earlier: the same member, in the newest
        generation if the partitions have been the member's since.  Raises `UnknownMemberId`.
        """
        if not captured.member_id:
            return captured
        if captured.member_id != self._member_id:
            raise errors.UnknownMemberId(
                f"group {self.group_id!r} has removed this member since it polled: poll again. "
                "Other members read on from the committed offsets"
            )
        if all(
            self._since.get(key, captured.generation + 1) <= captured.generation for key in keys
        ):
            return captured._replace(generation=self._generation)
        return captured

    def refused(self, refusal: errors.PkError, who: ConsumerGroupMetadata) -> None:
        """Learn that the coordinator has refused a request of the member (M4)."""
        if self._is(who):
            self._refusal = refusal
            self._wake.set()
            self._applied.set()

    def _is(self, who: ConsumerGroupMetadata) -> bool:
        """Whether the member is still in the generation that asked."""
        now = (self._member_id, self._generation)
        return bool(who.member_id) and not self._asking and (who.member_id, who.generation) == now

    # -- what the consumer calls, on the loop ------------------------------------------------------

    def subscribe(self, names: list[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Take part with this subscription; join again if it is another one."""
        self._names, self._pattern = list(names or ()), pattern
        self._saw_all = False
        self._cluster.watch_topics(None if pattern is not None else names)
        self._cluster.start()
        self._wake.set()
        if not self._running:
            self._running, self._ended = True, None
            self.polled()
            if self._on_metadata not in self._cluster.on_change:
                self._cluster.on_change.append(self._on_metadata)
            self._on_metadata()
            self._tasks.spawn(self._run())
            if "beats" not in self._tasks:
                self._tasks.spawn(self._beats(), "beats")

    def polled(self) -> None:
        """Note that the application polls.  Polls call it in the application's thread."""
        self.polled_ms = self._world.clock.monotonic_ms()

    def has_applied(self, change: AssignmentChange) -> None:
        """Go on after the consumer has applied a change."""
        ids = {place.topic: key.topic_id for place, key in change.keys.items()}
        self.applied, self._who = change.keys, change.who._replace(topic_ids=ids)
        since = {key: self._since.get(key, change.who.generation) for key in change.keys.values()}
        self._since = since
        if self.change is change:
            self.change = None
            self._applied.set()

    def _on_metadata(self) -> None:
        if self._cluster.metadata.complete:
            self._saw_all = True
        if self._leads or self._pattern is not None:
            self._wake.set()

    async def close(self, *, leave: bool = True) -> None:
        """Leave the group, unless the member is static, and stop.

        Commits that are on their way end first.
        """
        deadline_ms = self._world.clock.monotonic_ms() + LEAVE_MS
        while self.commits.pending and self._world.clock.monotonic_ms() < deadline_ms:
            await self._world.clock.sleep_ms(COMMIT_CHECK_MS)
        await self.commits.close()
        await self._tasks.close()
        self._running = False
        if leave and not self._options["group_instance_id"]:
            await self._leave("the consumer was closed", LEAVE_MS)
        self._names, self._pattern = [], None
        self.change, self.problem = None, None
        self.applied, self._since, self._who = {}, {}, self._plain()
        self._forget()

    # -- the loop of the membership ----------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff(BACKOFF_MS, client_jitter(self._world.rng))
        while True:
            try:
                await self._poll_awaited()
                if self.change is not None:
                    await self._until_applied(self.change)
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
                self.change, self.applied = None, {}
                self.problem = self._ended = problem
                self._running = False
                self.on_change()
                return

    def _forget(self) -> None:
        self._member_id, self._leads = "", False
        self._generation = self._completed = NONE
        self._previous = ()
        self._rejoin, self._refusal = False, None

    async def _poll_awaited(self) -> None:
        """Wait for a poll if the application has not polled for too long."""
        while self._idle_ms() > self._options["max_poll_interval_ms"]:
            await self._world.clock.sleep_ms(BACKOFF_MS[0])

    def _idle_ms(self) -> int:
        return 0 if self.polling else self._world.clock.monotonic_ms() - self.polled_ms

    async def _lose(self) -> None:
        """Let the consumer drop what the group has given to others (M2)."""
        if self.applied or self.change is not None:
            await self._apply(AssignmentChange(True, {}, {}, self._plain()))

    async def _apply(self, change: AssignmentChange) -> None:
        """Have the consumer apply a change, from within its poll (M1)."""
        self.change = change
        self.on_change()
        await self._until_applied(change)

    async def _until_applied(self, change: AssignmentChange) -> None:
        """Wait until the consumer has applied the change."""
        while self.change is change:
            self._applied.clear()
            self._raise_refusal()
            await self._applied.wait()

    def _raise_refusal(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    # -- join and sync -----------------------------------------------------------------------------

    async def _rebalance(self) -> None:
        """Join until the assignment is applied and the member has nothing to give up."""
        while True:
            if self._eager and self.applied:
                await self._apply(AssignmentChange(False, {}, {}, self._who))
            self._wake.clear()
            self._rejoin = False
            self._joining = True
            try:
                joined = await self._join()
                owned = await self._sync(joined)
            except errors.RebalanceInProgress:
                continue  # another member has joined or gone meanwhile
            finally:
                self._joining = False
            before = self.applied
            new = {place: key for place, key in owned.items() if before.get(place) != key}
            starts = await self._starts(new)
            self._completed, self._previous = joined.generation, tuple(owned.values())
            await self._apply(AssignmentChange(False, starts, owned, self._member()))
            if before.items() <= owned.items():
                return

    def _member(self, generation: int | None = None) -> ConsumerGroupMetadata:
        """Return the member, by default with its newest generation."""
        return ConsumerGroupMetadata(
            self.group_id,
            self._generation if generation is None else generation,
            self._member_id,
            self._options["group_instance_id"] if self._member_id else "",
        )

    def _topics(self) -> list[str] | None:
        """Return the names of the subscribed topics; None = the metadata are not complete yet."""
        if self._pattern is None:
            return self._names
        return self._cluster.metadata.matching(self._pattern) if self._saw_all else None

    async def _join(self) -> wire.JoinGroupReply:
        """Join, and wait for the other members."""
        options = self._options
        while (topics := self._topics()) is None:
            await self._news(1_000)
        if not self._member_id:
            client = options["client_id"] or "consumer"
            self._member_id = f"{client[:100]}-{self._world.new_id()}"
        self._joined_topics = set(topics)
        request = wire.JoinGroupRequest(
            member=asked(self._member(self._completed)),
            session_timeout_ms=options["session_timeout_ms"],
            rebalance_timeout_ms=options["max_poll_interval_ms"],
            assignors=options["assignors"],
            client_id=options["client_id"][:100],
            subscription=wire.GroupSubscription(
                topics=topics,
                owned=topics_of(self.applied.values()),
                owned_generation=self._completed,
                previous=topics_of(self._previous if STICKY in options["assignors"] else ()),
            ),
        )
        self._asking = True
        try:
            while True:
                reply: wire.JoinGroupReply = await self._call(request)
                if not reply.pending:
                    self._generation = reply.generation
                    self._leads = reply.leader == self._member_id
                    self._refusal = None
                    self._joined.set()
                    return reply
        finally:
            self._asking = False

    async def _sync(self, joined: wire.JoinGroupReply) -> Mapping[TopicPartition, PartitionKey]:
        """Return the member's assignment; the leader computes that of all."""
        request = wire.SyncGroupRequest(member=asked(self._member()))
        if joined.members:
            names = sorted({name for each in joined.members for name in each.subscription.topics})
            await self._know(names)
            self._group_topics = names
            if joined.skip_assignment:
                self._shared = {each.topic_id: each.partitions for each in joined.assigned}
            else:
                request.assignment.CopyFrom(self._assignment(joined, names))
        while True:
            reply: wire.SyncGroupReply = await self._call(request, errors.RebalanceInProgress)
            if not reply.pending:
                return await self._places(reply.partitions)

    async def _know(self, names: list[str]) -> None:
        """Wait until the metadata have the topics of all members.  A topic that does not exist
        delays one assignment for a moment, not each.
        """
        self._cluster.watch_topics(names)
        timeout_ms = self._options["request_timeout_ms"]
        asks = [
            self._cluster.topic(name, timeout_ms, 0 if name in self._absent else None)
            for name in names
        ]
        found = await asyncio.gather(*asks, return_exceptions=True)
        self._absent = set()
        for name, result in zip(names, found, strict=True):
            if isinstance(result, errors.PkError):
                self._absent.add(name)
                _log.warning("group %s: topic %s: %s", self.group_id, name, result.message)
            elif isinstance(result, BaseException):
                raise result

    def _assignment(self, joined: wire.JoinGroupReply, names: list[str]) -> wire.GroupAssignment:
        """Compute the assignment of every member."""
        topics = self._cluster.metadata.topics
        known = {name: topics[name] for name in names if name in topics}
        self._shared = {each.topic_id: each.partitions for each in known.values()}
        claims = "previous" if joined.assignor == STICKY else "owned"
        members = [
            Subscriber(
                each.member_id,
                frozenset(each.subscription.topics),
                each.group_instance_id,
                tuple(self._known(getattr(each.subscription, claims))),
                each.subscription.owned_generation,
            )
            for each in joined.members
        ]
        counts = {name: each.partitions for name, each in known.items()}
        found = ASSIGNORS[joined.assignor](members, counts)
        return wire.GroupAssignment(
            members=[
                wire.MemberAssignment(
                    member_id=name,
                    partitions=topics_of(
                        PartitionKey(known[place.topic].topic_id, place.partition)
                        for place in places
                    ),
                )
                for name, places in sorted(found.items())
            ],
            metadata_offset=max(0, self._cluster.metadata.offset),
        )

    def _known(self, topics: Iterable[wire.TopicPartitions]) -> dict[TopicPartition, PartitionKey]:
        """Return the partitions of topics whose names the metadata have."""
        names = self._cluster.metadata.names
        found = {
            TopicPartition(names[each.topic_id], number): PartitionKey(each.topic_id, number)
            for each in topics
            if each.topic_id in names
            for number in each.partitions
        }
        return dict(sorted(found.items()))

    async def _places(
        self, topics: Iterable[wire.TopicPartitions]
    ) -> Mapping[TopicPartition, PartitionKey]:
        """Return assigned partitions by name; waits for metadata that have all of them."""
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

    async def _starts(
        self, new: Mapping[TopicPartition, PartitionKey]
    ) -> dict[TopicPartition, int | None]:
        """Return the committed offsets of new partitions."""
        found = await self.commits.fetched(new.values(), self._options["session_timeout_ms"])
        return {place: found[key].offset if key in found else None for place, key in new.items()}

    # -- heartbeats --------------------------------------------------------------------------------

    async def _until_rebalance(self) -> None:
        """Wait until the member has to join again."""
        while True:
            self._wake.clear()
            self._raise_refusal()
            if self._rejoin or self._subscription_changed():
                return
            await self._wake.wait()

    def _subscription_changed(self) -> bool:
        """Whether topics or partitions differ from those of the last join."""
        topics = self._topics()
        if topics is not None and set(topics) != self._joined_topics:
            return True
        return self._leads and self._topics_changed()

    def _topics_changed(self) -> bool:
        """Whether the topics of the group are others than those of the assignment, or have other
        partitions: a topic that was created again has another id (rule L8).
        """
        metadata = self._cluster.metadata
        found: dict[str, int] = {}
        for name in self._group_topics:
            topic = metadata.topics.get(name)
            if topic is not None:
                found[topic.topic_id] = topic.partitions
            elif metadata.problem(name) is None:
                return False  # no broker has answered for it
        return found != self._shared

    def _wait_ms(self) -> int:
        """Return how long a heartbeat waits for news.

        Two lost heartbeats still leave a part of the session.
        """
        options = self._options
        longest_ms: int = min(
            options["session_timeout_ms"] // 3, options["request_timeout_ms"] // 2
        )
        return max(1, min(int(options["heartbeat_interval_ms"]), longest_ms))

    async def _beats(self) -> None:
        """Send one heartbeat after the other while the group has the member (M3).

        An answer that comes early has news that the member acts on, or is that of an older build.
        So the next one is not sent before its time, unless the member has joined meanwhile.
        """
        clock = self._world.clock
        while True:
            self._joined.clear()
            due_ms = clock.monotonic_ms() + self._wait_ms()
            if self._member_id and self._generation != NONE and not self._asking:
                await self._beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((due_ms - clock.monotonic_ms()) / 1000):
                    await self._joined.wait()

    async def _beat(self) -> None:
        """Send a heartbeat; leave if the application has not polled for max_poll_interval_ms."""
        who = self._member()
        limit_ms = self._options["max_poll_interval_ms"]
        if self._idle_ms() > limit_ms:
            await self._leave("max_poll_interval_ms has passed", LEAVE_MS)
            late = errors.UnknownMemberId(
                f"the application did not poll for max_poll_interval_ms ({limit_ms} ms), so the "
                "consumer left its group: poll more often, or raise the setting"
            )
            self.refused(late, who)
            return
        wait_ms = self._wait_ms()
        request = wire.GroupHeartbeatRequest(member=asked(who), wait_ms=wait_ms)
        # A lost request costs a part of the session, not all of it.
        timeout_ms = wait_ms + max(1, self._options["session_timeout_ms"] // 3)
        try:
            await self._calls.call(request, timeout_ms, (errors.RebalanceInProgress,))
        except errors.RebalanceInProgress:
            if self._is(who):
                self._rejoin = True
                self._wake.set()
        except errors.RetriableError as failure:  # the next heartbeat says whether it was removed
            _log.info("group %s: %s", self.group_id, failure.message)
        except errors.PkError as refusal:
            self.refused(refusal, who)

    async def _leave(self, reason: str, timeout_ms: int) -> None:
        if not self._member_id:
            return
        request = wire.LeaveGroupRequest(
            group_id=self.group_id, members=[asked(self._member())], reason=reason
        )
        try:
            await self._calls.call(request, timeout_ms)
        except errors.PkError as failure:  # its session ends
            _log.info("group %s: could not leave: %s", self.group_id, failure.message)

    async def _call(self, request: Any, *final: type[errors.PkError]) -> Any:
        return await self._calls.call(request, self._options["session_timeout_ms"], final)
