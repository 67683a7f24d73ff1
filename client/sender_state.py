"""What the sender knows of a partition and of a broker, and what answers mean for a batch."""

from __future__ import annotations

from collections import deque
from itertools import islice

from pk import errors, limits
from pk.backoff import Backoff
from pk.client.metadata import Leader, Metadata
from pk.client.producer_batch import FULL_SHARE, Piece, ProducerBatch
from pk.client.sender_events import InFlightRequest, SenderOptions
from pk.types import NONE, PartitionKey


class Partition:
    """What the sender knows of one partition."""

    __slots__ = (
        "acked_offset", "acked_sequence", "backoff", "batch_size",
        "epoch", "gap", "key", "leader", "left_ms",
        "number", "problem", "producer_id", "retry_ms", "sequence", "topic", "unresolved",
        "waiting",
    )  # fmt: skip

    def __init__(self, topic: str, key: PartitionKey, batch_size: int, backoff: Backoff) -> None:
        self.topic = topic
        self.key = key
        self.batch_size = batch_size
        self.waiting: deque[ProducerBatch] = deque()  #: have no sequence yet
        self.unresolved: deque[ProducerBatch] = deque()  #: in sequence order
        self.producer_id = NONE
        self.epoch = NONE
        self.sequence = 0  #: of the next new batch
        self.number = 0  #: batches numbered so far
        self.acked_sequence = NONE  #: last sequence acknowledged in this epoch
        self.acked_offset = NONE
        self.gap = False  #: a sequence below an unresolved one will never be stored
        self.backoff = backoff
        self.retry_ms = 0
        self.leader: Leader | None = None  #: as of the last look at the metadata
        self.left_ms: int | None = None  #: since when the old leader owes an answer
        self.problem: errors.PkError | None = None  #: why the last attempt did not get through

    @property
    def idle(self) -> bool:
        return not self.unresolved and not self.waiting

    @property
    def in_flight(self) -> int:
        return sum(batch.flight is not None for batch in self.unresolved)

    def add(self, piece: Piece) -> None:
        """To the last batch that waits, if it has room (client/producer_batch A1, A2)."""
        if self.waiting:
            last = self.waiting[-1]
            room = last.size + piece.size <= self.batch_size
            if room and last.count + piece.count <= limits.BATCH_RECORDS_MAX:
                last.add(piece)
                return
        self.waiting.append(ProducerBatch(self.topic, self.key, piece))

    def ready_ms(self) -> int | None:
        """When the first batch that waits may go; 0 = it is full."""
        if not self.waiting:
            return None
        first = self.waiting[0]
        full = (
            len(self.waiting) > 1 or first.size >= self.batch_size - self.batch_size // FULL_SHARE
        )
        return 0 if full else first.ready_ms

    def out_of_sight(self, leader: Leader) -> list[ProducerBatch]:
        """What an earlier attempt may have stored before `leader`, or one before it, was elected
        without all data: it may lie in the tier, and nobody knows the batch again (rule T4).
        """
        return [
            batch
            for batch in self.unresolved
            if batch.flight is None and batch.unknown and batch.unknown_epoch < leader.unclean_epoch
        ]

    def obstacle(self, metadata: Metadata, *, idless: bool) -> str:
        """What keeps its batches from being stored, for whoever must remove it; "" = nothing."""
        if metadata.leader(self.key) is None:
            absent = metadata.waits_for(self.key)
            names = f": it waits for one of the brokers {', '.join(map(str, absent))}"
            return "the partition has no reachable leader" + (names if absent else "")
        if idless:
            return "no producer id could be had from the broker"
        return "" if self.problem is None else f"the last attempt: {self.problem.message}"


#: A frame that was not answered for so long waits for a replica of one of its partitions.
STUCK_MS = 500


class Node:
    """What the sender knows of one broker."""

    __slots__ = ("backoff", "frames", "retry_ms")

    def __init__(self, backoff: Backoff) -> None:
        self.frames: dict[int, InFlightRequest] = {}  #: in the order in which they were sent
        self.retry_ms = 0
        self.backoff = backoff

    def free_ms(self, options: SenderOptions) -> int:
        """From when on another frame may be sent; 0 = now.

        A stuck frame does not count: else a partition whose replica has stopped fills every place,
        and all other partitions of the broker wait for it.  The number of stuck frames is bounded
        by the batches that a partition may have in flight.
        """
        if len(self.frames) < options.max_in_flight:
            return 0
        oldest = next(islice(reversed(self.frames.values()), options.max_in_flight - 1, None))
        return oldest.deadline_ms - options.request_timeout_ms + STUCK_MS


OUT_OF_SIGHT = (
    "a leader was elected uncleanly meanwhile: it may have been stored before, so it is not sent "
    "again"
)
#: The answer says that the batch was not appended, and that it may be tried again; unless it says
#: that it was, as parked replies do when leadership goes (rule L5).
NOT_STORED = (
    errors.NotLeaderOrFollower, errors.UnknownTopicOrPartition, errors.NotEnoughReplicas,
    errors.FencedLeaderEpoch, errors.UnknownLeaderEpoch, errors.ThrottledError,
    errors.StorageFull, errors.UnknownTopicId,
    errors.BrokerUnavailable, errors.ControllerUnavailable,  # shutting down; rule R6
)  # fmt: skip
#: The answer says that leadership moved or the topic did: ask for metadata.
STALE = (
    errors.NotLeaderOrFollower, errors.UnknownTopicOrPartition, errors.FencedLeaderEpoch,
    errors.UnknownLeaderEpoch, errors.UnknownTopicId, errors.BrokerUnavailable,
)  # fmt: skip


def refusal(batch: ProducerBatch, error: errors.PkError) -> errors.PkError:
    """What a refusal for good means: it says nothing of an earlier attempt (settings change), nor
    of this one if the broker had begun to write (rule L5).
    """
    if batch.unknown:
        why = "an earlier attempt, whose answer was lost, may have stored it"
    elif "appended" in error.details:
        why = "it may have been stored"
    else:
        return error
    return errors.OutcomeUnknown(f"{error.message}; {why}", **error.details)


def ending(batch: ProducerBatch, error: errors.PkError) -> errors.PkError:
    """What the end of the producer means for a batch: whoever asked may have it all the same."""
    if batch.flight is None and not batch.unknown:
        return error
    return type(error)(f"{error.message}; it may have been stored", **error.details)
