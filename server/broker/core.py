"""Composes the parts of one broker; every part gets its collaborators by its constructor.

World-generic.  The event loop owns everything here.  All disk access goes through the lanes of a
`Disk`.  Only the process (broker/node.py) imports this module; no part knows it.
"""

from __future__ import annotations

from functools import partial

from pk import group_ids, transactional_ids
from pk.log.manager import LogManager
from pk.server.broker.broker_channels import BrokerChannels
from pk.server.broker.cleaning import Cleaner, LogCleaner
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.disk_jobs import DiskJobs
from pk.server.broker.due_work import DueWork
from pk.server.broker.failures import FailureHandler
from pk.server.broker.flushes import Flushes
from pk.server.broker.free_space import FreeSpace
from pk.server.broker.gauges import BrokerGauges
from pk.server.broker.heartbeat_report import HeartbeatReport
from pk.server.broker.hold_keeper import HoldKeeper
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.broker.internal_topics import InternalTopics
from pk.server.broker.lifecycle import BrokerLifecycleManager
from pk.server.broker.metadata_publisher import MetadataPublisher
from pk.server.broker.partition_host import PartitionHost
from pk.server.broker.replica_manager import ReplicaManager
from pk.server.broker.replica_roles import ReplicaRoles
from pk.server.broker.retention import RetentionVisits
from pk.server.broker.scheduler import BrokerScheduler
from pk.server.groups.coordinator import GroupCoordinators
from pk.server.groups.hold_reports import HoldReports
from pk.server.groups.lag_gauges import GroupGauges
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.context import Environment
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.creation import ReplicaCreator
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.directory_writers import LogDirWriters
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.server.replica.partition import Partition
from pk.server.replica.purgatory import ProducePurgatory
from pk.server.replica.reaper import ExpirationReaper
from pk.server.replica.state import HostedReplicas
from pk.server.tier.client import TierClient
from pk.server.tier.epoch_fence import EpochFence
from pk.server.tier.purges import Purges
from pk.server.tier.view import TierFeed
from pk.server.transactions.coordinator import TransactionCoordinators
from pk.server.transactions.open_transactions import OpenTransactionChecks
from pk.server.transactions.verifier import TransactionVerifier
from pk.tasks import TaskRegistry
from pk.types import Offset, PartitionKey
from pk.wire import pk_pb2 as wire


