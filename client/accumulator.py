"""Where `send` leaves its records: the only place a user's thread and the client's loop meet.

`send` appends to plain lists behind a turnstile, for a few hundred nanoseconds; nothing else
happens on the user's thread.  The loop takes whole chunks: full ones at once, an open one after a
moment.  A chunk's create time is taken when it opens, so it is right to within `FRONT_MS`.

Invariants
  I1  chunks of a topic are taken in the order they opened; a record is in exactly one chunk.
  I2  the bytes of all records not yet resolved never exceed `buffer_memory` by more than one
      record, which is let through when nothing else is held: memory is reserved before a record is
      accepted.
  I3  a chunk that was taken is never appended to: taking and appending hold the same lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk import errors
from pk.client.futures import Delivery, OnDelivery, SendFuture
from pk.client.partitioner import Sticky
from pk.client.rows import RECORD_OVERHEAD, absent, binary_column, rows_of
from pk.client.waiting import Monitor
from pk.clock import Clock, block_s
from pk.log.columns import HEADER_TYPE
from pk.types import NONE

#: An open chunk is taken after this much, or after linger_ms if that is less.
FRONT_MS = 5
#: Memory is reserved this much at a time, so that `send` need not reckon per record.
GRANT_BYTES = 256 * 1024

Headers = Sequence[tuple[str, bytes | None]]


class Budget:
    """buffer_memory: what is held and not yet resolved."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._space = Monitor()
        self._closed: errors.PkError | None = None

    def try_reserve(self, size: int) -> bool:
        """Take `size` bytes if they are there; a request larger than the limit needs it empty."""
        with self._space.lock:
            if self._closed is not None:
                raise self._closed
            if self.used and self.used + size > self.limit:
                return False
            self.used += size
            return True

    def wait(self, size: int, timeout_s: float) -> None:
        """Block until `size` bytes may be there, or time is up: then try again."""
        with self._space.lock:
            self._space.wait_for(
                lambda: self._closed is not None or not self.used or self.used + size <= self.limit,
                timeout_s,
            )

    def release(self, size: int) -> None:
        with self._space.lock:
            self.used -= size
            assert self.used >= 0, self.used
            self._space.notify_all()

    def close(self, error: errors.PkError) -> None:
        with self._space.lock:
            self._closed = error
            self._space.notify_all()


class Turnstile:
    """A mutex for sections of a few instructions, as `send` has one per record.

    Whoever takes the one token out of the list is inside.  That is a fifth faster than a `Lock`,
    whose methods parse keyword arguments, and unlike behind `acquire()` no signal is handled
    between the taking and the `try` that gives back, so that Ctrl-C cannot leave it shut.  Who
    finds it shut lets the other threads run and looks again.
    """

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens: list[None] = [None]

    def __enter__(self) -> None:
        while True:
            try:
                del self.tokens[0]
            except IndexError:
                block_s(0)
            else:
                return

    def __exit__(self, *_: object) -> None:
        self.tokens.append(None)


class Chunk(Delivery):
    """Records of one topic as `send` left them: parallel columns, the rare ones by index."""

    __slots__ = (
        "created", "granted", "headers", "keys", "on_delivery", "opened_ms", "partitions",
        "ready", "size", "values",
    )  # fmt: skip

    def __init__(self, topic: str, monitor: Monitor) -> None:
        super().__init__(topic, monitor)
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None  #: None until the first key
        self.headers: dict[int, Headers] | None = None
        self.partitions: dict[int, int] | None = None
        self.created: dict[int, int] | None = None  #: create times the caller gave
        self.size = 0
        self.granted = 0  #: bytes reserved for this chunk
        self.opened_ms = 0  #: monotonic
        self.ready = False  #: do not wait for linger_ms

    def rows(self) -> tuple[pa.RecordBatch, npt.NDArray[np.int32] | None]:
        """The records as columns, and the partitions callers chose (-1 = none); the lists are
        dropped.
        """
        count = self.count = len(self.values)
        value = binary_column(self.values, count)
        key = binary_column(self.keys, count)
        if self.headers is None:
            headers = absent(count, HEADER_TYPE)
        else:
            given = self.headers
            headers = pa.array(
                [[{"key": k, "value": v} for k, v in given.get(i, ())] for i in range(count)],
                HEADER_TYPE,
            )
        stamps = None
        if self.created is not None:
            stamps = np.full(count, self.stamp_ms, np.int64)
            stamps[list(self.created)] = list(self.created.values())
            self.stamps = stamps
        explicit = None
        if self.partitions is not None:
            explicit = np.full(count, NONE, np.int32)
            explicit[list(self.partitions)] = list(self.partitions.values())
        self.values, self.keys, self.headers = [], None, None
        return rows_of(key, value, headers, stamps), explicit


