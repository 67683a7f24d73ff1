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
from pk.server.controller.commands import ElectLeaders, HandOver, Out, Prefer, Rules, decision
from pk.server.controller.elections import Cluster, Draft
from pk.server.controller.sweeps import Sweep
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
    sweep = Sweep(image, rules, Cluster(image, command.reports), MOVES_MAX)
    for key in command.partitions:
        if not sweep.full:
            sweep.visit_key(key, lambda draft: draft.prefer(sweep.cluster))
    return decision(len(sweep.bodies), sweep.bodies, sweep.effects)


def hand_over(image: MetadataImage, rules: Rules, command: HandOver) -> Out:
    """L16: the reply names the partitions that another replica leads from now on."""
    sweep = Sweep(image, rules, Cluster(image, command.reports), MOVES_MAX)
    moved: list[PartitionKey] = []
    for key in command.partitions:
        if sweep.full:
            break
        draft = sweep.visit_key(key, lambda each: each.hand_over(sweep.cluster))
        if draft is not None and draft.led_anew:
            moved.append(key)
    return decision(tuple(moved), sweep.bodies, sweep.effects)


def elect_leaders(image: MetadataImage, rules: Rules, command: ElectLeaders) -> Out:
    """Elect preferred leaders, or unclean ones where nobody leads; a result per partition.

    An unclean election compares what replicas report; until they have, it is refused with
    `EligibleLeadersNotAvailable`, which may be tried again.
    """
    request = command.request
    sweep = Sweep(image, rules, Cluster(image, command.reports))
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
            _elect(sweep, key, f"{name}-{key.partition}", unclean=request.unclean)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
    reply.metadata_offset = image.offset + len(sweep.bodies)
    return decision(reply, sweep.bodies, sweep.effects)


def _elect(sweep: Sweep, key: PartitionKey, name: str, *, unclean: bool) -> None:
    image, cluster = sweep.cluster.image, sweep.cluster
    state = image.partition(key)
    if state is None:
        raise errors.UnknownTopicOrPartition(f"{name} does not exist")
    if unclean:
        if state.leader != NONE:
            raise errors.ElectionNotNeeded(f"{name}: broker {state.leader} leads")
        draft = sweep.visit_key(key, may_lose=True)
        if draft is None or draft.now.leader == NONE:
            there = [str(each) for each in state.replicas if cluster.eligible(each, key)]
            raise errors.EligibleLeadersNotAvailable(
                f"{name}: no replica can be elected"
                + (f"; brokers {', '.join(there)} have not said how far they are" if there else "")
            )
        return
    first = state.replicas[0]
    if state.leader == first:
        raise errors.ElectionNotNeeded(f"{name}: its preferred leader {first} leads")

    def prefer_or_elect(draft: Draft) -> None:
        if draft.now.leader == NONE:
            draft.elect(cluster)
        draft.prefer(cluster)

    draft = sweep.visit_key(key, prefer_or_elect)
    if draft is None or draft.now.leader != first:
        raise errors.PreferredLeaderNotAvailable(
            f"{name}: preferred leader {first} is not in sync, not available or its disk is full, "
            "or the leader recovers from an unclean election"
        )
