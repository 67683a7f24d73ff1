"""Makes the event loops of servers and clients: uvloop's.

A request costs some twenty turns of a loop and as many socket calls, and Python's own loop is a
fifth of the CPU time of a small one (docs/design/0007).  uvloop does the same in C, on libuv.  A
library must not replace the loops of its user's program, so pk makes the loops of its own threads
and processes here, and sets no policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from pk.clock import monotonic_s

T = TypeVar("T")


class EventLoop(uvloop.Loop):
    """uvloop's loop with a clock that goes on within a turn.

    libuv keeps the time of the turn's begin, in whole milliseconds: a stage of a request that takes
    less would count as nothing.
    """

    def time(self) -> float:
        return monotonic_s()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(main)
