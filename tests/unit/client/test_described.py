"""How the views of several brokers are combined into one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors
from pk.client.admin.described import describe_tier
from pk.wire import frames
from pk.wire import pk_pb2 as wire


class Brokers:
    """The answers of each broker; partition p is led by broker p."""

    def __init__(self, **replies: wire.DescribeTierReply | errors.PkError) -> None:
        self.replies = {int(name[1:]): reply for name, reply in replies.items()}

    async def brokers(self, timeout_ms: int) -> dict[int, str]:
        return {node: f"b{node}:1" for node in self.replies}

    async def call_node(self, node: int, request: Any, *, timeout_ms: int) -> Any:
        if isinstance(request, wire.MetadataRequest):
            reply = wire.MetadataReply(metadata_offset=node)
            info = reply.topics.add(name="t", topic_id=request.topic_ids[0])
            for each in self.replies:
                leader = each if node == max(self.replies) else 1  # the others are behind
                info.partitions.add(partition=each, leader=leader)
            return reply
        found = self.replies[node]
        if isinstance(found, errors.PkError):
            raise found
        return found


def table(version: int, **lags: int) -> wire.DescribeTierReply:
    reply = wire.DescribeTierReply(topic="t", topic_id="id", version=version, status="ok")
    reply.uri = "file:///t" if version >= 0 else ""
    for name, lag in lags.items():
        reply.partitions.add(partition=int(name[1:]), end=10 * version, lag=lag)
    return reply


def test_each_share_is_its_leaders() -> None:
    cluster: Any = Brokers(b1=table(3, p1=1, p2=90), b2=table(4, p1=80, p2=2), b3=table(-1, p3=3))
    found = asyncio.run(describe_tier(cluster, "t", 1_000))
    assert (found.uri, found.version, found.status) == ("file:///t", 4, "ok")
    assert [(p.partition, p.lag) for p in found.partitions] == [(1, 1), (2, 2), (3, 3)]
    assert found.problem is None


def test_what_a_leader_cannot_do_is_told() -> None:
    ill = table(3, p2=2)
    ill.status = "problem"
    ill.problem.CopyFrom(frames.error_of(errors.TierUnavailable("the store is away")))
    cluster: Any = Brokers(b1=table(4, p1=1), b2=ill, b3=errors.BrokerUnavailable("gone"))
    found = asyncio.run(describe_tier(cluster, "t", 1_000))
    assert (found.version, found.status) == (4, "problem")
    assert isinstance(found.problem, errors.TierUnavailable)


def test_a_topic_that_nobody_knows_is_an_error() -> None:
    unknown = errors.UnknownTopicOrPartition("topic 't' does not exist")
    cluster: Any = Brokers(b1=unknown, b2=unknown)
    with pytest.raises(errors.UnknownTopicOrPartition):
        asyncio.run(describe_tier(cluster, "t", 1_000))
