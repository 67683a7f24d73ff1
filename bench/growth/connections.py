"""Connections of one node: consumers that wait for records.

pk's consumers of a process share the connection for metadata, so each has one connection.

At work, each of four partitions gets one record, and every consumer that waits at it receives the
record.  A librdkafka consumer has two connections: to the bootstrap address and to the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.growth import clients
from bench.growth.nodes import PATIENCE_S, PkNode, Spent, at_rest, held
from bench.growth.rows import Figures
from bench.kafka.side import KafkaSide
from bench.sides import PARTITIONS, Side, SideFailed

TOPIC = "waiting"
#: A broker gives one address half of its connections, which take 35 % of the descriptors, three
#: each (rule L17).
WIDE, WIDE_DESCRIPTORS = 2_000, 40_000
_REST_S = 20.0


def pk(consumers: int, folder: Path) -> Figures:
    """Measure one pk node."""
    from pk import Consumer, TopicPartition

    def consumer(address: str, number: int) -> Any:
        made = Consumer(address, auto_offset_reset="latest")
        made.assign([TopicPartition(TOPIC, number % PARTITIONS)])
        made.poll(0)
        return made

    node = PkNode(descriptors=WIDE_DESCRIPTORS if consumers >= WIDE else 0)
    return _measured(node, consumers, folder, consumer, lambda each: len(each.poll(0)))


def kafka(consumers: int, folder: Path) -> Figures:
    """Measure one Kafka broker."""
    from confluent_kafka import OFFSET_END, Consumer, TopicPartition

    settings = {"group.id": "waiting", "enable.auto.commit": False, "log_level": 0}

    def consumer(address: str, number: int) -> Any:
        made = Consumer({"bootstrap.servers": address, **settings})
        made.assign([TopicPartition(TOPIC, number % PARTITIONS, OFFSET_END)])
        made.poll(0)
        return made

    def polled(each: Any) -> int:
        message = each.poll(0)
        return int(message is not None and message.error() is None)

    return _measured(KafkaSide(), consumers, folder, consumer, polled)


def _measured(
    side: Any,
    count: int,
    folder: Path,
    consumer: Callable[[str, int], Any],
    polled: Callable[[Any], int],
) -> Figures:
    side.start(folder)
    opened: list[Any] = []
    try:
        side.create_topic(TOPIC, PARTITIONS)
        clients.write(side, [(TOPIC, PARTITIONS)])
        before = held(side)
        spent = Spent(side)
        for number in range(count):
            opened.append(consumer(side.address, number))
        found = spent.figures("open")
        found |= at_rest(side, _REST_S)
        found |= {
            "growth_mb": found["memory_mb"] - before["memory_mb"],
            "growth_descriptors": found["descriptors"] - before["descriptors"],
        }
        spent = Spent(side)
        _served(side, opened, polled)
        return found | spent.figures("work")
    finally:
        for each in opened:
            each.close()
        side.stop()


def _served(side: Side, opened: list[Any], polled: Callable[[Any], int]) -> None:
    """Write, and return when every consumer has got a record."""
    clients.write(side, [(TOPIC, PARTITIONS)])
    waiting, deadline = list(opened), time.monotonic() + PATIENCE_S
    while waiting:
        if time.monotonic() > deadline:
            raise SideFailed(f"{len(waiting)} of {len(opened)} consumers got nothing")
        waiting = [each for each in waiting if not polled(each)]
        time.sleep(0.02)
