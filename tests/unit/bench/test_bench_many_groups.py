"""Names, quantiles and goals of `bench.many_groups`, and the assignment of its groups."""

from __future__ import annotations

from collections import Counter

import pytest

from bench import many_groups
from bench.simulated_group import assignment
from pk.group_ids import partition_of_group

TEXT = """# TYPE pk_loop_lag_ms histogram
pk_loop_lag_ms_bucket{le="1.0"} 90.0
pk_loop_lag_ms_bucket{le="5.0"} 98.0
pk_loop_lag_ms_bucket{le="+Inf"} 100.0
pk_loop_lag_ms_bucket{role="controller",le="1.0"} 7.0
pk_loop_lag_ms_count 100.0
"""


def test_groups_are_spread_over_the_partitions_of_their_coordinator() -> None:
    names = many_groups.group_names(90, [3, 7, 11])
    assert len(set(names)) == 90
    assert Counter(map(partition_of_group, names)) == {3: 30, 7: 30, 11: 30}
    assert many_groups.group_names(3, None) == ["many0", "many1", "many2"]


def test_the_lag_is_that_of_the_broker_alone() -> None:
    assert many_groups.buckets(TEXT) == {1.0: 90.0, 5.0: 98.0, float("inf"): 100.0}


def test_a_quantile_is_of_what_came_between_two_readings() -> None:
    before = many_groups.buckets(TEXT)
    after = {1.0: 90.0 + 50, 5.0: 98.0 + 100, float("inf"): 100.0 + 100}
    assert many_groups.quantile(before, after, 0.5) == pytest.approx(1.0)
    assert many_groups.quantile(before, after, 0.75) == pytest.approx(3.0)
    assert many_groups.quantile({}, before, 0.99) == 5.0  # beyond the last finite bound
    assert many_groups.quantile(before, before, 0.99) == 0.0


def test_goals_that_are_missed_are_named() -> None:
    figures = dict.fromkeys(many_groups.GOALS, 0.0) | {"cpu": 50.0, "failover_s": 3.0}
    assert many_groups.missed(figures) == []
    assert many_groups.missed(figures | {"cpu": 50.1, "joins_again": 1}) == ["cpu", "joins_again"]
    told = many_groups.table(figures | {"cpu": 50.1})
    assert "cpu" in told.splitlines()[0]
    assert "missed" in told.splitlines()[0]
    assert told.count("reached") == len(many_groups.GOALS) - 1


def test_each_member_gets_the_partition_of_its_number() -> None:
    ids = ["many7-01-aa", "many7-00-ff", "many7-02-00"]
    found = {
        each.member_id: [list(topic.partitions) for topic in each.partitions]
        for each in assignment(ids, "id").members
    }
    assert found == {"many7-00-ff": [[0]], "many7-01-aa": [[1]], "many7-02-00": [[2]]}
