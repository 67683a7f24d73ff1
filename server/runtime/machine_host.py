"""Runs one Machine: a bounded queue of events, one step at a time, its effects in order.

World-generic.  The host performs effects through the interfaces in `EffectHandlers`.

Rules
  H1  One task performs the writes of a machine in order.  `then` is performed only after the level
      of its write is reached (rule L1).
  H2  Every queue is bounded.  A full queue refuses an event with THROTTLED.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pk import errors
from pk.clock import Clock
from pk.effects import Effect, Level, Machine, Publish, Respond, Send, SetTimer, Write
from pk.server.runtime.timers import Timers
from pk.tasks import TaskRegistry

E = TypeVar("E")

QUEUE_MAX = 4_096

Fatal = Callable[[BaseException], None]


class EffectHandlers(Protocol):
    """The interfaces that the effects of a machine use."""

    async def write(self, ops: Sequence[Any], level: Level) -> None:
        """Perform `ops` in order; return once `level` is reached."""
        ...

    def send(self, peer: Any, message: Any) -> None: ...

    def respond(self, request: Any, reply: Any) -> None: ...

    def publish(self, name: str, value: Any) -> None: ...


class MachineHost(Generic[E]):
    """Runs one Machine: queue, step, effects."""

    def __init__(
        self,
        machine: Machine[E],
        handlers: EffectHandlers,
        clock: Clock,
        *,
        timers: Timers | None = None,
        on_fatal: Fatal,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self.machine = machine
        self._handlers = handlers
        self._clock = clock
        self._timers = timers
        self._on_fatal = on_fatal
        self._queue_max = queue_max
        self._events: deque[E] = deque()
        self._writes: deque[Write] = deque()
        self._wake = asyncio.Event()
        self._wake_writer = asyncio.Event()
        self._tasks = TaskRegistry(on_fatal)

    def start(self) -> None:
        self._tasks.spawn(self._run())
        self._tasks.spawn(self._write())

    def post(self, event: E) -> None:
        """Queue an event.  Raises `ThrottledError` if the queue is full (H2)."""
        if len(self._events) >= self._queue_max:
            raise errors.ThrottledError(f"{self._queue_max} events wait for one machine")
        self._events.append(event)
        self._wake.set()

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        try:
            while True:
                while self._events:
                    event = self._events.popleft()
                    self._perform(self.machine.step(event, self._clock.monotonic_ms()))
                self._wake.clear()
                await self._wake.wait()
        except Exception as bug:
            self._on_fatal(bug)

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                self._writes.append(effect)
                self._wake_writer.set()
            elif isinstance(effect, Send):
                self._handlers.send(effect.peer, effect.message)
            elif isinstance(effect, Respond):
                self._handlers.respond(effect.request, effect.reply)
            elif isinstance(effect, Publish):
                self._handlers.publish(effect.name, effect.value)
            elif isinstance(effect, SetTimer):
                assert self._timers is not None, "this host was given no timers"
                self._timers.set(self, effect.key, effect.at_ms)

    async def _write(self) -> None:
        try:
            while True:
                while self._writes:
                    write = self._writes.popleft()
                    await self._handlers.write(write.ops, write.level)
                    self._perform(write.then)  # H1
                self._wake_writer.clear()
                await self._wake_writer.wait()
        except Exception as failure:
            self._on_fatal(failure)
