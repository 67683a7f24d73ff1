"""Administration: topics, settings, offsets, the tier, the metadata quorum.

Every call blocks for at most `timeout_s`, connecting included, and raises the typed error of the
first thing that went wrong; `RequestTimedOut` or `BrokerUnavailable` if nothing answered.  Setting
names may be Kafka's (`retention.ms`).  An admin client is safe to share between threads and does
not survive a fork.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from google.protobuf.message import Message

from pk import errors, settings
from pk.client import connection, described
from pk.client.brokers import BrokerCalls
from pk.client.cluster import Cluster
from pk.client.described import PartitionDescription, TierDescription
from pk.client.offsets import ISOLATION, lookup_offsets
from pk.client.options import TIMEOUT_S, bootstrap_of, items_of
from pk.client.quorum import QuorumCalls, ask_active
from pk.client.tier_rows import TierRows, tier_rows
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire

T = TypeVar("T")

#: `list_offsets` by word; a number is a time in ms.
SPECIAL_OFFSETS = {
    "latest": -1, "earliest": -2, "max_timestamp": -3, "earliest_local": -4, "tiered_end": -5,
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class NewTopic:
    """A topic to create; `partitions=0` takes the server's default."""

    name: str
    partitions: int = 0
    configs: Mapping[str, Any] = field(default_factory=dict)
    replication_factor: int = 0


@dataclass(slots=True, frozen=True)
class TopicResult:
    """What was done about one topic; `note` is for people (where its table stays, …)."""

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