class Columns(Delivery):
    """A `send_batch`, already split: (partition, first position, rows, bytes) in order."""

    __slots__ = ("opened_ms", "pieces", "ready")

    def __init__(self, topic: str, monitor: Monitor) -> None:
        super().__init__(topic, monitor)
        self.pieces: list[tuple[int, int, pa.RecordBatch, int]] = []
        self.opened_ms = 0
        self.ready = False


class RecordAccumulator:
    """One topic's door."""

    __slots__ = (
        "budget", "chunk", "chunk_bytes", "closed", "done", "lock", "room", "sealed", "sticky",
        "sticky_lock", "tokens", "topic",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        chunk_bytes: int,
        sticky: Sticky,
        budget: Budget,
        done: Monitor,
    ) -> None:
        self.topic = topic
        self.chunk_bytes = chunk_bytes
        self.sticky = sticky  #: under `sticky_lock`
        self.sticky_lock = threading.Lock()
        self.budget = budget
        self.done = done  #: what deliveries notify
        self.lock = Turnstile()
        self.tokens = self.lock.tokens  #: for the fast path of `send`
        self.chunk: Chunk | None = None
        self.room = 0  #: bytes the open chunk may still take without asking; 0 without one
        self.sealed: deque[Chunk | Columns] = deque()
        self.closed: errors.PkError | None = None

    def offer(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        partition: int | None,
        timestamp_ms: int | None,
        on_delivery: OnDelivery | None,
        size: int,
        clock: Clock,
    ) -> SendFuture | None:
        """Accept a record of `size` bytes; None if there is no memory for it (what there was is
        sealed).
        """
        with self.lock:
            if self.closed is not None:
                raise self.closed
            chunk = self.chunk
            if (
                chunk is not None
                and self.room < size
                and chunk.granted - self.room + size > self.chunk_bytes
            ):
                self.seal()
            if self.room < size and not self._grow(size, clock):
                self.seal(ready=True)
                return None
            chunk = self.chunk
            assert chunk is not None
            self.room -= size
            index = len(chunk.values)
            chunk.values.append(value)
            if chunk.keys is not None:
                chunk.keys.append(key)
            elif key is not None:
                chunk.keys = [None] * index
                chunk.keys.append(key)
            if headers:
                chunk.headers = chunk.headers or {}
                chunk.headers[index] = headers
            if partition is not None:
                chunk.partitions = chunk.partitions or {}
                chunk.partitions[index] = partition
            if timestamp_ms is not None:
                chunk.created = chunk.created or {}
                chunk.created[index] = timestamp_ms
            if on_delivery is not None:
                chunk.on_delivery[index] = on_delivery
        return SendFuture(chunk, index)

    def _grow(self, size: int, clock: Clock) -> bool:
        """Reserve memory for at least `size` bytes (lock held)."""
        need = size - self.room
        granted = 0 if self.chunk is None else self.chunk.granted
        grant = max(need, min(GRANT_BYTES, self.chunk_bytes - granted))
        if not self.budget.try_reserve(grant):
            grant = need
            if not self.budget.try_reserve(grant):
                return False
        if self.chunk is None:
            self.chunk = Chunk(self.topic, self.done)
            self.chunk.stamp_ms = clock.wall_ms()
            self.chunk.opened_ms = clock.monotonic_ms()
        self.chunk.granted += grant
        self.room += grant
        return True

    def seal(self, *, ready: bool = False) -> None:
        """Close the open chunk (lock held)."""
        chunk = self.chunk
        if chunk is not None:
            chunk.ready = ready
            chunk.size = chunk.granted - self.room
            self.budget.release(self.room)
            self.sealed.append(chunk)
            self.chunk = None
            self.room = 0

    def take(self, opened_before_ms: int, *, ready: bool = False) -> list[Chunk | Columns]:
        """Everything sealed, and the open chunk if it is old enough: only then a sender may have
        to wait.
        """
        chunk = self.chunk
        if chunk is not None and (ready or chunk.opened_ms <= opened_before_ms):
            with self.lock:
                if self.chunk is chunk:  # else whoever filled it has sealed it meanwhile
                    self.seal(ready=ready)
        return [self.sealed.popleft() for _ in range(len(self.sealed))]

    def close(self, error: errors.PkError) -> None:
        """Refuse all further records with `error`."""
        with self.lock:
            self.closed = error
            self.seal()

    @property
    def open_since(self) -> int | None:
        chunk = self.chunk
        return None if chunk is None else chunk.opened_ms


def record_size(value: Any, key: Any, headers: Headers | None, topic: str) -> int:
    """What a record is counted for.  Raises `SerializationError` unless all is bytes or None."""
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
            bad = not isinstance(name, str) or not (content is None or isinstance(content, bytes))
            long = 0 if bad else len(name.encode())  # as the column's: `sizes` shares out the sum
        except (TypeError, ValueError):  # no pair, or no text that UTF-8 can say
            bad = True
        if bad:
            raise errors.SerializationError(
                f"{topic}: a header is a pair (text, bytes or None), not {header!r}",
                field="headers",
            )
        size += RECORD_OVERHEAD + long + len(content or b"")
    return size
