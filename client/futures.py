"""What became of the records of one send: a delivery per chunk, a light future per record.

A `Delivery` covers the records of one chunk (many `send` calls) or of one `send_batch`.  Once split
by partition it has *parts*, runs of records that travel in one batch and share its fate; a record's
outcome is its part's, found by two look-ups when somebody asks, so nothing is done per record when
a batch is acknowledged.

Invariants
  F1  a part is resolved at most once; a delivery is done when it was split and every part is
      resolved.
  F2  `position` (a record's place after the stable sort by partition) falls into exactly one part.
  F3  a callback runs exactly once, on the thread that resolves, or at once if the outcome is known.
      Whatever it raises is logged and changes nothing.
  F4  a delivery is *settled* when it is done and the callbacks of its parts have returned: what
      `flush` and `close` wait for.  A future may know its outcome a moment earlier.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pk import errors
from pk.client.waiting import Monitor
from pk.types import NONE, BatchMetadata, RecordMetadata, TopicPartition

_log = logging.getLogger("pk.client")

I64 = npt.NDArray[np.int64]
#: `on_delivery(metadata, error)`: exactly one of both is None, as Kafka's onCompletion.
OnDelivery = Callable[[RecordMetadata | None, errors.PkError | None], None]


def must_not_block(thread: threading.Thread) -> None:
    """Refuse to wait on the thread that would have to end the wait."""
    if threading.current_thread() is thread:
        raise errors.InvalidRequest(
            "a delivery callback must not block: it runs on the sending thread"
        )


class Part:
    """A run of a delivery's records in one batch of one partition."""

    __slots__ = (
        "append_time_ms",
        "base_offset",
        "count",
        "delivery",
        "error",
        "first",
        "partition",
    )

    def __init__(self, delivery: Delivery, partition: int, first: int, count: int) -> None:
        self.delivery = delivery
        self.partition = partition
        self.first = first  #: position of the first record
        self.count = count
        self.base_offset: int | None = None  #: offset of the first record; -1 = not told (acks=0)
        self.append_time_ms = NONE
        self.error: errors.PkError | None = None

    @property
    def resolved(self) -> bool:
        return self.base_offset is not None or self.error is not None


class Delivery:
    """The fate of `count` records of one topic."""

    __slots__ = (
        "callbacks", "count", "inverse", "monitor", "on_delivery", "order", "parts", "split",
        "stamp_ms", "stamps", "telling", "topic", "unresolved", "waiters",
    )  # fmt: skip

    def __init__(self, topic: str, monitor: Monitor) -> None:
        self.topic = topic
        self.monitor = monitor  #: of the producer; notified when any part is resolved
        self.count = 0
        self.parts: list[Part] = []
        self.split = False
        self.unresolved = 0
        self.telling = 0  #: how many resolutions have callbacks that did not return yet
        self.inverse: npt.NDArray[np.int64] | None = None  #: record index → position; None = same
        self.order: npt.NDArray[np.int64] | None = None  #: position → record index; None = same
        self.on_delivery: dict[int, OnDelivery] = {}  #: by record index
        self.stamp_ms = 0
        self.stamps: I64 | None = None  #: create times by record index, if they differ
        self.callbacks: list[tuple[int, Callable[[], None]]] | None = None
        self.waiters: list[Callable[[], None]] | None = None  #: called when all is resolved

    # -- the sending side -------------------------------------------------------------------------

    def add_part(self, partition: int, first: int, count: int) -> Part:
        part = Part(self, partition, first, count)
        self.parts.append(part)
        self.unresolved += 1
        return part

    def fail_unsplit(self, error: errors.PkError) -> None:
        """All records fail before a partition was chosen."""
        part = self.add_part(NONE, 0, self.count)
        self.split = True
        resolve([part], [NONE], error=error)

    # -- the asking side --------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.split and not self.unresolved

    @property
    def settled(self) -> bool:
        return self.split and not self.unresolved and not self.telling

    def part_of(self, index: int) -> tuple[Part, int] | None:
        """The part of record `index` and the record's place in it; None before the split."""
        if not self.split:
            return None
        position = index if self.inverse is None else int(self.inverse[index])
        part = self.parts[bisect_right(self.parts, position, key=lambda p: p.first) - 1]
        return part, position - part.first

    def outcome(self, index: int) -> RecordMetadata | errors.PkError | None:
        """What became of record `index`; None = not known yet."""
        found = self.part_of(index)
        if found is None:
            return None
        part, place = found
        if part.error is not None:
            return part.error
        if part.base_offset is None:
            return None
        offset = part.base_offset + place if part.base_offset >= 0 else NONE
        stamp = part.append_time_ms
        if stamp <= 0:
            stamp = self.stamp_ms if self.stamps is None else int(self.stamps[index])
        return RecordMetadata(self.topic, part.partition, offset, stamp)

    def call_when_done(self, index: int, callback: Callable[[], None]) -> None:
        with self.monitor.lock:
            if self.outcome(index) is None:
                if self.callbacks is None:
                    self.callbacks = []
                self.callbacks.append((index, callback))
                return
        _call(callback)

    def batches(self) -> list[BatchMetadata] | errors.PkError | None:
        """The outcome of a whole send_batch."""
        if not self.done:
            return None
        stored: list[BatchMetadata] = []
        failed: list[tuple[TopicPartition, errors.PkError]] = []
        for part in self.parts:
            if part.error is not None:
                failed.append((TopicPartition(self.topic, part.partition), part.error))
            else:
                offset = NONE if part.base_offset is None else part.base_offset
                stored.append(BatchMetadata(self.topic, part.partition, offset, part.count))
        if not failed:
            return stored
        if not stored and len({type(error) for _, error in failed}) == 1:
            return failed[0][1]
        names = sorted({f"{place}: {error.message}" for place, error in failed})
        return errors.PartlyStored(
            f"{len(stored)} parts stored, {len(failed)} not ({'; '.join(names)})", stored, failed
        )


