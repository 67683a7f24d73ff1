"""The check of reassignments (sim/move_check.py) on states that no correct controller writes."""

from __future__ import annotations

from typing import Any

import pytest

from pk.server.metadata.image import PartitionState
from pk.sim.checkers import Violation
from pk.sim.move_check import check_move
from pk.types import PartitionKey

KEY = PartitionKey("11111111-1111-4111-8111-111111111111", 0)


def state(*replicas: int, isr: tuple[int, ...], **more: Any) -> PartitionState:
    leader = isr[0] if isr else -1
    return PartitionState(
        replicas, isr, **{"leader": leader, **more}, leader_epoch=1, partition_epoch=1
    )


#: {1, 2} → {1, 4, 5}; 4 is in sync, 5 copies.
LARGER = state(1, 4, 5, 2, isr=(1, 4), adding=(4, 5), removing=(2,))
#: {1, 2, 3} → {1, 2}; 2 lags.
SMALLER = state(1, 2, 3, isr=(1, 3), removing=(3,))
#: {2} → {3, 4}; 2 is away with everything that was acknowledged.
AWAY = state(3, 4, 2, isr=(), elr=(2,), adding=(3, 4), removing=(2,))
WRONG = [
    pytest.param(LARGER, state(1, 2, isr=(1,)), 2, False, "lost copies", id="cancel"),
    pytest.param(SMALLER, state(1, 2, isr=(1,)), 1, False, "not in sync as a whole", id="smaller"),
    pytest.param(AWAY, state(3, 4, 2, isr=(3,), adding=(3, 4)), 1, True, "elected", id="adding"),
]
RIGHT = [
    pytest.param(LARGER, state(1, 2, isr=(1,)), 1, False, id="one copy is required"),
    pytest.param(LARGER, state(1, 2, isr=(1, 2)), 2, False, id="2 is in sync again"),
    pytest.param(LARGER, state(1, 4, 5, 2, isr=(1,), adding=(4, 5)), 2, False, id="4 has left"),
    pytest.param(SMALLER, state(1, 2, isr=(1, 2)), 2, False, id="the target is in sync"),
    pytest.param(AWAY, state(3, 4, 2, isr=(2,), adding=(3, 4)), 1, True, id="2 is elected"),
]


@pytest.mark.parametrize(("before", "now", "min_isr", "unclean", "words"), WRONG)
def test_a_move_that_costs_copies_is_noticed(
    before: PartitionState, now: PartitionState, min_isr: int, unclean: bool, words: str
) -> None:
    with pytest.raises(Violation, match=f"V18.*{words}"):
        check_move(KEY, before, now, min_isr, unclean=unclean)


@pytest.mark.parametrize(("before", "now", "min_isr", "unclean"), RIGHT)
def test_a_change_that_costs_no_copy_passes(
    before: PartitionState, now: PartitionState, min_isr: int, unclean: bool
) -> None:
    check_move(KEY, before, now, min_isr, unclean=unclean)
