"""Who may stand for election, and what a vote request is answered.

Pure.  A voter that is asked decides in this order; the first row that fits counts.

  | what is asked                                        | answer                              |
  |------------------------------------------------------|-------------------------------------|
  | of another directory of this node (raft/machine U4)  | refused                             |
  | in an earlier epoch, or by a log that is behind      | refused                             |
  | whether it would vote (KIP-996)                      | granted if no live leader is known  |
  | again by the candidate that has this epoch's vote    | granted                             |
  | in an epoch without a vote and without a leader      | granted, once the vote is SYNCED    |
  | otherwise                                            | refused                             |
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
    """What `me` with `vote` saved and `log` answers; `live`: the leader, if it was heard lately."""
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


def may_stand(me: Voter, log: LogState, high_watermark: int) -> bool:
    """By the voters in force, or by those that come back if what is not committed is cut."""
    known = log.voters
    later = [each.offset for each in known[1:]] + [high_watermark]
    return any(
        me in each.voters and end >= high_watermark for each, end in zip(known, later, strict=True)
    )
