"""confluent-kafka under measurement: `python -m bench.kafka.confluent_client MODE`.

The modes are `record`, `records` and `transaction_latency`, as in bench/pk_client.

Tuned: the producer with batches of 1 MiB and linger 5 ms; the consumer with
`queued.min.messages=10000000` and `fetch.queue.backoff.ms=1`, read with `consume(10000)`, which is
several times as fast as `poll`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bench import values as vocabulary

PRODUCER = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    "batch.size": 1 << 20,
    "batch.num.messages": 10_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1 << 20,
    "log_level": 0,
}
CONSUMER = {
    "queued.min.messages": 10_000_000,
    "queued.max.messages.kbytes": 1 << 20,
    "fetch.queue.backoff.ms": 1,
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "group.id": "bench",
    "log_level": 0,
}


def _say(kind: str, **figures: float) -> None:
    print(kind, json.dumps(figures), flush=True)


def produce(given: argparse.Namespace) -> None:
    rows = cycle(vocabulary.read(given.values))
    settings = {"bootstrap.servers": given.bootstrap, "compression.type": given.compression}
    producer = Producer({**PRODUCER, **settings})

    def load(count: int) -> None:
        send, poll = producer.produce, producer.poll
        for value in islice(rows, count):
            while True:
                try:
                    send(given.topic, value)
                    break
                except BufferError:
                    poll(0.01)
        if producer.flush(60):
            raise TimeoutError("not all records were acknowledged within 60 s")

    load(given.warm_up)
    gc.collect()
    _say("open")
    start = time.perf_counter()
    records = given.records - given.warm_up
    load(records)
    _say("close", value=records / (time.perf_counter() - start), records=records)
    _check_stored(given)


def _check_stored(given: argparse.Namespace) -> None:
    """Check that every record of the run is in the topic, and none twice."""
    consumer = Consumer({**CONSUMER, "bootstrap.servers": given.bootstrap})
    places = [TopicPartition(given.topic, number) for number in range(given.partitions)]
    stored = sum(consumer.get_watermark_offsets(place, timeout=10)[1] for place in places)
    consumer.close()
    if stored != given.records:
        raise RuntimeError(f"{stored} records are stored, {given.records} were sent")


def consume(given: argparse.Namespace) -> None:
    consumer = Consumer({**CONSUMER, "bootstrap.servers": given.bootstrap})
    consumer.assign([TopicPartition(given.topic, number, 0) for number in range(given.partitions)])
    rows = size = opened = 0
    start = time.perf_counter()
    while rows < given.records:
        messages: Any = consumer.consume(10_000, 5.0)
        if not messages:
            raise TimeoutError(f"{rows} of {given.records} records")
        for message in messages:
            size += len(message.value())
        rows += len(messages)
        if not opened and rows >= given.warm_up:
            opened, start = rows, time.perf_counter()
            _say("open")
    elapsed = time.perf_counter() - start
    if size != rows * vocabulary.VALUE_BYTES:
        raise RuntimeError(f"read {rows} records with {size} bytes")
    _say("close", value=(rows - opened) / elapsed, records=rows - opened)


def transaction_latency(given: argparse.Namespace) -> None:
    value = b"x" * vocabulary.VALUE_BYTES
    settings = {**PRODUCER, "bootstrap.servers": given.bootstrap, "linger.ms": 0}
    producer = Producer({**settings, "transactional.id": given.topic})
    producer.init_transactions()
    consumer = Consumer(
        {
            **CONSUMER,
            "bootstrap.servers": given.bootstrap,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 5_000,
        }
    )
    consumer.assign([TopicPartition(given.topic, 0, 0)])
    taken: list[float] = []
    for number in range(given.records):
        if number == given.warm_up:
            gc.collect()
            taken.clear()
            _say("open")
        start = time.perf_counter()
        producer.begin_transaction()
        producer.produce(given.topic, value, partition=0)
        producer.commit_transaction()
        message = consumer.poll(60)
        taken.append((time.perf_counter() - start) * 1000)
        if message is None or message.error() is not None:
            raise RuntimeError(f"record {number}: {message and message.error()}")
    taken.sort()
    shares = {"p50_ms": 0.5, "value": 0.99, "p999_ms": 0.999}
    at = {name: taken[int(len(taken) * share)] for name, share in shares.items()}
    _say("close", records=len(taken), **at)
    consumer.close()


_MODES = {"record": produce, "records": consume, "transaction_latency": transaction_latency}


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
