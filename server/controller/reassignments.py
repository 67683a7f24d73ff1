"""Decisions that give partitions other replicas (KIP-455).

The state of a reassignment is in the partition record.  `replicas` lists the target in its order,
then the replicas to remove; `adding` and `removing` name the difference.  New replicas copy the log
and join the ISR by their leader's AlterPartition.  The record that adds the last of them completes
the reassignment (`PartitionChangeBuilder.complete`): replicas = target, the other replicas leave
ISR and ELR, and another leader is elected if the old one leaves.  Two other events may fulfil the
condition, and complete the reassignment too: an election (`BatchedDecision.visit`), because the new
leader may never ask for another ISR, and a smaller min_insync_replicas (`brokers.recover`).  No
other state exists, so a failover of the controller continues the reassignment.

  - The original replicas are the replicas without those being added.  A new target is compared with
    the original replicas.  Replicas that were being added for the former target leave at once.
  - Cancel returns to the original replicas in one record.
  - A record that removes replicas leaves at least min(required, members before) replicas in the
    ISR, and as many in ISR and ELR together.  A smaller target is reached only once all its members
    are in sync (rule R8).  Completion waits for this condition.  The controller refuses a cancel or
    a new target that would break it until other replicas are in sync, unless an operator forces it.
  - A request names the topic id and may name the replicas that it expects; both are compared in the
    decision that begins the move (rule R10).
  - A record that removes a replica begins a new leader epoch, also if the leader stays (rule R2).
  - A change that would leave the partition without a replica that may lead is refused.
  - While a reassignment runs, the required in-sync replicas are min(min_insync_replicas, original
    replicas).  Unlike in Kafka, a larger replication factor does not stop acks=all while the new
    replicas copy.
  - Fencing and ELR treat adding and removing replicas like any others.  An election does not choose
    a replica that is being added unless it is or was a member of the ISR (rule R9).
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
from pk.server.controller.elections import LeaderEligibility, PartitionChangeBuilder
from pk.server.controller.partition_limits import Room
from pk.server.metadata.image import MetadataImage, TopicState
from pk.types import NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire


def alter_reassignments(image: MetadataImage, rules: Rules, command: AlterReassignments) -> Out:
    """Begin, change or cancel reassignments.  Each partition succeeds or fails separately."""
    wanted = command.request.reassignments
    if len(wanted) > limits.METADATA_RECORDS_PER_APPEND_MAX:
        raise errors.InvalidRequest(
            f"{len(wanted)} partitions in one request, more than "
            f"{limits.METADATA_RECORDS_PER_APPEND_MAX}; split it"
        )
    batch = BatchedDecision(
        image, rules, LeaderEligibility(image, command.reports), len(wanted) + 1
    )
    reply = wire.AlterReassignmentsReply()
    seen: dict[tuple[str, int], None] = {}
    room = Room(image, command.reports)
    for item in wanted:
        result = reply.results.add(topic=item.topic, partition=item.partition)
        try:
            place = (item.topic, item.partition)
            if place in seen:
                raise errors.InvalidRequest(f"{_name(item)} is named twice in one request")
            seen[place] = None
            _alter(batch, item, room, force=command.request.force)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
    reply.metadata_offset = image.offset + len(batch.bodies)
    return decision(reply, batch.bodies, batch.effects)


def _name(item: wire.Reassignment) -> str:
    return f"{item.topic[:300]}-{item.partition}"


def _alter(batch: BatchedDecision, item: wire.Reassignment, room: Room, *, force: bool) -> None:
    image = batch.cluster.image
    topic = _topic_of(image, item)
    state = topic.partitions.get(item.partition)
    if state is None:
        raise errors.UnknownTopicOrPartition(f"{_name(item)} does not exist")
    if item.expected and tuple(item.expected) != state.replicas:
        raise errors.InvalidReplicaAssignment(
            f"{_name(item)}: the plan expects replicas {list(item.expected)[:20]}, and they are "
            f"{list(state.replicas)}: it was reassigned since; make the plan again"
        )
    builder = batch.builder(topic, item.partition, state)
    if item.cancel:
        if not state.adding and not state.removing:
            raise errors.NoReassignmentInProgress(f"{_name(item)} is not being reassigned")
        begin(builder, state.original, batch.cluster, _name(item), force=force)
    else:
        _check_target(image, tuple(item.replicas), _name(item))
        room.take([[each for each in item.replicas if each not in state.replicas]])
        begin(builder, tuple(item.replicas), batch.cluster, _name(item), force=force)
        builder.complete(batch.cluster, force=force)
    batch.keep(builder, topic)


def _topic_of(image: MetadataImage, item: wire.Reassignment) -> TopicState:
    """Return the topic that a request names by id.  The name in the request must be the topic's
    (rule R10).
    """
    topic, named = image.topics.get(item.topic_id), image.topic(item.topic)
    if topic is not None and topic is named:
        return topic
    if named is None:
        raise errors.UnknownTopicOrPartition(f"{_name(item)} does not exist")
    if not item.topic_id:
        raise errors.InvalidRequest(f"{_name(item)}: the request names no topic id")
    raise errors.UnknownTopicId(
        f"{_name(item)}: the id of topic {named.name} is {named.topic_id}, not "
        f"{item.topic_id[:40]}: it was deleted and created again; make the plan again"
    )


def _check_target(image: MetadataImage, target: tuple[NodeId, ...], name: str) -> None:
    if not target:
        raise errors.InvalidReplicaAssignment(f"{name}: the target names no replicas")
    if len(set(target)) != len(target):
        raise errors.InvalidReplicaAssignment(f"{name}: {list(target)} names a broker twice")
    unknown = [member for member in target if member not in image.brokers]
    if unknown:
        raise errors.InvalidReplicaAssignment(f"{name}: broker {unknown[0]} is not registered")


def begin(
    builder: PartitionChangeBuilder,
    target: tuple[NodeId, ...],
    cluster: LeaderEligibility,
    name: str,
    *,
    force: bool = False,
) -> None:
    """Begin the move to `target`.  The original replicas as target cancel, in the order given.

    Raises `InvalidReplicaAssignment`, `NotEnoughReplicas`, `UnsupportedFeature`; then `builder` is
    unchanged.
    """
    builder.require_epochs(name)
    original = builder.now.original
    adding = tuple(member for member in target if member not in original)
    removing = tuple(member for member in original if member not in target)
    replicas = (*target, *removing)
    if not builder.can_assign(replicas, cluster):
        raise errors.InvalidReplicaAssignment(
            f"{name}: none of {list(replicas)} could lead it now; replicas that a reassignment "
            "added hold, or may hold, records that the others lack"
        )
    if not force and not builder.keeps_copies(replicas):
        raise errors.NotEnoughReplicas(
            f"{name}: in sync are {list(builder.now.isr)}, and fewer of {list(replicas)} would stay"
            " in sync than min_insync_replicas requires; try again when more of them are in sync, "
            "or force it"
        )
    if (replicas, adding, removing) != (
        builder.now.replicas,
        builder.now.adding,
        builder.now.removing,
    ):
        builder.assign(replicas, adding, removing, cluster)


def under_way(image: MetadataImage) -> Iterator[PartitionKey]:
    """Return the partitions that are being reassigned."""
    for topic, number, state in image.partitions():
        if state.adding or state.removing:
            yield PartitionKey(topic.topic_id, number)


def list_reassignments(image: MetadataImage, _rules: Rules, command: ListReassignments) -> Out:
    """List the running reassignments, of the named topics or of all topics."""
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
