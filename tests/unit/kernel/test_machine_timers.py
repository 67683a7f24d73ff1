"""The timers of machines: one for each key."""

from __future__ import annotations

import asyncio

from pk.clock import SystemClock
from pk.machine_timers import MachineTimers


async def _fired(timers: MachineTimers, key: str, in_ms: int) -> list[bool]:
    """Set a timer that notes whether it is still set, and wait for it."""
    noted: list[bool] = []
    woken = asyncio.Event()

    def wake() -> None:
        noted.append(key in timers)
        woken.set()

    timers.set(key, SystemClock().monotonic_ms() + in_ms, wake)
    assert key in timers
    await asyncio.wait_for(woken.wait(), 60)
    return noted


def test_a_timer_is_not_set_any_more_once_it_fires() -> None:
    async def run() -> None:
        timers = MachineTimers(SystemClock())
        assert await _fired(timers, "a", 1) == [False]
        assert await _fired(timers, "a", 1) == [False], "it can be set again"

    asyncio.run(run())


def test_a_timer_that_is_moved_or_taken_back_does_not_fire_at_its_old_time() -> None:
    async def run() -> None:
        timers, now_ms = MachineTimers(SystemClock()), SystemClock().monotonic_ms()
        fired: list[str] = []
        timers.set("moved", now_ms + 1, lambda: fired.append("too early"))
        timers.set("taken back", now_ms + 1, lambda: fired.append("taken back"))
        timers.set("moved", now_ms + 3_600_000, lambda: fired.append("an hour later"))
        timers.set("taken back", None, lambda: None)
        assert "moved" in timers
        assert "taken back" not in timers
        await _fired(timers, "another", 20)
        assert not fired
        timers.close()

    asyncio.run(run())


def test_closed_timers_do_not_fire_and_take_no_others() -> None:
    async def run() -> None:
        timers, now_ms = MachineTimers(SystemClock()), SystemClock().monotonic_ms()
        fired: list[str] = []
        timers.set("before", now_ms + 1, lambda: fired.append("before"))
        timers.close()
        timers.set("after", now_ms + 1, lambda: fired.append("after"))
        await _fired(MachineTimers(SystemClock()), "another", 20)
        assert not fired

    asyncio.run(run())
