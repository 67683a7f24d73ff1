"""The check of the query that holds retention (sim/holds): it can fail, and begins again."""

from __future__ import annotations

import pytest

from pk.sim.checkers import Violation
from pk.sim.holds import HoldHistory
from pk.types import PartitionKey

KEY = PartitionKey("t", 0)


def known_at(position: int) -> HoldHistory:
    history = HoldHistory()
    history.sends({KEY: position})
    history.look(KEY, 0, leader_knows=True)
    return history


def test_nothing_goes_that_is_held() -> None:
    history = known_at(7)
    history.look(KEY, 7, leader_knows=False)
    with pytest.raises(Violation, match=r"^V33: .* starts at 8; a query holds 7"):
        history.look(KEY, 8, leader_knows=True)


def test_what_was_gone_before_the_hold_was_known_is_no_fault() -> None:
    history = HoldHistory()
    history.sends({KEY: 7})
    history.look(KEY, 9, leader_knows=False)
    assert not history.known


def test_clients_may_delete_what_is_held() -> None:
    history = known_at(7)
    history.look(KEY, 9, leader_knows=True, asked=9)
    with pytest.raises(Violation, match=r"^V33: "):
        history.look(KEY, 10, leader_knows=True, asked=9)


def test_after_a_loss_the_check_begins_again() -> None:
    history = known_at(7)
    history.forget(KEY)
    history.look(KEY, 9, leader_knows=True)
    history.sends({KEY: 9})
    history.look(KEY, 9, leader_knows=True)
    with pytest.raises(Violation, match=r"^V33: "):
        history.look(KEY, 10, leader_knows=True)
