"""Internal topics of real processes: replicas, as many as there are brokers, and at most three."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import close, run, until

from pk import errors, transactional_ids
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import AdminClient
from pk.clock import SystemClock
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.wire.socket_network import PkNetwork

pytestmark = pytest.mark.integration
NAME = transactional_ids.TOPIC


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    made = EmbeddedCluster(tmp_path, nodes=0)
    yield made
    close(made)


def find(address: str, key: str) -> wire.FindCoordinatorReply:
    """Ask one broker for a coordinator, as a client does: again after a retriable error."""

    async def story() -> wire.FindCoordinatorReply:
        network, clock = PkNetwork(lambda where, bug: None), SystemClock()
        caller = Caller(network, clock, address, wire.Hello(client_id="test", protocol=PROTOCOL))
        request = wire.FindCoordinatorRequest(key=key, key_type=1)
        for _ in range(100):
            try:
                frame = await caller.call(request, timeout_ms=30_000)
            except errors.RetriableError:
                await clock.sleep_ms(200)
                continue
            await caller.close()
            return frame.head.find_coordinator_reply
        raise AssertionError("no coordinator")

    return asyncio.run(story())


def factors(bootstrap: str) -> set[tuple[int, int]]:
    """Return the numbers of replicas and of in-sync replicas of the topic's partitions."""
    with AdminClient(bootstrap) as admin:
        found = admin.describe_topics([NAME], timeout_s=60)
    assert len(found) == transactional_ids.PARTITIONS
    return {(len(each.replicas), len(each.isr)) for each in found}


def test_three_nodes_hold_three_replicas(cluster: EmbeddedCluster) -> None:
    cluster.add(1, 2, 3)
    cluster.start()
    answers = [find(node.listen, "job") for node in cluster.nodes.values()]
    assert len({each.node_id for each in answers}) == 1
    assert {each.partition for each in answers} == {transactional_ids.partition_of_id("job")}
    assert answers[0].address == cluster.brokers[answers[0].node_id]
    until(lambda: factors(cluster.address) == {(3, 3)}, "three replicas in sync")
    listed = json.loads(
        run(["topics", "list", "--internal", "--bootstrap", cluster.address, "--json"])
    )
    assert [each["name"] for each in listed["topics"]] == [NAME]
    listed = json.loads(run(["topics", "list", "--bootstrap", cluster.address, "--json"]))
    assert listed["topics"] == []


def test_joining_brokers_raise_the_replication_factor(cluster: EmbeddedCluster) -> None:
    cluster.add(1)
    cluster.start()
    first = cluster.nodes[1].listen
    assert find(first, "job").node_id == 1
    until(lambda: factors(first) == {(1, 1)}, "one replica")
    cluster.add(2, 3, roles="broker")
    for node in (2, 3):
        cluster.format(node, first=False)
    cluster.start_nodes((2, 3))
    until(lambda: factors(cluster.address) == {(3, 3)}, "three replicas in sync")
