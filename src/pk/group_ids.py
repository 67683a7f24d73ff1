"""Maps group ids to partitions of `__consumer_offsets`.

The leader of that partition is the coordinator of the group.  The number of partitions never
changes.
"""

from __future__ import annotations

from crc32c import crc32c

TOPIC = "__consumer_offsets"
PARTITIONS = 16


def partition_of_group(group_id: str) -> int:
    """Return the partition that coordinates a group."""
    return crc32c(group_id.encode()) % PARTITIONS
