"""Decisions about topics (create, delete, add partitions) and about blocks of producer ids.

Each topic of a request succeeds or fails separately; its result has the error.  A topic is created
completely or not at all, because a decision is one batch of the metadata log, which is atomic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from pk import errors, generations, limits, settings
from pk.server.controller.commands import (
    AllocateProducerIds,
    CreatePartitions,
    CreateTopics,
    DeleteTopics,
    Out,
    Rules,
    TierPurged,
    decision,
    registered,
)
from pk.server.controller.partition_limits import Room
from pk.server.controller.placement import Candidate, assigned, place
from pk.server.metadata.image import (
    BROKER_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
    TopicState,
)
from pk.server.node.settings import check_topic_settings
from pk.topic_names import is_internal, what_is_wrong
from pk.types import Epoch, NodeId, TopicId
from pk.wire import frames
from pk.wire import pk_pb2 as wire

REPARTITIONED = (
    "keys of new records map to other partitions from now on; "
    "records already stored stay where they are"
)


def check_name(name: str) -> None:
    """Raise `InvalidTopic`, which says what is wrong, for a name that Kafka's rules refuse."""
    wrong = what_is_wrong(name)
    if not wrong and is_internal(name):
        wrong = "starts with '__', which is pk's own"
    if wrong:
        raise errors.InvalidTopic(f"topic name {name[:300]!r} {wrong}", topic=name[:300])


def cluster_base(image: MetadataImage, rules: Rules) -> dict[str, Any]:
    """Return the defaults of topics: the cluster's settings over the file's."""
    stored = settings.TOPIC.parse(image.settings_of(BROKER_RESOURCE, ""))
    return {**rules.topic_defaults, **stored}


# -- create ----------------------------------------------------------------------------------------


def create_topics(image: MetadataImage, rules: Rules, command: CreateTopics) -> Out:
    """Create topics: a TopicRecord, ConfigRecords and PartitionRecords for each valid one.

    A request id that was seen before gets the same answer for the topics that it created.
    """
    request_id = command.request.request_id
    if len(request_id) > limits.TOPIC_NAME_MAX:
        raise errors.InvalidRequest(f"a request id has {limits.TOPIC_NAME_MAX} characters at most")
    bodies: list[Message] = []
    reply = wire.CreateTopicsReply()
    seen: dict[str, None] = {}
    budget, room = limits.PARTITIONS_PER_TOPIC_MAX, Room(image, command.reports)
    for new, topic_id in zip(command.request.topics, command.topic_ids, strict=True):
        result = reply.results.add(name=new.name)
        try:
            if new.name in seen:
                raise errors.InvalidRequest(f"topic {new.name} is named twice in one request")
            seen[new.name] = None
            known = image.topic(new.name)
            if known is not None and request_id and known.request_id == request_id:
                result.topic_id = known.topic_id  # the request is repeated: its reply was lost
                continue
            start = len(image.topics) + len(seen) - 1
            made = _new_topic(image, rules, new, topic_id, budget, room, start=start)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
            continue
        result.topic_id = topic_id
        budget -= sum(isinstance(body, wire.PartitionRecord) for body in made)
        record = wire.TopicRecord(name=new.name, topic_id=topic_id, request_id=request_id)
        bodies += [record, *made]
    if command.request.validate_only:
        bodies = []
    reply.metadata_offset = image.offset + len(bodies)
    return decision(reply, bodies)


def _new_topic(
    image: MetadataImage,
    rules: Rules,
    new: wire.NewTopic,
    topic_id: TopicId,
    budget: int,
    room: Room,
    *,
    start: int,
) -> list[Message]:
    """Return the records of one new topic: its settings and partitions."""
    check_name(new.name)
    if new.name in image.topic_ids:
        raise errors.TopicAlreadyExists(f"topic {new.name} exists", topic=new.name)
    values = check_topic_settings(new.configs, cluster_base(image, rules))
    if new.assignment:
        replicas = _assigned(image, new, budget)
    else:
        count = _or_default(new.partitions, int(rules.server["default_num_partitions"]))
        if count < 1:
            raise errors.InvalidPartitions(f"{count} partitions: a topic has at least one")
        _check_count(count, budget)
        default = int(rules.server["default_replication_factor"])
        factor = _or_default(new.replication_factor, default)
        if factor < 1:
            raise errors.InvalidReplicationFactor(f"replication factor {factor}: at least one")
        replicas = place(_candidates(image, room, factor), count, factor, start)
    room.take(replicas)
    return _records(image, new.name, topic_id, values, replicas)


