"""The judge of the chaos runs must be able to find violations: one canary per demand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ledger import Ledger, Outcome, number_of, value_of


def four() -> Ledger:
    """Return ids 0 and 1 acknowledged at 0 and 1, 2 unknown, 3 refused; all in partition 0."""
    ledger = Ledger()
    for number in range(4):
        assert ledger.send(0) == number
    ledger.acknowledge(0, 0, 0)
    ledger.acknowledge(1, 0, 1)
    ledger.settle(2, Outcome.UNKNOWN)
    ledger.settle(3, Outcome.REFUSED)
    return ledger


@pytest.mark.parametrize(
    "found", [[(0, 0), (1, 1)], [(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 1), (7, 2)]]
)
def test_what_is_allowed(found: list[tuple[int, int]]) -> None:
    assert four().violations(0, found) == []


@pytest.mark.parametrize(
    ("found", "demand"),
    [
        ([(0, 0)], "D2"),  # an acknowledged record is missing
        ([(0, 0), (2, 1)], "D2"),  # … or elsewhere
        ([(0, 0), (1, 1), (2, 1)], "D1"),  # twice
        ([(0, 0), (1, 1), (2, 2), (3, 2)], "D1"),  # unknown, and twice
        ([(1, 1), (0, 0)], "D1"),  # offsets go back
        ([(0, 1), (1, 0)], "D1"),  # order turned
        ([(0, 0), (1, 1), (2, 3)], "D4"),  # refused, yet there
        ([(0, 0), (1, 1), (2, 9)], "D5"),  # no producer sent it
        ([(0, 0), (1, 1), (2, -1)], "D5"),
    ],
)
def test_what_is_not(found: list[tuple[int, int]], demand: str) -> None:
    told = four().violations(0, found)
    assert any(demand in words for words in told), told


def test_a_record_of_another_partition_is_not_ours() -> None:
    ledger = four()
    number = ledger.send(1)
    ledger.acknowledge(number, 1, 0)
    assert ledger.violations(1, [(0, number)]) == []
    assert "D5" in ledger.violations(0, [(0, 0), (1, 1), (2, number)])[0]


def test_every_record_must_get_an_answer() -> None:
    ledger = four()
    ledger.send(0)
    assert "never got an answer" in ledger.violations(0, [(0, 0), (1, 1)])[0]


def test_ids_survive_in_values() -> None:
    assert number_of(value_of(17, b"xyz")) == 17
    assert [number_of(value) for value in (None, b"", b"12", b"not a number")] == [-1] * 4
