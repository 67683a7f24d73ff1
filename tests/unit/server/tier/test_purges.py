"""The tables of deleted topics are removed from the tier, whatever happens meanwhile (rule T7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller

Cluster = Any  # conftest.py's
QUICK = {"tier_max_lag_ms": "200", "file_delete_delay_ms": "500"}


@pytest.fixture
def tiered(make_cluster: Callable[..., Cluster]) -> Cluster:
    cluster = make_cluster(11, tier_url="memory://tier")
    cluster.start()
    cluster.start_tier()
    return cluster


def partition_of(cluster: Cluster, topic_id: str) -> Any:
    return cluster.broker.core.partitions[PartitionKey(topic_id, 0)]


async def purge(cluster: Cluster, name: str) -> None:
    """Delete a topic, and ask for its table to be removed."""
    caller = cluster.caller()
    request = wire.DeleteTopicsRequest(names=[name], purge_tier=True)
    frame = await caller.call(request, timeout_ms=5_000)
    await caller.close()
    assert not frame.head.delete_topics_reply.results[0].HasField("error")


def objects_of(cluster: Cluster, topic_id: str) -> list[str]:
    return [path for path in cluster.store.objects if topic_id in path]


def restart_everything(cluster: Cluster) -> None:
    for node, storage in (("tier", "d1"), ("broker", "d1"), ("controller", "meta")):
        cluster.kill(node, storage)
    cluster.start()
    cluster.start_tier()


def purges_of(cluster: Cluster) -> dict[str, str]:
    """Return the purge marks in the controller's image and in the committed records."""
    decided, committed = cluster.controller.machine.image, cluster.broker.core.metadata.image
    return {**decided.purges, **committed.purges}


def test_a_purge_outlives_a_restart_of_everything(tiered: Cluster, kit: Any) -> None:
    """Rule T7: the broker that was to purge within file_delete_delay_ms is gone.  A new topic of
    the same name has a table of its own, and keeps it.
    """
    old = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(tiered.produce(kit, old, 4))
    partition = partition_of(tiered, old)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    tiered.do(purge(tiered, "flights"))
    new = tiered.do(tiered.create("flights", **{**QUICK, "file_delete_delay_ms": "60000"}))
    tiered.do(tiered.produce(kit, new, 3))
    again = partition_of(tiered, new)
    tiered.world.run_until(lambda: again.tiered_end == 9)
    assert objects_of(tiered, old)
    restart_everything(tiered)
    assert purges_of(tiered) == {old: "flights"}
    tiered.world.run_until(lambda: not purges_of(tiered))
    assert not objects_of(tiered, old)
    assert objects_of(tiered, new)
    restart_everything(tiered)
    assert not purges_of(tiered)
    assert tiered.do(tiered.read(kit, new)) == 9


def test_a_purge_waits_for_a_store_that_is_away(tiered: Cluster, kit: Any) -> None:
    """Rule T7: the mark stays until the objects are removed; a restart in between loses nothing."""
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(tiered.produce(kit, topic_id, 4))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)

    def away(operation: str, path: str) -> None:
        if topic_id in path:
            raise errors.TierUnavailable("the store is away")

    tiered.store.fault = away
    tiered.do(purge(tiered, "flights"))
    tiered.world.loop.run_for_ms(600_000)
    assert purges_of(tiered)
    restart_everything(tiered)
    tiered.world.loop.run_for_ms(600_000)
    assert purges_of(tiered)
    assert objects_of(tiered, topic_id)
    tiered.store.fault = lambda operation, path: None
    tiered.world.run_until(lambda: not purges_of(tiered))
    assert not objects_of(tiered, topic_id)


def test_objects_that_come_while_a_table_is_purged_keep_the_mark(tiered: Cluster, kit: Any) -> None:
    """tier/purges D3: an upload under way may land after the objects were listed."""
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(tiered.produce(kit, topic_id, 4))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 12)
    late = iter(range(5))

    def lands(operation: str, path: str) -> None:
        if operation == "delete" and topic_id in path and (number := next(late, None)) is not None:
            tiered.store.objects[f"flights/{topic_id}/late-{number}"] = b"late"

    home = tiered.tier.worker.topics[topic_id].home
    assert home == f"flights/{topic_id}"
    tiered.store.objects = {
        path: data for path, data in tiered.store.objects.items() if path.startswith(home)
    }
    while len(tiered.store.objects) > 1:  # each pass removes one, and finds one more
        tiered.store.objects.popitem()
    tiered.store.fault = lands
    tiered.do(purge(tiered, "flights"))
    tiered.world.run_until(lambda: not purges_of(tiered))
    assert not objects_of(tiered, topic_id)


def test_a_broker_that_skips_the_deletion_by_a_snapshot_purges(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """Rules Q2, T7: the snapshot contains the mark, for a live broker and for one that starts."""
    often = {"metadata_log_max_record_bytes_between_snapshots": 1}
    cluster = make_cluster(11, tier_url="memory://tier", broker_session_timeout_ms=60_000, **often)
    cluster.start()
    cluster.start_tier()
    topic_id = cluster.do(cluster.create("flights", **QUICK))
    cluster.do(cluster.create("kept", tier_enable="false"))
    cluster.do(cluster.produce(kit, topic_id, 4))
    partition = partition_of(cluster, topic_id)
    cluster.world.run_until(lambda: partition.tiered_end == 12)
    core = cluster.broker.core
    follower = core.publisher
    image = core.metadata.image

    async def ask(request: Any) -> None:
        caller = Caller(
            cluster.client.network,
            cluster.client.clock,
            cluster.controller.address,
            wire.Hello(client_id="test", protocol=PROTOCOL, cluster_id=cluster.run.cluster_id),
        )
        await caller.call(request, timeout_ms=5_000)
        await caller.close()

    async def story() -> None:
        cluster.world.network.cut("broker", "controller")
        at = follower.next_offset + 3
        await ask(wire.DeleteTopicsRequest(names=["flights"], purge_tier=True))
        for turn in range(100):
            change = wire.AlterConfigsRequest()
            resource = wire.ConfigResource(type="topic", name="kept")
            change.changes.add(resource=resource).set["max_message_bytes"] = str(2_000 + turn)
            await ask(change)
            await cluster.client.clock.sleep_ms(100)
        assert cluster.controller.metadata.log_start > at
        cluster.world.network.heal("broker", "controller")

    cluster.do(story())
    assert purges_of(cluster) == {topic_id: "flights"}
    assert objects_of(cluster, topic_id)
    cluster.world.run_until(lambda: not purges_of(cluster))
    assert core.metadata.image is not image
    assert not objects_of(cluster, topic_id)
