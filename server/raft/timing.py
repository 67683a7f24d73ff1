"""How long the nodes of the metadata quorum wait for each other.

A broker that is out of reach of the next active controller must know that it may be fenced before
it is (rule R6).  It counts from its last heartbeat, which the controller before answered up to
`lease_ms` after it had last heard of a majority; nobody of that majority stands, or lets another
one stand, before `fetch_ms` is over.  So the next controller may take the difference, and what
passed between its election and the grant, off the sessions it grants, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Timing:
    """Milliseconds (KIP-595): every wait before an election is drawn from [1, 2) times the figure
    ([1, 1.25) for `fetch_ms`), so that two seldom stand at once.
    """

    election_ms: int = 1_000  #: a candidate or a node without a leader waits this long
    fetch_ms: int = 2_000  #: a follower that could not fetch for so long looks for another leader
    wait_ms: int = 500  #: a fetch that finds nothing new is answered after this
    again_ms: int = 50  #: before a fetch that failed is tried again

    @property
    def lease_ms(self) -> int:
        """A leader that has heard of no majority for so long answers no heartbeat (rule R6)."""
        return self.fetch_ms // 2

    def answered_until_ms(self, word_ms: int, now_ms: int) -> int:
        """When the last heartbeat may have been answered, at the latest, by a leader that this node
        last heard of at `word_ms`; it is elected in its place at `now_ms`.
        """
        return now_ms - max(0, min(now_ms - word_ms, self.fetch_ms) - self.lease_ms)
