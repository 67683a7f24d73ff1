"""The reports of a broker about its replicas: positions (R3) and offline replicas (L2, L9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.server.replica.partition import Partition
from pk.server.replica.state import ReplicaEvent
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire

Cluster = Any  # conftest.py's


def asked(*keys: PartitionKey) -> list[wire.FetchPartition]:
    return [wire.FetchPartition(topic_id=key.topic_id, partition=key.partition) for key in keys]


def test_a_replica_on_a_dead_disk_gives_up_the_lead_until_it_is_back(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    cluster = make_cluster(5, disks=2)
    cluster.start()
    one, two = (cluster.do(cluster.create(name)) for name in ("one", "two"))
    core = cluster.broker.core
    key = PartitionKey(one, 0)
    root = core.partitions[key].writer.disk.storage.root
    assert cluster.do(cluster.produce(kit, one, 1)) == [0]
    assert core.report.offline_replicas() == []
    cluster.storages[root].fault = lambda operation, path: (
        OSError("I/O error") if operation in ("append", "sync") else None
    )
    with pytest.raises(errors.StorageFailed):
        cluster.do(cluster.produce(kit, one, 1))
    assert core.report.offline_replicas() == asked(key)

    async def wait() -> None:
        await cluster.client.clock.sleep_ms(500)

    cluster.do(wait())
    state = core.metadata.image.partition(key)
    assert (state.leader, state.isr, state.last_known) == (NONE, (), (1,))
    assert core.metadata.image.partition(PartitionKey(two, 0)).leader == 1
    with pytest.raises(errors.StorageFailed):  # clients still learn why
        cluster.do(cluster.produce(kit, one, 1))
    for name in list(cluster.storages):
        if name.startswith("d"):
            cluster.storages[name].fault = None
            cluster.kill("broker", name)
    cluster.start_broker()
    cluster.do(wait())
    state = cluster.broker.core.metadata.image.partition(key)
    assert (state.leader, state.isr, state.unclean) == (1, (1,), True)
    assert cluster.do(cluster.read(kit, one)) == 3


def test_a_position_is_that_of_a_replica_that_stands_still(
    make_cluster: Callable[..., Cluster], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(5)
    cluster.start()
    topic_id = cluster.do(cluster.create("t"))
    key = PartitionKey(topic_id, 0)
    cluster.do(cluster.produce(kit, topic_id, 2))
    core = cluster.broker.core
    end = core.partitions[key].log.written_end
    assert end > 0
    assert core.report.positions(asked(key)) == [], "it is led"
    partitions = core.metadata.image.topics[topic_id].partitions
    partitions[0] = partitions[0]._replace(leader=NONE)
    (found,) = core.report.positions(asked(key, PartitionKey("gone", 0)))
    assert (found.topic_id, found.last_epoch, found.log_end) == (topic_id, 0, end)
    partition: Partition = core.partitions[key]
    monkeypatch.setattr(partition.log._local, "written_end", end - 1)
    assert core.report.positions(asked(key)) == [], "a write is under way"
    monkeypatch.undo()
    partition.fail(errors.TierUnavailable("waits for its table"), ReplicaEvent.RECOVERY_BEGUN)
    assert core.report.positions(asked(key))
    assert core.report.offline_replicas() == []
    partition.fail(errors.CorruptLog("damaged"))
    assert core.report.positions(asked(key)) == []
    assert core.report.offline_replicas() == asked(key)
