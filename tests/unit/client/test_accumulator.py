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
from pk.client.accumulator import Budget, Chunk, RecordAccumulator, Turnstile
from pk.client.futures import BatchFuture, Delivery, SendFuture, resolve
from pk.client.partitioner import Sticky, partition_of
from pk.client.producer import Producer
from pk.client.producer_batch import Piece, ProducerBatch
from pk.client.rows import (
    batch_limit,
    binary_column,
    cuts_by_size,
    normalise,
    place,
    size_of,
    sizes,
    split,
)
from pk.client.waiting import Monitor
from pk.clock import SystemClock
from pk.log.columns import decode
from pk.types import BatchMetadata, PartitionKey, RecordMetadata

BYTES = st.one_of(st.none(), st.binary(max_size=20))
KEY = PartitionKey("00000000-0000-4000-8000-000000000001", 0)


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
    explicit = chosen.fill_null(-1).to_numpy()
    delivery = Delivery("t", Monitor())
    delivery.count = len(rows)
    where = place(normal, explicit, 5, sticky(), range(5), 100)
    seen: dict[int, tuple[int, int]] = {}
    for partition, first, part in split(normal, where, delivery):
        run = [int(value) for value in part.column("value").to_pylist()]
        assert run == sorted(run)
        seen.update({row: (partition, first + at) for at, row in enumerate(run)})
        delivery.add_part(partition, first, part.num_rows)
    delivery.split = True
    assert sorted(seen) == list(range(len(rows)))
    stuck = {seen[i][0] for i, (key, p) in enumerate(rows) if p is None and key is None}
    assert len(stuck) <= 1
    for row, (key, partition) in enumerate(rows):
        if partition is not None:
            assert seen[row][0] == partition
        elif key is not None:
            assert seen[row][0] == partition_of(key, 5)
        found = delivery.part_of(row)
        assert found is not None
        part_found, at = found
        assert (part_found.partition, part_found.first + at) == seen[row]


def test_a_partition_that_does_not_exist_is_refused() -> None:
    rows, _ = normalise(pa.record_batch([pa.array([b"x", b"y"])], names=["value"]), 0)
    for bad in (7, -2):
        with pytest.raises(errors.InvalidPartitions):
            place(rows, np.array([0, bad], np.int32), 3, sticky(), range(3), 10)


HEADERS = st.lists(st.tuples(st.text("ab", max_size=3), BYTES), max_size=3)


@given(st.lists(st.tuples(BYTES, BYTES, HEADERS), min_size=1, max_size=30))
def test_counted_size_covers_what_a_batch_takes(rows: list[Any]) -> None:
    """buffer_memory and batch_size count at least what the encoder writes, headers of batches
    aside.
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
    delivery = Delivery("t", Monitor())
    piece = Piece(normal, total, delivery.add_part(0, 0, len(rows)), 5, 0, 0)
    encoded = b"".join(ProducerBatch("t", KEY, piece).encode("none", 3))
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
    part = Delivery("t", Monitor()).add_part(0, 0, 1)
    batch = ProducerBatch("t", KEY, Piece(rows, 10, part, 7, 0, 0))
    batch.producer_id, batch.epoch, batch.sequence = 4, 0, 9
    first = batch.encode("lz4", 3)
    batch.epoch, batch.sequence = 1, 0
    second = batch.encode("lz4", 3)
    assert second[1:] == first[1:]
    again = decode(b"".join(second), decoded_bytes_max=1000)
    assert again.column("timestamp").cast("int64").to_pylist() == [7]


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_reserved_before_a_record_is_taken_and_given_back_when_sealed() -> None:
    budget = Budget(1000)
    accumulator = RecordAccumulator("t", 400, sticky(), budget, Monitor())
    clock = SystemClock()

    def offer(size: int) -> SendFuture | None:
        return accumulator.offer(bytes(size), None, None, None, None, None, size, clock)

    taken = 0
    while offer(100) is not None:
        taken += 1
        assert budget.used <= 1000
    assert taken == 10
    chunks = accumulator.take(0)
    assert [(len(c.values), c.size) for c in chunks if isinstance(c, Chunk)] == [
        (4, 400), (4, 400), (2, 200),
    ]  # fmt: skip
    assert budget.used == 1000
    budget.release(400)
    assert offer(100) is not None
    accumulator.close(errors.ClosedError("closed"))
    with pytest.raises(errors.ClosedError):
        offer(1)


def test_one_record_larger_than_all_memory_passes_alone() -> None:
    budget = Budget(10)
    assert budget.try_reserve(50)
    assert not budget.try_reserve(1)
    budget.release(50)
    assert budget.try_reserve(10)


def test_waiting_for_memory_ends_when_it_is_released() -> None:
    budget = Budget(10)
    assert budget.try_reserve(10)
    waiter = threading.Thread(target=budget.wait, args=(5, 30))
    waiter.start()
    budget.release(10)
    waiter.join(10)
    assert not waiter.is_alive()


# -- futures ---------------------------------------------------------------------------------------


def chunk_of(count: int) -> Chunk:
    chunk = Chunk("t", Monitor())
    chunk.count = count
    chunk.stamp_ms = 5
    return chunk


def future_of(chunk: Chunk, index: int) -> SendFuture:
    return SendFuture(chunk, index)


def test_a_future_knows_its_record_through_any_split() -> None:
    chunk = chunk_of(4)
    told: list[Any] = []
    chunk.on_delivery = {i: lambda *each: told.append(each) for i in (0, 3)}
    futures = [future_of(chunk, i) for i in range(4)]
    assert not any(future.done() for future in futures)
    with pytest.raises(TimeoutError):
        futures[0].result(0)
    chunk.order = np.array([1, 3, 0, 2])
    chunk.inverse = np.array([2, 0, 3, 1])
    one, two = chunk.add_part(7, 0, 2), chunk.add_part(8, 2, 2)
    chunk.split = True
    called: list[Any] = []
    futures[1].add_done_callback(called.append)
    resolve([one], [100])
    assert called == [futures[1]]
    assert futures[1].result(0) == RecordMetadata("t", 7, 100, 5)
    assert futures[3].result(0) == RecordMetadata("t", 7, 101, 5)
    assert not futures[0].done()
    failure = errors.StorageFull("full")
    resolve([two], [-1], error=failure)
    assert futures[0].exception(0) is failure
    with pytest.raises(errors.StorageFull):
        futures[2].result(0)
    assert told == [(RecordMetadata("t", 7, 101, 5), None), (None, failure)]
    assert not futures[0].cancelled()


class Watched(Monitor):
    """Asks, whenever the waiting are woken, what they would see."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.look = look
        self.seen: list[Any] = []

    def notify_all(self) -> None:
        self.seen.append(self.look())
        super().notify_all()


