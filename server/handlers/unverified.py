"""Batches of one produce stream that wait for the word of a transaction coordinator (rule X6).

World-generic.  The first batch of a (producer id, epoch) that is not open in the log of its
partition waits here until the coordinator has added the partition to the transaction.  Batches
behind it, of the same producer and partition, wait with it; all others pass.

Invariants
  U1  Batches of one producer, epoch and partition are decided in the order of arrival.
  U2  A refusal refuses every batch that waits behind it with the same error: none was appended.
  U3  An answer counts only in the leader epoch in which the leader asked.
  U4  A batch whose stream was given up (handlers/produce D5) is refused after the wait, too.
  U5  ConcurrentTransactions (the previous transaction still ends) is asked again until the
      deadline of the first batch, or for AGAIN_MS.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pk import errors
from pk.backoff import Backoff
from pk.clock import Clock
from pk.log.batch import Header
from pk.log.storage import Buffer
from pk.server.handlers.appends import Appends
from pk.server.replica.delayed_produce import DelayedProduce
from pk.tasks import TaskRegistry
from pk.transactional_ids import is_transactional
from pk.types import Epoch, PartitionKey

AGAIN_MS = 3_000
BACKOFF_MS = (2, 50)


class _Waiting(NamedTuple):
    header: Header
    batch: Buffer
    leader_epoch: Epoch  #: that the producer named
    delayed: DelayedProduce


_Place = tuple[int, int, PartitionKey]  # producer id, producer epoch, partition


class UnverifiedBatches:
    """The batches of one stream that wait.

    `check`: raises if a batch with this header may no longer be appended (U4).  `on_bug`: is
    given an exception that is a bug of pk.
    """

    def __init__(
        self,
        appends: Appends,
        clock: Clock,
        check: Callable[[Header], None],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self._appends = appends
        self._clock = clock
        self._check = check
        self._on_bug = on_bug
        self._queues: dict[_Place, deque[_Waiting]] = {}
        self._tasks = TaskRegistry()

    def hold(
        self,
        key: PartitionKey,
        header: Header,
        batch: Buffer,
        leader_epoch: Epoch,
        delayed: DelayedProduce,
    ) -> bool:
        """Keep a batch that must wait.  False: the caller appends it, or has it refused."""
        if header.control or not is_transactional(header.producer_id):
            return False  # no coordinator can be asked (log/validate, rows C, D and I)
        place = (header.producer_id, header.producer_epoch, key)
        queue = self._queues.get(place)
        if queue is None:
            if not self._appends.unverified(key, header.producer_id, header.producer_epoch):
                return False
            queue = self._queues[place] = deque()
            queue.append(_Waiting(header, batch, leader_epoch, delayed))
            self._tasks.spawn(self._verify(place, queue))
            return True
        queue.append(_Waiting(header, batch, leader_epoch, delayed))
        return True

    async def idle(self) -> None:
        """Wait until every batch was decided (handlers/produce D4)."""
        await self._tasks.wait()

    async def close(self) -> None:
        """Drop what waits: the stream broke."""
        await self._tasks.close()

    async def _verify(self, place: _Place, queue: deque[_Waiting]) -> None:
        try:
            refusal: errors.PkError | None = None
            asked_in = self._appends.leader_epoch(place[2])
            try:
                await self._registered(place, queue[0].delayed.deadline_ms)
            except errors.PkError as error:
                refusal = error
            while queue:
                if refusal is None and self._appends.full(place[2]):
                    await self._appends.room(place[2])
                waiting = queue.popleft()
                if refusal is None:
                    self._append(place[2], waiting, asked_in)
                else:
                    waiting.delayed.answer(refusal)
        finally:
            del self._queues[place]

    async def _registered(self, place: _Place, deadline_ms: int) -> None:
        """Return once the coordinator has added the partition (U5)."""
        until_ms = min(deadline_ms, self._clock.monotonic_ms() + AGAIN_MS)
        backoff = Backoff(BACKOFF_MS)
        while True:
            try:
                async with asyncio.timeout(max(1, deadline_ms - self._clock.monotonic_ms()) / 1000):
                    await self._appends.register(*place)
                return
            except TimeoutError:
                raise errors.CoordinatorUnavailable(
                    "the transaction's coordinator did not answer in time"
                ) from None
            except errors.ConcurrentTransactions:
                if self._clock.monotonic_ms() >= until_ms:
                    raise
            await self._clock.sleep_ms(backoff.next_ms())

    def _append(self, key: PartitionKey, waiting: _Waiting, asked_in: Epoch) -> None:
        delayed = waiting.delayed
        try:
            self._check(waiting.header)
            if self._appends.leader_epoch(key) != asked_in:  # U3
                raise errors.NotLeaderOrFollower("the leader epoch ended meanwhile")
            self._appends.append(key, waiting.header, waiting.batch, waiting.leader_epoch, delayed)
        except errors.PkError as refusal:
            delayed.answer(refusal)
        except Exception as bug:
            self._on_bug("append", bug)
            delayed.answer(errors.InternalError(f"append: {bug!r}"))
