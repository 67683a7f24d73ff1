"""Makes this broker's replicas what the metadata image requires: created, served, removed.

World-generic.  The publisher (broker/metadata_publisher.py) calls it with the changes of each chunk
of the metadata log.
"""

from __future__ import annotations

from collections.abc import Collection

from pk import errors
from pk.log.manager import LogManager
from pk.log.plan import LogConfig
from pk.server.broker.due_work import DueWork
from pk.server.broker.replica_roles import ReplicaRoles
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import PartitionState
from pk.server.replica.context import Environment
from pk.server.replica.creation import ReplicaCreator, discard, may_take_part
from pk.server.replica.directory_reports import DirectoryReports
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.server.replica.offline_reports import OfflineReports
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas, ReplicaEvent, ReplicaState
from pk.server.tier.epoch_fence import EpochFence
from pk.server.tier.view import TierFeed
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire


class ReplicaManager:
    """The replicas of one broker."""

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        metadata: MetadataCache,
        replicas: HostedReplicas,
        partitions: dict[PartitionKey, Partition],
        reports: OfflineReports,
        directories: DirectoryReports,
        creator: ReplicaCreator,
        roles: ReplicaRoles,
        fetchers: ReplicaFetcherManager,
        epoch_fence: EpochFence,
        feed: TierFeed,
        due: DueWork,
    ) -> None:
        self._env = env
        self._manager = manager
        self._metadata = metadata
        self._replicas = replicas
        self._partitions = partitions
        self._reports = reports
        self._directories = directories
        self._creator = creator
        self._roles = roles
        self._fetchers = fetchers
        self._epoch_fence = epoch_fence
        self._feed = feed
        self._due = due

    async def settle(self, key: PartitionKey) -> None:
        """Make this broker's replica of `key` what the image requires."""
        state = self._metadata.image.partition(key)
        partition = self._partitions.get(key)
        if state is None:
            return
        if self._env.node_id not in state.replicas:
            if partition is not None:
                await self._drop(
                    partition, errors.NotLeaderOrFollower(f"{partition} was reassigned")
                )
            self._replicas.forget(key)
            return
        marked = key in self._manager.operator_marked and self._metadata.registered()
        if marked and may_take_part(state, self._env.node_id, has_log=partition is not None):
            await self._creator.clear_operator_mark(key)
        if self.rebuildable(key) and self._others_have_it(state):
            await self._set_aside(key, partition)
            partition = None
        if partition is None:
            if self._replicas.state(key) is ReplicaState.UNOPENED:
                return
            await self._creator.create_missing([key])  # rebuilt (broker/metadata_publisher M7)
            partition = self._partitions.get(key)
            if partition is None:
                return
        await self._roles.lead_or_follow(partition, state)

    def rebuildable(self, key: PartitionKey) -> bool:
        """Whether the controller has reacted to the report that this replica is offline
        (broker/metadata_publisher M7).

        Only then may a damaged or missing log be rebuilt.  The controller must have acknowledged
        the report, and the image must include the record that the controller wrote for it.
        """
        replica = self._replicas.get(key)
        reported = self._reports.in_image(key)
        return replica is not None and replica.rebuildable and reported

    def _others_have_it(self, state: PartitionState) -> bool:
        """Whether another broker leads and this replica is in neither ISR nor ELR (L9)."""
        me = self._env.node_id
        return state.leader not in (NONE, me) and me not in (*state.isr, *state.elr)

    async def _set_aside(self, key: PartitionKey, partition: Partition | None) -> None:
        """Move a damaged or missing log away, so that a new one is created
        (broker/metadata_publisher M7).

        The broker reports the replica as offline throughout, first as lost and then as not yet
        compared (broker/metadata_publisher M8).
        """
        image = self._metadata.image
        topic, state = image.topics[key.topic_id].name, image.partition(key)
        assert state is not None
        self._replicas.uncompared[key] = state.leader_epoch
        tp = TopicPartition(topic, key.partition)
        self._env.warn("replica_made_anew", partition=str(tp))
        self._epoch_fence.cancel(key)  # else it would continue with the new log
        if partition is not None:
            self._partitions.pop(key, None)
            self._fetchers.leave(partition)
            self._replicas.on(key, ReplicaEvent.SET_ASIDE)
            await self._fetchers.wait_until_idle(partition)
        delay_ms = self._metadata.settings_of(topic)["file_delete_delay_ms"]
        try:
            await self._manager.set_aside(tp, key.topic_id, delay_ms)
        except errors.PkError as error:
            self._env.warn("delete_failed", partition=str(tp), error=error.message)
            return
        if partition is None:
            self._replicas.on(key, ReplicaEvent.SET_ASIDE)

    async def remove_topic(self, topic_id: str, record: wire.RemoveTopicRecord) -> None:
        """Delete this broker's replicas of a topic that was deleted."""
        gone = errors.UnknownTopicId(f"topic {record.name} ({topic_id}) was deleted")
        mine = [each for key, each in self._partitions.items() if key.topic_id == topic_id]
        for partition in mine:
            await self._drop(partition, gone)
        for key in self._replicas.unopened():
            if key.topic_id == topic_id:
                self._replicas.forget(key)

    async def _drop(self, partition: Partition, why: errors.PkError) -> None:
        """Delete the replica.  `why`: the topic was deleted, or the replica was reassigned."""
        self._epoch_fence.cancel(partition.key)
        self._fetchers.leave(partition)
        del self._partitions[partition.key]
        partition.fail(why, ReplicaEvent.REMOVED)
        self._feed.remove(partition.key, partition.topic)
        self._feed.moved.set()
        await self._fetchers.wait_until_idle(partition)
        await discard(self._env, self._manager, self._directories, partition.key, str(partition))

    def lease_changed(self, topic_id: str) -> None:
        """Describe the led partitions of a topic to the tier process again: a maintenance lease was
        granted or released (rule C5)."""
        for partition in self._partitions.values():
            if partition.key.topic_id == topic_id and partition.leader is not None:
                self._feed.touch(partition.key)
                self._feed.moved.set()

    def reconfigure(self, topics: Collection[str] | None) -> None:
        """Apply the current settings of these topics to their partitions; None = of all topics."""
        for partition in self._partitions.values():
            if topics is None or partition.topic in topics:
                wanted = self._metadata.settings_of(partition.topic)
                partition.log.config = LogConfig.of(wanted)
                tiered = self._metadata.is_tiered(partition.topic, wanted)
                if partition.tiered and not tiered:
                    self._feed.remove(partition.key, partition.topic)
                elif tiered and not partition.tiered and partition.leader is not None:
                    self._feed.restore(partition.key)
                state = self._metadata.image.partition(partition.key)
                epoch = NONE if state is None else state.leader_epoch
                partition.reconfigure(wanted, epoch, tiered=tiered)
                self._due.flush_if_asked(partition)
                self._due.retain_soon(partition.key)
