"""The loop that hosts machines: events in, step, effects out.  World-generic.

`MachineHost` runs a Machine: one bounded queue of events, one step at a time, its effects in
order. `ReplayedHost` runs a Replayed machine over a log: decide, append, apply, and release the
reply when all it saw is committed.  Neither knows what is behind the doors it was handed.

Rules
  H1  Writes of one machine are performed in order, by one task; `then` only after its level (rule
      L1).
  H2  Everything is bounded: a full queue refuses with THROTTLED, never grows.
  H3  A reply of a Replayed machine, also to a read, leaves when the log is committed up to the
      end it had when the reply was decided (rule Q3).
  H4  A failed append discards the machine, fails every reply that is not committed, and replays;
      where another node leads the log by then, the host ends instead.
  H5  Timers of all machines of a process share one heap, keyed by (machine, key) (rule P6).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pk import errors
from pk.clock import Clock
from pk.effects import Effect, Level, Machine, Publish, Replayed, Respond, Send, SetTimer, Write

E = TypeVar("E")
C = TypeVar("C")
R = TypeVar("R")

QUEUE_MAX = 4_096
#: Commands decided together before the log is written: bounds the latency of the first.
ROUND_MAX = 256

Fatal = Callable[[BaseException], None]


class Timers:
    """One heap of timers (H5): set, replace, cancel; `fire` is told what came due, in order."""

    def __init__(self, clock: Clock, fire: Callable[[Any, Any], None]) -> None:
        self._clock = clock
        self._fire = fire
        self._heap: list[tuple[int, int, Any]] = []
        self._due: dict[Any, tuple[int, int]] = {}  # key -> (at_ms, number) of the valid entry
        self._number = 0
        self._changed = asyncio.Event()

    def set(self, owner: Any, key: Any, at_ms: int | None) -> None:
        """At `at_ms` of the monotonic clock `fire(owner, key)` is called; None cancels."""
        full = (owner, key)
        if at_ms is None:
            self._due.pop(full, None)
            return
        self._number += 1
        self._due[full] = (at_ms, self._number)
        heapq.heappush(self._heap, (at_ms, self._number, full))
        self._changed.set()

    def drop(self, owner: Any) -> None:
        """Cancel all timers of `owner`."""
        for full in [full for full in self._due if full[0] == owner]:
            del self._due[full]

    async def run(self) -> None:
        """Fire what is due, for ever."""
        while True:
            now_ms = self._clock.monotonic_ms()
            while self._heap and (self._stale() or self._heap[0][0] <= now_ms):
                at_ms, number, full = heapq.heappop(self._heap)
                if self._due.get(full) == (at_ms, number):
                    del self._due[full]
                    self._fire(*full)
            self._changed.clear()
            wait_ms = self._heap[0][0] - now_ms if self._heap else None
            try:
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _stale(self) -> bool:
        at_ms, number, full = self._heap[0]
        return self._due.get(full) != (at_ms, number)


class Doors(Protocol):
    """What a machine's effects reach."""

    async def write(self, ops: Sequence[Any], level: Level) -> None:
        """Perform `ops` in order; return once `level` is reached."""
        ...

    def send(self, peer: Any, message: Any) -> None: ...

    def respond(self, request: Any, reply: Any) -> None: ...

    def publish(self, name: str, value: Any) -> None: ...


class MachineHost(Generic[E]):
    """Runs one Machine."""

    def __init__(
        self,
        machine: Machine[E],
        doors: Doors,
        clock: Clock,
        *,
        timers: Timers | None = None,
        on_fatal: Fatal,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self.machine = machine
        self._doors = doors
        self._clock = clock
        self._timers = timers
        self._on_fatal = on_fatal
        self._queue_max = queue_max
        self._events: deque[E] = deque()
        self._writes: deque[Write] = deque()
        self._wake = asyncio.Event()
        self._wake_writer = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._write())]

    def post(self, event: E) -> None:
        """Queue an event.  Raises `ThrottledError` when too many wait (H2)."""
        if len(self._events) >= self._queue_max:
            raise errors.ThrottledError(f"{self._queue_max} events wait for one machine")
        self._events.append(event)
        self._wake.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
                self._doors.send(effect.peer, effect.message)
            elif isinstance(effect, Respond):
                self._doors.respond(effect.request, effect.reply)
            elif isinstance(effect, Publish):
                self._doors.publish(effect.name, effect.value)
            elif isinstance(effect, SetTimer):
                assert self._timers is not None, "this host was given no timers"
                self._timers.set(self, effect.key, effect.at_ms)

    async def _write(self) -> None:
        try:
            while True:
                while self._writes:
                    write = self._writes.popleft()
                    await self._doors.write(write.ops, write.level)
                    self._perform(write.then)  # H1
                self._wake_writer.clear()
                await self._wake_writer.wait()
        except Exception as failure:
            self._on_fatal(failure)


