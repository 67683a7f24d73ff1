"""Every error pk raises or sends, and who must act on it.

    PkError
    ├── RetriableError            try again: pk's client does, within its timeouts
    │   └── NotLeaderOrFollower · UnknownLeaderEpoch · FencedLeaderEpoch · OffsetNotAvailable ·
    │       NotEnoughReplicas · StorageFull · BrokerUnavailable · RequestTimedOut · ThrottledError ·
    │       UnknownTopicOrPartition (while metadata travels) · ControllerUnavailable ·
    │       InvalidUpdateVersion · IneligibleReplica · PreferredLeaderNotAvailable ·
    │       TierUnavailable · UnknownTierRange · EligibleLeadersNotAvailable · SnapshotNotFound ·
    │       CoordinatorLoading · CoordinatorUnavailable · NotCoordinator · ConcurrentTransactions ·
    │       RebalanceInProgress · UnstableOffsetCommit
    ├── UserError                 the caller's request, option or data is wrong
    │   └── UnknownTopicId · TopicAlreadyExists · InvalidTopic · InvalidPartitions ·
    │       InvalidReplicationFactor · InvalidConfig · InvalidRequest · InvalidOption ·
    │       InvalidReplicaAssignment · NoReassignmentInProgress · ElectionNotNeeded ·
    │       BrokerNotRegistered · UnsupportedFeature · ClosedError · OffsetOutOfRange ·
    │       LogTruncated · NoOffsetForPartition · TopicRecreated · DataLoss · CorruptBatch ·
    │       RecordTooLarge · InvalidRecord · SerializationError · RegistryError · BufferExhausted ·
    │       PartlyStored · OutcomeUnknown · DeliveryTimedOut · ProducerFenced · OutOfOrderSequence ·
    │       InvalidProducerEpoch · UnknownProducerId (the producer repairs itself, rule L6) ·
    │       InvalidTxnState · InvalidTransactionTimeout · TransactionAborted · TransactionTimedOut ·
    │       TransactionalIdNotFound · ReplayDiffers · LeaseHeld · UnknownMemberId ·
    │       IllegalGeneration (the consumer joins again, rule X12) · FencedInstanceId ·
    │       GroupMaxSizeReached · InconsistentGroupProtocol · NonEmptyGroup ·
    │       InvalidSessionTimeout · GroupIdNotFound · GroupSubscribedToTopic ·
    │       OffsetMetadataTooLarge · NotPartitionOwner · StaleOffsetCommit ·
    │       TableVersionNotFound
    ├── OperatorError             the person who runs pk must act
    │   └── DirectoryLocked · DirectoryOfAnotherCluster · DirectoryOfAnotherBuild · NewerFormat ·
    │       StorageFailed · CorruptLog · AddressInUse · StoreRefused · TierTableChanged ·
    │       DamagedTierFile · LogUnidentified · LogMissing · ClusterIdMismatch · DuplicateBroker ·
    │       StaleBrokerEpoch · MetadataBehind · DirectoryNotFormatted · DirectoryFormatted ·
    │       JavaMissing · JarsMissing · SnapshotUnusable · TooManyPartitions ·
    │       TierOfAnotherCluster · NothingToRestore · ClusterAlive · RestoreUnderWay ·
    │       ClusterRestored
    └── InternalError             ours: a bug; report it

`code` travels on the wire (Kafka's number where Kafka has one, ours from 1000).  `retriable`: the
same request may succeed later.  `acts`: who must act.  A peer's error arrives as the same class.
"""

from __future__ import annotations

from typing import Any

