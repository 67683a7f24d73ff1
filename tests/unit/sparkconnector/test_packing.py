"""The groups of ranges that a task reads (sparkconnector/packing N1, N2, N3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk.sparkconnector.packing import PACKED_BYTES_MAX, Size, pack

MIB = 1024 * 1024
SIZES = st.lists(
    st.builds(Size, st.integers(1, 10_000), st.integers(0, 2 * PACKED_BYTES_MAX)), max_size=200
)


@given(
    SIZES,
    st.integers(1, 64),
    st.integers(0, 300),
    st.integers(1, 8 * MIB),
    st.integers(0, 20_000),
    st.integers(0, 64 * MIB),
)
def test_each_range_is_read_once_in_order_and_within_the_bounds(
    sizes: list[Size], cores: int, least: int, open_cost: int, max_records: int, max_bytes: int
) -> None:
    groups = pack(
        sizes,
        cores=cores,
        least=least,
        open_cost=open_cost,
        max_records=max_records,
        max_bytes=max_bytes,
    )
    assert [at for group in groups for at in group] == list(range(len(sizes)))
    assert all(groups)
    assert len(groups) >= min(least, len(sizes))
    for group in groups:
        if len(group) == 1:
            continue
        held = [sizes[at] for at in group]
        assert sum(each.bytes for each in held) <= min(max_bytes or PACKED_BYTES_MAX, 32 * MIB)
        assert not max_records or sum(each.records for each in held) <= max_records


@given(st.integers(1, 500), st.integers(1, 16), st.integers(0, 1000))
def test_equal_small_ranges_give_one_task_for_each_core(count: int, cores: int, size: int) -> None:
    groups = pack([Size(1, size)] * count, cores=cores)
    assert len(groups) == min(count, cores)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_a_large_range_has_a_task_of_its_own() -> None:
    sizes = [Size(1, 100)] * 10 + [Size(1, 500 * MIB)] + [Size(1, 100)] * 10
    assert [len(group) for group in pack(sizes, cores=2)] == [10, 1, 10]


@pytest.mark.parametrize(("open_cost", "tasks"), [(1, 2), (100 * MIB, 2)])
def test_the_opening_cost_decides_what_a_small_range_weighs(open_cost: int, tasks: int) -> None:
    sizes = [Size(1, 10 * MIB)] + [Size(1, 10)] * 9
    groups = pack(sizes, cores=2, open_cost=open_cost)
    assert len(groups) == tasks
    assert len(groups[0]) == (1 if open_cost == 1 else 5)


def test_one_range_that_outweighs_all_others_leaves_as_many_groups_as_asked_for() -> None:
    sizes = [Size(1, 20 * MIB)] + [Size(1, 10)] * 20
    groups = pack(sizes, cores=2, least=10, open_cost=1)
    assert len(groups) == 10
    assert [at for group in groups for at in group] == list(range(21))
