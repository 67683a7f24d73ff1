"""When an owner may commit beside the other owners of its table (rule T3).  Pure.

Each tier process whose broker leads a partition of a topic has an owner of the topic's table.  All
of them together make one version in `interval_ms`, on average: each version makes every other
commit plan again, and makes the log longer.  They need no message and no common clock for this.
An owner counts the versions of others since its last commit, and those between its last two.  With
n owners it counts n − 1, and commits in every nth interval.  Without the second number, an owner
that commits as the last of many would take itself for the only one.

Invariants
  N1  Between two commits of an owner there is an interval for each version, its own included, up to
      one for each partition of the table and up to OWNERS_MAX.  So an owner waits for a bounded
      time, whatever other engines commit.  Without the bound of the partitions, an owner that
      commits rarely would count all versions of a busy one, wait for as many intervals, and count
      those that the busy one makes meanwhile.
  N2  An owner that has not committed yet, or for a long time, does not wait.
"""

from __future__ import annotations

from typing import NamedTuple

from pk.types import NONE

#: With more owners than this, or beside an engine that commits all the time, a table gets more
#: versions.  An owner waits for less than `OwnerSettings.request_timeout_ms`.
OWNERS_MAX = 20


class OwnCommit(NamedTuple):
    """The last commit of an owner."""

    version: int = NONE
    at_ms: int = 0  #: by the owner's monotonic clock
    others: int = 0  #: versions of others between the commit before and this one

    def next_ms(self, version: int, interval_ms: int, partitions: int) -> int:
        """Return from when on the owner may commit on `version` of the table, which has that many
        `partitions`.
        """
        if self.version == NONE:
            return 0
        others = max(self.others, version - self.version)
        return self.at_ms + interval_ms * min(1 + others, max(1, partitions), OWNERS_MAX)

    def followed_by(self, version: int, now_ms: int) -> OwnCommit:
        """Return the owner's next commit, which made `version`."""
        others = 0 if self.version == NONE else max(0, version - 1 - self.version)
        return OwnCommit(version, now_ms, others)
