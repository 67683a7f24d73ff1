"""Decisions about pk's own topics, which coordinators keep their state in.

A broker that needs an internal topic and does not find it asks for it.  The names, the numbers of
partitions and the settings are those of `INTERNAL_TOPICS`; clients cannot choose or change them.

The replication factor is `REPLICATION_FACTOR`, or the number of available brokers if there are
fewer.  While it is lower, the controller raises it when brokers become available.  It begins a
reassignment that only adds replicas, so rules R8 to R10 hold: the old replicas stay, and a new one
counts once it is in sync.

The recorded `min_insync_replicas` is 2.  The leader requires at most as many in-sync replicas as
the partition has (rule R1), so min(2, replication factor) holds at any time without another record.

Their records are as durable as acknowledged records of other topics: `flush_on_ack` is not
recorded, so the default of the cluster holds.  An operator may set it for the topic (`ALTERABLE`).
With it, a transaction waits for the disk three times.

Invariants
  D1  A decision begins at most one reassignment of each partition, and none while one is under way.
  D2  The decisions never lower a replication factor, and never move a replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from google.protobuf.message import Message

from pk import errors, group_ids, limits, transactional_ids
from pk.server.controller.batched_decision import BatchedDecision
from pk.server.controller.commands import (
    CreateInternalTopic,
    Out,
    RaiseReplication,
    Rules,
    decision,
    registered,
)
from pk.server.controller.elections import LeaderEligibility
from pk.server.controller.reassignments import begin
from pk.server.controller.topics import internal_topic_records
from pk.server.metadata.image import MetadataImage, PartitionState, TopicState
from pk.types import NodeId, PartitionKey
from pk.wire import pk_pb2 as wire

REPLICATION_FACTOR = 3
#: The settings of every internal topic.
SETTINGS: Mapping[str, str] = {
    "cleanup_policy": "compact",
    "min_insync_replicas": "2",
    "segment_bytes": str(16 * limits.MIB),
    "tier_enable": "false",
    "unclean_leader_election_enable": "false",
}
#: The settings of an internal topic that an operator may change.
ALTERABLE = frozenset({"flush_on_ack"})


class InternalTopic(NamedTuple):
    """One topic of pk's own."""

    partitions: int
    settings: Mapping[str, str] = SETTINGS


INTERNAL_TOPICS: Mapping[str, InternalTopic] = {
    transactional_ids.TOPIC: InternalTopic(transactional_ids.PARTITIONS),
    group_ids.TOPIC: InternalTopic(group_ids.PARTITIONS),
}


class Raised(NamedTuple):
    """What a decision about replication factors began, and whether it must be tried again."""

    partitions: Sequence[PartitionKey]
    again: bool


def create_internal_topic(image: MetadataImage, _rules: Rules, command: CreateInternalTopic) -> Out:
    """Create one of pk's own topics for a registered broker; it may exist already."""
    request = command.request
    registered(image, request.broker_id, request.broker_epoch)
    wanted = INTERNAL_TOPICS.get(request.name)
    if wanted is None:
        raise errors.InvalidTopic(
            f"{request.name[:300]!r} is no internal topic that this controller knows: use a "
            "controller that is as new as the broker"
        )
    if request.name in image.topic_ids:
        return decision(wire.CreateInternalTopicReply(metadata_offset=image.offset))
    if not request.topic_id or request.topic_id in image.topics:
        raise errors.InvalidRequest(f"{request.topic_id[:40]!r} is not a fresh topic id")
    factor = max(1, _factor(image))
    bodies: list[Message] = internal_topic_records(
        image, request.name, request.topic_id, wanted.settings, wanted.partitions, factor
    )
    reply = wire.CreateInternalTopicReply(metadata_offset=image.offset + len(bodies))
    return decision(reply, bodies)


def _factor(image: MetadataImage) -> int:
    """The replication factor that internal topics should have now."""
    return min(REPLICATION_FACTOR, sum(each.available for each in image.brokers.values()))


def short(image: MetadataImage) -> Iterator[tuple[TopicState, int, PartitionState]]:
    """Yield the partitions of internal topics that have fewer replicas than they could have."""
    factor = _factor(image)
    for name in INTERNAL_TOPICS:
        topic = image.topic(name)
        for number, state in () if topic is None else topic.partitions.items():
            if topic is not None and len(state.target) < factor:
                yield topic, number, state


def raise_replication(image: MetadataImage, rules: Rules, command: RaiseReplication) -> Out:
    """Add replicas to the partitions of internal topics that have fewer than they could have.

    A partition that is being reassigned, or whose change is refused now, is left for another try.
    """
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports))
    loads = {name: _Load(image, name) for name in INTERNAL_TOPICS}
    begun: list[PartitionKey] = []
    again = False
    for topic, number, state in short(image):
        if state.adding or state.removing or batch.full:  # D1
            again = True
            continue
        builder = batch.builder(topic, number, state)
        target = loads[topic.name].target(state, _factor(image))
        try:
            begin(builder, target, batch.cluster, f"{topic.name}-{number}")
        except errors.PkError:  # for example no leader; nothing was changed
            again = True
            continue
        batch.keep(builder, topic)
        begun.append(PartitionKey(topic.topic_id, number))
    return decision(Raised(tuple(begun), again), batch.bodies, batch.effects)


class _Load:
    """How many replicas, and how many first replicas, of a topic each broker has."""

    def __init__(self, image: MetadataImage, name: str) -> None:
        self._brokers = [each for each in image.brokers.values() if each.available]
        self._racks = {each.broker_id: each.rack for each in image.brokers.values()}
        self._replicas: dict[NodeId, int] = dict.fromkeys(image.brokers, 0)
        self._first: dict[NodeId, int] = dict.fromkeys(image.brokers, 0)
        topic = image.topic(name)
        for state in () if topic is None else topic.partitions.values():
            self._count(state.target, 1)

    def _count(self, members: Sequence[NodeId], change: int) -> None:
        for member in members:
            self._replicas[member] = self._replicas.get(member, 0) + change
        self._first[members[0]] = self._first.get(members[0], 0) + change

    def target(self, state: PartitionState, factor: int) -> tuple[NodeId, ...]:
        """Return the replicas of a partition with new ones added, `factor` in all.

        New replicas go to racks without one and to the brokers with the fewest.  The first
        replica, which is the preferred leader, is one that is first for the fewest partitions.
        """
        members = list(state.target)
        self._count(members, -1)
        while len(members) < factor:
            used = {self._racks.get(member, "") for member in members}
            rest = [each for each in self._brokers if each.broker_id not in members]
            if not rest:
                break
            best = min(
                rest, key=lambda b: (b.rack in used, self._replicas[b.broker_id], b.broker_id)
            )
            members.append(best.broker_id)
        first = min(members, key=lambda m: (self._first.get(m, 0), members.index(m)))
        target = (first, *(member for member in members if member != first))
        self._count(target, 1)
        return target
