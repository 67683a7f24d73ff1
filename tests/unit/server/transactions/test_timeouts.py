"""Which transactions a coordinator takes for timed out (transactions/coordinator N6, rule L10)."""

from __future__ import annotations

from typing import Any, cast

from pk.server.transactions.commands import TransactionBegan
from pk.server.transactions.coordinator import _Hosted

HOUR_MS = 3_600_000


def hosted(*opened: TransactionBegan) -> _Hosted:
    found = _Hosted(0, 1, cast("Any", None), cast("Any", None))
    found.deadlines.update({each.transactional_id: each for each in opened})
    return found


def began(name: str, started_ms: int) -> TransactionBegan:
    return TransactionBegan(name, 7, 0, started_ms, 1_000)


def test_a_timeout_passes_by_the_wall_clock() -> None:
    first, second = began("a", 5_000), began("b", 5_500)
    assert hosted(first, second).late(6_000, 0) == []
    assert hosted(first, second).late(6_001, 0) == [first]


def test_a_transaction_that_began_in_the_future_times_out_by_the_monotonic_clock() -> None:
    """The clock was an hour ahead at its begin, and is right again."""
    ahead = began("a", HOUR_MS)
    found = hosted(ahead)
    assert found.late(5_000, 100) == []
    assert found.late(6_000, 1_100) == []
    assert found.late(6_001, 1_101) == [ahead]


def test_the_next_transaction_of_an_id_has_its_whole_timeout() -> None:
    found = hosted(began("a", HOUR_MS))
    assert found.late(5_000, 0) == []
    found.deadlines["a"] = began("a", HOUR_MS)._replace(producer_epoch=1)
    assert found.late(6_500, 1_500) == []
    assert len(found.late(7_501, 2_501)) == 1
