"""The positions of one fetch stream, and the order in which they are served.

Sans-IO.  A session holds positions.  The reader sets each one once.  Then the broker sends data and
advances the positions by itself while credits last (rule P4).  A position without more data costs
nothing until the bound of its partition moves: `mark` puts it on the ready list (rule P6).

Turns are round robin: a served position goes to the end of the list, so a partition with an endless
backlog cannot starve another one.

Invariants
  F1  A position is served only while it is on the ready list.  It leaves the list when it reaches
      its bound.
  F2  `next_offset` of a position id never moves back.  Setting a position again replaces it.
      (KIP-227's session epochs are not needed: the stream is FIFO, and replies echo the position
      id.)
  F3  Nothing is sent while `credit <= 0`.  One frame may overdraw the credit by one batch, so that
      a batch that is larger than every bound is still sent.
  F4  Data waits for `min_bytes` for at most `max_wait_ms`, counted from the first byte noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from pk import errors, limits
from pk.types import READ_COMMITTED, READ_UNCOMMITTED, Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

#: Most positions of one stream.  No reader of pk needs as many; a reader that sets more gets an
#: error.
POSITIONS_MAX = 100_000
PARTITION_BYTES_DEFAULT = 4 * limits.MIB


@dataclass(slots=True)
class Position:
    """The position of one reader in one partition."""

    key: PartitionKey
    position_id: int
    leader_epoch: Epoch  #: the leader epoch that the reader knows; NONE = unknown
    next_offset: Offset
    max_bytes: int
    end_offset: Offset  #: end of a bounded scan; 0 = none
    last_fetched_epoch: Epoch  #: checked once against the epoch cache; NONE = nothing to check
    log_start: Offset = 0  #: log start of a follower
    cleaned_end: Offset = 0  #: of a follower: how far its log is cleaned
    forgotten_end: Offset | None = None  #: of a follower (rule C8); None = its build has none
    announce: bool = True  #: the reader does not know the partition's bounds yet
    arriving: bool = True  #: nothing read since it was set: the first batch is verified
    available: int = 0  #: bytes below the bound at the last `weigh`
    cold: bool = False  #: a read from the tier is running; only its answer moves this position


class FetchSession:
    """The positions, credits and turns of one reader."""

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
            False  #: an answer that does not wait for min_bytes: an error, or the first answer
        )

    # -- the reader speaks -----------------------------------------------------------------------

    def apply(self, request: wire.FetchRequest, now_ms: int) -> list[PartitionKey]:
        """Apply a request; return the partitions to stop watching."""
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
            raise errors.InvalidRequest("a fetch request has negative credit")
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
            cleaned_end=item.cleaned_end,
            forgotten_end=item.forgotten_end if item.HasField("forgotten_end") else None,
        )

    # -- the partition speaks --------------------------------------------------------------------

    def mark(self, key: PartitionKey, now_ms: int, *, urgent: bool = False) -> None:
        """Mark `key` as ready: its bound moved, or an answer is due at once (`urgent`)."""
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
        """Whether a position is ready and there is credit (F3)."""
        return self.credit > 0 and bool(self._ready)

    def take_unweighed(self) -> list[Position]:
        """Return the positions to `weigh` before `due_at_ms` (only if min_bytes > 1)."""
        keys, self._unweighed = self._unweighed, {}
        return [position for key in keys if (position := self.positions.get(key)) is not None]

    def weigh(self, position: Position, available: int) -> None:
        """Note the number of bytes below the bound of `position`."""
        self._available += available - position.available
        position.available = available

    def due_at_ms(self, now_ms: int) -> int:
        """Return the time at which the next frame is due (F4)."""
        if self._urgent or self.min_bytes <= 1 or self._available >= self.min_bytes:
            return now_ms
        return (now_ms if self._noticed_at_ms is None else self._noticed_at_ms) + self.max_wait_ms

    def take_turns(self, at_most: int) -> list[Position]:
        """Take the next positions off the ready list.

        A mark during the read puts a position back on the list (F1).  The positions that are taken
        are no longer urgent, unless they become urgent again during the read.
        """
        keys = list(islice(self._ready, at_most))
        for key in keys:
            del self._ready[key]
        self._urgent = self._urgent and bool(self._ready)
        return [self.positions[key] for key in keys]

    def current(self, position: Position) -> bool:
        """Whether the position was neither set again nor forgotten since it was taken."""
        return self.positions.get(position.key) is position

    def served(self, position: Position, next_offset: Offset) -> None:
        """Advance `position`, which was answered up to `next_offset`."""
        if not self.current(position):
            return
        assert next_offset >= position.next_offset, "F2"
        position.next_offset = next_offset
        position.announce = False
        self.weigh(position, 0)
        if position.end_offset and next_offset >= position.end_offset:
            self.drop(position.key)

    def again(self, position: Position) -> None:
        """Put `position`, which has not reached its bound, at the end of the ready list.

        The bytes that are left may be enough for `min_bytes`.
        """
        if self.current(position):
            self._ready[position.key] = None
            self._unweighed[position.key] = None

    def first_again(self, positions: list[Position]) -> None:
        """Put back positions that did not fit into the frame; they keep their turn."""
        kept = {each.key: None for each in positions if self.current(each)}
        self._ready = kept | self._ready
        self._unweighed |= kept

    def sent(self, payload_bytes: int, now_ms: int) -> None:
        """Note that a frame was sent: it uses credit."""
        self.credit -= payload_bytes
        self._noticed_at_ms = now_ms if self._ready else None

    def drop(self, key: PartitionKey) -> None:
        """Forget a position: it was replaced, finished, or answered with an error."""
        position = self.positions.pop(key, None)
        if position is not None:
            self.weigh(position, 0)
        self._ready.pop(key, None)
        self._unweighed.pop(key, None)
