"""A log that is cut or begun again while a swap of cleaned segments runs (log/swapping)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pk.log.swap import Swap
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


@pytest.mark.parametrize("change", ["cut", "start anew", "reopen"])
def test_a_cut_waits_for_the_swap_of_a_cleaning(change: str) -> None:
    """log/swapping: the loop takes over the result of the swap first."""

    async def main() -> None:
        house = House()
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 3)
        work = log.cleaned.begin(Swap(0), {})
        assert work is not None
        changes: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "cut": lambda: manager.cut(KEY, 1),
            "start anew": lambda: manager.start_anew(KEY, 1, log_start=0),
            "reopen": lambda: manager.reopen(KEY),
        }
        waiting = asyncio.ensure_future(changes[change]())
        await manager.disk_of(KEY).write(work)
        await asyncio.sleep(0.05)
        assert (log.log_end, log.cuts) == (3, 0)
        log.cleaned.end_job()
        await waiting
        assert log.cuts

    run(main)
