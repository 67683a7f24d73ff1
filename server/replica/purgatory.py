"""Parked produce replies, which wait for the high watermark, the end of an epoch, or a timeout.

Sans-IO.  `TimerHeap` is the one heap of timers of a broker (rule P6); `ProducePurgatory` holds
produce replies that wait until the high watermark reaches the offset behind their last record.
Fetches wait in their sessions (handlers/fetch_session.py), because a session serves many fetches.

Invariants
  D1  A parked reply leaves the purgatory exactly once: it is released, ended by another leader
      epoch, timed out, or forgotten.
  D2  A reply parked under epoch e is never released by a high watermark of another epoch (rule L5).
  D3  A duplicate waits for the same offset and epoch as its original (rule L4).
  D4  At most `limit` replies are parked.  One more is refused with `ThrottledError`, never queued.
  D5  An operation costs at most O(log n + r) for n parked replies of the partition and r released.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from pk import errors, limits
from pk.types import Epoch, Offset, PartitionKey

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: Errors that leave open whether a decided batch is stored.
LEAVES_OPEN = (errors.NotLeaderOrFollower, errors.StorageFailed, errors.CorruptLog)
#: A heap is rebuilt when its cancelled entries exceed its live ones by more than this.
_SLACK = 64


class TimerHeap(Generic[K]):
    """Timers by key.  Setting a key again replaces its timer; a cancelled entry is removed
    later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, K]] = []
        self._live: dict[K, tuple[int, int]] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def set(self, key: K, at_ms: int) -> None:
        """Wake `key` at `at_ms`; timers of the same time fire in the order they were set."""
        self._sequence += 1
        self._live[key] = (at_ms, self._sequence)
        heapq.heappush(self._heap, (at_ms, self._sequence, key))
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [(at, seq, key) for key, (at, seq) in self._live.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Cancel the timer of `key`, if it has one."""
        self._live.pop(key, None)

    def next_at_ms(self) -> int | None:
        """Return when the earliest timer is due; None = no timer."""
        while self._heap:
            at_ms, sequence, key = self._heap[0]
            if self._live.get(key) == (at_ms, sequence):
                return at_ms
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_ms: int) -> list[K]:
        """Remove and return the keys whose timers are due, earliest first."""
        due: list[K] = []
        while (at_ms := self.next_at_ms()) is not None and at_ms <= now_ms:
            key = heapq.heappop(self._heap)[2]
            del self._live[key]
            due.append(key)
        return due


class Parked(Generic[T]):
    """One reply that waits.  `token` is what its owner needs to answer it."""

    __slots__ = ("deadline_ms", "gone", "key", "leader_epoch", "needs_offset", "token")

    def __init__(
        self,
        key: PartitionKey,
        leader_epoch: Epoch,
        needs_offset: Offset,
        deadline_ms: int,
        token: T,
    ) -> None:
        self.key = key
        self.leader_epoch = leader_epoch
        self.needs_offset = needs_offset  #: the high watermark that releases it
        self.deadline_ms = deadline_ms
        self.token = token
        self.gone = False


class _Waiting(Generic[T]):
    """The parked replies of one partition, lowest offset first."""

    __slots__ = ("heap", "live")

    def __init__(self) -> None:
        self.heap: list[tuple[Offset, int, Parked[T]]] = []
        self.live = 0


class ProducePurgatory(Generic[T]):
    """Produce replies under acks=all that wait for the high watermark."""

    def __init__(self, limit: int = limits.PURGATORY_MAX) -> None:
        self._limit = limit
        self._by_partition: dict[PartitionKey, _Waiting[T]] = {}
        self._timers: TimerHeap[Parked[T]] = TimerHeap()
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._timers)

    def check_room(self) -> None:
        """Raise `ThrottledError` if no further reply may be parked (D4).

        The produce handler calls this before it appends a batch.
        """
        if len(self._timers) >= self._limit:
            raise errors.ThrottledError(f"{self._limit} produce replies wait already")

    def park(
        self,
        key: PartitionKey,
        leader_epoch: Epoch,
        needs_offset: Offset,
        deadline_ms: int,
        token: T,
    ) -> Parked[T]:
        """Hold `token` until the watermark of `leader_epoch` reaches `needs_offset`."""
        parked = Parked(key, leader_epoch, needs_offset, deadline_ms, token)
        waiting = self._by_partition.get(key)
        if waiting is None:
            waiting = self._by_partition[key] = _Waiting()
        self._sequence += 1
        heapq.heappush(waiting.heap, (needs_offset, self._sequence, parked))
        waiting.live += 1
        self._timers.set(parked, deadline_ms)
        return parked

    def on_high_watermark(
        self, key: PartitionKey, leader_epoch: Epoch, high_watermark: Offset
    ) -> list[T]:
        """Remove and return the tokens that `high_watermark` releases, lowest offset first."""
        waiting = self._by_partition.get(key)
        if waiting is None:
            return []
        released: list[T] = []
        stale: list[tuple[Offset, int, Parked[T]]] = []
        while waiting.heap and waiting.heap[0][0] <= high_watermark:
            entry = heapq.heappop(waiting.heap)
            parked = entry[2]
            if parked.gone:
                continue
            if parked.leader_epoch != leader_epoch:
                stale.append(entry)  # D2: the end of its own epoch answers it
                continue
            self._leave(parked, waiting)
            released.append(parked.token)
        for entry in stale:
            heapq.heappush(waiting.heap, entry)
        self._tidy(key, waiting)
        return released

    def on_epoch(self, key: PartitionKey, leader_epoch: Epoch | None) -> list[T]:
        """Remove and return the tokens of older epochs than `leader_epoch` (None = of all).

        The caller answers them with NOT_LEADER_OR_FOLLOWER (rule L5).
        """
        waiting = self._by_partition.get(key)
        if waiting is None:
            return []
        overtaken: list[T] = []
        kept: list[tuple[Offset, int, Parked[T]]] = []
        for entry in sorted(waiting.heap, key=lambda item: item[:2]):
            parked = entry[2]
            if parked.gone:
                continue
            if leader_epoch is not None and parked.leader_epoch >= leader_epoch:
                kept.append(entry)
                continue
            self._leave(parked, waiting)
            overtaken.append(parked.token)
        waiting.heap = kept
        self._tidy(key, waiting)
        return overtaken

    def on_time(self, now_ms: int) -> list[T]:
        """Remove and return the tokens whose deadline has passed."""
        late: list[T] = []
        for parked in self._timers.pop_due(now_ms):
            waiting = self._by_partition[parked.key]
            self._leave(parked, waiting)
            late.append(parked.token)
            self._tidy(parked.key, waiting)
        return late

    def next_at_ms(self) -> int | None:
        """Return when the earliest deadline passes; None = nothing is parked."""
        return self._timers.next_at_ms()

    def forget(self, parked: Parked[T]) -> None:
        """Remove a reply whose stream broke."""
        waiting = self._by_partition.get(parked.key)
        if not parked.gone and waiting is not None:
            self._leave(parked, waiting)
            self._tidy(parked.key, waiting)

    def _leave(self, parked: Parked[T], waiting: _Waiting[T]) -> None:
        assert not parked.gone, "D1"
        parked.gone = True
        waiting.live -= 1
        self._timers.cancel(parked)

    def _tidy(self, key: PartitionKey, waiting: _Waiting[T]) -> None:
        if waiting.live == 0:
            self._by_partition.pop(key, None)
        elif len(waiting.heap) > 2 * waiting.live + _SLACK:
            waiting.heap = [entry for entry in waiting.heap if not entry[2].gone]
            heapq.heapify(waiting.heap)
