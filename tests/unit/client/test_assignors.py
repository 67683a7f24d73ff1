"""The assignors of consumer groups (client/assignors)."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk.client import sticky_balance
from pk.client.assignors import (
    ASSIGNORS,
    Assignment,
    Subscriber,
    assign_cooperative,
    assign_range,
    assign_roundrobin,
    assign_sticky,
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


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
@given(members=MEMBERS, counts=COUNTS)
def test_an_assignor_gives_every_partition_once(
    name: str, members: list[Subscriber], counts: dict[str, int]
) -> None:
    found = ASSIGNORS[name](members, counts)
    check_whole(members, counts, found)
    assert ASSIGNORS[name](members[::-1], dict(reversed(counts.items()))) == found


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


# -- roundrobin and sticky -------------------------------------------------------------------------


def places(**topics: list[int]) -> set[TopicPartition]:
    return {TopicPartition(topic, each) for topic, listed in topics.items() for each in listed}


def sets(found: Assignment) -> dict[str, set[TopicPartition]]:
    return {name: {*each} for name, each in found.items()}


def test_the_first_example_of_kip_54() -> None:
    """Three consumers of four topics with two partitions; then the second one leaves."""
    topics = ("t0", "t1", "t2", "t3")
    counts = dict.fromkeys(topics, 2)
    members = subscribers("C0", "C1", "C2", topics=topics)
    dealt = {
        "C0": places(t0=[0], t1=[1], t3=[0]),
        "C1": places(t0=[1], t2=[0], t3=[1]),
        "C2": places(t1=[0], t2=[1]),
    }
    assert sets(assign_roundrobin(members, counts)) == dealt
    first = assign_sticky(members, counts)
    assert sets(first) == dealt
    rest = [each for each in having(members, first, 1) if each.member_id != "C1"]
    again = sets(assign_sticky(rest, counts))
    assert again["C0"] > dealt["C0"]
    assert again["C2"] > dealt["C2"]
    assert len(again["C0"]) == len(again["C2"]) == 4
    moved = sets(assign_roundrobin(rest, counts))
    assert moved == {
        "C0": places(t0=[0], t1=[0], t2=[0], t3=[0]),
        "C2": places(t0=[1], t1=[1], t2=[1], t3=[1]),
    }


def test_the_second_example_of_kip_54() -> None:
    """Different subscriptions: round robin loads the last consumer, sticky balances."""
    counts = {"t0": 1, "t1": 2, "t2": 3}
    members = [
        Subscriber("C0", frozenset({"t0"})),
        Subscriber("C1", frozenset({"t0", "t1"})),
        Subscriber("C2", frozenset({"t0", "t1", "t2"})),
    ]
    assert sets(assign_roundrobin(members, counts)) == {
        "C0": places(t0=[0]),
        "C1": places(t1=[0]),
        "C2": places(t1=[1], t2=[0, 1, 2]),
    }
    first = assign_sticky(members, counts)
    assert sets(first) == {
        "C0": places(t0=[0]),
        "C1": places(t1=[0, 1]),
        "C2": places(t2=[0, 1, 2]),
    }
    assert sets(assign_sticky(having(members, first, 1)[1:], counts)) == {
        "C1": places(t0=[0], t1=[0, 1]),
        "C2": places(t2=[0, 1, 2]),
    }


def test_the_example_of_kip_429() -> None:
    """Two members own three partitions each; a third one joins and gets one of each, in two
    generations.
    """
    members = subscribers("a", "b")
    first = assign_cooperative(members, {"t": 6})
    members = [*having(members, first, 1), *subscribers("c")]
    second = assign_cooperative(members, {"t": 6})
    assert [len(second[name]) for name in "abc"] == [2, 2, 0]
    assert {*second["a"]} < {*first["a"]}
    assert {*second["b"]} < {*first["b"]}
    third = assign_cooperative(having(members, second, 2), {"t": 6})
    assert (third["a"], third["b"]) == (second["a"], second["b"])
    assert {*third["c"]} == {*first["a"], *first["b"]} - {*second["a"], *second["b"]}


@given(MEMBERS, COUNTS)
def test_dealing_out_differs_by_at_most_one_for_equal_subscriptions(
    members: list[Subscriber], counts: dict[str, int]
) -> None:
    equal = [each._replace(topics=frozenset(TOPICS)) for each in members]
    loads = [len(each) for each in assign_roundrobin(equal, counts).values()]
    assert max(loads) - min(loads) <= 1


def most_balanced(members: list[Subscriber], counts: dict[str, int]) -> list[int]:
    """The most balanced loads that the subscriptions allow, found by trying everything."""
    options = [
        [each.member_id for each in members if topic in each.topics]
        for topic, count in counts.items()
        for _ in range(count)
    ]
    tried = itertools.product(*[each for each in options if each])
    loads = (
        sorted(Counter({each.member_id: 0 for each in members} | Counter(owners)).values())
        for owners in tried
    )
    return min(loads, key=lambda each: sum(load * load for load in each))


@given(
    MEMBERS.map(lambda members: members[:3]),
    st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 2), min_size=1),
    st.randoms(use_true_random=False),
)
def test_sticky_loads_are_the_most_balanced_that_subscriptions_allow(
    members: list[Subscriber], counts: dict[str, int], rng: Any
) -> None:
    """Whatever the members had before, also if they had one-sided loads."""
    had: dict[str, list[TopicPartition]] = {each.member_id: [] for each in members}
    for topic, count in counts.items():
        for number in range(count):
            had[rng.choice(members).member_id].append(TopicPartition(topic, number))
    before = having(members, had, 1)
    found = assign_sticky(before, counts)
    check_whole(members, counts, found)
    assert sorted(len(each) for each in found.values()) == most_balanced(members, counts)
    assert assign_sticky(having(members, found, 2), counts) == found, "nothing moves"


def test_a_partition_moves_through_a_third_member_if_no_other_way_balances() -> None:
    members = [
        Subscriber("a", frozenset("t"), owned=(*sorted(places(t=[0, 1, 2])),), generation=1),
        Subscriber("b", frozenset("tu"), owned=(*sorted(places(u=[0, 1])),), generation=1),
        Subscriber("c", frozenset("u"), owned=(*sorted(places(u=[2])),), generation=1),
    ]
    assert sets(assign_sticky(members, {"t": 3, "u": 3})) == {
        "a": places(t=[0, 1]),
        "b": places(t=[2], u=[0]),
        "c": places(u=[1, 2]),
    }


def test_the_work_of_the_sticky_assignors_grows_with_partitions_and_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """client/sticky_balance Y2: one look at the smallest load for each partition and move."""
    looks = 0
    smallest = sticky_balance._Balance._smallest

    def counted(self: Any, number: int) -> tuple[int, str]:
        nonlocal looks
        looks += 1
        return smallest(self, number)

    monkeypatch.setattr(sticky_balance._Balance, "_smallest", counted)
    members = subscribers(*(f"m{number:03}" for number in range(200)))
    first = assign_sticky(members, {"t": 3_000})
    assert looks <= 3_000 + 200
    looks = 0
    grown = [*having(members, first, 1), *subscribers(*(f"n{number:03}" for number in range(40)))]
    second = sets(assign_sticky(grown, {"t": 3_000}))
    moved = sum(len(each - {*first.get(name, ())}) for name, each in second.items())
    assert looks <= moved + 240
