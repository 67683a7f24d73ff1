"""Since when this process has run under an unchanged clock, sent with clock readings (rule L10).

The time is given by the current wall clock.  If the wall clock is set, it begins again: a process
that has run for long says nothing for a clock that was set meanwhile.
"""

from __future__ import annotations

from pk.clock import Clock
from pk.wire import pk_pb2 as wire

#: Between two observations, a slewed clock may differ by up to this from CLOCK_BOOTTIME.
SLEW_MS = 500


class RunningSince:
    """Returns since when this process has run and its wall clock was not set, by that clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.boottime_ms()
        self._line_ms = clock.wall_ms() - self._began_ms

    def __call__(self) -> int:
        boottime_ms = self._clock.boottime_ms()
        line_ms = self._clock.wall_ms() - boottime_ms
        if abs(line_ms - self._line_ms) > SLEW_MS:
            self._began_ms = boottime_ms
        self._line_ms = line_ms
        return line_ms + self._began_ms

    def reading(self) -> wire.ClockReading:
        """Return a controller's clock reading: its wall clock, and since when the process runs."""
        return wire.ClockReading(wall_ms=self._clock.wall_ms(), running_since_ms=self())
