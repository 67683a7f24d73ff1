"""The loops of servers and clients: src/pk/event_loops."""

from __future__ import annotations

import asyncio

import pytest

from pk import event_loops
from pk.clock import monotonic_s


def test_time_goes_on_within_a_turn() -> None:
    """The stages of a request are timed by the loop's clock, and most of them are one turn."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while monotonic_s() < begun + 0.000_5:
            pass
        assert loop.time() - begun >= 0.000_5

    event_loops.run(story())


def test_timers_go_by_that_time() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        due = loop.time() + 0.05
        loop.call_at(due, lambda: fired.append(loop.time()))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(due + 0.05):
                await asyncio.Event().wait()
        # libuv counts whole milliseconds
        assert fired[0] >= due - 0.002
        assert loop.time() >= due + 0.048

    event_loops.run(story())


def test_the_loop_of_a_program_stays_its_own() -> None:
    before = asyncio.get_event_loop_policy()
    event_loops.run(asyncio.sleep(0))
    assert asyncio.get_event_loop_policy() is before

    async def kind() -> type:
        return type(asyncio.get_running_loop())

    assert event_loops.run(kind()) is event_loops.EventLoop
    assert asyncio.run(kind()) is not event_loops.EventLoop