def test_who_is_woken_finds_a_delivery_settled_only_when_its_callbacks_have_returned() -> None:
    """What flush waits for: the last of a million callbacks, too."""
    told: list[Any] = []
    lock = Watched(lambda: (chunk.done, chunk.settled, len(told)))
    chunk = Chunk("t", lock)
    chunk.count = 4

    def callback(*each: Any) -> None:
        assert not chunk.settled
        told.append(each)
        raise SystemExit  # concerns nobody else

    chunk.on_delivery = dict.fromkeys(range(3), callback)
    parts = [chunk.add_part(0, 0, 2), chunk.add_part(1, 2, 2)]
    chunk.split = True
    futures = [future_of(chunk, index) for index in range(4)]
    futures[3].add_done_callback(callback)
    resolve(parts[:1], [10])
    assert (chunk.done, chunk.settled, len(told)) == (False, False, 2)
    resolve(parts[1:], [20])
    assert lock.seen == [
        (False, False, 0), (False, False, 2), (True, False, 2), (True, True, 4),
    ]  # fmt: skip
    assert futures[2].result(0).offset == 20


def test_a_batch_partly_stored_says_what_was_and_what_was_not() -> None:
    chunk = chunk_of(3)
    parts = [chunk.add_part(0, 0, 2), chunk.add_part(1, 2, 1)]
    chunk.split = True
    future = BatchFuture(chunk)
    called: list[Any] = []
    future.add_done_callback(called.append)
    resolve(parts[:1], [10], append_time_ms=99)
    assert not future.done()
    resolve(parts[1:], [-1], error=errors.RecordTooLarge("too large"))
    assert called == [future]
    with pytest.raises(errors.PartlyStored) as told:
        future.result(0)
    assert told.value.stored == [BatchMetadata("t", 0, 10, 2)]
    assert [place.partition for place, _ in told.value.failed] == [1]


def test_a_batch_that_failed_as_one_raises_that_error() -> None:
    chunk = chunk_of(2)
    parts = [chunk.add_part(0, 0, 1), chunk.add_part(1, 1, 1)]
    chunk.split = True
    resolve(parts, [-1, -1], error=errors.DeliveryTimedOut("late"))
    assert isinstance(BatchFuture(chunk).exception(0), errors.DeliveryTimedOut)


# -- the door --------------------------------------------------------------------------------------


def race() -> bool:
    """Four threads send while this one takes; whether every future knows its own record."""
    budget = Budget(1 << 40)
    accumulator = RecordAccumulator("t", 20_000, sticky(), budget, Monitor())
    clock = SystemClock()
    producer = Producer.__new__(Producer)
    producer._fast = {"t": accumulator}
    producer._send_slow = lambda topic, value, *_: accumulator.offer(  # type: ignore[method-assign]
        value, None, None, None, None, None, len(value) + 16, clock
    )
    sent: list[list[tuple[bytes, SendFuture]]] = [[] for _ in range(4)]

    def send(number: int) -> None:
        for i in range(3000):
            value = b"%d-%d" % (number, i)
            sent[number].append((value, producer.send("t", value)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    taken: list[Any] = []
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken += accumulator.take(1 << 60)
        taken += accumulator.take(1 << 60)
    finally:
        sys.setswitchinterval(before)
    stored = [value for chunk in taken for value in chunk.values]
    ordered = [
        [value for value in stored if value.startswith(b"%d-" % number)]
        == [b"%d-%d" % (number, i) for i in range(3000)]
        for number in range(4)
    ]
    known = [
        future._delivery.values[future._index] is value  # type: ignore[attr-defined]
        for each in sent
        for value, future in each
        if future._index < len(future._delivery.values)  # type: ignore[attr-defined]
    ]
    size = sum(chunk.size for chunk in taken)
    return len(known) == 12_000 and all(known) and all(ordered) and size == budget.used


def test_threads_that_send_at_once_and_the_one_that_takes_exclude_each_other() -> None:
    assert all(race() for _ in range(3))


def test_a_turnstile_gives_back_whatever_was_raised() -> None:
    turnstile = Turnstile()

    def inside() -> None:
        with turnstile:
            assert not turnstile.tokens
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inside()
    assert len(turnstile.tokens) == 1
