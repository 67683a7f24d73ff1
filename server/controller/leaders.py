"""Decisions about who leads while all is well, when a leader gives up the lead (rule L16), or when
an operator says so (KIP-460).

The preferred leader of a partition is its first replica: placement spread those evenly, so a
cluster whose partitions are led by them is balanced.  Leadership goes back only to a replica that
is in sync and fit to lead, and whose broker is neither fenced nor shutting down; nothing is lost
by it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pk import errors
from pk.server.controller.batched_decision import BatchedDecision
from pk.server.controller.commands import ElectLeaders, HandOver, Out, Prefer, Rules, decision
from pk.server.controller.elections import Cluster, PartitionChangeBuilder
from pk.server.metadata.image import MetadataImage
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: Leaders moved by one decision: clients of so many partitions look for them at once.
MOVES_MAX = 500


def imbalanced(image: MetadataImage) -> Iterator[PartitionKey]:
    """Partitions led by another replica than their first, which could lead."""
    for topic, number, state in image.partitions():
        first = state.replicas[0]
        if state.leader not in (NONE, first) and first in state.isr and image.available(first):
            yield PartitionKey(topic.topic_id, number)


def prefer(image: MetadataImage, rules: Rules, command: Prefer) -> Out:
    """Preferred leaders for these partitions, where they may lead; the reply counts the moves."""
    batch = BatchedDecision(image, rules, Cluster(image, command.reports), MOVES_MAX)
    for key in command.partitions:
        if not batch.full:
            batch.visit_key(key, lambda builder: builder.prefer(batch.cluster))
    return decision(len(batch.bodies), batch.bodies, batch.effects)


def hand_over(image: MetadataImage, rules: Rules, command: HandOver) -> Out:
    """L16: the reply names the partitions that another replica leads from now on."""
    batch = BatchedDecision(image, rules, Cluster(image, command.reports), MOVES_MAX)
    moved: list[PartitionKey] = []
    for key in command.partitions:
        if batch.full:
            break
        builder = batch.visit_key(key, lambda each: each.hand_over(batch.cluster))
        if builder is not None and builder.led_anew:
            moved.append(key)
    return decision(tuple(moved), batch.bodies, batch.effects)


def elect_leaders(image: MetadataImage, rules: Rules, command: ElectLeaders) -> Out:
    """Elect preferred leaders, or unclean ones where nobody leads; a result per partition.

    An unclean election compares what replicas report; until they have, it is refused with
    `EligibleLeadersNotAvailable`, which may be tried again.
    """
    request = command.request
    batch = BatchedDecision(image, rules, Cluster(image, command.reports))
    reply = wire.ElectLeadersReply()
    seen: dict[PartitionKey, None] = {}
    for item in request.partitions:
        key = PartitionKey(item.topic_id, item.partition)
        topic = image.topics.get(key.topic_id)
        name = key.topic_id if topic is None else topic.name
        result = reply.results.add(topic=name, partition=key.partition)
        try:
            if key in seen:
                raise errors.InvalidRequest(f"{name}-{key.partition} is named twice in one request")
            seen[key] = None
            _elect(batch, key, f"{name}-{key.partition}", unclean=request.unclean)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
    reply.metadata_offset = image.offset + len(batch.bodies)
    return decision(reply, batch.bodies, batch.effects)


def _elect(batch: BatchedDecision, key: PartitionKey, name: str, *, unclean: bool) -> None:
    image, cluster = batch.cluster.image, batch.cluster
    state = image.partition(key)
    if state is None:
        raise errors.UnknownTopicOrPartition(f"{name} does not exist")
    if unclean:
        if state.leader != NONE:
            raise errors.ElectionNotNeeded(f"{name}: broker {state.leader} leads")
        builder = batch.visit_key(key, may_lose=True)
        if builder is None or builder.now.leader == NONE:
            there = [str(each) for each in state.replicas if cluster.eligible(each, key)]
            raise errors.EligibleLeadersNotAvailable(
                f"{name}: no replica can be elected"
                + (f"; brokers {', '.join(there)} have not said how far they are" if there else "")
            )
        return
    first = state.replicas[0]
    if state.leader == first:
        raise errors.ElectionNotNeeded(f"{name}: its preferred leader {first} leads")

    def prefer_or_elect(builder: PartitionChangeBuilder) -> None:
        if builder.now.leader == NONE:
            builder.elect(cluster)
        builder.prefer(cluster)

    builder = batch.visit_key(key, prefer_or_elect)
    if builder is None or builder.now.leader != first:
        raise errors.PreferredLeaderNotAvailable(
            f"{name}: preferred leader {first} is not in sync, not available or its disk is full, "
            "or the leader recovers from an unclean election"
        )