def resolve(
    parts: list[Part],
    base_offsets: list[int],
    *,
    append_time_ms: int = NONE,
    error: errors.PkError | None = None,
) -> None:
    """Settle `parts`, wake whoever waits, run the callbacks that are due."""
    due: list[Callable[[], None]] = []
    deliveries: dict[int, Delivery] = {}
    monitor = parts[0].delivery.monitor
    with monitor.lock:
        for part, base_offset in zip(parts, base_offsets, strict=True):
            if part.resolved:
                continue
            part.append_time_ms = append_time_ms
            if error is not None:
                part.error = error
            else:
                part.base_offset = base_offset
            part.delivery.unresolved -= 1
            if part.delivery.on_delivery:
                due.append(partial(_tell, part))
            deliveries[id(part.delivery)] = part.delivery
        for delivery in deliveries.values():
            if delivery.callbacks is not None:
                waiting = delivery.callbacks
                delivery.callbacks = [c for c in waiting if delivery.outcome(c[0]) is None]
                due += [call for i, call in waiting if delivery.outcome(i) is not None]
            if delivery.done and delivery.waiters is not None:
                due += delivery.waiters
                delivery.waiters = None
        if due:
            for delivery in deliveries.values():
                delivery.telling += 1
        monitor.notify_all()
    if not due:
        return
    for callback in due:
        _call(callback)
    with monitor.lock:
        for delivery in deliveries.values():
            delivery.telling -= 1
        monitor.notify_all()


def _tell(part: Part) -> None:
    """Run the `on_delivery` of the part's records, in offset order."""
    delivery = part.delivery
    calls, topic, error = delivery.on_delivery, delivery.topic, part.error
    first, end = part.first, part.first + part.count
    indices = range(first, end) if delivery.order is None else delivery.order[first:end].tolist()
    base, step = part.base_offset, 1
    if base is None or base < 0:
        base, step = NONE, 0
    stamps = delivery.stamps if part.append_time_ms <= 0 else None
    stamp = delivery.stamp_ms if part.append_time_ms <= 0 else part.append_time_ms
    for place, index in enumerate(indices):
        call = calls.get(index)
        if call is None:
            continue
        try:
            if error is not None:
                call(None, error)
                continue
            if stamps is not None:
                stamp = int(stamps[index])
            call(RecordMetadata(topic, part.partition, base + place * step, stamp), None)
        except BaseException:  # sys.exit() too: this is not the thread it was meant for
            _log.exception("a delivery callback failed")


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except BaseException:  # sys.exit() too: this is not the thread it was meant for
        _log.exception("a delivery callback failed")


class SendFuture(msgspec.Struct, gc=False, eq=False):
    """The future of one record: no lock, no event of its own, created by the cheapest means there
    is.
    """

    _delivery: Delivery
    _index: int

    def done(self) -> bool:
        return self._delivery.outcome(self._index) is not None

    def cancelled(self) -> bool:
        """Never: what was handed over is sent."""
        return False

    def exception(self, timeout: float | None = None) -> errors.PkError | None:
        """The error, or None if the record was stored.  Raises `TimeoutError`."""
        outcome = self._wait(timeout)
        return outcome if isinstance(outcome, errors.PkError) else None

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record was stored; raises its error, or `TimeoutError` after `timeout`
        seconds.
        """
        outcome = self._wait(timeout)
        if isinstance(outcome, errors.PkError):
            raise outcome
        return outcome

    def add_done_callback(self, callback: Callable[[SendFuture], Any]) -> None:
        """`callback(future)` once the outcome is known: on the sending thread, so it must not
        block.
        """
        self._delivery.call_when_done(self._index, lambda: callback(self))

    def _wait(self, timeout: float | None) -> RecordMetadata | errors.PkError:
        delivery, index = self._delivery, self._index
        outcome = delivery.outcome(index)
        if outcome is None:
            with delivery.monitor.lock:
                delivery.monitor.wait_for(lambda: delivery.outcome(index) is not None, timeout)
                outcome = delivery.outcome(index)
        if outcome is None:
            raise TimeoutError(f"not acknowledged within {timeout} s; it may still be")
        return outcome


class BatchFuture:
    """The future of one `send_batch`: one result for all its parts."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def done(self) -> bool:
        return self._delivery.done

    def cancelled(self) -> bool:
        return False

    def exception(self, timeout: float | None = None) -> errors.PkError | None:
        outcome = self._wait(timeout)
        return outcome if isinstance(outcome, errors.PkError) else None

    def result(self, timeout: float | None = None) -> list[BatchMetadata]:
        """Where each part was stored; raises `PartlyStored` if some were and some were not."""
        outcome = self._wait(timeout)
        if isinstance(outcome, errors.PkError):
            raise outcome
        return outcome

    def add_done_callback(self, callback: Callable[[BatchFuture], Any]) -> None:
        delivery = self._delivery

        def call() -> None:
            callback(self)

        with delivery.monitor.lock:
            if not delivery.done:
                if delivery.waiters is None:
                    delivery.waiters = []
                delivery.waiters.append(call)
                return
        _call(call)

    def _wait(self, timeout: float | None) -> list[BatchMetadata] | errors.PkError:
        delivery = self._delivery
        with delivery.monitor.lock:
            delivery.monitor.wait_for(lambda: delivery.done, timeout)
            outcome = delivery.batches()
        if outcome is None:
            raise TimeoutError(f"not acknowledged within {timeout} s; it may still be")
        return outcome
