"""The fetched data that was not handed out yet: frames, open frames, and rows that were put back.

The consumer's loop appends to `ready`.  Only the reader uses everything else here.  Each item
carries the id of its position.  An item is void if its partition has another position id by now
(client/fetcher F4).  The reader drops a void item when it meets the item, and returns its credit to
the broker.

Invariants
  B1  Rows of a partition come out in the order they were fetched.  Items of a paused partition are
      passed over and stay where they are.
  B2  The position of a partition is the reader's position: behind the last row taken, or before the
      first row that was put back.
  B3  The reader's last position is kept until the reader chooses another one.  After a truncation,
      reading continues from there, even if the truncation is reported late (KIP-320).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from pk import errors
from pk.client.fetcher_events import CompletedFetch
from pk.types import TopicPartition

#: `(next position, rows or None)` of each batch of a frame.
Batches = Iterator[tuple[int, pa.RecordBatch | None]]


class FetchedRows(NamedTuple):
    """Decoded rows of one partition."""

    place: TopicPartition
    position_id: int
    rows: pa.RecordBatch
    following: int  #: the position behind these rows


class UndecodableBatch(Exception):
    """A batch that cannot be decoded."""

    def __init__(self, place: TopicPartition, position: int, cause: errors.PkError) -> None:
        super().__init__(place, position, cause)
        self.place = place
        self.position = position
        self.cause = cause


class _OpenFetch(NamedTuple):
    """A frame that is being decoded."""

    place: TopicPartition
    position_id: int
    fetched: CompletedFetch
    batches: Batches


class FetchBuffer:
    """The buffer of one consumer.  `current` returns a partition's position id; `consumed` returns
    the credit of a frame to its broker.
    """

    def __init__(
        self,
        ready: deque[CompletedFetch],
        current: Callable[[TopicPartition], int | None],
        decoded: Callable[[CompletedFetch], Batches],
        consumed: Callable[[CompletedFetch], None],
    ) -> None:
        self._ready = ready
        self._opened: deque[_OpenFetch] = deque()
        self._rows: deque[FetchedRows] = deque()
        self._current = current
        self._decoded = decoded
        self._consumed = consumed
        self._positions: dict[TopicPartition, tuple[int, int]] = {}  #: position id, offset

    # -- rows --------------------------------------------------------------------------------------

    def take(
        self, paused: Collection[TopicPartition], limit: int | None = None
    ) -> FetchedRows | None:
        """Return the next rows of a partition that is not paused, at most `limit`; None if there
        are none.

        Raises `UndecodableBatch`.  The rows before that batch were returned earlier; those behind
        it stay in the buffer.
        """
        index = self._first(self._rows, paused)
        if index is not None:
            found = self._rows[index]
            del self._rows[index]
        else:
            decoded = self._decode(paused)
            if decoded is None:
                return None
            found = decoded
        if limit is not None and found.rows.num_rows > limit:
            following = self.put_back(found._replace(rows=found.rows.slice(limit)))
            found = found._replace(rows=found.rows.slice(0, limit), following=following)
        self._positions[found.place] = (found.position_id, found.following)
        return found

    def put_back(self, rows: FetchedRows) -> int:
        """Put rows back so that `take` returns them next; returns their first offset."""
        self._rows.appendleft(rows)
        first = int(rows.rows.column("offset")[0].as_py())
        self._positions[rows.place] = (rows.position_id, first)
        return first

    def _decode(self, paused: Collection[TopicPartition]) -> FetchedRows | None:
        while True:
            index = self._first(self._opened, paused)
            if index is None:
                waiting = self._first(self._ready, paused)
                if waiting is None:
                    return None
                fetched = self._ready[waiting]
                del self._ready[waiting]
                index = len(self._opened)
                opened = _OpenFetch(
                    fetched.place, fetched.position_id, fetched, self._decoded(fetched)
                )
                self._opened.append(opened)
            found = self._read_on(self._opened[index])
            if found is not None:
                return found
            self._drop(self._opened, index)

    def _read_on(self, opened: _OpenFetch) -> FetchedRows | None:
        """Return the next rows of an open frame; None at its end."""
        place, position_id = opened.place, opened.position_id
        try:
            for following, rows in opened.batches:
                self._positions[place] = (position_id, following)
                if rows is not None:
                    return FetchedRows(place, position_id, rows, following)
        except errors.PkError as cause:
            at, position = self._positions.get(place, (position_id, opened.fetched.position))
            if at != position_id:
                position = opened.fetched.position
            raise UndecodableBatch(place, position, cause) from cause
        return None

    def waits(self, paused: Collection[TopicPartition]) -> bool:
        """Return whether a frame of a partition that is not paused has arrived."""
        return self._first(self._ready, paused) is not None

    def _first(self, held: deque[Any], paused: Collection[TopicPartition] | None) -> int | None:
        """Return the index of the first item that is neither paused nor void.  Void items are
        dropped.  `paused`=None counts all partitions as paused.

        Items are addressed by index, because the loop may append to `ready` meanwhile.
        """
        index = 0
        while index < len(held):
            item = held[index]
            if item.position_id != self._current(item.place):
                self._drop(held, index)
            elif paused is None or item.place in paused:
                index += 1
            else:
                return index
        return None

    def _drop(self, held: deque[Any], index: int) -> None:
        item = held[index]
        del held[index]
        if held is self._opened:
            self._consumed(item.fetched)
        elif held is self._ready:
            self._consumed(item)
            self._positions.setdefault(item.place, (item.position_id, item.position))  # B3

    def purge(self) -> None:
        """Drop every void item, and the positions of partitions that are not assigned."""
        for held in (self._ready, self._opened, self._rows):
            self._first(held, None)
        for place in list(self._positions):
            if self._current(place) is None:
                del self._positions[place]

    def forget(self) -> None:
        """Drop all void items and all positions, after a new assignment."""
        self.purge()
        self._positions.clear()

    # -- positions ---------------------------------------------------------------------------------

    def position(self, place: TopicPartition) -> int | None:
        """Return the reader's position; None if it is not known yet."""
        found = self.position_and_id(place)
        return None if found is None else found[0]

    def position_and_id(self, place: TopicPartition) -> tuple[int, int] | None:
        """Return the reader's position and its id; None if it is not known yet."""
        current = self._current(place)
        if current is None:
            return None
        position_id, offset = self._positions.get(place, (None, 0))
        if position_id == current:
            return offset, current
        for index in range(len(self._ready)):
            fetched = self._ready[index]
            if fetched.place == place and fetched.position_id == current:
                return fetched.position, current
        return None

    def last(self, place: TopicPartition) -> int | None:
        """Return the reader's last known position, possibly from before the current position id."""
        found = self._positions.get(place)
        if found is not None:
            return found[1]
        for index in range(len(self._ready)):
            if self._ready[index].place == place:
                return self._ready[index].position
        return None

    def begin(self, place: TopicPartition, position_id: int, offset: int | None) -> None:
        """Begin at the position of a seek; `offset`=None if the offset must be looked up."""
        self.purge()
        self._positions.pop(place, None)
        if offset is not None:
            self._positions[place] = (position_id, offset)
