"""Claims of a table (rules T4, T9) that a failing directory, a move or a full disk ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pk import errors
from tests.unit.broker.test_node_tier import (
    QUICK,
    Cluster,
    back_without_a_tier,
    partition_of,
    produce,
)


def test_a_directory_fails_while_its_partition_claims_the_table(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """Rules T4, L2: the claim is over, the controller hears that the replica is offline, and when
    the store is back nobody leads on a disk that is gone.
    """
    cluster = make_cluster(11, disks=2, tier_url="memory://tier")
    cluster.start()
    cluster.start_tier()
    topic_id = cluster.do(cluster.create("flights", **QUICK))
    cluster.do(produce(cluster, kit, topic_id, 3))
    partition = partition_of(cluster, topic_id)
    cluster.world.run_until(lambda: partition.tiered_end == 3)
    lost = partition.lane.disk.storage.root
    cluster.world.kill("tier")
    cluster.kill("broker", lost, power=True)
    for each in cluster.disks:
        cluster.storages[each].power_loss()
    cluster.boot = "boot-2"
    cluster.start_broker()
    core, partition = cluster.broker.core, partition_of(cluster, topic_id)
    cluster.world.run_until(lambda: core.follower.claims.epoch(partition.key) is not None)
    cluster.storages[lost].failed = errors.StorageFailed("gone")
    cluster.world.run_until(
        lambda: core.follower.image.partition(partition.key).leader == -1  # it was told
    )
    cluster.start_tier()
    cluster.world.loop.run_for_ms(30_000)
    assert core.follower.claims.epoch(partition.key) is None
    assert partition.leader is None
    assert isinstance(partition.problem, errors.StorageFailed)
    assert len(core.offline_replicas()) == 1


def test_a_claim_ends_with_its_replica(
    make_cluster: Callable[..., Cluster],
) -> None:
    """M7 of follower.py: what is made anew is another log, and the claim would reset it."""
    cluster = make_cluster(11, tier_url="memory://tier")
    cluster.start()
    topic_id = cluster.do(cluster.create("flights", **QUICK))
    core, partition = cluster.broker.core, partition_of(cluster, topic_id)
    state = core.follower.image.partition(partition.key)

    async def made_anew() -> None:
        core.follower.claims.begin(partition, state)
        await core.follower._set_aside(partition.key, partition)

    cluster.do(made_anew())
    assert core.follower.claims.epoch(partition.key) is None
    assert partition.key not in core.partitions


def test_a_claim_ends_with_a_log_that_a_full_disk_left_half_way(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """Rules T4, L2: the next try would not know what is there; the controller hears of it."""
    cluster = make_cluster(0, tier_url="memory://tier")
    topic_id = back_without_a_tier(cluster, kit)
    core, again = cluster.broker.core, partition_of(cluster, topic_id)

    async def full(*_: Any, **__: Any) -> None:
        again.log.torn = True
        raise errors.StorageFull("full")

    start_anew, core.manager.start_anew = core.manager.start_anew, full
    cluster.start_tier()
    cluster.world.run_until(lambda: core.offline_replicas())
    assert core.follower.claims.epoch(again.key) is None
    assert again.leader is None
    assert isinstance(again.problem, errors.StorageFailed)
    core.manager.start_anew = start_anew
    cluster.world.run_until(lambda: again.leader is not None)  # C4 of creations.py
    assert (again.log.log_start, again.log.log_end, again.tiered_end) == (0, 12, 12)
    assert not core.offline_replicas()
