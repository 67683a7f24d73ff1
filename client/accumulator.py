"""The records that `send` has accepted and the loop has not taken.  Only here do a caller's thread
and the client's loop share data.

`send` appends to the lists of an open record set behind a spin lock, for a few hundred nanoseconds.
Nothing else happens on the caller's thread.  The loop takes whole record sets: full ones at once,
an open one after a moment.  A record set's create time is taken when it opens, so it is accurate to
within `OPEN_MS`.

Invariants
  I1  Record sets of a topic are taken in the order they opened.  A record is in exactly one of
      them.
  I2  Memory is reserved before a record is accepted.  The bytes of all unresolved records exceed
      `buffer_memory` by at most one record, which is accepted only if no other is held.
  I3  A record set that was taken is never appended to: taking and appending hold the same lock.
  I4  An accumulator with a record set is among the busy ones, or the loop is just looking at it.  A
      caller adds it after the record set is visible.  The loop removes it before it looks, and adds
      it again if a record set is left.  So a look costs nothing for topics without records.
  I5  While records are refused, no accumulator has an open record set.  Every record then needs a
      reservation, which raises the refusal.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk import errors
from pk.client.futures import SendFuture
from pk.client.metadata import TopicMetadata
from pk.client.partitioner import (
    Sticky,
    all_exist,
    grouped_by_partition,
    ordered_by_partition,
    place,
    place_few,
)
from pk.client.record_arguments import check_size
from pk.client.record_set import Headers, OnDelivery, RecordSet, RecordSlice
from pk.client.rows import (
    COLUMN_OVERHEAD,
    I64,
    FewRows,
    batch_limit,
    cuts_by_size,
    size_of,
    sizes,
)
from pk.client.waiting import Monitor, SpinLock
from pk.clock import Clock
from pk.log.small_batches import FEW_RECORDS
from pk.types import NONE

#: An open record set is taken after this time, or after linger_ms if that is less.
OPEN_MS = 5
#: Memory is reserved in this unit, so that `send` need not compute it per record.
GRANT_BYTES = 256 * 1024
#: A record set is split without Arrow if it has at most FEW_RECORDS for each of so many partitions.
#: Keys spread records over all partitions; without keys, most go to one.
FEW_PARTITIONS = 8
FEW_PARTITIONS_KEYED = 64
#: A batch with less than 1/8 of its size left counts as full.
FULL_SHARE = 8


class BufferPool:
    """The memory of a producer.  buffer_memory: the limit for the bytes of unresolved records."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refusal: errors.PkError | None = None  #: no memory is reserved: records are refused
        self._space = Monitor()

    def _has(self, size: int) -> bool:
        return not self.used or self.used + size <= self.limit

    def try_reserve(self, size: int) -> bool:
        """Reserve `size` bytes; False if they are not free.  A request above the limit needs an
        empty pool.  Raises the refusal.
        """
        with self._space.lock:
            if self.refusal is not None:
                raise self.refusal
            if not self._has(size):
                return False
            self.used += size
            return True

    def wait(self, size: int, timeout_s: float) -> None:
        """Block until `size` bytes may be free, or the time is up; the caller then tries again."""
        with self._space.lock:
            self._space.wait_for(lambda: self._has(size), timeout_s)

    def release(self, size: int) -> None:
        with self._space.lock:
            self.used -= size
            assert self.used >= 0, self.used
            self._space.notify_all()


