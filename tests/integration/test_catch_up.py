"""Rule R12 on real processes: a broker returns to partitions with a backlog, over a slow link."""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import close, until

from pk import AdminClient, Producer
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic
from pk.clock import block_s

pytestmark = pytest.mark.integration

#: Partitions with a backlog, its size in values, and partitions under a steady load.
BIG, VALUES, VALUE_BYTES, HOT = 16, 80, 64 * 1024, 4
#: Of each connection of the slow link: a turn of all its partitions takes about 10 s.
BYTES_PER_S = 3_000_000
LAG_MS = 3_000
CHUNK = 32 * 1024


class SlowLink:
    """A relay on loopback that passes at most BYTES_PER_S to the side that connects."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)
            self._ends += [near, far]
            for source, target, slow in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pass, args=(source, target, slow), daemon=True
                ).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                target.sendall(data)
                if slow:
                    block_s(len(data) / BYTES_PER_S)
        except OSError:
            pass  # an end is gone: both connections end
        for end in (source, target):
            end.close()

    def close(self) -> None:
        for each in (self._listener, *self._ends):
            each.close()


class Nodes:
    """Three nodes; node 3 reaches the other brokers over slow links."""

    def __init__(self, directory: Path) -> None:
        settings = {
            "replica_lag_time_max_ms": LAG_MS,
            "broker_session_timeout_ms": 6_000,
            "auto_leader_rebalance_enable": False,
        }
        self.cluster = EmbeddedCluster(directory, nodes=0, settings=settings)
        self._metrics = {node: self.cluster.ports.address() for node in (1, 2, 3)}
        for node, address in self._metrics.items():
            self.cluster.add(node, metrics=address)
        self._links = {node: SlowLink(self.cluster.brokers[node]) for node in (1, 2)}
        peers = ",".join(f"{node}={link.address}" for node, link in self._links.items())
        self.cluster.nodes[3].settings["peer_addresses"] = peers
        self.address = ",".join(self.cluster.brokers[node] for node in (1, 2))
        self.cluster.start()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        close(self.cluster)

    def shrinks(self) -> int:
        """Return how often the leaders 1 and 2 have had a replica removed from an ISR."""
        found = 0
        for node in (1, 2):
            url = f"http://{self._metrics[node]}/metrics"
            text = urllib.request.urlopen(url, timeout=30).read().decode()
            for count in re.findall(r'^pk_isr_changes_total\{.*"shrink".*\} (\S+)$', text, re.M):
                found += int(float(count))
        return found

    def in_sync(self, topics: list[str]) -> dict[str, int]:
        """Return how many replicas of each topic are in sync."""
        with AdminClient(self.address) as admin:
            return {
                name: sum(len(each.isr) for each in admin.describe_topics([name], timeout_s=60))
                for name in topics
            }


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


class Steady:
    """A producer that sends a record to each hot partition every 300 ms, under acks=all."""

    def __init__(self, address: str) -> None:
        self.errors: list[BaseException] = []
        self.acked = 0
        self._address = address
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Producer(self._address, linger_ms=0) as producer:
                while not self._ended.wait(0.3):
                    sent = [producer.send("hot", b"x", partition=each) for each in range(HOT)]
                    for each in sent:
                        each.result(60)
                    self.acked += HOT
        except BaseException as error:
            self.errors.append(error)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def test_a_broker_that_returns_to_a_backlog_leaves_no_isr_again(nodes: Nodes) -> None:
    """Its replicas without a backlog join early, and keep up while the others catch up.  With one
    stream for all, each left its ISR as often as its turn came too late.
    """
    with AdminClient(nodes.address) as admin:
        settings = {"min_insync_replicas": "2"}
        # in this order the positions of `hot` are set first
        wanted = [NewTopic("hot", HOT, settings, 3), NewTopic("big", BIG, settings, 3)]
        for result in admin.create_topics(wanted, timeout_s=60):
            assert result.error is None, result.error
    node = nodes.cluster.nodes[3]
    node.kill()
    both = {"big": 2 * BIG, "hot": 2 * HOT}
    until(lambda: nodes.in_sync(["big", "hot"]) == both, "node 3 is not fenced")
    value = os.urandom(VALUE_BYTES)
    with Producer(nodes.address, batch_size=4 * VALUE_BYTES) as producer:
        for _ in range(VALUES):
            sent = [producer.send("big", value, partition=each) for each in range(BIG)]
            for each in sent:
                each.result(60)
    before = nodes.shrinks()
    node.start()
    until(lambda: nodes.in_sync(["hot"])["hot"] == 3 * HOT, "hot partitions do not join")
    steady = Steady(nodes.address)
    try:
        assert nodes.in_sync(["big"])["big"] < 3 * BIG, "there is no backlog to wait for"
        until(lambda: nodes.in_sync(["big"])["big"] == 3 * BIG, "the backlog does not end")
        assert nodes.shrinks() == before
        assert nodes.in_sync(["hot"])["hot"] == 3 * HOT
    finally:
        steady.stop()
    assert not steady.errors
    assert steady.acked
