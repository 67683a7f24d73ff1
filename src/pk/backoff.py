"""How long to wait before the next attempt: exponential, bounded, with jitter.

Pure.  A `Backoff` counts failures in a row and turns the count into a wait in milliseconds; it
neither sleeps nor reads a clock.  A pure machine adds the wait to its `now_ms` argument; async code
passes it to the injected clock.  Jitter comes from the injected generator of random numbers, so the
simulator replays the same waits from the same seed.

Retry libraries (tenacity, backoff, stamina) wrap a callable, sleep by themselves and draw from the
`random` module.  A machine that returns timers has no callable to wrap, and the simulator needs
its own clock and generator.  A library without its sleep and its random numbers would have no more
code than this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable

#: Takes a wait in milliseconds, returns the wait to use.
Jitter = Callable[[float], float]

#: The exponent is bounded, so that the power stays small after millions of failures.
DOUBLINGS_MAX = 16


def equal_jitter(rng: random.Random) -> Jitter:
    """Return a random wait between half of `wait` and all of it: nodes that failed together then
    retry at different times.
    """
    return lambda wait_ms: wait_ms * rng.uniform(0.5, 1.0)


def client_jitter(rng: random.Random) -> Jitter:
    """Return a random wait within 20 % of the given one, as Kafka's clients do (KIP-580)."""
    return lambda wait_ms: wait_ms * (0.8 + 0.4 * rng.random())


class CommonJitter:
    """The jitter of clients for many back-offs: those that fail in one round wait equally long.

    What failed together is then tried together, in few rounds.  `renew` begins the next round.
    """

    __slots__ = ("_factor", "_jitter")

    def __init__(self, rng: random.Random) -> None:
        self._jitter = client_jitter(rng)
        self._factor: float | None = None

    def __call__(self, wait_ms: float) -> float:
        if self._factor is None:
            self._factor = self._jitter(1.0)
        return wait_ms * self._factor

    def renew(self) -> None:
        self._factor = None


def exponential_ms(initial_ms: int, max_ms: int, attempts: int) -> int:
    """Return the wait after `attempts` failures in a row, without jitter; it doubles from
    `initial_ms`.
    """
    return min(max_ms, initial_ms << min(attempts - 1, DOUBLINGS_MAX))


class Backoff:
    """The waits of one sequence of attempts.

    bounds_ms: the first wait and the longest one, before jitter; may be replaced between attempts.
    jitter: None draws no random number.
    """

    __slots__ = ("_jitter", "attempts", "bounds_ms")

    def __init__(self, bounds_ms: tuple[int, int], jitter: Jitter | None = None) -> None:
        self.bounds_ms = bounds_ms
        self.attempts = 0  #: failures in a row
        self._jitter = jitter

    def failed(self) -> None:
        """Count a failure."""
        self.attempts += 1

    def wait_ms(self) -> float:
        """Return the wait after the failures so far; 0 if there were none.  Draws jitter at each
        call.
        """
        if not self.attempts:
            return 0
        wait_ms = exponential_ms(*self.bounds_ms, self.attempts)
        return wait_ms if self._jitter is None else self._jitter(wait_ms)

    def next_ms(self) -> float:
        """Count a failure and return the wait before the next attempt."""
        self.failed()
        return self.wait_ms()

    def reset(self) -> None:
        """Note a success: the next failure waits for the shortest time again."""
        self.attempts = 0


class Retry(Backoff):
    """A `Backoff` that keeps the time of the next attempt, as machines need it."""

    at_ms = 0  #: 0 = now

    def postpone(self, now_ms: int) -> None:
        """Count a failed attempt and back off."""
        self.at_ms = now_ms + int(self.next_ms())

    def reset(self) -> None:
        super().reset()
        self.at_ms = 0
