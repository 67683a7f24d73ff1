"""Answers to vote requests, and who may stand for election.

Pure.  A voter answers a request by the first row that applies.

  | request                                              | answer                              |
  |------------------------------------------------------|-------------------------------------|
  | to another directory of this node (raft/machine U4)  | refused                             |
  | of an earlier epoch, or of a candidate behind the log| refused                             |
  | a pre-vote (KIP-996)                                 | granted if no live leader is known  |
  | repeated by the candidate that has this epoch's vote | granted                             |
  | in an epoch without a vote and without a leader      | granted, once the vote is SYNCED    |
  | any other                                            | refused                             |
"""

from __future__ import annotations

import enum

from pk.server.raft.messages import LogState, Vote, Voter, VoteRequest


class Verdict(enum.Enum):
    REFUSED = "refused"
    GRANTED = "granted"
    NEW_VOTE = "new vote"  #: granted; to be saved first (raft/machine U1)


def verdict(
    ask: VoteRequest, me: Voter, vote: Vote, log: LogState, leader: Voter | None, live: Voter | None
) -> Verdict:
    """Return the answer of voter `me`.

    `vote`: the saved vote.  `log`: the state of its log.  `live`: the leader if it answered
    recently.
    """
    if ask.to != me:
        return Verdict.REFUSED
    if ask.epoch < vote.epoch or (ask.last_epoch, ask.log_end) < (log.last_epoch, log.end):
        return Verdict.REFUSED
    if ask.pre_vote:
        return Verdict.GRANTED if live is None else Verdict.REFUSED
    if vote.candidate == ask.sender:
        return Verdict.GRANTED
    if vote.candidate is None and leader is None:
        return Verdict.NEW_VOTE
    return Verdict.REFUSED


def may_become_candidate(me: Voter, log: LogState, high_watermark: int) -> bool:
    """Whether this node is a voter now, or would be if uncommitted records were truncated."""
    known = log.voters
    later = [each.offset for each in known[1:]] + [high_watermark]
    return any(
        me in each.voters and end >= high_watermark for each, end in zip(known, later, strict=True)
    )
