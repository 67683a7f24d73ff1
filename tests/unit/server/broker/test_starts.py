"""How often a start of a broker settles its partitions (broker/metadata_publisher M9)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pk.server.broker.metadata_publisher import _Changes
from pk.server.broker.replica_manager import ReplicaManager
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

Cluster = Any  # conftest.py's
PARTITIONS = 5


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Counter[PartitionKey]:
    """Count the settlements of each partition."""
    found: Counter[PartitionKey] = Counter()
    settle = ReplicaManager.settle

    async def counted(self: ReplicaManager, key: PartitionKey) -> None:
        found[key] += 1
        await settle(self, key)

    monkeypatch.setattr(ReplicaManager, "settle", counted)
    return found


def stop(cluster: Cluster) -> None:
    """Stop the broker properly."""
    closing = cluster.world.spawn("broker", cluster.broker.close())
    cluster.world.run_until(closing.done)
    closing.result()
    cluster.kill("broker", "d1")


def led(cluster: Cluster) -> int:
    return sum(each.leader is not None for each in cluster.broker.core.partitions.values())


@pytest.mark.parametrize("clean", [True, False])
def test_a_start_settles_a_partition_for_the_registration_and_for_its_election(
    cluster: Cluster, settled: Counter[PartitionKey], clean: bool
) -> None:
    cluster.start()
    cluster.do(cluster.create("flights", PARTITIONS))
    if clean:
        stop(cluster)
    else:
        cluster.kill("broker", "d1")
    settled.clear()
    cluster.start_broker()
    cluster.world.run_until(lambda: led(cluster) == PARTITIONS)
    cluster.world.loop.run_for_ms(5_000)
    assert len(settled) == PARTITIONS
    assert set(settled.values()) == {2}


def test_a_broker_that_is_fenced_and_returns_settles_what_its_elections_change(
    cluster: Cluster, settled: Counter[PartitionKey]
) -> None:
    """The records of the fence and of its end concern the broker; those of the partitions come
    with them.
    """
    cluster.start()
    cluster.do(cluster.create("flights", PARTITIONS))
    settled.clear()
    cluster.kill("controller", "meta")
    cluster.start_controller()
    cluster.world.loop.run_for_ms(30_000)
    assert led(cluster) == PARTITIONS
    assert not settled  # it registers again, and neither a leader nor an ISR changes


def test_records_of_before_the_start_are_applied_without_a_list_of_their_changes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start()
    cluster.do(cluster.create("flights", PARTITIONS))
    stop(cluster)
    cluster.world.loop.run_for_ms(5_000)  # the controller notes that it left
    before = cluster.controller.metadata.end
    noted: list[int] = []
    note = _Changes.note

    def counted(self: _Changes, record: wire.MetadataRecord, node_id: int) -> None:
        noted.append(node_id)
        note(self, record, node_id)

    monkeypatch.setattr(_Changes, "note", counted)
    cluster.start_broker()
    cluster.world.run_until(lambda: led(cluster) == PARTITIONS)
    assert before > PARTITIONS
    assert len(noted) == cluster.controller.metadata.end - before
