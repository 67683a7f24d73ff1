"""The state of one partition and of one fetch session; only `client/fetcher` changes it."""

from __future__ import annotations

from pk.backoff import Backoff
from pk.client.fetcher_events import FetchRequestData
from pk.client.metadata import LeaderAndEpoch
from pk.types import NONE, PartitionKey, TopicPartition


class AssignedPartition:
    """One assigned partition."""

    __slots__ = (
        "asking", "assigned_id", "backoff", "bound_id", "failing_ms", "fetched_epoch", "halted",
        "high_watermark", "key", "last_stable_offset", "leader", "next", "node", "paused", "place",
        "position_id", "retry_ms", "set_id", "special",
    )  # fmt: skip

    def __init__(self, place: TopicPartition, assigned_id: int, backoff: Backoff) -> None:
        self.place = place
        self.assigned_id = assigned_id  #: a new id each time the partition is assigned
        self.key: PartitionKey | None = None
        #: The positions with this id or a later one are positions of `key` (rule L8).
        self.bound_id = assigned_id
        self.next: int | None = None  #: the frontier: the offset that the broker is asked for next
        #: LATEST or EARLIEST, if it must be looked up; None = by policy
        self.special: int | None = None
        self.asking = False  #: an offset look-up is in progress
        self.node: int | None = None  #: the broker on whose stream the position is set
        self.position_id = 0  #: id of the position; frames with an older id are not handed out
        self.set_id = 0  #: id of the last setting on a stream; frames with another are refused
        #: leader epoch of the offset before the frontier (KIP-320); NONE = unknown
        self.fetched_epoch = NONE
        self.high_watermark = NONE  #: as the last fetch said; NONE = none was answered
        self.last_stable_offset = NONE
        self.paused = False
        self.halted = False  #: an error was reported; fetching waits for a seek
        self.retry_ms = 0
        self.backoff = backoff
        self.failing_ms: int | None = None
        self.leader: LeaderAndEpoch | None = None  #: the leader at the last step for this partition


class NodeSession:
    """The state of the fetch stream to one broker."""

    __slots__ = ("ask", "backoff", "buffered", "credit", "live", "retry_ms", "returned")

    def __init__(self, backoff: Backoff) -> None:
        self.live = False
        self.buffered = 0  #: bytes delivered, not consumed; kept when the stream ends
        self.credit = 0  #: bytes granted to the broker and not used yet, as far as is known
        self.returned = 0  #: bytes consumed, not granted again
        self.ask = FetchRequestData()
        self.retry_ms = 0
        self.backoff = backoff
