"""Look-up of the partitions that this broker has a log of.

World-generic.

Invariants
  B1  A partition is found exactly if this broker has an open log of it.  The metadata image decides
      which of these partitions the broker leads.
"""

from __future__ import annotations

from pk import errors
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.types import NONE, Epoch, NodeId, PartitionKey


class HostedPartitions:
    """The open partitions of one broker, and the reasons why others are not here."""

    def __init__(
        self,
        partitions: dict[PartitionKey, Partition],
        replicas: HostedReplicas,
        metadata: MetadataCache,
    ) -> None:
        self._replicas = replicas
        self._metadata = metadata
        self.get = partitions.get
        self.all = partitions.values

    def find(self, key: PartitionKey) -> Partition:
        """Return the partition if this broker has its log.

        Raises `UnknownTopicId`, `UnknownTopicOrPartition`, `NotLeaderOrFollower`.
        """
        partition = self.get(key)
        if partition is not None:
            return partition
        raise self.why_not_here(key).with_traceback(None)

    def leader_hint(self, key: PartitionKey) -> NodeId:
        """Return the leader of the partition, as far as this broker knows."""
        return self._metadata.leader_of(key)

    def unclean_epoch(self, key: PartitionKey) -> Epoch:
        """Return the last leader epoch of the partition that began uncleanly; NONE = none (R3)."""
        state = self._metadata.image.partition(key)
        return NONE if state is None else state.unclean_epoch

    def why_not_here(self, key: PartitionKey) -> errors.PkError:
        """Return the error that says why this broker does not have the partition."""
        unopened = self._replicas.why_unopened(key)
        if unopened is not None:
            return unopened
        topic = self._metadata.image.topics.get(key.topic_id)
        if topic is None:
            return errors.UnknownTopicId(
                f"no topic has the id {key.topic_id}: it was deleted, or is not known here yet"
            )
        state = topic.partitions.get(key.partition)
        if state is None:
            return errors.UnknownTopicOrPartition(f"{topic.name} has no partition {key.partition}")
        return errors.NotLeaderOrFollower(
            f"{topic.name}-{key.partition}: broker {state.leader} leads", leader=str(state.leader)
        )
