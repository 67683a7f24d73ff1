"""A broker that is behind the controller's log loads a snapshot and reacts to the differences (rule
Q2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.server.raft.snapshot_id import SnapshotId, file_name
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Caller

Cluster = Any  # conftest.py's
#: A snapshot whenever there is anything new.
OFTEN = {"metadata_log_max_record_bytes_between_snapshots": 1}


async def ask(cluster: Cluster, request: Any) -> Any:
    """Ask the controller itself."""
    hello = wire.Hello(client_id="test", protocol=1, cluster_id=cluster.run.cluster_id)
    address = cluster.run.controller_address
    caller = Caller(cluster.client.network, cluster.client.clock, address, hello)
    try:
        return (await caller.call(request, timeout_ms=5_000)).head
    finally:
        await caller.close()


async def create(cluster: Cluster, name: str) -> str:
    request = wire.CreateTopicsRequest()
    request.topics.add(name=name, partitions=2, replication_factor=1)
    (result,) = (await ask(cluster, request)).create_topics_reply.results
    assert not result.HasField("error"), result
    return str(result.topic_id)


async def configure(cluster: Cluster, name: str, option: str, value: str) -> None:
    change = wire.AlterConfigsRequest()
    resource = wire.ConfigResource(type="topic", name=name)
    change.changes.add(resource=resource).set[option] = value
    await ask(cluster, change)


async def passed_over(cluster: Cluster, offset: int) -> None:
    """Let the controller's log begin above `offset`."""
    for turn in range(6):
        if cluster.controller.metadata.log_start > offset:
            return
        for size in range(2_000, 2_010):
            await configure(cluster, "kept", "max_message_bytes", str(size + turn))
        await cluster.client.clock.sleep_ms(1_100)
    raise AssertionError("the log still begins at the same offset")


@pytest.fixture
def behind(make_cluster: Callable[..., Cluster]) -> Cluster:
    """Return a cluster that makes snapshots all the time."""
    cluster = make_cluster(11, broker_session_timeout_ms=60_000, **OFTEN)
    cluster.start()
    return cluster


def test_a_broker_behind_the_log_loses_what_is_gone_and_gets_what_is_new(
    behind: Cluster, kit: Any
) -> None:
    cluster = behind
    core = cluster.broker.core
    follower = core.publisher
    told: list[Any] = []

    async def story() -> None:
        kept, gone = await cluster.create("kept"), await cluster.create("gone")
        again = await cluster.create("again")
        await cluster.produce(kit, kept, 2)
        await cluster.produce(kit, gone, 2)
        cluster.world.network.cut("broker", "controller")
        at = follower.next_offset
        await configure(cluster, "kept", "segment_ms", "7")  # the reply to the running poll
        await ask(cluster, wire.DeleteTopicsRequest(names=["gone", "again"]))
        fresh, second = await create(cluster, "fresh"), await create(cluster, "again")
        await configure(cluster, "kept", "retention_ms", "77777")
        await passed_over(cluster, at + 10)
        follower.listeners[told.append] = None
        image, wanted = core.metadata.image, cluster.controller.metadata.committed - 1
        cluster.world.network.heal("broker", "controller")
        await follower.reached(wanted, 20_000)
        assert core.metadata.image is not image, "it was replayed record by record"
        assert {key.topic_id for key in core.partitions} == {kept, fresh, second}
        names = {name for each in told for name in each or ()}
        assert {"kept", "gone", "fresh", "again"} <= names
        files = cluster.storages["d1"].list("topics")
        assert sorted(name for name in files if not name.endswith("-delete")) == [
            "again-0", "again-1", "fresh-0", "fresh-1", "kept-0",
        ]  # fmt: skip
        assert core.partitions[PartitionKey(kept, 0)].settings["retention_ms"] == 77_777
        assert await cluster.produce(kit, kept, 1) == [6]
        assert await cluster.produce(kit, second, 1) == [0]
        with pytest.raises(errors.UnknownTopicId):
            await cluster.produce(kit, gone, 1)
        with pytest.raises(errors.UnknownTopicId):
            await cluster.read(kit, again)
        assert core.metadata.image == cluster.controller.machine.image

    cluster.do(story())


@pytest.mark.parametrize("power", [False, True])
def test_a_broker_that_starts_behind_the_log_begins_with_the_snapshot(
    behind: Cluster, kit: Any, power: bool
) -> None:
    """broker/metadata_publisher M3 holds: a log that the snapshot does not name is a stray."""
    cluster = behind

    async def before() -> str:
        kept = await cluster.create("kept")
        await cluster.create("gone")
        await cluster.produce(kit, kept, 2)
        return str(kept)

    kept = cluster.do(before())
    at = cluster.broker.core.publisher.next_offset
    cluster.kill("broker", "d1", power=power)
    cluster.boot = "boot-2" if power else cluster.boot

    async def meanwhile() -> None:
        await ask(cluster, wire.DeleteTopicsRequest(names=["gone"]))
        await passed_over(cluster, at)

    cluster.broker = None
    cluster.do(meanwhile())
    cluster.start_broker()

    async def after() -> None:
        core = cluster.broker.core
        assert {key.topic_id for key in core.partitions} == {kept}
        assert await cluster.read(kit, kept) in (range(7) if power else (6,))

    cluster.do(after())
    assert cluster.broker.core.metadata.image == cluster.controller.machine.image


def test_a_controller_that_was_killed_goes_on_from_its_snapshot(behind: Cluster, kit: Any) -> None:
    cluster = behind

    async def before() -> str:
        kept = await cluster.create("kept")
        await cluster.produce(kit, kept, 2)
        await passed_over(cluster, 5)
        return str(kept)

    kept = cluster.do(before())
    image = cluster.controller.machine.image
    cluster.kill("controller", "meta", power=True)
    cluster.start_controller()

    async def after() -> None:
        await cluster.client.clock.sleep_ms(5_000)
        now = cluster.controller.machine.image
        assert cluster.controller.metadata.log_start > 0
        assert now.topics == image.topics
        assert await cluster.produce(kit, kept, 1) == [6]

    cluster.do(after())


def test_a_damaged_snapshot_is_not_taken_and_what_is_behind_the_one_before_it_is(
    behind: Cluster, kit: Any
) -> None:
    cluster = behind
    core = cluster.broker.core
    follower = core.publisher

    async def story() -> None:
        await cluster.create("kept")
        cluster.world.network.cut("broker", "controller")
        await passed_over(cluster, follower.next_offset + 5)
        storage, log = cluster.storages["meta"], cluster.controller.metadata
        await cluster.client.clock.sleep_ms(2_000)
        newest: SnapshotId = log.newest_snapshot
        file = storage.open(file_name(newest))
        file.write_at(file.size() // 2, b"rotten")
        file.close()
        cluster.world.network.heal("broker", "controller")
        await follower.reached(log.committed - 1, 3_000)
        await configure(cluster, "kept", "max_message_bytes", "3000")
        await follower.reached(log.committed - 1, 3_000)
        assert core.metadata.image == cluster.controller.machine.image

    cluster.do(story())
