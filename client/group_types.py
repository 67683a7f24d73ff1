"""The values that a consumer, its membership and its commits exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from pk.types import NONE, PartitionKey, TopicPartition


class OffsetAndMetadata(NamedTuple):
    """An offset to commit: that of the next record to process, with a text of the application."""

    offset: int
    metadata: str = ""
    leader_epoch: int = NONE


class ConsumerGroupMetadata(NamedTuple):
    """Who commits: what a transactional producer needs to know of the consumer.

    A consumer that takes no part in the assignment has no member id, and generation -1.
    """

    group_id: str
    generation: int
    member_id: str
    group_instance_id: str
    #: The ids of the topics that the consumer reads (rule L8).
    topic_ids: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class AssignmentChange:
    """A change of the assignment that the consumer has to apply."""

    lost: bool  #: the member does not own what it had any more
    assigned: dict[TopicPartition, int | None]  #: new, with the committed offset; None = no offset
    keys: Mapping[TopicPartition, PartitionKey]  #: all that the member owns afterwards
    who: ConsumerGroupMetadata  #: whose the partitions are: the member and the generation

    @property
    def owned(self) -> tuple[TopicPartition, ...]:
        """Return the partitions that the member owns afterwards."""
        return tuple(self.keys)


class OffsetsToCommit(NamedTuple):
    """Offsets, and what was known when they were captured."""

    offsets: Mapping[TopicPartition, OffsetAndMetadata]
    #: The partitions under whose topic ids the positions were fetched (rule L8).  A partition that
    #: the consumer does not read is absent: its name is looked up.
    keys: Mapping[TopicPartition, PartitionKey]
    who: ConsumerGroupMetadata
