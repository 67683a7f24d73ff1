"""Partitions of a failover: three nodes, three replicas each, and one node is killed.

Just after the kill a producer sends one record to each partition that the node led; the figures are
the times until the records are acknowledged.  The killed node is not the active controller, so the
election of partition leaders is measured alone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import processes
from bench.growth.nodes import PATIENCE_S
from bench.growth.partitions import topics_of
from bench.growth.rows import Figures
from bench.growth.steady_clients import KafkaClient, PkClient, SteadyClient
from bench.kafka.cluster import KafkaCluster
from bench.sides import CLUSTER_NODES, SideFailed
from pk import AdminClient
from pk.cli.embedded import EmbeddedCluster

SETTINGS = {
    "default_replication_factor": CLUSTER_NODES,
    "min_insync_replicas": 2,
    "shutdown_timeout_ms": 120_000,
}
_CALM_S = 5.0
#: Topic and number of a partition → the node that leads it.
Leaders = Mapping[tuple[str, int], int]


def pk(partitions: int, folder: Path) -> Figures:
    """Measure one failover of pk."""
    cluster = EmbeddedCluster(folder, nodes=CLUSTER_NODES, settings=SETTINGS)
    cluster.start()
    try:
        with AdminClient(cluster.address) as admin:
            for topic, count in topics_of(partitions):
                admin.create_topic(topic, partitions=count, timeout_s=PATIENCE_S)
            leaders = _whole(admin, partitions)
            victim = _victim(leaders, admin.describe_metadata_quorum().leader_id)
        others = [pid for node in cluster.nodes if node != victim for pid in cluster.pids_of(node)]
        client = PkClient(cluster.address)
        return _failed_over(client, leaders, victim, lambda: cluster.kill(victim), others)
    finally:
        cluster.stop_together()


def kafka(partitions: int, folder: Path) -> Figures:
    """Measure one failover of Kafka, with librdkafka's producer."""
    cluster = KafkaCluster()
    cluster.start(folder)
    try:
        leaders: dict[tuple[str, int], int] = {}
        for topic, count in topics_of(partitions):
            cluster.create_topic(topic, count)
            cluster.whole(topic)
            leaders |= {(topic, number): node for number, node in cluster.leaders(topic).items()}
        victim = _victim(leaders, cluster.nodes.active_controller())
        nodes = range(1, CLUSTER_NODES + 1)
        others = [pid for node in nodes if node != victim for pid in cluster.nodes.pids_of(node)]
        client = KafkaClient(cluster.address)
        return _failed_over(client, leaders, victim, lambda: cluster.kill(victim), others)
    finally:
        cluster.stop()


def _whole(admin: AdminClient, partitions: int) -> Leaders:
    """Return the leader of each partition, once all have three replicas in sync."""
    names = [topic for topic, _ in topics_of(partitions)]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        states = admin.describe_topics(names, timeout_s=PATIENCE_S)
        whole = [each for each in states if each.leader > 0 and len(each.isr) == CLUSTER_NODES]
        if len(whole) == partitions:
            return {(each.topic, each.partition): each.leader for each in states}
        if time.monotonic() > deadline:
            raise SideFailed(f"{len(whole)} of {partitions} partitions are whole")
        time.sleep(0.5)


def _victim(leaders: Leaders, active: int) -> int:
    """Return the node that leads most partitions of those that are not the active controller."""
    counts = Counter(node for node in leaders.values() if node != active)
    if not counts:
        raise SideFailed("the active controller's node leads all partitions")
    return counts.most_common(1)[0][0]


def _failed_over(
    client: SteadyClient, leaders: Leaders, victim: int, kill: Callable[[], None], others: list[int]
) -> Figures:
    """Kill a node and return how long its partitions took.

    others: the processes of the other nodes
    """
    places = [place for place, leader in leaders.items() if leader == victim]
    failed: list[Any] = []
    took: dict[int, float] = {}
    done = threading.Event()

    def stored(error: Any) -> None:
        if error:
            failed.append(error)

    def sent(number: int) -> Callable[[Any], None]:
        def delivered(error: Any) -> None:
            took[number] = float("inf") if error else time.monotonic()
            if len(took) == len(places):
                done.set()

        return delivered

    try:
        for topic, number in leaders:
            client.send(topic, number, stored)
        client.flush()
        if failed:
            raise SideFailed(f"{len(failed)} records were not stored: {failed[0]}")
        time.sleep(_CALM_S)
        before, mine = processes.cpu_s(others), time.process_time()
        begin = time.monotonic()
        kill()
        for at, (topic, number) in enumerate(places):
            client.send(topic, number, sent(at))
        if not done.wait(PATIENCE_S):
            raise SideFailed(f"{len(took)} of {len(places)} records were acknowledged")
        cpu_s = processes.cpu_s(others) - before
        client_s = time.process_time() - mine
    finally:
        client.close()
    times = sorted(each - begin for each in took.values())
    if times[-1] == float("inf"):
        raise SideFailed("records failed")
    return {
        "led": len(places),
        "median_s": times[len(times) // 2],
        "p99_s": times[len(times) * 99 // 100],
        "work_cpu_s": cpu_s,
        "work_client_cpu_s": client_s,
    }
