"""Makes a replica the leader or a follower of its partition, as the metadata image requires.

World-generic.  It keeps broker/metadata_publisher M2 (the own registration) and
broker/metadata_publisher M5 (the claim of the tier's table).
"""

from __future__ import annotations

from pk import generations
from pk.log.manager import LogManager
from pk.server.broker.due_work import DueWork
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import PartitionState
from pk.server.replica.context import Environment
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.directory_reports import DirectoryReports
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.server.replica.partition import Partition
from pk.server.replica.state import ReplicaState
from pk.server.tier.epoch_fence import EpochFence
from pk.server.tier.view import TierFeed
from pk.types import NONE


class ReplicaRoles:
    """Changes which partitions one broker leads and follows."""

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        metadata: MetadataCache,
        fetchers: ReplicaFetcherManager,
        corruption: CorruptionManager,
        epoch_fence: EpochFence,
        feed: TierFeed,
        due: DueWork,
        directories: DirectoryReports,
    ) -> None:
        self._env = env
        self._manager = manager
        self._metadata = metadata
        self._fetchers = fetchers
        self._corruption = corruption
        self._epoch_fence = epoch_fence
        self._feed = feed
        self._due = due
        self._directories = directories

    async def lead_or_follow(self, partition: Partition, state: PartitionState) -> None:
        """Make this broker leader or follower of `partition`, or neither, as `state` requires."""
        self._corruption.settle(partition, state)
        key, directory = partition.key, self._manager.directory_of(partition.key)
        named = state.directory_of(self._env.node_id)
        self._directories.note(key, named, directory.directory_id)  # R11
        if state.leader != self._env.node_id or not self._metadata.registered():
            leads_elsewhere = state.leader != self._env.node_id
            if partition.leader is not None and partition.tiered:
                self._feed.remove(partition.key, partition.topic)
            self._epoch_fence.give_up(partition)
            partition.step_down(state.leader if leads_elsewhere else NONE)
            self._follow_or_not(partition, state)
            return
        fresh = partition.leader_epoch != state.leader_epoch
        recovering = partition.state is ReplicaState.RECOVERING
        if not partition.online and not recovering:
            return  # OFFLINE: an election mends neither damage nor a failed disk (rules L2, L9)
        self._fetchers.leave(partition)
        if recovering or (fresh and state.unclean and self._begins_at_table(partition, state)):
            # broker/metadata_publisher M5: `take_office` follows when the table is claimed
            if self._epoch_fence.epoch(partition.key) != state.leader_epoch:
                self._epoch_fence.begin(partition, state, self.take_office)
            return
        if partition.leader is None:  # until a former leader's data is written or undone
            await self._fetchers.wait_until_idle(partition)
        # The image may have changed during the waits above (`retry_unopened` waits, too).  States
        # are compared by value: a loaded snapshot has its own objects, and an unchanged state
        # causes no further reaction.
        if partition.online and self._metadata.image.partition(partition.key) == state:
            self.take_office(partition, state)

    def _begins_at_table(self, partition: Partition, state: PartitionState) -> bool:
        """Whether the log of a leader that was elected uncleanly is compared with the table first.

        A log of a restored topic that has no offset of its generation is compared also if the topic
        is not tiered: its offsets from 0 on were given by another cluster (rule T13).
        """
        if partition.tiered:
            return True
        generation = generations.generation_of_epoch(state.leader_epoch)
        internal = self._metadata.image.topics[partition.key.topic_id].internal
        return not internal and partition.log.written_end < generation * generations.OFFSETS

    def _follow_or_not(self, partition: Partition, state: PartitionState) -> None:
        """Fetch from the leader that `state` names, or stop fetching if there is none."""
        if (
            state.leader in (NONE, self._env.node_id)
            or not partition.online
            or not self._metadata.registered()
        ):
            self._fetchers.leave(partition)
        else:
            partition.others = True
            self._fetchers.follow(partition, state)

    def take_office(self, partition: Partition, state: PartitionState) -> None:
        """Lead `partition` in the epoch `state` names."""
        partition.lead(state, checkpointed=self._manager.high_watermark(partition.key))
        if partition.tiered:
            self._feed.restore(partition.key)
            self._feed.moved.set()
        self._due.flush_if_asked(partition)
