"""A side: one system under test, its processes, and when it may be timed again after a stop.

`settle` is rule M2: it ends only when the side has answered metadata, a record of now was stored
and returned on every partition of a probe topic, and the leader epochs seen then are the same two
seconds later.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from bench import processes
from bench.runs import Sample

PARTITIONS = 4
PROBE_TOPIC = "bench-probe"
STEADY_S = 2.0
SETTLE_TIMEOUT_S = 90.0


class SideFailed(Exception):
    """A side did not start, or did not come back after a stop."""


class Side(Protocol):
    """pk, or Apache Kafka."""

    name: str

    @property
    def description(self) -> str: ...

    def start(self, folder: Path) -> None: ...

    def stop(self) -> None: ...

    def pids(self) -> list[int]:
        """Every process of the side's server."""
        ...

    def probe(self) -> dict[int, int]:
        """Metadata; a record stored and returned on each partition; the leader epochs."""
        ...

    def create_topic(self, topic: str, partitions: int = PARTITIONS) -> None: ...

    def delete_topic(self, topic: str) -> None: ...

    def produce(
        self, topic: str, values: Path, records: int, compression: str, mode: str
    ) -> Sample: ...

    def consume(self, topic: str, records: int, mode: str) -> Sample: ...

    def latency(self, topic: str, records: int) -> Sample:
        """p99 in ms of one record in flight at a time, from before it is sent to its receipt."""
        ...


def freeze(side: Side) -> None:
    processes.freeze(side.pids())


def thaw(side: Side) -> None:
    processes.thaw(side.pids())
    settle(side)


def settle(side: Side) -> None:
    """Rule M2.  Raises `SideFailed` if the side does not come back."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            before = side.probe()
            time.sleep(STEADY_S)
            if side.probe() == before:
                return
        except Exception as trouble:  # whatever the client library raises while the side comes back
            last = trouble
            time.sleep(0.2)
    raise SideFailed(f"{side.name} did not settle within {SETTLE_TIMEOUT_S:.0f} s: {last!r}")
