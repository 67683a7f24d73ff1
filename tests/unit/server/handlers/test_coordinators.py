"""Find the coordinator of a transactional id; what clients may do with an internal topic."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors, group_ids, limits, transactional_ids
from pk.server.handlers.coordinators import GROUP, TRANSACTION
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind

NAME = transactional_ids.TOPIC


async def find(caller: Any, key: str, key_type: int = TRANSACTION) -> wire.FindCoordinatorReply:
    request = wire.FindCoordinatorRequest(key=key, key_type=key_type)
    frame = await caller.call(request, timeout_ms=10_000)
    reply: wire.FindCoordinatorReply = frame.head.find_coordinator_reply
    return reply


def test_the_first_request_creates_the_internal_topic(cluster: Any) -> None:
    """However many ask at once, the controller is asked once; the reply has a leader."""
    cluster.start()
    image = cluster.broker.core.metadata.image
    lifecycle = cluster.broker.core.lifecycle
    asked: list[Any] = []
    call = lifecycle.call

    async def counted(request: Any, timeout_ms: int) -> Any:
        if isinstance(request, wire.CreateInternalTopicRequest):
            asked.append(request)
        return await call(request, timeout_ms)

    lifecycle.call = counted

    async def story() -> None:
        caller = cluster.caller()
        assert image.topic(NAME) is None
        keys = [f"job-{n}" for n in range(40)]
        found = await asyncio.gather(*(find(caller, key) for key in keys))
        for key, reply in zip(keys, found, strict=True):
            assert reply.partition == transactional_ids.partition_of_id(key)
            assert (reply.node_id, reply.address) == (1, cluster.broker.address)
        assert len(asked) == 1
        topic = image.topic(NAME)
        assert len(topic.partitions) == transactional_ids.PARTITIONS
        for number in topic.partitions:
            partition = cluster.broker.core.partitions[PartitionKey(topic.topic_id, number)]
            assert partition.leader is not None
            assert not partition.tiered
            assert partition.leader.in_sync_required == 1
        await caller.close()

    cluster.do(story())


def test_keys_that_are_refused(cluster: Any) -> None:
    cluster.start()

    async def story() -> None:
        caller = cluster.caller()
        for key in ("", "x" * (limits.TRANSACTIONAL_ID_BYTES_MAX + 1), "ü" * 125):
            with pytest.raises(errors.InvalidRequest):
                await find(caller, key)
        for key in ("", "x" * (limits.GROUP_ID_BYTES_MAX + 1)):
            with pytest.raises(errors.InvalidRequest, match="a group id"):
                await find(caller, key, GROUP)
        with pytest.raises(errors.InvalidRequest):
            await find(caller, "key", 2)
        assert cluster.broker.core.metadata.image.topic(NAME) is None
        await find(caller, "x" * limits.TRANSACTIONAL_ID_BYTES_MAX)
        await caller.close()

    cluster.do(story())


def test_a_group_has_a_coordinator_of_its_own_internal_topic(cluster: Any) -> None:
    cluster.start()

    async def story() -> None:
        caller = cluster.caller()
        reply = await find(caller, "group", GROUP)
        assert reply.partition == group_ids.partition_of_group("group")
        topic = cluster.broker.core.metadata.image.topic(group_ids.TOPIC)
        assert len(topic.partitions) == group_ids.PARTITIONS
        assert cluster.broker.core.metadata.image.topic(NAME) is None
        await caller.close()

    cluster.do(story())


def test_a_partition_without_a_leader_has_no_coordinator_now(cluster: Any) -> None:
    """The error is retriable, as is that of a topic that cannot be created now."""
    cluster.start()
    core = cluster.broker.core

    async def story() -> None:
        caller = cluster.caller()
        call = core.lifecycle.call

        async def away(request: Any, timeout_ms: int) -> Any:
            raise errors.ControllerUnavailable("no controller is active yet")

        core.lifecycle.call = away
        with pytest.raises(errors.CoordinatorUnavailable, match="no controller is active"):
            await find(caller, "a")
        core.lifecycle.call = call
        number = (await find(caller, "a")).partition
        topic = core.metadata.image.topic(NAME)
        topic.partitions[number] = topic.partitions[number]._replace(leader=NONE)
        with pytest.raises(errors.CoordinatorUnavailable, match=f"{NAME}-{number} has no leader"):
            await find(caller, "a")
        await caller.close()

    cluster.do(story())


def test_clients_read_an_internal_topic_and_do_not_write_it(cluster: Any, kit: Any) -> None:
    cluster.start()
    core = cluster.broker.core

    async def story() -> None:
        caller = cluster.caller()
        await find(caller, "a")
        topic_id = core.metadata.image.topic_ids[NAME]
        for acks in (1, -1):
            with pytest.raises(errors.InvalidTopic, match="cannot produce"):
                await cluster.produce(kit, topic_id, 1, acks=acks)
        request = wire.DeleteRecordsRequest()
        request.items.add(topic_id=topic_id, partition=0, before_offset=NONE)
        frame = await caller.call(request, timeout_ms=10_000)
        (result,) = frame.head.delete_records_reply.results
        assert result.error.code == errors.InvalidTopic.code
        stream = await cluster.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(wire.FetchPosition(
            topic_id=topic_id, partition=0, fetch_offset=0, current_leader_epoch=NONE,
            last_fetched_epoch=NONE, position_id=1,
        )))  # fmt: skip
        reply, _ = await kit.fetched(stream)
        assert not reply.partitions[0].HasField("error")
        stream.close()
        await caller.close()

    cluster.do(story())
