"""Every offset of a partition, for operators and readiness checks.

World-generic.
"""

from __future__ import annotations

from pk import errors
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.controller.elections import waits_for
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire


class PartitionDescriptions:
    """Describes partitions from the metadata image and the logs of this broker."""

    def __init__(
        self,
        partitions: HostedPartitions,
        replicas: HostedReplicas,
        metadata: MetadataCache,
        corruption: CorruptionManager,
    ) -> None:
        self._partitions = partitions
        self._replicas = replicas
        self._metadata = metadata
        self._corruption = corruption

    def reply(self, request: wire.DescribePartitionsRequest) -> wire.DescribePartitionsReply:
        """Return every offset of a partition, for operators and readiness checks."""
        image = self._metadata.image
        for name in request.topics:
            if image.topic(name) is None:
                raise errors.UnknownTopicOrPartition(f"topic {name!r} does not exist")
        wanted = dict.fromkeys(request.topics)
        reply = wire.DescribePartitionsReply()
        here = sorted(self._partitions.all(), key=lambda each: (each.topic, each.key.partition))
        for partition in here:
            if not wanted or partition.topic in wanted:
                self._describe(partition, reply)
        for key, problem in sorted(self._replicas.unopened().items()):
            topic = image.topics.get(key.topic_id)
            if topic is not None and (not wanted or topic.name in wanted):
                reply.partitions.add(
                    topic=topic.name,
                    topic_id=key.topic_id,
                    partition=key.partition,
                    leader=NONE,
                    error=frames.error_of(problem),
                )
        return reply

    def _describe(self, partition: Partition, reply: wire.DescribePartitionsReply) -> None:
        log, state = partition.log, self._metadata.image.partition(partition.key)
        described = reply.partitions.add(
            topic=partition.topic,
            topic_id=partition.key.topic_id,
            partition=partition.key.partition,
            leader=NONE if state is None else state.leader,
            leader_epoch=NONE if state is None else state.leader_epoch,
            log_start=log.log_start,
            local_log_start=log.local_log_start,
            tiered_end=partition.tiered_end,
            last_stable_offset=partition.last_stable_offset,
            high_watermark=partition.high_watermark,
            log_end=log.written_end,
            local_bytes=log.size_bytes,
            tier_bytes=partition.tier.tier_bytes,
            segments=log.segment_count,
            directory=partition.writer.disk.storage.root,
            isr=() if state is None else state.isr,
            replicas=() if state is None else state.replicas,
        )
        problem = partition.hosted.cause or self._corruption.problem_of(partition)
        if problem is None and state is not None and state.leader == NONE:
            names = ", ".join(map(str, waits_for(state, self._metadata.image.available)))
            awaited = f"brokers {names}" if names else "an election"
            problem = errors.EligibleLeadersNotAvailable(
                f"{partition} waits for {awaited} (rule R3)"
            )
        if problem is not None:
            described.error.CopyFrom(frames.error_of(problem))
