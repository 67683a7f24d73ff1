"""The calls of `AdminClient` that concern the replicas and the leaders of partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pk import errors
from pk.client import arguments
from pk.client.admin.connection import AdminConnection
from pk.client.endings import refusal
from pk.client.network_client import UNKNOWN_TOPIC_MS, NetworkClient
from pk.types import PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class PartitionReassignment:
    """A reassignment in progress; `replicas`: the new ones, then those that will be removed."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]
    topic_id: str = ""


class ReassignmentCalls:
    """The calls that concern replicas and leaders; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def alter_partition_reassignments(
        self,
        reassignments: Mapping[TopicPartition, Iterable[int] | None],
        topic_ids: Mapping[str, str] | None,
        expected: Mapping[TopicPartition, Iterable[int]] | None,
        force: bool,
        timeout_s: float,
    ) -> dict[TopicPartition, errors.PkError | None]:
        """Assign new replicas to partitions, or cancel their reassignment."""
        request = wire.AlterReassignmentsRequest(force=arguments.flag(force, "force"))
        asked = arguments.by_place(reassignments, "reassignments", "lists of broker ids")
        before = {} if expected is None else expected
        before = arguments.by_place(before, "expected", "lists of broker ids")
        for place, replicas in asked.items():
            request.reassignments.add(
                topic=place.topic, partition=place.partition, cancel=replicas is None,
                replicas=_members(() if replicas is None else replicas, "reassignments"),
                expected=_members(before.get(place, ()), "expected"),
            )  # fmt: skip
        ids = {} if topic_ids is None else arguments.topic_ids(topic_ids, "topic_ids")
        unknown = sorted({place.topic for place in asked} - ids.keys())
        deadline_s = self._connection.deadline_s(timeout_s)
        if unknown:
            ids |= self.topic_ids(unknown, timeout_s)
            timeout_s = self._connection.left_s(deadline_s)
        late = [name for name in unknown if name not in ids]
        if late:
            cluster = self._connection.cluster
            ids |= self._connection.run(lambda ms: _new_ids(cluster, late, ms), timeout_s)
            timeout_s = self._connection.left_s(deadline_s)
        for item in request.reassignments:
            item.topic_id = ids.get(item.topic, "")
        reply = self._connection.ask(request, wire.AlterReassignmentsReply, timeout_s)
        return _by_partition(reply.results)

    def list_partition_reassignments(
        self, topics: Iterable[str] | None, timeout_s: float
    ) -> list[PartitionReassignment]:
        """Return the reassignments in progress, of these topics (None = all)."""
        wanted = None if topics is None else arguments.topics(topics, "topics")
        if wanted is not None and not wanted:
            return []
        request = wire.ListReassignmentsRequest(topics=wanted or ())
        reply = self._connection.ask(request, wire.ListReassignmentsReply, timeout_s)
        return [
            PartitionReassignment(
                r.topic, r.partition, tuple(r.replicas), tuple(r.adding), tuple(r.removing),
                r.topic_id,
            )
            for r in reply.reassignments
        ]  # fmt: skip

    def partition_replicas(
        self, topics: Iterable[str], timeout_s: float
    ) -> dict[TopicPartition, tuple[int, ...]]:
        """Return the replicas of every partition of these topics; unknown topics are left out."""
        return {
            TopicPartition(t.name, p.partition): tuple(p.replicas)
            for t in self._topics(topics, timeout_s)
            for p in t.partitions
        }

    def topic_ids(self, topics: Iterable[str], timeout_s: float) -> dict[str, str]:
        """Return the id of each of these topics; unknown topics are left out."""
        found = self._topics(topics, timeout_s)
        return {t.name: t.topic_id for t in found if t.topic_id}

    def _topics(self, topics: Iterable[str], timeout_s: float) -> Iterable[wire.TopicInfo]:
        request = wire.MetadataRequest(topics=arguments.topics(topics, "topics"))
        return self._connection.ask(request, wire.MetadataReply, timeout_s).topics

    def elect_leaders(
        self, partitions: Iterable[TopicPartition] | None, unclean: bool, timeout_s: float
    ) -> dict[TopicPartition, errors.PkError | None]:
        """Elect the preferred leaders, or any leader."""
        request = wire.ElectLeadersRequest(unclean=arguments.flag(unclean, "unclean"))
        if partitions is not None:
            wanted = arguments.places(partitions)
            if not wanted:
                return {}
            deadline_s = self._connection.deadline_s(timeout_s)
            cluster = self._connection.cluster
            for key in self._connection.run(lambda ms: _keys(cluster, wanted, ms), timeout_s):
                request.partitions.add(topic_id=key.topic_id, partition=key.partition)
            timeout_s = self._connection.left_s(deadline_s)
        reply = self._connection.ask(request, wire.ElectLeadersReply, timeout_s)
        return _by_partition(reply.results)


async def _new_ids(cluster: NetworkClient, names: list[str], timeout_ms: int) -> dict[str, str]:
    """Return the ids of topics that the broker asked did not know.

    Waits a moment, as they may be new.  A topic that is still unknown then is left out.
    """
    clock = cluster.world.clock
    deadline = clock.monotonic_ms() + timeout_ms
    moment = clock.monotonic_ms() + UNKNOWN_TOPIC_MS
    cluster.watch_topics(names)
    found: dict[str, str] = {}
    for name in names:
        now = clock.monotonic_ms()
        # The controller answers for each partition of a topic that does not exist.
        with contextlib.suppress(errors.UnknownTopicOrPartition):
            metadata = await cluster.topic(name, max(1, deadline - now), max(0, moment - now))
            found[name] = metadata.topic_id
    return found


async def _keys(
    cluster: NetworkClient, places: list[TopicPartition], timeout_ms: int
) -> list[PartitionKey]:
    """Return the partitions with their topic ids.  Waits a moment for new topics."""
    ids: dict[str, str] = {}
    clock = cluster.world.clock
    deadline = clock.monotonic_ms() + timeout_ms
    for name in dict.fromkeys(place.topic for place in places):
        left = max(1, deadline - clock.monotonic_ms())
        found = await cluster.topic(name, left, whole_ms=timeout_ms)
        ids[name] = found.topic_id
    return [PartitionKey(ids[place.topic], place.partition) for place in places]


def _members(given: Iterable[int], name: str) -> list[int]:
    return [arguments.whole(each, name) for each in arguments.items(given, name)]


def _by_partition(
    results: Iterable[wire.ReassignmentResult],
) -> dict[TopicPartition, errors.PkError | None]:
    return {
        TopicPartition(r.topic, r.partition): (refusal(r.error) if r.HasField("error") else None)
        for r in results
    }
