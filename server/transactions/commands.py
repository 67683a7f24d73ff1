"""The commands of the transaction coordinator's machine, with their replies, and its effects.

A command is a request from the wire together with inputs that a pure core cannot produce: fresh
producer ids and the metadata image.  The host releases a reply, and hands the effects to the shell,
once the records of the decision are committed (runtime/replayed_host H3).

A refusal is raised, or is the reply of a decision that also has records: an init that finds an
ongoing transaction writes its prepare record and is answered `ConcurrentTransactions`.  Both reach
the caller of `ReplayedHost.ask` as an exception.

Every command that names a transactional id raises `NotCoordinator` if another partition of
`__transaction_state` coordinates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pk import limits
from pk.server.metadata.image import MetadataImage
from pk.transactional_ids import epoch_of_producer, is_transactional
from pk.types import NONE, Epoch, Offset, PartitionKey, ProducerId
from pk.wire import pk_pb2 as wire

#: Names of the events that a decision publishes; their values are the classes below.
BEGAN, PREPARED, ENDED = "transaction_began", "transaction_prepared", "transaction_ended"
BATCH_BEGAN, BATCH_AWAITS = "batch_began", "batch_awaits"


class TransactionRules(NamedTuple):
    """What the decisions of one machine depend on besides its records."""

    partition: int  #: the partition of `__transaction_state`
    transaction_max_timeout_ms: int
    transactional_id_expiration_ms: int
    #: the last leader epoch of the partition that began without all data; NONE = there was none
    unclean_epoch: Epoch = NONE

    def may_have_lost(self, producer_id: ProducerId) -> bool:
        """Whether records about the producer id may be lost: it was allocated before the unclean
        election.
        """
        return is_transactional(producer_id) and epoch_of_producer(producer_id) < self.unclean_epoch

    def needs_fresh_id(self, producer_id: ProducerId, producer_epoch: int) -> bool:
        """Whether the pair after this one has a fresh producer id (rule X1).

        Its epoch is the last one, or a later epoch may have been used and its records are lost.
        """
        last = producer_epoch >= limits.PRODUCER_EPOCH_LAST
        return last or self.may_have_lost(producer_id)


# -- effects ---------------------------------------------------------------------------------------


class TransactionBegan(NamedTuple):
    """BEGAN: a transaction is ongoing.  It times out at `started_ms + timeout_ms`."""

    transactional_id: str
    producer_id: ProducerId
    producer_epoch: int
    started_ms: int
    timeout_ms: int


class TransactionPrepared(NamedTuple):
    """PREPARED: the decision is committed, and every partition needs its marker.

    A transaction without partitions is complete at once and has no such event.
    """

    transactional_id: str
    producer_id: ProducerId
    marker_epoch: int  #: one above the transaction's epoch (X1)
    commit: bool
    partitions: tuple[PartitionKey, ...]  #: all that were registered, sorted
    #: A partition counts as deleted only in a metadata image that has applied this offset (X3).
    metadata_offset: Offset


class TransactionEnded(NamedTuple):
    """ENDED: the complete record is committed."""

    transactional_id: str
    producer_id: ProducerId
    producer_epoch: int  #: of the transaction; its marker had the next one
    commit: bool
    began_ms: int  #: when it began, by the wall clock


class BatchBegan(NamedTuple):
    """BATCH_BEGAN: the transaction of a job is open; its participants must be heard (X4)."""

    job: str
    transaction: int  #: its number
    started_ms: int  #: by the wall clock


class BatchAwaits(NamedTuple):
    """BATCH_AWAITS: the participants are prepared, and a Delta table decides (X11)."""

    job: str
    transaction: int
    batch: int
    url: str
    since_ms: int  #: by the wall clock


class ParticipantMarker(NamedTuple):
    """What ends one participant in every partition."""

    producer_id: ProducerId
    producer_epoch: int  #: of the marker, one above the participant's (X1)
    commit: bool


class BatchPrepared(NamedTuple):
    """PREPARED: the decision about a job's transaction is committed; see TransactionPrepared."""

    job: str
    transaction: int
    batch: int
    markers: tuple[ParticipantMarker, ...]
    partitions: tuple[PartitionKey, ...]
    metadata_offset: Offset

    @property
    def transactional_id(self) -> str:
        """The job is a transactional id."""
        return self.job


