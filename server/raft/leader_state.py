"""The state of a leader of the metadata quorum: log ends of voters, last contacts, waiting fetches.

Invariants
  E1  A log end counts only if its voter sent it in this epoch.  A fetch at offset n confirms that
      everything below n is SYNCED at the voter (rule L1).
  E2  A majority is counted among the voters of the last voters record in the log, committed or not
      (Raft §6, KIP-853).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pk.server.raft.messages import Fetch, Voter


@dataclass(slots=True)
class Waiting:
    """A fetch that found no new record, and waits."""

    request: Any
    fetch: Fetch
    until_ms: int


@dataclass(slots=True)
class LeaderState:
    """The state of one leader in one epoch."""

    me: Voter
    start: int  #: offset of the first record of the epoch
    since_ms: int
    ends: dict[Voter, int] = field(default_factory=dict)
    last_fetch_ms: dict[Voter, int] = field(default_factory=dict)
    #: when each voter last had all records of the leader
    caught_up_ms: dict[Voter, int] = field(default_factory=dict)
    waiting: dict[Voter, Waiting] = field(default_factory=dict)
    change: tuple[Any, tuple[Voter, ...]] | None = None  #: requester, new voters

    def note(self, fetch: Fetch, end: int, now_ms: int) -> None:
        """Note a fetch (E1).  It replaces an earlier fetch of the same node.

        `end`: the end of the leader's log.
        """
        self.ends[fetch.sender] = fetch.offset
        self.last_fetch_ms[fetch.sender] = now_ms
        if fetch.offset >= end:
            self.caught_up_ms[fetch.sender] = now_ms

    def committed(self, voters: Sequence[Voter], own_end: int) -> int:
        """The offset below which a majority holds all records."""
        ends = sorted(
            (own_end if voter == self.me else self.ends.get(voter, 0) for voter in voters),
            reverse=True,
        )
        return ends[len(voters) // 2]

    def in_touch(self, voters: Sequence[Voter], since_ms: int) -> bool:
        """Whether a majority has fetched at or after `since_ms`."""
        present = sum(
            voter == self.me or self.last_fetch_ms.get(voter, self.since_ms) >= since_ms
            for voter in voters
        )
        return present > len(voters) // 2

    def silent(self, voters: Sequence[Voter], since_ms: int) -> list[Voter]:
        """Voters that have not fetched in this epoch, or not since `since_ms`.

        A voter that was restarted does not know the leader, and its log may name only removed
        voters.
        """
        present = [voter for voter in self.ends if self.last_fetch_ms[voter] >= since_ms]
        return [voter for voter in voters if voter != self.me and voter not in present]

    def successors(self, voters: Sequence[Voter]) -> tuple[Voter, ...]:
        """The other voters, ordered by log end, the largest first."""
        others = [voter for voter in voters if voter != self.me]
        return tuple(sorted(others, key=lambda voter: (-self.ends.get(voter, 0), voter)))

    def next_due_ms(self) -> int | None:
        return min((each.until_ms for each in self.waiting.values()), default=None)
