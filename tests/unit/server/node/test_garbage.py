"""When a server process collects garbage (rule P7): counts of collections, never times."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pk.clock import SystemClock
from pk.server.node import garbage, run_config


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Collections:
    """Counts the collections of each generation."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]

    def __call__(self, phase: str, facts: dict[str, int]) -> None:
        self.counts[facts["generation"]] += phase == "start"

    def __enter__(self) -> Collections:
        gc.collect()
        gc.callbacks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self)


def test_requests_that_free_what_they_make_cost_no_collection() -> None:
    garbage.collect_seldom()
    with Collections() as found:
        for number in range(2_000):
            request: Any = [[number] for _ in range(garbage.YOUNG_OBJECTS // 20)]
            del request
    assert found.counts == [0, 0, 0]


def test_garbage_in_cycles_is_collected() -> None:
    garbage.collect_seldom()
    with Collections() as found:
        for _ in range(10 * garbage.YOUNG_OBJECTS):
            cycle: list[Any] = []
            cycle.append(cycle)
    assert 9 <= sum(found.counts) <= 11


def test_a_role_collects_so_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """server/node/run_config"""
    log = SimpleNamespace(bug=lambda *_: None)
    process = SimpleNamespace(log=log, metrics=None, world=SimpleNamespace(clock=SystemClock()))

    async def close() -> None: ...

    async def watch(*_: Any) -> None: ...

    process.close, process.stopping = close, asyncio.Event()
    monkeypatch.setattr(run_config, "RoleContext", lambda *_: process)
    monkeypatch.setattr(run_config.tracing, "watch_loop_lag", watch)
    seen: list[tuple[bool, tuple[int, int, int]]] = []

    async def serve(_process: Any) -> None:
        seen.append((gc.isenabled(), gc.get_threshold()))

    given: Any = None
    asyncio.run(run_config._run("broker", given, serve))
    assert seen == [(True, (garbage.YOUNG_OBJECTS, garbage.MIDDLE, garbage.OLDEST))]
