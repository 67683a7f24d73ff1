"""Claims of a table (rules T4, T9) that a failing directory, a move or a full disk ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pk import errors
from pk.server.broker.core import BrokerCore
from pk.server.metadata.image import PartitionState
from pk.server.replica.partition import Partition
from pk.server.replica.state import ReplicaState
from tests.unit.server.tier.test_node import (
    QUICK,
    Cluster,
    back_without_a_tier,
    partition_of,
    produce,
)


def test_a_directory_fails_while_its_partition_claims_the_table(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """Rules T4, L2: the claim ends, the controller learns that the replica is offline, and when the
    store is back no replica leads on the failed disk.
    """
    cluster = make_cluster(11, disks=2, tier_url="memory://tier")
    cluster.start()
    cluster.start_tier()
    topic_id = cluster.do(cluster.create("flights", **QUICK))
    cluster.do(produce(cluster, kit, topic_id, 3))
    partition = partition_of(cluster, topic_id)
    cluster.world.run_until(lambda: partition.tiered_end == 3)
    lost = partition.writer.disk.storage.root
    cluster.world.kill("tier")
    cluster.kill("broker", lost, power=True)
    for each in cluster.disks:
        cluster.storages[each].power_loss()
    cluster.boot = "boot-2"
    cluster.start_broker()
    core, partition = cluster.broker.core, partition_of(cluster, topic_id)
    cluster.world.run_until(lambda: core.epoch_fence.epoch(partition.key) is not None)
    cluster.storages[lost].failed = errors.StorageFailed("gone")
    cluster.world.run_until(
        lambda: core.metadata.image.partition(partition.key).leader == -1  # the report arrived
    )
    cluster.start_tier()
    cluster.world.loop.run_for_ms(30_000)
    assert core.epoch_fence.epoch(partition.key) is None
    assert partition.leader is None
    assert isinstance(partition.hosted.cause, errors.StorageFailed)
    assert len(core.report.offline_replicas()) == 1


def test_a_claim_ends_with_its_replica(
    make_cluster: Callable[..., Cluster],
) -> None:
    """broker/metadata_publisher M7: the replica that is created again has another log, which the
    claim would reset.
    """
    cluster = make_cluster(11, tier_url="memory://tier")
    cluster.start()
    topic_id = cluster.do(cluster.create("flights", **QUICK))
    core, partition = cluster.broker.core, partition_of(cluster, topic_id)
    state = core.metadata.image.partition(partition.key)

    async def made_anew() -> None:
        core.epoch_fence.begin(partition, state, core.roles.take_office)
        await core.replica_manager._set_aside(partition.key, partition)

    cluster.do(made_anew())
    assert core.epoch_fence.epoch(partition.key) is None
    assert partition.key not in core.partitions


def test_a_claim_ends_with_a_log_that_a_full_disk_left_half_way(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """Rules T4, L2: the next attempt would not know what the log holds; the controller gets the
    replica as offline.
    """
    cluster = make_cluster(0, tier_url="memory://tier")
    topic_id = back_without_a_tier(cluster, kit)
    core, again = cluster.broker.core, partition_of(cluster, topic_id)

    async def full(*_: Any, **__: Any) -> None:
        again.log._writer.torn = True
        raise errors.StorageFull("full")

    start_anew, core.manager.start_anew = core.manager.start_anew, full
    cluster.start_tier()
    cluster.world.run_until(lambda: core.report.offline_replicas())
    assert core.epoch_fence.epoch(again.key) is None
    assert again.leader is None
    assert isinstance(again.hosted.cause, errors.StorageFailed)
    core.manager.start_anew = start_anew
    cluster.world.run_until(lambda: again.leader is not None)  # replica/creation N4
    assert (again.log.log_start, again.log.log_end, again.tiered_end) == (0, 12, 12)
    assert not core.report.offline_replicas()


def test_a_claim_tries_again_while_the_disk_is_full(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """The checkpoint before the log begins at the table's end finds no space: this is no bug."""
    cluster = make_cluster(0, tier_url="memory://tier")
    topic_id = back_without_a_tier(cluster, kit)
    again = partition_of(cluster, topic_id)
    refused: list[str] = []

    def no_room(operation: str, path: str) -> Exception | None:
        if not path.endswith("-checkpoint.tmp"):
            return None
        refused.append(path)
        return errors.StorageFull("full")

    again.writer.disk.storage.fault = no_room
    cluster.start_tier()
    cluster.world.run_until(lambda: len(refused) > 5)
    assert again.leader is None
    again.writer.disk.storage.fault = None
    cluster.world.run_until(lambda: again.leader is not None)
    assert (again.log.log_start, again.log.log_end, again.tiered_end) == (0, 12, 12)


