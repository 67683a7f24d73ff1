"""What the metadata quorum is told and what its peers say to each other (KIP-595, KIP-853,
KIP-996).

Every message names its sender and the sender's epoch; whoever hears of a later epoch goes there
first and judges then.  Requests come in with a handle for the answer, replies come in as they are:
both may be lost, late or doubled.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from pk.log.divergence import EpochEnd
from pk.server.raft.snapshot_id import NOTHING, SnapshotId
from pk.types import NONE, EpochStart, NodeId


@dataclass(slots=True, frozen=True, order=True)
class Voter:
    """A node with one directory: another directory is another voter (rule Q1)."""

    node_id: NodeId
    directory_id: str


@dataclass(slots=True, frozen=True)
class Vote:
    """What must survive a power loss: the epoch and whom this node gave its vote."""

    epoch: int = 0
    voted_for: NodeId = NONE
    voted_directory_id: str = ""

    @property
    def candidate(self) -> Voter | None:
        if self.voted_for == NONE:
            return None
        return Voter(self.voted_for, self.voted_directory_id)


# -- requests --------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class VoteRequest:
    """Vote for the sender in `epoch`; or, with `pre_vote`, say whether you would in a next one."""

    sender: Voter
    epoch: int
    last_epoch: int
    log_end: int
    to: Voter
    pre_vote: bool = False


@dataclass(slots=True, frozen=True)
class BeginQuorumEpoch:
    """The sender leads `epoch`: nobody need find that out by a timeout."""

    sender: Voter
    epoch: int
    to: Voter


@dataclass(slots=True, frozen=True)
class EndQuorumEpoch:
    """The sender leads `epoch` no longer; the first of `successors` may stand at once."""

    sender: Voter
    epoch: int
    successors: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class Fetch:
    """Records from `offset` on; everything below is SYNCED at the sender, the last in
    `last_epoch`.
    """

    sender: Voter
    epoch: int
    offset: int
    last_epoch: int
    high_watermark: int  #: what the sender knows: news of a later one is worth an answer
    number: int  #: of the sender's fetches: only the answer to its last one counts


Request = VoteRequest | BeginQuorumEpoch | EndQuorumEpoch | Fetch

# -- replies ---------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class VoteReply:
    sender: Voter
    epoch: int
    leader: Voter | None
    granted: bool
    pre_vote: bool
    asked_epoch: int  #: of the request: an answer to an older one counts for nothing


@dataclass(slots=True, frozen=True)
class QuorumEpochReply:
    """The answer to `BeginQuorumEpoch` and `EndQuorumEpoch`."""

    sender: Voter
    epoch: int
    leader: Voter | None


class FetchStatus(enum.Enum):
    DATA = "data"  #: the batches in [offset, end), perhaps none
    DIVERGING = "diverging"  #: the two logs diverge at or before `diverging`
    SNAPSHOT = "snapshot"  #: what was asked for is only in a snapshot any more
    NOT_LEADER = "not leader"  #: see `leader`


@dataclass(slots=True, frozen=True)
class FetchReply:
    """The shell fills `payload`: the leader says which range, and reads it from its log."""

    sender: Voter
    epoch: int
    leader: Voter | None
    status: FetchStatus
    number: int  #: of the fetch
    offset: int  #: where the fetch began
    end: int = 0  #: of the payload; the shell may lower it to what fits
    high_watermark: int = 0
    diverging: EpochEnd | None = None
    snapshot: SnapshotId | None = None
    payload: Any = b""


Reply = VoteReply | QuorumEpochReply | FetchReply

# -- what happens to a node ------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class VotersAt:
    """The voters, by the record at `offset` (a snapshot counts as its last record)."""

    offset: int
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class LogState:
    """What a node holds, SYNCED: [base.end, end), and snapshots below."""

    end: int = 0
    epochs: tuple[EpochStart, ...] = ()
    voters: tuple[VotersAt, ...] = ()
    base: SnapshotId = NOTHING  #: where the log begins, and the epoch of what is before
    snapshot: SnapshotId | None = None  #: the latest there is

    @property
    def last_epoch(self) -> int:
        """Of the last record; 0 = there is none."""
        return self.epochs[-1].epoch if self.epochs else self.base.epoch


@dataclass(slots=True, frozen=True)
class Started:
    """The process began with this saved vote and this log."""

    saved: Vote
    log: LogState


@dataclass(slots=True, frozen=True)
class RequestReceived:
    """A request came; `request` is what its answer is given with."""

    request: Any
    message: Request


@dataclass(slots=True, frozen=True)
class ReplyReceived:
    """A reply came."""

    message: Reply


@dataclass(slots=True, frozen=True)
class Unreachable:
    """A message to `peer` did not arrive, or its answer will not; `refused`: nobody listens at its
    address.
    """

    peer: Voter
    refused: bool = False


@dataclass(slots=True, frozen=True)
class TimerFired:
    key: str


@dataclass(slots=True, frozen=True)
class SelfVoted:
    """The vote for oneself in `epoch` is SYNCED."""

    epoch: int


@dataclass(slots=True, frozen=True)
class Synced:
    """The own log is now `log`.

    `job` = which of the machine's writes is over with that, done or given up; 0 = the leader
    appended, or a snapshot was made.
    """

    log: LogState
    job: int = 0


@dataclass(slots=True, frozen=True)
class VotersChange:
    """Let `voters` be the voters from now on; one joins or one leaves."""

    request: Any
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class Resign:
    """The process is about to end."""


Event = (
    Started
    | RequestReceived
    | ReplyReceived
    | Unreachable
    | TimerFired
    | SelfVoted
    | Synced
    | VotersChange
    | Resign
)

# -- what a Write may ask for ----------------------------------------------------------------------


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
class AppendVoters:
    """Append the voters in the leader's epoch."""

    epoch: int
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class StopLeading:
    """Forget what was decided and not written; answer with where the log ends."""

    job: int


@dataclass(slots=True, frozen=True)
class AppendFetched:
    """Append the payload of `reply`, whose first batch begins at the log's end."""

    job: int
    reply: FetchReply


@dataclass(slots=True, frozen=True)
class TruncateTo:
    job: int
    end: int


@dataclass(slots=True, frozen=True)
class LoadSnapshot:
    """Fetch the snapshot from `leader`, and begin the log anew behind it."""

    job: int
    leader: Voter
    snapshot: SnapshotId


Op = SaveVote | BeginEpoch | AppendVoters | StopLeading | AppendFetched | TruncateTo | LoadSnapshot

# -- what is made known ----------------------------------------------------------------------------

#: Names of what the machine publishes.  SELF: the value is its own next event.
SELF = "self"
LEADERSHIP = "leadership"
HIGH_WATERMARK = "high_watermark"


@dataclass(slots=True, frozen=True)
class Leadership:
    """Who leads, as far as this node knows; `start`: where the records of this node's own epoch
    begin, NONE if it does not lead; `answered_until_ms`: no leader before it answered a heartbeat
    after this (this node's clock; timing.py), None if that is not known.
    """

    epoch: int
    leader: Voter | None
    start: int = NONE
    answered_until_ms: int | None = None
