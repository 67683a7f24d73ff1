"""Rules R1, R2 and L2 for the high watermark, compared with a naive oracle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pk.server.replica import watermark


def test_one_replica_is_the_general_rule() -> None:
    assert watermark.advance(0, [7], in_sync=1, required=1) == 7


def test_below_the_minimum_nothing_becomes_committed() -> None:
    """Rule R1: strict min ISR."""
    assert watermark.advance(3, [9], in_sync=1, required=2) == 3
    assert watermark.in_sync_required(2, 1) == 1
    assert watermark.in_sync_required(2, 3) == 2


@given(
    current=st.integers(0, 50),
    ends=st.lists(st.integers(0, 100), max_size=6),
    in_sync=st.integers(0, 6),
    required=st.integers(1, 6),
)
def test_it_never_moves_back_nor_past_a_member(
    current: int, ends: list[int], in_sync: int, required: int
) -> None:
    moved = watermark.advance(current, ends, in_sync, required)
    assert moved >= current
    if moved > current:
        assert in_sync >= required
        covered = [offset for offset in range(101) if all(end >= offset for end in ends)]
        assert moved == max(covered)
