"""Rows, sizes, placing, splitting and batches of the accumulator; the accumulator's memory."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.backoff import Retry
from pk.client.accumulator import (
    BufferPool,
    RecordAccumulator,
)
from pk.client.futures import BatchFuture, SendFuture
from pk.client.metadata import TopicMetadata
from pk.client.options import producer_options
from pk.client.partitioner import Sticky, partition_of, place
from pk.client.producer import Producer
from pk.client.producer_batch import PartitionBatches, ProducerBatch
from pk.client.record_arguments import normalise, record_size
from pk.client.record_set import BatchOutcome, RecordSet, RecordSlice, resolve
from pk.client.rows import (
    batch_limit,
    cuts_by_size,
    size_of,
    sizes,
)
from pk.client.waiting import Monitor, SpinLock
from pk.clock import SystemClock
from pk.log.columns import binary_column, decode
from pk.types import BatchMetadata, PartitionKey, RecordMetadata

BYTES = st.one_of(st.none(), st.binary(max_size=20))
PARTITION = PartitionBatches(
    "t", PartitionKey("00000000-0000-4000-8000-000000000001", 0), Retry((1, 1))
)


@given(st.lists(BYTES, max_size=50))
def test_a_column_holds_what_it_was_made_of(items: list[bytes | None]) -> None:
    assert binary_column(items, len(items)).to_pylist() == items


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("size", [0, 3])
def test_a_column_of_items_of_one_length(count: int, size: int) -> None:
    items = [bytes([i] * size) for i in range(count)]
    assert binary_column(items, count).to_pylist() == items
    assert binary_column([*items, b"longer"], count + 1).to_pylist() == [*items, b"longer"]


def test_a_long_column_too() -> None:
    items = [b"%d" % i if i % 3 else None for i in range(10_000)]
    assert binary_column(items, len(items)).to_pylist() == items


def sticky(seed: int = 1) -> Sticky:
    return Sticky(1 << 20, random.Random(seed))


def accumulator_of(pool: BufferPool, batch_size: int = 1 << 20) -> RecordAccumulator:
    options, _ = producer_options({"batch_size": batch_size})
    return RecordAccumulator("t", options, sticky(), pool, Monitor(), SystemClock(), {}, 0)


def slice_of(records: RecordSet, rows: pa.RecordBatch) -> RecordSlice:
    return RecordSlice(records, 0, 0, rows.num_rows, rows, int(sizes(rows).sum()))


def batch_of(first: RecordSlice) -> ProducerBatch:
    batch = ProducerBatch(PARTITION, 0)
    batch.add(first)
    return batch


@given(st.lists(st.tuples(BYTES, st.one_of(st.none(), st.integers(0, 4))), min_size=1, max_size=60))
def test_every_row_goes_where_the_rules_say_and_keeps_its_order(
    rows: list[tuple[bytes | None, int | None]],
) -> None:
    keys = [key for key, _ in rows]
    values = [b"%d" % i for i in range(len(rows))]
    batch = pa.record_batch(
        [pa.array(keys, pa.binary()), pa.array(values), pa.array([p for _, p in rows], pa.int32())],
        names=["key", "value", "partition"],
    )
    normal, chosen = normalise(batch, 0)
    assert chosen is not None
    accumulator = accumulator_of(BufferPool(1 << 20))
    records = accumulator.new_set()
    records.count = len(rows)
    accumulator.split(records, normal, chosen, TopicMetadata("t", "id", 5, False, {}), range(5))
    assert records.slices is not None
    assert records.size == sum(each.size for each in records.slices) > 0
    seen: dict[int, tuple[int, int]] = {}
    for each in records.slices:
        run = [int(value) for value in each.rows.column("value").to_pylist()]
        assert run == sorted(run)
        seen.update({row: (each.partition, each.first + at) for at, row in enumerate(run)})
    resolve([BatchOutcome(records.slices, 0)])
    assert sorted(seen) == list(range(len(rows)))
    stuck = {seen[i][0] for i, (key, p) in enumerate(rows) if p is None and key is None}
    assert len(stuck) <= 1
    for row, (key, partition) in enumerate(rows):
        if partition is not None:
            assert seen[row][0] == partition
        elif key is not None:
            assert seen[row][0] == partition_of(key, 5)
        found = records.outcome(row)
        assert isinstance(found, RecordMetadata)
        assert (found.partition, found.offset) == seen[row]


FEW_ROWS = st.lists(
    st.tuples(BYTES, BYTES, st.one_of(st.none(), st.integers(0, 4))), min_size=1, max_size=60
)


@given(FEW_ROWS, st.sampled_from([1, 5]), st.booleans(), st.booleans())
def test_few_rows_are_split_like_many(
    rows: list[tuple[bytes | None, bytes | None, int | None]],
    partitions: int,
    keyed: bool,
    choose: bool,
) -> None:
    """Both ways place, order and encode the same records alike, and count the same memory."""

    def filled() -> tuple[RecordAccumulator, RecordSet]:
        accumulator = accumulator_of(BufferPool(1 << 20))
        for key, value, partition in rows:
            size = record_size(value, key, None, "t")
            chosen = None if partition is None else partition % partitions
            accumulator.append(
                value, key if keyed else None, None, chosen if choose else None, size=size
            )
        accumulator.seal(0, ready=True)
        records = accumulator.sealed.popleft()
        records.stamp_ms = 5
        return accumulator, records

    topic, available = TopicMetadata("t", "id", partitions, False, {}), range(partitions)
    accumulator, few = filled()
    assert accumulator.split_few(few, topic, lambda: available)
    accumulator, many = filled()
    columns, chosen = many.columns()
    accumulator.split(many, columns, chosen, topic, available)
    assert few.size == many.size == sum(each.size for each in few.slices or ())
    for name in ("order", "inverse"):
        assert np.array_equal(getattr(few, name), getattr(many, name)), name
    assert few.count == many.count == len(rows)

    def shown(records: RecordSet) -> list[Any]:
        return [
            (each.partition, each.first, each.count, b"".join(batch_of(each).encode("none", 0)))
            for each in records.slices or ()
        ]

    assert shown(few) == shown(many)


@pytest.mark.parametrize("few", [(True, True), (True, False), (False, True)])
def test_slices_of_few_rows_and_of_many_join_in_one_batch(few: tuple[bool, bool]) -> None:
    accumulator = accumulator_of(BufferPool(1 << 20))
    topic, batch = TopicMetadata("t", "id", 1, False, {}), ProducerBatch(PARTITION, 0)
    for number, by_lists in enumerate(few):
        size = record_size(b"v%d" % number, b"k", None, "t")
        accumulator.append(b"v%d" % number, b"k" if number else None, size=size)
        accumulator.seal(0, ready=True)
        records = accumulator.sealed.popleft()
        records.stamp_ms = 5 + number
        if by_lists:
            assert accumulator.split_few(records, topic, lambda: [0])
        else:
            accumulator.split(records, *records.columns(), topic, [0])
        batch.add((records.slices or [])[0])
    found = decode(b"".join(batch.encode("none", 0)), decoded_bytes_max=1000)
    assert found.column("value").to_pylist() == [b"v0", b"v1"]
    assert found.column("key").to_pylist() == [None, b"k"]
    assert found.column("timestamp").view("int64").to_pylist() == [5, 6]


def test_what_is_not_few_or_plain_is_split_as_columns() -> None:
    topic = TopicMetadata("t", "id", 2, False, {})

    def taken(count: int = 1, size: int = 10, **more: Any) -> bool:
        accumulator = accumulator_of(BufferPool(1 << 20), batch_size=2000)
        for _ in range(count):
            accumulator.append(b"v" * size, size=size + 16, **more)
        accumulator.seal(0, ready=True)
        return accumulator.split_few(accumulator.sealed.popleft(), topic, lambda: [0, 1])

    assert taken()
    assert not taken(headers=[("a", b"")])
    assert not taken(timestamp_ms=5)
    assert not taken(partition=2), "split raises InvalidPartitions"
    assert not taken(size=3000), "larger than a batch"
    assert taken(count=64, size=0)
    assert not taken(count=65, size=0)


@pytest.mark.parametrize(("key", "most"), [(None, 32 * 8), (b"k", 32 * 64)])
def test_keys_let_more_records_count_as_few_over_many_partitions(
    key: bytes | None, most: int
) -> None:
    topic = TopicMetadata("t", "id", 100, False, {})
    for count in (most, most + 1):
        accumulator = accumulator_of(BufferPool(1 << 20))
        for number in range(count):
            own = key and b"%s%d" % (key, number)
            accumulator.append(b"v", own, size=record_size(b"v", own, None, "t"))
        accumulator.seal(0, ready=True)
        records = accumulator.sealed.popleft()
        taken = accumulator.split_few(records, topic, lambda: range(100))
        assert taken == (count == most)
        assert not taken or len(records.slices or ()) == (1 if key is None else 100)


def test_a_partition_that_does_not_exist_is_refused() -> None:
    rows, _ = normalise(pa.record_batch([pa.array([b"x", b"y"])], names=["value"]), 0)
    for bad in (7, -2):
        with pytest.raises(errors.InvalidPartitions):
            place(rows, np.array([0, bad], np.int32), 3, sticky(), range(3), 10)


HEADERS = st.lists(st.tuples(st.text("ab", max_size=3), BYTES), max_size=3)


@given(st.lists(st.tuples(BYTES, BYTES, HEADERS), min_size=1, max_size=30))
def test_counted_size_covers_what_a_batch_takes(rows: list[Any]) -> None:
    """buffer_memory and batch_size count at least the bytes that the encoder writes, apart from the
    batches' headers.
    """
    batch = pa.record_batch(
        [
            pa.array([r[0] for r in rows], pa.binary()),
            pa.array([r[1] for r in rows], pa.binary()),
            pa.array(
                [[{"key": k, "value": v} for k, v in r[2]] for r in rows],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        ],
        names=["key", "value", "headers"],
    )
    normal, _ = normalise(batch, 0)
    total = int(sizes(normal).sum())
    whole = size_of(normal)
    assert whole is None or whole >= 1
    records = RecordSet("t", Monitor(), 5)
    encoded = b"".join(batch_of(slice_of(records, normal)).encode("none", 3))
    validity = 3 * (len(rows) + 7)
    assert len(encoded) - 64 <= total + 12 * len(rows) + validity
    again = decode(encoded, decoded_bytes_max=1 << 20)
    assert again.column("value").to_pylist() == [r[1] for r in rows]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(1, 120))
def test_cuts_cover_all_rows_within_the_size(row_sizes: list[int], limit: int) -> None:
    start = 0
    for end in cuts_by_size(np.array(row_sizes, np.int64), limit):
        run = row_sizes[start:end]
        assert run
        assert sum(run) <= limit or len(run) == 1
        start = end
    assert start == len(row_sizes)


def test_a_small_topic_limit_bounds_the_batch() -> None:
    assert batch_limit(1 << 20, {}) == 1 << 20
    assert batch_limit(1 << 20, {"max_message_bytes": str(8 << 20)}) == 1 << 20
    assert batch_limit(1 << 20, {"max_message_bytes": "4096"}) == 2048


def test_a_batch_is_stamped_anew_without_encoding_it_again() -> None:
    rows, _ = normalise(pa.record_batch([pa.array([b"x"])], names=["value"]), 0)
    batch = batch_of(slice_of(RecordSet("t", Monitor(), 7), rows))
    batch.producer_id, batch.epoch, batch.sequence = 4, 0, 9
    first = batch.encode("lz4", 3)
    batch.epoch, batch.sequence = 1, 0
    second = batch.encode("lz4", 3)
    assert second[1:] == first[1:]
    again = decode(b"".join(second), decoded_bytes_max=1000)
    assert again.column("timestamp").cast("int64").to_pylist() == [7]


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_reserved_before_a_record_is_taken_and_given_back_when_sealed() -> None:
    pool = BufferPool(1000)
    accumulator = accumulator_of(pool, 400)

    def append(size: int) -> SendFuture | None:
        return accumulator.append(bytes(size), size=size)

    taken = 0
    while append(100) is not None:
        taken += 1
        assert pool.used <= 1000
    assert taken == 10
    assert [(len(each.values), each.size) for each in accumulator.sealed] == [
        (4, 400), (4, 400), (2, 200),
    ]  # fmt: skip
    assert pool.used == 1000
    pool.release(400)
    assert append(100) is not None
    pool.refusal = errors.ClosedError("closed")
    accumulator.close()
    with pytest.raises(errors.ClosedError):
        append(1)


def test_one_record_larger_than_all_memory_passes_alone() -> None:
    pool = BufferPool(10)
    assert pool.try_reserve(50)
    assert not pool.try_reserve(1)
    pool.release(50)
    assert pool.try_reserve(10)


def test_waiting_for_memory_ends_when_it_is_released() -> None:
    pool = BufferPool(10)
    assert pool.try_reserve(10)
    waiter = threading.Thread(target=pool.wait, args=(5, 30))
    waiter.start()
    pool.release(10)
    waiter.join(10)
    assert not waiter.is_alive()


# -- futures ---------------------------------------------------------------------------------------


def split(records: RecordSet, *runs: tuple[int, int]) -> list[RecordSlice]:
    """Split the rows into slices of `(partition, count)`."""
    slices: list[RecordSlice] = []
    for partition, count in runs:
        first = slices[-1].first + slices[-1].count if slices else 0
        rows = pa.record_batch([pa.nulls(count)], names=["value"])
        slices.append(RecordSlice(records, partition, first, count, rows, count))
    records.count = sum(count for _, count in runs)
    records.split(slices)
    return slices


def test_a_future_knows_its_record_through_any_split() -> None:
    monitor = Monitor()
    records = RecordSet("t", monitor, 5)
    told: list[Any] = []
    records.on_delivery = {i: lambda *each: told.append(each) for i in (0, 3)}
    futures = [SendFuture(records, i) for i in range(4)]
    assert not any(future.done() for future in futures)
    with pytest.raises(TimeoutError):
        futures[0].result(0)
    records.order = np.array([1, 3, 0, 2])
    records.inverse = np.array([2, 0, 3, 1])
    one, two = split(records, (7, 2), (8, 2))
    called: list[Any] = []
    futures[1].add_done_callback(called.append)
    resolve([BatchOutcome([one], 100)])
    assert called == [futures[1]]
    assert futures[1].result(0) == RecordMetadata("t", 7, 100, 5)
    assert futures[3].result(0) == RecordMetadata("t", 7, 101, 5)
    assert not futures[0].done()
    failure = errors.StorageFull("full")
    resolve([BatchOutcome([two], error=failure)])
    assert futures[0].exception(0) is failure
    with pytest.raises(errors.StorageFull):
        futures[2].result(0)
    assert told == [(RecordMetadata("t", 7, 101, 5), None), (None, failure)]
    assert not futures[0].cancelled()


class Watched(Monitor):
    """A signal that checks, whenever waiting threads are woken, what they would see."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.look = look
        self.seen: list[Any] = []

    def notify_all(self) -> None:
        self.seen.append(self.look())
        super().notify_all()


