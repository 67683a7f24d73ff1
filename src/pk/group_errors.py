"""The errors of consumer groups.  Use them by their names in errors.py, which has their tree."""

from __future__ import annotations

from pk.error_bases import RetriableError, UserError


class RebalanceInProgress(RetriableError):
    """The group is being rebalanced: the consumer joins again, and a commit is repeated then."""

    code = 27


class UnstableOffsetCommit(RetriableError):
    """A transaction that has not ended holds offsets of the partition (KIP-447): ask again."""

    code = 88


class UnknownMemberId(UserError):
    """The group does not have this member: its session ended, or it has left.  It joins again."""

    code = 25
    acts = "client"


class IllegalGeneration(UserError):
    """The member names another generation than its group has: it joins the group again."""

    code = 22
    acts = "client"


class FencedInstanceId(UserError):
    """Another consumer with the same group_instance_id took this one's place: close this one."""

    code = 82


class GroupMaxSizeReached(UserError):
    """The group has group_max_size members: close some of them, or raise the brokers' setting."""

    code = 81


class InconsistentGroupProtocol(UserError):
    """The member has no assignor that every other member of its group has, too."""

    code = 23


class InvalidSessionTimeout(UserError):
    """session_timeout_ms is outside of the bounds that the brokers allow."""

    code = 26


class NonEmptyGroup(UserError):
    """The group has members: close its consumers first, or let the members themselves commit."""

    code = 68


class GroupIdNotFound(UserError):
    """The coordinator knows no group of this name."""

    code = 69


class GroupSubscribedToTopic(UserError):
    """A member of the group subscribes to the topic: close the member, then delete the offsets."""

    code = 86


class OffsetMetadataTooLarge(UserError):
    """The metadata of a committed offset is larger than offset_metadata_max_bytes."""

    code = 12


class NotPartitionOwner(UserError):
    """A member commits a partition that is not assigned to it (X12)."""

    code = 1063


class StaleOffsetCommit(UserError):
    """A later commit of the same consumer is there already: the network delayed this one."""

    code = 1064
    acts = "client"
