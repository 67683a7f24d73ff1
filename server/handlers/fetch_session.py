"""What one fetch stream asked for, and whose turn it is.

Sans-IO.  A session holds positions; the reader sets each once, then the broker sends and advances
them by itself while credits last (rule P4).  A position that has nothing more to send costs nothing
until its partition's bound moves: `mark` puts it on the dirty list (rule P6).

Turns are round robin: a position that was served goes to the end of the list, so a partition with
an endless backlog cannot starve another one.

Invariants
  F1  a position is served only while it is on the ready list, and it leaves the list when it
      reached its bound
  F2  `next_offset` never moves back for one position id; setting a position again replaces it
      (KIP-227's session epochs are not needed: the stream is FIFO, and replies echo the position
      id)
  F3  nothing is sent while `credit <= 0`; one frame may overdraw it by one batch, so that a batch
      larger than every bound still travels
  F4  data waits for `min_bytes` at most `max_wait_ms` after the first of it was noticed
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from pk import errors, limits
from pk.types import READ_COMMITTED, READ_UNCOMMITTED, Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

#: Positions one stream may hold: far above what one reader needs, so that a hostile one is told.
POSITIONS_MAX = 100_000
PARTITION_BYTES_DEFAULT = 4 * limits.MIB


@dataclass(slots=True)
class Position:
    """Where one reader stands in one partition."""

    key: PartitionKey
    position_id: int
    leader_epoch: Epoch  #: the reader's; NONE = it does not know
    next_offset: Offset
    max_bytes: int
    end_offset: Offset  #: a bounded scan stops here; 0 = never
    last_fetched_epoch: (
        Epoch  #: to be checked once against the epoch cache; NONE = nothing (left) to check
    )
    log_start: Offset = 0  #: a follower's
    announce: bool = True  #: the reader has not been told the partition's bounds yet
    arriving: bool = True  #: nothing was read since it was set: the first batch is verified
    available: int = 0  #: bytes noticed below the bound when it was last weighed
    cold: bool = False  #: the tier is being asked: nobody else moves this position meanwhile


class FetchSession:
    """One reader's positions, credits and turns."""

    def __init__(self) -> None:
        self.isolation = READ_COMMITTED
        self.max_wait_ms = 500
        self.min_bytes = 1
        self.max_bytes = limits.FRAME_BYTES
        self.credit = 0
        self.positions: dict[PartitionKey, Position] = {}
        self._ready: dict[PartitionKey, None] = {}
        self._unweighed: dict[PartitionKey, None] = {}
        self._available = 0
        self._noticed_at_ms: int | None = None
        self._urgent = (
            False  #: an answer that does not wait for min_bytes: an error, a first announcement
        )

    # -- the reader speaks -----------------------------------------------------------------------

    def apply(self, request: wire.FetchRequest, now_ms: int) -> list[PartitionKey]:
        """Take a request over; returns the partitions to stop watching."""
        if request.isolation not in (READ_UNCOMMITTED, READ_COMMITTED):
            raise errors.InvalidRequest(f"isolation {request.isolation} is not 0 or 1")
        if request.positions or request.max_bytes:
            self.isolation = request.isolation
            self.max_wait_ms = max(0, request.max_wait_ms)
            self.min_bytes = max(1, request.min_bytes)
            self.max_bytes = min(
                max(1, request.max_bytes or limits.FRAME_BYTES), limits.MESSAGE_BYTES_MAX
            )
        if request.credit_bytes < 0:
            raise errors.InvalidRequest("credits are never taken back")
        self.credit += request.credit_bytes
        removed = [PartitionKey(item.topic_id, item.partition) for item in request.forgotten]
        for key in removed:
            self.drop(key)
        for item in request.positions:
            position = self._position(item)
            self.drop(position.key)
            self.positions[position.key] = position
            self._ready[position.key] = None
        if request.positions:
            self._urgent = True
            self._notice(now_ms)
        if len(self.positions) > POSITIONS_MAX:
            raise errors.InvalidRequest(f"more than {POSITIONS_MAX} positions on one stream")
        return removed

    @staticmethod
    def _position(item: wire.FetchPosition) -> Position:
        if item.fetch_offset < 0:
            raise errors.InvalidRequest(f"fetch offset {item.fetch_offset} is negative")
        return Position(
            key=PartitionKey(item.topic_id, item.partition),
            position_id=item.position_id,
            leader_epoch=item.current_leader_epoch,
            next_offset=item.fetch_offset,
            max_bytes=item.partition_max_bytes
            if item.partition_max_bytes > 0
            else PARTITION_BYTES_DEFAULT,
            end_offset=item.end_offset,
            last_fetched_epoch=item.last_fetched_epoch,
            log_start=item.log_start,
        )

    # -- the partition speaks --------------------------------------------------------------------

    def mark(self, key: PartitionKey, now_ms: int, *, urgent: bool = False) -> None:
        """The bound of `key` moved, or something about it must be said at once (`urgent`)."""
        if key not in self.positions:
            return
        self._ready.setdefault(key, None)
        self._unweighed[key] = None
        self._urgent = self._urgent or urgent
        self._notice(now_ms)

    def _notice(self, now_ms: int) -> None:
        if self._noticed_at_ms is None:
            self._noticed_at_ms = now_ms

    # -- turns -----------------------------------------------------------------------------------

    @property
    def may_send(self) -> bool:
        """There is something to look at and credit to send it (F3)."""
        return self.credit > 0 and bool(self._ready)

    def take_unweighed(self) -> list[Position]:
        """Positions whose available bytes must be looked up before `due_at_ms` is asked (only if
        min_bytes > 1).
        """
        keys, self._unweighed = self._unweighed, {}
        return [position for key in keys if (position := self.positions.get(key)) is not None]

    def weigh(self, position: Position, available: int) -> None:
        """So many bytes are below the bound of `position`."""
        self._available += available - position.available
        position.available = available

    def due_at_ms(self, now_ms: int) -> int:
        """When the next frame goes out: `now_ms` = now (F4)."""
        if self._urgent or self.min_bytes <= 1 or self._available >= self.min_bytes:
            return now_ms
        return (now_ms if self._noticed_at_ms is None else self._noticed_at_ms) + self.max_wait_ms

    def take_turns(self, at_most: int) -> list[Position]:
        """The next positions to look at;

        off the ready list, so that a mark meanwhile puts them back (F1); and what was urgent of
        them is so no more, but what becomes it while they are read stays it.
        """
        keys = list(islice(self._ready, at_most))
        for key in keys:
            del self._ready[key]
        self._urgent = self._urgent and bool(self._ready)
        return [self.positions[key] for key in keys]

    def current(self, position: Position) -> bool:
        """Whether it was neither set again nor forgotten since it was taken."""
        return self.positions.get(position.key) is position

    def served(self, position: Position, next_offset: Offset) -> None:
        """`position` was answered up to `next_offset`."""
        if not self.current(position):
            return
        assert next_offset >= position.next_offset, "F2"
        position.next_offset = next_offset
        position.announce = False
        self.weigh(position, 0)
        if position.end_offset and next_offset >= position.end_offset:
            self.drop(position.key)

    def again(self, position: Position) -> None:
        """`position` has not reached its bound: its next turn comes after the others'; how much is
        left may be enough for `min_bytes`.
        """
        if self.current(position):
            self._ready[position.key] = None
            self._unweighed[position.key] = None

    def first_again(self, positions: list[Position]) -> None:
        """These were taken and did not fit: they keep their turn."""
        kept = {each.key: None for each in positions if self.current(each)}
        self._ready = kept | self._ready
        self._unweighed |= kept

    def sent(self, payload_bytes: int, now_ms: int) -> None:
        """A frame went out."""
        self.credit -= payload_bytes
        self._noticed_at_ms = now_ms if self._ready else None

    def drop(self, key: PartitionKey) -> None:
        """Forget a position: it was replaced, finished, or answered with an error."""
        position = self.positions.pop(key, None)
        if position is not None:
            self.weigh(position, 0)
        self._ready.pop(key, None)
        self._unweighed.pop(key, None)
