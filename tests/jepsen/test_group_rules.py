"""The checker finds every anomaly of a group that is planted, and accepts clean histories (X12)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from histories import NEVER, History
from history import FAIL, INFO


def _input() -> History:
    """Four records of key 0, at the offsets 0, 1, 3 and 4."""
    return History().txn(1, (0, 10, 0), (0, 11, 1)).txn(1, (0, 12, 3), (0, 13, 4))


def test_groups_that_go_on_where_they_are_are_clean() -> None:
    """A plain group may process a record twice, and a refused commit changes nothing."""
    history = (
        _input()
        .fetch(8, 0)
        .process(8, (0, 10), (1, 11))
        .commit(8, 2)
        .process(8, (3, 12))
        .commit(8, 4, INFO)
        .fetch(9, 2)
        .process(9, (3, 12), (4, 13))
        .commit(9, 5)
        .copy(6, (1, 60, 0), (0, 10))
        .copy(6, (1, 61, 2), (1, 11), (3, 12), outcome=FAIL)
        .fetch(7, 1, "exact")
        .copy(7, (1, 70, 5), (1, 11), (3, 12), (4, 13))
        .poll(5, 0, (0, 10), (1, 11), (3, 12), (4, 13), final=True)
        .poll(5, 1, (0, 60), (5, 70), final=True)
    )
    assert history.found() == {}


def test_a_commit_without_an_outcome_may_be_there_or_not() -> None:
    for offset in (1, 2):
        history = (
            _input()
            .process(8, (0, 10))
            .commit(8, 1)
            .process(8, (1, 11))
            .commit(8, 2, INFO, lasts=NEVER)
            .fetch(9, offset)
        )
        assert history.of_groups() == {}


def test_an_older_commit_after_a_newer_one() -> None:
    """A member that was removed commits: its successor has gone on."""
    history = _input().process(8, (0, 10), (1, 11)).commit(8, 2).commit(9, 1)
    assert history.of_groups() == {"offset back": 1}


def test_a_member_gets_an_offset_that_is_older_than_the_acknowledged_one() -> None:
    history = _input().process(8, (0, 10), (1, 11)).commit(8, 1).commit(8, 2).fetch(9, 1)
    assert history.of_groups() == {"offset back": 1}


def test_a_lost_commit_is_noticed() -> None:
    history = _input().process(8, (0, 10)).commit(8, 1).fetch(9, 0)
    assert history.of_groups() == {"offset back": 1}


def test_commits_at_the_same_time_have_no_order() -> None:
    history = (
        _input()
        .process(8, (0, 10), (1, 11))
        .commit(8, 2, at=20.0, lasts=5.0)
        .commit(9, 1, at=21.0, lasts=5.0)
    )
    assert history.of_groups() == {}


def test_the_offsets_of_a_transaction_count_when_it_has_committed() -> None:
    """The next owner gets the older offset and copies the records again."""
    history = (
        _input()
        .copy(6, (1, 60, 0), (0, 10), (1, 11))
        .fetch(7, 0, "exact")
        .copy(7, (1, 70, 2), (0, 10), (1, 11))
    )
    assert history.of_groups() == {"offset back": 1, "processed twice": 2}


def test_an_offset_that_was_never_committed() -> None:
    history = _input().process(8, (0, 10), (1, 11)).commit(8, 1).fetch(9, 2)
    assert history.of_groups() == {"offset phantom": 1}


def test_an_offset_of_an_aborted_transaction() -> None:
    """Its records are skipped, too."""
    history = (
        _input()
        .copy(6, (1, 60, 0), (0, 10), (1, 11), outcome=FAIL)
        .fetch(7, 2, "exact")
        .copy(7, (1, 70, 2), (3, 12), (4, 13))
    )
    assert history.of_groups() == {"offset phantom": 1, "offset skip": 2}


def test_a_record_between_two_owners() -> None:
    """The first one commits more than it has polled."""
    history = (
        _input().process(8, (0, 10)).commit(8, 2).fetch(9, 2).process(9, (3, 12), (4, 13))
    ).commit(9, 5)
    assert history.of_groups() == {"offset skip": 1}


def test_a_record_that_only_an_aborted_transaction_has_processed() -> None:
    history = (
        _input()
        .copy(6, (1, 60, 0), (0, 10), (1, 11), outcome=FAIL)
        .copy(7, (1, 70, 2), (3, 12), (4, 13))
    )
    assert history.of_groups() == {"offset skip": 2}


def test_a_record_in_two_transactions() -> None:
    """The second one was fenced too late."""
    history = _input().copy(6, (1, 60, 0), (0, 10), (1, 11)).copy(7, (1, 70, 2), (1, 11), (3, 12))
    assert history.of_groups() == {"processed twice": 1}


def test_an_unknown_transaction_that_was_seen_has_processed_its_records() -> None:
    history = (
        _input()
        .copy(6, (1, 60, 0), (0, 10), (1, 11), outcome=INFO, lasts=NEVER)
        .copy(7, (1, 70, 2), (1, 11), (3, 12))
        .poll(5, 1, (0, 60), (2, 70), final=True)
        .poll(5, 0, (0, 10), (1, 11), (3, 12), (4, 13), final=True)
    )
    assert history.of_groups() == {"processed twice": 1}


def test_an_unknown_transaction_that_was_not_seen_has_not() -> None:
    history = (
        _input()
        .copy(6, (1, 60, -1), (0, 10), (1, 11), outcome=INFO, lasts=NEVER)
        .copy(7, (1, 70, 2), (0, 10), (1, 11))
        .poll(5, 1, (2, 70), final=True)
        .poll(5, 0, (0, 10), (1, 11), (3, 12), (4, 13), final=True)
    )
    assert history.of_groups() == {}
