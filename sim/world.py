"""Worlds of nodes drawn from one seed, over virtual time (loop.py).

Code written for `pk.world` runs here unmodified.  Everything that happens is a function of the
seed.

Rules
  W4  Each node draws from a random generator of its own, so that the number of draws of one node
      does not change the draws of another.

Code that runs here must not iterate a `set` of objects: its order follows memory addresses, not the
seed.  This includes the sets that `asyncio.wait` returns, and the order in which
`asyncio.TaskGroup` cancels.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableSequence
from itertools import islice
from typing import Any, TypeVar, TypeVarTuple

from pk.sim.loop import EVENTS_MAX, NODE, SimLoop, SimNode, Stuck
from pk.sim.network import SimNetwork
from pk.world import World

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Where virtual wall clocks start: 2025-01-01T00:00:00Z.
EPOCH_MS = 1_735_689_600_000
_US_PER_MS = 1_000
TRACE_TAIL = 40


class SimClock:
    """The clocks of one node: virtual time plus its error.  Implements `pk.clock.Clock`."""

    def __init__(self, loop: SimLoop, skew_ms: int = 0) -> None:
        self._loop = loop
        self.skew_ms = skew_ms

    def wall_ms(self) -> int:
        return EPOCH_MS + self._loop.now_us // _US_PER_MS + self.skew_ms

    def monotonic_ms(self) -> int:
        return self._loop.now_us // _US_PER_MS

    boottime_ms = monotonic_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        future = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, duration_ms) / 1000, _resolve, future)
        try:
            await future
        finally:
            timer.cancel()

    def step(self, by_ms: int) -> None:
        """Move the wall clock (rule L10); the monotonic clock does not change."""
        self.skew_ms += by_ms


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SimWorld:
    """One simulated world: a loop, a network, nodes, a trace."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = SimLoop()
        self.trace: MutableSequence[str] = []  #: callers may replace it by a list of bounded length
        self.nodes: dict[str, SimNode] = {}
        self.clocks: dict[str, SimClock] = {}
        self.network: SimNetwork = SimNetwork(self.loop, self.random("network"), self.record)
        self._digest = hashlib.sha256()

    def random(self, name: str) -> random.Random:
        """Return the random generator called `name` (W4)."""
        return random.Random(f"{self.seed}/{name}")

    def record(self, line: str) -> None:
        """Add an event to the trace."""
        line = f"{self.loop.now_us:>12} {line}"
        self.trace.append(line)
        self._digest.update(line.encode() + b"\n")

    @property
    def digest(self) -> str:
        """A hash of the whole trace; equal digests mean equal histories."""
        return self._digest.hexdigest()

    # -- nodes -----------------------------------------------------------------------------------

    def start(self, name: str, main: Callable[[World], Awaitable[Any]]) -> asyncio.Task[Any]:
        """Start or restart the node `name`, which runs `main(world)` and the tasks it spawns."""
        old = self.nodes.get(name)
        if old is not None and old.alive:
            raise AssertionError(f"{name} is running")
        node = SimNode(name, old.incarnation + 1 if old else 1)
        self.nodes[name] = node
        self.record(f"start {name} {node.incarnation}")
        return self.spawn(name, main(self.world_of(name)))

    def world_of(self, name: str) -> World:
        """Return the World of the node `name`; create the node if needed (test drivers)."""
        node = self.nodes.setdefault(name, SimNode(name, 1))
        clock = self.clocks.setdefault(name, SimClock(self.loop))
        ids = self.random(f"{name}/{node.incarnation}/ids")
        return World(
            clock=clock,
            network=self.network.network_of(node),
            rng=self.random(f"{name}/{node.incarnation}"),
            new_id=lambda: str(uuid.UUID(int=ids.getrandbits(128), version=4)),
        )

    def spawn(self, name: str, coro: Awaitable[T]) -> asyncio.Task[T]:
        """Run a coroutine as part of the node `name`."""
        node = self.nodes[name]
        context = contextvars.Context()
        context.run(NODE.set, node)
        work = coro if asyncio.iscoroutine(coro) else _awaited(coro)
        task: asyncio.Task[T] = self.loop.create_task(work, context=context)
        return task

    def kill(self, name: str) -> None:
        """Kill the node like kill -9 (sim/loop W3)."""
        node = self.nodes[name]
        if not node.alive:
            return
        self.record(f"kill {name} {node.incarnation}")
        node.alive = False
        node.held.clear()
        for told in node.on_kill:
            told()
        self.network.lose(node)

    def pause(self, name: str) -> None:
        """Pause the node like SIGSTOP (sim/loop W3)."""
        node = self.nodes[name]
        if node.alive and not node.paused:
            self.record(f"pause {name}")
            node.paused = True

    def resume(self, name: str) -> None:
        """Resume the node like SIGCONT."""
        node = self.nodes[name]
        if node.paused:
            self.record(f"resume {name}")
            node.paused = False
            held, node.held = node.held, []
            self.loop.resume(held)

    # -- driving ---------------------------------------------------------------------------------

    def run(self, coro: Coroutine[Any, Any, T], events_max: int = EVENTS_MAX) -> T:
        """Run a coroutine of a test driver, which belongs to no node, to its end."""
        task: asyncio.Task[T] = self.loop.create_task(coro, context=contextvars.Context())
        self.run_until(task.done, events_max)
        return task.result()

    def run_until(self, predicate: Callable[[], bool], events_max: int = EVENTS_MAX) -> None:
        """Run until `predicate` holds; a `Stuck` error names the seed and the last events."""
        try:
            self.loop.run_until(predicate, events_max)
        except Stuck as stuck:
            tail = "\n".join(islice(self.trace, max(0, len(self.trace) - TRACE_TAIL), None))
            raise Stuck(f"SEED={self.seed}: {stuck}\n{tail}") from None

    def close(self) -> None:
        """Close the loop and end the world."""
        for node in self.nodes.values():
            node.alive = False
        self.loop.close()

    def __enter__(self) -> SimWorld:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


async def _awaited(work: Awaitable[T]) -> T:
    return await work
