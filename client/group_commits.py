"""Commits and fetches of the offsets of one consumer's group.

World-generic; it runs on the client's loop.

Offsets are committed in the name of the member that fetched them.  The consumer captures the member
id, the generation and the topic ids together with the positions.  So a commit that is sent late is
never a commit of the next member, and never one of a topic that was created again (rule L8).

Invariants
  J1  One commit at a time is on its way, in the order of the calls.  A repeated one never follows a
      later one of this consumer; one that a broken connection delays is refused by its sequence.
  J2  A commit of a member that the group has removed is not sent.
  J3  At most one commit of `commit_soon` for each member and generation waits; later ones join it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pk import errors, limits
from pk.client.coordinator_calls import CoordinatorCalls
from pk.client.group_types import ConsumerGroupMetadata, OffsetAndMetadata, OffsetsToCommit
from pk.client.network_client import NetworkClient
from pk.tasks import TaskRegistry
from pk.types import PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

_log = logging.getLogger("pk.client")

#: How often a commit looks whether the member has learnt the group's next generation.
LOOK_MS = 50

#: Refusals after which the member is not in the group's generation.
NOT_A_MEMBER = (errors.UnknownMemberId, errors.IllegalGeneration, errors.FencedInstanceId)


class CommittingMember(Protocol):
    """The membership in whose name offsets are committed (client/group_membership)."""

    @property
    def joining(self) -> bool:
        """Whether the coordinator may know a generation that the member does not know yet."""
        ...

    def commits_as(
        self, captured: ConsumerGroupMetadata, keys: Iterable[PartitionKey]
    ) -> ConsumerGroupMetadata:
        """Return who commits offsets that were captured earlier.  Raises `UnknownMemberId`."""
        ...

    def refused(self, refusal: errors.PkError, who: ConsumerGroupMetadata) -> None:
        """Learn that the coordinator has refused a request of the member."""
        ...


@dataclass(slots=True)
class _Waiting:
    """A commit of `commit_soon` that was not sent yet."""

    wanted: OffsetsToCommit


class GroupCommits:
    """The commits of one consumer."""

    def __init__(
        self,
        world: World,
        cluster: NetworkClient,
        calls: CoordinatorCalls,
        member: CommittingMember,
        *,
        stable: bool,
    ) -> None:
        """stable: a transaction that has not ended may still change an offset: wait for it (X2)"""
        self._world = world
        self._cluster = cluster
        self._calls = calls
        self._member = member
        self._stable = stable
        self._committing = asyncio.Lock()  # J1
        self._committer = world.rng.getrandbits(63) + 1
        self._sequence = 0  #: of the last commit
        self._soon: _Waiting | None = None  #: what a later `commit_soon` may join (J3)
        self._tasks = TaskRegistry()

    @property
    def pending(self) -> bool:
        """Whether a commit of `commit_soon` has not ended."""
        return bool(len(self._tasks))

    async def close(self) -> None:
        """Give up the commits that have not ended."""
        self._soon = None
        await self._tasks.close()

    # -- commit ------------------------------------------------------------------------------------

    async def commit(self, wanted: OffsetsToCommit, timeout_ms: int) -> None:
        """Commit offsets.  Raises why the coordinator refuses the commit, or a partition of it; the
        other partitions are committed.
        """
        self._soon = None  # what comes later does not overtake this commit
        if wanted.offsets:
            async with self._committing:
                await self._send(wanted, timeout_ms)

    def commit_soon(self, wanted: OffsetsToCommit, timeout_ms: int) -> None:
        """Commit offsets without waiting; a failure is logged, and a later commit covers it."""
        soon = self._soon
        if soon is not None and soon.wanted.who == wanted.who:
            soon.wanted = OffsetsToCommit(
                {**soon.wanted.offsets, **wanted.offsets},
                {**soon.wanted.keys, **wanted.keys},
                wanted.who,
            )
            return
        self._soon = _Waiting(wanted)
        self._tasks.spawn(self._send_quietly(self._soon, timeout_ms))

    async def _send_quietly(self, waiting: _Waiting, timeout_ms: int) -> None:
        async with self._committing:
            if self._soon is waiting:
                self._soon = None
            try:
                await self._send(waiting.wanted, timeout_ms)
            except errors.PkError as failure:
                self.report_uncommitted(waiting.wanted.who.group_id, failure)

    def report_uncommitted(self, group_id: str, failure: errors.PkError) -> None:
        """Log that offsets were not committed: a later commit covers them, or they are read
        again.
        """
        _log.warning("group %s: offsets not committed: %s", group_id, failure.message)

    async def _send(self, wanted: OffsetsToCommit, timeout_ms: int) -> None:
        deadline_ms = self._world.clock.monotonic_ms() + timeout_ms
        problem: errors.PkError | None = None
        offsets: dict[PartitionKey, OffsetAndMetadata] = {}
        for place, each in sorted(wanted.offsets.items()):
            try:
                offsets[wanted.keys.get(place) or await self._key(place, timeout_ms)] = each
            except errors.PkError as absent:  # the other partitions are committed
                problem = absent
        for part in _parts(offsets):
            few = {key: offsets[key] for key in part}
            self._sequence += 1
            reply = await self._call(self._request(few), wanted.who, few, deadline_ms)
            for refused in reply.refused:
                problem = frames.raise_error(refused.error)
        if problem is not None:
            raise problem

    async def _key(self, place: TopicPartition, timeout_ms: int) -> PartitionKey:
        """Return a partition by its name.  Raises `UnknownTopicOrPartition`."""
        await self._cluster.topic(place.topic, timeout_ms)
        return self._cluster.metadata.key(place)

    def _request(
        self, offsets: Mapping[PartitionKey, OffsetAndMetadata]
    ) -> wire.OffsetCommitRequest:
        topics: dict[str, wire.CommitTopic] = {}
        for key, each in offsets.items():
            topic = topics.setdefault(key.topic_id, wire.CommitTopic(topic_id=key.topic_id))
            topic.partitions.append(key.partition)
            topic.offsets.append(each.offset)
            topic.leader_epochs.append(each.leader_epoch)
            topic.metadata.append(each.metadata)
        return wire.OffsetCommitRequest(
            topics=list(topics.values()),
            metadata_offset=max(0, self._cluster.metadata.offset),
            committer=self._committer,
            sequence=self._sequence,
        )

    async def _call(
        self,
        request: wire.OffsetCommitRequest,
        captured: ConsumerGroupMetadata,
        keys: Iterable[PartitionKey],
        deadline_ms: int,
    ) -> wire.OffsetCommitReply:
        """Commit in the newest generation in which the partitions are the member's.  While the
        member joins, the coordinator may know a generation that the member does not know yet.
        """
        while True:
            who = self._member.commits_as(captured, keys)
            request.member.CopyFrom(asked(who))
            left_ms = max(1, deadline_ms - self._world.clock.monotonic_ms())
            try:
                reply: wire.OffsetCommitReply = await self._calls.call(request, left_ms)
            except NOT_A_MEMBER as refusal:
                stale = isinstance(refusal, errors.IllegalGeneration)
                late = self._world.clock.monotonic_ms() >= deadline_ms
                if stale and not late:
                    newer = self._member.commits_as(captured, keys).generation > who.generation
                    if newer or self._member.joining:
                        await self._world.clock.sleep_ms(LOOK_MS)
                        continue
                self._member.refused(refusal, who)
                raise
            else:
                return reply

    # -- fetch -------------------------------------------------------------------------------------

    async def committed(
        self, places: Iterable[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offset of each partition; None = there is none."""
        keys = {place: await self._key(place, timeout_ms) for place in places}
        found = await self.fetched(keys.values(), timeout_ms)
        return {place: found.get(key) for place, key in keys.items()}

    async def fetched(
        self, keys: Iterable[PartitionKey], timeout_ms: int
    ) -> dict[PartitionKey, OffsetAndMetadata]:
        """Return the committed offsets of those partitions that have one."""
        found: dict[PartitionKey, OffsetAndMetadata] = {}
        for part in _parts(sorted(keys)):
            found.update(await self._fetch(part, timeout_ms))
        return found

    async def _fetch(
        self, keys: Sequence[PartitionKey], timeout_ms: int
    ) -> dict[PartitionKey, OffsetAndMetadata]:
        found: dict[PartitionKey, OffsetAndMetadata] = {}
        request = wire.OffsetFetchRequest(require_stable=self._stable)
        request.groups.add(group_id=self._calls.key, topics=topics_of(keys))
        reply = await self._calls.call_of_one(request, timeout_ms)
        for topic in reply.groups[0].topics:
            for row in zip(
                topic.partitions, topic.offsets, topic.metadata, topic.leader_epochs, strict=True
            ):
                if row[1] >= 0:
                    found[PartitionKey(topic.topic_id, row[0])] = OffsetAndMetadata(*row[1:])
        return found


def _parts(keys: Iterable[PartitionKey]) -> Iterator[Sequence[PartitionKey]]:
    """Yield the partitions in parts, each as large as a request may be."""
    listed, size = list(keys), limits.OFFSETS_PER_REQUEST_MAX
    for at in range(0, len(listed), size):
        yield listed[at : at + size]


def asked(who: ConsumerGroupMetadata) -> wire.GroupMember:
    """Return a member as requests name it."""
    return wire.GroupMember(
        group_id=who.group_id,
        member_id=who.member_id,
        generation=who.generation,
        group_instance_id=who.group_instance_id,
    )


def topics_of(keys: Iterable[PartitionKey]) -> list[wire.TopicPartitions]:
    """Return partitions by topic, sorted."""
    found: dict[str, wire.TopicPartitions] = {}
    for key in sorted(keys):
        item = found.setdefault(key.topic_id, wire.TopicPartitions(topic_id=key.topic_id))
        item.partitions.append(key.partition)
    return list(found.values())
