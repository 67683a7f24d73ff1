"""Which fetch stream serves a follower replica, and what bounds the streams of one broker.

Pure.  A broker has one stream for each leader broker, each of its own log directories, and each
kind.  Members of the ISR are on the *hot* stream: acks=all waits for them.  All other replicas are
on the *catch-up* stream: they may have a large backlog, and only they wait for each other.

Memory: a stream holds at most the bytes of its credit, and one batch more, from the leader's reply
until they are written or undone.  So a broker that has D directories and follows L leaders holds at
most L * D * (`FETCH_CREDIT_BYTES` + `CATCH_UP_CREDIT_BYTES`), and a batch for each stream.  A
directory that hangs uses up the credits of its own streams only.

Invariants
  K1  A byte that was fetched takes credit until it is written or undone, also after its replica has
      left the stream, or the stream was opened again.
  K2  At most COPIES_MAX replicas of one stream copy at a time, of those that a reassignment adds.
      A replica waits only while that many others copy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from pk import limits
from pk.types import NodeId, PartitionKey

#: Replicas of a reassignment that copy at a time on one stream.  The log of each ends sooner than
#: if all copied together, and counts as in sync sooner.
COPIES_MAX = 2


class FetchKind(enum.StrEnum):
    """Whether acks=all waits for the replicas of a stream."""

    HOT = "hot"
    CATCH_UP = "catch-up"


#: The most bytes of a partition in a frame.  Many partitions of a catch-up stream have a backlog,
#: and a partition without one waits for a turn of each of them.
PARTITION_BYTES = {FetchKind.HOT: 4 * limits.MIB, FetchKind.CATCH_UP: limits.MIB}


class FetcherId(NamedTuple):
    """One fetch stream of this broker."""

    leader: NodeId
    directory_id: str  #: of this broker's log directory
    kind: FetchKind

    @property
    def credit_bytes(self) -> int:
        """The most bytes that are fetched on the stream and not written yet."""
        if self.kind is FetchKind.HOT:
            return limits.FETCH_CREDIT_BYTES
        return limits.CATCH_UP_CREDIT_BYTES

    @property
    def partition_bytes(self) -> int:
        """The most bytes of a partition in a frame."""
        return PARTITION_BYTES[self.kind]


class FetchCredit:
    """The credit of one stream (K1): fetched bytes take it until they are written or undone.

    on_grant: called when there is credit to grant.
    """

    def __init__(self, bytes_max: int, on_grant: Callable[[], None]) -> None:
        self.bytes_max = bytes_max
        self.unwritten = 0  #: bytes that were given to the logs and are not written yet
        self._grant = 0
        self._on_grant = on_grant

    def opened(self) -> None:
        """Grant everything that no fetched byte holds: a new stream begins without credit."""
        self._grant = self.bytes_max - self.unwritten

    @property
    def due(self) -> bool:
        """Whether there is credit to grant; a batch larger than the credit leaves a debt."""
        return self._grant > 0

    def take(self) -> int:
        """Return the credit to grant with the next request."""
        granted = max(0, self._grant)
        self._grant -= granted
        return granted

    def received(self, size: int) -> None:
        """Note that the leader sent `size` bytes; those that no log takes are granted again."""
        self._grant += size

    def queued(self, size: int) -> None:
        """Note that a log took `size` received bytes, to write them."""
        self.unwritten += size
        self._grant -= size

    def written(self, size: int) -> None:
        """Note that `size` queued bytes are written or undone."""
        self.unwritten -= size
        self._grant += size
        self._on_grant()


class CopyTurns:
    """The order in which the added replicas of one stream copy (K2): first come, first served."""

    def __init__(self, copies_max: int = COPIES_MAX) -> None:
        self._copies_max = copies_max
        self._copying: dict[PartitionKey, None] = {}
        self._waiting: dict[PartitionKey, None] = {}

    def take(self, key: PartitionKey) -> bool:
        """Return whether `key` may copy now; if not, it waits until a `leave` returns it."""
        if key in self._copying:
            return True
        if len(self._copying) < self._copies_max:
            self._copying[key] = None
            return True
        self._waiting[key] = None
        return False

    def leave(self, key: PartitionKey) -> PartitionKey | None:
        """End the turn or the wait of `key`; return the replica whose turn begins now, if any."""
        self._waiting.pop(key, None)
        if key not in self._copying:
            return None
        del self._copying[key]
        following = next(iter(self._waiting), None)
        if following is not None:
            del self._waiting[following]
            self._copying[following] = None
        return following
