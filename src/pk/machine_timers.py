"""The timers that machines ask their shells for: at most one for each key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pk.clock import Clock


class MachineTimers:
    """Calls at times of the monotonic clock, on the running event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._set: dict[Any, asyncio.TimerHandle] = {}
        self._closed = False

    def set(self, key: Any, at_ms: float | None, wake: Callable[[], None]) -> None:
        """Sets or moves the timer of `key`; None = no timer."""
        known = self._set.pop(key, None)
        if known is not None:
            known.cancel()
        if at_ms is None or self._closed:
            return

        def fire() -> None:
            del self._set[key]
            wake()

        delay_s = max(0, at_ms - self._clock.monotonic_ms()) / 1000
        self._set[key] = asyncio.get_running_loop().call_later(delay_s, fire)

    def __contains__(self, key: Any) -> bool:
        """Return whether the timer of `key` is set, and has not fired."""
        return key in self._set

    def close(self) -> None:
        """Cancels every timer; later ones are not set."""
        self._closed = True
        for timer in self._set.values():
            timer.cancel()
