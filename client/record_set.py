"""The records of one topic that were sent together, and their outcomes.

A `RecordSet` holds the records of many `send` calls, or those of one `send_batch`.  It is split by
partition into `RecordSlice`s: runs of rows that are sent in one batch and share its outcome.  A
future finds the outcome of its record by two look-ups when it is asked, so acknowledging a batch
needs no work per record.

Invariants
  F1  A slice is resolved once.  A record set is done when it was split and all slices are resolved.
  F2  `position` (a record's index after the stable sort by partition) falls into exactly one slice.
  F3  A callback runs exactly once: on the thread that resolves, or at once if the outcome is known.
      An exception that it raises is logged and has no other effect.
  F4  A record set is *settled* when it is done and the callbacks of its slices have returned.
      `flush` and `close` wait for this.  A future may know its outcome a moment earlier.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk import errors
from pk.client.rows import rows_of
from pk.client.waiting import Monitor
from pk.log.columns import HEADER_TYPE, binary_column, null_headers
from pk.types import NONE, BatchMetadata, RecordMetadata, TopicPartition

_log = logging.getLogger("pk.client")
_FAILED = "a delivery callback failed"

I64 = npt.NDArray[np.int64]
#: `on_delivery(metadata, error)`: exactly one of them is None, as in Kafka's onCompletion.
OnDelivery = Callable[[RecordMetadata | None, errors.PkError | None], None]
Headers = Sequence[tuple[str, bytes | None]]


@dataclass(slots=True, eq=False)
class RecordSlice:
    """Rows of one partition of a record set; they are sent in one batch and share its outcome."""

    records: RecordSet
    partition: int
    first: int  #: position of the first record
    count: int
    rows: Any  #: pa.RecordBatch or FewRows; None once they are encoded, or the slice failed
    size: int  #: bytes reserved for it
    resolved: bool = False
    base_offset: int = NONE  #: offset of the first record; NONE = stored, offset not known
    append_time_ms: int = NONE
    error: errors.PkError | None = None

    def metadata(self, position: int, index: int) -> RecordMetadata:
        """Return where record `index` of the set, at `position`, was stored."""
        records, offset, stamp = self.records, self.base_offset, self.append_time_ms
        if offset >= 0:
            offset += position - self.first
        if stamp <= 0:
            times = records.create_times
            stamp = records.stamp_ms if times is None else int(times[index])
        return RecordMetadata(records.topic, self.partition, offset, stamp)


@dataclass(slots=True, eq=False)
class RecordSet:
    """Records of one topic, as parallel columns to which `send` appends.

    Fields that few records have are dicts by record index.
    """

    topic: str
    monitor: Monitor  #: the producer's monitor; notified when a slice is resolved
    stamp_ms: int = 0  #: wall clock; the create time of records without their own
    opened_ms: int = 0  #: monotonic; delivery_timeout_ms begins here
    ready_ms: int = 0  #: monotonic; when it has lingered long enough
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] | None = None  #: None until the first key
    headers: dict[int, Headers] = field(default_factory=dict)
    partitions: dict[int, int] = field(default_factory=dict)
    create_times_given: dict[int, int] = field(default_factory=dict)
    on_delivery: dict[int, OnDelivery] = field(default_factory=dict)
    granted: int = 0  #: bytes reserved while the set is open
    size: int = 0  #: bytes that its records count for; 0 while the set is open
    count: int = 0
    create_times: I64 | None = None  #: by record index, only where they differ
    inverse: I64 | None = None  #: record index → position; None = equal
    order: I64 | None = None  #: position → record index; None = equal
    slices: list[RecordSlice] | None = None  #: in the order of positions; None = not split
    unresolved: int = 0
    running: int = 0  #: resolutions whose callbacks have not all returned
    #: by record index; None = of all records
    callbacks: list[tuple[int | None, Callable[[], None]]] = field(default_factory=list)

    # -- sending -----------------------------------------------------------------------------------

    def columns(self) -> tuple[pa.RecordBatch, npt.NDArray[np.int32] | None]:
        """Return the records as rows, and the partitions that callers chose (NONE = no choice).
        The lists are dropped.
        """
        count = self.count = len(self.values)
        value, key = binary_column(self.values, count), binary_column(self.keys, count)
        headers = null_headers(count)
        if self.headers:
            given = self.headers
            headers = pa.array(
                [[{"key": k, "value": v} for k, v in given.get(i, ())] for i in range(count)],
                HEADER_TYPE,
            )
        if self.create_times_given:
            self.create_times = np.full(count, self.stamp_ms, np.int64)
            self.create_times[list(self.create_times_given)] = [*self.create_times_given.values()]
        chosen = None
        if self.partitions:
            chosen = np.full(count, NONE, np.int32)
            chosen[list(self.partitions)] = list(self.partitions.values())
        self.values, self.keys, self.headers = [], None, {}
        return rows_of(key, value, headers, self.create_times), chosen

    def plain(self, count_max: int) -> bool:
        """Return whether these are at most so many records, all without headers or create times."""
        return len(self.values) <= count_max and not self.headers and not self.create_times_given

    def sort(self, order: I64) -> None:
        """Note how the records are sorted by partition: position → record index."""
        self.order, self.inverse = order, np.empty(len(order), np.int64)
        self.inverse[order] = np.arange(len(order))

    def split(self, slices: list[RecordSlice]) -> None:
        self.unresolved = len(slices)
        self.slices = slices  # assigned last, because other threads read it first

    def fail(self, error: errors.PkError) -> None:
        """Fail all records; none was handed to the sender."""
        self.count = self.count or len(self.values)
        if self.slices is None:
            self.split([RecordSlice(self, NONE, 0, self.count, None, self.size)])
        for each in self.slices or ():
            each.rows = None  # a future that the caller keeps must not keep the rows
        if self.slices:
            resolve([BatchOutcome(self.slices, error=error)])

    # -- asking ------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.slices is not None and not self.unresolved

    @property
    def settled(self) -> bool:
        return self.done and not self.running

    def outcome(
        self, index: int | None
    ) -> RecordMetadata | list[BatchMetadata] | errors.PkError | None:
        """Return the outcome of record `index`, or of all records (None); None if it is not known
        yet.
        """
        if index is None:
            return self._outcome_of_all()
        slices = self.slices
        if slices is None:
            return None
        position = index if self.inverse is None else int(self.inverse[index])
        found = slices[bisect_right(slices, position, key=lambda each: each.first) - 1]
        if not found.resolved:
            return None
        return found.metadata(position, index) if found.error is None else found.error

    def _outcome_of_all(self) -> list[BatchMetadata] | errors.PkError | None:
        if self.slices is None or self.unresolved:
            return None
        topic = self.topic
        stored = [
            BatchMetadata(topic, each.partition, each.base_offset, each.count)
            for each in self.slices
            if each.error is None
        ]
        failed = [
            (TopicPartition(topic, each.partition), each.error)
            for each in self.slices
            if each.error is not None
        ]
        if not failed:
            return stored
        if not stored and len({type(error) for _, error in failed}) == 1:
            return failed[0][1]
        names = sorted({f"{place}: {error.message}" for place, error in failed})
        return errors.PartlyStored(
            f"{len(stored)} parts stored, {len(failed)} not ({'; '.join(names)})", stored, failed
        )

    def call_when_known(self, index: int | None, callback: Callable[[], None]) -> None:
        """Run `callback` once the outcome of record `index`, or of all records, is known."""
        with self.monitor.lock:
            if self.outcome(index) is None:
                self.callbacks.append((index, callback))
                return
        _call(callback)


class BatchOutcome(NamedTuple):
    """The outcome of consecutive slices: stored from `base_offset` on, or failed with `error`."""

    slices: list[RecordSlice]
    base_offset: int = NONE
    append_time_ms: int = NONE
    error: errors.PkError | None = None


def resolve(outcomes: Sequence[BatchOutcome]) -> None:
    """Resolve slices of one producer.  Wakes the waiting threads once, and runs the callbacks that
    are due.
    """
    due: list[Callable[[], None]] = []
    monitor = outcomes[0].slices[0].records.monitor
    touched: dict[int, RecordSet] = {}
    with monitor.lock:
        for slices, base_offset, append_time_ms, error in outcomes:
            for each in slices:
                assert not each.resolved  # F1
                each.base_offset, each.append_time_ms = base_offset, append_time_ms
                each.error = error
                each.resolved = True  # assigned last, because other threads read it first
                base_offset += each.count if base_offset != NONE else 0
                records = each.records
                records.unresolved -= 1
                if records.on_delivery:
                    due.append(partial(_run_on_delivery, each))
                touched[id(records)] = records
        resolved = list(touched.values())
        for records in resolved:
            if records.callbacks:
                waiting = [(records.outcome(i) is not None, i, c) for i, c in records.callbacks]
                records.callbacks = [(i, call) for known, i, call in waiting if not known]
                due += [call for known, _, call in waiting if known]
        for records in resolved if due else ():
            records.running += 1
        monitor.notify_all()
    if not due:
        return
    for callback in due:
        _call(callback)
    with monitor.lock:
        for records in resolved:
            records.running -= 1
        monitor.notify_all()


def _run_on_delivery(resolved: RecordSlice) -> None:
    """Run the `on_delivery` of the slice's records, in offset order."""
    records, error = resolved.records, resolved.error
    first, end = resolved.first, resolved.first + resolved.count
    indices = range(first, end) if records.order is None else records.order[first:end].tolist()
    on_delivery, metadata = records.on_delivery, resolved.metadata
    for position, index in enumerate(indices, first):
        if index in on_delivery:
            try:
                on_delivery[index](metadata(position, index) if error is None else None, error)
            except BaseException:  # even SystemExit: it was not meant to end this thread
                _log.exception(_FAILED)


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except BaseException:  # even SystemExit: it was not meant to end this thread
        _log.exception(_FAILED)
