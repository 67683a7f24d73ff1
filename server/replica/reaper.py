"""Answers parked produce requests whose deadline has passed (Kafka's expired-operation reaper).

World-generic.  One timer is set to the earliest deadline in the purgatory.
"""

from __future__ import annotations

import asyncio

from pk import errors
from pk.clock import Clock
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.purgatory import ProducePurgatory


class ExpirationReaper:
    """The timer of one purgatory."""

    def __init__(self, purgatory: ProducePurgatory[DelayedProduce], clock: Clock) -> None:
        self._purgatory = purgatory
        self._clock = clock
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = 0

    def parked(self) -> None:
        """Set the timer for the earliest deadline in purgatory."""
        at_ms = self._purgatory.next_at_ms()
        if at_ms is None or (self._alarm is not None and self._alarm_ms <= at_ms):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        delay_ms = max(0, at_ms - self._clock.monotonic_ms())
        self._alarm_ms = at_ms
        self._alarm = asyncio.get_running_loop().call_later(delay_ms / 1000, self._expire)

    def _expire(self) -> None:
        self._alarm = None
        for delayed in self._purgatory.on_time(self._clock.monotonic_ms()):
            delayed.answer(
                errors.RequestTimedOut(
                    "the batch is written, but the in-sync replicas did not confirm it in time"
                )
            )
        self.parked()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