def _assigned(image: MetadataImage, new: wire.NewTopic, budget: int) -> list[tuple[NodeId, ...]]:
    """Return the replicas that the request names for each partition of a new topic."""
    given = [list(each.broker_ids) for each in new.assignment]
    if new.partitions not in (0, -1, len(given)) or new.replication_factor not in (0, -1):
        raise errors.InvalidRequest(
            f"topic {new.name}: a replica assignment already says how many partitions and replicas "
            "there are; give one or the other"
        )
    _check_count(len(given), budget)
    return assigned(_candidates(image), given)


def _records(
    image: MetadataImage,
    name: str,
    topic_id: TopicId,
    values: Mapping[str, str],
    replicas: Sequence[tuple[NodeId, ...]],
) -> list[Message]:
    """Return the records of a new topic's settings and partitions."""
    bodies: list[Message] = [
        wire.ConfigRecord(
            resource_type=TOPIC_RESOURCE, resource_name=name, name=option, value=values[option]
        )
        for option in sorted(values)
    ]
    for number, members in enumerate(replicas):
        bodies.append(_new_partition(image, topic_id, number, members))
    return bodies


def internal_topic_records(
    image: MetadataImage,
    name: str,
    topic_id: TopicId,
    values: Mapping[str, str],
    count: int,
    factor: int,
) -> list[Message]:
    """Return all records of a new topic of pk's own.  Raises `BrokerUnavailable`."""
    replicas = place(_candidates(image), count, factor, len(image.topics))  # pk's own have no bound
    topic = wire.TopicRecord(name=name, topic_id=topic_id)
    return [topic, *_records(image, name, topic_id, values, replicas)]


def _or_default(value: int, default: int) -> int:
    """Return the server's default for 0 (absent on the wire) and -1 (Kafka's), else `value`."""
    return default if value in (0, -1) else value


def _check_count(count: int, budget: int) -> None:
    if count > limits.PARTITIONS_PER_TOPIC_MAX:
        raise errors.InvalidPartitions(
            f"{count} partitions: a topic has at most {limits.PARTITIONS_PER_TOPIC_MAX}"
        )
    if count > budget:
        raise errors.InvalidPartitions(
            f"one request makes at most {limits.PARTITIONS_PER_TOPIC_MAX} partitions; split it"
        )


def _candidates(image: MetadataImage, room: Room | None = None, factor: int = 1) -> list[Candidate]:
    """Return the brokers for new replicas: those with room, if they are enough for all replicas of
    a partition.
    """
    known = [
        Candidate(each.broker_id, each.rack, each.available) for each in image.brokers.values()
    ]
    roomy = [each for each in known if room is None or room.has(each.broker_id)]
    available = sum(each.available for each in roomy)
    return roomy if available and len(roomy) >= factor else known


def _new_partition(
    image: MetadataImage, topic_id: TopicId, number: int, replicas: tuple[NodeId, ...]
) -> wire.PartitionRecord:
    """Return the record of a new partition.  All available replicas are in sync: it is empty."""
    first = _first_epoch(image, topic_id)
    if first:
        return _begun_by_claim(image, topic_id, number, replicas, first)
    return wire.PartitionRecord(
        topic_id=topic_id,
        partition=number,
        replicas=replicas,
        directories=[image.only_directory(member) for member in replicas],
        isr=[member for member in replicas if image.available(member)],
        leader=next(member for member in replicas if image.available(member)),
        leader_epoch=0,
        partition_epoch=0,
    )


def _first_epoch(image: MetadataImage, topic_id: TopicId) -> Epoch:
    """Return the first leader epoch of a new partition: that of the topic's block (rule T13)."""
    topic = image.topics.get(topic_id)
    first = topic.partitions[0].leader_epoch if topic is not None else 0
    return generations.generation_of_epoch(first) * generations.EPOCHS


def _begun_by_claim(
    image: MetadataImage,
    topic_id: TopicId,
    number: int,
    replicas: tuple[NodeId, ...],
    epoch: Epoch,
) -> wire.PartitionRecord:
    """Return the record of a new partition of a topic that was restored.

    The cluster that was lost may live, and may have created the same partition.  So the leader
    begins as after an unclean election: it claims the table and begins its log where the claim says
    (rule T4).
    """
    return wire.PartitionRecord(
        topic_id=topic_id,
        partition=number,
        replicas=replicas,
        directories=[image.only_directory(member) for member in replicas],
        isr=replicas[:1],
        leader=replicas[0],
        leader_epoch=epoch,
        unclean=True,
        unclean_epoch=epoch,
    )


# -- grow and delete -------------------------------------------------------------------------------


