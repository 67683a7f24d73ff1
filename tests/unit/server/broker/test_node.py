"""Broker and controller nodes together, in one simulated world: the production files unmodified.

Rules Q2, Q4, L3, L5, L8, R6, R7; graceful stop, kill -9 and power loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.server.handlers.metadata import WATCHED_MAX
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, open_stream
from pk.world import StreamKind

Cluster = Any  # conftest.py's
LISTEN = "broker:9292"


def test_a_created_topic_can_be_produced_to_at_once(cluster: Cluster, kit: Any) -> None:
    """Read your writes: the reply comes after the broker has carried out the creation."""
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("flights", 3)
        assert await cluster.produce(kit, topic_id, 3) == [0, 3, 6]
        assert await cluster.read(kit, topic_id) == 9
        with pytest.raises(errors.TopicAlreadyExists):
            await cluster.create("flights")

    cluster.do(story())


def test_metadata_is_pushed_to_those_who_watch(cluster: Cluster) -> None:
    cluster.start()

    async def story() -> None:
        pushed: list[wire.MetadataReply] = []
        caller = cluster.caller(on_push=lambda frame: pushed.append(frame.head.metadata_reply))
        request = wire.MetadataRequest(topics=["flights"], watch=True)
        first = (await caller.call(request, timeout_ms=1_000)).head.metadata_reply
        assert first.topics[0].error.code == errors.UnknownTopicOrPartition.code
        assert [node.address for node in first.brokers] == [LISTEN]
        await cluster.create("other")
        topic_id = await cluster.create("flights", 2)
        await cluster.client.clock.sleep_ms(100)
        assert pushed
        assert pushed[-1].topics[0].topic_id == topic_id
        assert [info.leader for info in pushed[-1].topics[0].partitions] == [1, 1]
        assert not any(topic.name == "other" for reply in pushed for topic in reply.topics)
        await caller.close()

    cluster.do(story())


def test_a_stream_can_watch_more_topics(cluster: Cluster) -> None:
    cluster.start()

    async def story() -> None:
        pushed: list[wire.MetadataReply] = []
        caller = cluster.caller(on_push=lambda frame: pushed.append(frame.head.metadata_reply))
        more = wire.MetadataRequest(topics=["second"], watch=True, adds=True)
        with pytest.raises(errors.InvalidRequest, match="watches no topics yet"):
            await caller.call(more, timeout_ms=1_000)
        one = wire.MetadataRequest(topics=["first"], watch=True)
        await caller.call(one, timeout_ms=1_000)
        reply = (await caller.call(more, timeout_ms=1_000)).head.metadata_reply
        assert [each.name for each in reply.topics] == ["second"]
        for name in ("first", "second"):
            await cluster.create(name)
            await cluster.client.clock.sleep_ms(100)
            assert [each.name for each in pushed[-1].topics] == ["first", "second"]
            (info,) = [each for each in pushed[-1].topics if each.name == name]
            assert not info.HasField("error")
        many = [f"t{number}" for number in range(WATCHED_MAX)]
        with pytest.raises(errors.InvalidRequest, match="ask for all topics"):
            await caller.call(
                wire.MetadataRequest(topics=many, watch=True, adds=True), timeout_ms=10_000
            )
        await caller.close()

    cluster.do(story())


def test_a_topic_created_again_is_another_one(cluster: Cluster, kit: Any) -> None:
    # rule L8
    cluster.start()

    async def story() -> None:
        old = await cluster.create("flights")
        await cluster.produce(kit, old, 2)
        caller = cluster.caller()
        await caller.call(wire.DeleteTopicsRequest(names=["flights"]), timeout_ms=10_000)
        new = await cluster.create("flights")
        assert new != old
        with pytest.raises(errors.UnknownTopicId):
            await cluster.produce(kit, old, 1)
        with pytest.raises(errors.UnknownTopicId):
            await cluster.read(kit, old)
        assert await cluster.produce(kit, new, 1) == [0]
        await caller.close()

    cluster.do(story())


def test_settings_are_applied_live_and_partitions_added(cluster: Cluster, kit: Any) -> None:
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("flights")
        caller = cluster.caller()
        change = wire.AlterConfigsRequest()
        change.changes.add(resource=wire.ConfigResource(type="topic", name="flights")).set[
            "max_message_bytes"
        ] = "1024"
        await caller.call(change, timeout_ms=10_000)
        stream = await cluster.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch(500)), topic_id=topic_id))
        (answer,) = await kit.results(stream, 1)
        assert answer.error.code == errors.RecordTooLarge.code
        more = wire.CreatePartitionsRequest()
        more.topics.add(name="flights", total_count=4)
        await caller.call(more, timeout_ms=10_000)
        described = await caller.call(
            wire.DescribePartitionsRequest(topics=["flights"]), timeout_ms=1_000
        )
        states = described.head.describe_partitions_reply.partitions
        assert [state.partition for state in states] == [0, 1, 2, 3]
        assert all(state.leader == 1 and not state.HasField("error") for state in states)
        await caller.close()

    cluster.do(story())


def test_a_producer_id_of_transactions_needs_its_transactional_id(cluster: Cluster) -> None:
    """Rule X3: without it, no epoch of such an id is given out."""
    cluster.start()

    async def story() -> None:
        caller = cluster.caller()
        request = wire.InitProducerIdRequest(
            producer_id=transactional_ids.producer_id(3, 1, 0), producer_epoch=0
        )
        with pytest.raises(errors.InvalidRequest, match="name its transactional id"):
            await caller.call(request, timeout_ms=5_000)
        await caller.close()

    cluster.do(story())


def test_producer_ids_are_unique_across_restarts(cluster: Cluster) -> None:
    """Rule Q4: blocks are records of the metadata log."""
    cluster.start()

    async def ask() -> tuple[int, int]:
        caller = cluster.caller()
        request = wire.InitProducerIdRequest(producer_id=-1, producer_epoch=-1)
        reply = (await caller.call(request, timeout_ms=5_000)).head.init_producer_id_reply
        bumped = await caller.call(
            wire.InitProducerIdRequest(producer_id=reply.producer_id, producer_epoch=0),
            timeout_ms=5_000,
        )
        assert bumped.head.init_producer_id_reply.producer_id == reply.producer_id
        assert bumped.head.init_producer_id_reply.producer_epoch == 1
        await caller.close()
        return reply.producer_id, reply.producer_epoch

    seen = [cluster.do(ask()) for _ in range(3)]
    cluster.kill("broker", "d1")
    cluster.start_broker()
    seen.append(cluster.do(ask()))
    assert len(set(seen)) == 4


@pytest.mark.parametrize("power", [False, True])
def test_acknowledged_records_survive(
    kit: Any, make_cluster: Callable[..., Cluster], power: bool
) -> None:
    """Rule L3: the process dies, or the machine loses its power (with flush_on_ack)."""
    for seed in range(5):
        cluster = make_cluster(seed)
        cluster.start()
        flush = {"flush_on_ack": "true"} if power else {}
        topic_id = cluster.do(cluster.create("flights", **flush))
        acknowledged = len(cluster.do(cluster.produce(kit, topic_id, 5))) * 3
        cluster.kill("broker", "d1", power=power)
        if power:
            cluster.boot = f"boot-after-{seed}"
        cluster.start_broker()
        assert cluster.do(cluster.read(kit, topic_id)) == acknowledged
        assert cluster.do(cluster.produce(kit, topic_id, 1)) == [acknowledged]


def test_the_controller_dies_and_the_data_path_goes_on(cluster: Cluster, kit: Any) -> None:
    """Rule R6: acks=all and reads continue; after the session timeout acks=1 and new sessions
    wait.
    """
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))

    async def story() -> None:
        writer = await cluster.stream(StreamKind.PRODUCE)
        cluster.kill("controller", "meta")
        await cluster.client.clock.sleep_ms(8_000)
        for acks, refused in ((-1, 0), (1, errors.ControllerUnavailable.code)):
            await writer.send(
                kit.produce((0, kit.batch()), topic_id=topic_id, acks=acks, correlation_id=acks + 5)
            )
            (answer,) = await kit.results(writer, 1)
            assert answer.error.code == refused
        with pytest.raises(errors.ControllerUnavailable):
            await cluster.produce(kit, topic_id, 1)

    cluster.do(story())
    cluster.start_controller()
    cluster.world.loop.run_for_ms(3_000)
    assert cluster.do(cluster.produce(kit, topic_id, 1, acks=1)) == [3]


def test_a_graceful_stop_leaves_a_clean_directory(cluster: Cluster, kit: Any) -> None:
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))
    cluster.do(cluster.produce(kit, topic_id, 4))
    broker = cluster.broker
    assert broker is not None

    async def stop() -> None:
        await broker.close()

    task = cluster.world.spawn("broker", stop())
    cluster.world.run_until(task.done)
    task.result()
    cluster.kill("broker", "d1", power=True)  # a power loss after a clean stop loses nothing
    cluster.boot = "boot-2"
    cluster.start_broker()
    assert cluster.broker is not None
    assert cluster.broker._manager.directories[0].clean
    assert cluster.do(cluster.read(kit, topic_id)) == 12


def test_two_worlds_of_one_seed_are_one_history(
    kit: Any, make_cluster: Callable[..., Cluster]
) -> None:
    def history(seed: int) -> str:
        cluster = make_cluster(seed)
        cluster.start()
        topic_id = cluster.do(cluster.create("flights", 2))
        cluster.do(cluster.produce(kit, topic_id, 3))
        cluster.kill("broker", "d1")
        cluster.start_broker()
        cluster.do(cluster.read(kit, topic_id))
        digest = f"{cluster.world.digest} {cluster.world.loop.now_us} {cluster.world.loop.events}"
        return digest

    assert history(3) == history(3)
    assert history(3) != history(4)


def test_queries_about_offsets(cluster: Cluster, kit: Any) -> None:
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))
    cluster.do(cluster.produce(kit, topic_id, 4))

    async def story() -> None:
        caller = cluster.caller()

        async def ask(timestamp_ms: int) -> tuple[int, int]:
            request = wire.ListOffsetsRequest(isolation=1)
            request.queries.add(
                topic_id=topic_id, current_leader_epoch=-1, timestamp_ms=timestamp_ms
            )
            reply = (await caller.call(request, timeout_ms=5_000)).head.list_offsets_reply
            assert not reply.answers[0].HasField("error"), reply
            return reply.answers[0].offset, reply.answers[0].timestamp_ms

        assert await ask(-1) == (12, -1)
        assert await ask(-2) == (0, -1)
        assert await ask(-4) == (0, -1)
        assert await ask(-5) == (-1, -1)
        assert await ask(-3) == (0, 1_735_689_600_000)
        assert await ask(0) == (0, 1_735_689_600_000)
        assert await ask(1_735_689_600_001) == (-1, -1)
        delete = wire.DeleteRecordsRequest()
        delete.items.add(topic_id=topic_id, before_offset=4)
        delete.items.add(topic_id=topic_id, before_offset=99)
        deleted = (await caller.call(delete, timeout_ms=5_000)).head.delete_records_reply
        assert deleted.results[0].log_start == 4
        assert deleted.results[1].error.code == errors.OffsetOutOfRange.code
        assert await ask(-2) == (4, -1)
        sizes = wire.ByteOffsetsRequest()
        sizes.queries.add(topic_id=topic_id, start=0, end=100, samples_max=10)
        (answer,) = (await caller.call(sizes, timeout_ms=5_000)).head.byte_offsets_reply.answers
        assert (answer.offsets[0], answer.offsets[-1]) == (4, 12)
        assert list(answer.cumulative_bytes) == sorted(answer.cumulative_bytes)
        await caller.close()

    cluster.do(story())
    assert cluster.broker is not None
    key = PartitionKey(topic_id, 0)
    cluster.kill("broker", "d1", power=True)  # the moved log_start was SYNCED before the answer
    cluster.boot = "boot-2"
    cluster.start_broker()
    assert cluster.broker.core.partitions[key].log.log_start == 4


def test_a_dead_directory_takes_its_own_partitions_offline(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """One disk fails: its partitions answer with typed errors, and the others serve.

    A restart does not hide the failure.
    """
    cluster = make_cluster(5, disks=2)
    cluster.start()
    one, two = (cluster.do(cluster.create(name)) for name in ("one", "two"))
    partitions = cluster.broker.core.partitions
    roots = {
        key.topic_id: partition.writer.disk.storage.root for key, partition in partitions.items()
    }
    assert roots[one] != roots[two]
    assert cluster.do(cluster.produce(kit, one, 1)) == [0]
    cluster.storages[roots[one]].fault = lambda operation, path: (
        OSError("I/O error") if operation in ("append", "sync") else None
    )
    with pytest.raises(errors.StorageFailed):
        cluster.do(cluster.produce(kit, one, 1))
    assert cluster.do(cluster.produce(kit, two, 2)) == [0, 3]
    assert cluster.do(cluster.read(kit, two)) == 6
    with pytest.raises(errors.StorageFailed):
        cluster.do(cluster.read(kit, one))
    three = cluster.do(cluster.create("three"))
    assert cluster.do(cluster.produce(kit, three, 1)) == [0]

    # a new process finds the directory failed: its logs exist and cannot be read
    cluster.kill("broker", roots[one])
    cluster.storages[roots[two]].crash()
    dead = OSError("I/O error")
    cluster.storages[roots[one]].fault = lambda operation, path: dead
    cluster.start_broker()
    for refused in (cluster.produce(kit, one, 1), cluster.read(kit, one)):
        with pytest.raises(errors.StorageFailed, match=roots[one]):
            cluster.do(refused)
    assert cluster.do(cluster.read(kit, two)) == 6
    assert cluster.do(cluster.produce(kit, three, 1)) == [3]
    four = cluster.do(cluster.create("four"))
    assert cluster.do(cluster.produce(kit, four, 1)) == [0]

    # the disk answers again
    for name in roots[one], roots[two]:
        cluster.storages[name].fault = None
        cluster.kill("broker", name)
    cluster.start_broker()
    assert cluster.do(cluster.read(kit, one)) == 3
    assert cluster.do(cluster.produce(kit, one, 1)) == [3]
    assert [cluster.do(cluster.read(kit, topic)) for topic in (two, three, four)] == [6, 6, 3]


def test_a_directory_whose_checkpoints_fail_is_offline_without_an_append(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    """Rule L2: its partitions answer describe, read and write requests with the error at once; the
    metric counts it.
    """
    cluster = make_cluster(6, disks=2, log_flush_offset_checkpoint_interval_ms=1_000)
    cluster.start()
    one, two = (cluster.do(cluster.create(name)) for name in ("one", "two"))
    for topic_id in (one, two):
        cluster.do(cluster.produce(kit, topic_id, 1))
    assert cluster.broker is not None
    core = cluster.broker.core
    root = core.partitions[PartitionKey(one, 0)].writer.disk.storage.root
    warned: list[tuple[str, dict[str, Any]]] = []
    core.env.warn = lambda event, **facts: warned.append((event, facts))
    cluster.storages[root].fault = lambda operation, path: (
        OSError("I/O error") if operation == "append" and path.endswith(".tmp") else None
    )
    cluster.world.loop.run_for_ms(6_000)

    async def story() -> None:
        caller = cluster.caller()
        frame = await caller.call(wire.DescribePartitionsRequest(), timeout_ms=5_000)
        problems = {
            each.topic: each.error.code for each in frame.head.describe_partitions_reply.partitions
        }
        assert problems == {"one": errors.StorageFailed.code, "two": 0}
        await caller.close()

    cluster.do(story())
    assert [event for event, _ in warned] == ["directory_offline"]
    assert warned[0][1]["directory"] == root
    assert core.env.metrics.offline_directories._value.get() == 1
    for refused in (cluster.produce(kit, one, 1), cluster.read(kit, one)):
        with pytest.raises(errors.StorageFailed, match=root):
            cluster.do(refused)
    assert cluster.do(cluster.produce(kit, two, 1)) == [3]


def test_a_full_disk_pushes_back_and_resumes_by_itself(cluster: Cluster, kit: Any) -> None:
    """The errors are retriable and typed, reads continue, and topics created meanwhile appear once
    there is space.
    """
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))
    cluster.do(cluster.produce(kit, topic_id, 2))
    disk = cluster.storages["d1"]
    disk.capacity = disk.used_bytes()
    with pytest.raises(errors.StorageFull):
        cluster.do(cluster.produce(kit, topic_id, 1))
    assert cluster.do(cluster.read(kit, topic_id)) == 6
    late = cluster.do(cluster.create("late"))
    with pytest.raises(errors.StorageFull):
        cluster.do(cluster.produce(kit, late, 1))
    cluster.world.loop.run_for_ms(120_000)  # only checkpoints may fail meanwhile
    assert cluster.do(cluster.read(kit, topic_id)) == 6
    disk.capacity = None
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [6]
    cluster.world.loop.run_for_ms(10_000)
    assert cluster.do(cluster.produce(kit, late, 1)) == [0]
    cluster.kill("broker", "d1")
    cluster.start_broker()
    assert cluster.do(cluster.read(kit, topic_id)) == 9


def test_a_topic_is_created_on_first_use_if_asked(
    make_cluster: Callable[..., Cluster], kit: Any
) -> None:
    cluster = make_cluster(7, auto_create_topics_enable=True, default_num_partitions=3)
    cluster.start()

    async def story() -> None:
        caller = cluster.caller()
        request = wire.MetadataRequest(topics=["flights", "__secret"])
        reply = (await caller.call(request, timeout_ms=5_000)).head.metadata_reply
        known, refused = reply.topics
        assert len(known.partitions) == 3
        assert refused.error.code == errors.UnknownTopicOrPartition.code
        assert await cluster.produce(kit, known.topic_id, 1) == [0]
        await caller.close()

    cluster.do(story())


def test_a_directory_of_another_cluster_is_refused(cluster: Cluster) -> None:
    cluster.start()
    cluster.kill("broker", "d1")
    cluster.run = dataclasses.replace(cluster.run, node_id=2)
    with pytest.raises(errors.DirectoryOfAnotherCluster):
        cluster.start_broker()


def test_metadata_begun_anew_remove_nothing_of_what_is_there(cluster: Cluster, kit: Any) -> None:
    """Q2: every partition would be a stray; the broker ends with the reason, whatever it waits
    for.
    """
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [0]
    cluster.kill("broker", "d1")
    cluster.start_broker()  # registered above whatever metadata begin with
    cluster.kill("broker", "d1")
    known = cluster.storages["meta"]
    cluster.kill("controller", "meta")
    cluster.replace_storage("meta")
    cluster.start_controller()
    with pytest.raises(errors.MetadataBehind) as refused:
        cluster.start_broker()
    assert refused.value.acts == "operator"
    cluster.world.loop.run_for_ms(120_000)
    cluster.kill("broker", "d1")
    cluster.kill("controller", "meta")
    cluster.storages["meta"] = known
    cluster.start()
    assert cluster.do(cluster.read(kit, topic_id)) == 3


def test_a_directory_that_was_restored_from_an_older_copy_is_not_clean(
    make_cluster: Callable[..., Cluster],
) -> None:
    """L3: it was closed in order, but not by the process that closed the other directory last."""
    cluster = make_cluster(6, disks=2)
    cluster.start()

    def restart() -> Any:
        task = cluster.world.spawn("broker", cluster.broker.close())
        cluster.world.run_until(task.done)
        before = cluster.storages["d2"].read_file("clean-shutdown")
        cluster.kill("broker", "d1", power=True)
        cluster.boot += "+"
        return before

    older = restart()
    cluster.start_broker()
    assert cluster.broker._identity().clean_shutdown
    assert restart() != older
    cluster.storages["d2"].replace_file("clean-shutdown", older)
    cluster.start_broker()
    assert not cluster.broker._identity().clean_shutdown


def test_streams_are_refused_by_name(cluster: Cluster) -> None:
    """A frame that is no hello, a client of another cluster, and a request of an unknown kind."""
    cluster.start()

    async def story() -> None:
        caller = cluster.caller()
        with pytest.raises(errors.UnsupportedFeature):
            await caller.call(wire.RegisterBrokerRequest(), timeout_ms=1_000)
        await caller.close()
        network = cluster.client.network
        stray = wire.Hello(protocol=PROTOCOL, cluster_id="x" * 36)
        unknown = wire.Hello(protocol=99, protocol_min=99)
        with pytest.raises(errors.ClusterIdMismatch):
            await open_stream(network, LISTEN, StreamKind.CONTROL, stray)
        with pytest.raises(errors.UnsupportedFeature):
            await open_stream(network, LISTEN, StreamKind.FETCH, unknown)

    cluster.do(story())


def test_a_clock_that_jumped_makes_no_producer_unknown(cluster: Any, kit: Any) -> None:
    """Rules L6, L10: a producer that did not learn that its batch is stored sends it again."""
    cluster.start()
    again = kit.batch(producer_id=7, producer_epoch=0, base_sequence=0)

    async def sends(topic_id: str) -> int:
        stream = await cluster.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, again), topic_id=topic_id))
        (answer,) = await kit.results(stream, 1)
        stream.close()
        assert not answer.HasField("error"), answer
        return int(answer.base_offset)

    async def story() -> None:
        topic_id = await cluster.create("t")
        assert await sends(topic_id) == 0
        await cluster.client.clock.sleep_ms(1_000)
        cluster.world.clocks["broker"].step(48 * 3_600_000)
        await cluster.client.clock.sleep_ms(130_000)  # checkpoints were written
        assert await sends(topic_id) == 0, "it was stored twice"

    cluster.do(story())


def test_the_time_that_things_expire_by_is_one_that_was_judged(cluster: Any) -> None:
    """Rule L10: the clock may jump between two ticks; records expire only by a checked reading."""
    cluster.start()
    clocks, clock = cluster.broker.core.clocks, cluster.world.clocks["broker"]
    cluster.world.loop.run_for_ms(2_000)
    assert clocks.trusted_ms() == clock.wall_ms()
    clock.step(48 * 3_600_000)
    assert clocks.trusted_ms() is None
    clock.step(-48 * 3_600_000)
    assert clocks.trusted_ms() == clock.wall_ms()
