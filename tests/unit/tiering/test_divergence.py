"""Whether a log and its table have diverged (rule T15)."""

from __future__ import annotations

import pytest

from pk.tiering.divergence import find_divergence


@pytest.mark.parametrize(
    ("log_end", "epochs", "passed"),
    [
        (10, [(3, 0)], False),
        (12, [(0, 0), (3, 9), (5, 10)], False),
        (12, [(5, 10)], False),  # begun at the table's end: nothing to compare
        (12, [], False),
        (9, [(3, 0)], True),  # the table has more than was ever committed here
        (10, [(2, 0)], True),
        (12, [(3, 0), (5, 9)], True),
    ],
)
def test_a_log_that_lacks_the_tables_last_record(
    log_end: int, epochs: list[tuple[int, int]], passed: bool
) -> None:
    found = find_divergence(0, 10, 3, log_end, epochs)
    assert (found is not None) is passed
    assert found is None or found.details["table_end"] == "10"