def create_partitions(image: MetadataImage, rules: Rules, command: CreatePartitions) -> Out:
    """Add partitions (never remove); the reply says that keys may map to other partitions."""
    bodies: list[Message] = []
    reply = wire.CreatePartitionsReply()
    seen: dict[str, None] = {}
    budget, room = limits.PARTITIONS_PER_TOPIC_MAX, Room(image, command.reports)
    for wanted in command.request.topics:
        result = reply.results.add(name=wanted.name)
        try:
            if wanted.name in seen:
                raise errors.InvalidRequest(f"topic {wanted.name} is named twice in one request")
            seen[wanted.name] = None
            topic = _existing(image, wanted.name)
            today = len(topic.partitions)
            if wanted.total_count <= today:
                raise errors.InvalidPartitions(
                    f"topic {wanted.name} has {today} partitions; {wanted.total_count} is not more"
                )
            _check_count(wanted.total_count, budget)
            factor = len(topic.partitions[0].target)
            more = wanted.total_count - today
            if wanted.assignment:
                given = [list(each.broker_ids) for each in wanted.assignment]
                if len(given) != more:
                    raise errors.InvalidReplicaAssignment(
                        f"topic {wanted.name} gets {more} new partitions, and the replica "
                        f"assignment has {len(given)} entries: one for each new partition"
                    )
                placed = assigned(_candidates(image), given, factor)
            else:
                placed = place(_candidates(image, room, factor), more, factor, today)
            room.take(placed)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
            continue
        result.topic_id, result.note = topic.topic_id, REPARTITIONED
        budget -= len(placed)
        bodies += [
            _new_partition(image, topic.topic_id, today + index, members)
            for index, members in enumerate(placed)
        ]
    reply.metadata_offset = image.offset + len(bodies)
    return decision(reply, bodies)


def _existing(image: MetadataImage, name: str) -> TopicState:
    topic = image.topic(name)
    if topic is None:
        raise errors.UnknownTopicOrPartition(f"topic {name[:300]} does not exist", topic=name[:300])
    if topic.internal:
        raise errors.InvalidTopic(f"topic {name} is pk's own: clients can only read it", topic=name)
    return topic


def delete_topics(image: MetadataImage, _rules: Rules, command: DeleteTopics) -> Out:
    """Delete topics by name or id.  A topic re-created under its name has another id (L8)."""
    request = command.request
    bodies: list[Message] = []
    reply = wire.DeleteTopicsReply()
    gone: dict[TopicId, None] = {}
    for name, topic_id in [(n, "") for n in request.names] + [("", i) for i in request.topic_ids]:
        result = reply.results.add(name=name, topic_id=topic_id)
        try:
            if topic_id:
                if topic_id not in image.topics:
                    raise errors.UnknownTopicId(f"no topic has the id {topic_id[:40]}")
                name = image.topics[topic_id].name
            topic = _existing(image, name)
            if topic.topic_id in gone:
                raise errors.InvalidRequest(f"topic {name} is named twice in one request")
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
            continue
        gone[topic.topic_id] = None
        result.name, result.topic_id = topic.name, topic.topic_id
        bodies.append(
            wire.RemoveTopicRecord(
                topic_id=topic.topic_id, name=topic.name, purge_tier=request.purge_tier
            )
        )
    reply.metadata_offset = image.offset + len(bodies)
    return decision(reply, bodies)


def tier_purged(image: MetadataImage, _rules: Rules, command: TierPurged) -> Out:
    """Remove the purge mark of a deleted topic whose table is completely gone (rule T7).

    Every broker with a tier purges, so another one may have removed the mark before.
    """
    request = command.request
    registered(image, request.broker_id, request.broker_epoch)
    bodies = []
    if request.topic_id in image.purges:
        bodies.append(wire.TierPurgeRecord(topic_id=request.topic_id, done=True))
    return decision(wire.TierPurgedReply(), bodies)


# -- producer ids ----------------------------------------------------------------------------------


def allocate_producer_ids(image: MetadataImage, _rules: Rules, command: AllocateProducerIds) -> Out:
    """Allocate a block of producer ids.  The controller never allocates these ids again."""
    request = command.request
    registered(image, request.broker_id, request.broker_epoch)
    first = image.next_producer_id
    if generations.leaves_block(first, limits.PRODUCER_ID_BLOCK, generations.PRODUCER_IDS):
        raise errors.UnsupportedFeature("this cluster has no producer ids left (T13)")
    record = wire.ProducerIdsRecord(
        broker_id=request.broker_id,
        broker_epoch=request.broker_epoch,
        next_producer_id=first + limits.PRODUCER_ID_BLOCK,
    )
    reply = wire.AllocateProducerIdsReply(first=first, count=limits.PRODUCER_ID_BLOCK)
    return decision(reply, [record])
