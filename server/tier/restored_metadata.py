"""The first metadata of a cluster that is restored from its tier (rule T13).

Pure.  The rows describe the topics of the lost cluster, with their settings, on the brokers of the
new one.  A topic with a table keeps its id, because the id is part of the table's path.  A topic
without one has lost everything, and gets a new id: its offsets begin at 0, and whatever knows the
old id learns that the topic was created again (rule L8).  `__transaction_state` begins empty and
with the leader epochs of the generation, which are a part of producer ids.  Brokers create other
internal topics when they first need them.

Each partition begins without leader and ISR, and its first replica is the only last-known one.  So
the controller elects that replica uncleanly once its broker is there (controller/elections), and
the leader begins its log where the table ends (rule T4).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from pk import generations, transactional_ids
from pk.server.controller.internal_topics import INTERNAL_TOPICS, REPLICATION_FACTOR
from pk.server.metadata import snapshot
from pk.server.metadata.image import (
    LEASE_RESOURCE,
    MAINTENANCE_RESOURCES,
    RUN_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
    TopicState,
    VoterState,
)
from pk.server.metadata.records import record_of
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE, Epoch, NodeId, TopicId
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class RestorePlan:
    """What the restored cluster is."""

    generation: int
    cluster_id: str
    genesis: str
    brokers: tuple[NodeId, ...]
    voters: tuple[VoterState, ...]
    #: Number of partitions by id, of each topic that has a table.
    tables: Mapping[TopicId, int]

    @property
    def first_epoch(self) -> Epoch:
        """The first leader epoch of the block."""
        return self.generation * generations.EPOCHS


def seed_of(image: MetadataImage, plan: RestorePlan) -> bytes:
    """Return the first snapshot of the restored cluster."""
    last = image.offset
    rows = [(last, record_of(body)) for body in _bodies(image, plan)]
    rows.append((last, record_of(wire.NoOpRecord())))
    return b"".join(snapshot.encode(SnapshotId(last + 1, 0), rows))


def new_topic_id(plan: RestorePlan, name: str) -> TopicId:
    """Return the id of a topic that has lost everything."""
    return str(uuid.uuid5(uuid.UUID(plan.genesis), name))


def replicas_of(
    before: Sequence[NodeId], brokers: Sequence[NodeId], number: int
) -> tuple[NodeId, ...]:
    """Return the replicas of a partition: those before if their brokers exist, else others."""
    if before and all(each in brokers for each in before):
        return tuple(before)
    count = min(max(1, len(before)), len(brokers))
    return tuple(brokers[(number + each) % len(brokers)] for each in range(count))


def _bodies(image: MetadataImage, plan: RestorePlan) -> list[Message]:
    bodies: list[Message] = [wire.ClusterRecord(cluster_id=plan.cluster_id, genesis=plan.genesis)]
    bodies.append(wire.VotersRecord(voters=[wire.Voter(**each._asdict()) for each in plan.voters]))
    for name, level in image.features.items():
        bodies.append(wire.FeatureLevelRecord(name=name, level=level))
    next_id = plan.generation * generations.PRODUCER_IDS
    bodies.append(
        wire.ProducerIdsRecord(broker_id=NONE, broker_epoch=NONE, next_producer_id=next_id)
    )
    names: dict[str, str] = {}  #: new id of each topic by its old one
    for topic in image.topics.values():
        if not topic.internal:
            bodies += _topic_bodies(topic, plan, names)
    for topic_id, name in image.purges.items():
        bodies.append(wire.TierPurgeRecord(topic_id=topic_id, name=name))
    bodies += _transaction_state(plan)
    return bodies + _configs(image, names)


def _transaction_state(plan: RestorePlan) -> list[Message]:
    name = transactional_ids.TOPIC
    topic_id, wanted = new_topic_id(plan, name), INTERNAL_TOPICS[name]
    bodies: list[Message] = [wire.TopicRecord(name=name, topic_id=topic_id)]
    for number in range(wanted.partitions):
        replicas = replicas_of((NONE,) * REPLICATION_FACTOR, plan.brokers, number)
        bodies.append(_partition(topic_id, number, replicas, plan.first_epoch))
    for option, value in wanted.settings.items():
        bodies.append(
            wire.ConfigRecord(
                resource_type=TOPIC_RESOURCE, resource_name=name, name=option, value=value
            )
        )
    return bodies


def _partition(
    topic_id: TopicId, number: int, replicas: tuple[NodeId, ...], epoch: Epoch
) -> wire.PartitionRecord:
    return wire.PartitionRecord(
        topic_id=topic_id,
        partition=number,
        replicas=replicas,
        last_known=replicas[:1],
        leader=NONE,
        leader_epoch=epoch,
    )


def _topic_bodies(topic: TopicState, plan: RestorePlan, names: dict[str, str]) -> list[Message]:
    kept = topic.topic_id in plan.tables
    topic_id = topic.topic_id if kept else new_topic_id(plan, topic.name)
    names[topic.topic_id] = topic_id
    bodies: list[Message] = [wire.TopicRecord(name=topic.name, topic_id=topic_id)]
    widest = max((each.target for each in topic.partitions.values()), key=len, default=())
    for number in range(plan.tables.get(topic.topic_id, len(topic.partitions))):
        state = topic.partitions.get(number)
        before = widest if state is None else state.target
        replicas = replicas_of(before, plan.brokers, number)
        bodies.append(_partition(topic_id, number, replicas, plan.first_epoch if kept else 0))
    return bodies


def _configs(image: MetadataImage, names: Mapping[str, str]) -> list[Message]:
    """Return the settings.  Leases and runs of jobs have ended with the lost cluster."""
    kept = {topic.name for topic in image.topics.values() if topic.topic_id in names}
    bodies: list[Message] = []
    for (kind, resource), values in image.configs.items():
        target = names.get(resource, "") if kind in MAINTENANCE_RESOURCES else resource
        gone = kind == TOPIC_RESOURCE and resource not in kept
        if kind in (LEASE_RESOURCE, RUN_RESOURCE) or gone or (resource and not target):
            continue
        for option, value in values.items():
            bodies.append(
                wire.ConfigRecord(
                    resource_type=kind, resource_name=target, name=option, value=value
                )
            )
    return bodies
