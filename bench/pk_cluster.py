"""pk as a `ClusterSide`: three nodes on loopback, each controller and broker."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from bench.pk_side import PkSide
from bench.sides import CLUSTER_NODES, Pulse, SideFailed

#: As on the other side; a deleted topic's files go at once.
SETTINGS = {
    "default_replication_factor": CLUSTER_NODES,
    "min_insync_replicas": 2,
    "file_delete_delay_ms": 1000,
}
WHOLE_S = 180.0
_ASK_S = 5.0


class PkCluster(PkSide):
    """Three nodes, replication factor 3, min_insync_replicas 2."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "pk cluster"
        self.description = (
            f"pk, {CLUSTER_NODES} nodes (controller and broker each), replication factor "
            f"{CLUSTER_NODES}, min_insync_replicas 2, else default settings, its Python client"
        )
        self._cluster: Any = None

    def start(self, folder: Path) -> None:
        from pk import AdminClient
        from pk.cli.embedded import EmbeddedCluster

        self._folder = folder
        self._cluster = EmbeddedCluster(folder, nodes=CLUSTER_NODES, settings=SETTINGS)
        self._cluster.start()
        self.address = self._cluster.address
        self._admin = AdminClient(self.address)
        self._make_probe()

    def stop(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._cluster is not None:
            for node in self._cluster.nodes:
                self._cluster.thaw(node)
            self._cluster.stop()
            self._cluster = None

    def pids(self) -> list[int]:
        return [] if self._cluster is None else self._cluster.pids()

    def segment_files(self, topic: str) -> list[Path]:
        return sorted(self._folder.glob(f"n*/data/topics/{topic}-*/*"))

    # -- nodes -------------------------------------------------------------------------------------

    def leader(self, topic: str) -> int:
        (state,) = self._admin.describe_topics([topic])
        return int(state.leader)

    def kill(self, node: int) -> None:
        self._cluster.kill(node)

    def start_node(self, node: int) -> None:
        self._cluster.start_nodes([node])

    def freeze_node(self, node: int) -> None:
        self._cluster.freeze(node)

    def thaw_node(self, node: int) -> None:
        self._cluster.thaw(node)

    def stop_nodes(self) -> None:
        self._cluster.stop()

    def start_nodes(self) -> None:
        self._cluster.start_nodes(self._cluster.nodes)

    def whole(self, topic: str) -> None:
        from pk import errors

        deadline = time.monotonic() + WHOLE_S
        while time.monotonic() < deadline:
            try:
                states = self._admin.describe_topics([topic], timeout_s=_ASK_S)
            except errors.PkError:
                states = []
            if states and all(
                each.error is None and each.leader >= 0 and len(each.isr) == CLUSTER_NODES
                for each in states
            ):
                return
            time.sleep(0.1)
        raise SideFailed(f"{self.name}: not all replicas of {topic} are in sync")

    def pulse(self, topic: str, request_timeout_ms: int) -> Pulse:
        return PkPulse(self.address, topic, request_timeout_ms)


class PkPulse(Pulse):
    """pk's producer."""

    def __init__(self, address: str, topic: str, request_timeout_ms: int) -> None:
        from pk import Producer

        super().__init__()
        self._topic = topic
        self._producer = Producer(
            address, acks="all", linger_ms=0, request_timeout_ms=request_timeout_ms
        )
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    def send(self, number: int) -> None:
        def delivered(_where: Any, error: Any) -> None:
            self.answered(number, error)

        self._producer.send(self._topic, b"pulse", partition=0, on_delivery=delivered)

    def close(self) -> None:
        self.stop.set()
        self._thread.join()
        self._producer.flush(timeout_s=60)
        self._producer.close()
