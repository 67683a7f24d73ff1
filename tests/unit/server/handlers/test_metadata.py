"""What descriptions of topics for clients cost (handlers/metadata M2)."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from pk.server.handlers.metadata import MetadataRequests, MetadataSubscription
from pk.server.metadata.image import TopicState
from pk.wire import pk_pb2 as wire

Cluster = Any  # conftest.py's
CLIENTS = 5


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each topic is described."""
    found: Counter[str] = Counter()
    info_of = MetadataRequests._info_of

    def counted(self: MetadataRequests, topic: TopicState) -> wire.TopicInfo:
        found[topic.name] += 1
        return info_of(self, topic)

    monkeypatch.setattr(MetadataRequests, "_info_of", counted)
    return found


def test_a_topic_is_described_once_for_all_clients(
    cluster: Cluster, described: Counter[str]
) -> None:
    cluster.start()

    async def story() -> None:
        pushed: list[wire.MetadataReply] = []
        await cluster.create("flights", 2)
        await cluster.create("other")
        callers = [
            cluster.caller(on_push=lambda frame: pushed.append(frame.head.metadata_reply))
            for _ in range(CLIENTS)
        ]
        request = wire.MetadataRequest(topics=["flights", "none"], watch=True)
        replies = [
            (await caller.call(request, timeout_ms=1_000)).head.metadata_reply for caller in callers
        ]
        assert described == {"flights": 1}
        assert all(reply == replies[0] for reply in replies)
        (topic, missing) = replies[0].topics
        assert [each.leader for each in topic.partitions] == [1, 1]
        assert missing.HasField("error")

        more = wire.CreatePartitionsRequest()
        more.topics.add(name="flights", total_count=4)
        await callers[0].call(more, timeout_ms=10_000)
        await cluster.client.clock.sleep_ms(100)
        assert len(pushed) == CLIENTS
        assert all(reply == pushed[0] for reply in pushed)
        assert [each.leader for each in pushed[0].topics[0].partitions] == [1] * 4
        assert described == {"flights": 2}
        for caller in callers:
            await caller.close()

    cluster.do(story())


def test_a_topic_more_costs_the_same_beside_many() -> None:
    """A stream that touched one topic after another copied the names of all of them each time."""

    async def story() -> int:
        asked: Any = SimpleNamespace(reply=lambda request: wire.MetadataReply())
        progress: Any = SimpleNamespace(listeners={})
        stream: Any = SimpleNamespace()
        watching = MetadataSubscription(asked, progress, stream)
        many = wire.MetadataRequest(topics=[f"t{number}" for number in range(50_000)], watch=True)
        watching.begin(many, wire.MetadataReply())
        tracemalloc.start()
        for name in ("one", "another"):
            more = wire.MetadataRequest(topics=[name], watch=True, adds=True)
            watching.begin(more, wire.MetadataReply())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        await watching.close()
        return peak

    assert asyncio.run(story()) < 100_000
