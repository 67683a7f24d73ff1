"""How far groups are behind: from their committed offsets and the ends of the partitions.

Pure.

Invariants
  U1  A look covers at most PARTITIONS_MAX partitions, and names at most GROUPS_SHOWN groups: those
      with the largest lag.  The series of a metric are bounded by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pk.server.groups.groups import ConsumerGroup
from pk.types import Offset, PartitionKey

#: Partitions whose ends one look asks for.
PARTITIONS_MAX = 20_000
#: Groups that have a series of their own.
GROUPS_SHOWN = 100


class GroupLag(NamedTuple):
    """The lag of one group, in offsets up to the last stable one."""

    group_id: str
    total: int
    largest: int  #: of one partition


def wanted(groups: Mapping[str, ConsumerGroup]) -> list[PartitionKey]:
    """Return the partitions of committed offsets, sorted and bounded."""
    keys = {key for each in groups.values() for key in each.offsets}
    return sorted(keys)[:PARTITIONS_MAX]


def lags(
    groups: Mapping[str, ConsumerGroup], ends: Mapping[PartitionKey, Offset]
) -> list[GroupLag]:
    """Return the groups with the largest lags, the largest first; partitions without a known end
    do not count.  Groups without offsets have no lag.
    """
    found: list[GroupLag] = []
    for group_id, group in groups.items():
        behind = [
            max(0, ends[key] - committed.offset)
            for key, committed in group.offsets.items()
            if key in ends
        ]
        if behind:
            found.append(GroupLag(group_id, sum(behind), max(behind)))
    return sorted(found, key=lambda each: (-each.total, each.group_id))[:GROUPS_SHOWN]