class RecordAccumulator:
    """The records of one topic that the loop has not taken yet.

    busy: the producer's accumulators that may hold records, by number (I4).
    """

    __slots__ = (
        "_busy", "_clock", "_linger_ms", "_monitor", "_number", "_pool", "_set_bytes", "_size_max",
        "_sticky", "_sticky_lock", "batch_size", "lock", "open", "room", "sealed", "tokens",
        "topic",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        options: Mapping[str, Any],
        sticky: Sticky,
        pool: BufferPool,
        monitor: Monitor,
        clock: Clock,
        busy: dict[int, RecordAccumulator],
        number: int,
    ) -> None:
        self.topic = topic
        self._busy = busy
        self._number = number
        self.batch_size: int = options["batch_size"]
        self._size_max: int = min(options["max_request_size"], pool.limit)
        self._linger_ms: float = options["linger_ms"]
        #: the size of a record set
        self._set_bytes = min(self.batch_size, max(pool.limit // 4, 1024))
        self._sticky = sticky  #: under `_sticky_lock`
        self._sticky_lock = threading.Lock()
        self._pool = pool
        self._monitor = monitor
        self._clock = clock
        self.lock = SpinLock()
        self.tokens = self.lock.tokens  #: for the fast path of `send`
        self.open: RecordSet | None = None
        #: bytes that the open set may still take without a reservation; 0 without an open set
        self.room = 0
        self.sealed: deque[RecordSet] = deque()

    # -- a caller's thread -------------------------------------------------------------------------

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
        *,
        size: int,
    ) -> SendFuture | None:
        """Accept a record of `size` bytes.  Returns None if memory is short; the open record set is
        then sealed.  Raises the error that records are refused with.
        """
        with self.lock:
            if self.room < size and not self._grow(size):
                self._seal(ready=True)
                return None
            records = self.open
            assert records is not None
            self.room -= size
            index = len(records.values)
            records.values.append(value)
            if records.keys is not None:
                records.keys.append(key)
            elif key is not None:
                records.keys = [None] * index
                records.keys.append(key)
            if headers:
                records.headers[index] = headers
            if partition is not None:
                records.partitions[index] = partition
            if timestamp_ms is not None:
                records.create_times_given[index] = timestamp_ms
            if on_delivery is not None:
                records.on_delivery[index] = on_delivery
        return SendFuture(records, index)

    def _grow(self, size: int) -> bool:
        """Reserve memory for at least `size` bytes, for another set if this one is full (lock
        held).
        """
        granted = 0 if self.open is None else self.open.granted
        if granted - self.room + size > self._set_bytes:
            self._seal()
            granted = 0
        need = size - self.room
        grant = max(need, min(GRANT_BYTES, self._set_bytes - granted))
        if not self._pool.try_reserve(grant):
            grant = need
            if not self._pool.try_reserve(grant):
                return False
        if self.open is None:
            self.open = self.new_set()
            self._busy[self._number] = self
        self.open.granted += grant
        self.room += grant
        return True

    def new_set(self) -> RecordSet:
        clock = self._clock
        return RecordSet(self.topic, self._monitor, clock.wall_ms(), clock.monotonic_ms())

    def append_set(self, records: RecordSet) -> bool:
        """Append the records of a `send_batch` behind all records sent before.

        Returns False if memory is short.  Raises the error that records are refused with.
        """
        with self.lock:
            self._seal()
            if not self._pool.try_reserve(records.size):
                return False
            records.ready_ms = int(records.opened_ms + self._linger_ms)
            self.sealed.append(records)
            self._busy[self._number] = self
            return True

    def _seal(self, *, ready: bool = False) -> None:
        """Close the open record set (lock held)."""
        records = self.open
        if records is not None:
            records.ready_ms = 0 if ready else int(records.opened_ms + self._linger_ms)
            records.size = records.granted - self.room
            self._pool.release(self.room)
            self.sealed.append(records)
            self.open = None
            self.room = 0

    # -- the loop ----------------------------------------------------------------------------------

    def seal(self, opened_before_ms: int, *, ready: bool = False) -> None:
        """Close the open record set if it is old enough.

        Otherwise this does not take the lock, so that no caller of `send` waits for it.

        `ready`: its records do not wait for linger_ms.
        """
        records = self.open
        if records is not None and (ready or records.opened_ms <= opened_before_ms):
            with self.lock:
                if self.open is records:  # otherwise another thread has filled and sealed it
                    self._seal(ready=ready)

    def close(self) -> None:
        """Close the open record set: the next record needs a reservation (I5)."""
        with self.lock:
            self._seal()

    def split_few(
        self, records: RecordSet, topic: TopicMetadata, available: Callable[[], Sequence[int]]
    ) -> bool:
        """Split `records` like `split`, without Arrow, if they are few for each partition, plain,
        and together within the size of a batch.  Returns whether they were.
        """
        values, keys, whole = records.values, records.keys, records.size
        limit = min(batch_limit(self.batch_size, topic.configs), self._size_max)
        spread = FEW_PARTITIONS if keys is None else FEW_PARTITIONS_KEYED
        few = FEW_RECORDS * min(topic.partitions, spread)
        if whole > limit or not values or not records.plain(few):
            return False
        count = records.count = len(values)
        if records.partitions and not all_exist(records.partitions, topic.partitions):
            return False
        with self._sticky_lock:
            placed = place_few(
                keys, records.partitions, count, topic.partitions, self._sticky, available, whole
            )
        records.values, records.keys = [], None
        if isinstance(placed, int):
            rows = FewRows(values, keys)
            records.split([RecordSlice(records, placed, 0, count, rows, whole)])
        else:
            records.split(_sorted_few(records, values, keys, placed))
        return True

    # -- either ------------------------------------------------------------------------------------

    def split(
        self,
        records: RecordSet,
        rows: pa.RecordBatch,
        chosen: npt.NDArray[np.int32] | None,
        topic: TopicMetadata,
        available: Sequence[int],
    ) -> None:
        """Split `rows` by partition into slices within the size of a batch, without per-row work.

        chosen: the partitions that callers chose, NONE = no choice.
        available: the partitions with a leader.
        Raises `InvalidPartitions`, `RecordTooLarge`.
        """
        limit = batch_limit(self.batch_size, topic.configs)
        keyless = chosen is None and rows.column("key").null_count == rows.num_rows
        reserved = records.size  # 0 = nothing yet
        whole = reserved or size_of(rows)
        fits = whole is not None and whole <= min(limit, self._size_max)
        row_sizes = None if fits else sizes(rows)
        if row_sizes is not None:
            whole = whole or int(row_sizes.sum())
            if not reserved:
                check_size(self.topic, int(row_sizes.max()), self._size_max)
        assert whole is not None
        placed: int | npt.NDArray[np.int32] = NONE
        if not keyless:
            with self._sticky_lock:
                placed = place(rows, chosen, topic.partitions, self._sticky, available, whole)
        if row_sizes is None and isinstance(placed, int):  # one batch: nothing to cut
            slices = [RecordSlice(records, placed, 0, rows.num_rows, rows, whole)]
        else:
            slices = _cut(
                records, rows, sizes(rows) if row_sizes is None else row_sizes, placed, limit
            )
        counted = sum(each.size for each in slices)
        records.size = reserved or counted
        slices[-1].size += records.size - counted  # they release exactly what was reserved
        for each in slices if keyless else ():
            with self._sticky_lock:
                single = topic.partitions == 1
                each.partition = 0 if single else self._sticky.take(available, each.size)
        records.split(slices)


def _sorted_few(
    records: RecordSet,
    values: list[bytes | None],
    keys: list[bytes | None] | None,
    placed: Sequence[int],
) -> list[RecordSlice]:
    """Sort rows by partition, stable within a partition; note their new order."""
    slices, left = [], records.size
    order: list[int] = []
    for partition, rows in grouped_by_partition(placed):
        mine = [values[index] for index in rows]
        size = sum(map(len, filter(None, mine))) + 2 * COLUMN_OVERHEAD * len(rows)
        my_keys = None
        if keys is not None:
            my_keys = [keys[index] for index in rows]
            size += sum(map(len, filter(None, my_keys)))
        few = FewRows(mine, my_keys)
        slices.append(RecordSlice(records, partition, len(order), len(rows), few, size))
        left -= size
        order += rows
    slices[-1].size += left  # they release exactly what was reserved
    records.sort(np.array(order, np.int64))
    return slices


def _cut(
    records: RecordSet,
    rows: pa.RecordBatch,
    row_sizes: I64,
    placed: int | npt.NDArray[np.int32],
    limit: int,
) -> list[RecordSlice]:
    """Cut rows into slices of one partition and at most `limit` bytes; note their new order."""
    rows, order, runs = ordered_by_partition(rows, placed)
    if order is not None:
        row_sizes = row_sizes[order]
        records.sort(order)
    slices = []
    for partition, first, end in runs:
        cuts = [first + cut for cut in cuts_by_size(row_sizes[first:end], limit)]
        for start, stop in itertools.pairwise([first, *cuts]):
            part, size = rows.slice(start, stop - start), int(row_sizes[start:stop].sum())
            slices.append(RecordSlice(records, partition, start, stop - start, part, size))
    return slices
