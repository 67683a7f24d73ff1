"""pk's clients under measurement, one mode a process: `python -m bench.pk_client MODE …`.

Prints `open` when the warm-up is over and `close {figures}` at the end (`runs.py` reads it).

  lists     produce: each batch is built from a Python list of `BATCH_ROWS` bytes while timed
  prebuilt  produce: the Arrow batches exist already
  record    produce: `send` per record
  batches   consume: `poll_batches`, rows and value bytes counted in Arrow
  records   consume: record by record, value bytes counted in Python
  latency   one record in flight: sent, acknowledged and received before the next; p99 in ms
"""

from __future__ import annotations

import argparse
import gc
import json
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
#: Futures looked at while sending: enough that the look never waits for what is in flight.
_OUTSTANDING = 256
_SHARES = {"p50_ms": 0.5, "value": 0.99, "p999_ms": 0.999}


def _say(kind: str, **figures: float) -> None:
    print(kind, json.dumps(figures), flush=True)


def _lists(path: Path) -> list[list[bytes]]:
    known = vocabulary.read(path)
    return [known[at : at + BATCH_ROWS] for at in range(0, len(known), BATCH_ROWS)]


def _batch(rows: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(rows, pa.binary())], names=["value"])


def _send_batches(producer: Any, topic: str, batches: Iterator[pa.RecordBatch]) -> int:
    """Send all, wait for all; an error of any part is raised."""
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
    """`send` per record; nobody looks at the futures, `_check_stored` looks at the log instead."""
    send = producer.send
    for value in islice(rows, count):
        send(topic, value)
    producer.flush(timeout_s=60)
    return count


def _check_stored(given: argparse.Namespace, sent: int) -> None:
    """Every record of the run is in the topic, none twice."""
    from pk import Consumer, TopicPartition

    consumer = Consumer(given.bootstrap)
    places = [TopicPartition(given.topic, number) for number in range(given.partitions)]
    stored = sum(consumer.end_offsets(places).values())
    consumer.close()
    if stored != sent:
        raise RuntimeError(f"{stored} records are stored, {sent} were sent")


def produce(given: argparse.Namespace) -> None:
    from pk import Producer

    lists = _lists(given.values)
    ready = [_batch(rows) for rows in lists]

    def load(producer: Any, count: int) -> int:
        turns = range(-(-count // BATCH_ROWS))
        if given.mode == "lists":
            return _send_batches(
                producer, given.topic, (_batch(lists[n % len(lists)]) for n in turns)
            )
        if given.mode == "prebuilt":
            return _send_batches(producer, given.topic, (ready[n % len(ready)] for n in turns))
        return _send_records(
            producer, given.topic, cycle(row for rows in lists for row in rows), count
        )

    with Producer(given.bootstrap, acks="all", compression=given.compression) as producer:
        warmed = load(producer, given.warm_up)
        gc.collect()
        _say("open")
        start = time.perf_counter()
        sent = load(producer, given.records - given.warm_up)
        elapsed = time.perf_counter() - start
        _say("close", value=sent / elapsed, records=sent)
    _check_stored(given, warmed + sent)


def consume(given: argparse.Namespace) -> None:
    from pk import Consumer, TopicPartition

    consumer = Consumer(given.bootstrap, auto_offset_reset="earliest")
    partitions = [TopicPartition(given.topic, number) for number in range(given.partitions)]
    consumer.assign(partitions)
    for partition in partitions:
        consumer.seek(partition, 0)
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


def _data_bytes(column: pa.Array) -> int:
    """Bytes of a binary column's values: what its first and last offsets span."""
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
    "record": produce,
    "batches": consume,
    "records": consume,
    "latency": latency,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=_MODES)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--records", type=int, required=True, help="warm-up included")
    parser.add_argument("--warm-up", type=int, default=1_000_000)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--values", type=Path)
    given = parser.parse_args()
    _MODES[given.mode](given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
