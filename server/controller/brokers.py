"""Decisions about brokers: registration, heartbeats, fencing, controlled shutdown, ISR changes.

Rules: L3 and R11 (what survived a restart), Q2 (unfenced only when its image holds its
registration), R2 (who may join an ISR), R3 (recovery elections), R7 (a lost session fences).  Each
function reads the image and returns a `Decision`; the elections are in `elections.py`.

A replica that its broker reports as offline (rules L2, L9, L15) is treated like a replica that may
have lost its data: a record removes it from ISR and ELR before its broker is unfenced.  The offline
mark itself is soft state (`reports.py`).  An offline replica is not elected.  Once the broker no
longer reports it, it returns by an election or by joining the ISR.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from pk import errors, formats
from pk.server.controller.batched_decision import BatchedDecision, More, Step, StepOf
from pk.server.controller.commands import (
    AlterPartition,
    Fence,
    Heartbeat,
    ListBrokers,
    Out,
    Recover,
    Register,
    Rules,
    UnregisterBroker,
    decision,
    registered,
)
from pk.server.controller.elections import LeaderEligibility, PartitionChangeBuilder
from pk.server.controller.levels import require_known
from pk.server.controller.reports import wanted
from pk.server.metadata.image import BrokerState, MetadataImage, PartitionState
from pk.types import NONE, NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire


def register(image: MetadataImage, rules: Rules, command: Register) -> Out:
    """Register a broker, and decide whether its replicas still hold their data (rule L3).

    An incarnation that only lost its stream resumes its registration: its process never ended.
    Refuses a broker whose metadata are newer than this controller's (rule Q2).
    """
    request = command.request
    if image.cluster_id and request.cluster_id and request.cluster_id != image.cluster_id:
        raise errors.ClusterIdMismatch(
            f"broker {request.broker_id} belongs to cluster {request.cluster_id}, "
            f"this is {image.cluster_id}"
        )
    old = image.brokers.get(request.broker_id)
    newest = image.offset if old is None else old.broker_epoch
    if request.previous_broker_epoch > newest:
        there = f"ends at {image.offset + 1}" if old is None else f"knows none after {newest}"
        raise errors.MetadataBehind(
            f"broker {request.broker_id} was registered at offset {request.previous_broker_epoch} "
            f"of the metadata log, and this metadata log {there}: it was restored from an older "
            "copy, or is a new one. It lacks all partitions that were created since. Restore the "
            "newer metadata; or, to go on without these partitions, delete run.json and "
            "clean-shutdown in the broker's directories"
        )
    if old is not None and old.incarnation_id == request.incarnation_id:
        if _same(old, request):
            reply = wire.RegisterBrokerReply(broker_epoch=old.broker_epoch, clean=True)
            return decision(reply)
    elif command.live:
        raise errors.DuplicateBroker(
            f"broker {request.broker_id} is alive with another process; use another node_id"
        )
    require_known(image, request)
    survived = _survived(old, request)
    clean = survived is None
    who = request.broker_id
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports, leaving=who))
    if not batch.all_of(who, _fences_survivors(who, survived)):
        return decision(More(), batch.bodies, batch.effects)
    epoch = image.offset + 1
    record = wire.RegisterBrokerRecord(
        broker_id=who,
        broker_epoch=epoch,
        incarnation_id=request.incarnation_id,
        boot_id=request.boot_id,
        directory_ids=request.directory_ids,
        address=request.address,
        rack=request.rack,
        fenced=True,
        clean=clean,
        format_level=formats.level_field(request.format_level),
    )
    reply = wire.RegisterBrokerReply(broker_epoch=epoch, clean=clean)
    return decision(reply, [record, *batch.bodies], batch.effects)


def _same(old: BrokerState, request: wire.RegisterBrokerRequest) -> bool:
    return (old.address, old.rack, old.boot_id, old.directory_ids, old.format_level) == (
        request.address,
        request.rack,
        request.boot_id,
        tuple(request.directory_ids),
        max(1, request.format_level),
    )


def _survived(
    old: BrokerState | None, request: wire.RegisterBrokerRequest
) -> frozenset[str] | None:
    """Return the directories in which everything that the broker had WRITTEN is still there.

    None = every directory.  The content survived (rule L3) in three cases: the process is the same,
    the boot is the same (the page cache outlived the process), or the clean-shutdown file names
    exactly the registration that the controller knows.  Otherwise it survived in no directory.  If
    a directory is missing now, the replicas in it are lost.  So are the replicas without a named
    directory, because they may have been in it (rule R11).
    """
    if old is None:
        return None  # no partition names this broker, so it cannot have lost data
    same = old.incarnation_id == request.incarnation_id or old.boot_id == request.boot_id
    closed = request.clean_shutdown and request.previous_broker_epoch == old.broker_epoch
    if not same and not closed:
        return frozenset()
    here = frozenset(request.directory_ids)
    return None if here.issuperset(old.directory_ids) else here.intersection(old.directory_ids)


def heartbeat(image: MetadataImage, rules: Rules, command: Heartbeat) -> Out:
    """Decide a heartbeat: unfence, fence or drain the broker as asked (rule Q2).

    Reports about its replicas may lead to elections."""
    request = command.request
    broker = registered(image, request.broker_id, request.broker_epoch)
    who = broker.broker_id
    caught_up = request.metadata_offset >= broker.broker_epoch
    # The broker has reacted to the record that fenced it, and to the elections before this record.
    knows = request.metadata_offset >= broker.changed_offset
    reply = wire.BrokerHeartbeatReply(fenced=broker.fenced, caught_up=caught_up)
    drains = request.want_shutdown and broker.available
    fences = request.want_fence and not request.want_shutdown and not broker.fenced
    unfences = broker.fenced and knows and not (request.want_fence or request.want_shutdown)
    cluster = LeaderEligibility(
        image,
        command.reports,
        arriving=who if unfences else NONE,
        leaving=who if drains or fences else NONE,
    )
    report = cluster.report(who)
    offline = {} if report is None else report.offline
    batch = BatchedDecision(image, rules, cluster)
    if drains or fences:  # last: the change of the broker follows those of its partitions
        if not batch.all_of(who, _fences(who, offline)):
            return decision(More(), batch.bodies, batch.effects)
        reply.fenced = fences
        batch.bodies.append(_change(broker, fenced=fences, in_controlled_shutdown=drains))
    elif unfences:  # `Recover` tries the elections for which this decision has no room
        if not batch.all_of(who, _lost_ones(who, offline)):  # L15: offline replicas go first
            return decision(More(), batch.bodies, batch.effects)
        reply.fenced = False
        batch.bodies.append(_change(broker, fenced=False, in_controlled_shutdown=False))
        batch.all_of(who, _arrives(who, offline))
    else:
        if request.want_shutdown:
            reply.may_shut_down = broker.fenced or knows
        _news(batch, who, offline, command.retry)
        _name_directories(batch, broker, request)
    for key in wanted(image, command.reports, who, command.unclean) if caught_up else ():
        reply.report_positions.add(topic_id=key.topic_id, partition=key.partition)
    return decision(reply, batch.bodies, batch.effects)


def _news(
    batch: BatchedDecision,
    who: NodeId,
    offline: Mapping[PartitionKey, None],
    retry: Iterable[PartitionKey],
) -> None:
    """Remove replicas that went offline, and try the elections that new reports allow.

    If the decision has no room for a change, the next heartbeat or `Recover` makes it.
    """
    lost = _loses(who)
    for key in offline:
        state = batch.cluster.image.partition(key)
        step = None if state is None else lost(key, state)
        if step is not None and not batch.full:
            batch.visit_key(key, step)
    for key in retry:
        state = batch.cluster.image.partition(key)
        if key not in offline and state is not None and state.leader == NONE and not batch.full:
            batch.visit_key(key)


def _name_directories(
    batch: BatchedDecision, broker: BrokerState, request: wire.BrokerHeartbeatRequest
) -> None:
    """Record the directories in which the broker's replicas lie (rule R11, KIP-858).

    Changes for which the decision has no room are made by the next heartbeat.
    """
    who = broker.broker_id
    for each in request.directories:
        key = PartitionKey(each.topic_id, each.partition)
        state = batch.cluster.image.partition(key)
        if state is None or who not in state.replicas or batch.full:
            continue
        known = each.directory_id in broker.directory_ids
        if known and each.directory_id != state.directory_of(who):
            batch.visit_key(key, _names(who, each.directory_id))


def fence(image: MetadataImage, rules: Rules, command: Fence) -> Out:
    """Fence a broker whose session ended (rule R7).  A later registration is not affected."""
    broker = image.brokers.get(command.broker_id)
    if broker is None or broker.broker_epoch != command.broker_epoch or broker.fenced:
        return decision(False)
    who = broker.broker_id
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports, leaving=who))
    report = batch.cluster.report(who)
    offline = {} if report is None else report.offline
    if not batch.all_of(who, _fences(who, offline)):
        return decision(More(), batch.bodies, batch.effects)
    draining = broker.in_controlled_shutdown
    batch.bodies.append(_change(broker, fenced=True, in_controlled_shutdown=draining))
    return decision(True, batch.bodies, batch.effects)


def recover(image: MetadataImage, rules: Rules, command: Recover) -> Out:
    """Try to elect leaders of leaderless partitions (rule R3), and to complete reassignments."""
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports))
    for key in command.partitions:
        topic, state = image.topics.get(key.topic_id), image.partition(key)
        if topic is None or state is None or batch.full:
            continue
        if state.leader != NONE and not state.adding and not state.removing:
            continue
        may_lose = key in command.waited and rules.unclean_enabled(image, topic.name)
        batch.visit(topic, key.partition, state, may_lose=may_lose)
    return decision(len(batch.bodies), batch.bodies, batch.effects)


def unregister(image: MetadataImage, _rules: Rules, command: UnregisterBroker) -> Out:
    """Remove the registration of a broker that will not return (KIP-500).

    Unlike Kafka, this is refused while any partition names the broker.  A broker that registers
    under an unknown id is assumed to have lost nothing (rule L3), which holds only while no
    partition is assigned to it.  Replicas leave a broker by a reassignment.
    """
    who = command.request.broker_id
    broker = image.brokers.get(who)
    if broker is None:
        raise errors.BrokerNotRegistered(f"broker {who} is not registered")
    if not broker.fenced:
        raise errors.InvalidRequest(f"broker {who} is alive; stop it first")
    for topic, number, _ in image.partitions_of(who):
        raise errors.InvalidRequest(
            f"broker {who} is a replica of {topic.name}-{number}: reassign its partitions first"
        )
    record = wire.UnregisterBrokerRecord(broker_id=who, broker_epoch=broker.broker_epoch)
    return decision(wire.UnregisterBrokerReply(metadata_offset=image.offset + 1), [record])


def list_brokers(image: MetadataImage, _rules: Rules, _command: ListBrokers) -> Out:
    """Return every registered broker, as the metadata image has it."""
    reply = wire.ListBrokersReply(metadata_offset=NONE)
    for who, broker in sorted(image.brokers.items()):
        state = "fenced" if broker.fenced else "active"
        reply.brokers.add(
            broker_id=who,
            address=broker.address,
            rack=broker.rack,
            state="shutting down" if broker.in_controlled_shutdown else state,
            broker_epoch=broker.broker_epoch,
        )
    return decision(reply)


# -- ISR changes ---------------------------------------------------------------------------------


def alter_partition(image: MetadataImage, rules: Rules, command: AlterPartition) -> Out:
    """Change an ISR as its leader asks, or end its recovery from an unclean election (R2, T4)."""
    request = command.request
    registered(image, request.broker_id, request.broker_epoch)
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports))
    reply = wire.AlterPartitionReply()
    seen: dict[PartitionKey, None] = {}
    for item in request.items:
        key = PartitionKey(item.topic_id, item.partition)
        result = reply.results.add(topic_id=item.topic_id, partition=item.partition)
        try:
            if key in seen:
                raise errors.InvalidRequest(f"{key} is named twice in one request")
            seen[key] = None
            builder = _isr_change(batch, request.broker_id, key, item)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
            continue
        state, changed = builder.now, builder.restated or builder.now != builder.before
        result.leader, result.leader_epoch = state.leader, state.leader_epoch + builder.led_anew
        result.partition_epoch = state.partition_epoch + changed
        result.isr.extend(state.isr)
    return decision(reply, batch.bodies, batch.effects)


def _isr_change(
    batch: BatchedDecision, leader: NodeId, key: PartitionKey, item: wire.AlterPartitionItem
) -> PartitionChangeBuilder:
    image = batch.cluster.image
    topic, state = image.topics.get(key.topic_id), image.partition(key)
    if topic is None or state is None:
        raise errors.UnknownTopicId(f"{key} does not exist")
    if item.leader_epoch < state.leader_epoch:
        raise errors.FencedLeaderEpoch(f"leader epoch {item.leader_epoch} < {state.leader_epoch}")
    if state.leader != leader or item.leader_epoch != state.leader_epoch:
        raise errors.NotLeaderOrFollower(f"broker {leader} does not lead the partition")
    if item.partition_epoch != state.partition_epoch:
        raise errors.InvalidUpdateVersion(
            f"partition epoch {item.partition_epoch}, now {state.partition_epoch}"
        )
    isr = tuple(item.new_isr)
    distinct = set(isr)
    if leader not in isr or len(distinct) != len(isr) or not distinct <= set(state.replicas):
        raise errors.InvalidRequest(f"{isr} is not an ISR of replicas {state.replicas}")
    _check_eligible(batch.cluster, key, state, item)

    def change(builder: PartitionChangeBuilder) -> None:
        builder.alter_isr(isr)
        if distinct == set(state.isr) and not item.isr_broker_epochs:
            # no replica joins: the leader withdraws its earlier request
            builder.restate_isr()
        if item.recovered:
            builder.recovered()

    return batch.visit(topic, key.partition, state, change)


def _check_eligible(
    cluster: LeaderEligibility,
    key: PartitionKey,
    state: PartitionState,
    item: wire.AlterPartitionItem,
) -> None:
    """Raise if a broker may not join an ISR (rule R2, KIP-903).

    The controller refuses brokers that are fenced, draining or registered again, and replicas that
    are offline.  It refuses a broker that has sent no heartbeat in this term, because it does not
    know yet which of the broker's replicas are offline.  It refuses a replica whose named directory
    the broker no longer has, until the broker names the directory in which the replica was created
    again (rule R11).
    """
    epochs = list(item.isr_broker_epochs)
    for index, member in enumerate(item.new_isr):
        if member in state.isr:
            continue
        broker = cluster.image.brokers.get(member)
        known = epochs[index] if index < len(epochs) else None
        may_join = broker is not None and known == broker.broker_epoch
        heard = cluster.report(member) is not None
        named = state.directory_of(member)
        placed = broker is not None and (not named or named in broker.directory_ids)
        if not (may_join and heard and placed and cluster.eligible(member, key)):
            raise errors.IneligibleReplica(f"broker {member} may not join the ISR now")


# -- shared --------------------------------------------------------------------------------------


def _fences(who: NodeId, offline: Container[PartitionKey] = ()) -> StepOf:
    """The step that removes `who` from an ISR, and from the ELR if its replica is offline."""
    lost, fenced = _loses(who), _fence(who)

    def step_of(key: PartitionKey, state: PartitionState) -> Step | None:
        if key in offline:
            return lost(key, state)
        return fenced if who in state.isr else None

    return step_of


def _fences_survivors(who: NodeId, survived: Container[str] | None) -> StepOf:
    """The step that fences `who`, and removes its replicas outside of `survived` as lost."""
    lost, fenced = _loses(who), _fences(who)

    def step_of(key: PartitionKey, state: PartitionState) -> Step | None:
        whole = survived is None or state.directory_of(who) in survived
        return fenced(key, state) if whole else lost(key, state)

    return step_of


def _names(who: NodeId, directory_id: str) -> Step:
    return lambda builder: builder.name_directory(who, directory_id)


def _loses(who: NodeId) -> StepOf:
    def lose(builder: PartitionChangeBuilder) -> None:
        builder.lose(who)

    return lambda _key, state: lose if who in state.isr or who in state.elr else None


def _lost_ones(who: NodeId, offline: Container[PartitionKey]) -> StepOf:
    """The step that treats a replica reported as offline like one that lost its data."""
    lost = _loses(who)
    return lambda key, state: lost(key, state) if key in offline else None


def _arrives(who: NodeId, offline: Container[PartitionKey]) -> StepOf:
    """The step that lets the replicas of a returning broker be elected, except offline ones."""
    return lambda key, state: _nothing if state.leader == NONE and key not in offline else None


def _fence(who: NodeId) -> Step:
    return lambda builder: builder.fence(who)


def _nothing(_builder: PartitionChangeBuilder) -> None:
    """A step without a change: the visit only tries an election."""


def _change(
    broker: BrokerState, *, fenced: bool, in_controlled_shutdown: bool
) -> wire.BrokerRegistrationChangeRecord:
    return wire.BrokerRegistrationChangeRecord(
        broker_id=broker.broker_id,
        broker_epoch=broker.broker_epoch,
        fenced=fenced,
        in_controlled_shutdown=in_controlled_shutdown,
    )
