"""When a group is settled, and which pauses count."""

from __future__ import annotations

import pytest

from bench.commit_client import joined
from bench.ownership import Told, longest_pause, owned_at, settled_at


def _told(*lines: tuple[float, str, list[int]]) -> Told:
    told = Told()
    for at, what, partitions in lines:
        told.hear({"at": at, "what": what, "partitions": partitions})
    return told


def test_a_group_is_settled_when_each_owner_has_polled() -> None:
    one = _told((1, "assigned", [0, 1]), (2, "polled", [0]))
    other = _told((1, "assigned", [2, 3]), (3, "polled", [2, 3]))
    assert settled_at([one, other], 4) is None
    one.hear({"at": 5, "what": "polled", "partitions": [1]})
    assert settled_at([one, other], 4) == 5
    assert owned_at([one, other]) == 1
    assert settled_at([one, other], 5) is None  # partition 4 has no owner


def test_two_owners_are_not_settled() -> None:
    one = _told((1, "assigned", [0, 1]), (2, "polled", [0, 1]))
    other = _told((1, "assigned", [1, 2]), (2, "polled", [1, 2]))
    assert settled_at([one, other], 3) is None
    one.hear({"at": 3, "what": "revoked", "partitions": [1]})
    assert settled_at([one, other], 3) == 2


def test_a_new_owner_has_to_poll_again() -> None:
    one = _told((1, "assigned", [0, 1]), (2, "polled", [0, 1]), (3, "revoked", [1]))
    one.hear({"at": 4, "what": "assigned", "partitions": [1]})
    assert settled_at([one], 2) is None
    one.hear({"at": 6, "what": "polled", "partitions": [1]})
    assert settled_at([one], 2) == 6


def test_a_group_that_has_not_heard_of_a_member_is_not_settled() -> None:
    old = [
        _told((1, "assigned", [0, 1, 2]), (2, "polled", [0, 1, 2])),
        _told((1, "assigned", [3, 4, 5]), (2, "polled", [3, 4, 5])),
    ]
    assert settled_at(old, 6) == 2
    assert settled_at([*old, Told()], 6) is None


def _pausing(begin: float, end: float, lost_at: float | None = None) -> Told:
    told = Told()
    told.hear({"at": end, "what": "pause", "seconds": end - begin})
    if lost_at is not None:
        told.hear({"at": lost_at, "what": "revoked", "partitions": [1]})
    return told


def test_the_longest_pause_is_of_a_member_that_loses_nothing() -> None:
    kept, lost = _pausing(10, 10.5), _pausing(10, 14, lost_at=11)
    assert longest_pause([kept, lost], 9, 12) == pytest.approx(0.5)
    assert longest_pause([lost], 9, 12) == pytest.approx(4)  # no member kept everything
    assert longest_pause([kept], 11, 12) == 0
    assert longest_pause([_pausing(8, 30)], 9, 12) == pytest.approx(22)


def test_a_revocation_of_nothing_is_no_loss() -> None:
    told = _pausing(10, 10.5)
    told.hear({"at": 10.2, "what": "revoked", "partitions": []})
    assert longest_pause([told, _pausing(10, 11, lost_at=10)], 9, 12) == pytest.approx(0.5)


def test_commits_begin_when_each_member_has_one_partition() -> None:
    assert joined([1, 1, 1])
    assert not joined([2, 0, 1])
