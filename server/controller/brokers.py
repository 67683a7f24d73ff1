"""Decisions about brokers: registration, heartbeats, fencing, controlled shutdown, ISR changes.

Rules: L3 (what survived a restart), Q2 (unfenced only when its image holds its registration), R2
(who may join an ISR), R3 (recovery elections), R7 (a lost session fences).  Each function reads
the image and returns a `Decision`; the elections are in `elections.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import Message

from pk import errors
from pk.server.controller.commands import (
    AlterPartition,
    Beat,
    Fence,
    Out,
    Recover,
    Register,
    Rules,
    decision,
    registered,
)
from pk.server.controller.elections import Cluster, Draft
from pk.server.controller.image import BrokerState, MetadataImage, PartitionState, TopicState
from pk.types import NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

Step = Callable[[Draft], object]


def register(image: MetadataImage, rules: Rules, command: Register) -> Out:
    """L3: what this start of the broker may be trusted to hold.

    The same incarnation that lost its stream resumes its registration: its process never ended.
    """
    request = command.request
    if image.cluster_id and request.cluster_id and request.cluster_id != image.cluster_id:
        raise errors.ClusterIdMismatch(
            f"broker {request.broker_id} belongs to cluster {request.cluster_id}, "
            f"this is {image.cluster_id}"
        )
    old = image.brokers.get(request.broker_id)
    if old is not None and old.incarnation_id == request.incarnation_id:
        if _same(old, request):
            reply = wire.RegisterBrokerReply(broker_epoch=old.broker_epoch, clean=True)
            return decision(reply)
    elif command.live:
        raise errors.DuplicateBroker(
            f"broker {request.broker_id} is alive with another process; use another node_id"
        )
    clean = _survived(old, request)
    epoch = image.offset + 1
    bodies: list[Message] = [
        wire.RegisterBrokerRecord(
            broker_id=request.broker_id,
            broker_epoch=epoch,
            incarnation_id=request.incarnation_id,
            boot_id=request.boot_id,
            directory_ids=request.directory_ids,
            address=request.address,
            rack=request.rack,
            fenced=True,
            clean=clean,
        )
    ]
    who = request.broker_id
    leave: Step = (lambda draft: draft.fence(who)) if clean else (lambda draft: draft.lose(who))
    bodies += _sweep(image, rules, who, leave, available=_without(image, who))
    return decision(wire.RegisterBrokerReply(broker_epoch=epoch, clean=clean), bodies)


def _same(old: BrokerState, request: wire.RegisterBrokerRequest) -> bool:
    return (old.address, old.rack, old.boot_id, old.directory_ids) == (
        request.address,
        request.rack,
        request.boot_id,
        tuple(request.directory_ids),
    )


def _survived(old: BrokerState | None, request: wire.RegisterBrokerRequest) -> bool:
    """Whether everything the broker had WRITTEN is still there (rule L3).

    Yes: the same process, the same boot (the page cache outlived the process), or a clean-shutdown
    file of exactly the registration the controller knows.  No, whatever it says: a directory is
    missing.
    """
    if old is None:
        return True  # nothing can have been lost: no partition names it
    if not set(old.directory_ids) <= set(request.directory_ids):
        return False
    if old.incarnation_id == request.incarnation_id or old.boot_id == request.boot_id:
        return True
    return request.clean_shutdown and request.previous_broker_epoch == old.broker_epoch


def beat(image: MetadataImage, rules: Rules, command: Beat) -> Out:
    """A heartbeat: unfence, fence or drain as asked (rule Q2)."""
    request = command.request
    broker = registered(image, request.broker_id, request.broker_epoch)
    who = broker.broker_id
    caught_up = request.metadata_offset >= broker.broker_epoch
    bodies: list[Message] = []
    fenced, may_shut_down = broker.fenced, False
    if request.want_shutdown:
        if broker.fenced:
            may_shut_down = True
        elif broker.in_controlled_shutdown:
            may_shut_down = request.metadata_offset >= broker.changed_offset
        else:  # the change comes last: who has seen it has seen every resignation
            bodies += _sweep(image, rules, who, _fence(who), available=_without(image, who))
            bodies.append(_change(broker, fenced=False, in_controlled_shutdown=True))
    elif request.want_fence and not broker.fenced:
        fenced = True
        bodies += _fenced(image, rules, broker)
    elif broker.fenced and caught_up and not request.want_fence:
        fenced = False
        bodies.append(_change(broker, fenced=False, in_controlled_shutdown=False))
        bodies += _sweep(image, rules, who, _nothing, available=_with(image, who))
    reply = wire.BrokerHeartbeatReply(
        fenced=fenced, caught_up=caught_up, may_shut_down=may_shut_down
    )
    return decision(reply, bodies)


def fence(image: MetadataImage, rules: Rules, command: Fence) -> Out:
    """R7: the session of this registration is over.  A later registration is not touched."""
    broker = image.brokers.get(command.broker_id)
    if broker is None or broker.broker_epoch != command.broker_epoch or broker.fenced:
        return decision(False)
    return decision(True, _fenced(image, rules, broker))


def _fenced(image: MetadataImage, rules: Rules, broker: BrokerState) -> list[Message]:
    who = broker.broker_id
    change = _change(broker, fenced=True, in_controlled_shutdown=broker.in_controlled_shutdown)
    return [change, *_sweep(image, rules, who, _fence(who), available=_without(image, who))]


def recover(image: MetadataImage, rules: Rules, command: Recover) -> Out:
    """R3: some last-known members are still missing after unclean_recovery_wait_ms."""
    bodies: list[Message] = []
    for key in command.partitions:
        topic, state = image.topics.get(key.topic_id), image.partition(key)
        if topic is None or state is None:
            continue
        draft = Draft(state, rules.min_isr(image, topic.name))
        unclean = rules.unclean_enabled(image, topic.name)
        draft.elect(Cluster(image.available, unclean_enabled=unclean, wait_over=True))
        change = draft.record(key.topic_id, key.partition)
        if change is not None:
            bodies.append(change)
    return decision(len(bodies), bodies)


# -- ISR changes ---------------------------------------------------------------------------------


def alter_partition(image: MetadataImage, _rules: Rules, command: AlterPartition) -> Out:
    """A leader changes its ISR, or says that it has recovered from an unclean election (R2, T4)."""
    request = command.request
    registered(image, request.broker_id, request.broker_epoch)
    bodies: list[Message] = []
    reply = wire.AlterPartitionReply()
    for item in request.items:
        result = reply.results.add(topic_id=item.topic_id, partition=item.partition)
        try:
            state, change = _isr_change(image, request.broker_id, item)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
            continue
        result.leader, result.leader_epoch = state.leader, state.leader_epoch
        result.partition_epoch = state.partition_epoch + (change is not None)
        result.isr.extend(item.new_isr if change is not None else state.isr)
        if change is not None:
            bodies.append(change)
    return decision(reply, bodies)


def _isr_change(
    image: MetadataImage, leader: NodeId, item: wire.AlterPartitionItem
) -> tuple[PartitionState, wire.PartitionChangeRecord | None]:
    state = image.partition(PartitionKey(item.topic_id, item.partition))
    if state is None:
        raise errors.UnknownTopicId(f"{item.topic_id}:{item.partition} does not exist")
    if item.leader_epoch < state.leader_epoch:
        raise errors.FencedLeaderEpoch(f"leader epoch {item.leader_epoch} < {state.leader_epoch}")
    if state.leader != leader or item.leader_epoch != state.leader_epoch:
        raise errors.NotLeaderOrFollower(f"broker {leader} does not lead the partition")
    if item.partition_epoch != state.partition_epoch:
        raise errors.InvalidUpdateVersion(
            f"partition epoch {item.partition_epoch}, now {state.partition_epoch}"
        )
    new_isr = tuple(item.new_isr)
    if leader not in new_isr or not set(new_isr) <= set(state.replicas):
        raise errors.InvalidRequest(f"{new_isr} is not an ISR of replicas {state.replicas}")
    _check_eligible(image, state, item)
    unclean = state.unclean and not item.recovered
    if set(new_isr) == set(state.isr) and unclean == state.unclean:
        return state, None
    change = wire.PartitionChangeRecord(
        topic_id=item.topic_id, partition=item.partition, unclean=unclean
    )
    if set(new_isr) != set(state.isr):
        change.isr.CopyFrom(wire.IntList(values=new_isr))
        elr = [member for member in state.elr if member not in new_isr]
        if tuple(elr) != state.elr:
            change.elr.CopyFrom(wire.IntList(values=elr))
    return state, change


def _check_eligible(
    image: MetadataImage, state: PartitionState, item: wire.AlterPartitionItem
) -> None:
    """R2: fenced, draining or re-registered brokers never join (KIP-903)."""
    epochs = list(item.isr_broker_epochs)
    for index, member in enumerate(item.new_isr):
        if member in state.isr:
            continue
        broker = image.brokers.get(member)
        known = epochs[index] if index < len(epochs) else None
        if broker is None or not broker.available or known != broker.broker_epoch:
            raise errors.IneligibleReplica(f"broker {member} may not join the ISR now")


# -- shared --------------------------------------------------------------------------------------


def _fence(who: NodeId) -> Step:
    return lambda draft: draft.fence(who)


def _nothing(_draft: Draft) -> None:
    """Only the election is wanted."""


def _without(image: MetadataImage, who: NodeId) -> Callable[[NodeId], bool]:
    return lambda broker_id: broker_id != who and image.available(broker_id)


def _with(image: MetadataImage, who: NodeId) -> Callable[[NodeId], bool]:
    return lambda broker_id: broker_id == who or image.available(broker_id)


def _change(
    broker: BrokerState, *, fenced: bool, in_controlled_shutdown: bool
) -> wire.BrokerRegistrationChangeRecord:
    return wire.BrokerRegistrationChangeRecord(
        broker_id=broker.broker_id,
        broker_epoch=broker.broker_epoch,
        fenced=fenced,
        in_controlled_shutdown=in_controlled_shutdown,
    )


def _sweep(
    image: MetadataImage,
    rules: Rules,
    who: NodeId,
    step: Step,
    *,
    available: Callable[[NodeId], bool],
) -> list[Message]:
    """Apply `step` to every partition of `who`, elect where nobody leads, return the changes."""
    bodies: list[Message] = []
    topic: TopicState
    for topic, number, state in image.partitions_of(who):
        draft = Draft(state, rules.min_isr(image, topic.name))
        step(draft)
        draft.elect(Cluster(available))
        change = draft.record(topic.topic_id, number)
        if change is not None:
            bodies.append(change)
    return bodies
