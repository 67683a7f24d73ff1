"""What a leader of the metadata quorum keeps while it leads: how far every voter is, who was heard
of when, which fetches wait.

Invariants
  E1  an end counts only if its voter said it in this epoch: a fetch at n confirms everything below
      n (rule L1: SYNCED).
  E2  a majority is one of the voters as the log has them now, committed or not (Raft §6, KIP-853).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pk.server.raft.messages import Fetch, Voter


@dataclass(slots=True)
class Waiting:
    """A fetch that found nothing new."""

    request: Any
    fetch: Fetch
    until_ms: int


@dataclass(slots=True)
class LeaderState:
    """One epoch of one leader."""

    me: Voter
    start: int  #: where the records of the epoch begin
    since_ms: int
    ends: dict[Voter, int] = field(default_factory=dict)
    heard_ms: dict[Voter, int] = field(default_factory=dict)
    caught_up_ms: dict[Voter, int] = field(default_factory=dict)  #: when it had everything
    waiting: dict[Voter, Waiting] = field(default_factory=dict)
    change: tuple[Any, tuple[Voter, ...]] | None = None  #: who asked for other voters, and which

    def note(self, fetch: Fetch, end: int, now_ms: int) -> None:
        """E1; an earlier fetch of the same node was given up.  `end`: of the leader's log."""
        self.ends[fetch.sender] = fetch.offset
        self.heard_ms[fetch.sender] = now_ms
        if fetch.offset >= end:
            self.caught_up_ms[fetch.sender] = now_ms

    def committed(self, voters: Sequence[Voter], own_end: int) -> int:
        """The offset below which a majority holds everything."""
        ends = sorted(
            (own_end if voter == self.me else self.ends.get(voter, 0) for voter in voters),
            reverse=True,
        )
        return ends[len(voters) // 2]

    def in_touch(self, voters: Sequence[Voter], since_ms: int) -> bool:
        """Whether a majority was heard of at or after `since_ms`."""
        heard = sum(
            voter == self.me or self.heard_ms.get(voter, self.since_ms) >= since_ms
            for voter in voters
        )
        return heard > len(voters) // 2

    def silent(self, voters: Sequence[Voter], since_ms: int) -> list[Voter]:
        """Voters that have not fetched in this epoch yet, or not since then: one that died has
        forgotten who leads, and its log may name only voters that are gone.
        """
        heard = [voter for voter in self.ends if self.heard_ms[voter] >= since_ms]
        return [voter for voter in voters if voter != self.me and voter not in heard]

    def successors(self, voters: Sequence[Voter]) -> tuple[Voter, ...]:
        """The other voters, the one with the most records first."""
        others = [voter for voter in voters if voter != self.me]
        return tuple(sorted(others, key=lambda voter: (-self.ends.get(voter, 0), voter)))

    def next_due_ms(self) -> int | None:
        return min((each.until_ms for each in self.waiting.values()), default=None)