def test_who_is_woken_finds_a_delivery_settled_only_when_its_callbacks_have_returned() -> None:
    """Flush waits for this, including the last of a million callbacks."""
    told: list[Any] = []
    monitor = Watched(lambda: (records.done, records.settled, len(told)))
    records = RecordSet("t", monitor, 5)

    def callback(*each: Any) -> None:
        assert not records.settled
        told.append(each)
        raise SystemExit  # concerns no other batch

    records.on_delivery = dict.fromkeys(range(3), callback)
    one, two = split(records, (0, 2), (1, 2))
    futures = [SendFuture(records, index) for index in range(4)]
    futures[3].add_done_callback(callback)
    resolve([BatchOutcome([one], 10)])
    assert (records.done, records.settled, len(told)) == (False, False, 2)
    resolve([BatchOutcome([two], 20)])
    assert monitor.seen == [
        (False, False, 0), (False, False, 2), (True, False, 2), (True, True, 4),
    ]  # fmt: skip
    assert futures[2].result(0).offset == 20


def test_the_batches_of_a_response_wake_the_waiting_threads_once() -> None:
    monitor = Watched(lambda: records.done)
    records = RecordSet("t", monitor)
    one, two = split(records, (0, 2), (1, 2))
    failure = errors.RecordTooLarge("too large")
    resolve([BatchOutcome([one], 10), BatchOutcome([two], error=failure)])
    assert monitor.seen == [True]
    assert SendFuture(records, 1).result(0).offset == 11
    assert SendFuture(records, 3).exception(0) is failure


