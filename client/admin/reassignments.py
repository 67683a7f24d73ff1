"""The calls of `AdminClient` that concern the replicas and the leaders of partitions."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from pk import errors
from pk.client import arguments
from pk.client.endings import refusal
from pk.client.network_client import NetworkClient
from pk.client.options import TIMEOUT_S
from pk.types import PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire

T = TypeVar("T")


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
    """The calls of `AdminClient` that concern replicas and leaders."""

    _cluster: NetworkClient

    def _ask(self, request: Message, kind: type[T], timeout_s: float) -> T:
        """Ask any broker and return its reply of type `kind`.  `AdminClient` implements it."""
        raise NotImplementedError

    def _now_s(self) -> float:
        """Return the monotonic time.  `AdminClient` implements it."""
        raise NotImplementedError

    def _run(self, work: Awaitable[T], timeout_s: float) -> T:
        """Run `work` and wait for its result.  `AdminClient` implements it."""
        raise NotImplementedError

    def alter_partition_reassignments(
        self,
        reassignments: Mapping[TopicPartition, Iterable[int] | None],
        *,
        topic_ids: Mapping[str, str] | None = None,
        expected: Mapping[TopicPartition, Iterable[int]] | None = None,
        force: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[TopicPartition, errors.PkError | None]:
        """Assign new replicas to partitions, the preferred leader first; None cancels (KIP-455).

        topic_ids: topic → the id that it had when the move was planned; the others are looked up
        now.  A topic that was deleted and created again since is refused with `UnknownTopicId`.
        expected: partition → its replicas when the move was planned; others now are refused.
        force: also take replicas away that leave fewer in sync than min_insync_replicas asks for.

        The brokers copy data after the call has returned: `list_partition_reassignments` shows
        progress. Each partition succeeds or fails independently: its result is an error, or None.
        """
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
        deadline = self._now_s() + arguments.seconds(timeout_s)
        if unknown:
            ids |= self.topic_ids(unknown, timeout_s=timeout_s)
            timeout_s = max(0.001, deadline - self._now_s())
        for item in request.reassignments:
            item.topic_id = ids.get(item.topic, "")
        reply = self._ask(request, wire.AlterReassignmentsReply, timeout_s)
        return _by_partition(reply.results)

    def list_partition_reassignments(
        self, topics: Iterable[str] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> list[PartitionReassignment]:
        """Return the reassignments in progress, of these topics (None = all)."""
        wanted = None if topics is None else arguments.topics(topics, "topics")
        if wanted is not None and not wanted:
            return []
        request = wire.ListReassignmentsRequest(topics=wanted or ())
        reply = self._ask(request, wire.ListReassignmentsReply, timeout_s)
        return [
            PartitionReassignment(
                r.topic, r.partition, tuple(r.replicas), tuple(r.adding), tuple(r.removing),
                r.topic_id,
            )
            for r in reply.reassignments
        ]  # fmt: skip

    def partition_replicas(
        self, topics: Iterable[str], *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, tuple[int, ...]]:
        """Return the replicas of every partition of these topics; unknown topics are left out."""
        return {
            TopicPartition(t.name, p.partition): tuple(p.replicas)
            for t in self._topics(topics, timeout_s)
            for p in t.partitions
        }

    def topic_ids(self, topics: Iterable[str], *, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Return the id of each of these topics; unknown topics are left out."""
        found = self._topics(topics, timeout_s)
        return {t.name: t.topic_id for t in found if t.topic_id}

    def _topics(self, topics: Iterable[str], timeout_s: float) -> Iterable[wire.TopicInfo]:
        request = wire.MetadataRequest(topics=arguments.topics(topics, "topics"))
        return self._ask(request, wire.MetadataReply, timeout_s).topics

    def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        unclean: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[TopicPartition, errors.PkError | None]:
        """Elect the preferred leaders (KIP-460); None = all partitions that need it.

        `unclean` elects a leader for partitions without one, even if in-sync replicas are missing.
        Records that only the missing replicas hold are lost.  Each partition succeeds or fails
        independently.
        """
        request = wire.ElectLeadersRequest(unclean=arguments.flag(unclean, "unclean"))
        if partitions is not None:
            wanted = arguments.places(partitions)
            if not wanted:
                return {}
            deadline = self._now_s() + arguments.seconds(timeout_s)
            work = self._keys(wanted, int(timeout_s * 1000))
            for key in self._run(work, timeout_s):
                request.partitions.add(topic_id=key.topic_id, partition=key.partition)
            timeout_s = max(0.001, deadline - self._now_s())
        return _by_partition(self._ask(request, wire.ElectLeadersReply, timeout_s).results)

    async def _keys(self, places: list[TopicPartition], timeout_ms: int) -> list[PartitionKey]:
        ids: dict[str, str] = {}
        clock = self._cluster.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        for name in dict.fromkeys(place.topic for place in places):
            left = max(1, deadline - clock.monotonic_ms())
            found = await self._cluster.topic(name, left, whole_ms=timeout_ms)
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
