"""Reads of the tier: the records `[offset, end)` of a partition as log batches, and offsets by
timestamp.

World-generic.  A read is planned on one snapshot: the reader takes the files whose statistics
overlap the range, then their row groups from cached footers.  It does not assume that files are
sorted or disjoint, because outside maintenance may have rewritten them (rule T10).  When row groups
overlap, a first pass reads only their offsets and shortens the range to the byte bound; a second
pass merges the rows by offset.

Invariants
  H1  Rows are returned in offset order and each offset once.  All rows of `[offset, next_offset)`
      that the table holds are returned.
  H2  `next_offset` > offset: gaps are covered (rule L12).  It never exceeds the table's end or
      `end`.
  H3  Memory is bounded: the cache holds at most `cache_bytes`, with what is being read ahead
      (tiering/read_ahead U1); a read holds its result and one row group besides.
  H4  A missing or damaged file raises `DamagedTierFile`; the caller reloads the table and plans the
      read again.  The file fails only its own range: a read that begins below it ends before it.
  H5  Two readers of the same row group share one download.
  H6  The reader forgets every file that the table no longer names.
  H7  A read that is late returns the rows found so far, if there are any.  Otherwise a client that
      timed out would request the same range again and again.  With a cache smaller than the range
      it would never get an answer.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from pk import errors
from pk.clock import Clock
from pk.tasks import TaskRegistry, awaited
from pk.tiering import accounting, convert, footers, row_groups, rowhash
from pk.tiering.damage import damaged
from pk.tiering.data_files import DataFile
from pk.tiering.footers import Footer, Group, UnreadableFile
from pk.tiering.layout import FILE_SCHEMA, SUM_MODULUS
from pk.tiering.objects import Executor, ObjectStore
from pk.tiering.read_ahead import ReadAhead, Unread
from pk.tiering.table import Snapshot
from pk.types import NONE, Epoch, Offset

T = TypeVar("T")

#: The largest share of the cache that read-ahead may take: the other rows in it were read.
_AHEAD_SHARE = 0.5
FOOTERS_BYTES_MAX = 64 * 1024 * 1024
#: Assumed minimum size of a row when a scattered range is cut.
_ROW_BYTES_LEAST = 16


def never() -> bool:
    """Returns False: the caller has no deadline."""
    return False


class FetchedBatches(NamedTuple):
    """The batches of `[offset, next_offset)`."""

    next_offset: Offset
    batches: list[bytes]


class TimeFound(NamedTuple):
    offset: Offset
    timestamp_ms: int
    leader_epoch: Epoch


class _Piece(NamedTuple):
    """The rows of one row group; `full`: the byte bound or the end of all rows was reached."""

    next_offset: Offset
    batches: list[bytes]
    full: bool
    waited: bool = False  #: whether its rows were not in memory


@dataclass(slots=True, frozen=True)
class TablePartition:
    """A partition in a table: the directory of its files, and the table's current snapshot."""

    home: str  #: directory of the table in the store
    partition: int
    snapshot: Snapshot


class _RowGroup(NamedTuple):
    """One row group of one file."""

    file: DataFile
    footer: Footer
    group: Group


class _Cache:
    """An LRU cache; the caller states the size of each item."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._reserved = 0  #: bytes of `bytes_max` for items that are being loaded
        self._items: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def get(self, key: Any) -> Any:
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def put(self, key: Any, value: Any, size: int) -> None:
        if size > self.bytes_max or key in self._items:
            return
        self._items[key] = (value, size)
        self.bytes += size
        self._evict()

    def reserve(self, size: int) -> None:
        """Keeps `size` bytes free from now on, instead of what was kept free before."""
        self._reserved = size
        self._evict()

    def _evict(self) -> None:
        while self._items and self.bytes + self._reserved > self.bytes_max:
            _, (_, gone) = self._items.popitem(last=False)
            self.bytes -= gone

    def evict_first(self, key: Any) -> None:
        """Makes an item the first that gives way to others."""
        if key in self._items:
            self._items.move_to_end(key, last=False)

    def __contains__(self, key: Any) -> bool:
        return key in self._items

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Drops every item whose key is `unwanted`."""
        for key in [key for key in self._items if unwanted(key)]:
            _, gone = self._items.pop(key)
            self.bytes -= gone


