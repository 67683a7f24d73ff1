"""pk's clients under measurement, one mode per process: `python -m bench.pk_client MODE …`.

A client prints `open` when the warm-up is over and `close {figures}` at the end (`runs.py` reads
these lines).

  lists     produce: each batch is built from a Python list of `BATCH_ROWS` bytes while timed
  prebuilt  produce: the Arrow batches exist already
  random    produce: as prebuilt, with values that no codec compresses
  record    produce: `send` per record
  transactional  produce: as prebuilt, with a transaction for each batch of `BATCH_ROWS`
  paced     produce: `--rate` records a second in small batches, until the process is ended
  batches   consume: `poll_batches`, rows and value bytes counted in Arrow
  records   consume: record by record, value bytes counted in Python
  latency   one record in flight: sent, acknowledged and received before the next; p99 in ms
  transaction_latency  one record in a transaction: from begin_transaction to its receipt
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench import values as vocabulary

BATCH_ROWS = 10_000
#: Futures checked while sending: so many that the check never waits for batches in flight.
_OUTSTANDING = 256
#: Interval at which `paced` sends; it prints its rate as ProducerPerformance does.
_PACE_S = 0.01
_WINDOW_S = 5.0
_SHARES = {"p50_ms": 0.5, "value": 0.99, "p999_ms": 0.999}


def _say(kind: str, **figures: float) -> None:
    print(kind, json.dumps(figures), flush=True)


def _lists(path: Path) -> list[list[bytes]]:
    known = vocabulary.read(path)
    return [known[at : at + BATCH_ROWS] for at in range(0, len(known), BATCH_ROWS)]


def _random_lists() -> list[list[bytes]]:
    size = vocabulary.VALUE_BYTES
    noise = os.urandom(16 * BATCH_ROWS * size)
    values = [noise[at : at + size] for at in range(0, len(noise), size)]
    return [values[at : at + BATCH_ROWS] for at in range(0, len(values), BATCH_ROWS)]


def _batch(rows: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(rows, pa.binary())], names=["value"])


def _send_batches(producer: Any, topic: str, batches: Iterator[pa.RecordBatch]) -> int:
    """Send all batches and wait for all; raise an error of any part."""
    outstanding: deque[Any] = deque()
    sent = 0
    for batch in batches:
        outstanding.append(producer.send_batch(topic, batch))
        sent += batch.num_rows
        while len(outstanding) > _OUTSTANDING or (outstanding and outstanding[0].done()):
            outstanding.popleft().result(timeout=60)
    producer.flush(timeout_s=60)
    for future in outstanding:
        future.result(timeout=60)
    return sent


def _send_records(producer: Any, topic: str, rows: Iterator[bytes], count: int) -> int:
    """Call `send` once per record.  The futures are ignored; `_stored` checks the log instead."""
    send = producer.send
    for value in islice(rows, count):
        send(topic, value)
    producer.flush(timeout_s=60)
    return count


def _send_transactions(producer: Any, topic: str, batches: Iterator[pa.RecordBatch]) -> int:
    """Send each batch in a transaction of its own."""
    sent = 0
    for batch in batches:
        with producer.transaction():
            producer.send_batch(topic, batch)
        sent += batch.num_rows
    return sent


def _stored(given: argparse.Namespace) -> int:
    """Return how many records the topic has: every record of a run must be there, and none
    twice.
    """
    from pk import Consumer, TopicPartition

    consumer = Consumer(given.bootstrap)
    places = [TopicPartition(given.topic, number) for number in range(given.partitions)]
    stored = sum(consumer.end_offsets(places).values())
    consumer.close()
    return stored


def produce(given: argparse.Namespace) -> None:
    from pk import Producer

    lists = _random_lists() if given.mode == "random" else _lists(given.values)
    ready = [_batch(rows) for rows in lists]

    def load(producer: Any, count: int) -> int:
        turns = range(-(-count // BATCH_ROWS))
        if given.mode == "lists":
            return _send_batches(
                producer, given.topic, (_batch(lists[n % len(lists)]) for n in turns)
            )
        if given.mode == "transactional":
            return _send_transactions(producer, given.topic, (ready[n % len(ready)] for n in turns))
        if given.mode in ("prebuilt", "random"):
            return _send_batches(producer, given.topic, (ready[n % len(ready)] for n in turns))
        return _send_records(
            producer, given.topic, cycle(row for rows in lists for row in rows), count
        )

    options: dict[str, Any] = {"batch_size": given.batch_bytes} if given.batch_bytes else {}
    if given.mode == "transactional":
        options["transactional_id"] = given.topic
    before = _stored(given)
    with Producer(
        given.bootstrap, acks="all", compression=given.compression, **options
    ) as producer:
        if given.mode == "transactional":
            producer.init_transactions()
        warmed = load(producer, given.warm_up)
        gc.collect()
        _say("open")
        start = time.perf_counter()
        sent = load(producer, given.records - given.warm_up)
        elapsed = time.perf_counter() - start
        _say("close", value=sent / elapsed, records=sent)
    # A transaction has one more offset in each partition that it wrote to, for its marker.
    markers = (
        (warmed + sent) // BATCH_ROWS * given.partitions if "transactional_id" in options else 0
    )
    stored = _settled(given, before + warmed + sent) - before
    if not warmed + sent <= stored <= warmed + sent + markers:
        raise RuntimeError(f"{stored} are stored, {warmed + sent} were sent")


def _settled(given: argparse.Namespace, least: int) -> int:
    """Return how many records the topic has, once the last markers are written."""
    deadline = time.monotonic() + 10
    while (stored := _stored(given)) < least and time.monotonic() < deadline:
        time.sleep(0.05)
    return stored


def paced(given: argparse.Namespace) -> None:
    from pk import Producer

    rows = max(1, int(given.rate * _PACE_S))
    known = vocabulary.read(given.values)
    batches = cycle(_batch(known[at : at + rows]) for at in range(0, len(known) - rows, rows))
    futures: deque[Any] = deque()
    with Producer(given.bootstrap, acks="all", compression=given.compression) as producer:
        begin = told = time.perf_counter()
        sent = told_sent = 0
        for batch in batches:
            futures.append(producer.send_batch(given.topic, batch))
            sent += batch.num_rows
            while futures and (len(futures) > _OUTSTANDING or futures[0].done()):
                futures.popleft().result(timeout=60)
            now = time.perf_counter()
            if now - told >= _WINDOW_S:
                rate = (sent - told_sent) / (now - told)
                print(f"{sent - told_sent} records sent, {rate:.1f} records/sec", flush=True)
                told, told_sent = now, sent
            time.sleep(max(0.0, begin + sent / given.rate - now))


def consume(given: argparse.Namespace) -> None:
    from pk import Consumer, TopicPartition

    consumer = Consumer(given.bootstrap, auto_offset_reset="earliest")
    partitions = [TopicPartition(given.topic, number) for number in range(given.partitions)]
    consumer.assign(partitions)
    starts = [int(text) for text in given.starts.split(",")] if given.starts else []
    for partition in partitions:
        consumer.seek(partition, starts[partition.partition] if starts else 0)
    count = _count_batches if given.mode == "batches" else _count_records
    rows = size = 0
    opened, start = 0, 0.0
    deadline = time.monotonic() + 120
    for more, more_bytes in count(consumer):
        rows, size = rows + more, size + more_bytes
        if not opened and rows >= given.warm_up:
            opened, start = rows, time.perf_counter()
            _say("open")
        if rows >= given.records:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"{rows} of {given.records} records after 120 s")
    elapsed = time.perf_counter() - start
    if rows != given.records or size != rows * vocabulary.VALUE_BYTES:
        raise RuntimeError(f"read {rows} records with {size} bytes instead of {given.records}")
    _say("close", value=(rows - opened) / elapsed, records=rows - opened)
    consumer.close()


def latency(given: argparse.Namespace) -> None:
    from pk import Consumer, Producer, TopicPartition

    value = b"x" * vocabulary.VALUE_BYTES
    consumer = Consumer(given.bootstrap)
    consumer.assign([TopicPartition(given.topic, 0)])
    consumer.seek(TopicPartition(given.topic, 0), 0)
    taken: list[float] = []
    with Producer(given.bootstrap, acks="all", linger_ms=0) as producer:
        for number in range(given.records):
            if number == given.warm_up:
                gc.collect()
                taken.clear()
                _say("open")
            start = time.perf_counter()
            producer.send(given.topic, value, partition=0).result(timeout=60)
            records = consumer.poll(timeout_s=60)
            taken.append((time.perf_counter() - start) * 1000)
            if [record.offset for record in records] != [number]:
                raise RuntimeError(f"record {number}: {records!r}")
    taken.sort()
    at = {name: taken[int(len(taken) * share)] for name, share in _SHARES.items()}
    _say("close", records=len(taken), **at)
    consumer.close()


def transaction_latency(given: argparse.Namespace) -> None:
    from pk import Consumer, Producer, TopicPartition

    value = b"x" * vocabulary.VALUE_BYTES
    consumer = Consumer(given.bootstrap, isolation_level="read_committed")
    consumer.assign([TopicPartition(given.topic, 0)])
    consumer.seek(TopicPartition(given.topic, 0), 0)
    taken: list[float] = []
    with Producer(
        given.bootstrap, acks="all", linger_ms=0, transactional_id=given.topic
    ) as producer:
        producer.init_transactions()
        for number in range(given.records):
            if number == given.warm_up:
                gc.collect()
                taken.clear()
                _say("open")
            start = time.perf_counter()
            producer.begin_transaction()
            producer.send(given.topic, value, partition=0)
            producer.commit_transaction()
            while not (records := consumer.poll(timeout_s=60)):
                pass  # woken by the marker
            taken.append((time.perf_counter() - start) * 1000)
            if len(records) != 1:
                raise RuntimeError(f"record {number}: {records!r}")
    taken.sort()
    at = {name: taken[int(len(taken) * share)] for name, share in _SHARES.items()}
    _say("close", records=len(taken), **at)
    consumer.close()


def _data_bytes(column: pa.Array) -> int:
    """Return the bytes of a binary column's values, from its first and last offsets."""
    offsets = memoryview(column.buffers()[1]).cast("B").cast("i")
    size: int = offsets[column.offset + len(column)] - offsets[column.offset]
    return size


def _count_batches(consumer: Any) -> Iterator[tuple[int, int]]:
    while True:
        rows = size = 0
        for _, batch in consumer.poll_batches(timeout_s=1.0):
            rows += batch.num_rows
            size += _data_bytes(batch.column("value"))
        yield rows, size


def _count_records(consumer: Any) -> Iterator[tuple[int, int]]:
    while True:
        records = consumer.poll(timeout_s=1.0)
        size = 0
        for record in records:
            size += len(record.value)
        yield len(records), size


_MODES = {
    "lists": produce,
    "prebuilt": produce,
    "random": produce,
    "record": produce,
    "transactional": produce,
    "paced": paced,
    "batches": consume,
    "records": consume,
    "latency": latency,
    "transaction_latency": transaction_latency,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=_MODES)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--records", type=int, default=0, help="warm-up included")
    parser.add_argument("--rate", type=float, default=0.0, help="paced: records a second")
    parser.add_argument("--batch-bytes", type=int, help="batch_size instead of the default")
    parser.add_argument("--starts", default="", help="offsets to consume from, by partition")
    parser.add_argument("--warm-up", type=int, default=1_000_000)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--values", type=Path)
    given = parser.parse_args()
    _MODES[given.mode](given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
