"""Small loads over many partitions: a record to each, and a reader of all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bench.growth.nodes import PATIENCE_S
from bench.sides import Side, SideFailed
from bench.values import VALUE_BYTES

#: Name of a topic, and how many partitions it has.
Topics = Sequence[tuple[str, int]]
_DELIVERY_MS = 300_000
_VALUE = bytes(VALUE_BYTES)


def write(side: Side, topics: Topics) -> None:
    """Write one record of 100 bytes to each partition; returns when all are acknowledged."""
    (_write_pk if side.kind == "pk" else _write_kafka)(side, topics)


def read(side: Side, topics: Topics, records: int) -> None:
    """Read all partitions from the beginning, until so many records came.

    Raises `SideFailed` if they do not come.
    """
    (_read_pk if side.kind == "pk" else _read_kafka)(side, topics, records)


def _write_pk(side: Side, topics: Topics) -> None:
    from pk import Producer

    with Producer(side.address, acks="all", delivery_timeout_ms=_DELIVERY_MS) as producer:
        sent = [
            producer.send(topic, _VALUE, partition=number)
            for topic, count in topics
            for number in range(count)
        ]
        for future in sent:
            future.result(timeout=PATIENCE_S)


def _read_pk(side: Side, topics: Topics, records: int) -> None:
    from pk import Consumer, TopicPartition

    places = [TopicPartition(topic, number) for topic, count in topics for number in range(count)]
    seen, deadline = 0, time.monotonic() + PATIENCE_S
    with Consumer(side.address, auto_offset_reset="earliest") as consumer:
        consumer.assign(places)
        while seen < records:
            if time.monotonic() > deadline:
                raise SideFailed(f"{seen} of {records} records came")
            seen += len(consumer.poll(0.5))


def _write_kafka(side: Side, topics: Topics) -> None:
    from confluent_kafka import Producer

    failed: list[Any] = []

    def delivered(error: Any, _: object) -> None:
        if error:
            failed.append(error)

    settings = {"bootstrap.servers": side.address, "acks": "all", "log_level": 0}
    producer = Producer(settings)
    for topic, count in topics:
        for number in range(count):
            producer.produce(
                topic, _VALUE, partition=number,
                on_delivery=delivered,
            )  # fmt: skip
        producer.poll(0)
    if left := producer.flush(PATIENCE_S) or failed:
        raise SideFailed(f"not all records were stored: {left}")


def _read_kafka(side: Side, topics: Topics, records: int) -> None:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    places = [
        TopicPartition(topic, number, OFFSET_BEGINNING)
        for topic, count in topics
        for number in range(count)
    ]
    settings = {"bootstrap.servers": side.address, "group.id": "growth", "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    seen, deadline = 0, time.monotonic() + PATIENCE_S
    try:
        consumer.assign(places)
        while seen < records:
            if time.monotonic() > deadline:
                raise SideFailed(f"{seen} of {records} records came")
            seen += sum(each.error() is None for each in consumer.consume(10_000, 0.5))
    finally:
        consumer.close()
