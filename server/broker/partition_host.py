"""What a broker does for each of its partitions (`Host` in replica/partition.py).

World-generic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pk import settings
from pk.log.manager import LogManager
from pk.server.broker.due_work import DueWork
from pk.server.broker.failures import FailureHandler
from pk.server.replica.context import Environment
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.partition import Partition
from pk.server.replica.purgatory import ProducePurgatory
from pk.server.replica.reaper import ExpirationReaper
from pk.server.replica.state import HostedReplicas
from pk.server.tier.view import TierFeed


class InternalTopicHost(Protocol):
    """The coordinators that keep their state in an internal topic."""

    def partition_moved(self, partition: Partition) -> None: ...


class PartitionHost:
    """Passes what happens to a partition on to the tier, the scheduler and the controller.

    coordinators: by the name of the internal topic.
    """

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        replicas: HostedReplicas,
        purgatory: ProducePurgatory[DelayedProduce],
        reaper: ExpirationReaper,
        due: DueWork,
        feed: TierFeed,
        failures: FailureHandler,
        coordinators: Mapping[str, InternalTopicHost],
    ) -> None:
        self.node_id = env.node_id
        self.replicas = replicas
        self.purgatory = purgatory
        self._clock = env.clock
        self._manager = manager
        self._due = due
        self._feed = feed
        self._coordinators = coordinators
        self.parked = reaper.parked
        self.retain_soon = due.retain_soon
        self.storage_failed = failures.storage_failed
        self.replica_failed = failures.replica_failed
        self.damaged = failures.damaged

    @property
    def now_ms(self) -> int:
        """Return the monotonic time."""
        return self._clock.monotonic_ms()

    def partition_moved(self, partition: Partition) -> None:
        """Pass changed bounds, epoch or settings to the tier, the checkpoint, the flush timer and
        the coordinators of an internal topic.
        """
        key = partition.key
        self._manager.set_high_watermark(key, partition.high_watermark)
        if partition.leader is not None and partition.tiered:
            self._feed.touch(key)
            self._feed.moved.set()
        coordinators = self._coordinators.get(partition.topic)
        if coordinators is not None:
            coordinators.partition_moved(partition)
        flush_ms = partition.settings["flush_ms"]  # followers flush too
        if flush_ms < settings.DAY_MS and key not in self._due.flushes:
            self._due.flushes.set(key, self.now_ms + flush_ms)
