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
from pk.client.partitioner import Sticky, all_exist, ordered_by_partition, place, place_few
from pk.client.record_set import Headers, OnDelivery, RecordSet, RecordSlice
from pk.client.rows import (
    COLUMN_OVERHEAD,
    I64,
    RECORD_OVERHEAD,
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
FEW_PARTITIONS = 8
#: A batch with less than 1/8 of its size left counts as full.
FULL_SHARE = 8


class BufferPool:
    """The memory of a producer.  buffer_memory: the limit for the bytes of unresolved records."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._space = Monitor()

    def _has(self, size: int) -> bool:
        return not self.used or self.used + size <= self.limit

    def try_reserve(self, size: int) -> bool:
        """Reserve `size` bytes; False if they are not free.  A request above the limit needs an
        empty pool.
        """
        with self._space.lock:
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


class BusyAccumulators:
    """The accumulators of a producer that may hold records: the loop looks at no others (I4)."""

    def __init__(self) -> None:
        self._found: dict[int, RecordAccumulator] = {}  #: by the order in which they were made
        self._made = 0

    def register(self) -> int:
        """Return the number of a new accumulator."""
        self._made += 1
        return self._made

    def add(self, number: int, accumulator: RecordAccumulator) -> None:
        """Add an accumulator, in any thread, after it got a record set."""
        self._found[number] = accumulator

    def numbers(self) -> list[int]:
        """Return the numbers of all that were added, in the order in which they were made."""
        return sorted(self._found)  # one step of the interpreter: other threads add

    def take(self, number: int) -> RecordAccumulator | None:
        """Remove an accumulator before a look at it; None = another look has taken it."""
        return self._found.pop(number, None)


class RecordAccumulator:
    """The records of one topic that the loop has not taken yet."""

    __slots__ = (
        "_busy", "_clock", "_linger_ms", "_monitor", "_number", "_pool", "_set_bytes", "_size_max",
        "_sticky", "_sticky_lock", "batch_size", "closed", "lock", "open", "room", "sealed",
        "tokens", "topic",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        options: Mapping[str, Any],
        sticky: Sticky,
        pool: BufferPool,
        monitor: Monitor,
        clock: Clock,
        busy: BusyAccumulators,
    ) -> None:
        self.topic = topic
        self._busy = busy
        self._number = busy.register()
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
        self.closed: errors.PkError | None = None

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
        then sealed.  Raises the error that the accumulator was closed with.
        """
        with self.lock:
            if self.closed is not None:
                raise self.closed
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
            self._busy.add(self._number, self)
        self.open.granted += grant
        self.room += grant
        return True

    def new_set(self) -> RecordSet:
        clock = self._clock
        return RecordSet(self.topic, self._monitor, clock.wall_ms(), clock.monotonic_ms())

    def append_set(self, records: RecordSet) -> bool:
        """Append the records of a `send_batch` behind all records sent before.

        Returns False if memory is short."""
        with self.lock:
            if self.closed is not None:
                raise self.closed
            self._seal()
            if not self._pool.try_reserve(records.size):
                return False
            records.ready_ms = int(records.opened_ms + self._linger_ms)
            self.sealed.append(records)
            self._busy.add(self._number, self)
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

    def close(self, error: errors.PkError) -> None:
        """Refuse all further records with `error`."""
        with self.lock:
            self.closed = error
            self._seal()

    def reopen(self) -> None:
        """Accept records again, unless an error concerns the whole producer."""
        with self.lock:
            self.closed = None

    def split_few(
        self, records: RecordSet, topic: TopicMetadata, available: Callable[[], Sequence[int]]
    ) -> bool:
        """Split `records` like `split`, without Arrow, if they are few for each partition, plain,
        and together within the size of a batch.  Returns whether they were.
        """
        values, keys, whole = records.values, records.keys, records.size
        limit = min(batch_limit(self.batch_size, topic.configs), self._size_max)
        few = FEW_RECORDS * min(topic.partitions, FEW_PARTITIONS)
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
        if not isinstance(placed, int) and len(placed) == 1:
            placed = int(placed[0])
        if row_sizes is None and isinstance(placed, int):  # one batch: nothing to cut
            slices = [RecordSlice(records, placed, 0, rows.num_rows, rows, whole)]
        else:
            slices = _cut(
                records, rows, sizes(rows) if row_sizes is None else row_sizes, placed, limit
            )
        records.size = sum(each.size for each in slices)
        if reserved:  # the slices must release exactly the bytes that were reserved
            slices[-1].size += reserved - records.size
            records.size = reserved
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
    groups: dict[int, list[int]] = {}
    for index, partition in enumerate(placed):
        found = groups.get(partition)
        if found is None:
            groups[partition] = [index]
        else:
            found.append(index)
    slices, left = [], records.size
    order: list[int] = []
    for partition in sorted(groups):
        rows = groups[partition]
        mine = [values[index] for index in rows]
        my_keys = None if keys is None else [keys[index] for index in rows]
        size = sum([len(each) for each in mine if each]) + 2 * COLUMN_OVERHEAD * len(rows)
        size += sum([len(each) for each in my_keys if each]) if my_keys is not None else 0
        few = FewRows(mine, my_keys)
        slices.append(RecordSlice(records, partition, len(order), len(rows), few, size))
        left -= size
        order += rows
    slices[-1].size += left  # the slices must release exactly the bytes that were reserved
    records.order, records.inverse = np.array(order, np.int64), np.empty(len(order), np.int64)
    records.inverse[records.order] = np.arange(len(order))
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
        records.order, records.inverse = order, np.empty(len(order), np.int64)
        records.inverse[order] = np.arange(len(order))
    slices = []
    for partition, first, end in runs:
        cuts = [first + cut for cut in cuts_by_size(row_sizes[first:end], limit)]
        for start, stop in itertools.pairwise([first, *cuts]):
            part, size = rows.slice(start, stop - start), int(row_sizes[start:stop].sum())
            slices.append(RecordSlice(records, partition, start, stop - start, part, size))
    return slices


def check_size(topic: str, size: int, size_max: int) -> None:
    """Raise `RecordTooLarge` if a record of `size` bytes exceeds the producer's `size_max`."""
    if size > size_max:
        raise errors.RecordTooLarge(
            f"{topic}: a record of {size} bytes; max_request_size and buffer_memory "
            f"allow {size_max}"
        )


def record_size(value: Any, key: Any, headers: Headers | None, topic: str) -> int:
    """Return how many bytes of buffer_memory a record uses.

    Raises `SerializationError` unless all its parts are bytes or None.
    """
    size = RECORD_OVERHEAD
    for name, item in (("value", value), ("key", key)):
        if item is None:
            continue
        if not isinstance(item, bytes):
            raise errors.SerializationError(
                f"{topic}: {name} is {type(item).__name__}, not bytes; give {name}_serializer",
                field=name,
            )
        size += len(item)
    for header in headers or ():
        try:
            name, content = header
            # as long as in the column: `sizes` distributes the sum
            size += RECORD_OVERHEAD + len(name.encode()) + len(content or b"")
            bad = not isinstance(name, str) or not (content is None or isinstance(content, bytes))
        except (AttributeError, TypeError, ValueError):  # no pair, or no text that UTF-8 can encode
            bad = True
        if bad:
            raise errors.SerializationError(
                f"{topic}: a header is a pair (text, bytes or None), not {header!r}",
                field="headers",
            )
    return size