def _no_room_half_way(operation: str, path: str) -> Exception | None:
    """Fail the write of the epochs of a log that starts again: its segments are deleted by then."""
    written = "topics/" in path and path.endswith("leader-epoch-checkpoint.tmp")
    return errors.StorageFull("full") if written else None


def _elsewhere(core: BrokerCore, partition: Partition) -> PartitionState:
    """Another broker is elected."""
    state = core.metadata.image.partition(partition.key)
    assert state is not None
    return state._replace(leader=2, leader_epoch=state.leader_epoch + 1, unclean=False)


def test_a_log_left_half_way_by_a_claim_that_is_over_is_offline(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """Rules T4, L2: another broker is elected while the log starts again at the table's end, and
    the disk is full half-way.  The old records are deleted by then.  As a follower the replica
    would still report them, join the ISR because of them, and lead without them.
    """
    cluster = make_cluster(0, tier_url="memory://tier")
    topic_id = back_without_a_tier(cluster, kit)
    core, again = cluster.broker.core, partition_of(cluster, topic_id)
    storage = again.writer.disk.storage
    start_anew = core.manager.start_anew

    async def meanwhile(*args: Any, **named: Any) -> None:
        core.manager.start_anew = start_anew
        await core.roles.lead_or_follow(again, _elsewhere(core, again))
        assert again.state is ReplicaState.FOLLOWING
        storage.fault = _no_room_half_way
        await start_anew(*args, **named)

    core.manager.start_anew = meanwhile
    cluster.start_tier()
    cluster.world.run_until(lambda: again.log.torn)
    cluster.world.loop.run_for_ms(1_000)
    assert again.log.torn
    assert again.replica is None
    assert isinstance(again.hosted.cause, errors.StorageFailed)
    assert len(core.report.offline_replicas()) == 1
    storage.fault = None
    cluster.world.run_until(lambda: again.leader is not None)  # replica/creation N4
    assert (again.log.log_start, again.log.log_end, again.tiered_end) == (0, 12, 12)


def test_a_claim_ends_with_a_log_that_it_found_half_way(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """The opposite case: the replica is elected uncleanly while its log starts again as a
    follower.
    """
    cluster = make_cluster(0, tier_url="memory://tier")
    topic_id = back_without_a_tier(cluster, kit)
    core, again = cluster.broker.core, partition_of(cluster, topic_id)
    storage = again.writer.disk.storage

    async def elected() -> None:
        await core.roles.lead_or_follow(again, _elsewhere(core, again))
        storage.fault = _no_room_half_way
        replica = again.replica
        replica.fetcher._change(replica, replica.fetcher._begin(replica, 12, b"", 0))
        await core.roles.lead_or_follow(again, core.metadata.image.partition(again.key))
        assert core.epoch_fence.epoch(again.key) is not None

    cluster.do(elected())
    cluster.world.run_until(lambda: again.log.torn)
    cluster.world.loop.run_for_ms(1_000)
    assert core.epoch_fence.epoch(again.key) is None
    assert isinstance(again.hosted.cause, errors.StorageFailed)
    assert len(core.report.offline_replicas()) == 1
    storage.fault = None
    cluster.start_tier()
    cluster.world.run_until(lambda: again.leader is not None)
    assert (again.log.log_start, again.log.log_end, again.tiered_end) == (0, 12, 12)
