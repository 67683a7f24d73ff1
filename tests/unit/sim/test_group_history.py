"""The checks of the consumer group of a run (sim/group_history): each can fail."""

from __future__ import annotations

import pytest

from pk.client.group_types import ConsumerGroupMetadata
from pk.sim.checkers import Violation
from pk.sim.group_history import GroupHistory
from pk.types import PartitionKey

KEYS = [PartitionKey("t", number) for number in range(2)]


def member(name: str, generation: int, instance: str = "") -> ConsumerGroupMetadata:
    return ConsumerGroupMetadata("g", generation, name, instance)


def test_a_fetch_returns_at_least_what_was_acknowledged_before_it() -> None:
    history = GroupHistory(lambda _key: False)
    history.acknowledged({KEYS[0]: 5})
    before = dict(history.floors)
    history.acknowledged({KEYS[0]: 9})
    history.fetched("m", KEYS, before, {KEYS[0]: 5})
    with pytest.raises(Violation, match=r"^V26: m fetched offset 5 .* after 9"):
        history.fetched("m", KEYS, dict(history.floors), {KEYS[0]: 5})
    with pytest.raises(Violation, match=r"^V26: m fetched offset None"):
        history.fetched("m", KEYS, dict(history.floors), {})


def test_what_was_fetched_once_does_not_go_back() -> None:
    """The commit had no answer, or was not waited for."""
    history = GroupHistory(lambda _key: False)
    history.fetched("m", KEYS, {}, {KEYS[1]: 7})
    with pytest.raises(Violation, match=r"^V26: "):
        history.fetched("n", KEYS, dict(history.floors), {KEYS[1]: 6})


def test_a_partition_has_one_owner_in_a_generation() -> None:
    history = GroupHistory(lambda _key: False)
    history.owns(member("a", 1), KEYS)
    history.owns(member("a", 1), KEYS[:1])
    history.owns(member("b", 2), KEYS)
    with pytest.raises(Violation, match=r"^V27: "):
        history.owns(member("b", 1), KEYS[1:])


def test_a_static_member_and_its_successor_are_one_owner() -> None:
    history = GroupHistory(lambda _key: False)
    history.owns(member("a", 1, "i"), KEYS)
    history.owns(member("b", 1, "i"), KEYS)
    with pytest.raises(Violation, match=r"^V27: "):
        history.owns(member("c", 1, "j"), KEYS)


def test_offsets_of_a_deleted_topic_go() -> None:
    """Rule L8; those of another topic do not."""
    other = PartitionKey("u", 0)
    deleted: set[str] = set()
    history = GroupHistory(lambda key: key.topic_id in deleted)
    history.acknowledged({KEYS[0]: 5, other: 3})
    before = dict(history.floors)
    deleted.add("t")
    history.fetched("m", [*KEYS, other], before, {other: 3})
    with pytest.raises(Violation, match=r"^V26: "):
        history.fetched("m", [other], before, {})
    history.forget_deleted()
    assert history.floors == {other: 3}


def test_lost_records_of_the_group_excuse_what_goes_back() -> None:
    lost = False
    history = GroupHistory(lambda _key: False, lambda: lost)
    history.acknowledged({KEYS[0]: 5})
    history.owns(member("a", 1), KEYS)
    with pytest.raises(Violation, match=r"^V26: "):
        history.fetched("m", KEYS, dict(history.floors), {})
    lost = True
    history.fetched("m", KEYS, dict(history.floors), {})
    history.owns(member("b", 1), KEYS)
