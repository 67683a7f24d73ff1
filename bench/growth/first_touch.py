"""Topics that a producer has not seen: one record to each, from a new producer.

Each topic has one partition.  Another producer of the process has sent before, so neither modules
nor the server are cold.
"""

from __future__ import annotations

from pathlib import Path

from bench.growth import clients
from bench.growth.nodes import PkNode, Spent
from bench.growth.rows import Figures, told
from bench.kafka.side import KafkaSide
from bench.sides import Side

_WARM = "warm"


def pk(topics: int, folder: Path) -> Figures:
    """Measure one pk node."""
    return _measured(PkNode(), topics, folder)


def kafka(topics: int, folder: Path) -> Figures:
    """Measure one Kafka broker and librdkafka's producer."""
    return _measured(KafkaSide(), topics, folder)


def _measured(side: Side, topics: int, folder: Path) -> Figures:
    side.start(folder)
    try:
        names = [(f"touched-{number}", 1) for number in range(topics)]
        for name, count in [(_WARM, 1), *names]:
            side.create_topic(name, count)
        clients.write(side, [(_WARM, 1)])
        found: Figures = {}
        # the second time the topics have logs: what differs is the first append to each
        for part in ("touch", "second_touch"):
            spent = Spent(side)
            clients.write(side, names)
            found |= told(spent.figures(part))
        return found
    finally:
        side.stop()
