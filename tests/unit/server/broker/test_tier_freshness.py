"""How long stable records wait for their table (broker/tier_freshness)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pk.server.broker.tier_freshness import MARKS_MAX, TierFreshness
from pk.types import PartitionKey

KEY = PartitionKey("id", 0)


def test_the_wait_begins_when_a_record_is_stable_and_ends_when_it_is_in_the_table() -> None:
    fresh = TierFreshness()
    assert fresh.look(KEY, 0, 0, 1_000) == 0
    assert fresh.look(KEY, 10, 0, 2_000) == 0
    assert fresh.look(KEY, 10, 0, 5_000) == 3_000
    assert fresh.look(KEY, 20, 0, 6_000) == 4_000
    assert fresh.look(KEY, 20, 9, 7_000) == 5_000, "record 9 is not in the table"
    assert fresh.look(KEY, 20, 10, 8_000) == 2_000, "the records from 10 on are stable since 6,000"
    assert fresh.look(KEY, 20, 20, 9_000) == 0
    assert not fresh._marks


def test_an_idle_partition_does_not_age() -> None:
    fresh = TierFreshness()
    assert fresh.look(KEY, 5, 5, 0) == 0
    assert fresh.look(KEY, 5, 5, 10**9) == 0


def test_a_log_that_was_cut_begins_again() -> None:
    fresh = TierFreshness()
    fresh.look(KEY, 100, 0, 0)
    assert fresh.look(KEY, 50, 0, 1_000) == 0
    assert fresh.look(KEY, 50, 0, 2_000) == 1_000


def test_partitions_that_went_are_forgotten() -> None:
    fresh = TierFreshness()
    fresh.look(KEY, 1, 0, 0)
    fresh.keep({PartitionKey("id", 1)})
    assert not fresh._marks


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 1000)), max_size=200)
)
def test_the_wait_is_that_of_the_oldest_record(steps: list[tuple[int, int, int]]) -> None:
    """Against the time at which each record was first seen stable."""
    fresh = TierFreshness()
    seen: list[int] = []
    tiered = now = 0
    for more, copied, passed in steps:
        now += passed
        seen += [now] * more
        tiered = min(len(seen), tiered + copied)
        expected = now - seen[tiered] if tiered < len(seen) else 0
        found = fresh.look(KEY, len(seen), tiered, now)
        marks = fresh._marks.get(KEY, [])
        assert len(marks) <= MARKS_MAX
        assert found <= expected
        if len(steps) <= MARKS_MAX:
            assert found == expected
