"""The calls of `AdminClient` that concern topics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pk import errors
from pk.client import arguments
from pk.client.admin import described
from pk.client.admin.configs import settings_of
from pk.client.admin.connection import AdminConnection, only
from pk.client.admin.described import PartitionDescription
from pk.client.endings import refusal
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class NewTopic:
    """A topic to create; `partitions=0` takes the server's default.

    replica_assignment: broker ids for each partition, the preferred leader first; it replaces
    `partitions` and `replication_factor`.
    """

    name: str
    partitions: int = 0
    configs: Mapping[str, Any] = field(default_factory=dict)
    replication_factor: int = 0
    replica_assignment: Sequence[Sequence[int]] = ()


@dataclass(slots=True, frozen=True)
class TopicResult:
    """The result for one topic; `note` is for people (where its table stays, …)."""

    name: str
    topic_id: str
    note: str = ""
    error: errors.PkError | None = None


@dataclass(slots=True, frozen=True)
class TopicListing:
    """One line of `list_topics`."""

    name: str
    topic_id: str
    partitions: int
    internal: bool


class TopicCalls:
    """The calls that concern topics; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def create_topic(self, topic: NewTopic, validate_only: bool, timeout_s: float) -> TopicResult:
        """Create one topic; raises its error."""
        return _one(self.create_topics([topic], validate_only, timeout_s))

    def create_topics(
        self, topics: Iterable[NewTopic], validate_only: bool, timeout_s: float
    ) -> list[TopicResult]:
        """Create topics by a request with an id, because it may be repeated."""
        request = wire.CreateTopicsRequest(
            validate_only=arguments.flag(validate_only, "validate_only")
        )
        request.request_id = self._connection.cluster.world.new_id()
        for topic in arguments.items(topics, "topics", "NewTopic"):
            _add_topic(request, topic)
        return _results(self._connection.ask(request, wire.CreateTopicsReply, timeout_s).results)

    def delete_topic(self, name: str, purge_tier: bool, timeout_s: float) -> TopicResult:
        """Delete one topic; raises its error."""
        return _one(self.delete_topics([arguments.topic(name, "name")], purge_tier, timeout_s))

    def delete_topics(
        self, names: Iterable[str], purge_tier: bool, timeout_s: float
    ) -> list[TopicResult]:
        """Delete topics, each independently."""
        request = wire.DeleteTopicsRequest(
            names=arguments.topics(names, "names"),
            purge_tier=arguments.flag(purge_tier, "purge_tier"),
        )
        return _results(self._connection.ask(request, wire.DeleteTopicsReply, timeout_s).results)

    def create_partitions(
        self,
        topic: str,
        total: int,
        replica_assignment: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> TopicResult:
        """Grow a topic to `total` partitions."""
        request = wire.CreatePartitionsRequest()
        request.topics.add(
            name=arguments.topic(topic),
            total_count=arguments.whole(total, "total"),
            assignment=_assignment(replica_assignment),
        )
        reply = self._connection.ask(request, wire.CreatePartitionsReply, timeout_s)
        return _one(_results(reply.results))

    def list_topics(self, internal: bool, timeout_s: float) -> list[TopicListing]:
        """Return all topics, by name."""
        internal = arguments.flag(internal, "internal")
        reply = self._connection.ask(wire.MetadataRequest(), wire.MetadataReply, timeout_s)
        found = [
            TopicListing(t.name, t.topic_id, len(t.partitions), t.internal)
            for t in reply.topics
            if not t.HasField("error") and (internal or not t.internal)
        ]
        return sorted(found, key=lambda topic: topic.name)

    def describe_topics(
        self, names: Iterable[str] | None, timeout_s: float
    ) -> list[PartitionDescription]:
        """Return every partition of these topics (None = all)."""
        wanted = None if names is None else described.unique(arguments.topics(names, "names"))
        if wanted is not None and not wanted:
            return []
        cluster = self._connection.cluster
        return self._connection.retrying(
            lambda one_ms: described.describe_partitions(cluster, wanted, one_ms), timeout_s
        )


def _add_topic(request: wire.CreateTopicsRequest, topic: NewTopic) -> None:
    if not isinstance(topic, NewTopic):
        raise TypeError(f"topics must be a list of NewTopic, not of {arguments.shown(topic)}")
    request.topics.add(
        name=arguments.topic(topic.name, "name"),
        partitions=arguments.whole(topic.partitions, "partitions"),
        replication_factor=arguments.whole(topic.replication_factor, "replication_factor"),
        configs=settings_of(topic.configs, "configs"),
        assignment=_assignment(topic.replica_assignment),
    )


def _assignment(given: Sequence[Sequence[int]]) -> list[wire.ReplicaAssignment]:
    """Return the wire's form of broker ids by partition."""
    name = "replica_assignment"
    rows = [
        arguments.items(row, name, "lists of broker ids") for row in arguments.items(given, name)
    ]
    return [
        wire.ReplicaAssignment(broker_ids=[arguments.whole(one, name, 0) for one in row])
        for row in rows
    ]


def _results(results: Iterable[wire.TopicResult]) -> list[TopicResult]:
    return [
        TopicResult(r.name, r.topic_id, r.note, refusal(r.error) if r.HasField("error") else None)
        for r in results
    ]


def _one(results: list[TopicResult]) -> TopicResult:
    result = only(results)
    if result.error is not None:
        raise result.error
    return result
