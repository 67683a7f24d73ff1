"""The timeouts of the metadata quorum.

A broker that cannot reach the next active controller must notice that it may be fenced before the
controller fences it (rule R6).  The broker counts from its last answered heartbeat.  The former
controller answers heartbeats until `lease_ms` after its last contact with a majority.  No member of
that majority stands for election, or grants a pre-vote, before `fetch_ms` have passed.  So the next
controller may shorten the sessions that it grants by two times: `fetch_ms` - `lease_ms`, and the
time from its election to the grant.  It may not shorten them by more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Timing:
    """Timeouts in milliseconds (KIP-595).

    A wait before an election is drawn from [1, 2) times the value ([1, 1.25) for `fetch_ms`), so
    that two nodes seldom stand at the same time.
    """

    election_ms: int = 1_000  #: wait of a candidate, and of a node without a leader
    fetch_ms: int = 2_000  #: longest time of a follower without a successful fetch
    wait_ms: int = 500  #: longest wait of a fetch that finds no new record
    again_ms: int = 50  #: wait before a failed fetch is repeated

    @property
    def lease_ms(self) -> int:
        """A leader without contact to a majority for this long answers no heartbeat (R6)."""
        return self.fetch_ms // 2

    def answered_until_ms(self, word_ms: int, now_ms: int) -> int:
        """The latest time at which the former leader may have answered a heartbeat.

        `word_ms`: this node's last contact with that leader.  `now_ms`: this node's election.
        """
        return now_ms - max(0, min(now_ms - word_ms, self.fetch_ms) - self.lease_ms)
