"""Where two logs diverge: rules R4 and R5, checked with logs whose common prefix is known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.log.divergence import Divergence, EpochEnd, StartAt, find_divergence
from pk.log.epochs import LeaderEpochs
from pk.server.replica.follower import check_start, cut_at
from pk.types import NONE, EpochStart

#: A log is the list of its records' leader epochs.
Log = list[int]


def epochs_of(log: Log, first: int = 0) -> LeaderEpochs:
    entries = [
        EpochStart(epoch, offset)
        for offset, epoch in enumerate(log)
        if offset == 0 or log[offset - 1] != epoch
    ]
    known = LeaderEpochs(entries)
    known.truncate_start(first)
    return known


def asked(leader: Log, last: int, end: int, first: int = 0) -> Divergence | None:
    """Return the answer of a leader whose segments begin at `first`."""
    return find_divergence(epochs_of(leader, first), first, len(leader), last, end)


@st.composite
def forked(draw: st.DrawFn) -> tuple[Log, Log, int]:
    """Draw (leader's log, follower's log, length of their common prefix).

    No epoch is in both tails, because a leader writes one history.
    """
    steps = st.lists(st.integers(0, 2), max_size=8)

    def grow(first: int, sizes: list[int], taken: list[int]) -> Log:
        tail: Log = []
        epoch = first
        for size in sizes:
            epoch += 1 + (size == 0)
            while epoch in taken:
                epoch += 1
            tail += [epoch] * (1 + size)
        return tail

    common = grow(0, draw(steps), [])
    last = common[-1] if common else 0
    one = grow(last, draw(steps), [])
    two = grow(last, draw(steps), one)
    longer = draw(st.booleans())  # the last common epoch continues in one of them
    extra = [last] * (draw(st.integers(0, 3)) if common else 0)
    if longer:
        return common + extra + one, common + two, len(common)
    return common + one, common + extra + two, len(common)


@given(forked())
def test_the_follower_keeps_exactly_what_both_have(logs: tuple[Log, Log, int]) -> None:
    leader, follower, common = logs
    if leader[: len(follower)] == follower:
        common = len(follower)
    elif follower[: len(leader)] == leader:
        common = len(leader)
    mine = list(follower)
    for _ in range(len(follower) + 2):
        last = mine[-1] if mine else NONE
        told = asked(leader, last, len(mine))
        if told is None:
            break
        assert isinstance(told, EpochEnd)
        cut = cut_at(
            told, epochs_of(mine), log_end=len(mine), high_watermark=0, unclean=False,
        )  # fmt: skip
        assert cut.offset < len(mine), "F2"
        mine = mine[: cut.offset]
    else:
        raise AssertionError("they never agree")
    assert mine == leader[: len(mine)]
    assert len(mine) == common


@given(forked(), st.data())
def test_what_cannot_be_compared_is_fetched_anew(
    logs: tuple[Log, Log, int], data: st.DataObject
) -> None:
    """Rule R5: the leader has dropped its first segments, and the epochs of their records."""
    leader, follower, _ = logs
    first = data.draw(st.integers(0, len(leader)))
    mine = list(follower)
    start = 0
    for _ in range(len(follower) + 3):
        last = mine[-1] if len(mine) > start else NONE
        told = asked(leader, last, len(mine), first)
        if told is None:
            break
        if isinstance(told, StartAt):
            assert told.offset == first > 0
            mine, start = [NONE] * first, first
            continue
        own = LeaderEpochs() if len(mine) == start else epochs_of(mine)
        if len(mine) == start and start:
            own = LeaderEpochs()
        cut = cut_at(
            told, own, log_end=len(mine), high_watermark=0, unclean=False,
        )  # fmt: skip
        mine = mine[: cut.offset]
    else:
        raise AssertionError("they never agree")
    kept = range(max(start, first), len(mine))
    assert [mine[at] for at in kept] == [leader[at] for at in kept]
    assert len(mine) >= first
    if start < first:  # its records below the leader's segments belong to the leader's history, too
        assert mine[:first] == leader[:first]


@given(forked(), st.data())
def test_a_clean_leader_is_never_refused(logs: tuple[Log, Log, int], data: st.DataObject) -> None:
    """replica/follower F1, F3: committed records are in both logs; wherever the leader's segments
    begin, no answer of the leader gives up any of them.
    """
    leader, mine, common = logs
    first = data.draw(st.integers(0, len(leader)))
    committed = data.draw(st.integers(0, common))
    for _ in range(len(mine) + 2):
        last = mine[-1] if mine else NONE
        told = asked(leader, last, len(mine), first)
        if isinstance(told, StartAt):
            check_start(told.offset, high_watermark=committed, unclean=False)
            return
        if told is None:
            return
        known = {"log_end": len(mine), "high_watermark": committed}
        mine = mine[: cut_at(told, epochs_of(mine), unclean=False, **known).offset]
    raise AssertionError("they never agree")


def test_a_log_is_begun_anew_below_the_committed_for_an_unclean_leader_only() -> None:
    # rules R4, R5
    check_start(7, high_watermark=7, unclean=False)
    with pytest.raises(errors.LogTruncated):
        check_start(6, high_watermark=7, unclean=False)
    check_start(6, high_watermark=7, unclean=True)


def test_the_committed_is_cut_for_an_unclean_leader_only() -> None:
    # rule R4
    own = epochs_of([1, 1, 1, 2])
    known: dict[str, Any] = {"log_end": 4, "high_watermark": 3}
    assert cut_at(EpochEnd(1, 3), own, unclean=False, **known) == (3, False)
    with pytest.raises(errors.LogTruncated):
        cut_at(EpochEnd(1, 2), own, unclean=False, **known)
    assert cut_at(EpochEnd(1, 2), own, unclean=True, **known) == (2, True)


def test_epochs_grow() -> None:
    """Checks the generator of the logs."""
    for one, two in pairwise(epochs_of([1, 1, 3, 3, 4]).entries):
        assert one.epoch < two.epoch