class BrokerCore:
    """The parts of one broker, below its handlers.

    The process makes the parts that reach out of the broker: `metadata`, `clocks`, `lifecycle` and
    `tier`.  `hello`: how this broker greets others.  `cleaner`: cleans compacted logs; None = the
    broker cleans none.
    """

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        metadata: MetadataCache,
        clocks: ClockWatch,
        lifecycle: BrokerLifecycleManager,
        tier: TierClient,
        hello: wire.Hello,
        cleaner: Cleaner | None,
    ) -> None:
        self.env = env
        self.manager = manager
        self.metadata = metadata
        self.clocks = clocks
        self.lifecycle = lifecycle
        self.tier = tier
        self.hello = hello
        self.tasks = TaskRegistry(partial(env.bug, "a background task"))
        self.replicas = HostedReplicas()
        self.partitions: dict[PartitionKey, Partition] = {}  #: the partitions whose log is open
        self.hosted = HostedPartitions(self.partitions, self.replicas, metadata)
        self.purgatory: ProducePurgatory[DelayedProduce] = ProducePurgatory()
        self.reaper = ExpirationReaper(self.purgatory, env.clock)
        self.due = DueWork()
        self.feed = TierFeed(env.world.new_id())
        self.writers = LogDirWriters(env, lifecycle.heartbeat_soon)
        self.channels = BrokerChannels(env, hello, metadata)
        self.holds = HoldKeeper(env, self.partitions, metadata)
        self._compose_transactions()
        self._compose_replicas()
        self._compose_publisher()
        self.scheduler = self._compose_scheduler()
        self.cleaner = LogCleaner(
            env, clocks, self.partitions, self.fetchers.changing, cleaner, self.holds
        )

    def _compose_transactions(self) -> None:
        """Make the coordinators of transactions and groups, and what a leader asks of them."""
        env, metadata, channels = self.env, self.metadata, self.channels
        self.coordinators = TransactionCoordinators(
            env, metadata, self.partitions, self.lifecycle, self.clocks, channels
        )
        self.verifier = TransactionVerifier(
            metadata, channels, partial(env.bug, "asking a transaction coordinator")
        )
        self.open_transactions = OpenTransactionChecks(
            env, self.partitions, self.clocks, self.verifier
        )
        self.groups = GroupCoordinators(env, metadata, self.lifecycle, self.clocks)
        self.group_gauges = GroupGauges(
            env, metadata, self.lifecycle, channels, self.groups.groups_here, self._stable_end
        )
        self.hold_reports = HoldReports(
            env, metadata, self.lifecycle, self.clocks, channels, self.groups
        )

    def _stable_end(self, key: PartitionKey) -> Offset | None:
        """Return the last stable offset of a partition that this broker leads."""
        partition = self.partitions.get(key)
        if partition is None or partition.leader is None:
            return None
        return partition.last_stable_offset

    def _compose_replicas(self) -> None:
        """Make the parts that change replicas: fetchers, ISR changes, claims, failures."""
        env, manager, metadata = self.env, self.manager, self.metadata
        lifecycle, partitions = self.lifecycle, self.partitions
        self.fetchers = ReplicaFetcherManager(
            env, self.hello, manager, self.replicas, metadata, lifecycle, self.clocks
        )
        self.alter_partition = AlterPartitionManager(env, partitions, metadata, lifecycle)
        self.purges = Purges(env, metadata, self.tier, lifecycle)
        self.corruption = CorruptionManager(env, metadata, self.tasks)
        self.epoch_fence = EpochFence(
            env, manager, partitions, metadata, self.fetchers, self.tier, lifecycle
        )
        self.failures = FailureHandler(
            env,
            partitions,
            self.writers,
            self.fetchers,
            self.corruption,
            self.epoch_fence,
            self.feed,
            self.tasks,
            lifecycle.heartbeat_soon,
        )
        self.host = PartitionHost(
            env,
            manager,
            self.replicas,
            self.purgatory,
            self.reaper,
            self.due,
            self.feed,
            self.failures,
            {transactional_ids.TOPIC: self.coordinators, group_ids.TOPIC: self.groups},
        )
        self.report = HeartbeatReport(
            env.node_id,
            manager,
            metadata,
            self.replicas,
            partitions,
            self.writers,
            self.clocks,
            self.fetchers.changing,
        )

    def _compose_publisher(self) -> None:
        """Make the parts that carry out the metadata log."""
        env, manager, metadata = self.env, self.manager, self.metadata
        self.roles = ReplicaRoles(
            env,
            manager,
            metadata,
            self.fetchers,
            self.corruption,
            self.epoch_fence,
            self.feed,
            self.due,
            self.lifecycle.directory_reports,
        )
        self.creator = ReplicaCreator(
            env,
            self.host,
            manager,
            self.partitions,
            metadata,
            self.writers,
            self.fetchers,
            self.corruption,
            self.lifecycle,
            self.lifecycle.directory_reports,
            self.roles.lead_or_follow,
        )
        self.replica_manager = ReplicaManager(
            env,
            manager,
            metadata,
            self.replicas,
            self.partitions,
            self.lifecycle.offline_reports,
            self.lifecycle.directory_reports,
            self.creator,
            self.roles,
            self.fetchers,
            self.epoch_fence,
            self.feed,
            self.due,
        )
        self.publisher = MetadataPublisher(
            env,
            manager,
            metadata,
            self.lifecycle,
            self.partitions,
            self.replica_manager,
            self.creator,
            self.fetchers,
            self.alter_partition,
            self.purges,
        )
        self.internal_topics = InternalTopics(env, metadata, self.lifecycle, self.publisher)

    def _compose_scheduler(self) -> BrokerScheduler:
        env, manager, partitions = self.env, self.manager, self.partitions
        jobs = DiskJobs(env)
        self.retention = RetentionVisits(
            env,
            manager,
            self.lifecycle,
            self.clocks,
            partitions,
            self.fetchers.changing,
            self.tier,
            self.due,
            jobs,
            self.holds,
        )
        self.free_space = FreeSpace(env, manager, self.writers, jobs)
        gauges = BrokerGauges(
            env,
            self.lifecycle,
            self.replicas,
            partitions,
            self.writers,
            self.purgatory,
            self.report,
        )
        return BrokerScheduler(
            env,
            manager,
            self.clocks,
            partitions,
            self.alter_partition,
            self.failures,
            self.retention,
            Flushes(env, partitions, self.due, jobs),
            self.free_space,
            gauges,
            jobs,
        )

    async def close(self) -> None:
        """Stop every task and timer; the publisher first, as metadata would start fetchers."""
        self.reaper.close()
        await self.cleaner.close()
        await self.scheduler.close()
        await self.publisher.close()
        await self.open_transactions.close()
        await self.coordinators.close()
        await self.group_gauges.close()
        await self.hold_reports.close()
        await self.groups.close()
        await self.verifier.close()
        await self.epoch_fence.close()
        await self.alter_partition.close()
        await self.fetchers.close()
        await self.channels.close()
        await self.tier.close()
        await self.purges.close()
        await self.tasks.close()
