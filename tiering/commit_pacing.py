"""When an owner may commit beside the other owners of its table (rule T3).  Pure.

Each tier process whose broker leads a partition of a topic has an owner of the topic's table.  All
of them together make one version in `interval_ms`, on average: each version makes every other
commit plan again, and makes the log longer.  They need no message and no common clock for this.  A
commit names its owner, and an owner follows the commits of the others, so it knows how many owners
commit at the moment.  With n of them it commits in every nth interval.

An owner must not count versions instead.  One that commits rarely would count all those of a busy
one and wait for as many intervals, while the busy one sees nothing of it and commits in each.

Invariants
  N1  Between two commits of an owner there is an interval for each owner that commits at the
      moment, itself included, and at most OWNERS_MAX.  So an owner waits for a bounded time,
      whatever others commit.
  N2  An owner that has not committed yet, or for a long time, does not wait.
  N3  Of n owners that take turns, each is among the last n versions.  An owner that is not among
      twice as many has nothing to commit, and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pk.types import NONE

#: With more owners than this, a table gets more versions.  An owner waits for less than
#: `OwnerSettings.request_timeout_ms`.
OWNERS_MAX = 20
#: Versions after which the owner of one is forgotten.
REMEMBERED = 2 * OWNERS_MAX
#: The owner of a commit that names none: one of an earlier build.
UNNAMED = "?"


class OwnCommit(NamedTuple):
    """The last commit of an owner."""

    version: int = NONE
    at_ms: int = 0  #: by the owner's monotonic clock

    def next_ms(self, interval_ms: int, others: int) -> int:
        """Return from when on the owner may commit beside so many others."""
        if self.version == NONE:
            return 0
        return self.at_ms + interval_ms * min(1 + others, OWNERS_MAX)


def owners_after(owners: Mapping[str, int], owner: str, version: int) -> Mapping[str, int]:
    """Return the last version of each owner once `owner` has made `version`."""
    if not owner:
        return owners
    kept = {name: last for name, last in owners.items() if last > version - REMEMBERED}
    return {**kept, owner: version}


def others(owners: Mapping[str, int], version: int, own: str) -> int:
    """Return how many owners besides `own` commit at the moment; `version` is the newest (N3)."""
    seen = sum(name != own for name in owners)
    newer_than = version - 2 * (1 + seen)
    return sum(name != own and last > newer_than for name, last in owners.items())
