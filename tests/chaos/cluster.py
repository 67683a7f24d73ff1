"""Three nodes under test, a network between them that can be cut, and a consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

from ledger import Read, number_of
from proxy import Link, Network

from pk import AdminClient, Consumer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import PartitionDescription
from pk.clock import block_s, monotonic_s

ASK_S = 3.0
POLL_S = 0.2


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def links_between(addresses: Mapping[int, str], draw: Callable[[], int]) -> list[Link]:
    """Return the links from each node to each other one; `draw` gives a port for each."""
    return [
        Link(source, target, draw(), port_of(addresses[target]))
        for source, target in permutations(addresses, 2)
    ]


class TestedCluster(EmbeddedCluster):
    """Nodes that reach each other through proxies; clients reach them directly."""

    __test__ = False

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(directory, settings=settings)
        links: list[Link] = []
        for option, addresses in (
            ("peer_addresses", self.brokers),
            ("peer_controller_addresses", self.controllers),
        ):
            drawn = links_between(addresses, self.ports.draw)
            links += drawn
            for node, server in self.nodes.items():
                server.settings[option] = ",".join(
                    f"{link.target}=127.0.0.1:{link.port}" for link in drawn if link.source == node
                )
        self.network = Network(links)

    def stop(self) -> dict[int, int | None]:
        try:
            return super().stop()
        finally:
            self.network.close()

    def others(self, *nodes: int) -> list[int]:
        return [node for node in self.nodes if node not in nodes]

    # -- what the cluster says of itself -----------------------------------------------------------

    def admin(self, *but: int) -> AdminClient:
        """Return a client of all brokers but these."""
        addresses = [self.brokers[node] for node in self.others(*but)]
        return AdminClient(",".join(addresses), request_timeout_ms=int(ASK_S * 1000))

    def topic(self, name: str, timeout_s: float = 60.0, *but: int) -> list[PartitionDescription]:
        """Return the topic's partitions as soon as a broker answers; the brokers `but` are not
        asked.
        """
        deadline = monotonic_s() + timeout_s
        while True:
            try:
                with self.admin(*but) as admin:
                    return admin.describe_topics([name], timeout_s=ASK_S)
            except errors.PkError:
                if monotonic_s() > deadline:
                    raise
                block_s(POLL_S)

    def active_controller(self, timeout_s: float = 60.0) -> int:
        deadline = monotonic_s() + timeout_s
        while True:
            try:
                with self.admin() as admin:
                    return admin.describe_metadata_quorum(timeout_s=ASK_S).leader_id
            except errors.PkError:
                if monotonic_s() > deadline:
                    raise
                block_s(POLL_S)

    def whole(self, topic: str, timeout_s: float) -> str:
        """Return '' once every partition has a leader and all replicas in sync, or what is
        missing.
        """
        deadline = monotonic_s() + timeout_s
        missing = "nobody says"
        while monotonic_s() < deadline:
            try:
                states = self.topic(topic, ASK_S)
                with self.admin() as admin:
                    quorum = admin.describe_metadata_quorum(timeout_s=ASK_S)
            except errors.PkError as trouble:
                missing = str(trouble)
            else:
                thin = [
                    f"{state.partition}: leader {state.leader}, isr {state.isr}"
                    for state in states
                    if state.error is not None
                    or state.leader < 0
                    or len(state.isr) < len(self.nodes)
                ]
                if not thin and len(quorum.voters) == len(self.nodes):
                    return ""
                missing = "; ".join(thin) or f"{len(quorum.voters)} voters"
            block_s(POLL_S)
        return missing

    def folders(self, topic: str, partition: int) -> dict[int, Path]:
        """Return a partition's directory on each node."""
        found = {
            node: list((server.data / "topics").glob(f"{topic}-{partition}*"))
            for node, server in self.nodes.items()
        }
        return {
            node: next(path for path in paths if not path.name.endswith("deleted"))
            for node, paths in found.items()
        }


class Reader:
    """A consumer in its own thread that reads through all faults."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self.places = [TopicPartition(topic, number) for number in range(partitions)]
        self.read = {number: Read() for number in range(partitions)}
        self.errors: dict[str, int] = {}
        self.failure: BaseException | None = None
        self._bootstrap = bootstrap
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        consumer = Consumer(self._bootstrap, auto_offset_reset="none")
        try:
            consumer.assign(self.places)
            for place in self.places:
                consumer.seek(place, 0)
            while not self._stop.is_set():
                self._poll(consumer)
        except BaseException as failure:
            self.failure = failure
        finally:
            consumer.close()

    def _poll(self, consumer: Consumer) -> None:
        try:
            batches = consumer.poll_batches(timeout_s=0.5)
        except errors.RetriableError as trouble:
            name = type(trouble).__name__
            self.errors[name] = self.errors.get(name, 0) + 1
            return
        for place, batch in batches:
            ids = [number_of(value) for value in batch.column("value").to_pylist()]
            self.read[place.partition].add(batch.column("offset").to_pylist(), ids)

    def reaches(self, ends: Mapping[int, int], timeout_s: float) -> bool:
        """Return whether it has read to these ends within the time."""
        deadline = monotonic_s() + timeout_s
        while any(self._position(number) < end for number, end in ends.items()):
            if monotonic_s() > deadline or self.failure is not None:
                return False
            block_s(0.02)
        return True

    def _position(self, number: int) -> int:
        read = self.read[number]
        return read.offsets[-1] + 1 if len(read) else 0

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
