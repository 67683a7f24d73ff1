"""Partitions of one node: created, written, read, at rest, stopped, started and read again.

From `WIDE` partitions on, pk runs with `ulimit -n 4096`, so most of its files are closed.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

from bench import processes
from bench.growth import clients
from bench.growth.nodes import PkNode, Spent, at_rest, roles_of
from bench.growth.rows import Figures, told
from bench.kafka.side import KafkaSide
from bench.sides import Side, SideFailed

#: A topic has at most so many partitions.
TOPIC_PARTITIONS = 1_000
WIDE, WIDE_DESCRIPTORS = 30_000, 4_096
_REST_S = 20.0


def topics_of(partitions: int) -> Iterator[tuple[str, int]]:
    """Yield names of topics and how many partitions each has."""
    for first in range(0, partitions, TOPIC_PARTITIONS):
        yield f"growth-{first}", min(TOPIC_PARTITIONS, partitions - first)


def pk(partitions: int, folder: Path) -> Figures:
    """Measure one pk node with so many partitions."""
    node = PkNode(descriptors=WIDE_DESCRIPTORS if partitions >= WIDE else 0)
    node.start(folder)
    try:
        found = _life(node, partitions)
        found |= _again(node, partitions)
    finally:
        node.stop()
    said = node.said()
    for word in ("Too many open files", "offline"):
        if word in said:
            raise SideFailed(f"the node's log says {word!r}: {folder}")
    return found


def kafka(partitions: int, folder: Path) -> Figures:
    """Measure one Kafka broker with so many partitions."""
    side = KafkaSide()
    side.start(folder)
    try:
        return _life(side, partitions)
    finally:
        side.stop()


def _life(side: Side, partitions: int) -> Figures:
    """Create, write twice, read, rest."""
    topics = list(topics_of(partitions))
    spent = Spent(side)
    for topic, count in topics:
        side.create_topic(topic, count)
    found = told(spent.figures("create"))
    for name in ("first_write", "write"):
        spent = Spent(side)
        clients.write(side, topics)
        found |= told(spent.figures(name))
    spent = Spent(side)
    clients.read(side, topics, 2 * partitions)
    found |= told(spent.figures("read"))
    return found | at_rest(side, _REST_S)


def _again(node: PkNode, partitions: int) -> Figures:
    """Stop, start, and read what was written."""
    cpu_s = processes.cpu_s(roles_of(node).values())
    ended_s, begin = _children_s(), time.monotonic()
    node.end()
    found = {
        "stop_s": time.monotonic() - begin,
        "stop_cpu_s": max(0.0, _children_s() - ended_s - cpu_s),
    }
    begin = time.monotonic()
    node.begin()
    found["start_s"] = time.monotonic() - begin
    found["start_cpu_s"] = processes.cpu_s(roles_of(node).values())
    clients.read(node, list(topics_of(partitions)), 2 * partitions)
    found["served_s"] = time.monotonic() - begin
    found["served_cpu_s"] = processes.cpu_s(roles_of(node).values())
    return told(found)


def _children_s() -> float:
    """Return the CPU seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