class BatchEnded(NamedTuple):
    """ENDED: the complete record of a job's transaction is committed."""

    job: str
    transaction: int
    commit: bool

    @property
    def transactional_id(self) -> str:
        """The job is a transactional id."""
        return self.job


# -- commands --------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class InitProducer:
    """A producer with a transactional id begins, or needs another epoch (KIP-360).

    `fresh_id`: a producer id that was never used; most requests do not take it.
    Reply: `InitProducerIdReply`.  An ongoing transaction is aborted first; the producer asks again
    after `ConcurrentTransactions`.  Raises `InvalidRequest` for an empty or too long id,
    `InvalidTransactionTimeout`, and `ProducerFenced` for a pair that is neither the current nor the
    previous one.
    """

    request: wire.InitProducerIdRequest
    fresh_id: ProducerId


@dataclass(slots=True, frozen=True)
class AddPartitions:
    """Leaders ask about producers; their partitions are registered, or only verified (X3, X6).

    The caller waits first until its metadata image has applied `metadata_offset` of the request.
    Reply: a tuple of `TxnAnswer`, one per question, in order.  A refused question has its error in
    its answer.
    """

    request: wire.AddPartitionsToTxnRequest


@dataclass(slots=True, frozen=True)
class EndTransaction:
    """A producer commits or aborts its transaction.

    `image`: it shows which registered partitions had an unclean election.  `fresh_id`: needed if
    `TransactionRules.needs_fresh_id` says so.
    Reply: `EndTxnReply` with the pair for the next transaction, once the decision is committed.
    Raises `TransactionAborted`, `TransactionTimedOut`, `ProducerFenced`, `InvalidTxnState`,
    `ConcurrentTransactions`, `TransactionalIdNotFound`; `CoordinatorLoading` while the image is
    older than the image of a leader that asked.
    """

    request: wire.EndTxnRequest
    image: MetadataImage
    fresh_id: ProducerId = NONE


class TimedOut(NamedTuple):
    """An ongoing transaction whose timeout has passed.

    `fresh_id`: needed if `TransactionRules.needs_fresh_id` says so.
    """

    transactional_id: str
    producer_id: ProducerId
    producer_epoch: int
    fresh_id: ProducerId = NONE


@dataclass(slots=True, frozen=True)
class ExpireTransactions:
    """Abort transactions that were open for too long, by the caller's clock (which it trusts, L10).

    Reply: the number of transactions that this decision aborts.
    """

    transactions: tuple[TimedOut, ...]


@dataclass(slots=True, frozen=True)
class MarkersWritten:
    """Every partition of a prepared transaction has the marker below its high watermark, or was
    deleted in an image that has applied `TransactionPrepared.metadata_offset`.

    Reply: whether this completes the transaction; False if it is complete already.
    """

    transactional_id: str
    producer_id: ProducerId
    marker_epoch: int


@dataclass(slots=True, frozen=True)
class JoinTransaction:
    """A task joins the transaction of its batch (X5, X8, X9).

    `image`: it has applied `metadata_offset` of the request.  `fresh_id`: a producer id that was
    never used; only a pool without a free id takes it.
    Reply: `JoinTransactionReply` without `lease_ms`.  Raises `ReplayDiffers`, `ProducerFenced`,
    `ConcurrentTransactions`, `InvalidTxnState`, `TransactionTimedOut`, `TransactionAborted`,
    `UnknownTopicOrPartition`, `InvalidRequest`.
    """

    request: wire.JoinTransactionRequest
    image: MetadataImage
    fresh_id: ProducerId


@dataclass(slots=True, frozen=True)
class CommitParticipants:
    """A driver commits the named participants of a batch (X7).

    With `evidence` in the request: the table of a prepared batch has it (X11).
    `image`: as for `EndTransaction`.
    Reply: `CommitParticipantsReply`, once the decision is committed.  Raises what `JoinTransaction`
    raises, and `CoordinatorLoading`.
    """

    request: wire.CommitParticipantsRequest
    image: MetadataImage