from pk.error_bases import BY_CODE as BY_CODE
from pk.error_bases import InternalError as InternalError
from pk.error_bases import OperatorError as OperatorError
from pk.error_bases import PkError as PkError
from pk.error_bases import RetriableError as RetriableError
from pk.error_bases import UserError as UserError
from pk.group_errors import FencedInstanceId as FencedInstanceId
from pk.group_errors import GroupIdNotFound as GroupIdNotFound
from pk.group_errors import GroupMaxSizeReached as GroupMaxSizeReached
from pk.group_errors import GroupSubscribedToTopic as GroupSubscribedToTopic
from pk.group_errors import IllegalGeneration as IllegalGeneration
from pk.group_errors import InconsistentGroupProtocol as InconsistentGroupProtocol
from pk.group_errors import InvalidSessionTimeout as InvalidSessionTimeout
from pk.group_errors import NonEmptyGroup as NonEmptyGroup
from pk.group_errors import NotPartitionOwner as NotPartitionOwner
from pk.group_errors import OffsetMetadataTooLarge as OffsetMetadataTooLarge
from pk.group_errors import RebalanceInProgress as RebalanceInProgress
from pk.group_errors import StaleOffsetCommit as StaleOffsetCommit
from pk.group_errors import UnknownMemberId as UnknownMemberId
from pk.group_errors import UnstableOffsetCommit as UnstableOffsetCommit
from pk.tier_errors import ClusterAlive as ClusterAlive
from pk.tier_errors import ClusterRestored as ClusterRestored
from pk.tier_errors import DamagedTierFile as DamagedTierFile
from pk.tier_errors import NothingToRestore as NothingToRestore
from pk.tier_errors import RestoreUnderWay as RestoreUnderWay
from pk.tier_errors import SnapshotUnusable as SnapshotUnusable
from pk.tier_errors import TierOfAnotherCluster as TierOfAnotherCluster

# -- retriable -------------------------------------------------------------------------------------


class NotLeaderOrFollower(RetriableError):
    """This broker does not lead the partition (any more): refresh metadata."""

    code = 6


class UnknownTopicOrPartition(RetriableError):
    """No such topic or partition is known here (yet)."""

    code = 3


class RequestTimedOut(RetriableError):
    """The request was not answered in time; what it did is unknown."""

    code = 7


class BrokerUnavailable(RetriableError):
    """The client could not connect to the broker, or the connection broke."""

    code = 8


class NotEnoughReplicas(RetriableError):
    """Fewer in-sync replicas than min_insync_replicas: nothing was acknowledged, or moved away."""

    code = 19


class FencedLeaderEpoch(RetriableError):
    """The request carries an older leader epoch than this broker's (KIP-320): refresh metadata."""

    code = 74


class UnknownLeaderEpoch(RetriableError):
    """The request carries a newer leader epoch than this broker's (KIP-320): retry later."""

    code = 75


class OffsetNotAvailable(RetriableError):
    """A new leader's high watermark has not caught up yet (KIP-207): retry, keep the offset."""

    code = 78


class ThrottledError(RetriableError):
    """The broker has as many waiting requests or streams as it takes: send more slowly, or close
    clients."""

    code = 89


class StorageFull(RetriableError):
    """The log directory is full, and this batch was not stored: free some space."""

    code = 1001
    acts = "operator"


class TierUnavailable(RetriableError):
    """The object store cannot be reached or answers too slowly; the hot log is served."""

    code = 1002
    acts = "operator"


class UnknownTierRange(RetriableError):
    """The tier does not list the requested range (yet): plan again on the newest version."""

    code = 1003


class ControllerUnavailable(RetriableError):
    """No active controller was reached; reads and acks=all continue, administration waits."""

    code = 41


class InvalidUpdateVersion(RetriableError):
    """An ISR change carries a partition epoch that is not the current one (KIP-497)."""

    code = 95


class EligibleLeadersNotAvailable(RetriableError):
    """No replica can be elected now: none is available, or none has reported its position."""

    code = 83


class PreferredLeaderNotAvailable(RetriableError):
    """The first replica cannot lead now: it is not in sync, fenced or shutting down."""

    code = 80


class IneligibleReplica(RetriableError):
    """A fenced, draining or re-registered broker may not join the ISR now (KIP-903)."""

    code = 107


class CoordinatorLoading(RetriableError):
    """The coordinator still reads its part of the internal topic."""

    code = 14


class CoordinatorUnavailable(RetriableError):
    """The coordinator's partition has no leader, or its internal topic does not exist yet."""

    code = 15


class NotCoordinator(RetriableError):
    """Another broker is the coordinator of this id: the client looks it up again."""

    code = 16


class ConcurrentTransactions(RetriableError):
    """The previous transaction of this id is still being ended: the client asks again soon."""

    code = 51


