"""The memory that a node may use, and how many replicas fit in it."""

from __future__ import annotations

import os

from pk import limits

#: What a replica at rest takes in its broker: 10,000 partitions take 222 MB.
REPLICA_BYTES = 24 * limits.KIB
#: The share of the memory that replicas at rest may take.
REPLICAS_SHARE = 4
_CGROUP_LIMIT = "/sys/fs/cgroup/memory.max"


def memory_bytes(cgroup_limit: str = _CGROUP_LIMIT) -> int:
    """Return the memory of the machine, or of the control group if that has less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open(cgroup_limit) as file:
            text = file.read().strip()
    except OSError:  # not Linux, or no control group of version 2
        return machine
    return min(machine, int(text)) if text.isdigit() else machine


def partitions_max(memory: int) -> int:
    """Return how many replicas a broker with this memory may hold (bytes)."""
    return max(1, memory // REPLICAS_SHARE // REPLICA_BYTES)
