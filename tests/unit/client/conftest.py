"""Puts whole clients into a simulated world."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pk.client import connection, consumer, group_consumer
from pk.sim.world import SimWorld


class SimThread:
    """Stands for the clients' `LoopThread`: a simulated loop that runs while a call waits."""

    def __init__(self, sim: SimWorld, name: str) -> None:
        self.sim = sim
        self.name = name
        self.world = sim.world_of(name)
        self.loop = self
        self.thread = threading.Thread()  # never started, so no code runs on it
        self.compute = None

    def check_process(self) -> None:
        pass

    must_not_block = check_process

    def call_soon_threadsafe(self, function: Any, *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        self.sim.spawn(self.name, call())

    def run(self, work: Any, timeout_s: float | None = None) -> Any:
        task = self.sim.spawn(self.name, connection.bounded(work, timeout_s))
        self.sim.run_until(task.done)
        return task.result()

    def finish(self, work: Any) -> None:
        self.run(work)

    def now_s(self) -> float:
        return self.sim.loop.time()


class SimSignal:
    """A `WakeupSignal` whose wait runs the simulation, one event at a time."""

    def __init__(self, sim: SimWorld) -> None:
        self.sim = sim

    def set(self) -> None:
        pass

    def wait_for(self, predicate: Any, timeout_s: float) -> Any:
        until = self.sim.loop.time() + timeout_s
        while not predicate() and self.sim.loop.time() < until:
            self.sim.loop.run_for_ms(1)
        return predicate()


@pytest.fixture
def sim_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[SimWorld], SimThread]:
    """Let clients that are opened after this call live in that simulated world."""

    def make(sim: SimWorld) -> SimThread:
        thread = SimThread(sim, "client")
        monkeypatch.setattr(connection, "acquire", lambda: thread)
        monkeypatch.setattr(connection, "release", lambda held: None)
        monkeypatch.setattr(consumer, "monotonic_s", thread.now_s)
        monkeypatch.setattr(group_consumer, "monotonic_s", thread.now_s)
        monkeypatch.setattr(consumer, "WakeupSignal", lambda: SimSignal(sim))
        return thread

    return make
