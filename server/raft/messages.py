"""Messages between the nodes of the metadata quorum, and events of its machine (KIP-595, 853, 996).

Every message names its sender and the sender's epoch.  A node that receives a later epoch enters it
before it handles the message.  Requests arrive with a handle for the answer.  Requests and replies
may be lost, late or duplicated.
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
    """A node together with its directory.  Another directory is another voter (rule Q1)."""

    node_id: NodeId
    directory_id: str


@dataclass(slots=True, frozen=True)
class Vote:
    """The epoch, and the node that has this node's vote in it.  It must survive a power loss."""

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
    """Asks for a vote in `epoch`; with `pre_vote`, asks whether the receiver would vote."""

    sender: Voter
    epoch: int
    last_epoch: int
    log_end: int
    to: Voter
    pre_vote: bool = False


@dataclass(slots=True, frozen=True)
class BeginQuorumEpoch:
    """Announces the leader of `epoch`, so that no node must wait for a timeout to learn it."""

    sender: Voter
    epoch: int
    to: Voter


@dataclass(slots=True, frozen=True)
class EndQuorumEpoch:
    """The sender no longer leads `epoch`.  The first of `successors` may stand at once."""

    sender: Voter
    epoch: int
    successors: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class Fetch:
    """Asks for records from `offset` on.

    Everything below `offset` is SYNCED at the sender; the last record there is of `last_epoch`.
    """

    sender: Voter
    epoch: int
    offset: int
    last_epoch: int
    high_watermark: int  #: the sender's high watermark: a later one ends the wait
    number: int  #: number of this fetch; only the answer to the last fetch counts


Request = VoteRequest | BeginQuorumEpoch | EndQuorumEpoch | Fetch

# -- replies ---------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class VoteReply:
    sender: Voter
    epoch: int
    leader: Voter | None
    granted: bool
    pre_vote: bool
    asked_epoch: int  #: number of the request; answers to older requests are ignored


@dataclass(slots=True, frozen=True)
class QuorumEpochReply:
    """The reply to `BeginQuorumEpoch` and `EndQuorumEpoch`."""

    sender: Voter
    epoch: int
    leader: Voter | None


class FetchStatus(enum.Enum):
    DATA = "data"  #: the batches in [offset, end), perhaps none
    DIVERGING = "diverging"  #: the two logs diverge at or before `diverging`
    SNAPSHOT = "snapshot"  #: the offset is only in a snapshot
    NOT_LEADER = "not leader"  #: see `leader`


@dataclass(slots=True, frozen=True)
class FetchReply:
    """The reply to a fetch.  The machine sets the range; the shell reads `payload` from the log."""

    sender: Voter
    epoch: int
    leader: Voter | None
    status: FetchStatus
    number: int  #: of the fetch
    offset: int  #: where the fetch began
    end: int = 0  #: end of the payload; the shell may lower it
    high_watermark: int = 0
    diverging: EpochEnd | None = None
    snapshot: SnapshotId | None = None
    payload: Any = b""


RaftReply = VoteReply | QuorumEpochReply | FetchReply

# -- what happens to a node ------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class VotersAt:
    """The voters of the record at `offset`.  A snapshot counts as its last record."""

    offset: int
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class LogState:
    """The SYNCED state of a node's log: [base.end, end), and snapshots below it."""

    end: int = 0
    epochs: tuple[EpochStart, ...] = ()
    voters: tuple[VotersAt, ...] = ()
    base: SnapshotId = NOTHING  #: the start of the log, and the epoch of the record before it
    snapshot: SnapshotId | None = None  #: the latest snapshot

    @property
    def last_epoch(self) -> int:
        """The epoch of the last record; 0 = no record."""
        return self.epochs[-1].epoch if self.epochs else self.base.epoch


@dataclass(slots=True, frozen=True)
class Started:
    """Event: the process started with this saved vote and this log."""

    saved: Vote
    log: LogState


@dataclass(slots=True, frozen=True)
class RequestReceived:
    """Event: a request arrived.  `request` is the handle for the answer."""

    request: Any
    message: Request


@dataclass(slots=True, frozen=True)
class ReplyReceived:
    """Event: a reply arrived."""

    message: RaftReply


@dataclass(slots=True, frozen=True)
class Unreachable:
    """Event: a message to `peer` or its answer was lost.

    `refused`: the address of the peer refuses connections.
    """

    peer: Voter
    refused: bool = False


@dataclass(slots=True, frozen=True)
class TimerFired:
    key: str


@dataclass(slots=True, frozen=True)
class SelfVoted:
    """Event: the vote of this node for itself in `epoch` is SYNCED."""

    epoch: int


@dataclass(slots=True, frozen=True)
class Synced:
    """Event: the log of this node is now `log`.

    `job`: the number of the machine's write that ended, done or given up.  0 = the leader appended,
    or a snapshot was made.
    """

    log: LogState
    job: int = 0


@dataclass(slots=True, frozen=True)
class VotersChange:
    """Event: change the voters to `voters`, which adds or removes one voter."""

    request: Any
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class Resign:
    """Event: the process is about to end."""


RaftEvent = (
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
    """Write: append the leader change and the voters as the first records of `epoch`."""

    leader: Voter
    epoch: int
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class AppendVoters:
    """Write: append a voters record in the leader's epoch."""

    epoch: int
    voters: tuple[Voter, ...]


@dataclass(slots=True, frozen=True)
class StopLeading:
    """Write: undo the records that were decided and not written; answer with the log end."""

    job: int


@dataclass(slots=True, frozen=True)
class AppendFetched:
    """Write: append the payload of `reply`, whose first batch begins at the end of the log."""

    job: int
    reply: FetchReply


@dataclass(slots=True, frozen=True)
class TruncateTo:
    job: int
    end: int


@dataclass(slots=True, frozen=True)
class LoadSnapshot:
    """Write: fetch the snapshot from `leader`, and replace the log by an empty one behind it."""

    job: int
    leader: Voter
    snapshot: SnapshotId


Op = SaveVote | BeginEpoch | AppendVoters | StopLeading | AppendFetched | TruncateTo | LoadSnapshot

# -- what is made known ----------------------------------------------------------------------------

#: Names of the values that the machine publishes.  SELF: the value is its own next event.
SELF = "self"
LEADERSHIP = "leadership"
HIGH_WATERMARK = "high_watermark"


@dataclass(slots=True, frozen=True)
class Leadership:
    """The leader, as far as this node knows.

    `start`: the first offset of this node's own epoch; NONE if it does not lead.
    `answered_until_ms`: no former leader answered a heartbeat after this time of this node's clock
    (timing.py); None if that is unknown.
    """

    epoch: int
    leader: Voter | None
    start: int = NONE
    answered_until_ms: int | None = None
