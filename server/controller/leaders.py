"""Decisions that move leadership: preferred leaders, leaders that give up (L16), KIP-460 requests.

The preferred leader of a partition is its first replica.  Placement spreads first replicas evenly,
so a cluster that is led by preferred leaders is balanced.  Leadership moves back only to a replica
that is in sync and fit to lead, and whose broker is neither fenced nor shutting down.  So the move
loses no record.
"""

from __future__ import annotations

from collections.abc import Iterator

from pk import errors
from pk.server.controller.batched_decision import BatchedDecision
from pk.server.controller.commands import ElectLeaders, HandOver, Out, Prefer, Rules, decision
from pk.server.controller.elections import LeaderEligibility, PartitionChangeBuilder
from pk.server.metadata.image import MetadataImage
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: The most leaders that a decision moves, because the clients of all of them refresh their metadata
#: at once.
MOVES_MAX = 500


def imbalanced(image: MetadataImage) -> Iterator[PartitionKey]:
    """Return the partitions whose first replica does not lead, although it could."""
    for topic, number, state in image.partitions():
        first = state.replicas[0]
        if state.leader not in (NONE, first) and first in state.isr and image.available(first):
            yield PartitionKey(topic.topic_id, number)


def prefer(image: MetadataImage, rules: Rules, command: Prefer) -> Out:
    """Elect the preferred leaders of these partitions where allowed; the reply counts the moves."""
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports), MOVES_MAX)
    for key in command.partitions:
        if not batch.full:
            batch.visit_key(key, lambda builder: builder.prefer(batch.cluster))
    return decision(len(batch.bodies), batch.bodies, batch.effects)


def hand_over(image: MetadataImage, rules: Rules, command: HandOver) -> Out:
    """Move the lead of these partitions (rule L16); the reply names those that were moved."""
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports), MOVES_MAX)
    moved: list[PartitionKey] = []
    for key in command.partitions:
        if batch.full:
            break
        builder = batch.visit_key(key, lambda each: each.hand_over(batch.cluster))
        if builder is not None and builder.led_anew:
            moved.append(key)
    return decision(tuple(moved), batch.bodies, batch.effects)


def elect_leaders(image: MetadataImage, rules: Rules, command: ElectLeaders) -> Out:
    """Elect preferred leaders, or unclean leaders of leaderless partitions; a result for each.

    An unclean election compares the positions that replicas report.  Until all have reported, it is
    refused with `EligibleLeadersNotAvailable`, which is retriable.
    """
    request = command.request
    batch = BatchedDecision(image, rules, LeaderEligibility(image, command.reports))
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
        builder = batch.visit_key(key, lambda each: each.require_epochs(name), may_lose=True)
        if builder is None or builder.now.leader == NONE:
            there = [str(each) for each in state.candidates if cluster.eligible(each, key)]
            raise errors.EligibleLeadersNotAvailable(
                f"{name}: no replica can be elected"
                + (f"; brokers {', '.join(there)} have not said how far they are" if there else "")
            )
        return
    first = state.replicas[0]
    if state.leader == first:
        raise errors.ElectionNotNeeded(f"{name}: its preferred leader {first} leads")

    def prefer_or_elect(builder: PartitionChangeBuilder) -> None:
        builder.require_epochs(name)
        if builder.now.leader == NONE:
            builder.elect(cluster)
        builder.prefer(cluster)

    builder = batch.visit_key(key, prefer_or_elect)
    if builder is None or builder.now.leader != first:
        raise errors.PreferredLeaderNotAvailable(
            f"{name}: preferred leader {first} is not in sync, not available or its disk is full, "
            "or the leader recovers from an unclean election"
        )
