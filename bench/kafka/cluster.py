"""Apache Kafka as a `ClusterSide`: three KRaft nodes on loopback, each controller and broker."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, Producer

from bench import processes
from bench.kafka.broker import (
    CLUSTER_ID,
    HERE,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    VERSION,
    KafkaBroker,
    options,
)
from bench.kafka.side import KafkaSide
from bench.sides import CLUSTER_NODES, Pulse, SideFailed
from pk.cli.embedded import ReservedPorts

WHOLE_S = 180.0


class KafkaNodes(KafkaBroker):
    """The processes of a cluster."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._ports: dict[int, int] = {}
        self._folder = Path()
        self._reserved = ReservedPorts()

    def start(self, folder: Path) -> None:
        """Format and start all; returns when every port is open."""
        self._folder = folder
        ids = range(1, CLUSTER_NODES + 1)
        ports = [self._reserved.draw() for _ in range(2 * CLUSTER_NODES)]
        self._ports = dict(zip(ids, ports, strict=False))
        controllers = dict(zip(ids, ports[CLUSTER_NODES:], strict=True))
        voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in controllers.items())
        for node in ids:
            place = folder / f"n{node}"
            place.mkdir(parents=True, exist_ok=True)
            text = (HERE / "cluster.properties").read_text()
            for name, value in (
                ("NODE", node),
                ("VOTERS", voters),
                ("PORT", self._ports[node]),
                ("CONTROLLER_PORT", controllers[node]),
                ("DIR", place),
            ):
                text = text.replace(f"@{name}@", str(value))
            (place / "server.properties").write_text(text)
            arguments = ("format", "-t", CLUSTER_ID, "-c", str(place / "server.properties"))
            subprocess.run(
                self.command("client.options", "kafka.tools.StorageTool", *arguments),
                check=True,
                capture_output=True,
                timeout=START_TIMEOUT_S,
            )
        self.address = ",".join(f"127.0.0.1:{port}" for port in self._ports.values())
        self.start_nodes(*ids)

    def start_nodes(self, *nodes: int) -> None:
        """Raises `SideFailed` with the log's end."""
        for node in nodes:
            place = self._folder / f"n{node}"
            with (place / "kafka.out").open("ab") as log:
                self._nodes[node] = subprocess.Popen(
                    self.command("jvm.options", "kafka.Kafka", str(place / "server.properties")),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=place,
                )
        for node in nodes:
            self._wait_port(node)

    def _wait_port(self, node: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._nodes[node].poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self._ports[node]), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        words = (self._folder / f"n{node}" / "kafka.out").read_text(errors="replace")[-2000:]
        raise SideFailed(f"Apache Kafka's node {node} did not start:\n{words}")

    def pids(self) -> list[int]:
        return [pid for node in self._nodes for pid in self.pids_of(node)]

    def pids_of(self, node: int) -> list[int]:
        return processes.children(self._nodes[node].pid)

    def active_controller(self) -> int:
        """Return the leader of the metadata quorum.  Raises `SideFailed`."""
        program = "org.apache.kafka.tools.MetadataQuorumCommand"
        arguments = ("--bootstrap-server", self.address, "describe", "--status")
        found = subprocess.run(
            self.command("client.options", program, *arguments),
            capture_output=True, text=True, timeout=START_TIMEOUT_S,
        )  # fmt: skip
        for line in found.stdout.splitlines():
            name, _, value = line.partition(":")
            if name == "LeaderId":
                return int(value)
        raise SideFailed(f"Apache Kafka names no active controller: {found.stderr[-500:]}")

    def kill(self, node: int) -> None:
        process = self._nodes.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """SIGTERM to all (also if they are stopped), then SIGKILL."""
        processes.thaw(self.pids())
        for process in self._nodes.values():
            process.terminate()
        for process in self._nodes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._nodes.clear()


class KafkaCluster(KafkaSide):
    """Three nodes, replication factor 3, min.insync.replicas 2, and Kafka's clients."""

    name = "kafka cluster"
    replication = CLUSTER_NODES

    def __init__(self) -> None:
        super().__init__()
        self.nodes = self.broker = KafkaNodes()

    @property
    def description(self) -> str:
        heap = " ".join(option for option in options("jvm.options") if option.startswith("-Xm"))
        return (
            f"Apache Kafka {VERSION}, {CLUSTER_NODES} KRaft nodes (controller and broker each, "
            f"{heap}), replication factor {CLUSTER_NODES}, min.insync.replicas 2"
        )

    def wait_for_nodes(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if len(self._admin.list_topics(timeout=5).brokers) == CLUSTER_NODES:
                    return
            except KafkaException:
                pass  # asked again
            time.sleep(0.2)
        raise SideFailed("not all of Apache Kafka's nodes registered")

    def segment_files(self, topic: str) -> list[Path]:
        return sorted(self._folder.glob(f"n*/data/{topic}-*/*"))

    # -- nodes -------------------------------------------------------------------------------------

    def leader(self, topic: str) -> int:
        return self.leaders(topic)[0]

    def leaders(self, topic: str) -> dict[int, int]:
        """Return the leader of each partition."""
        known = self._admin.list_topics(topic, timeout=10).topics[topic].partitions
        return {number: int(each.leader) for number, each in known.items()}

    def kill(self, node: int) -> None:
        self.nodes.kill(node)

    def start_node(self, node: int) -> None:
        self.nodes.start_nodes(node)

    def freeze_node(self, node: int) -> None:
        processes.freeze(self.nodes.pids_of(node))

    def thaw_node(self, node: int) -> None:
        processes.thaw(self.nodes.pids_of(node))

    def stop_nodes(self) -> None:
        self.nodes.stop()

    def start_nodes(self) -> None:
        self.nodes.start_nodes(*range(1, CLUSTER_NODES + 1))

    def whole(self, topic: str) -> None:
        deadline = time.monotonic() + WHOLE_S
        while time.monotonic() < deadline:
            try:
                known = self._admin.list_topics(topic, timeout=5).topics[topic].partitions
            except KafkaException:
                known = {}
            if known and all(
                each.leader >= 0 and len(each.isrs) == CLUSTER_NODES for each in known.values()
            ):
                return
            time.sleep(0.1)
        raise SideFailed(f"{self.name}: not all replicas of {topic} are in sync")

    def pulse(self, topic: str, request_timeout_ms: int) -> Pulse:
        return KafkaPulse(self.address, topic, request_timeout_ms)


class KafkaPulse(Pulse):
    """confluent-kafka's producer."""

    def __init__(self, address: str, topic: str, request_timeout_ms: int) -> None:
        super().__init__()
        self._topic = topic
        settings = {
            "bootstrap.servers": address,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0,
            "request.timeout.ms": request_timeout_ms,
            "socket.timeout.ms": request_timeout_ms,
            "log_level": 0,
        }
        self._producer = Producer(settings)
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        self._poller.start()

    def _poll(self) -> None:
        while not self.stop.is_set():
            self._producer.poll(0.1)

    def send(self, number: int) -> None:
        def delivered(error: Any, _message: Any) -> None:
            self.answered(number, error)

        self._producer.produce(self._topic, b"pulse", partition=0, on_delivery=delivered)

    def close(self) -> None:
        self.stop.set()
        self._thread.join()
        self._poller.join()
        self._producer.flush(60)
