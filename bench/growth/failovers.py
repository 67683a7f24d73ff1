"""Partitions of a failover: three nodes, three replicas each, and one node is killed.

Just after the kill a producer sends one record to each partition that the node led; the figures are
the times until the records are acknowledged.  The killed node is not the active controller, so the
election of partition leaders is measured alone.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from bench import processes
from bench.growth import clients
from bench.growth.nodes import PATIENCE_S
from bench.growth.partitions import topics_of
from bench.growth.rows import Figures
from bench.sides import CLUSTER_NODES, SideFailed
from bench.values import VALUE_BYTES
from pk import AdminClient, Producer
from pk.cli.embedded import EmbeddedCluster

SETTINGS = {
    "default_replication_factor": CLUSTER_NODES,
    "min_insync_replicas": 2,
    "shutdown_timeout_ms": 120_000,
}
#: As in the case `failover`: a silent leader answers nothing.
_REQUEST_MS = 3_000
_CALM_S = 5.0


def pk(partitions: int, folder: Path) -> Figures:
    """Measure one failover of pk."""
    cluster = EmbeddedCluster(folder, nodes=CLUSTER_NODES, settings=SETTINGS)
    cluster.start()
    try:
        with AdminClient(cluster.address) as admin:
            for topic, count in topics_of(partitions):
                admin.create_topic(topic, partitions=count, timeout_s=PATIENCE_S)
            leaders = _whole(admin, partitions)
            victim = _victim(admin, leaders)
        places = [place for place, leader in leaders.items() if leader == victim]
        return _failed_over(cluster, victim, places, list(topics_of(partitions)))
    finally:
        cluster.stop_together()


def _whole(admin: AdminClient, partitions: int) -> dict[tuple[str, int], int]:
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


def _victim(admin: AdminClient, leaders: dict[tuple[str, int], int]) -> int:
    """Return a node that leads partitions and is not the active controller."""
    active = admin.describe_metadata_quorum().leader_id
    counts = {node: list(leaders.values()).count(node) for node in set(leaders.values())}
    counts.pop(active, None)
    if not counts:
        raise SideFailed("the active controller's node leads all partitions")
    return max(counts, key=lambda node: counts[node])


def _failed_over(
    cluster: EmbeddedCluster, victim: int, places: list[tuple[str, int]], topics: clients.Topics
) -> Figures:
    """Kill a node and return how long its partitions took."""
    took: dict[int, float] = {}
    done = threading.Event()

    def sent(number: int) -> Any:
        def delivered(_: Any, error: Any) -> None:
            took[number] = float("inf") if error else time.monotonic()
            if len(took) == len(places):
                done.set()

        return delivered

    others = [pid for node in cluster.nodes if node != victim for pid in cluster.pids_of(node)]
    options: dict[str, Any] = {"request_timeout_ms": _REQUEST_MS, "delivery_timeout_ms": 300_000}
    with Producer(cluster.address, acks="all", linger_ms=0, **options) as producer:
        for topic, count in topics:
            for number in range(count):
                producer.send(topic, bytes(VALUE_BYTES), partition=number)
        producer.flush(timeout_s=PATIENCE_S)
        time.sleep(_CALM_S)
        before, mine = processes.cpu_s(others), time.process_time()
        begin = time.monotonic()
        cluster.kill(victim)
        for at, (topic, number) in enumerate(places):
            producer.send(topic, bytes(VALUE_BYTES), partition=number, on_delivery=sent(at))
        if not done.wait(PATIENCE_S):
            raise SideFailed(f"{len(took)} of {len(places)} records were acknowledged")
        cpu_s = processes.cpu_s(others) - before
        client_s = time.process_time() - mine
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