class SnapshotNotFound(RetriableError):
    """The node no longer has this metadata snapshot (KIP-630): fetch the newest one."""

    code = 98


# -- the caller ------------------------------------------------------------------------------------


class OffsetOutOfRange(UserError):
    """The offset is below log_start or above log_end."""

    code = 1


class CorruptBatch(UserError):
    """The batch's CRC, magic, length or header fields are wrong: its bytes were damaged."""

    code = 2


class RecordTooLarge(UserError):
    """The batch is larger than max_message_bytes, or decodes to more than decoded_bytes_max."""

    code = 10


class InvalidTopic(UserError):
    """The topic name is not 1–249 of [a-zA-Z0-9._-], is '.' or '..', or starts with '__'."""

    code = 17


class TopicAlreadyExists(UserError):
    """A topic of that name exists."""

    code = 36


class InvalidPartitions(UserError):
    """The partition count is not positive, or smaller than the current count."""

    code = 37


class InvalidReplicationFactor(UserError):
    """The replication factor is not positive or larger than the number of brokers."""

    code = 38


class InvalidConfig(UserError):
    """A setting is unknown, out of its bounds, or contradicts another."""

    code = 40


class InvalidRequest(UserError):
    """The request is malformed or contradicts itself."""

    code = 42


class InvalidReplicaAssignment(UserError):
    """The requested replicas repeat a broker, or name one that is not registered or cannot lead."""

    code = 39


class NoReassignmentInProgress(UserError):
    """The partition is not being reassigned, so there is nothing to cancel."""

    code = 85


class ElectionNotNeeded(UserError):
    """The partition already has the requested leader."""

    code = 84


class BrokerNotRegistered(UserError):
    """No broker is registered under this id."""

    code = 102


class OutOfOrderSequence(UserError):
    """The producer's sequence numbers have a gap (rule L6)."""

    code = 45
    acts = "client"


class InvalidProducerEpoch(UserError):
    """The producer's epoch is older than the partition's: another instance took over."""

    code = 47
    acts = "client"


class UnknownProducerId(UserError):
    """The partition has no state of this producer; the producer increases its epoch."""

    code = 59
    acts = "client"


class InvalidRecord(UserError):
    """The batch's body does not decode, or has records that the topic refuses (null keys)."""

    code = 87


class UnknownTopicId(UserError):
    """No topic has this id; the topic was deleted, and perhaps re-created under the same name."""

    code = 100


class InvalidOption(UserError):
    """An option is unknown, out of its bounds, or contradicts another."""

    code = 1010


class TableVersionNotFound(UserError):
    """The version of a topic's table that a read names does not exist yet, or not any more."""

    code = 1075


class LeaseHeld(UserError):
    """Another maintenance job has, or has had, the lease of the table (C5): run this one later."""

    code = 1070


class UnsupportedFeature(UserError):
    """This build of pk does not have that feature yet."""

    code = 1011


class BufferExhausted(UserError):
    """The producer's buffer_memory stayed full for max_block_ms."""

    code = 1012


class DeliveryTimedOut(UserError):
    """No acknowledgement within delivery_timeout_ms: the record may or may not be stored."""

    code = 1013


class OutcomeUnknown(UserError):
    """The stream broke before the acknowledgement, and the client may not retry (rule L7)."""

    code = 1014


class PartlyStored(UserError):
    """Some parts of a send_batch were stored, and others were not."""

    code = 1015

    def __init__(
        self, message: str = "", stored: Any = (), failed: Any = (), **details: str
    ) -> None:
        super().__init__(message, **details)
        self.stored = stored  #: list[BatchMetadata]
        self.failed = failed  #: list[tuple[TopicPartition, PkError]]


class SerializationError(UserError):
    """A key or value could not be turned into bytes, or back."""

    code = 1016


class LogTruncated(UserError):
    """The log was truncated below the consumer's position after an unclean election (KIP-320)."""

    code = 1017


class NoOffsetForPartition(UserError):
    """The position is out of range and auto_offset_reset is none."""

    code = 1018


class TopicRecreated(UserError):
    """The topic was deleted and re-created, so its offsets belong to another log (rule L8)."""

    code = 1019


