"""How many replicas a broker can hold, and how many more that leaves.

A broker states its bound (`partitions_max`) in each heartbeat.  The active controller refuses what
would put more replicas on a broker, before it writes a record.  Each replica needs memory there,
and a broker without memory fails all of them.

The bound is soft state of one term, as all reports are (`reports.py`).  A broker that has sent no
heartbeat in this term has no bound yet.

A decision takes from one `Room` for all its topics, so the topics of one request count together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pk import errors
from pk.server.controller.reports import Reports
from pk.server.metadata.image import MetadataImage
from pk.types import NodeId


class Room:
    """How many more replicas each broker can take."""

    def __init__(self, image: MetadataImage, reports: Reports) -> None:
        self._max = {
            broker: report.partitions_max
            for broker, report in reports.items()
            if report.partitions_max
        }
        self._left = {
            broker: most - sum(map(len, image.assigned.get(broker, {}).values()))
            for broker, most in self._max.items()
        }

    def has(self, broker: NodeId) -> bool:
        """Return whether the broker can take another replica."""
        return self._left.get(broker, 1) > 0

    def take(self, placed: Iterable[Sequence[NodeId]]) -> None:
        """Take the room for new replicas, given by partition.

        Raises `TooManyPartitions` if a broker has less; then nothing is taken.
        """
        wanted: dict[NodeId, int] = {}
        for members in placed:
            for member in members:
                wanted[member] = wanted.get(member, 0) + 1
        for broker, count in sorted(wanted.items()):
            left = self._left.get(broker, count)
            if count > left:
                most = self._max[broker]
                raise errors.TooManyPartitions(
                    f"broker {broker} holds {most - left} replicas and may hold {most} "
                    f"(partitions_max), so it cannot take {count} more: add brokers, delete topics "
                    "or raise partitions_max",
                    broker=str(broker),
                )
        for broker, count in wanted.items():
            if broker in self._left:
                self._left[broker] -= count
