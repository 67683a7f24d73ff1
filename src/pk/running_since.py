"""The start time of this process by its current wall clock, sent with clock readings (rule L10)."""

from __future__ import annotations

from pk.clock import Clock
from pk.wire import pk_pb2 as wire


class RunningSince:
    """Returns when this process started, by the current wall clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.boottime_ms()

    def __call__(self) -> int:
        return self._clock.wall_ms() - (self._clock.boottime_ms() - self._began_ms)

    def reading(self) -> wire.ClockReading:
        """Return a controller's clock reading: its wall clock, and since when the process runs."""
        return wire.ClockReading(wall_ms=self._clock.wall_ms(), running_since_ms=self())