class ReplayLog(Protocol[R]):
    """The log under a Replayed machine."""

    @property
    def end(self) -> int:
        """Where the next record goes."""
        ...

    @property
    def committed(self) -> int:
        """Everything below is committed."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this node may append."""
        ...

    @property
    def failed(self) -> Exception | None:
        """What took the log's storage offline, if anything."""
        ...

    def append(self, records: Sequence[R], now_ms: int) -> int:
        """Decide one atomic batch; returns the offset of its first record."""
        ...

    def take_foreign(self) -> Sequence[tuple[int, R]]:
        """Records that somebody else appended since the replay or the last call, in order."""
        ...

    async def commit(self) -> None:
        """Write and SYNC what was appended; returns when `committed` covers it.

        A failure undoes every append that is not committed, then raises.
        """
        ...

    async def replay(self, apply: Callable[[int, R], None]) -> None:
        """Hand every record up to the end to `apply`."""
        ...


class ReplayedHost(Generic[C, R]):
    """Runs one Replayed machine over a log."""

    def __init__(
        self,
        make: Callable[[], Replayed[C, R]],
        log: ReplayLog[R],
        clock: Clock,
        *,
        on_fatal: Fatal,
        on_effects: Callable[[Sequence[Effect]], None] = lambda effects: None,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self._make = make
        self._log = log
        self._clock = clock
        self._on_fatal = on_fatal
        self._on_effects = on_effects
        self._queue_max = queue_max
        self._queue: deque[tuple[C, asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        self.machine = make()

    async def start(self) -> None:
        """Replay the log, then serve."""
        await self._log.replay(self.machine.apply)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop; what waits is refused, and so is whoever asks later: nobody would answer."""
        if self._failed is None:
            self._failed = errors.ControllerUnavailable("shutting down")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._refuse(errors.ControllerUnavailable("shutting down"))

    async def ask(self, command: C) -> Any:
        """The reply to `command`, once committed (H3).  Raises the refusal or the log's failure."""
        if self._failed is not None:
            raise errors.ControllerUnavailable(f"the log failed or was left: {self._failed}")
        if len(self._queue) >= self._queue_max:
            raise errors.ThrottledError(f"{self._queue_max} commands wait")  # H2
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((command, future))
        self._wake.set()
        return await future

    async def _run(self) -> None:
        try:
            while True:
                while self._queue:
                    await self._round()
                self._wake.clear()
                await self._wake.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            self._failed = failure
            self._refuse(errors.ControllerUnavailable(f"the log failed: {failure}"))
            if self._log.leads:  # else the failure is that another node does
                self._on_fatal(failure)

    async def _round(self) -> None:
        """Decide a round of commands, commit once, release the replies."""
        replies: list[tuple[asyncio.Future[Any], Any, Sequence[Effect]]] = []
        try:
            while self._queue and len(replies) < ROUND_MAX:
                command, future = self._queue.popleft()
                if not future.done():  # the caller may have given up
                    self._decide(command, future, replies)
            if self._log.committed < self._log.end:
                await self._log.commit()
        except errors.RetriableError as failure:  # H4: a full disk, say
            await self._start_over(failure, replies)
            return
        except BaseException as failure:
            self._fail(replies, failure)
            raise
        for future, reply, effects in replies:
            self._on_effects(effects)
            if future.done():
                continue
            if isinstance(reply, errors.PkError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _decide(
        self,
        command: C,
        future: asyncio.Future[Any],
        replies: list[tuple[asyncio.Future[Any], Any, Sequence[Effect]]],
    ) -> None:
        now_ms = self._clock.wall_ms()
        for at, record in self._log.take_foreign():  # what is decided next stands behind it
            self.machine.apply(at, record)
        try:
            decision = self.machine.decide(command, now_ms)
            offset = self._log.append(decision.records, now_ms) if decision.records else 0
        except errors.OperatorError as failure:
            if self._log.failed is not None:
                raise
            replies.append((future, failure, ()))
            return
        except errors.PkError as refusal:  # it, too, saw the state: H3
            replies.append((future, refusal, ()))
            return
        replies.append((future, decision.reply, decision.effects))
        for record in decision.records:
            self.machine.apply(offset, record)
            offset += 1

    async def _start_over(
        self,
        failure: errors.PkError,
        replies: list[tuple[asyncio.Future[Any], Any, Sequence[Effect]]],
    ) -> None:
        self._fail(replies, failure)
        if not self._log.leads:
            raise failure
        self.machine = self._make()
        await self._log.replay(self.machine.apply)

    def _fail(
        self,
        replies: list[tuple[asyncio.Future[Any], Any, Sequence[Effect]]],
        failure: BaseException,
    ) -> None:
        error = failure
        if not isinstance(failure, errors.PkError):
            error = errors.ControllerUnavailable(f"the log failed: {failure!r}")
        for future, _, _ in replies:
            if not future.done():
                future.set_exception(error)
                future.exception()  # the caller may be gone

    def _refuse(self, error: errors.PkError) -> None:
        while self._queue:
            _, future = self._queue.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()
