"""Administration: topics, settings, offsets, the tier, the metadata quorum.

Every call blocks for at most `timeout_s`, connecting included, and raises the typed error of the
first failure.  It raises `RequestTimedOut` or `BrokerUnavailable` if no server answered.  Setting
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
from pk.client import arguments, connection
from pk.client.admin import described
from pk.client.admin.brokers import BrokerCalls
from pk.client.admin.cluster import ClusterCalls
from pk.client.admin.described import PartitionDescription, TierDescription
from pk.client.admin.quorum import QuorumCalls, ask_active
from pk.client.admin.reassignments import PartitionReassignment as PartitionReassignment
from pk.client.admin.reassignments import ReassignmentCalls
from pk.client.admin.tier import TierRows, tier_rows
from pk.client.endings import refusal
from pk.client.network_client import NetworkClient
from pk.client.offsets import ISOLATION, OFFSET_MAX, lookup_offsets
from pk.client.options import TIMEOUT_S, bootstrap_of
from pk.types import TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire

T = TypeVar("T")

#: The words that `list_offsets` accepts; a number is a time in ms.
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


@dataclass(slots=True, frozen=True)
class ConfigEntry:
    """One setting of a resource; `source`: where its value comes from (topic, server, default)."""

    name: str
    value: str
    source: str
    read_only: bool = False
    doc: str = ""


class AdminClient(BrokerCalls, ClusterCalls, QuorumCalls, ReassignmentCalls):
    """Administers a cluster.

    bootstrap: "host:port,…" of brokers, or a list.  bootstrap_controllers: addresses of controllers
    instead, which are asked directly (KIP-919), also when no broker serves; for the calls that
    concern the metadata quorum.  request_timeout_ms: how long one attempt may take.

        >>> with AdminClient("localhost:9092") as admin:
        ...     created = admin.create_topic("events", partitions=1)
        ...     [topic.name for topic in admin.list_topics()]
        ['events']
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
        arguments.text(client_id, "client_id")
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
            self._cluster = NetworkClient(
                self._thread.world,
                () if bootstrap is None else bootstrap,
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
        """Create one topic.

        partitions, replication_factor: 0 = the server's default.  configs: topic settings by name.
        validate_only: check, and create nothing.  Raises `TopicAlreadyExists`, `InvalidTopic`,
        `InvalidConfig`, `InvalidPartitions`, `InvalidReplicationFactor`.
        """
        new = NewTopic(name, partitions, {} if configs is None else configs, replication_factor)
        return _one(self.create_topics([new], validate_only=validate_only, timeout_s=timeout_s))

    def create_topics(
        self,
        topics: Iterable[NewTopic],
        *,
        validate_only: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> list[TopicResult]:
        """Create topics, each independently: check each result's `error`."""
        request = wire.CreateTopicsRequest(
            validate_only=arguments.flag(validate_only, "validate_only")
        )
        request.request_id = self._cluster.world.new_id()  # it may be asked again
        for topic in arguments.items(topics, "topics", "NewTopic"):
            _add_topic(request, topic)
        return _results(self._ask(request, wire.CreateTopicsReply, timeout_s).results)

    def delete_topic(
        self, name: str, *, purge_tier: bool = False, timeout_s: float = TIMEOUT_S
    ) -> TopicResult:
        """Delete one topic.  Its table stays (`note` says where) unless `purge_tier`."""
        name = arguments.topic(name, "name")
        return _one(self.delete_topics([name], purge_tier=purge_tier, timeout_s=timeout_s))

    def delete_topics(
        self, names: Iterable[str], *, purge_tier: bool = False, timeout_s: float = TIMEOUT_S
    ) -> list[TopicResult]:
        """Delete topics, each independently: check each result's `error`."""
        request = wire.DeleteTopicsRequest(
            names=arguments.topics(names, "names"),
            purge_tier=arguments.flag(purge_tier, "purge_tier"),
        )
        return _results(self._ask(request, wire.DeleteTopicsReply, timeout_s).results)

    def create_partitions(
        self, topic: str, total: int, *, timeout_s: float = TIMEOUT_S
    ) -> TopicResult:
        """Grow a topic to `total` partitions.  From then on a key may go to another partition (see
        `note`).
        """
        request = wire.CreatePartitionsRequest()
        request.topics.add(name=arguments.topic(topic), total_count=arguments.whole(total, "total"))
        return _one(_results(self._ask(request, wire.CreatePartitionsReply, timeout_s).results))

    def list_topics(
        self, *, internal: bool = False, timeout_s: float = TIMEOUT_S
    ) -> list[TopicListing]:
        """Return all topics, by name."""
        internal = arguments.flag(internal, "internal")
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
        """Return every partition of these topics (None = all), by topic and partition.

        Raises `UnknownTopicOrPartition` for a topic that does not exist.
        """
        wanted = None if names is None else described.unique(arguments.topics(names, "names"))
        if wanted is not None and not wanted:
            return []
        return self._joined(
            lambda one_ms: described.describe_partitions(self._cluster, wanted, one_ms), timeout_s
        )

    # -- settings ----------------------------------------------------------------------------------

    def describe_configs(
        self, name: str, *, resource: str = "topic", timeout_s: float = TIMEOUT_S
    ) -> list[ConfigEntry]:
        """Return all settings of a topic (or `resource="broker"`, name "" = the cluster's
        defaults).
        """
        request = wire.DescribeConfigsRequest()
        request.resources.add(
            type=arguments.text(resource, "resource"), name=arguments.text(name, "name")
        )
        result = _only(self._ask(request, wire.DescribeConfigsReply, timeout_s).results)
        if result.HasField("error"):
            raise refusal(result.error)
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
        """Change settings of a topic; settings that are not named stay as they are."""
        request = wire.AlterConfigsRequest(
            validate_only=arguments.flag(validate_only, "validate_only")
        )
        change = request.changes.add(
            set=_settings_of({} if set is None else set, "set"),
            unset=[_dotless(arguments.text(n, "unset")) for n in arguments.items(unset, "unset")],
        )
        change.resource.type = arguments.text(resource, "resource")
        change.resource.name = arguments.text(name, "name")
        result = _only(self._ask(request, wire.AlterConfigsReply, timeout_s).results)
        if result.HasField("error"):
            raise refusal(result.error)

    # -- offsets -----------------------------------------------------------------------------------

    def list_offsets(
        self,
        partitions: Mapping[TopicPartition, str | int],
        *,
        isolation_level: str = "read_committed",
        timeout_s: float = TIMEOUT_S,
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Return `(offset, timestamp)` by word (SPECIAL_OFFSETS) or by time in ms."""
        asked = arguments.by_place(partitions, "partitions", "offsets")
        wanted = {place: _time_of(spec, "partitions") for place, spec in asked.items()}
        isolation = arguments.choice(isolation_level, "isolation_level", ISOLATION)
        timeout_ms = int(arguments.seconds(timeout_s) * 1000)
        work = lookup_offsets(self._cluster, wanted, wanted, isolation, timeout_ms)
        return self._run(work, timeout_s)

    def offsets(
        self, topic: str, spec: str | int = "latest", *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """Return one offset of each partition of a topic: `list_offsets` for all of them."""
        topic, _ = arguments.topic(topic), _time_of(spec, "spec")
        deadline = self._now_s() + arguments.seconds(timeout_s)
        found = self._run(self._cluster.topic(topic, int(timeout_s * 1000)), timeout_s)
        places = {TopicPartition(topic, p): spec for p in range(found.partitions)}
        listed = self.list_offsets(places, timeout_s=max(0.001, deadline - self._now_s()))
        return {place: at[0] for place, at in listed.items()}

    def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """Move the log start of each partition up; the records below it are deleted.

        before: partition → the first offset to keep; -1 = the high watermark.
        Returns the new log start of each partition.  Raises `OffsetOutOfRange` above the high
        watermark, `RequestTimedOut` if an in-sync replica did not answer (repeat the call).
        """
        asked = arguments.by_place(before, "before", "offsets")
        wanted = {
            place: arguments.whole(offset, "before", -OFFSET_MAX, OFFSET_MAX)
            for place, offset in asked.items()
        }
        timeout_ms = int(arguments.seconds(timeout_s) * 1000)
        return self._run(self._delete_records(wanted, timeout_ms), timeout_s)

    async def _delete_records(
        self, wanted: dict[TopicPartition, int], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        cluster, found = self._cluster, dict[TopicPartition, int]()
        clock = cluster.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        await cluster.check_partitions(wanted, timeout_ms)

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

    # -- brokers -----------------------------------------------------------------------------------

    def unregister_broker(self, broker_id: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Remove a broker that is stopped for good and has no replicas any more (KIP-500)."""
        request = wire.UnregisterBrokerRequest(broker_id=arguments.whole(broker_id, "broker_id"))
        self._ask(request, wire.UnregisterBrokerReply, timeout_s)

    # -- the tier ----------------------------------------------------------------------------------

    def describe_tier(self, topic: str, *, timeout_s: float = TIMEOUT_S) -> TierDescription:
        """Return the table behind a topic and what it contains."""
        name = arguments.topic(topic)
        return self._joined(
            lambda one_ms: described.describe_tier(self._cluster, name, one_ms), timeout_s
        )

    def repair_tier(self, topic: str, *, timeout_s: float = 300.0) -> dict[int, TierRows]:
        """Restore rows that another engine deleted from the table, as far as the local logs still
        have them; returns a result for each partition.
        """
        return self._tier_rows(topic, timeout_s, accept=False)

    def accept_tier(self, topic: str, *, timeout_s: float = TIMEOUT_S) -> dict[int, TierRows]:
        """Accept that another engine deleted rows from the table.  They are no longer reported as
        missing, and readers skip them.  Returns a result for each partition.
        """
        return self._tier_rows(topic, timeout_s, accept=True)

    def _tier_rows(self, topic: str, timeout_s: float, *, accept: bool) -> dict[int, TierRows]:
        name, timeout_ms = arguments.topic(topic), int(arguments.seconds(timeout_s) * 1000)
        return self._run(tier_rows(self._cluster, name, accept, timeout_ms), timeout_s)

    # -- plumbing ----------------------------------------------------------------------------------

    def _ask(self, request: Message, kind: type[T], timeout_s: float) -> T:
        cluster = self._cluster

        async def attempt(one_ms: int) -> Message:
            if self._of_controllers:
                return await ask_active(cluster, request, one_ms)
            if not cluster.metadata.generation:
                cluster.start()  # learn the brokers: a moved one is then found
            return await cluster.call_any(request, timeout_ms=one_ms)

        # The answering broker speaks for the whole cluster, its own writes included: no retry.
        unknown = errors.UnknownTopicOrPartition
        timeout_ms = int(arguments.seconds(timeout_s) * 1000)
        work = cluster.retrying(attempt, timeout_ms, final=unknown)
        reply = self._run(work, timeout_s)
        if not isinstance(reply, kind):
            raise errors.InternalError(f"{type(reply).__name__} answers {request.DESCRIPTOR.name}")
        return reply

    def _joined(self, attempt: Callable[[int], Awaitable[T]], timeout_s: float) -> T:
        """Run `attempt`, which combines the answers of several brokers, with retries."""
        unknown = errors.UnknownTopicOrPartition
        timeout_ms = int(arguments.seconds(timeout_s) * 1000)
        work = self._cluster.retrying(attempt, timeout_ms, final=unknown)
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
        """Disconnect.  Idempotent; a slow disconnect continues in the background."""
        if threading.current_thread() is self._thread.thread:
            raise errors.InvalidRequest("a delivery callback must not block")
        with self._ending:  # if several threads close, one does the work
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


def _settings_of(given: Mapping[str, Any], argument: str) -> dict[str, str]:
    """Return names in pk's spelling and values as text; the controller validates both."""
    found: dict[str, str] = {}
    for name, value in arguments.settings(given, argument).items():
        key = _dotless(name)
        if key in found:
            raise errors.InvalidConfig(f"topic setting {key} is given twice", option=key)
        found[key] = value
    return found


def _add_topic(request: wire.CreateTopicsRequest, topic: NewTopic) -> None:
    if not isinstance(topic, NewTopic):
        raise TypeError(f"topics must be a list of NewTopic, not of {arguments.shown(topic)}")
    request.topics.add(
        name=arguments.topic(topic.name, "name"),
        partitions=arguments.whole(topic.partitions, "partitions"),
        replication_factor=arguments.whole(topic.replication_factor, "replication_factor"),
        configs=_settings_of(topic.configs, "configs"),
    )


def _time_of(spec: Any, argument: str) -> int:
    """Return the protocol's number for a word of SPECIAL_OFFSETS, or for a time."""
    if isinstance(spec, str):
        return arguments.choice(spec, f"{argument}: offset", SPECIAL_OFFSETS)
    name = f"{argument}: a time in ms, or one of {', '.join(SPECIAL_OFFSETS)},"
    return arguments.whole(spec, name, min(SPECIAL_OFFSETS.values()), OFFSET_MAX)


def _results(results: Iterable[wire.TopicResult]) -> list[TopicResult]:
    return [
        TopicResult(r.name, r.topic_id, r.note, refusal(r.error) if r.HasField("error") else None)
        for r in results
    ]


def _only(results: Sequence[T]) -> T:
    """Return the only result.  Raises `InternalError` if there is not exactly one."""
    if len(results) != 1:
        raise errors.InternalError(f"{len(results)} results came for one request")
    return results[0]


def _one(results: list[TopicResult]) -> TopicResult:
    result = _only(results)
    if result.error is not None:
        raise result.error
    return result
