"""Checks of reassignments, on the committed states of a partition before and after one record.

Checked
  V18  A record that takes replicas away leaves at least min(required, members before) in the ISR
       (rule R8); required is min(min_insync_replicas, original replicas).  A move to fewer replicas
       ends with all of them in sync (rule R8).  No unclean election chooses a replica that only
       copies yet (rule R9).  A plan that was made for a deleted topic moves nothing (rule R10;
       workload.py tries such plans).
"""

from __future__ import annotations

from typing import Any

from pk.sim.checkers import require
from pk.types import PartitionKey


def check_move(
    key: PartitionKey, before: Any, now: Any, min_insync_replicas: int, *, unclean: bool
) -> None:
    """Check one committed change; `unclean`: the record elects a leader uncleanly."""
    if set(before.replicas) - set(now.replicas):
        required = min(min_insync_replicas, len(now.replicas) - len(now.adding))
        kept = len(now.isr) >= min(required, len(before.isr))
        require(kept, "V18", "{} lost copies: {} -> {}", key, before, now)
        ended = not now.adding and not now.removing
        smaller = len(now.replicas) < len(before.replicas) - len(before.adding)
        whole = not (ended and smaller) or set(now.isr) == set(now.replicas)
        require(whole, "V18", "{} is not in sync as a whole: {} -> {}", key, before, now)
    if unclean and now.leader in before.adding:
        members = (*before.isr, *before.elr, *before.last_known)
        require(now.leader in members, "V18", "{} elected a copy: {} -> {}", key, before, now)
