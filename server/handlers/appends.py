"""Appends of checked batches to the partitions of a broker, and the bounds of their sizes.

World-generic.
"""

from __future__ import annotations

from pk import errors, limits, settings
from pk.log.batch import Header
from pk.log.manager import LogManager
from pk.log.storage import Buffer, Disk
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.handlers.admission import Admission
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.transactions.verifier import Asked, TransactionVerifier
from pk.topic_names import is_internal
from pk.types import NONE, Epoch, PartitionKey

#: Refusals that follow from the state that the log has of a producer.
NO_LAST_WORD = (
    errors.OutOfOrderSequence,
    errors.UnknownProducerId,
    errors.InvalidProducerEpoch,
)


class Appends:
    """Decides the batches of all produce streams of one broker."""

    def __init__(
        self,
        partitions: HostedPartitions,
        admission: Admission,
        clocks: ClockWatch,
        manager: LogManager,
        verifier: TransactionVerifier,
    ) -> None:
        self._partitions = partitions
        self._admission = admission
        self._clocks = clocks
        self._manager = manager
        self._verifier = verifier

    def batch_bounds(self, key: PartitionKey) -> tuple[int, int]:
        """Return the largest batch size, encoded and decoded, that the partition's topic takes."""
        partition = self._partitions.get(key)
        if partition is None:
            defaults = settings.TOPIC.by_name
            return defaults["max_message_bytes"].default, defaults["decoded_bytes_max"].default
        return partition.settings["max_message_bytes"], partition.settings["decoded_bytes_max"]

    def frame_bytes_max(self) -> int:
        """Return the size of the largest frame that a producer may send (rule L17)."""
        default = int(settings.TOPIC.by_name["max_message_bytes"].default)
        sizes = (int(each.settings["max_message_bytes"]) for each in self._partitions.all())
        return limits.frame_bytes_max(max(sizes, default=default))

    def any_disk(self) -> Disk:
        """Return a disk, for work that only needs its compute lane."""
        return self._manager.directories[0].disk

    def append(
        self, key: PartitionKey, header: Header, batch: Buffer, epoch: int, delayed: DelayedProduce
    ) -> None:
        """Decide a checked batch.  Raises typed errors; then nothing changed.

        Before the leader is `settled`, its state of a producer may be outdated.  The answer to a
        refusal that follows from this state is retriable.  If it were final, the producer would
        close the gap and send the later batches again under a new epoch (rule L6).
        """
        self._admission.check_append(delayed.acks)
        partition = self._partitions.find(key)
        if is_internal(partition.topic):
            raise errors.InvalidTopic(
                f"{partition.topic} is pk's own: clients can read it and cannot produce to it",
                topic=partition.topic,
            )
        try:
            partition.append(header, batch, epoch, self._clocks.now(), delayed)
        except errors.InvalidRecord as refusal:
            raise self._clocks.explained(refusal) from None
        except NO_LAST_WORD as refusal:
            if partition.leader is None or partition.leader.settled:
                raise
            raise errors.OffsetNotAvailable(
                f"{partition}: not every in-sync replica has fetched from the new leader yet: "
                f"{refusal.message}"
            ) from refusal

    def leader_epoch(self, key: PartitionKey) -> Epoch:
        """Return the leader epoch in which this broker leads the partition; NONE = it does not."""
        partition = self._partitions.get(key)
        return NONE if partition is None else partition.leader_epoch

    def unverified(self, key: PartitionKey, producer_id: int, producer_epoch: int) -> bool:
        """Whether a batch of a transaction must wait for its coordinator's word (rule X6).

        No if its transaction is open in the log, and no if `append` will refuse it anyway.
        """
        partition = self._partitions.get(key)
        if partition is None or partition.leader is None:
            return False
        known = partition.log.producers.get(producer_id)
        if known is None or known.epoch < producer_epoch:
            return True
        return known.epoch == producer_epoch and known.transaction_start == NONE

    async def register(self, producer_id: int, producer_epoch: int, key: PartitionKey) -> None:
        """Have the coordinator add the partition to the producer's transaction (rule X6).

        Raises the coordinator's refusal, or a retriable error.
        """
        leader = self._partitions.find(key).serving()
        unclean_epoch = self._partitions.unclean_epoch(key)
        await self._verifier.ask(
            Asked(producer_id, producer_epoch, key, leader.leader_epoch, unclean_epoch)
        )

    def full(self, key: PartitionKey) -> bool:
        """Whether the write queue of the partition's directory is full."""
        partition = self._partitions.get(key)
        return partition is not None and partition.writer.full

    async def room(self, key: PartitionKey) -> None:
        """Wait until the write queue of the partition's directory has room."""
        partition = self._partitions.get(key)
        if partition is not None:
            await partition.writer.room()
