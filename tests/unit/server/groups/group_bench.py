"""A group coordinator's machine over a list of records, for tests.

Every decision is made twice and must be the same.  After each decision, unless `whole` is off,
machines that replay the log and the compacted log must equal the machine that decided.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from pk.effects import Publish
from pk.group_ids import partition_of_group
from pk.server.groups import commands as c
from pk.server.groups import records
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.machine import GroupCoordinator
from pk.server.groups.state import GroupState
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import record_of
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire

NOW = 1_700_000_000_000
ID = "app"
PARTITION = partition_of_group(ID)
TOPIC_ID = "00000000-0000-0000-0000-00000000000a"
OTHER_ID = "00000000-0000-0000-0000-00000000000b"
KEYS = [PartitionKey(TOPIC_ID, number) for number in range(4)]
DAY_MS = 86_400_000
RULES = c.GroupRules(PARTITION, 100, 60_000, 0, 10, 7 * DAY_MS, 20)


def image_of(**topics: tuple[str, int]) -> MetadataImage:
    """An image with topics: name = (topic id, number of partitions)."""
    image = MetadataImage()
    at = 0
    for name, (topic_id, count) in (topics or {"t": (TOPIC_ID, 4), "u": (OTHER_ID, 1)}).items():
        image.apply(at, record_of(wire.TopicRecord(name=name, topic_id=topic_id)))
        for number in range(count):
            at += 1
            body = wire.PartitionRecord(
                topic_id=topic_id, partition=number, replicas=[1], isr=[1], leader=1
            )
            image.apply(at, record_of(body))
        at += 1
    return image


class Bench:
    """One machine."""

    def __init__(self, rules: c.GroupRules = RULES) -> None:
        self.rules = rules
        self.machine = GroupCoordinator(rules)
        self.log: list[records.GroupLogRecord] = []
        self.image = image_of()
        self.now = NOW
        self.whole = True  #: a test of long histories checks replays by itself
        self.changed: list[str] = []  #: groups that the last decision announced

    def run(self, command: c.Command) -> Any:
        """Decide, append, apply; return the reply or raise it."""
        before = copy.deepcopy(dict(self.machine.groups)) if self.whole else self.machine.groups
        try:
            decision = self.machine.decide(command, self.now)
        finally:
            assert self.machine.groups == before, "`decide` never mutates"
        again = self.machine.decide(command, self.now)
        assert again.records == decision.records
        keys = [record.key for record in decision.records]
        assert len(keys) == len(set(keys)), "one record per key"
        for record in decision.records:
            stored = records.from_row(*records.to_row(record))
            assert stored == record
            self.machine.apply(len(self.log), stored)
            self.log.append(stored)
        if self.whole:
            self.check_replay()
        self.changed = []
        for effect in decision.effects:
            assert isinstance(effect, Publish)
            assert effect.name == c.CHANGED
            self.changed.append(effect.value)
        return decision.reply

    def check_replay(self) -> None:
        """A replay gives an equal machine; so does a replay of the compacted log."""
        newest = {record.key: (at, record) for at, record in enumerate(self.log)}
        compacted = sorted(newest.values(), key=lambda each: each[0])
        for log in (list(enumerate(self.log)), compacted):
            again = GroupCoordinator(self.rules)
            for offset, record in log:
                again.apply(offset, record)
            assert again.groups == self.machine.groups

    @property
    def group(self) -> ConsumerGroup:
        return self.machine.groups[ID]

    # -- commands ----------------------------------------------------------------------------------

    def join(
        self,
        member: str,
        generation: int = NONE,
        *,
        instance: str = "",
        topics: Iterable[str] = ("t",),
        assignors: Iterable[str] = ("range",),
        session_ms: int = 10_000,
        group: str = ID,
    ) -> wire.JoinGroupReply:
        request = wire.JoinGroupRequest(
            member=asked(member, generation, instance, group), session_timeout_ms=session_ms,
            rebalance_timeout_ms=30_000, assignors=assignors, client_id=f"client-{member}",
            subscription=wire.GroupSubscription(topics=topics),
        )  # fmt: skip
        reply: wire.JoinGroupReply = self.run(c.JoinGroup(request))
        return reply

    def sync(
        self,
        member: str,
        generation: int,
        given: Mapping[str, Iterable[PartitionKey]] | None = None,
        *,
        instance: str = "",
    ) -> wire.SyncGroupReply:
        request = wire.SyncGroupRequest(member=asked(member, generation, instance))
        if given is not None:
            request.assignment.SetInParent()
            for name, keys in given.items():
                item = request.assignment.members.add(member_id=name)
                for key in keys:
                    item.partitions.add(topic_id=key.topic_id, partitions=[key.partition])
        reply: wire.SyncGroupReply = self.run(c.SyncGroup(request, self.image))
        return reply

    def commit(
        self,
        offsets: Mapping[PartitionKey, int],
        member: str = "",
        generation: int = NONE,
        *,
        instance: str = "",
        metadata: str = "",
        sequence: tuple[int, int] = (0, 0),
    ) -> dict[PartitionKey, int]:
        """Commit; return the codes of the refused partitions.  sequence: committer, number."""
        request = wire.OffsetCommitRequest(
            member=asked(member, generation, instance), committer=sequence[0], sequence=sequence[1]
        )
        for key, offset in offsets.items():
            request.topics.add(
                topic_id=key.topic_id, partitions=[key.partition], offsets=[offset],
                metadata=[metadata] if metadata else [],
            )  # fmt: skip
        reply = self.run(c.CommitOffsets(request, self.image))
        return {PartitionKey(e.topic_id, e.partition): e.error.code for e in reply.refused}

    def fetched(self, *keys: PartitionKey, group: str = ID) -> dict[PartitionKey, int]:
        request = wire.OffsetFetchGroup(group_id=group)
        for key in keys:
            request.topics.add(topic_id=key.topic_id, partitions=[key.partition])
        reply = self.run(c.FetchOffsets(request))
        return {
            PartitionKey(topic.topic_id, number): offset
            for topic in reply.topics
            for number, offset in zip(topic.partitions, topic.offsets, strict=True)
        }

    def leave(self, *members: str, instance: str = "") -> list[int]:
        request = wire.LeaveGroupRequest(
            group_id=ID, members=[asked(each, NONE, instance) for each in members]
        )
        return [each.code for each in self.run(c.LeaveGroup(request)).errors]

    def expire(self, *members: str) -> int:
        count: int = self.run(c.ExpireMembers(tuple((ID, each) for each in members)))
        return count

    def end_join(self, generation: int | None = None) -> None:
        self.run(c.EndJoin(ID, self.group.generation if generation is None else generation))

    def expire_offsets(self, *absent: str) -> c.OffsetsExpired:
        command = c.ExpireOffsets(tuple(self.machine.groups), self.image, frozenset(absent))
        reply: c.OffsetsExpired = self.run(command)
        return reply

    # -- histories ---------------------------------------------------------------------------------

    def stable(self, *members: str, **given: Iterable[PartitionKey]) -> int:
        """A stable group of `members`; the first one leads.  Returns the generation.

        given: the assignment; without it, partition n goes to member n.
        """
        for each in members:
            self.join(each, self.group.generation if self.has(each) else NONE)
        for each in members:
            if self.group.state is GroupState.PREPARING_REBALANCE:
                self.join(each, self.group.generation)
        assert self.group.state is GroupState.COMPLETING_REBALANCE
        generation = self.group.generation
        spread = {name: [KEYS[at]] for at, name in enumerate(members)}
        self.sync(self.group.metadata.leader, generation, given or spread)
        return generation

    def has(self, member: str) -> bool:
        return ID in self.machine.groups and member in self.group.members


def asked(
    member: str, generation: int = NONE, instance: str = "", group: str = ID
) -> wire.GroupMember:
    return wire.GroupMember(
        group_id=group, member_id=member, generation=generation, group_instance_id=instance
    )
