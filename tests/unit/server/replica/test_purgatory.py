"""Parked replies and timers: rules L4, L5 and the bound on their number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.server.replica.purgatory import ProducePurgatory, TimerHeap
from pk.types import PartitionKey

P0 = PartitionKey("a" * 36, 0)
P1 = PartitionKey("a" * 36, 1)


def test_released_by_the_watermark_of_its_epoch_only() -> None:
    # rules L4, L5
    purgatory: ProducePurgatory[str] = ProducePurgatory()
    purgatory.park(P0, 3, 10, 1_000, "original")
    purgatory.park(P0, 3, 10, 1_000, "duplicate")
    purgatory.park(P0, 3, 20, 1_000, "later")
    purgatory.park(P1, 3, 5, 1_000, "elsewhere")
    assert purgatory.on_high_watermark(P0, 3, 9) == []
    assert purgatory.on_high_watermark(P0, 4, 50) == []
    assert purgatory.on_high_watermark(P0, 3, 10) == ["original", "duplicate"]
    assert purgatory.on_epoch(P0, 4) == ["later"]
    assert len(purgatory) == 1


def test_losing_leadership_answers_all_of_them() -> None:
    # rule L5
    purgatory: ProducePurgatory[int] = ProducePurgatory()
    for epoch in (1, 2, 3):
        purgatory.park(P0, epoch, 100, 1_000, epoch)
    assert purgatory.on_epoch(P0, 3) == [1, 2]
    assert purgatory.on_epoch(P0, None) == [3]
    assert purgatory.on_time(5_000) == []


def test_timed_out_once() -> None:
    purgatory: ProducePurgatory[str] = ProducePurgatory()
    purgatory.park(P0, 1, 10, 500, "slow")
    purgatory.park(P0, 1, 10, 900, "slower")
    assert purgatory.next_at_ms() == 500
    assert purgatory.on_time(499) == []
    assert purgatory.on_time(600) == ["slow"]
    assert purgatory.on_high_watermark(P0, 1, 10) == ["slower"]
    assert purgatory.next_at_ms() is None


def test_a_broken_stream_is_forgotten() -> None:
    purgatory: ProducePurgatory[str] = ProducePurgatory()
    parked = purgatory.park(P0, 1, 10, 500, "gone")
    purgatory.forget(parked)
    purgatory.forget(parked)
    assert len(purgatory) == 0
    assert purgatory.on_high_watermark(P0, 1, 10) == []


def test_the_bound_refuses() -> None:
    purgatory: ProducePurgatory[int] = ProducePurgatory(limit=2)
    for number in range(2):
        purgatory.check_room()
        purgatory.park(P0, 1, 1, 10, number)
    with pytest.raises(errors.ThrottledError):
        purgatory.check_room()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 30), st.integers(0, 50)),
        max_size=60,
    ),
    st.lists(
        st.tuples(st.sampled_from(["hw", "epoch", "time"]), st.integers(1, 4), st.integers(0, 60)),
        max_size=20,
    ),
)
def test_everything_leaves_exactly_once(
    parks: list[tuple[int, int, int, int]], events: list[tuple[str, int, int]]
) -> None:
    """replica/purgatory D1, compared with a plain list."""
    purgatory: ProducePurgatory[int] = ProducePurgatory()
    oracle: dict[int, tuple[PartitionKey, int, int, int]] = {}
    for number, (partition, epoch, offset, deadline) in enumerate(parks):
        key = PartitionKey("t", partition)
        purgatory.park(key, epoch, offset, deadline, number)
        oracle[number] = (key, epoch, offset, deadline)
    for kind, epoch, value in events:
        for partition in range(4):
            key = PartitionKey("t", partition)
            if kind == "hw":
                left = purgatory.on_high_watermark(key, epoch, value)
                right = [
                    n
                    for n, (k, e, o, _) in oracle.items()
                    if k == key and e == epoch and o <= value
                ]
            elif kind == "epoch":
                left = purgatory.on_epoch(key, epoch)
                right = [n for n, (k, e, _, _) in oracle.items() if k == key and e < epoch]
            else:
                left = purgatory.on_time(value)
                right = [n for n, (_, _, _, d) in oracle.items() if d <= value]
            assert sorted(left) == sorted(right)
            for number in right:
                del oracle[number]
    assert len(purgatory) == len(oracle)


def test_a_timer_set_again_replaces_and_the_heap_stays_small() -> None:
    timers: TimerHeap[str] = TimerHeap()
    for at in range(10_000):
        timers.set("tick", at + 1_000)
    timers.set("tock", 5)
    assert len(timers) == 2
    assert len(timers._heap) < 200
    assert timers.next_at_ms() == 5
    assert timers.pop_due(20_000) == ["tock", "tick"]
    timers.set("tick", 1)
    timers.cancel("tick")
    assert timers.next_at_ms() is None
