"""Rack-aware round robin (KIP-36), compared with its stated properties."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.server.controller.placement import Candidate, assigned, place

BROKERS = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=7)


@given(BROKERS, st.integers(1, 12), st.integers(1, 7), st.integers(0, 100))
def test_properties(racks: list[str], partitions: int, factor: int, start: int) -> None:
    brokers = [Candidate(n, rack, True) for n, rack in enumerate(racks)]
    if factor > len(brokers):
        with pytest.raises(errors.InvalidReplicationFactor):
            place(brokers, partitions, factor, start)
        return
    placed = place(brokers, partitions, factor, start)
    assert placed == place(brokers[::-1], partitions, factor, start), (
        "the order of input is nothing"
    )
    assert all(len(set(members)) == factor for members in placed)
    leaders = Counter(members[0] for members in placed)
    counts = [leaders[broker.broker_id] for broker in brokers]
    assert max(counts) - min(counts) <= 1
    for members in placed:
        used = {racks[member] for member in members}
        assert len(used) == min(factor, len(set(racks)))


def test_who_is_not_available_comes_last() -> None:
    brokers = [Candidate(1, "", False), Candidate(2, "", True), Candidate(3, "", True)]
    for members in place(brokers, 6, 3, 0):
        assert members[2] == 1
    with pytest.raises(errors.BrokerUnavailable):
        place([Candidate(1, "", False)], 1, 1, 0)


def test_an_assignment_is_taken_as_it_is_given() -> None:
    brokers = [Candidate(1, "a", False), Candidate(2, "a", True), Candidate(3, "b", True)]
    assert assigned(brokers, [[3, 2], [1, 2]]) == [(3, 2), (1, 2)]
    assert assigned(brokers, [[2]], replication_factor=1) == [(2,)]


@pytest.mark.parametrize(
    ("given_replicas", "factor", "words"),
    [
        ([[2, 3], [3]], 0, "entry 1 .* names 1 replicas"),
        ([[2, 3]], 3, "here 3 as the topic's partitions have"),
        ([[]], 0, "names 0 replicas"),
        ([[2], [3, 3]], 0, "names 2 replicas"),
        ([[3, 3]], 0, "names a broker twice"),
        ([[2, 9]], 0, "broker 9, which is not registered"),
        ([[-2, 3]], 0, "broker -2, which is not registered"),
    ],
)
def test_an_assignment_that_cannot_be(
    given_replicas: list[list[int]], factor: int, words: str
) -> None:
    brokers = [Candidate(2, "", True), Candidate(3, "", True)]
    with pytest.raises(errors.InvalidReplicaAssignment, match=words):
        assigned(brokers, given_replicas, factor)


def test_an_assignment_needs_a_broker_that_can_lead() -> None:
    brokers = [Candidate(1, "", False), Candidate(2, "", True)]
    with pytest.raises(errors.BrokerUnavailable, match="entry 1"):
        assigned(brokers, [[2], [1]])