@dataclass(slots=True, frozen=True)
class PartitionReassignment:
    """A reassignment under way: `replicas` are the target's, then those that will go."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class ConfigEntry:
    """One setting of a resource; `source` says who set it (topic, server, default)."""

    name: str
    value: str
    source: str
    read_only: bool = False
    doc: str = ""


class AdminClient(BrokerCalls, QuorumCalls):
    """Administers a cluster.

    With `bootstrap_controllers` instead of brokers it asks controllers directly (KIP-919), also
    when no broker serves: for the calls that concern the metadata quorum.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str] | None = None,
        *,
        bootstrap_controllers: str | Iterable[str] | None = None,
        request_timeout_ms: int = 30_000,
        client_id: str = "",
        **options: Any,
    ) -> None:
        controllers = options.pop("bootstrap.controllers", bootstrap_controllers)
        self._of_controllers = controllers is not None
        if controllers is None:
            bootstrap = bootstrap_of(bootstrap, options)
        elif bootstrap is None:
            bootstrap = controllers
        else:
            raise errors.InvalidOption("give brokers or controllers, not both", option="bootstrap")
        if options:
            raise errors.InvalidOption(
                f"unknown admin option {next(iter(options))!r}; there are bootstrap, "
                "bootstrap_controllers, request_timeout_ms and client_id",
                option=next(iter(options)),
            )
        self._closed = False
        self._ending = threading.Lock()
        self._thread = connection.acquire()
        try:
            self._cluster = Cluster(
                self._thread.world,
                bootstrap or (),
                client_id=client_id,
                request_timeout_ms=settings.CONSUMER.by_name["request_timeout_ms"].parse(
                    request_timeout_ms
                ),
            )
        except BaseException:
            connection.release(self._thread)
            raise
        connection.close_at_exit(self, self.close)

    # -- topics ------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int = 0,
        configs: Mapping[str, Any] | None = None,
        *,
        replication_factor: int = 0,
        validate_only: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> TopicResult:
        """Create one topic; raises what stands in the way."""
        new = NewTopic(name, partitions, configs or {}, replication_factor)
        return _one(self.create_topics([new], validate_only=validate_only, timeout_s=timeout_s))

    def create_topics(
        self,
        topics: Iterable[NewTopic],
        *,
        validate_only: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> list[TopicResult]:
        """Create topics, each by itself: look at each result's `error`."""
        request = wire.CreateTopicsRequest(validate_only=validate_only)
        request.request_id = self._cluster.world.new_id()  # it may be asked again
        for topic in items_of("topics", topics):
            request.topics.add(
                name=topic.name, partitions=topic.partitions,
                replication_factor=topic.replication_factor, configs=_settings_of(topic.configs),
            )  # fmt: skip
        return _results(self._ask(request, wire.CreateTopicsReply, timeout_s).results)

    def delete_topic(
        self, name: str, *, purge_tier: bool = False, timeout_s: float = TIMEOUT_S
    ) -> TopicResult:
        """Delete one topic.  Its table stays (`note` says where) unless `purge_tier`."""
        return _one(self.delete_topics([name], purge_tier=purge_tier, timeout_s=timeout_s))

    def delete_topics(
        self, names: Iterable[str], *, purge_tier: bool = False, timeout_s: float = TIMEOUT_S
    ) -> list[TopicResult]:
        """Delete topics, each by itself: look at each result's `error`."""
        request = wire.DeleteTopicsRequest(names=items_of("names", names), purge_tier=purge_tier)
        return _results(self._ask(request, wire.DeleteTopicsReply, timeout_s).results)

    def create_partitions(
        self, topic: str, total: int, *, timeout_s: float = TIMEOUT_S
    ) -> TopicResult:
        """Grow a topic to `total` partitions; from then on keys may go elsewhere (see `note`)."""
        request = wire.CreatePartitionsRequest()
        request.topics.add(name=topic, total_count=total)
        return _one(_results(self._ask(request, wire.CreatePartitionsReply, timeout_s).results))

    def list_topics(
        self, *, internal: bool = False, timeout_s: float = TIMEOUT_S
    ) -> list[TopicListing]:
        """All topics, by name."""
        reply = self._ask(wire.MetadataRequest(), wire.MetadataReply, timeout_s)
        found = [
            TopicListing(t.name, t.topic_id, len(t.partitions), t.internal)
            for t in reply.topics
            if not t.HasField("error") and (internal or not t.internal)
        ]
        return sorted(found, key=lambda topic: topic.name)

    def describe_topics(
        self, names: Iterable[str] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> list[PartitionDescription]:
        """Every partition of these topics (None = all), by topic and partition.

        Raises `UnknownTopicOrPartition` for a name that no topic has.
        """
        wanted = None if names is None else described.unique(items_of("names", names))
        if wanted is not None and not wanted:
            return []
        return self._joined(
            lambda one_ms: described.describe_partitions(self._cluster, wanted, one_ms), timeout_s
        )

    # -- settings ----------------------------------------------------------------------------------

    def describe_configs(
        self, name: str, *, resource: str = "topic", timeout_s: float = TIMEOUT_S
    ) -> list[ConfigEntry]:
        """All settings of a topic (or `resource="broker"`, name "" = the cluster's defaults)."""
        request = wire.DescribeConfigsRequest()
        request.resources.add(type=resource, name=name)
        result = _only(self._ask(request, wire.DescribeConfigsReply, timeout_s).results)
        if result.HasField("error"):
            raise frames.raise_error(result.error)
        return [ConfigEntry(e.name, e.value, e.source, e.read_only, e.doc) for e in result.entries]

    def alter_configs(
        self,
        name: str,
        set: Mapping[str, Any] | None = None,
        unset: Iterable[str] = (),
        *,
        resource: str = "topic",
        validate_only: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Change settings of a topic; those not named stay as they are."""
        request = wire.AlterConfigsRequest(validate_only=validate_only)
        change = request.changes.add(
            set=_settings_of(set or {}), unset=[_dotless(n) for n in unset]
        )
        change.resource.type, change.resource.name = resource, name
        result = _only(self._ask(request, wire.AlterConfigsReply, timeout_s).results)
        if result.HasField("error"):
            raise frames.raise_error(result.error)

    # -- offsets -----------------------------------------------------------------------------------

    def list_offsets(
        self,
        partitions: Mapping[TopicPartition, str | int],
        *,
        isolation_level: str = "read_committed",
        timeout_s: float = TIMEOUT_S,
    ) -> dict[TopicPartition, tuple[int, int]]:
        """`(offset, timestamp)` by word (SPECIAL_OFFSETS) or by time in ms."""
        wanted: dict[TopicPartition, int] = {}
        for place, spec in partitions.items():
            number = SPECIAL_OFFSETS.get(spec, NONE - 100) if isinstance(spec, str) else int(spec)
            if number < -5:
                raise errors.InvalidOption(
                    f"offset {spec!r} is none of {', '.join(SPECIAL_OFFSETS)} or a time"
                )
            wanted[TopicPartition(*place)] = number
        isolation = ISOLATION.get(isolation_level)
        if isolation is None:
            raise errors.InvalidOption(
                f"isolation_level {isolation_level!r} is none of {', '.join(ISOLATION)}"
            )
        timeout_ms = int(timeout_s * 1000)
        work = lookup_offsets(self._cluster, wanted, wanted, isolation, timeout_ms)
        return self._run(work, timeout_s)

    def offsets(
        self, topic: str, spec: str | int = "latest", *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """One offset of each partition of a topic: `list_offsets` for all of them."""
        deadline = self._now_s() + timeout_s
        found = self._run(self._cluster.topic(topic, int(timeout_s * 1000)), timeout_s)
        places = {TopicPartition(topic, p): spec for p in range(found.partitions)}
        listed = self.list_offsets(places, timeout_s=max(0.001, deadline - self._now_s()))
        return {place: at[0] for place, at in listed.items()}

    def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """Remove all records below an offset (-1 = all); returns each new log_start."""
        wanted = {TopicPartition(*place): offset for place, offset in before.items()}
        return self._run(self._delete_records(wanted, int(timeout_s * 1000)), timeout_s)

    async def _delete_records(
        self, wanted: dict[TopicPartition, int], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        cluster, found = self._cluster, dict[TopicPartition, int]()
        clock = cluster.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        for name in dict.fromkeys(place.topic for place in wanted):
            left_ms = max(1, deadline - clock.monotonic_ms())
            await cluster.topic(name, left_ms, whole_ms=timeout_ms)

        async def attempt(one_ms: int) -> None:
            for place, offset in wanted.items():
                if place in found:
                    continue
                key = cluster.metadata.key(place)
                leader = cluster.metadata.leader(key)
                if leader is None:
                    cluster.want_metadata()
                    raise cluster.metadata.leaderless(place)
                request = wire.DeleteRecordsRequest()
                request.items.add(
                    topic_id=key.topic_id, partition=key.partition, before_offset=offset
                )
                reply: Any = await cluster.call_node(leader.node, request, timeout_ms=one_ms)
                result = _only(reply.results)
                if result.HasField("error"):
                    cluster.want_metadata()
                    raise frames.raise_error(result.error)
                found[place] = result.log_start

        await cluster.retrying(attempt, max(1, deadline - clock.monotonic_ms()))
        return found

    # -- replicas and brokers ----------------------------------------------------------------------

    def alter_partition_reassignments(
        self,
        reassignments: Mapping[TopicPartition, Iterable[int] | None],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[TopicPartition, errors.PkError | None]:
        """Give partitions other replicas, the preferred leader first; None cancels (KIP-455).

        The copying goes on after the call: `list_partition_reassignments` says what is under way.
        Each partition succeeds or fails by itself: the result has its error, or None.
        """
        request = wire.AlterReassignmentsRequest()
        for place, replicas in reassignments.items():
            topic, partition = place
            request.reassignments.add(
                topic=topic, partition=partition, replicas=replicas or (), cancel=replicas is None
            )
        reply = self._ask(request, wire.AlterReassignmentsReply, timeout_s)
        return _by_partition(reply.results)

    def list_partition_reassignments(
        self, topics: Iterable[str] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> list[PartitionReassignment]:
        """The reassignments under way, of these topics (None = all)."""
        wanted = None if topics is None else items_of("topics", topics)
        if wanted is not None and not wanted:
            return []
        request = wire.ListReassignmentsRequest(topics=wanted or ())
        reply = self._ask(request, wire.ListReassignmentsReply, timeout_s)
        return [
            PartitionReassignment(
                r.topic, r.partition, tuple(r.replicas), tuple(r.adding), tuple(r.removing)
            )
            for r in reply.reassignments
        ]

    def partition_replicas(
        self, topics: Iterable[str], *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, tuple[int, ...]]:
        """The replicas of every partition of these topics; an unknown topic is left out."""
        request = wire.MetadataRequest(topics=items_of("topics", topics))
        reply = self._ask(request, wire.MetadataReply, timeout_s)
        return {
            TopicPartition(t.name, p.partition): tuple(p.replicas)
            for t in reply.topics
            for p in t.partitions
        }

    def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        unclean: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[TopicPartition, errors.PkError | None]:
        """Have the preferred leaders elected (KIP-460); None = wherever one could take over.

        `unclean` elects where nobody leads, without the replicas that are missing: what only they
        hold is lost.  Each partition succeeds or fails by itself.
        """
        request = wire.ElectLeadersRequest(unclean=unclean)
        if partitions is not None:
            wanted = [TopicPartition(*place) for place in items_of("partitions", partitions)]
            if not wanted:
                return {}
            deadline = self._now_s() + timeout_s
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

    def unregister_broker(self, broker_id: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Forget a broker that is stopped for good and has no replicas any more (KIP-500)."""
        request = wire.UnregisterBrokerRequest(broker_id=broker_id)
        self._ask(request, wire.UnregisterBrokerReply, timeout_s)

    # -- the tier ----------------------------------------------------------------------------------

    def describe_tier(self, topic: str, *, timeout_s: float = TIMEOUT_S) -> TierDescription:
        """The table behind a topic and what it holds."""
        return self._joined(
            lambda one_ms: described.describe_tier(self._cluster, topic, one_ms), timeout_s
        )

    def repair_tier(self, topic: str, *, timeout_s: float = 300.0) -> dict[int, TierRows]:
        """Bring rows that another engine deleted from the table back, as far as the local logs
        have them; a result for each partition."""
        return self._run(tier_rows(self._cluster, topic, False, int(timeout_s * 1000)), timeout_s)

    def accept_tier(self, topic: str, *, timeout_s: float = TIMEOUT_S) -> dict[int, TierRows]:
        """Settle the rows that another engine deleted from the table: they are not missed any
        more, and readers go past them; a result for each partition."""
        return self._run(tier_rows(self._cluster, topic, True, int(timeout_s * 1000)), timeout_s)

    # -- plumbing ----------------------------------------------------------------------------------

    def _ask(self, request: Message, kind: type[T], timeout_s: float) -> T:
        cluster = self._cluster

        async def attempt(one_ms: int) -> Message:
            if self._of_controllers:
                return await ask_active(cluster, request, one_ms)
            if not cluster.metadata.generation:
                cluster.start()  # know the brokers, so that one that moved is still found
            return await cluster.call_any(request, timeout_ms=one_ms)

        # A broker answers for the whole cluster, its own writes included: no use in asking again.
        unknown = errors.UnknownTopicOrPartition
        work = cluster.retrying(attempt, int(timeout_s * 1000), final=unknown)
        reply = self._run(work, timeout_s)
        if not isinstance(reply, kind):
            raise errors.InternalError(f"{type(reply).__name__} answers {request.DESCRIPTOR.name}")
        return reply

    def _joined(self, attempt: Callable[[int], Awaitable[T]], timeout_s: float) -> T:
        """What several brokers must say together."""
        unknown = errors.UnknownTopicOrPartition
        work = self._cluster.retrying(attempt, int(timeout_s * 1000), final=unknown)
        return self._run(work, timeout_s)

    def _now_s(self) -> float:
        return self._cluster.world.clock.monotonic_ms() / 1000

    def _run(self, work: Awaitable[T], timeout_s: float) -> T:
        async def run() -> T:
            return await work

        if self._closed:
            getattr(work, "close", lambda: None)()
            raise errors.ClosedError("the admin client was closed")
        return self._thread.run(run(), timeout_s)

    def close(self) -> None:
        """Disconnect.  Idempotent; a disconnecting that takes long goes on without the caller."""
        if threading.current_thread() is self._thread.thread:
            raise errors.InvalidRequest("a delivery callback must not block")
        with self._ending:  # of several threads that close, one does it
            if self._closed:
                return
            self._closed = True
        connection.closed(self)
        try:
            self._thread.finish(self._cluster.close())
        finally:
            connection.release(self._thread)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _dotless(name: str) -> str:
    return settings.TOPIC.canonical(name) if "." in name or "-" in name else name


def _settings_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Names in pk's spelling, values as text; the controller judges both."""
    found: dict[str, str] = {}
    for name, value in given.items():
        key = _dotless(name)
        if key in found:
            raise errors.InvalidConfig(f"topic setting {key} is given twice", option=key)
        found[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _results(results: Iterable[wire.TopicResult]) -> list[TopicResult]:
    return [
        TopicResult(
            r.name, r.topic_id, r.note, frames.raise_error(r.error) if r.HasField("error") else None
        )
        for r in results
    ]


def _by_partition(
    results: Iterable[wire.ReassignmentResult],
) -> dict[TopicPartition, errors.PkError | None]:
    return {
        TopicPartition(r.topic, r.partition): (
            frames.raise_error(r.error) if r.HasField("error") else None
        )
        for r in results
    }


def _only(results: Sequence[T]) -> T:
    """What was answered to a question about one thing."""
    if len(results) != 1:
        raise errors.InternalError(f"{len(results)} results came for one request")
    return results[0]


def _one(results: list[TopicResult]) -> TopicResult:
    result = _only(results)
    if result.error is not None:
        raise result.error
    return result
