"""Administration: topics, settings, offsets, replicas, brokers, the tier, the metadata quorum.

Every call blocks for at most `timeout_s`, connecting included, and raises the typed error of the
first failure.  It raises `RequestTimedOut` or `BrokerUnavailable` if no server answered.  Setting
names may be Kafka's (`retention.ms`).  An admin client is safe to share between threads and does
not survive a fork.

`AdminClient` documents every call and passes it to the object of its subject, which has a method of
the same name: `TopicCalls` in `topics`, `QuorumCalls` in `quorum`, and so on.  These objects share
one `AdminConnection`.  A new subject, such as groups, is a module of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from pk import errors
from pk.client import arguments
from pk.client.admin.brokers import BrokerCalls, BrokerDescription
from pk.client.admin.cluster import ClusterCalls, ClusterDescription, NodeLevel
from pk.client.admin.configs import ConfigCalls, ConfigEntry
from pk.client.admin.connection import AdminConnection
from pk.client.admin.described import OpenTransaction, PartitionDescription, TierDescription
from pk.client.admin.groups import (
    GroupCalls,
    GroupDescription,
    GroupListing,
    GroupListings,
    MemberDescription,
)
from pk.client.admin.offsets import SPECIAL_OFFSETS, OffsetCalls
from pk.client.admin.prepared_batches import AwaitedTable
from pk.client.admin.quorum import QuorumCalls, QuorumDescription, QuorumReplica
from pk.client.admin.reassignments import PartitionReassignment, ReassignmentCalls
from pk.client.admin.schedules import ScheduleCalls, ScheduleListings
from pk.client.admin.tier import TierCalls, TierRows
from pk.client.admin.topics import NewTopic, TopicCalls, TopicListing, TopicResult
from pk.client.admin.transactions import (
    HangingTransaction,
    HeldPartition,
    JobDescription,
    ParticipantDescription,
    ProducerDescription,
    TransactionCalls,
    TransactionDescription,
    TransactionListing,
    TransactionListings,
)
from pk.client.options import TIMEOUT_S, TRANSACTION_MAX_TIMEOUT_MS, bootstrap_of
from pk.schedules import Schedule
from pk.types import TopicPartition

__all__ = [
    "AdminClient",
    "GroupDescription",
    "GroupListing",
    "GroupListings",
    "MemberDescription",
    "NewTopic",
    "TopicResult",
    "TopicListing",
    "OpenTransaction",
    "PartitionDescription",
    "ConfigEntry",
    "SPECIAL_OFFSETS",
    "PartitionReassignment",
    "BrokerDescription",
    "ClusterDescription",
    "NodeLevel",
    "QuorumDescription",
    "QuorumReplica",
    "TierDescription",
    "TierRows",
    "ScheduleListings",
    "TransactionListing",
    "TransactionListings",
    "TransactionDescription",
    "JobDescription",
    "AwaitedTable",
    "ParticipantDescription",
    "HeldPartition",
    "ProducerDescription",
    "HangingTransaction",
]


class AdminClient:
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
        if controllers is None:
            addresses = bootstrap_of(bootstrap, options)
        elif bootstrap is None:
            addresses = controllers
        else:
            raise errors.InvalidOption("give brokers or controllers, not both", option="bootstrap")
        if options:
            raise errors.InvalidOption(
                f"unknown admin option {next(iter(options))!r}; there are bootstrap, "
                "bootstrap_controllers, request_timeout_ms and client_id",
                option=next(iter(options)),
            )
        self._connection = AdminConnection(
            addresses,
            of_controllers=controllers is not None,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
        )
        self._topics = TopicCalls(self._connection)
        self._configs = ConfigCalls(self._connection)
        self._offsets = OffsetCalls(self._connection)
        self._reassignments = ReassignmentCalls(self._connection)
        self._brokers = BrokerCalls(self._connection)
        self._cluster = ClusterCalls(self._connection)
        self._quorum = QuorumCalls(self._connection)
        self._tier = TierCalls(self._connection)
        self._transactions = TransactionCalls(self._connection)
        self._groups = GroupCalls(self._connection)
        self._schedules = ScheduleCalls(self._connection)

    # -- topics ------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int = 0,
        configs: Mapping[str, Any] | None = None,
        *,
        replication_factor: int = 0,
        replica_assignment: Sequence[Sequence[int]] = (),
        validate_only: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> TopicResult:
        """Create one topic.

        partitions, replication_factor: 0 = the server's default.  configs: topic settings by name.
        replica_assignment: broker ids for each partition, the preferred leader first, instead of
        both numbers.  validate_only: check, and create nothing.  Raises `TopicAlreadyExists`,
        `InvalidTopic`, `InvalidConfig`, `InvalidPartitions`, `InvalidReplicationFactor`,
        `InvalidReplicaAssignment`.
        """
        settings = {} if configs is None else configs
        topic = NewTopic(name, partitions, settings, replication_factor, replica_assignment)
        return self._topics.create_topic(topic, validate_only, timeout_s)

    def create_topics(
        self,
        topics: Iterable[NewTopic],
        *,
        validate_only: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> list[TopicResult]:
        """Create topics, each independently: check each result's `error`."""
        return self._topics.create_topics(topics, validate_only, timeout_s)

    def delete_topic(
        self, name: str, *, purge_tier: bool = False, timeout_s: float = TIMEOUT_S
    ) -> TopicResult:
        """Delete one topic.  Its table stays (`note` says where) unless `purge_tier`."""
        return self._topics.delete_topic(name, purge_tier, timeout_s)

    def delete_topics(
        self, names: Iterable[str], *, purge_tier: bool = False, timeout_s: float = TIMEOUT_S
    ) -> list[TopicResult]:
        """Delete topics, each independently: check each result's `error`."""
        return self._topics.delete_topics(names, purge_tier, timeout_s)

    def create_partitions(
        self,
        topic: str,
        total: int,
        *,
        replica_assignment: Sequence[Sequence[int]] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> TopicResult:
        """Grow a topic to `total` partitions.  From then on a key may go to another partition (see
        `note`).

        replica_assignment: broker ids for each new partition, the preferred leader first.
        """
        return self._topics.create_partitions(topic, total, replica_assignment, timeout_s)

    def list_topics(
        self, *, internal: bool = False, timeout_s: float = TIMEOUT_S
    ) -> list[TopicListing]:
        """Return all topics, by name."""
        return self._topics.list_topics(internal, timeout_s)

    def describe_topics(
        self, names: Iterable[str] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> list[PartitionDescription]:
        """Return every partition of these topics (None = all), by topic and partition.

        Raises `UnknownTopicOrPartition` for a topic that does not exist.
        """
        return self._topics.describe_topics(names, timeout_s)

    # -- settings ----------------------------------------------------------------------------------

    def describe_configs(
        self, name: str, *, resource: str = "topic", timeout_s: float = TIMEOUT_S
    ) -> list[ConfigEntry]:
        """Return all settings of a topic (or `resource="broker"`, name "" = the cluster's
        defaults).
        """
        return self._configs.describe_configs(name, resource, timeout_s)

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
        self._configs.alter_configs(name, set, unset, resource, validate_only, timeout_s)

    # -- offsets -----------------------------------------------------------------------------------

    def list_offsets(
        self,
        partitions: Mapping[TopicPartition, str | int],
        *,
        isolation_level: str = "read_committed",
        timeout_s: float = TIMEOUT_S,
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Return `(offset, timestamp)` by word (SPECIAL_OFFSETS) or by time in ms."""
        return self._offsets.list_offsets(partitions, isolation_level, timeout_s)

    def offsets(
        self, topic: str, spec: str | int = "latest", *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """Return one offset of each partition of a topic: `list_offsets` for all of them."""
        return self._offsets.offsets(topic, spec, timeout_s)

    def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """Move the log start of each partition up; the records below it are deleted.

        before: partition → the first offset to keep; -1 = the high watermark.  A deletion passes
        the retention holds of queries; a warning in the log names their groups.
        Returns the new log start of each partition.  Raises `OffsetOutOfRange` above the high
        watermark, `RequestTimedOut` if an in-sync replica did not answer (repeat the call).
        """
        return self._offsets.delete_records(before, timeout_s)

    # -- replicas and leaders ----------------------------------------------------------------------

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
        return self._reassignments.alter_partition_reassignments(
            reassignments, topic_ids, expected, force, timeout_s
        )

    def list_partition_reassignments(
        self, topics: Iterable[str] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> list[PartitionReassignment]:
        """Return the reassignments in progress, of these topics (None = all)."""
        return self._reassignments.list_partition_reassignments(topics, timeout_s)

    def partition_replicas(
        self, topics: Iterable[str], *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, tuple[int, ...]]:
        """Return the replicas of every partition of these topics; unknown topics are left out."""
        return self._reassignments.partition_replicas(topics, timeout_s)

    def topic_ids(self, topics: Iterable[str], *, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Return the id of each of these topics; unknown topics are left out."""
        return self._reassignments.topic_ids(topics, timeout_s)

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
        return self._reassignments.elect_leaders(partitions, unclean, timeout_s)

    # -- brokers and the cluster -------------------------------------------------------------------

    def list_brokers(self, *, timeout_s: float = TIMEOUT_S) -> list[BrokerDescription]:
        """Return every registered broker, by id, as the active controller knows it."""
        return self._brokers.list_brokers(timeout_s)

    def unregister_broker(self, broker_id: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Remove a broker that is stopped for good and has no replicas any more (KIP-500)."""
        self._brokers.unregister_broker(broker_id, timeout_s)

    def confirm_clock(self, broker_id: int, *, timeout_s: float = TIMEOUT_S) -> str:
        """Declare a broker's wall clock right: records and producers expire by it again.

        Returns the doubt that this ended, "" if the broker trusted its clock already.  Raises
        `BrokerUnavailable` if the broker is not in service.
        """
        return self._brokers.confirm_clock(broker_id, timeout_s)

    def describe_cluster(self, *, timeout_s: float = TIMEOUT_S) -> ClusterDescription:
        """Return the level of the cluster and the level that each node knows."""
        return self._cluster.describe_cluster(timeout_s)

    def upgrade_cluster(
        self, to: int = 0, *, validate_only: bool = False, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, int]:
        """Raise the level of the cluster; it cannot be lowered again.

        to: the level; 0 = the highest that the active controller knows.
        validate_only: check the request, and change nothing.
        Returns the level before and after.  Raises `UnsupportedFeature` if a registered broker or
        a voter does not know the level, `InvalidRequest` for a lower level.
        """
        return self._cluster.upgrade_cluster(to, validate_only, timeout_s)

    # -- the metadata quorum -----------------------------------------------------------------------

    def describe_metadata_quorum(self, *, timeout_s: float = TIMEOUT_S) -> QuorumDescription:
        """Return the leader, voters and observers, and how far each has replicated."""
        return self._quorum.describe_metadata_quorum(timeout_s)

    def add_raft_voter(
        self, node_id: int, directory_id: str, address: str, *, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, ...]:
        """Make a controller that has caught up a voter (KIP-853); returns the ids of all voters."""
        return self._quorum.add_raft_voter(node_id, directory_id, address, timeout_s)

    def remove_raft_voter(
        self, node_id: int, directory_id: str = "", *, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, ...]:
        """Remove a controller from the voters; returns the ids of the remaining voters."""
        return self._quorum.remove_raft_voter(node_id, directory_id, timeout_s)

    # -- the tier ----------------------------------------------------------------------------------

    def describe_tier(self, topic: str, *, timeout_s: float = TIMEOUT_S) -> TierDescription:
        """Return the table behind a topic and what it contains."""
        return self._tier.describe_tier(topic, timeout_s)

    def repair_tier(self, topic: str, *, timeout_s: float = 300.0) -> dict[int, TierRows]:
        """Restore rows that another engine deleted from the table, as far as the local logs still
        have them; returns a result for each partition.
        """
        return self._tier.repair_tier(topic, timeout_s)

    def accept_tier(self, topic: str, *, timeout_s: float = TIMEOUT_S) -> dict[int, TierRows]:
        """Accept that another engine deleted rows from the table.  They are no longer reported as
        missing, and readers skip them.  Returns a result for each partition.
        """
        return self._tier.accept_tier(topic, timeout_s)

    def retain_tier(self, topic: str, *, timeout_s: float = TIMEOUT_S) -> dict[int, int]:
        """Have the leader of each partition apply retention now; return the log starts before it.

        Rows leave the table with the next commits.  Raises `InvalidRequest` without a tier.
        """
        return self._tier.retain_tier(topic, timeout_s)

    def vacuum_tier(self, topic: str, *, timeout_s: float = 300.0) -> int:
        """Delete the files that the table dropped tier_vacuum_retention_ms ago; return their
        number.  Raises `TierUnavailable` while the broker does not trust its clock (rule L10).
        """
        return self._tier.vacuum_tier(topic, timeout_s)

    # -- consumer groups ---------------------------------------------------------------------------

    def list_groups(
        self, states: Iterable[str] = (), *, timeout_s: float = TIMEOUT_S
    ) -> GroupListings:
        """Return the consumer groups that all coordinators know, by id.

        states: "Empty", "PreparingRebalance", "CompletingRebalance" or "Stable"; empty = all.
        Coordinators that load, and brokers that do not answer, are named in the result.
        """
        return self._groups.list_groups(states, timeout_s)

    def describe_group(self, group_id: str, *, timeout_s: float = TIMEOUT_S) -> GroupDescription:
        """Describe a group with its members.  Raises `GroupIdNotFound`."""
        return self._groups.describe_group(group_id, timeout_s)

    def group_offsets(
        self, group_id: str, *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """Return every committed offset of a group; {} for an unknown group.

        A deleted topic has its id as its name.
        """
        return self._groups.group_offsets(group_id, timeout_s)

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, int],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Set committed offsets of a group without members.

        Raises `NonEmptyGroup`, `UnknownTopicOrPartition`.
        """
        self._groups.alter_group_offsets(group_id, offsets, timeout_s)

    def delete_group_offsets(
        self,
        group_id: str,
        partitions: Iterable[TopicPartition],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Delete committed offsets of topics to which no member subscribes (KIP-496).

        A partition without a committed offset is passed over.  Raises `GroupSubscribedToTopic`;
        then the offsets of other topics may be gone.  Raises `GroupIdNotFound`,
        `UnknownTopicOrPartition`.
        """
        self._groups.delete_group_offsets(group_id, partitions, timeout_s)

    def delete_group(self, group_id: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Delete a group without members, with its offsets.

        Raises `GroupIdNotFound`, `NonEmptyGroup`.
        """
        self._groups.delete_group(group_id, timeout_s)

    # -- transactions ------------------------------------------------------------------------------

    def list_transactions(
        self,
        states: Iterable[str] = (),
        producer_ids: Iterable[int] = (),
        *,
        open_longer_ms: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> TransactionListings:
        """Return the transactional ids that all coordinators know, by id.

        states: "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit" or
        "CompleteAbort"; empty = all.  producer_ids: empty = all.  open_longer_ms: only those with a
        transaction that is open for longer; 0 = all.  Coordinators that load, and brokers that do
        not answer, are named in the result.
        """
        return self._transactions.list_transactions(states, producer_ids, open_longer_ms, timeout_s)

    def describe_transactions(
        self, transactional_ids: Iterable[str], *, timeout_s: float = TIMEOUT_S
    ) -> list[TransactionDescription]:
        """Describe transactional ids, in the given order.

        The `error` of a description is `TransactionalIdNotFound` for an id that its coordinator
        does not know.  `job` has the query, the run, the batches and the participants of an id of
        the kind participants.  `held` has the partitions that an open transaction holds back.
        """
        return self._transactions.describe_transactions(transactional_ids, timeout_s)

    def abort_transaction(self, transactional_id: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Abort the open transaction of an id; its producer gets `TransactionAborted`.

        Raises `TransactionalIdNotFound`, `InvalidTxnState` if no transaction is open,
        `ConcurrentTransactions` if the transaction is being ended already.
        """
        self._transactions.abort_transaction(transactional_id, timeout_s)

    def resolve_transaction(
        self, transactional_id: str, *, commit: bool, timeout_s: float = TIMEOUT_S
    ) -> None:
        """End the batch of a job that waits for a Delta table; `describe_transactions` names it.

        commit: whether the table has the batch.  Look first: a wrong answer makes the topics and
        the table differ.  Raises `TransactionalIdNotFound`, `InvalidTxnState` if no batch waits for
        a table, or another transaction does by now.
        """
        self._transactions.resolve_transaction(transactional_id, commit, timeout_s)

    def forget_transactional_id(
        self, transactional_id: str, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Remove a transactional id that is not used any more.

        A producer that still has it is fenced by its next request.  Raises
        `TransactionalIdNotFound`, `InvalidTxnState` if a transaction is open.
        """
        self._transactions.forget_transactional_id(transactional_id, timeout_s)

    def describe_producers(
        self, partitions: Iterable[TopicPartition], *, timeout_s: float = TIMEOUT_S
    ) -> dict[TopicPartition, list[ProducerDescription]]:
        """Return the producers that the leader of each partition knows (KIP-664)."""
        return self._transactions.describe_producers(partitions, timeout_s)

    def find_hanging_transactions(
        self,
        topics: Iterable[str] | None = None,
        *,
        max_timeout_ms: int = TRANSACTION_MAX_TIMEOUT_MS,
        timeout_s: float = TIMEOUT_S,
    ) -> list[HangingTransaction]:
        """Return open transactions that their coordinators will not end in time (KIP-664).

        topics: None = all but pk's own.  max_timeout_ms: a transaction that is open for longer
        hangs; by default the default of the brokers' transaction_max_timeout_ms.
        """
        return self._transactions.find_hanging_transactions(topics, max_timeout_ms, timeout_s)

    # -- schedules of maintenance jobs -------------------------------------------------------------

    def set_schedule(
        self,
        topic: str,
        job: str,
        *,
        every_ms: int = 0,
        cron: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Schedule | None:
        """Set when a maintenance job of a topic runs; return the schedule before, or None.

        every_ms: interval, at least 10 s; or cron: five fields, in UTC.  Raises `InvalidRequest`
        for an unknown job, a broken line or interval; `UnknownTopicOrPartition`.
        """
        return self._schedules.set_schedule(topic, job, every_ms, cron, timeout_s)

    def delete_schedule(self, topic: str, job: str, *, timeout_s: float = TIMEOUT_S) -> bool:
        """Delete a schedule; return whether there was one.  A run under way goes on."""
        return self._schedules.delete_schedule(topic, job, timeout_s)

    def list_schedules(
        self, topic: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> ScheduleListings:
        """Return schedules and last runs (None = of all topics), and the controller's time."""
        return self._schedules.list_schedules(topic, timeout_s)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect.  Idempotent; a slow disconnect continues in the background."""
        self._connection.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