class TierReader:
    """Serves the cold reads of every topic on this node."""

    def __init__(
        self,
        store: ObjectStore,
        compute: Executor,
        clock: Clock,
        cache_bytes: int,
        ahead_bytes: int,
    ) -> None:
        self._store = store
        self._clock = clock
        self._compute = compute
        self._footers = _Cache(FOOTERS_BYTES_MAX)
        self._rows = _Cache(cache_bytes)
        self._loading = TaskRegistry(awaited)  #: keyed by what they load
        self._walks = TaskRegistry()  #: that look for row groups to read ahead, by client
        self._loads_ahead = TaskRegistry()
        self.ahead = ReadAhead(min(ahead_bytes, int(cache_bytes * _AHEAD_SHARE)))
        self.hits = 0
        self.misses = 0

    @property
    def cached_bytes(self) -> int:
        return self._rows.bytes

    def keep_files(self, home: str, files: Container[str]) -> None:
        """Forgets the files that the newest version of the table at `home` no longer names."""
        for cache in (self._footers, self._rows):
            cache.drop(lambda key: key[0] == home and key[1] not in files)

    async def fetch(
        self,
        place: TablePartition,
        offset: Offset,
        end: Offset,
        max_bytes: int,
        late: Callable[[], bool] = never,
        reader: int = 0,
    ) -> FetchedBatches:
        """Returns rows of `[offset, end)` up to about `max_bytes`, at least one row if there is
        one.  Once the read is `late` (H7), returns the rows found so far.

        reader: the client, so that its next read is recognised if it goes straight on

        Raises `UnknownTierRange` if the table does not cover `offset`, `DamagedTierFile` if the
        file that holds it is damaged, `TierUnavailable` if the store does not answer.
        """
        counters = place.snapshot.partition(place.partition)
        limit = min(end, counters.end)
        # offsets below the start are deleted; they are no gap
        if not counters.start <= offset < limit:
            raise errors.UnknownTierRange(
                f"the tier covers [{counters.start}, {counters.end}) of partition "
                f"{place.partition}, not offset {offset}"
            )
        missing = place.snapshot.rows_missing(place.partition)
        lost = accounting.lost_in(missing, offset, limit)
        if lost is not None and lost[0] == offset:  # T17
            version = place.snapshot.version
            raise accounting.data_loss(place.home, place.partition, version, *lost)
        limit = limit if lost is None else lost[0]  # the rows before it are read first
        batches: list[bytes] = []
        size = 0
        at = offset
        waited = False
        while at < limit:
            try:
                piece = await self._window(place, at, limit, max_bytes - size)
            except errors.PkError:
                if at == offset:
                    raise
                break  # rows below it are whole; the next read begins with the error (H4)
            at = piece.next_offset
            batches += piece.batches
            size += sum(map(len, piece.batches))
            waited = waited or piece.waited
            if piece.full or size >= max_bytes or late():
                break
        client = (reader, place.home, place.partition)
        now_ms = self._clock.monotonic_ms()
        served = self.ahead.served(client, offset, at, size, now_ms, waited=waited)
        for key in served.abandoned:
            self._rows.evict_first(key)
        if served.straight_on and at < limit and client not in self._walks:
            self._walks.spawn(self._read_ahead(client, place, limit), client)
        return FetchedBatches(at, batches)

    async def _window(
        self, place: TablePartition, at: Offset, limit: Offset, max_bytes: int
    ) -> _Piece:
        """Returns batches of `[at, next)`: at most one row group and `max_bytes`."""
        spots = await self._row_groups(place, at, limit)
        if not spots:
            return _Piece(limit, [], full=True)  # no row above: the gap reaches to the limit
        waited = any(_key(place, spot) not in self._rows for spot in spots)
        window_end = min(spots[0].group.max_offset + 1, limit)
        if len(spots) == 1:
            rows = await self._group(place, spots[0])
        else:
            rows, window_end = await self._merge(place, spots, at, window_end, max_bytes)
        piece = await self._compute(functools.partial(_encoded, rows, at, window_end, max_bytes))
        return piece._replace(waited=waited)

    async def _row_groups(
        self, place: TablePartition, at: Offset, limit: Offset
    ) -> list[_RowGroup]:
        """Returns the row group that holds the first row at or above `at`, and all row groups that
        overlap its range."""
        files = place.snapshot.covering(place.partition, at, limit)
        found: list[_RowGroup] = []
        window_end = limit
        for file in files:
            if found and file.min_offset >= window_end:
                break
            footer = await self._footer(place, file)
            for group in footer.groups:
                if group.max_offset >= at and group.min_offset < limit and group.rows:
                    found.append(_RowGroup(file, footer, group))
            if found:
                found.sort(key=lambda spot: (spot.group.min_offset, spot.group.max_offset))
                window_end = min(found[0].group.max_offset + 1, limit)
        return [spot for spot in found if spot.group.min_offset < window_end]

    async def _merge(
        self,
        place: TablePartition,
        spots: Sequence[_RowGroup],
        at: Offset,
        window_end: Offset,
        max_bytes: int,
    ) -> tuple[pa.RecordBatch, Offset]:
        """Merges the rows of overlapping row groups, cut to what fits (rule T10, H3)."""
        wanted = []
        row_bytes = _ROW_BYTES_LEAST
        for spot in spots:
            rows = await self._group(place, spot)
            offsets = rows.column("offset").to_numpy()
            wanted.append(offsets[(offsets >= at) & (offsets < window_end)].copy())
            row_bytes = max(row_bytes, rows.nbytes // max(1, rows.num_rows))
        offsets = np.unique(np.concatenate(wanted))
        rows_max = max(1, max_bytes // row_bytes)
        next_offset = window_end
        if len(offsets) > rows_max:
            next_offset = int(offsets[rows_max - 1]) + 1
        parts = []
        for spot, mine in zip(spots, wanted, strict=True):
            if len(mine) and mine.min() < next_offset:
                rows = await self._group(place, spot)
                parts.append(row_groups.clipped(rows, at, next_offset))
        found = await self._compute(lambda: row_groups.merge(parts, at, next_offset))
        return _NO_ROWS if found is None else found, next_offset

    # -- what is in memory -------------------------------------------------------------------------

    async def _footer(self, place: TablePartition, file: DataFile) -> Footer:
        key = (place.home, file.path)
        cached: Footer | None = self._footers.get(key)
        if cached is None:
            work = functools.partial(self._load_footer, place, file, key)
            cached = await self._once(("footer", key), work)
        return cached

    async def _load_footer(self, place: TablePartition, file: DataFile, key: Any) -> Footer:
        tail = await self._get(place, file, *footers.tail_part(file.size))
        try:
            longer = footers.longer_tail(tail, file.size)
            if longer is not None:
                tail = await self._get(place, file, *longer)
            footer = await self._compute(lambda: footers.open_footer(file, tail))
        except UnreadableFile as cause:
            raise self._damaged(place, file, str(cause)) from cause
        self._footers.put(key, footer, footer.size)
        return footer

    async def _group(self, place: TablePartition, spot: _RowGroup) -> pa.RecordBatch:
        key = _key(place, spot)
        cached = self._rows.get(key)
        if cached is not None:
            self.hits += 1
            return cached
        return await self._once(("rows", key), lambda: self._load_group(place, spot, key))

    async def _load_group(self, place: TablePartition, spot: _RowGroup, key: Any) -> pa.RecordBatch:
        group = spot.group
        self.misses += 1
        data = await self._get(place, spot.file, group.start, group.size)
        rows = await self._decoded(
            place, spot, lambda: row_groups.read_group(spot.footer, group, data, spot.file.size)
        )
        self._rows.put(key, rows, rows.nbytes)
        return rows

    async def _times(self, place: TablePartition, spot: _RowGroup) -> pa.RecordBatch:
        """Returns the timestamps of the rows of a row group, from its rows if they are cached.
        They are not cached themselves: the next look-up concerns another row group."""
        key = _key(place, spot)
        cached = self._rows.get(key)
        if cached is not None:
            self.hits += 1
            return cached
        return await self._once(("times", key), lambda: self._load_times(place, spot))

    async def _load_times(self, place: TablePartition, spot: _RowGroup) -> pa.RecordBatch:
        group = spot.group
        self.misses += 1
        parts = [await self._get(place, spot.file, *part) for part in group.times]
        return await self._decoded(
            place, spot, lambda: row_groups.read_times(spot.footer, group, parts, spot.file.size)
        )

    async def _decoded(
        self, place: TablePartition, spot: _RowGroup, work: Callable[[], pa.RecordBatch]
    ) -> pa.RecordBatch:
        try:
            return await self._compute(work)
        except UnreadableFile as cause:
            raise self._damaged(place, spot.file, str(cause)) from cause

    async def _get(self, place: TablePartition, file: DataFile, start: int, size: int) -> bytes:
        try:
            return await self._store.get_range(f"{place.home}/{file.path}", start, size)
        except FileNotFoundError:
            raise self._damaged(place, file, "it is not in the store") from None

    def _damaged(self, place: TablePartition, file: DataFile, why: str) -> errors.DamagedTierFile:
        return damaged(f"{self._store.url}/{place.home}", file, place.partition, why)

    async def verify(self, place: TablePartition, file: DataFile) -> None:
        """Reads a whole file without the cache.  Raises `DamagedTierFile`, `TierUnavailable`."""
        key = (place.home, file.path)
        footer = await self._load_footer(place, file, key)
        for group in footer.groups:
            await self._load_group(place, _RowGroup(file, footer, group), (*key, group.number))

    async def row_sum(self, place: TablePartition, file: DataFile) -> int:
        """Reads a whole file and returns the sum of its row hashes (rule T2).  Raises
        `DamagedTierFile`, `TierUnavailable`."""
        footer = await self._footer(place, file)
        total = 0
        for group in footer.groups:
            rows = await self._group(place, _RowGroup(file, footer, group))
            total += await self._compute(functools.partial(rowhash.row_sum, rows))
        return total % SUM_MODULUS

    async def _once(self, key: Any, work: Callable[[], Awaitable[T]]) -> T:
        """Loads a key once (H5): a second caller waits for the first load, and a caller that is
        cancelled does not stop it."""
        task: asyncio.Task[T] | None = self._loading.get(key)
        if task is None:
            task = self._loading.spawn(_run(work), key)
        return await asyncio.shield(task)

    async def _read_ahead(self, client: Hashable, place: TablePartition, limit: Offset) -> None:
        """Loads the row groups that the client reads next, as far as `ahead` allows it."""
        try:
            while (at := self.ahead.position(client)) is not None and at < limit:
                # the footers are read one row group further than the window
                spots = await self._row_groups(place, at, limit)
                for spot in spots:
                    if spot.group.min_offset < at and _key(place, spot) in self._rows:
                        continue  # the client is reading it
                    if not self._load_ahead(client, place, spot):
                        return
                self.ahead.passed(client, spots[0].group.max_offset + 1 if spots else limit)
        except errors.PkError:
            pass  # the client's own read will meet the error

    def _load_ahead(self, client: Hashable, place: TablePartition, spot: _RowGroup) -> bool:
        key, group = _key(place, spot), spot.group
        there = key in self._rows
        unread = Unread(key, group.max_offset, group.decoded, 0 if there else group.size)
        if not self.ahead.take(client, unread):
            return False
        self._rows.reserve(self.ahead.loading_bytes)
        if self.ahead.is_loading(key) and key not in self._loads_ahead:
            self._loads_ahead.spawn(self._landed(place, spot, key), key)
        return True

    async def _landed(self, place: TablePartition, spot: _RowGroup, key: Hashable) -> None:
        try:
            await self._group(place, spot)
        except errors.PkError:
            pass  # the client's own read will meet the error
        finally:
            self.ahead.landed(key)
            self._rows.reserve(self.ahead.loading_bytes)
            if key not in self.ahead:
                self._rows.evict_first(key)

    async def close(self) -> None:
        """Cancels the loads that run in advance."""
        await self._walks.close()
        await self._loads_ahead.close()
        await self._loading.close()

    # -- by time -----------------------------------------------------------------------------------

    async def offset_for_time(
        self, place: TablePartition, timestamp_ms: int, from_offset: Offset
    ) -> TimeFound | None:
        """Returns the smallest offset at or above `from_offset` whose timestamp is at least
        `timestamp_ms` (T11)."""
        end = place.snapshot.partition(place.partition).end
        best: TimeFound | None = None
        for file in place.snapshot.covering(place.partition, from_offset, end):
            if best is not None and file.min_offset > best.offset:
                break
            if file.max_timestamp_ms < timestamp_ms:
                continue
            footer = await self._footer(place, file)
            for group in footer.groups:
                if group.max_timestamp_ms < timestamp_ms or group.max_offset < from_offset:
                    continue
                if best is not None and group.min_offset > best.offset:
                    continue
                rows = await self._times(place, _RowGroup(file, footer, group))
                best = _earlier(best, _first_at(rows, timestamp_ms, from_offset))
        return best


def _key(place: TablePartition, spot: _RowGroup) -> tuple[str, str, int]:
    return place.home, spot.file.path, spot.group.number


def _encoded(rows: pa.RecordBatch, at: Offset, end: Offset, max_bytes: int) -> _Piece:
    """Encodes rows of `[at, end)` as log batches, cut where the byte bound is reached."""
    rows = row_groups.in_offset_order(rows, at, end)
    count = convert.fitting(rows, max_bytes) if rows.num_rows else 0
    full = count < rows.num_rows
    if full:
        rows = rows.slice(0, count)
        end = int(rows.column("offset")[-1].as_py()) + 1
    return _Piece(end, list(convert.batches_of(rows)), full)


async def _run(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _first_at(rows: pa.RecordBatch, timestamp_ms: int, from_offset: Offset) -> TimeFound | None:
    stamps = rows.column("timestamp").view(pa.int64()).to_numpy()
    offsets = rows.column("offset").to_numpy()
    fits = np.flatnonzero((stamps >= timestamp_ms * 1000) & (offsets >= from_offset))
    if not len(fits):
        return None
    row = int(fits[np.argmin(offsets[fits])])
    epoch = rows.column("leader_epoch")[row].as_py()
    return TimeFound(int(offsets[row]), int(stamps[row]) // 1000, NONE if epoch is None else epoch)


def _earlier(one: TimeFound | None, other: TimeFound | None) -> TimeFound | None:
    if one is None or other is None:
        return one or other
    return min(one, other)


_NO_ROWS = pa.RecordBatch.from_arrays(
    [pa.array([], field.type) for field in FILE_SCHEMA], schema=FILE_SCHEMA
)
