"""Virtual time: an asyncio event loop that never waits.

The loop has a queue of ready callbacks and a heap of timers.  When no callback is ready, time jumps
to the next timer.

Rules
  W1  Timers of one instant fire in the order they were set; nothing else orders events.
  W2  There are no threads, sockets or signals; a call that needs one raises an error.
  W3  A node is a context variable that its tasks inherit.  `kill` is kill -9: afterwards no
      callback of the node runs, not even a `finally`; its streams break, and its disk drops what it
      must (on_kill).  `pause` is SIGSTOP: the node's callbacks wait, in order, for `resume`, while
      time and the other nodes go on.
  W5  All timers that are due within one grain of time become ready at once, as in a busy loop.  So
      a message may be read, a disk may answer and a timer may fire before any task that they wake
      runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

if TYPE_CHECKING:
    _Base = asyncio.BaseEventLoop
else:
    _Base = asyncio.AbstractEventLoop  # every method not defined below raises (W2)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EVENTS_MAX = 1_000_000
_US_PER_MS = 1_000
UNWIND_MAX = 100


class Stuck(AssertionError):
    """The simulation did not reach its goal: no event is left, or it needed too many."""


@dataclass(eq=False)
class SimNode:
    """One life of a node, from its start to its death (W3)."""

    name: str
    incarnation: int
    alive: bool = True
    paused: bool = False
    held: list[asyncio.Handle] = field(default_factory=list)  #: callbacks that wait for `resume`
    on_kill: list[Callable[[], None]] = field(default_factory=list)
    after: Callable[[], None] | None = None  #: called after every event of this node


NODE: contextvars.ContextVar[SimNode | None] = contextvars.ContextVar("sim_node", default=None)


def current_node() -> SimNode | None:
    """Return the node whose code is running."""
    return NODE.get()


class _Handle(asyncio.Handle):
    """A ready callback, created without the base class's handling of debug mode."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """A callback that is due later; only its place in the loop's heap orders it."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimLoop,
        context: contextvars.Context | None,
        due_us: int,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = due_us / 1_000_000
        self._scheduled = False

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]  # release references


class SimLoop(_Base):
    """The event loop of virtual time, which counts in whole microseconds."""

    def __init__(self) -> None:
        self.now_us = 0
        self.grain_us = 1  #: length of one grain of time (W5)
        self.events = 0
        self.failures: list[dict[str, Any]] = []  #: contexts passed to the exception handler
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[int, int, _Timer]] = []  # W1: ordered by time, then number
        self._timer_number = 0
        self._closed = False
        self._running = False
        self._tasks: list[asyncio.Task[Any]] = []
        # task `id` → its node; an id may be used again
        self._owners: dict[int, SimNode | None] = {}
        self._tasks_max = 64

    # -- scheduling ----------------------------------------------------------------------------

    def time(self) -> float:
        return self.now_us / 1_000_000

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        if not self._closed:
            self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at_us(
            self.now_us + round(delay * 1_000_000), callback, *args, context=context
        )

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at_us(round(when * 1_000_000), callback, *args, context=context)

    def call_at_us(
        self,
        due_us: int,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer like `call_at`, with a time in whole microseconds."""
        timer = _Timer(callback, args, self, context, due_us)
        self._timer_number += 1
        if not self._closed:
            due_us = due_us if due_us > self.now_us else self.now_us
            heapq.heappush(self._timers, (due_us, self._timer_number, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: `step` skips cancelled timers when they are due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=str(name) if name else None, context=context)
        self._owners[id(task)] = NODE.get() if context is None else context.get(NODE)
        self._tasks.append(task)  # W3: keeps tasks of killed nodes from the garbage collector
        if len(self._tasks) > self._tasks_max:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks_max = 2 * len(self._tasks) + 64
        return task

    # -- running -------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run the next event; return False if there is none."""
        ready = self._ready
        while not ready:
            if not self._wake_timers():
                return False
        handle: Any = ready.popleft()
        if handle._cancelled:
            return True
        context = handle._context
        node = context.get(NODE)
        if node is not None and (node.paused or not node.alive):
            if node.paused:
                node.held.append(handle)
            return True
        self.events += 1
        try:
            context.run(handle._callback, *handle._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as bug:
            told = {"message": "Exception in a callback", "exception": bug, "handle": handle}
            self.call_exception_handler(told)
        if node is not None and node.after is not None:
            node.after()
        return True

    def _wake_timers(self) -> bool:
        """Jump to the next timer and make all due timers ready; return False if there is none."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            return False
        due_us = max(self.now_us, timers[0][0])
        now_us = self.now_us = -(-due_us // self.grain_us) * self.grain_us
        while timers and timers[0][0] <= now_us:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                self._ready.append(timer)
        return True

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Make the callbacks that waited while a node was paused ready, in their order."""
        self._ready.extend(handles)

    def run_until(self, predicate: Callable[[], bool], events_max: int = EVENTS_MAX) -> None:
        """Run events until `predicate` holds.  Raises `Stuck` if it never does."""
        assert not self._running, "the loop runs already"
        self._running = True
        asyncio._set_running_loop(self)
        limit = self.events + events_max
        try:
            while not predicate():
                if self.events >= limit:
                    raise Stuck(f"not reached after {events_max} events, at {self.time():.6f} s")
                if not self.step():
                    raise Stuck(f"nothing left to happen at {self.time():.6f} s")
        finally:
            asyncio._set_running_loop(None)
            self._running = False

    def run_until_complete(self, future: Any) -> Any:
        task = future if isinstance(future, asyncio.Future) else self.create_task(future)
        self.run_until(task.done)
        return task.result()

    def run_for_ms(self, duration_ms: float, events_max: int = EVENTS_MAX) -> None:
        """Run the events of the next `duration_ms` of virtual time."""
        done: list[None] = []
        context = contextvars.Context()
        self.call_later(duration_ms / 1000, done.append, None, context=context)
        self.run_until(lambda: bool(done), events_max)

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Close the loop and unwind all unfinished tasks; nothing they do has any effect."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        asyncio._set_running_loop(self)
        try:
            while self._tasks:  # tasks that a `finally` creates never run
                task = self._tasks.pop()
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _unwind(task.get_coro())
        finally:
            asyncio._set_running_loop(None)

    # -- the rest of an event loop ---------------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Do nothing: there is no debug mode."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("future")
        node = self._owners.get(id(task)) if isinstance(task, asyncio.Task) else None
        if node is None or node.alive:  # W3: failures of a killed node's tasks do not count
            self.failures.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: asynchronous generators end with their tasks."""


def _unwind(coro: Any) -> None:
    for _ in range(UNWIND_MAX):  # a `finally` that awaits needs another call
        try:
            coro.close()
        except BaseException:
            continue
        return
