"""What was fetched and not yet handed out: frames, the ones being decoded, rows that were put back.

The consumer's loop appends to `ready`; everything else here is the reader's alone.  Each item
carries the id of the position it belongs to; one whose partition has another id by now is dropped
when it is come across, and its credit given back (client/fetcher F4).

Invariants
  B1  rows of a partition come out in the order they were fetched, whatever is paused meanwhile:
      what is passed over stays where it is.
  B2  the position of a partition is where the reader stands: behind the last row taken, or before
      the first one put back.
  B3  where the reader stood is known until it chooses another place: a log that was truncated is
      read on from there, however late that is told (KIP-320).
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
    following: int  #: the position behind them


class UndecodableBatch(Exception):
    """A batch that cannot be read."""

    def __init__(self, place: TopicPartition, position: int, cause: errors.PkError) -> None:
        super().__init__(place, position, cause)
        self.place = place
        self.position = position
        self.cause = cause


class _OpenFetch(NamedTuple):
    """A frame being decoded."""

    place: TopicPartition
    position_id: int
    fetched: CompletedFetch
    batches: Batches


class FetchBuffer:
    """`current` gives a partition's position id; `consumed` gives a frame's credit back."""

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
        """The next rows of a partition that is not paused, at most `limit`; None if none is here.

        Raises `UndecodableBatch`; the rows before were taken, those behind are still there.
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
        """These come next again; returns their first offset."""
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
        """The next rows of an open frame; None when it is through."""
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
        """Whether a frame came that may be read."""
        return self._first(self._ready, paused) is not None

    def _first(self, held: deque[Any], paused: Collection[TopicPartition] | None) -> int | None:
        """Where the first is that is neither paused nor void (None: all are paused); what is void
        is dropped.

        By index, because the loop may append to `ready` meanwhile.
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
        """Drop everything that is void, and forget the positions of what is not assigned."""
        for held in (self._ready, self._opened, self._rows):
            self._first(held, None)
        for place in list(self._positions):
            if self._current(place) is None:
                del self._positions[place]

    def forget(self) -> None:
        """Everything was assigned anew."""
        self.purge()
        self._positions.clear()

    # -- positions ---------------------------------------------------------------------------------

    def position(self, place: TopicPartition) -> int | None:
        """Where the reader stands; None if that is not known yet."""
        current = self._current(place)
        if current is None:
            return None
        position_id, offset = self._positions.get(place, (None, 0))
        if position_id == current:
            return offset
        for index in range(len(self._ready)):
            fetched = self._ready[index]
            if fetched.place == place and fetched.position_id == current:
                return fetched.position
        return None

    def last(self, place: TopicPartition) -> int | None:
        """Where the reader stood, be it before the present position."""
        found = self._positions.get(place)
        if found is not None:
            return found[1]
        for index in range(len(self._ready)):
            if self._ready[index].place == place:
                return self._ready[index].position
        return None

    def begin(self, place: TopicPartition, position_id: int, offset: int | None) -> None:
        """A seek; None if the offset is to be looked up."""
        self.purge()
        self._positions.pop(place, None)
        if offset is not None:
            self._positions[place] = (position_id, offset)
