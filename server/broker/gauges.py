"""The broker's gauges: lags, offline partitions, failing tiers, queues.

World-generic.  The scheduler sets them every few seconds from the state of the partitions.
"""

from __future__ import annotations

from collections.abc import Mapping

from pk import errors
from pk.server.broker.heartbeat_report import HeartbeatReport
from pk.server.broker.tier_freshness import TierFreshness
from pk.server.replica.context import ControllerContact, Environment
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.directory_writers import LogDirWriters
from pk.server.replica.partition import Partition
from pk.server.replica.purgatory import ProducePurgatory
from pk.server.replica.state import HostedReplicas
from pk.server.tier.health import TierHealth
from pk.types import PartitionKey


class BrokerGauges:
    """Reads the state of one broker into its metrics."""

    def __init__(
        self,
        env: Environment,
        lifecycle: ControllerContact,
        replicas: HostedReplicas,
        partitions: Mapping[PartitionKey, Partition],
        writers: LogDirWriters,
        purgatory: ProducePurgatory[DelayedProduce],
        report: HeartbeatReport,
    ) -> None:
        self._env = env
        self._lifecycle = lifecycle
        self._replicas = replicas
        self._partitions = partitions
        self._writers = writers
        self._purgatory = purgatory
        self._report = report
        self._tier_health = TierHealth()
        self._freshness = TierFreshness()

    def set(self) -> None:
        """Set every gauge, and report tiers that fail."""
        metrics = self._env.metrics
        hw_lag = lso_lag = tier_lag = problems = offline = leading = damaged = 0
        under = under_min = replica_lag = open_transactions = 0
        began_ms = now_ms = self._env.clock.wall_ms()
        failing: dict[str, errors.PkError] = {}
        for partition in self._partitions.values():
            if not partition.online:
                offline += 1
            if partition.leader is None:
                continue
            leading += 1
            leader = partition.leader
            under += len(leader.isr) < len(leader.replicas)
            under_min += len(leader.isr) < leader.in_sync_required
            replica_lag += sum(
                leader.log_end - leader.end_of(each)
                for each in leader.replicas
                if each != self._env.node_id
            )
            for violation in partition.violations():
                metrics.violations.inc()
                self._env.warn("invariant_violated", what=violation)
            stable = partition.last_stable_offset
            hw_lag += partition.log.written_end - partition.high_watermark
            lso_lag += partition.high_watermark - stable
            oldest = partition.log.producers.oldest_transaction()
            if oldest is not None:
                open_transactions += partition.log.producers.open_count
                began_ms = min(began_ms, oldest[1].transaction_began_ms)
            if partition.tiered:
                tier_lag += max(0, stable - partition.log.tiered_end)
                if partition.tier.problem is not None:
                    problems += 1
                    failing[partition.topic] = partition.tier.problem
            damaged += bool(partition.log.damage)
        for event, facts in self._tier_health.observe(failing, self._env.clock.monotonic_ms()):
            self._env.warn(event, **facts)
        metrics.hw_lag.set(hw_lag)
        metrics.under_replicated.set(under)
        metrics.under_min_isr.set(under_min)
        metrics.replica_lag.set(replica_lag)
        metrics.lso_lag.set(lso_lag)
        metrics.open_transactions.set(open_transactions)
        metrics.open_transaction_age.set(now_ms - began_ms)
        metrics.tier_lag.set(tier_lag)
        self._set_tier_lag_ms()
        metrics.tier_problems.set(problems)
        metrics.damaged_partitions.set(damaged)
        metrics.partitions.labels("leading").set(leading)
        metrics.partitions.labels("offline").set(offline + len(self._replicas.unopened()))
        metrics.offline_directories.set(len(self._report.offline_directories()))
        metrics.parked.set(len(self._purgatory))
        metrics.in_contact.set(self._lifecycle.in_contact())
        for writer in self._writers.all():
            disk = writer.disk
            metrics.write_queue.labels(disk.storage.root).set(writer.queued_bytes)
            metrics.full.labels(disk.storage.root).set(writer.space.full)

    def _set_tier_lag_ms(self) -> None:
        """Note for how long stable records have not been in their tables."""
        now_ms = self._env.clock.monotonic_ms()
        looked: dict[PartitionKey, int] = {}
        for partition in self._partitions.values():
            if partition.leader is not None and partition.tiered:
                stable = partition.last_stable_offset
                # before its first report the tier's end is -1, and deleted records do not wait
                end = max(partition.log.tiered_end, partition.log.log_start)
                waiting_ms = self._freshness.look(partition.key, stable, end, now_ms)
                partition.tier.waiting_ms = looked[partition.key] = waiting_ms
        self._freshness.keep(looked)
        self._env.metrics.tier_lag_ms.set(max(looked.values(), default=0))
