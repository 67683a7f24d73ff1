"""A leader's questions to transaction coordinators about producers (rules X3, X6).

World-generic.  A producer of transactions registers no partitions.  The leader of a partition asks
the coordinator about the first batch of each transaction, and the coordinator adds the partition to
the transaction.  The producer id names the coordinator's partition (pk/transactional_ids).

Invariants
  I1  An answer of a coordinator epoch below the newest one heard counts as not given: its
      coordinator was replaced.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pk import errors
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import InterBrokerCalls
from pk.server.transactions.gathering import GatheredCalls
from pk.transactional_ids import PARTITIONS, TOPIC, partition_of_producer
from pk.types import NONE, Epoch, NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

QUESTIONS_MAX = 10_000
#: Questions of one request.
REQUEST_QUESTIONS_MAX = 500
CALL_TIMEOUT_MS = 5_000


class Asked(NamedTuple):
    """A question about one producer and one partition."""

    producer_id: int
    producer_epoch: int
    key: PartitionKey
    leader_epoch: Epoch
    unclean_epoch: Epoch = NONE
    verify_only: bool = False


def coordinator_of(metadata: MetadataCache, partition: int) -> NodeId:
    """Return the broker that leads a partition of `__transaction_state`.

    Raises `CoordinatorUnavailable` if none leads it, or the topic does not exist.
    """
    topic = metadata.image.topic(TOPIC)
    leader = NONE
    if topic is not None:
        leader = metadata.leader_of(PartitionKey(topic.topic_id, partition))
    if leader == NONE:
        raise errors.CoordinatorUnavailable(f"no broker leads {TOPIC}-{partition} now")
    return leader


class TransactionVerifier:
    """Asks the coordinators, for all partitions that a broker leads."""

    def __init__(
        self,
        metadata: MetadataCache,
        calls: InterBrokerCalls,
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self._metadata = metadata
        self._calls = calls
        self._newest: dict[int, Epoch] = {}  #: the newest coordinator epoch heard, by partition
        self._questions: GatheredCalls[int, Asked, wire.TxnAnswer] = GatheredCalls(
            self._send, on_bug, request_max=REQUEST_QUESTIONS_MAX, waiting_max=QUESTIONS_MAX
        )
        self.close = self._questions.close

    def heard(self, partition: int, coordinator_epoch: Epoch) -> None:
        """Note the epoch in which a coordinator acted (I1)."""
        self._newest[partition] = max(self._newest.get(partition, NONE), coordinator_epoch)

    def newest(self, producer_id: int) -> Epoch:
        """Return the newest epoch heard of the coordinator of a producer id."""
        return self._newest.get(partition_of_producer(producer_id), NONE)

    def ask(self, asked: Asked) -> Awaitable[wire.TxnAnswer]:
        """Return the coordinator's answer to one question.

        Raises `ThrottledError` at once.  The awaitable raises the refusal of the coordinator, or a
        retriable error if no coordinator answered.
        """
        partition = partition_of_producer(asked.producer_id)
        if partition >= PARTITIONS:
            raise errors.InvalidProducerEpoch(
                f"producer id {asked.producer_id} was given by no coordinator"
            )
        return self._questions.ask(partition, asked)

    async def _send(
        self, partition: int, asked: Sequence[Asked]
    ) -> Sequence[wire.TxnAnswer | errors.PkError]:
        node_id = coordinator_of(self._metadata, partition)
        request = wire.AddPartitionsToTxnRequest(
            coordinator_partition=partition,
            metadata_offset=self._metadata.image.offset,
            questions=[_question(each) for each in asked],
        )
        reply: wire.AddPartitionsToTxnReply = await self._calls.call(
            node_id, request, CALL_TIMEOUT_MS
        )
        if reply.coordinator_epoch < self._newest.get(partition, NONE):  # I1
            raise errors.NotCoordinator(f"broker {node_id} no longer leads {TOPIC}-{partition}")
        self.heard(partition, reply.coordinator_epoch)
        return [
            frames.raise_error(answer.error) if answer.HasField("error") else answer
            for answer in reply.answers
        ]


def _question(asked: Asked) -> wire.TxnQuestion:
    place = wire.TxnPartition(
        topic_id=asked.key.topic_id,
        partition=asked.key.partition,
        leader_epoch=asked.leader_epoch,
    )
    if asked.unclean_epoch != NONE:
        place.unclean_epoch = asked.unclean_epoch
    return wire.TxnQuestion(
        producer_id=asked.producer_id,
        producer_epoch=asked.producer_epoch,
        partitions=[place],
        verify_only=asked.verify_only,
    )
