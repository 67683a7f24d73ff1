"""The timers of all machines of a process.

World-generic.

Rules
  H5  The timers of all machines of a process share one heap, keyed by (machine, key) (rule P6).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from pk.clock import Clock


class Timers:
    """One heap of timers: set, replace, cancel.  `fire` is called for due timers, in order."""

    def __init__(self, clock: Clock, fire: Callable[[Any, Any], None]) -> None:
        self._clock = clock
        self._fire = fire
        self._heap: list[tuple[int, int, Any]] = []
        self._due: dict[Any, tuple[int, int]] = {}  # key -> (at_ms, number) of the valid entry
        self._number = 0
        self._changed = asyncio.Event()

    def set(self, owner: Any, key: Any, at_ms: int | None) -> None:
        """Call `fire(owner, key)` at `at_ms` of the monotonic clock; None cancels the timer."""
        full = (owner, key)
        if at_ms is None:
            self._due.pop(full, None)
            return
        self._number += 1
        self._due[full] = (at_ms, self._number)
        heapq.heappush(self._heap, (at_ms, self._number, full))
        self._changed.set()

    def drop(self, owner: Any) -> None:
        """Cancel all timers of `owner`."""
        for full in [full for full in self._due if full[0] == owner]:
            del self._due[full]

    async def run(self) -> None:
        """Fire due timers until cancelled."""
        while True:
            now_ms = self._clock.monotonic_ms()
            while self._heap and (self._stale() or self._heap[0][0] <= now_ms):
                at_ms, number, full = heapq.heappop(self._heap)
                if self._due.get(full) == (at_ms, number):
                    del self._due[full]
                    self._fire(*full)
            self._changed.clear()
            wait_ms = self._heap[0][0] - now_ms if self._heap else None
            try:
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _stale(self) -> bool:
        at_ms, number, full = self._heap[0]
        return self._due.get(full) != (at_ms, number)
