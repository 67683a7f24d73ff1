"""Offsets of consumer groups that a producer commits with its transaction (KIP-447, rule X2).

World-generic.  The coordinator of the group stores the offsets as a batch of the transaction in its
partition of `__consumer_offsets`.  The transaction's marker makes them count, or drops them.

Invariants
  F1  The batches of one transaction in one partition of `__consumer_offsets` have consecutive
      sequence numbers.  So a repeated request is stored once, and one that arrives late is refused.
  F2  One request is under way at a time.  The transaction ends after its answer.
  F3  After any failure the transaction can only be aborted: it is not known what was stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pk import errors
from pk.client.coordinator_calls import GROUP, CoordinatorCalls
from pk.client.group_types import ConsumerGroupMetadata, OffsetAndMetadata
from pk.client.network_client import NetworkClient
from pk.group_ids import partition_of_group
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire
from pk.world import World

#: The group goes on without this member: what it has read is read again.
_FINAL = (errors.RebalanceInProgress,)


class TransactionOffsets:
    """The offsets of one producer's transactions."""

    def __init__(self, world: World, cluster: NetworkClient, request_timeout_ms: int) -> None:
        self.in_flight = 0  #: calls of `send` that have not ended
        self._world = world
        self._cluster = cluster
        self._request_timeout_ms = request_timeout_ms
        self._pair = (NONE, NONE)
        self._sequences: dict[int, int] = {}  #: by partition of `__consumer_offsets` (F1)
        self._calls: tuple[str, CoordinatorCalls] | None = None  #: of the last group
        self._sending = asyncio.Lock()  # F2

    async def send(
        self,
        pair: Callable[[], tuple[int, int]],
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: ConsumerGroupMetadata,
        timeout_ms: int,
    ) -> None:
        """Store offsets in the transaction of `pair`.

        pair: returns the open transaction; raises if none is open, or it can only be aborted
        Raises the refusal of the group's coordinator, or `RequestTimedOut`.
        """
        self.in_flight += 1
        try:
            begun = pair()
            async with asyncio.timeout(timeout_ms / 1000), self._sending:
                topics = await self._topics(offsets, group, timeout_ms)
                if pair() != begun:
                    raise errors.InvalidTxnState("the transaction ended meanwhile")
                await self._send(begun, topics, len(offsets), group, timeout_ms)
        except TimeoutError:
            raise errors.RequestTimedOut(
                f"offsets of group {group.group_id!r}: no answer within {timeout_ms} ms"
            ) from None
        finally:
            self.in_flight -= 1

    async def _send(
        self,
        pair: tuple[int, int],
        topics: list[wire.CommitTopic],
        count: int,
        group: ConsumerGroupMetadata,
        timeout_ms: int,
    ) -> None:
        if pair != self._pair:
            self._pair, self._sequences = pair, {}
        partition = partition_of_group(group.group_id)
        sequence = self._sequences.get(partition, 0)
        request = wire.TxnOffsetCommitRequest(
            member=wire.GroupMember(
                group_id=group.group_id,
                member_id=group.member_id,
                generation=group.generation,
                group_instance_id=group.group_instance_id,
            ),
            topics=topics,
            metadata_offset=max(0, self._cluster.metadata.offset),
            producer_id=pair[0],
            producer_epoch=pair[1],
            base_sequence=sequence,
        )
        await self._of(group.group_id).call(request, timeout_ms, _FINAL)
        self._sequences[partition] = sequence + count

    def _of(self, group_id: str) -> CoordinatorCalls:
        """Return the calls to the coordinator of a group."""
        if self._calls is None or self._calls[0] != group_id:
            calls = CoordinatorCalls(
                self._world, self._cluster, group_id, self._request_timeout_ms, GROUP
            )
            self._calls = (group_id, calls)
        return self._calls[1]

    async def _topics(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: ConsumerGroupMetadata,
        timeout_ms: int,
    ) -> list[wire.CommitTopic]:
        """Return the offsets by topic id.  The ids that the consumer knows come first.

        Raises `UnknownTopicOrPartition`: the coordinator would wait for such a partition.
        """
        await self._cluster.check_partitions(offsets, timeout_ms)
        found: dict[str, wire.CommitTopic] = {}
        for place, each in sorted(offsets.items()):
            topic_id = group.topic_ids.get(place.topic)
            if topic_id is None:
                await self._cluster.topic(place.topic, timeout_ms)
                topic_id = self._cluster.metadata.key(place).topic_id
            key = PartitionKey(topic_id, place.partition)
            topic = found.setdefault(key.topic_id, wire.CommitTopic(topic_id=key.topic_id))
            topic.partitions.append(key.partition)
            topic.offsets.append(each.offset)
            topic.leader_epochs.append(each.leader_epoch)
            topic.metadata.append(each.metadata)
        return list(found.values())
