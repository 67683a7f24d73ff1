"""Runs one Replayed machine over a log: decide, append, apply, release the reply after the commit.

World-generic.

Rules
  H2  Every queue is bounded.  A full queue refuses a command with THROTTLED.
  H3  A reply, also to a read, is released when the log is committed up to the end that it had when
      the reply was decided (rule Q3).
  H4  A failed append discards the machine, fails every reply that is not released, and replays the
      log.  If another node leads the log by then, the host ends instead.  Until the log is
      replayed (`replaying`), `machine` is the discarded one: who reads it beside the queue never
      sees a part of the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pk import errors
from pk.clock import Clock
from pk.effects import Effect, Replayed
from pk.server.runtime.machine_host import QUEUE_MAX, Fatal
from pk.tasks import TaskRegistry

C = TypeVar("C")
R = TypeVar("R")

#: The most commands that a single write of the log serves.  It bounds the latency of the first.
ROUND_MAX = 256


class ReplayLog(Protocol[R]):
    """The log under a Replayed machine."""

    @property
    def end(self) -> int:
        """The offset of the next record."""
        ...

    @property
    def committed(self) -> int:
        """The offset below which everything is committed."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this node may append."""
        ...

    @property
    def failed(self) -> Exception | None:
        """The error that took the storage of the log offline, or None."""
        ...

    def append(self, records: Sequence[R], now_ms: int) -> int:
        """Decide one atomic batch; returns the offset of its first record."""
        ...

    def take_foreign(self) -> Sequence[tuple[int, R]]:
        """Return the records that the machine did not append, since the last call or replay."""
        ...

    async def commit(self) -> None:
        """Write the appended batches; return when they are committed.

        A failed write undoes every append that is not written, and raises.  Appends that are
        written and not committed stay in the log or are undone, as the log decides: `replay`
        reads what is left.
        """
        ...

    async def replay(self, apply: Callable[[int, R], None]) -> None:
        """Call `apply` with every record up to the end."""
        ...


class ReplayedHost(Generic[C, R]):
    """Runs one Replayed machine over a log.

    `unavailable`: makes the error of commands that a host refuses because it was closed, or because
    its log failed.
    """

    def __init__(
        self,
        make: Callable[[], Replayed[C, R]],
        log: ReplayLog[R],
        clock: Clock,
        *,
        on_fatal: Fatal,
        on_effects: Callable[[Sequence[Effect]], None] = lambda effects: None,
        queue_max: int = QUEUE_MAX,
        unavailable: Callable[[str], errors.PkError] = errors.ControllerUnavailable,
    ) -> None:
        self._make = make
        self._log = log
        self._clock = clock
        self._on_fatal = on_fatal
        self._on_effects = on_effects
        self._queue_max = queue_max
        self._unavailable = unavailable
        self._queue: deque[tuple[C, asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._tasks = TaskRegistry()
        self._failed: BaseException | None = None
        self.machine = make()
        self.replaying = False

    async def start(self) -> None:
        """Replay the log, then serve."""
        await self._log.replay(self.machine.apply)
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        """Stop the host.  Waiting and later commands are refused."""
        if self._failed is None:
            self._failed = self._unavailable("shutting down")
        await self._tasks.close()
        self._refuse(self._unavailable("shutting down"))

    async def ask(self, command: C) -> Any:
        """Return the reply to `command` once it is committed (H3).

        Raises the refusal of the machine, or the failure of the log.
        """
        if self._failed is not None:
            raise self._unavailable(f"the log failed or was left: {self._failed}")
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
            self._refuse(self._unavailable(f"the log failed: {failure}"))
            if self._log.leads:  # otherwise the refusal must say that another node leads
                self._on_fatal(failure)

    async def _round(self) -> None:
        """Decide a round of commands, commit once, release the replies."""
        replies: list[tuple[asyncio.Future[Any], Any, Sequence[Effect]]] = []
        try:
            while self._queue and len(replies) < ROUND_MAX:
                command, future = self._queue.popleft()
                if not future.done():  # unless the caller was cancelled
                    self._decide(command, future, replies)
            if self._log.committed < self._log.end:
                await self._log.commit()
        except errors.RetriableError as failure:  # H4: for example a full disk
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
        for at, record in self._log.take_foreign():  # later decisions see these records
            self.machine.apply(at, record)
        try:
            decision = self.machine.decide(command, now_ms)
            offset = self._log.append(decision.records, now_ms) if decision.records else 0
        except errors.OperatorError as failure:
            if self._log.failed is not None:
                raise
            replies.append((future, failure, ()))
            return
        except errors.PkError as refusal:  # a refusal saw the state, too (H3)
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
        self.replaying = True
        machine = self._make()
        await self._log.replay(machine.apply)
        self.machine, self.replaying = machine, False

    def _fail(
        self,
        replies: list[tuple[asyncio.Future[Any], Any, Sequence[Effect]]],
        failure: BaseException,
    ) -> None:
        error = failure
        if not isinstance(failure, errors.PkError):
            error = self._unavailable(f"the log failed: {failure!r}")
        for future, _, _ in replies:
            if not future.done():
                future.set_exception(error)
                future.exception()  # unless the caller was cancelled

    def _refuse(self, error: errors.PkError) -> None:
        while self._queue:
            _, future = self._queue.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()
