"""The waits of `pk.backoff`: their growth, their bounds, and which random numbers they draw."""

from __future__ import annotations

import random

import pytest

from pk.backoff import Backoff, CommonJitter, client_jitter, equal_jitter, exponential_ms


def test_waits_double_up_to_the_bound() -> None:
    backoff = Backoff((50, 300))
    assert [backoff.next_ms() for _ in range(5)] == [50, 100, 200, 300, 300]
    assert backoff.attempts == 5


def test_a_success_begins_with_the_shortest_wait_again() -> None:
    backoff = Backoff((50, 300))
    backoff.next_ms()
    backoff.next_ms()
    backoff.reset()
    assert backoff.wait_ms() == 0
    assert backoff.next_ms() == 50


def test_counting_a_failure_and_asking_for_its_wait_are_two_steps() -> None:
    backoff = Backoff((50, 300))
    backoff.failed()
    backoff.failed()
    assert [backoff.wait_ms(), backoff.wait_ms()] == [100, 100]


def test_bounds_may_change_between_attempts() -> None:
    backoff = Backoff((50, 300))
    backoff.next_ms()
    backoff.bounds_ms = (10, 15)
    assert backoff.next_ms() == 15


def test_millions_of_failures_stay_within_the_bound() -> None:
    assert exponential_ms(1, 10**9, 10**7) == 2**16
    assert exponential_ms(100, 1_000, 10**7) == 1_000


def test_a_first_wait_above_the_bound_is_cut() -> None:
    assert exponential_ms(500, 100, 1) == 100


@pytest.mark.parametrize(
    ("jitter", "least", "most"), [(equal_jitter, 50, 100), (client_jitter, 80, 120)]
)
def test_jitter_stays_in_its_range_and_uses_it(jitter: object, least: int, most: int) -> None:
    assert callable(jitter)
    backoff = Backoff((100, 100), jitter(random.Random(7)))
    waits = [backoff.next_ms() for _ in range(500)]
    assert all(least <= wait <= most for wait in waits)
    assert max(waits) - min(waits) > 0.9 * (most - least)


def test_the_injected_generator_decides() -> None:
    """Each wait draws one number, and none is drawn before the first failure: simulations depend on
    it.
    """
    rng, same = random.Random(7), random.Random(7)
    backoff = Backoff((100, 400), equal_jitter(rng))
    assert backoff.wait_ms() == 0
    assert backoff.next_ms() == 100 * same.uniform(0.5, 1.0)
    assert backoff.next_ms() == 200 * same.uniform(0.5, 1.0)
    assert rng.getstate() == same.getstate()
    without = Backoff((100, 400))
    without.next_ms()
    assert rng.getstate() == same.getstate()


def test_back_offs_that_fail_in_one_round_wait_equally_long() -> None:
    jitter = CommonJitter(random.Random(1))
    waits = []
    for _ in range(50):
        several = {Backoff((100, 1_000), jitter).next_ms() for _ in range(20)}
        assert len(several) == 1
        waits += several
        jitter.renew()
    assert len(set(waits)) > 40
    assert all(80 <= wait <= 120 for wait in waits)
