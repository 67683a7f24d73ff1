"""When a process began, as it says itself beside the time of its wall clock (rule L10)."""

from __future__ import annotations

from pk.clock import Clock
from pk.wire import pk_pb2 as wire


class RunningSince:
    """When this process began, by the wall clock as it is now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.boottime_ms()

    def __call__(self) -> int:
        return self._clock.wall_ms() - (self._clock.boottime_ms() - self._began_ms)

    def reading(self) -> wire.ClockReading:
        """What a controller says of its clock: nothing vouches for it but how long it has run."""
        return wire.ClockReading(wall_ms=self._clock.wall_ms(), running_since_ms=self())
