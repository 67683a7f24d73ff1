"""Markers reach every partition of a transaction: rules X3 and X5."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors, limits
from pk.server.transactions.commands import ParticipantMarker
from pk.server.transactions.marker_sender import Ending, TransactionMarkerSender
from pk.sim.world import SimWorld
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

A, B, C = (PartitionKey(f"topic-{name}", 0) for name in "abc")


class Cluster:
    """Metadata of three partitions, and leaders that write markers as the test says."""

    def __init__(self) -> None:
        self.leaders: dict[PartitionKey, int] = {A: 1, B: 1, C: 2}
        self.image = SimpleNamespace(offset=10, partition=self.leaders.get)
        self.leader_of = lambda key: self.leaders.get(key, NONE)
        self.requests: list[tuple[int, wire.WriteTxnMarkersRequest]] = []
        self.refuse: Callable[[int, PartitionKey], errors.PkError | None] = lambda node, key: None
        self.done: list[Ending] = []

    async def call(self, node: int, request: Any, timeout_ms: int) -> Any:
        kept = wire.WriteTxnMarkersRequest()
        kept.CopyFrom(request)
        self.requests.append((node, kept))
        reply = wire.WriteTxnMarkersReply()
        for index, marker in enumerate(request.markers):
            for place in marker.partitions:
                key = PartitionKey(place.topic_id, place.partition)
                result = reply.results.add(
                    marker=index, topic_id=key.topic_id, partition=key.partition
                )
                refusal = self.refuse(node, key)
                if refusal is not None:
                    result.error.CopyFrom(frames.error_of(refusal))
        return reply


def ending(*keys: PartitionKey, epoch: int = 1, metadata_offset: int = 0) -> Ending:
    marker = ParticipantMarker(1 << 62, epoch, True)
    return Ending("job", (marker,), 5, keys, metadata_offset)


def run(story: Callable[[Cluster, TransactionMarkerSender, Any], Any]) -> None:
    world = SimWorld(1)
    cluster = Cluster()

    mine = world.world_of("broker")

    async def main() -> None:
        bugs: list[BaseException] = []
        sender = TransactionMarkerSender(mine, cluster, cluster, cluster.done.append, bugs.append)
        await story(cluster, sender, mine.clock)
        await sender.close()
        assert not bugs

    task = world.spawn("broker", main())
    world.run_until(task.done)
    task.result()
    world.close()


def test_one_request_per_leader_has_all_markers() -> None:
    async def story(cluster: Cluster, sender: TransactionMarkerSender, clock: Any) -> None:
        sender.deliver(ending(A, B, C))
        sender.deliver(ending(A, B, C))  # delivered already
        sender.deliver(ending(A, C, epoch=3))
        await clock.sleep_ms(5_000)
        assert sorted(each.markers[0].producer_epoch for each in cluster.done) == [1, 3]
        assert sum(len(m.partitions) for _, r in cluster.requests for m in r.markers) == 5
        assert all(
            m.commit and m.coordinator_epoch == 5 for _, r in cluster.requests for m in r.markers
        )

    run(story)


def test_the_markers_of_all_participants_reach_a_partition_in_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So they are one control batch there (replica/markers M1); requests are bounded."""
    monkeypatch.setattr(limits, "TXN_MARKERS_MAX", 5)
    markers = tuple(ParticipantMarker(1 << 62 | n, 1, n > 0) for n in range(3))
    batch = Ending("job", markers, 5, (A, B, C), 0, transaction=4, batch=7)

    async def story(cluster: Cluster, sender: TransactionMarkerSender, clock: Any) -> None:
        cluster.refuse = lambda node, key: (
            errors.NotEnoughReplicas("one left") if key == C else None
        )
        sender.deliver(batch)
        await clock.sleep_ms(2_000)
        assert not cluster.done
        for _, request in cluster.requests:
            assert {len(marker.partitions) for marker in request.markers} == {1}
            assert [marker.commit for marker in request.markers] == [False, True, True]
            assert {(m.application, m.batch_id, m.partition_count) for m in request.markers} == {
                ("job", 7, 3)
            }
        cluster.refuse = lambda node, key: None
        await clock.sleep_ms(3_000)
        assert cluster.done == [batch]

    run(story)


def test_a_refused_marker_is_sent_again_to_the_new_leader() -> None:
    async def story(cluster: Cluster, sender: TransactionMarkerSender, clock: Any) -> None:
        cluster.refuse = lambda node, key: (
            errors.NotLeaderOrFollower("moved") if key == A and node == 1 else None
        )
        sender.deliver(ending(A, B))
        await clock.sleep_ms(3_000)
        assert not cluster.done
        cluster.leaders[A] = 2
        await clock.sleep_ms(3_000)
        assert cluster.done == [ending(A, B)]
        sent_b = [n for n, r in cluster.requests for m in r.markers for p in m.partitions
                  if p.topic_id == B.topic_id]  # fmt: skip
        assert sent_b == [1], "a written marker is not sent again"

    run(story)


def test_a_deleted_topic_counts_only_in_a_new_image() -> None:
    """An image that is older than the leader's may not have the topic yet."""

    async def story(cluster: Cluster, sender: TransactionMarkerSender, clock: Any) -> None:
        del cluster.leaders[A]
        sender.deliver(ending(A, metadata_offset=11))
        await clock.sleep_ms(10_000)
        assert not cluster.done
        cluster.image.offset = 11
        await clock.sleep_ms(3_000)
        assert cluster.done == [ending(A, metadata_offset=11)]
        assert not cluster.requests

    run(story)


def test_a_dropped_ending_is_left_to_the_next_coordinator() -> None:
    async def story(cluster: Cluster, sender: TransactionMarkerSender, clock: Any) -> None:
        cluster.refuse = lambda node, key: errors.NotEnoughReplicas("one left")
        sender.deliver(ending(A))
        await clock.sleep_ms(1_000)
        sender.drop(ending(A))
        sent = len(cluster.requests)
        await clock.sleep_ms(10_000)
        assert len(cluster.requests) == sent
        assert not cluster.done

    run(story)