def test_a_batch_partly_stored_says_what_was_and_what_was_not() -> None:
    records = RecordSet("t", Monitor())
    one, two = split(records, (0, 2), (1, 1))
    future = BatchFuture(records)
    called: list[Any] = []
    future.add_done_callback(called.append)
    resolve([BatchOutcome([one], 10, append_time_ms=99)])
    assert not future.done()
    resolve([BatchOutcome([two], error=errors.RecordTooLarge("too large"))])
    assert called == [future]
    with pytest.raises(errors.PartlyStored) as told:
        future.result(0)
    assert told.value.stored == [BatchMetadata("t", 0, 10, 2)]
    assert [place.partition for place, _ in told.value.failed] == [1]


def test_a_batch_that_failed_as_one_raises_that_error() -> None:
    records = RecordSet("t", Monitor())
    late = errors.DeliveryTimedOut("late")
    resolve([BatchOutcome(split(records, (0, 1), (1, 1)), error=late)])
    assert isinstance(BatchFuture(records).exception(0), errors.DeliveryTimedOut)


# -- threads ---------------------------------------------------------------------------------------


def race() -> bool:
    """Let four threads send while this one takes; return whether every future knows its own
    record.
    """
    pool = BufferPool(1 << 40)
    accumulator = accumulator_of(pool, 20_000)
    producer = Producer.__new__(Producer)
    producer._fast = {"t": accumulator}

    def slow(topic: str, value: bytes, *_: Any) -> SendFuture | None:
        return accumulator.append(value, size=len(value) + 16)

    producer._send_slow = slow  # type: ignore[method-assign, assignment]
    sent: list[list[tuple[bytes, SendFuture]]] = [[] for _ in range(4)]

    def send(number: int) -> None:
        for i in range(3000):
            value = b"%d-%d" % (number, i)
            sent[number].append((value, producer.send("t", value)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    taken: list[RecordSet] = []

    def take() -> None:
        accumulator.seal(1 << 60)
        while accumulator.sealed:
            taken.append(accumulator.sealed.popleft())

    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            take()
        take()
    finally:
        sys.setswitchinterval(before)
    stored = [value for records in taken for value in records.values]
    ordered = [
        [value for value in stored if value.startswith(b"%d-" % number)]
        == [b"%d-%d" % (number, i) for i in range(3000)]
        for number in range(4)
    ]
    known = [
        future._records.values[future._index] is value
        for each in sent
        for value, future in each
        if future._index is not None and future._index < len(future._records.values)
    ]
    size = sum(records.size for records in taken)
    return len(known) == 12_000 and all(known) and all(ordered) and size == pool.used


def test_threads_that_send_at_once_and_the_one_that_takes_exclude_each_other() -> None:
    assert all(race() for _ in range(3))


def test_a_spin_lock_is_released_whatever_was_raised() -> None:
    lock = SpinLock()

    def inside() -> None:
        with lock:
            assert not lock.tokens
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inside()
    assert len(lock.tokens) == 1
