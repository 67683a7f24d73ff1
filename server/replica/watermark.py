"""The high watermark: the smallest log end of the replicas that a clean election may choose.

Sans-IO.  Read first: docs/PROTOCOL.md R1, R2, L2; KIP-966 (strict min ISR), KIP-497 (maximal ISR).

A partition whose leader is its only in-sync replica is the case n = 1 of the same rule (rule Q4):
the minimum over one end.

Invariants
  W1  The high watermark never moves back within a leader epoch.
  W2  It never passes the end of any member of the *maximal* ISR: committed members and pending
      additions.
  W3  It does not move while the committed ISR is smaller than min(min_insync_replicas, replication
      factor).
"""

from __future__ import annotations

from collections.abc import Iterable

from pk.types import Offset


def in_sync_required(min_insync_replicas: int, replication_factor: int) -> int:
    """Return how many committed in-sync replicas an acknowledgement needs (rule R1).

    `replication_factor` does not count replicas that a reassignment is adding.
    """
    return min(min_insync_replicas, replication_factor)


def advance(current: Offset, ends: Iterable[Offset], in_sync: int, required: int) -> Offset:
    """Return the new high watermark, given the log ends of the maximal ISR.

    `ends` are synced ends where the topic acknowledges only what is fsynced (rule L2).  `in_sync`
    counts the committed ISR; pending additions hold the watermark back (W2) but do not help to
    reach `required` (W3).
    """
    if in_sync < required:
        return current  # R1: below the minimum nothing more becomes committed
    lowest = min(ends, default=current)
    return max(current, lowest)
