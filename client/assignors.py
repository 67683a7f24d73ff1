"""Assignors: how the leader of a group shares its partitions among the members.

Pure.  All give every partition of a subscribed topic to one member, or to none if no member
subscribes to its topic; equal arguments give equal assignments.

    range               each topic is cut into ranges of about the same length
    roundrobin          the partitions of all topics are dealt out in turn
    sticky              members get back what they had; loads differ by at most one where
                        subscriptions allow it (KIP-54)
    cooperative-sticky  the same balance; members keep reading what does not move (KIP-429)

Under the first three a member gives everything up before it joins (eager).  Under
`cooperative-sticky` a partition that moves has no owner in one generation: its owner gives it up,
and the next one assigns it.  client/sticky_balance balances both sticky ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pk.client.sticky_balance import balanced
from pk.types import TopicPartition

RANGE, ROUNDROBIN = "range", "roundrobin"
STICKY, COOPERATIVE_STICKY = "sticky", "cooperative-sticky"


class Subscriber(NamedTuple):
    """A member with its subscription."""

    member_id: str
    topics: frozenset[str]
    instance_id: str = ""  #: of a static member
    owned: tuple[TopicPartition, ...] = ()  #: what it has, or had until now, since `generation`
    generation: int = -1


Assignment = dict[str, list[TopicPartition]]


def assign_range(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """Return the ranges of every member.  counts: topic → number of its partitions."""
    found: Assignment = {each.member_id: [] for each in members}
    order = sorted(members, key=lambda each: (each.instance_id or each.member_id, each.member_id))
    for topic, count in sorted(counts.items()):
        takers = [each.member_id for each in order if topic in each.topics]
        if not takers:
            continue
        whole, more = divmod(count, len(takers))
        start = 0
        for at, name in enumerate(takers):
            end = start + whole + (at < more)
            found[name] += [TopicPartition(topic, number) for number in range(start, end)]
            start = end
    return found


def assign_roundrobin(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """Return the partitions of all topics dealt out in turn to the members that may have them."""
    found: Assignment = {each.member_id: [] for each in members}
    order = sorted(members, key=lambda each: (each.instance_id or each.member_id, each.member_id))
    at = 0
    for topic, count in sorted(counts.items()):
        if not any(topic in each.topics for each in order):
            continue
        for number in range(count):
            while topic not in order[at % len(order)].topics:
                at += 1
            found[order[at % len(order)].member_id].append(TopicPartition(topic, number))
            at += 1
    return found


def assign_sticky(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """Return a balanced assignment in which members get back what they had (KIP-54)."""
    return _sticky(members, counts, _owners(members, counts))


def assign_cooperative(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """Return the sticky assignment without the partitions that their owners have to give up."""
    owners = _owners(members, counts)
    found = _sticky(members, counts, owners)
    return {
        name: [place for place in places if owners.get(place, name) == name]
        for name, places in found.items()
    }


def _owners(members: Sequence[Subscriber], counts: Mapping[str, int]) -> dict[TopicPartition, str]:
    """Return the owner of each partition: the member that had it in the newest generation.

    Two owners of the same generation cannot be; their claims do not count.
    """
    claims: dict[TopicPartition, list[tuple[int, str]]] = defaultdict(list)
    for each in members:
        for place in each.owned:
            if place.partition < counts.get(place.topic, 0):
                claims[place].append((each.generation, each.member_id))
    found: dict[TopicPartition, str] = {}
    for place, claimed in claims.items():
        newest = max(claimed)[0]
        names = [name for generation, name in claimed if generation == newest]
        if len(names) == 1:
            found[place] = names[0]
    return found


def _sticky(
    members: Sequence[Subscriber],
    counts: Mapping[str, int],
    owners: Mapping[TopicPartition, str],
) -> Assignment:
    """Return a balanced assignment in which members keep what they can."""
    takers: dict[str, list[str]] = {topic: [] for topic in counts}
    names = sorted(each.member_id for each in members)
    topics = {each.member_id: each.topics for each in members}
    for name in names:
        for topic in topics[name]:
            if topic in takers:
                takers[topic].append(name)
    return balanced(names, takers, counts, owners)


#: Every assignor by its name.
ASSIGNORS: Mapping[str, Callable[[Sequence[Subscriber], Mapping[str, int]], Assignment]] = {
    RANGE: assign_range,
    ROUNDROBIN: assign_roundrobin,
    STICKY: assign_sticky,
    COOPERATIVE_STICKY: assign_cooperative,
}
