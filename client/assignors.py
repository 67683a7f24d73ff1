"""Assignors: how the leader of a group shares its partitions among the members.

Pure.  Both give every partition of a subscribed topic to one member, or to none if no member
subscribes to its topic; equal arguments give equal assignments.

    range               each topic is cut into ranges of about the same length
    cooperative-sticky  members keep what they have; loads differ by at most one where subscriptions
                        allow it (KIP-429)

Under `range` a member gives everything up before it joins.  Under `cooperative-sticky` a partition
that moves has no owner in one generation: its owner gives it up, and the next one assigns it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pk.types import TopicPartition

RANGE, COOPERATIVE_STICKY = "range", "cooperative-sticky"


class Subscriber(NamedTuple):
    """A member with its subscription."""

    member_id: str
    topics: frozenset[str]
    instance_id: str = ""  #: of a static member
    owned: tuple[TopicPartition, ...] = ()  #: what it has since `generation`
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


def assign_cooperative(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """Return the sticky assignment without the partitions that their owners have to give up."""
    owners = _owners(members, counts)
    found = _sticky(members, counts, owners)
    return {
        name: sorted(place for place in places if owners.get(place, name) == name)
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
) -> dict[str, set[TopicPartition]]:
    """Return a balanced assignment in which members keep what they can."""
    found: dict[str, set[TopicPartition]] = {each.member_id: set() for each in members}
    takers: dict[str, list[str]] = {
        topic: sorted(each.member_id for each in members if topic in each.topics)
        for topic in counts
    }

    def least(topic: str) -> str:
        return min(takers[topic], key=lambda name: (len(found[name]), name))

    free: list[TopicPartition] = []
    for topic, count in sorted(counts.items()):
        for number in range(count) if takers[topic] else ():
            place = TopicPartition(topic, number)
            owner = owners.get(place)
            if owner in takers[topic]:
                found[owner].add(place)
            else:
                free.append(place)
    for place in free:
        found[least(place.topic)].add(place)
    while _move_one(found, least):
        pass
    return found


def _move_one(found: dict[str, set[TopicPartition]], least: Callable[[str], str]) -> bool:
    """Move a partition from a member with the largest load that can give one to a member with at
    least two fewer; return False if there is none.
    """
    for name in sorted(found, key=lambda each: (-len(found[each]), each)):
        for place in sorted(found[name], reverse=True):
            taker = least(place.topic)
            if len(found[taker]) <= len(found[name]) - 2:
                found[name].remove(place)
                found[taker].add(place)
                return True
    return False


#: Every assignor by its name.
ASSIGNORS: Mapping[str, Callable[[Sequence[Subscriber], Mapping[str, int]], Assignment]] = {
    RANGE: assign_range,
    COOPERATIVE_STICKY: assign_cooperative,
}
