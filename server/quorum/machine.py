"""The metadata quorum as one voter sees it: who leads, in which epoch, and what is committed (rule
Q4).

A Machine after Raft with Kafka's words (KIP-595, KIP-853).  It counts votes and synced ends over
whatever voters it was given and never asks how many they are: with one voter a majority is one,
its own saved vote elects it and its own synced end commits.  What is missing for more voters is
the traffic between them (granting votes to others, election timeouts, following), not another
way of deciding.

    Started ──► CANDIDATE: epoch + 1, vote for myself ──Write(SaveVote, SYNCED)──► VoteGranted(me)
    a majority granted ──► LEADER: BeginEpoch (leader change, voters) ──► Synced(me, end) … HW

Invariants
  U1  a vote is SYNCED before it counts; one vote an epoch, and an epoch is never used twice
  U2  the high watermark never moves back, and never past what a majority has SYNCED
  U3  a leader commits nothing before a record of its own epoch is committed (Raft §5.4.2)
  U4  a voter is (node id, directory id): another directory is another voter (rule Q1)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from pk.effects import Effect, Level, Publish, Send, Write
from pk.types import NONE, NodeId


@dataclass(slots=True, frozen=True)
class Voter:
    """U4."""

    node_id: NodeId
    directory_id: str


@dataclass(slots=True, frozen=True)
class Vote:
    """What must survive a power loss: the epoch and whom this voter gave its vote."""

    epoch: int = 0
    voted_for: NodeId = NONE
    voted_directory_id: str = ""


# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Started:
    """The process began with this saved vote and this log."""

    saved: Vote
    log_end: int
    last_epoch: int


@dataclass(slots=True, frozen=True)
class VoteGranted:
    """`voter` gave its vote in `epoch`, and that is SYNCED."""

    voter: Voter
    epoch: int


@dataclass(slots=True, frozen=True)
class Synced:
    """`voter` holds everything below `end`, SYNCED, as of `epoch`."""

    voter: Voter
    epoch: int
    end: int


Event = Started | VoteGranted | Synced

# -- what a Write may ask for, and messages ----------------------------------------------------


@dataclass(slots=True, frozen=True)
class SaveVote:
    vote: Vote


@dataclass(slots=True, frozen=True)
class BeginEpoch:
    """Append the leader change and the voters as the first records of `epoch`."""

    leader: Voter
    epoch: int
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class AskVote:
    """To another voter: grant me `epoch`."""

    candidate: Voter
    epoch: int
    last_epoch: int
    log_end: int


#: Names of what the machine publishes: values are a `Leadership` and an offset.
LEADERSHIP = "leadership"
HIGH_WATERMARK = "high_watermark"


@dataclass(slots=True, frozen=True)
class Leadership:
    """This voter leads `epoch`, whose records begin at `start`."""

    epoch: int
    start: int


class Role(enum.Enum):
    UNATTACHED = "unattached"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(slots=True)
class Quorum:
    """See the module."""

    me: Voter
    voters: tuple[Voter, ...]
    role: Role = Role.UNATTACHED
    vote: Vote = field(default_factory=Vote)
    high_watermark: int = 0
    epoch_start: int = 0  #: where the records of this leader's epoch begin
    granted: dict[Voter, None] = field(default_factory=dict)
    ends: dict[Voter, int] = field(default_factory=dict)
    log_end: int = 0
    last_epoch: int = 0

    @property
    def epoch(self) -> int:
        return self.vote.epoch

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    def step(self, event: Event, now_ms: int) -> Sequence[Effect]:
        """The only mutator."""
        if isinstance(event, Started):
            return self._start(event)
        if event.epoch != self.epoch or event.voter not in self.voters:
            return ()  # of an older epoch, or not a voter
        if isinstance(event, VoteGranted):
            return self._granted(event)
        return self._synced(event)

    def _start(self, event: Started) -> Sequence[Effect]:
        assert self.role is Role.UNATTACHED, "started twice"
        self.log_end, self.last_epoch = event.log_end, event.last_epoch
        epoch = max(event.saved.epoch, event.last_epoch, 0) + 1  # U1: never used before
        self.role = Role.CANDIDATE
        self.vote = Vote(epoch, self.me.node_id, self.me.directory_id)
        others = [voter for voter in self.voters if voter != self.me]
        ask = AskVote(self.me, epoch, self.last_epoch, self.log_end)
        return [
            Write(
                [SaveVote(self.vote)],
                Level.SYNCED,
                [
                    Publish("vote_granted", VoteGranted(self.me, epoch)),
                    *(Send(voter, ask) for voter in others),
                ],
            )
        ]

    def _granted(self, event: VoteGranted) -> Sequence[Effect]:
        self.granted[event.voter] = None
        if self.role is not Role.CANDIDATE or len(self.granted) < self.majority:
            return ()
        self.role = Role.LEADER
        self.epoch_start = self.log_end
        self.ends = {}
        leadership = Leadership(self.epoch, self.epoch_start)
        return [
            Publish(LEADERSHIP, leadership),
            Write([BeginEpoch(self.me, self.epoch, self.voters)], Level.SYNCED),
        ]

    def _synced(self, event: Synced) -> Sequence[Effect]:
        if self.role is not Role.LEADER:
            return ()
        self.ends[event.voter] = max(event.end, self.ends.get(event.voter, 0))
        ends = sorted((self.ends.get(voter, 0) for voter in self.voters), reverse=True)
        committed = ends[self.majority - 1]
        if committed <= self.high_watermark or committed <= self.epoch_start:  # U2, U3
            return ()
        self.high_watermark = committed
        return [Publish(HIGH_WATERMARK, committed)]
