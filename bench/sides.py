"""A side: one system under test, its processes, and when it may be timed again after a stop.

`settle` implements bench M2.  It ends only when the side has answered metadata, has stored and
returned a new record on every partition of a probe topic, and the leader epochs seen then are the
same two seconds later.  A Spark session is a party too: it is stopped with its side, and has to
answer a query before it is timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bench import processes
from bench.runs import Sample

PARTITIONS = 4
PROBE_TOPIC = "bench-probe"
STEADY_S = 2.0
CLUSTER_NODES = 3
SETTLE_TIMEOUT_S = 90.0


class SideFailed(Exception):
    """A side did not start, or did not work again after a stop."""


class Party(Protocol):
    """Processes that must be stopped while others are measured."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    def start(self, folder: Path) -> None: ...

    def stop(self) -> None: ...

    def pids(self) -> list[int]:
        """Return every process of it, parents first."""
        ...

    def probe(self) -> dict[int, int]:
        """A side: metadata; a record stored and returned on each partition; the leader epochs."""
        ...


class Side(Party, Protocol):
    """pk, or Apache Kafka."""

    kind: str  #: of its clients: pk or kafka
    address: str

    def create_topic(
        self, topic: str, partitions: int = PARTITIONS, configs: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic; returns when every partition has a leader."""
        ...

    def grow_topic(self, topic: str, partitions: int) -> None:
        """Grow a topic; a client may not know the new partitions yet when it returns."""
        ...

    def delete_topic(self, topic: str) -> None: ...

    def alter_topic(self, topic: str, configs: Mapping[str, str]) -> None: ...

    def produce(
        self,
        topic: str,
        values: Path,
        records: int,
        compression: str,
        mode: str,
        batch_bytes: int | None = None,
    ) -> Sample: ...

    def fill_evenly(self, topic: str, partitions: int, each: int) -> None:
        """Produce `each` records of 100 bytes to every partition; untimed."""
        ...

    def consume(
        self,
        topic: str,
        records: int,
        mode: str,
        partitions: int = PARTITIONS,
        starts: Sequence[int] = (),
    ) -> Sample:
        """Consume from the beginning, or from `starts` by partition."""
        ...

    def latency(self, topic: str, records: int) -> Sample:
        """Return p99 in ms of one record in flight at a time, from before it is sent to its
        receipt.
        """
        ...

    def transaction_latency(self, topic: str, records: int, mode: str) -> Sample:
        """Return p99 in ms from the begin of a transaction of one record to the record's receipt
        with read_committed, one at a time.
        """
        ...

    def background(self, topic: str, values: Path, records_s: int) -> list[str]:
        """Return the command of a client that produces at a rate until it is ended; it prints
        windows (`N records sent, R records/sec`).
        """
        ...

    def small(self, topic: str, clients: int, seconds: float) -> Sample:
        """Return the acknowledged requests per second of clients with one record in flight each."""
        ...

    def ends(self, topic: str) -> list[int]:
        """Return where each partition ends."""
        ...

    def segment_files(self, topic: str) -> list[Path]:
        """Return log and index files of all partitions on disk."""
        ...


class TieredSide(Side, Protocol):
    """pk with a tier."""

    def tier(self, topic: str) -> Path:
        """Return the folder of the topic's table, once it holds the whole log."""
        ...

    def local_starts(self, topic: str) -> list[int]:
        """Return where each partition's local log begins."""
        ...


class ClusterSide(Side, Protocol):
    """Three nodes, each controller and broker; topics have three replicas."""

    def leader(self, topic: str) -> int:
        """Return the node that leads partition 0."""
        ...

    def kill(self, node: int) -> None:
        """Send `kill -9` to all its processes."""
        ...

    def start_node(self, node: int) -> None: ...

    def freeze_node(self, node: int) -> None: ...

    def thaw_node(self, node: int) -> None: ...

    def stop_nodes(self) -> None:
        """Stop all nodes cleanly."""
        ...

    def start_nodes(self) -> None: ...

    def whole(self, topic: str) -> None:
        """Return when every partition has a leader and all replicas in sync."""
        ...

    def pulse(self, topic: str, request_timeout_ms: int) -> Pulse:
        """Return a producer that sends to partition 0 all the time."""
        ...


class Pulse:
    """Sends a record every `PULSE_S` with acks=all, from a thread, and notes the
    acknowledgements.
    """

    PULSE_S = 0.005

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._sent: list[float] = []
        self._news = threading.Condition()
        self._served: list[tuple[float, float]] = []  #: (sent, acknowledged), newest last

    def send(self, number: int) -> None:
        """Hand record `number` to the client library."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while not self.stop.wait(self.PULSE_S):
            self._sent.append(time.monotonic())
            self.send(len(self._sent) - 1)

    def answered(self, number: int, error: object) -> None:
        if error is None:
            with self._news:
                self._served.append((self._sent[number], time.monotonic()))
                self._news.notify_all()

    def served_after(self, begin: float, timeout_s: float) -> float:
        """Return when the first record sent after `begin` was acknowledged.  Raises
        `TimeoutError`.
        """
        with self._news:
            self._served.clear()
            deadline = time.monotonic() + timeout_s
            while True:
                for sent, acknowledged in self._served:
                    if sent > begin:
                        return acknowledged
                self._served.clear()
                if not self._news.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"{timeout_s:g} s")


def freeze(party: Party) -> None:
    processes.freeze(party.pids())


def thaw(party: Party) -> None:
    processes.thaw(party.pids())
    settle(party)


def settle(party: Party) -> None:
    """Wait until the side may be timed (bench M2).  Raises `SideFailed` if it does not work
    again.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            before = party.probe()
            time.sleep(STEADY_S)
            if party.probe() == before:
                return
        # any error that the client library raises while the side starts to work again
        except Exception as trouble:
            last = trouble
            time.sleep(0.2)
    raise SideFailed(f"{party.name} did not settle within {SETTLE_TIMEOUT_S:.0f} s: {last!r}")