@dataclass(slots=True, frozen=True)
class PrepareParticipants:
    """A driver prepares the named participants of a batch; a Delta table decides its end (X11).

    `image`: as for `EndTransaction`.
    Reply: `PrepareParticipantsReply`.  Raises what `CommitParticipants` raises.
    """

    request: wire.PrepareParticipantsRequest
    image: MetadataImage


@dataclass(slots=True, frozen=True)
class AbortParticipants:
    """A driver aborts the open batch of its run; anything else changes nothing.

    With `evidence` in the request: the table of a prepared batch does not have it (X11).
    Reply: `AbortParticipantsReply`.
    """

    request: wire.AbortParticipantsRequest


@dataclass(slots=True, frozen=True)
class ExpireBatches:
    """Abort transactions of jobs, by name and number, that were not heard for their lease (X4).

    Reply: the number of transactions that this decision aborts.
    """

    batches: tuple[tuple[str, int], ...]


@dataclass(slots=True, frozen=True)
class BatchMarked:
    """`MarkersWritten` for the transaction of a job.

    Reply: whether this completes the transaction; False if it is complete already.
    """

    job: str
    transaction: int


@dataclass(slots=True, frozen=True)
class AbortTransaction:
    """An operator aborts an ongoing transaction.

    Reply: `AbortTransactionReply`, once the decision is committed.  Raises
    `TransactionalIdNotFound`, `InvalidTxnState` if none is ongoing, `ConcurrentTransactions` if it
    is being ended.
    """

    request: wire.AbortTransactionRequest
    fresh_id: ProducerId


@dataclass(slots=True, frozen=True)
class ForgetTransaction:
    """An operator removes a transactional id.

    Reply: `ForgetTransactionReply`.  Raises `TransactionalIdNotFound`, and `InvalidTxnState` while
    a transaction is open.
    """

    request: wire.ForgetTransactionRequest


@dataclass(slots=True, frozen=True)
class ForgetExpired:
    """Remove ids without a transaction for `transactional_id_expiration_ms`.

    The caller trusts its clock (L10).
    Reply: the number of ids that this decision removes, at most FORGET_MAX; the caller repeats the
    command while it is FORGET_MAX.
    """


@dataclass(slots=True, frozen=True)
class DescribeTransactions:
    """Reply: a tuple of `TransactionDescription`, one per id, in order; `coordinator_id` is not
    set.  An unknown id has `TransactionalIdNotFound` in its description.
    """

    transactional_ids: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class ListTransactions:
    """Reply: a tuple of `TransactionListing`, sorted by transactional id.

    `open_longer_ms` leaves out transactions that are not open.  Raises `InvalidRequest` for a state
    that does not exist.
    """

    request: wire.ListTransactionsRequest


@dataclass(slots=True, frozen=True)
class Resume:
    """After a replay: what the shell must take up again.

    Reply: a tuple of `TransactionBegan` and `TransactionPrepared`, sorted by transactional id, and
    of `BatchBegan`, `BatchAwaits` and `BatchPrepared`, sorted by job.  A host replays when a leader
    takes office, and after a failed write (runtime/replayed_host H4).
    """


#: The most ids that a single `ForgetExpired` removes.
FORGET_MAX = 1_000
#: About the most records of jobs that a single `ForgetExpired` writes.
FORGET_RECORDS_MAX = 5_000
#: How long the job of a batch write is kept after its last change (X10).
BATCH_WRITE_EXPIRATION_MS = 86_400_000

Command = (
    InitProducer
    | AddPartitions
    | EndTransaction
    | ExpireTransactions
    | MarkersWritten
    | JoinTransaction
    | CommitParticipants
    | PrepareParticipants
    | AbortParticipants
    | ExpireBatches
    | BatchMarked
    | AbortTransaction
    | ForgetTransaction
    | ForgetExpired
    | DescribeTransactions
    | ListTransactions
    | Resume
)
