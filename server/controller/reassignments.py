"""Decisions that give partitions other replicas (KIP-455).

A reassignment lives in the partition's record: `replicas` are the target in its order, then the
replicas that will go; `adding` and `removing` name the difference.  New replicas copy the log and
join the ISR by their leader's AlterPartition; when all of them are in, the same record ends the
reassignment (`PartitionChangeBuilder.complete`): replicas = target, ISR and ELR without the others,
another leader if the old one goes.  An election may bring the last of what it waits for, too, and
ends it likewise (`BatchedDecision.visit`): the leader that comes may never have another ISR to ask
for; so may a smaller min_insync_replicas (`brokers.recover`).  Nothing else is remembered, so a
failover of the controller goes on with it.

  - The original replicas are those without the ones being added.  A new target is compared with
    them, not with a target given up: what was being added for that one leaves at once.
  - Cancel goes back to the original replicas in one record.
  - Whenever a replica goes, its leader begins a new epoch, also when it is the same one (rule R2).
  - Neither may leave the partition without a replica that may lead: refused.
  - While it runs, required in-sync replicas = min(min_insync_replicas, old and new together).  A
    partition with fewer replicas than min_insync_replicas that gets more of them refuses acks=all
    until enough of the new ones are in sync, as in Kafka.
  - Fencing, ELR and elections treat adding and removing replicas like any others.
"""

from __future__ import annotations

from collections.abc import Iterator

from pk import errors, limits
from pk.server.controller.batched_decision import BatchedDecision
from pk.server.controller.commands import (
    AlterReassignments,
    ListReassignments,
    Out,
    Rules,
    decision,
)
from pk.server.controller.elections import Cluster, PartitionChangeBuilder
from pk.server.metadata.image import MetadataImage, TopicState
from pk.types import NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire


def alter_reassignments(image: MetadataImage, rules: Rules, command: AlterReassignments) -> Out:
    """Begin, change or cancel reassignments; each partition succeeds or fails by itself."""
    wanted = command.request.reassignments
    if len(wanted) > limits.METADATA_RECORDS_PER_APPEND_MAX:
        raise errors.InvalidRequest(
            f"{len(wanted)} partitions in one request, more than "
            f"{limits.METADATA_RECORDS_PER_APPEND_MAX}; split it"
        )
    batch = BatchedDecision(image, rules, Cluster(image, command.reports), len(wanted) + 1)
    reply = wire.AlterReassignmentsReply()
    seen: dict[tuple[str, int], None] = {}
    for item in wanted:
        result = reply.results.add(topic=item.topic, partition=item.partition)
        try:
            place = (item.topic, item.partition)
            if place in seen:
                raise errors.InvalidRequest(f"{_name(item)} is named twice in one request")
            seen[place] = None
            _alter(batch, item)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
    reply.metadata_offset = image.offset + len(batch.bodies)
    return decision(reply, batch.bodies, batch.effects)


def _name(item: wire.Reassignment) -> str:
    return f"{item.topic[:300]}-{item.partition}"


def _alter(batch: BatchedDecision, item: wire.Reassignment) -> None:
    image = batch.cluster.image
    topic = image.topic(item.topic)
    state = None if topic is None else topic.partitions.get(item.partition)
    if topic is None or state is None:
        raise errors.UnknownTopicOrPartition(f"{_name(item)} does not exist")
    builder = batch.builder(topic, item.partition, state)
    if item.cancel:
        if not state.adding and not state.removing:
            raise errors.NoReassignmentInProgress(f"{_name(item)} is not being reassigned")
        _assign(builder, state.original, batch.cluster, _name(item))
    else:
        _check_target(image, tuple(item.replicas), _name(item))
        _assign(builder, tuple(item.replicas), batch.cluster, _name(item))
        builder.complete(batch.cluster)
    batch.keep(builder, topic)


def _check_target(image: MetadataImage, target: tuple[NodeId, ...], name: str) -> None:
    if not target:
        raise errors.InvalidReplicaAssignment(f"{name}: the target names no replicas")
    if len(set(target)) != len(target):
        raise errors.InvalidReplicaAssignment(f"{name}: {list(target)} names a broker twice")
    unknown = [member for member in target if member not in image.brokers]
    if unknown:
        raise errors.InvalidReplicaAssignment(f"{name}: broker {unknown[0]} is not registered")


def _assign(
    builder: PartitionChangeBuilder, target: tuple[NodeId, ...], cluster: Cluster, name: str
) -> None:
    """Towards `target`; a target of the original replicas is a cancel, in their new order."""
    original = builder.now.original
    adding = tuple(member for member in target if member not in original)
    removing = tuple(member for member in original if member not in target)
    replicas = (*target, *removing)
    if not builder.can_assign(replicas, cluster):
        raise errors.InvalidReplicaAssignment(
            f"{name}: none of {list(replicas)} could lead it now; replicas that a reassignment "
            "added hold what the others do not, or may"
        )
    if (replicas, adding, removing) != (
        builder.now.replicas,
        builder.now.adding,
        builder.now.removing,
    ):
        builder.assign(replicas, adding, removing, cluster)


def under_way(image: MetadataImage) -> Iterator[PartitionKey]:
    """The partitions that are being reassigned."""
    for topic, number, state in image.partitions():
        if state.adding or state.removing:
            yield PartitionKey(topic.topic_id, number)


def list_reassignments(image: MetadataImage, _rules: Rules, command: ListReassignments) -> Out:
    """What is under way, of the topics named or of all."""
    reply = wire.ListReassignmentsReply()
    for name in command.request.topics or list(image.topic_ids):
        topic = image.topic(name)
        if topic is None:
            raise errors.UnknownTopicOrPartition(f"topic {name[:300]} does not exist")
        _list(topic, reply)
    return decision(reply)


def _list(topic: TopicState, reply: wire.ListReassignmentsReply) -> None:
    for number, state in sorted(topic.partitions.items()):
        if state.adding or state.removing:
            reply.reassignments.add(
                topic=topic.name,
                topic_id=topic.topic_id,
                partition=number,
                replicas=state.replicas,
                adding=state.adding,
                removing=state.removing,
            )
