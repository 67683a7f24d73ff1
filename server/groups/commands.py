"""The commands of the group coordinator's machine, with their replies, and its effect.

A command is a request from the wire together with inputs that a pure core cannot produce, as the
metadata image.  The host releases a reply, and hands the effects to the shell, once the records of
the decision are committed (runtime/replayed_host H3).

Every command that names a group raises `NotCoordinator` if another partition of
`__consumer_offsets` coordinates it, and `InvalidRequest` for a group id that is empty or too long.
A command of a member raises `UnknownMemberId`, `IllegalGeneration` and `FencedInstanceId` (X12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pk.server.metadata.image import MetadataImage
from pk.types import TopicId
from pk.wire import pk_pb2 as wire

#: The name of the event: members, state or assignment of a group have changed.  Its value is the
#: group id.
CHANGED = "group_changed"


class GroupRules(NamedTuple):
    """What the decisions of one machine depend on besides its records."""

    partition: int  #: the partition of `__consumer_offsets`
    session_timeout_min_ms: int
    session_timeout_max_ms: int
    initial_rebalance_delay_ms: int
    max_size: int
    offsets_retention_ms: int
    metadata_bytes_max: int


@dataclass(slots=True, frozen=True)
class JoinGroup:
    """A member joins, or joins again.

    Reply: `JoinGroupReply`; `pending` if the rebalance waits for other members.  Raises
    `GroupMaxSizeReached`, `InconsistentGroupProtocol`, `InvalidSessionTimeout`, `InvalidRequest`.
    """

    request: wire.JoinGroupRequest


@dataclass(slots=True, frozen=True)
class SyncGroup:
    """A member asks for its assignment; the leader brings the assignment of all.

    `image`: it has applied the `metadata_offset` of the assignment.
    Reply: `SyncGroupReply`; `pending` while the leader has brought none.  Raises
    `RebalanceInProgress`, and `InvalidRequest` for a wrong assignment.
    """

    request: wire.SyncGroupRequest
    image: MetadataImage


@dataclass(slots=True, frozen=True)
class LeaveGroup:
    """Members leave.

    Reply: `LeaveGroupReply`.
    """

    request: wire.LeaveGroupRequest


@dataclass(slots=True, frozen=True)
class ExpireMembers:
    """Sessions of members have ended, by the caller's monotonic clock: (group id, member id).

    Reply: the number of members that this decision removes.
    """

    members: tuple[tuple[str, str], ...]


@dataclass(slots=True, frozen=True)
class EndJoin:
    """The time to join the rebalance after `generation` is over.

    Reply: None.  It changes nothing once that rebalance has gone on.
    """

    group_id: str
    generation: int


@dataclass(slots=True, frozen=True)
class CommitOffsets:
    """A member, or a client without members, commits offsets.

    `image`: it has applied the `metadata_offset` of the request.
    Reply: `OffsetCommitReply`.  Raises `RebalanceInProgress`, `NonEmptyGroup`, `InvalidRequest`.
    """

    request: wire.OffsetCommitRequest
    image: MetadataImage


@dataclass(slots=True, frozen=True)
class CommitTransactionOffsets:
    """As `CommitOffsets`, for offsets that count when a producer's transaction commits (X2).

    The transaction's coordinator has confirmed to the caller that this partition of
    `__consumer_offsets` belongs to the open transaction.
    Reply: `TxnOffsetCommitReply`.  Raises also what refuses one partition: all or none are stored.
    """

    request: wire.TxnOffsetCommitRequest
    image: MetadataImage


@dataclass(slots=True, frozen=True)
class FetchOffsets:
    """Reply: `FetchedOffsets`.  An unknown group has no offsets.

    require_stable: raises `UnstableOffsetCommit` if an open transaction has an offset of one of the
    partitions (X2).
    """

    request: wire.OffsetFetchGroup
    require_stable: bool = False


@dataclass(slots=True, frozen=True)
class ReadOffsets:
    """Read a page of the committed offsets of all groups, for their copy in the tier (T13).

    image: names the topics.
    Reply: `ReadOffsetsReply`.
    """

    request: wire.ReadOffsetsRequest
    image: MetadataImage


@dataclass(slots=True, frozen=True)
class DescribeGroup:
    """Reply: `DescribedGroup` without liveness.  Raises `GroupIdNotFound`."""

    group_id: str


@dataclass(slots=True, frozen=True)
class ListGroups:
    """Reply: a tuple of `GroupListing`, sorted.  Raises `InvalidRequest` for an unknown state."""

    request: wire.ListGroupsRequest


@dataclass(slots=True, frozen=True)
class DeleteGroup:
    """An operator deletes a group without members.

    Reply: whether all is deleted; the caller repeats the command while it is False, which bounds
    the records of one decision.  Raises `GroupIdNotFound`, `NonEmptyGroup`.
    """

    group_id: str


@dataclass(slots=True, frozen=True)
class DeleteOffsets:
    """An operator deletes offsets of a group.

    Reply: `DeleteOffsetsReply`; topics that a member subscribes to have `GroupSubscribedToTopic`.
    """

    request: wire.DeleteOffsetsRequest
    image: MetadataImage


class OffsetsExpired(NamedTuple):
    """The reply to `ExpireOffsets`."""

    written: int  #: the records of the decision, at most EXPIRE_MAX
    absent: frozenset[TopicId]  #: topics of offsets that the image does not have


@dataclass(slots=True, frozen=True)
class ExpireOffsets:
    """Remove offsets of some groups whose retention has passed, and those of deleted topics.

    The caller trusts its clock (L10).  `absent`: topics that an earlier look did not find in the
    image; those that this image does not have either were deleted.
    Reply: `OffsetsExpired`; the caller repeats the command while `written` is EXPIRE_MAX.
    """

    group_ids: tuple[str, ...]
    image: MetadataImage
    absent: frozenset[TopicId] = frozenset()


#: The most records of a single `DeleteGroup` or `ExpireOffsets`.
EXPIRE_MAX = 1_000

Command = (
    JoinGroup
    | SyncGroup
    | LeaveGroup
    | ExpireMembers
    | EndJoin
    | CommitOffsets
    | CommitTransactionOffsets
    | FetchOffsets
    | ReadOffsets
    | DescribeGroup
    | ListGroups
    | DeleteGroup
    | DeleteOffsets
    | ExpireOffsets
)
