"""The holds of queries on retention at one broker (replica/retention_holds, rule S1)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pk.server.replica.retention_holds import Hold, RetentionHolds
from pk.types import NONE, PartitionKey

K, L = PartitionKey("t", 0), PartitionKey("t", 1)
MAX_MS, GRACE_MS = 10_000, 1_000


def holds() -> RetentionHolds:
    return RetentionHolds(MAX_MS, GRACE_MS)


def hold(
    group: str, offset: int, commit_offset: int = 1, key: PartitionKey = K, age_ms: int = 0
) -> Hold:
    return Hold(group, key, offset, commit_offset, age_ms)


def told(*given: Hold, at: int = 0, epoch: int = 3, coordinator: int = 0) -> RetentionHolds:
    found = holds()
    assert found.report(coordinator, epoch, given, at)
    return found


def test_the_lowest_position_holds_and_a_later_word_moves_it() -> None:
    found = told(hold("a", 50), hold("b", 40), hold("b", 7, key=L))
    assert found.lowest(K, 1) == (40, "b")
    assert found.keys() == [K, L]
    found.report(0, 3, [hold("a", 50), hold("b", 60, commit_offset=2)], 2)
    assert found.lowest(K, 2) == (50, "a")
    assert found.lowest(L, 2) is None, "a hold that is not reported was given up"
    found.report(0, 3, [hold("a", 20, commit_offset=3), hold("b", 60, commit_offset=2)], 3)
    assert found.lowest(K, 3) == (20, "a"), "a query may go back to an older checkpoint"
    found.report(0, 3, [], 4)
    assert found.keys() == []


def test_a_hold_outlives_its_coordinator_and_no_repetition_renews_it() -> None:
    """replica/retention_holds H2: the bound counts from the commit of the query."""
    found = told(hold("a", 50), at=0)
    assert found.lowest(K, MAX_MS - 1) == (50, "a")
    found.report(0, 4, [hold("a", 50, age_ms=0)], MAX_MS - 1)
    assert found.lowest(K, MAX_MS) is None
    assert [fall.group_id for fall in found.expire(K, 100, MAX_MS)] == ["a"]
    assert found.expire(K, 100, MAX_MS + 1) == [], "each fall is reported once"
    assert [fall.group_id for fall in found.fallen(K)] == ["a"]
    found.report(0, 4, [hold("a", 50, commit_offset=2)], MAX_MS + 2)
    assert found.lowest(K, MAX_MS + 2) == (50, "a")
    assert found.fallen(K) == []


def test_a_broker_that_hears_of_a_hold_late_counts_its_age() -> None:
    found = told(hold("a", 50, age_ms=MAX_MS - 10), at=5_000)
    assert found.lowest(K, 5_009) == (50, "a")
    assert found.lowest(K, 5_010) is None


def test_a_hold_of_the_end_does_not_fall_until_it_holds_something() -> None:
    """replica/retention_holds H6: a query that has processed everything and ended is no event."""
    found = told(hold("a", 100))
    assert found.expire(K, 100, MAX_MS) == []
    assert len(found.expire(K, 101, MAX_MS)) == 1


def test_a_deposed_coordinator_gives_nothing_up() -> None:
    """replica/retention_holds H5: its report counts for nothing."""
    found = told(hold("a", 50), epoch=4)
    assert not found.report(0, 3, [], 1)
    assert found.lowest(K, 1) == (50, "a")
    assert found.report(1, 1, [], 1), "epochs of another coordinator do not count"
    assert found.lowest(K, 1) == (50, "a")


def test_a_hold_that_is_too_large_falls_until_its_query_has_come_nearer() -> None:
    found = told(hold("a", 50), hold("b", 60))
    first = found.fall(K, "a", "large")
    assert first is not None
    assert first.why == "large"
    assert found.fall(K, "a", "larger") is None, "one report"
    assert found.lowest(K, 1) == (60, "b")
    assert found.too_large(K) == [], "no commit since"
    found.report(0, 3, [hold("a", 55, commit_offset=2), hold("b", 60)], 2)
    assert found.lowest(K, 2) == (60, "b"), "it is measured first"
    assert found.too_large(K) == [(55, "a")]
    assert found.fall(K, "a", "") is None
    assert found.lowest(K, 2) == (55, "a")
    assert found.fall(K, "gone", "large") is None


@pytest.mark.parametrize("heard", [[], range(3), range(4)])
def test_a_new_leader_waits_for_every_coordinator(heard: Iterable[int]) -> None:
    """replica/retention_holds H1: also for those that had reported before its election."""
    found = holds()
    for number in range(4):
        found.report(number, 1, [], 0)
    assert not found.settled(K, 7, 4, 10)
    for number in heard:
        found.report(number, 1, [], 20)
    whole = len(list(heard)) == 4
    assert found.settled(K, 7, 4, 30) is whole
    assert not found.settled(K, 8, 4, 40), "another leader epoch"
    assert not found.settled(K, 8, 4, 40 + GRACE_MS - 1)
    assert found.settled(K, 8, 4, 40 + GRACE_MS)
    assert found.settled(L, NONE, 0, 40), "a cluster without groups has no holds"
    found.settled(PartitionKey("t", 2), 8, 4, 41)
    found.forget([L, PartitionKey("t", 2)])
    assert not found.settled(K, 8, 4, 41 + GRACE_MS)


def test_a_deletion_by_hand_names_the_holds_that_it_passes() -> None:
    found = told(hold("b", 50), hold("a", 40), hold("c", 60))
    assert found.groups_below(K, 60, 1) == ["a", "b"]
    found.fall(K, "a", "large")
    assert found.groups_below(K, 60, 1) == ["b"]
    assert found.groups_below(K, 60, MAX_MS) == []
    assert found.count([K, L], 1) == 2
