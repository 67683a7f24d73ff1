"""The write side of one data directory: one round writes the appends of many partitions (rule P2).

World-generic.  An append is *decided* when its offsets are assigned in memory; it is *completed*
when it is written or has failed.  A partition submits its decided appends.  While the disk writes
one round, the appends of the next round gather, so rounds grow with the load.  A round takes the
appends of each partition in the order in which they were decided, writes them on the writer's
lane, and completes them on the loop.

Invariants
  W1  One round is in the writer at a time.  The appends of a partition are written in the order in
      which they were decided.
  W2  `queued_bytes` counts the bytes that were decided and are not completed.  Above the bound,
      `room` waits, and so do the produce streams that would add more: a full queue delays its
      senders and never grows.
  W3  A partition that fails does not stop the other partitions of its round.
  W4  The epoch files of a round are replaced together, before its work (log/epoch_files).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from pk import limits
from pk.log.batch_cache import BatchCache
from pk.log.epoch_files import EpochFile, replace_together
from pk.log.storage import Disk, Storage
from pk.server.replica.space import DirectorySpace
from pk.tasks import TaskRegistry


class Round(NamedTuple):
    """What one partition writes in a round."""

    work: Callable[[], Any]
    epochs: EpochFile | None = None  #: to be replaced before the work


class Appender(Protocol):
    """A partition as the writer sees it."""

    def take_round(self) -> Round | None:
        """Return what writes everything decided so far; None = nothing is left to write.

        The writer runs the work.
        """
        ...

    def end_round(self, outcome: Any, failure: BaseException | None) -> None:
        """Complete the round on the loop, given the result of its work or what the work raised."""
        ...


class LogDirWriter:
    """Group commit for the partitions of one directory."""

    def __init__(
        self,
        disk: Disk,
        *,
        on_bug: Callable[[str, BaseException], None],
        bytes_max: int = limits.WRITE_QUEUE_BYTES_MAX,
        reserve_bytes: int = 0,
        on_space: Callable[[LogDirWriter], None] = lambda writer: None,
    ) -> None:
        self.disk = disk
        self.space = DirectorySpace(disk.storage.root, reserve_bytes, lambda: on_space(self))
        self.recent = BatchCache()  #: the batches written last, for readers at the log's end
        self.queued_bytes = 0
        self.rounds = 0
        self._bytes_max = bytes_max
        self._on_bug = on_bug
        self._dirty: dict[Appender, None] = {}
        self._current: dict[Appender, None] = {}
        self._round_waiters: list[asyncio.Future[None]] = []
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._tasks = TaskRegistry()
        self._task: asyncio.Task[None] | None = None  #: None once the last round has ended

    def submit(self, appender: Appender, size: int) -> None:
        """Note that `appender` has decided `size` more bytes, and start a round if none runs."""
        self.queued_bytes += size
        self.space.spend(size)
        self._dirty[appender] = None
        if self._task is None:
            self._task = self._tasks.spawn(self._rounds())

    def done(self, size: int) -> None:
        """Take `size` bytes that were completed, or that failed, off the queue."""
        self.queued_bytes -= size
        while self._waiters and self.queued_bytes < self._bytes_max:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    @property
    def full(self) -> bool:
        """Whether further appends must wait (W2)."""
        return self.queued_bytes >= self._bytes_max

    async def room(self) -> None:
        """Wait until further appends may be decided; waiters continue in the order they came."""
        while self.full:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def settled(self, appender: Appender) -> None:
        """Wait until everything that `appender` decided so far is completed."""
        while appender in self._dirty or appender in self._current:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._round_waiters.append(waiter)
            await waiter

    async def idle(self) -> None:
        """Wait until everything that any partition decided so far is completed."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def _rounds(self) -> None:
        try:
            while self._dirty:
                dirty, self._dirty = self._dirty, {}
                taken = [(each, one) for each in dirty if (one := each.take_round()) is not None]
                if not taken:
                    self._end_of_round()
                    continue
                self.rounds += 1
                self._current = {each: None for each, _ in taken}
                outcomes = await self._run_round([one for _, one in taken])
                for (appender, _), (outcome, failure) in zip(taken, outcomes, strict=True):
                    try:
                        appender.end_round(outcome, failure)
                    except Exception as bug:  # W3
                        self._on_bug("completing a write", bug)
                self._end_of_round()
        finally:
            self._task = None
            self._end_of_round()
            if self._dirty:  # something was submitted while the last step of this task ran
                self._task = self._tasks.spawn(self._rounds())

    def _end_of_round(self) -> None:
        self._current = {}
        waiters, self._round_waiters = self._round_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _run_round(self, taken: list[Round]) -> list[tuple[Any, BaseException | None]]:
        try:
            return await self.disk.write(lambda: _run_all(self.disk.storage, taken))
        except Exception as failure:  # the writer itself is gone: nothing of this round was written
            return [(None, failure)] * len(taken)


def _run_all(storage: Storage, taken: list[Round]) -> list[tuple[Any, BaseException | None]]:
    """Run the work of each partition in the writer; each has its own outcome or error (W3)."""
    replace_together(storage, [each.epochs for each in taken if each.epochs is not None])  # W4
    outcomes: list[tuple[Any, BaseException | None]] = []
    for each in taken:
        try:
            outcomes.append((each.work(), None))
        except Exception as failure:
            outcomes.append((None, failure))
    return outcomes
