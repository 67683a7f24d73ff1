"""Every offset of a partition, and its producers, for operators and readiness checks.

World-generic.
"""

from __future__ import annotations

from pk import errors
from pk.log.producers import ProducerStateEntry
from pk.server.broker.hold_keeper import HoldKeeper
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.controller.elections import waits_for
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: Most producers of one reply, of some 80 bytes each.
PRODUCERS_MAX = 50_000


class PartitionDescriptions:
    """Describes partitions from the metadata image and the logs of this broker."""

    def __init__(
        self,
        partitions: HostedPartitions,
        replicas: HostedReplicas,
        metadata: MetadataCache,
        corruption: CorruptionManager,
        holds: HoldKeeper,
    ) -> None:
        self._partitions = partitions
        self._replicas = replicas
        self._metadata = metadata
        self._corruption = corruption
        self._holds = holds

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

    def producers(self, request: wire.DescribeProducersRequest) -> wire.DescribeProducersReply:
        """Return the producers that the logs led here know (KIP-664).

        An item has an error if this broker does not lead its partition.  It has `ThrottledError` if
        the items before it have filled the reply: the client asks for it again.
        """
        reply = wire.DescribeProducersReply()
        room = PRODUCERS_MAX
        for item in request.partitions:
            described = reply.partitions.add(topic_id=item.topic_id, partition=item.partition)
            try:
                partition = self._partitions.find(PartitionKey(item.topic_id, item.partition))
                partition.serving()
                known = partition.log.producers.items()
                if len(known) > PRODUCERS_MAX:
                    raise errors.InvalidRequest(
                        f"{partition} has {len(known)} producers, and one reply describes "
                        f"{PRODUCERS_MAX}"
                    )
                if len(known) > room:
                    raise errors.ThrottledError(
                        f"the reply has no room for the {len(known)} producers of {partition}"
                    )
            except errors.PkError as refusal:
                described.error.CopyFrom(frames.error_of(refusal))
                continue
            room -= len(known)
            described.producers.extend(_producer(*each) for each in known)
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
            retention_hold=self._holds.apply(partition),
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
        oldest = log.producers.oldest_transaction() if partition.leader is not None else None
        if oldest is not None:
            described.oldest_transaction.CopyFrom(_producer(*oldest))


def _producer(producer_id: int, known: ProducerStateEntry) -> wire.ProducerState:
    return wire.ProducerState(
        producer_id=producer_id,
        producer_epoch=known.epoch,
        last_sequence=known.last_sequence,
        last_ms=known.last_ms,
        coordinator_epoch=known.coordinator_epoch,
        transaction_start=known.transaction_start,
        transaction_began_ms=known.transaction_began_ms,
    )
