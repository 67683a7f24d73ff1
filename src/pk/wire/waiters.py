"""A queue of tasks that wait until a stream can move; any transport can use it.

No wake-up is lost: if the woken task was cancelled meanwhile, the next one is woken.
"""

from __future__ import annotations

import asyncio
from collections import deque

Waiters = deque[asyncio.Future[None]]


def wake_one(waiters: Waiters) -> bool:
    """Wake the first task that still waits; return False if there is none."""
    while waiters:
        future = waiters.popleft()
        if not future.done():
            future.set_result(None)
            return True
    return False


def wake_all(waiters: Waiters) -> None:
    while wake_one(waiters):
        pass


async def wait_in(waiters: Waiters) -> None:
    """Wait until woken; may be cancelled."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled():
            wake_one(waiters)
        elif future in waiters:
            waiters.remove(future)
        raise
