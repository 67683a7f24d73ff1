"""The credit of a fetch stream and the turns of replicas that a reassignment adds (rule R12)."""

from __future__ import annotations

import random

from pk import limits
from pk.server.replica.fetch_limits import (
    COPIES_MAX,
    CopyTurns,
    FetchCredit,
    FetcherId,
    FetchKind,
)
from pk.types import PartitionKey


def keys(count: int) -> list[PartitionKey]:
    return [PartitionKey("t", number) for number in range(count)]


def test_a_stream_that_catches_up_has_less_credit_and_room_for_two_frames() -> None:
    hot, late = (FetcherId(2, "d", kind).credit_bytes for kind in FetchKind)
    assert 2 * limits.FRAME_BYTES <= late < hot


def test_a_fetched_byte_holds_credit_until_it_is_written() -> None:
    """replica/fetch_limits K1: on whichever stream its replica is by then."""
    woken: list[None] = []
    credit = FetchCredit(100, lambda: woken.append(None))
    credit.opened()
    assert credit.take() == 100
    assert not credit.due
    credit.received(60)
    credit.queued(60)
    assert not credit.due
    credit.received(30)  # no log takes them
    assert credit.take() == 30
    credit.written(60)
    assert woken
    assert credit.take() == 60


def test_a_stream_that_opens_again_has_no_credit_for_bytes_that_still_wait() -> None:
    """replica/fetch_limits K1: otherwise each reconnection would add bytes to a slow directory."""
    credit = FetchCredit(100, lambda: None)
    for _ in range(5):
        credit.opened()
        granted = credit.take()
        credit.received(granted)
        credit.queued(granted)
    assert credit.unwritten == 100
    credit.written(40)
    credit.opened()
    assert credit.take() == 40


def test_a_batch_larger_than_the_credit_leaves_a_debt_and_no_negative_grant() -> None:
    credit = FetchCredit(100, lambda: None)
    credit.opened()
    assert credit.take() == 100
    credit.received(250)
    credit.queued(250)
    credit.opened()
    assert (credit.due, credit.take()) == (False, 0)
    credit.written(200)
    assert credit.take() == 50
    credit.written(50)
    assert credit.take() == 50


def test_the_credit_is_never_exceeded_and_never_lost() -> None:
    """A leader that sends at random, reconnections at random, a disk that is slow at random."""
    rng = random.Random(7)
    credit = FetchCredit(1_000, lambda: None)
    credit.opened()
    leader, queue = 0, []
    for _ in range(5_000):
        leader += credit.take()
        assert leader >= 0
        assert leader + credit.unwritten <= 1_000
        choice = rng.random()
        if choice < 0.5 and leader:
            size = rng.randint(1, leader)
            leader -= size
            credit.received(size)
            kept = rng.randint(0, size)
            if kept:
                credit.queued(kept)
                queue.append(kept)
        elif choice < 0.9 and queue:
            credit.written(queue.pop(0))
        elif choice > 0.99:
            credit.opened()
            leader = 0
    for size in queue:
        credit.written(size)
    assert leader + credit.take() == 1_000


def test_added_replicas_copy_two_at_a_time_in_order() -> None:
    """The third begins when one of the first two ends (replica/fetch_limits K2)."""
    turns, (a, b, c, d) = CopyTurns(), keys(4)
    assert COPIES_MAX == 2
    assert [turns.take(key) for key in (a, b, c, d)] == [True, True, False, False]
    assert turns.take(a), "it has its turn still"
    assert turns.leave(b) == c
    assert turns.take(c)
    assert not turns.take(d)
    assert turns.leave(a) == d
    assert turns.leave(c) is None
    assert turns.leave(d) is None
    assert turns.take(b)


def test_a_replica_that_stops_waiting_is_skipped() -> None:
    turns, (a, b, c, d) = CopyTurns(), keys(4)
    for key in (a, b, c, d):
        turns.take(key)
    assert turns.leave(c) is None
    assert turns.leave(a) == d
    assert turns.leave(a) is None, "its turn has ended already"


def test_a_turn_is_free_only_if_none_waits() -> None:
    """In any order of events, no replica waits while fewer than two copy."""
    rng = random.Random(3)
    turns, copying, waiting = CopyTurns(), set[PartitionKey](), set[PartitionKey]()
    for _ in range(2_000):
        key = rng.choice(keys(9))
        if rng.random() < 0.6:
            got = turns.take(key)
            assert got == (key in copying or len(copying) < COPIES_MAX)
            if got:
                copying.add(key)
            else:
                waiting.add(key)
        else:
            following = turns.leave(key)
            assert (following is not None) == (key in copying and bool(waiting - {key}))
            copying.discard(key)
            waiting.discard(key)
            if following is not None:
                waiting.remove(following)
                copying.add(following)
        assert len(copying) == COPIES_MAX or not waiting