class DataLoss(UserError):
    """Unread records are lost: expired, deleted or damaged, or their topic was deleted."""

    code = 1022


class ProducerFenced(UserError):
    """A newer instance of this producer took over: close this one."""

    code = 90


class ClosedError(UserError):
    """The client was closed."""

    code = 1020


class RegistryError(UserError):
    """The schema registry refused the request or could not be reached."""

    code = 1021


class InvalidTxnState(UserError):
    """The call does not fit the state of the transaction: first call what the message names."""

    code = 48


class TransactionAborted(UserError):
    """The transaction was aborted, or failed: call abort_transaction, then begin and send again."""

    code = 1060


class TransactionTimedOut(TransactionAborted):
    """Aborted after transaction_timeout_ms: begin and send again.  A job: no task was heard for
    participant_lease_ms, or participant_transaction_max_ms passed: start the query again."""

    code = 1061


class ReplayDiffers(UserError):
    """A committed batch is written again with other rows, or by another query (see the message)."""

    code = 1062


class InvalidTransactionTimeout(UserError):
    """transaction_timeout_ms is above the brokers' transaction_max_timeout_ms, or below 1."""

    code = 50


class TransactionalIdNotFound(UserError):
    """The coordinator knows no transactional id of this name."""

    code = 105


# -- the operator ----------------------------------------------------------------------------------


class DirectoryLocked(OperatorError):
    """Another process holds the lock of this data directory."""

    code = 1030


class DirectoryOfAnotherCluster(OperatorError):
    """The data directory belongs to another cluster or another node."""

    code = 1031


class DirectoryNotFormatted(OperatorError):
    """A node of a cluster needs a directory that `pk server format` has formatted."""

    code = 1038


class DirectoryFormatted(OperatorError):
    """The directory to be formatted already belongs to a node."""

    code = 1039


class DirectoryOfAnotherBuild(OperatorError):
    """The data directory has format 0 of an early build, which only that build reads."""

    code = 1032


class NewerFormat(OperatorError):
    """The data directory was written by a newer pk: use that version."""

    code = 1033


class StorageFailed(OperatorError):
    """A disk operation failed: the directory is offline until the broker restarts."""

    code = 56


class CorruptLog(OperatorError):
    """Sealed data of a log does not match its checksum (rule L9)."""

    code = 1034


class LogUnidentified(OperatorError):
    """A directory has segments, and their partition cannot be identified (rule L15)."""

    code = 1053


class LogMissing(OperatorError):
    """A log that this broker had is missing from its data directory (rule L15)."""

    code = 1054


class AddressInUse(OperatorError):
    """The process cannot bind the listen address."""

    code = 1035


class StoreRefused(OperatorError):
    """The object store is read-only, lacks put-if-absent, or the scheme is not supported."""

    code = 1036


class TierTableChanged(OperatorError):
    """The topic's Delta table was deleted, re-created, altered or rolled back (rule T8)."""

    code = 1037


class JavaMissing(OperatorError):
    """There is no Java 17 or newer, which Spark needs."""

    code = 1040


class JarsMissing(OperatorError):
    """Jars that Spark needs are missing and could not be downloaded."""

    code = 1041


class ClusterIdMismatch(OperatorError):
    """The peer belongs to another cluster."""

    code = 104


class DuplicateBroker(OperatorError):
    """A live broker has registered under this id."""

    code = 101


class TooManyPartitions(OperatorError):
    """A broker would hold more replicas than `partitions_max`: nothing was created or moved."""

    code = 1043


class MetadataBehind(OperatorError):
    """The metadata log ends before this broker's last registration: it is an older copy."""

    code = 1042


class StaleBrokerEpoch(OperatorError):
    """The broker's id was registered again by another process; this broker must restart."""

    code = 77


def from_wire(code: int, message: str, details: dict[str, str] | None = None) -> PkError:
    """The error a peer sent; an unknown code becomes an `InternalError` that names it."""
    kind = BY_CODE.get(code)
    if kind is None:
        return InternalError(f"error {code}: {message}", **(details or {}))
    return kind(message, **(details or {}))
