"""The assignors of consumer groups (client/assignors)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pk.client.assignors import (
    Assignment,
    Subscriber,
    assign_cooperative,
    assign_range,
)
from pk.types import TopicPartition

TOPICS = ["t", "u", "v"]
COUNTS = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9), min_size=1)
MEMBERS = st.lists(st.frozensets(st.sampled_from(TOPICS), min_size=1), min_size=1, max_size=5).map(
    lambda topics: [Subscriber(f"m{at}", each) for at, each in enumerate(topics)]
)


def subscribers(*names: str, topics: tuple[str, ...] = ("t",)) -> list[Subscriber]:
    return [Subscriber(name, frozenset(topics)) for name in names]


def having(members: list[Subscriber], found: Assignment, generation: int) -> list[Subscriber]:
    """The members as they join again with what they have."""
    return [
        each._replace(owned=tuple(found[each.member_id]), generation=generation)
        for each in members
        if each.member_id in found
    ]


def check_whole(members: list[Subscriber], counts: dict[str, int], found: Assignment) -> None:
    """Every partition that has a subscriber has one owner, which subscribes to it."""
    topics = {each.member_id: each.topics for each in members}
    given_away = sorted(place for places in found.values() for place in places)
    wanted = [
        TopicPartition(topic, number)
        for topic, count in sorted(counts.items())
        for number in range(count)
        if any(topic in each for each in topics.values())
    ]
    assert given_away == wanted
    for name, places in found.items():
        assert all(place.topic in topics[name] for place in places)


def settled(members: list[Subscriber], counts: dict[str, int]) -> Assignment:
    """Rebalance until nothing moves; at each step, no partition has two owners."""
    for generation in range(1, 4):
        found = assign_cooperative(members, counts)
        for each in members:
            for place in each.owned:
                assert all(
                    place not in places for name, places in found.items() if name != each.member_id
                )
        members = having(members, found, generation)
    return found


def test_ranges_are_those_of_kafka() -> None:
    """Kafka's RangeAssignor: two topics with three partitions each, two consumers."""
    members = subscribers("C0", "C1", topics=("t0", "t1"))
    assert assign_range(members, {"t0": 3, "t1": 3}) == {
        "C0": [TopicPartition(*each) for each in (("t0", 0), ("t0", 1), ("t1", 0), ("t1", 1))],
        "C1": [TopicPartition("t0", 2), TopicPartition("t1", 2)],
    }


def test_static_members_keep_their_ranges_when_their_ids_change() -> None:
    first = [Subscriber("x", frozenset("t"), "1"), Subscriber("a", frozenset("t"), "2")]
    again = [Subscriber("b", frozenset("t"), "1"), Subscriber("a", frozenset("t"), "2")]
    assert assign_range(first, {"t": 4})["x"] == assign_range(again, {"t": 4})["b"]


@given(MEMBERS, COUNTS)
def test_ranges_give_every_partition_once(
    members: list[Subscriber], counts: dict[str, int]
) -> None:
    found = assign_range(members, counts)
    check_whole(members, counts, found)
    assert assign_range(members[::-1], counts) == found


@given(MEMBERS, COUNTS)
def test_the_sticky_assignment_becomes_whole_and_stays(
    members: list[Subscriber], counts: dict[str, int]
) -> None:
    found = settled(members, counts)
    check_whole(members, counts, found)
    assert settled(having(members, found, 5)[::-1], counts) == found, "nothing moves"


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 30))
def test_equal_subscriptions_differ_by_at_most_one(before: int, after: int, count: int) -> None:
    """Members come or go: the loads are balanced, and only what must move moves."""
    names = [f"m{at}" for at in range(max(before, after))]
    old = settled(subscribers(*names[:before]), {"t": count})
    members = having(subscribers(*names[:before]), old, 3)
    members = [*members[:after], *subscribers(*names[before:after])]
    new = settled(members, {"t": count})
    loads = [len(places) for places in new.values()]
    assert max(loads) - min(loads) <= 1
    moved = sum(len({*places} - {*old.get(name, [])}) for name, places in new.items())
    least, more = divmod(count, after)
    kept = sorted((len(old.get(name, [])) for name in new), reverse=True)
    quotas = [least + (at < more) for at in range(after)]
    assert moved == count - sum(map(min, kept, quotas))


def test_a_partition_that_moves_has_no_owner_in_one_generation() -> None:
    first = assign_cooperative(subscribers("a"), {"t": 4})
    members = [*having(subscribers("a"), first, 1), *subscribers("b")]
    found = assign_cooperative(members, {"t": 4})
    assert (len(found["a"]), found["b"]) == (2, [])
    again = assign_cooperative(having(members, found, 2), {"t": 4})
    assert again["a"] == found["a"]
    assert sorted(again["a"] + again["b"]) == first["a"]


def test_of_two_claims_the_newer_generation_counts() -> None:
    place = TopicPartition("t", 0)
    zombie = Subscriber("a", frozenset("t"), owned=(place,), generation=3)
    owner = Subscriber("b", frozenset("t"), owned=(place,), generation=4)
    assert assign_cooperative([zombie, owner], {"t": 1}) == {"a": [], "b": [place]}
