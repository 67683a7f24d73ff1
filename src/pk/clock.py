"""The interface to time; the only module that imports `time`.

There are three clocks.  `wall_ms` is the time in records and for retention; it may step.
`monotonic_ms` never goes back and is used for timeouts.  `boottime_ms` also counts the time in
suspend, and the wall clock is compared with it (docs/PROTOCOL.md L10).  The simulator's clock
implements the same protocol on virtual time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

#: Other systems than Linux: a suspended machine looks like one whose wall clock stepped.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """The time functions of shells and world-generic code."""

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; may step."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds since an arbitrary start; never goes back."""
        ...

    def boottime_ms(self) -> int:
        """Return milliseconds since the machine was booted, including suspend; never goes back."""
        ...

    async def sleep_ms(self, duration_ms: float) -> None:
        """Suspend the calling task."""
        ...


class MedianTime(NamedTuple):
    """The time by the median of several clocks.

    The median of an even number of clocks lies between two of them, and either may be wrong.  If
    some clocks are not known, it lies anywhere from where they are all behind to where they are all
    ahead.  So a time that must not come too early is set by the later bound, and compared with the
    earlier one.
    """

    earliest_ms: int
    latest_ms: int

    @classmethod
    def of(cls, clocks_ms: Iterable[int], among: int = 0) -> Self:
        """Return the bounds of the median.

        clocks_ms: the clocks that are known: at least one, and more than half of all
        among: how many clocks there are; 0 = no others
        """
        ordered = sorted(clocks_ms)
        among = max(among, len(ordered))
        unknown = among - len(ordered)
        return cls(ordered[(among - 1) // 2 - unknown], ordered[among // 2])

    def plus(self, later_ms: int) -> Self:
        """Return both times, `later_ms` later."""
        return type(self)(self.earliest_ms + later_ms, self.latest_ms + later_ms)

    @property
    def middle_ms(self) -> int:
        """The mean of the two, for comparisons that tolerate an error to both sides."""
        return (self.earliest_ms + self.latest_ms) // 2


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def boottime_ms(self) -> int:
        return time.clock_gettime_ns(_BOOTTIME) // 1_000_000

    async def sleep_ms(self, duration_ms: float) -> None:
        await asyncio.sleep(duration_ms / 1000)


def monotonic_s() -> float:
    """Return seconds of the monotonic clock, for synchronous façades and progress displays."""
    return time.monotonic()


def wall_ms() -> int:
    """Return milliseconds since the Unix epoch, for synchronous façades."""
    return time.time_ns() // 1_000_000


def block_s(duration_s: float) -> None:
    """Block the calling thread; for shells that own their thread (supervisor, CLI)."""
    time.sleep(duration_s)
