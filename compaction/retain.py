"""Decides which rows and batches a cleaning keeps, in columns.

Pure.  A cleaning reads a log, or one partition of a table, from its start to its end in offset
order, in blocks of whole batches or rows.  The offset map (compaction/offset_map.py) has the newest
offset of each key in the dirty range.

A *row* below the end of the cleaning
   #  row                                                      is
   A  of an aborted transaction                                dropped
   B  without a key, from before the topic was compacted       dropped
   C  the map has a newer offset of its key                    dropped
   D  a tombstone with a horizon that has passed, settled      dropped
   E  a tombstone without a horizon, settled                   kept, and gets a horizon
   F  any other                                                kept
A row at or above the end is kept unchanged.

A *batch* that lies below the end
   H  has rows that stay                                       kept, with these rows
   I  has none, and is in the window of a live producer        kept as an empty header (rule L14)
   J  has none                                                 dropped
A *control batch* that lies below the end
   K  ends a transaction of which a batch is kept              kept
   L  has no horizon; else as M and N; settled                 kept, and gets a horizon
   M  has the current epoch of a live producer                 kept
   N  has a horizon that has passed, settled                   dropped
   O  any other                                                kept

*Settled* (rule C4): after the cleaning no copy of the partition, in the table or in the log of any
assigned replica, has an older row of that key or a batch of that transaction.  These are the
offsets below `Cleaning.settled_end`, and in a log only batches that lie wholly below it, because a
batch has one horizon.  The horizon is counted from `Cleaning.deadline_ms`, when the last of the
older rows has disappeared.  A cleaning without a trusted time (rule L10) does D, E, L and N for no
row.

Invariants
  D1  Offsets and order do not change.  A kept row is unchanged, except for its horizon.
  D2  A horizon that is set is never moved.
  D3  A repetition of the cleaning keeps every row and batch, and moves no horizon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pk.compaction.offset_map import I64, Bools, OffsetMap
from pk.log.aborted import AbortedRanges
from pk.log.batch import Header
from pk.log.control_rows import Marker
from pk.log.encoding import fixed_column
from pk.log.producers import ProducerStateEntry
from pk.types import NONE, Offset

#: The horizon of a row or batch that has none.
NO_HORIZON = -(2**63)


class Cleaning(NamedTuple):
    """The bounds and the times of one cleaning."""

    end: Offset  #: where the offset map ends; no row from here on is touched
    #: the offset below which every copy is cleaned: in a log, the lowest cleaned offset of the
    #: other assigned replicas; in a table, the lowest local_log_start of all of them (rule C4)
    settled_end: Offset
    delete_retention_ms: int
    #: when the cleaning began, by the earliest clock that may be the median; None = not known
    now_ms: int | None
    #: by the latest such clock the result is in place before this time, or is discarded; None as
    #: for now_ms
    deadline_ms: int | None

    def settled(self, offsets: I64) -> Bools:
        """Return which offsets are settled after the cleaning."""
        found: Bools = offsets < min(self.end, self.settled_end)
        return found if self.now_ms is not None else np.zeros(len(offsets), bool)

    def passed(self, horizons: I64) -> Bools:
        """Return which horizons are set and have passed."""
        if self.now_ms is None:
            return np.zeros(len(horizons), bool)
        found: Bools = (horizons != NO_HORIZON) & (horizons < self.now_ms)
        return found

    @property
    def new_horizon(self) -> int:
        assert self.now_ms is not None
        assert self.deadline_ms is not None
        assert self.deadline_ms >= self.now_ms
        return self.deadline_ms + self.delete_retention_ms


# -- rows ------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a block, in offset order."""

    offsets: I64
    keys: pa.Array  #: binary
    tombstones: Bools  #: the value is null
    horizons: I64  #: NO_HORIZON = none
    aborted: Bools
    settled: Bools  #: see the module


class RetainedRows(NamedTuple):
    """What a cleaning keeps of a block of rows."""

    keep: Bools
    horizons: I64  #: of every row of the block, kept or not
    aborted: int  #: how many rows were dropped, by reason
    without_key: int
    superseded: int
    tombstones: int
    forgotten_end: Offset  #: above the highest tombstone that was dropped by D; 0 = none was


def rows_of_table(rows: pa.RecordBatch, cleaning: Cleaning) -> Rows:
    """Return rows of a table's file as `Rows`.

    rows: the columns `offset`, `key`, `tombstone` (whether the value is null) and
        `delete_horizon_ms` (null = none), in offset order
    """
    offsets: I64 = rows.column("offset").to_numpy()
    horizons: I64 = pc.fill_null(rows.column("delete_horizon_ms"), NO_HORIZON).to_numpy()
    return Rows(
        offsets,
        rows.column("key"),
        rows.column("tombstone").to_numpy(zero_copy_only=False),
        horizons,
        np.zeros(len(offsets), bool),
        cleaning.settled(offsets),
    )


def add_dirty_rows(
    offset_map: OffsetMap, rows: Rows, first_dirty: Offset, end: Offset
) -> Offset | None:
    """Add the rows with offsets in `[first_dirty, end)` to the map, except those that A and B
    drop (rule C1).

    Returns None if all of them were added.  Otherwise the map is full, and the result is the offset
    of the first row that is not in it: the cleaning ends there.
    """
    wanted = (rows.offsets >= first_dirty) & (rows.offsets < end)
    wanted &= ~rows.aborted & _with_key(rows.keys)
    offsets = rows.offsets[wanted]
    keys = rows.keys if wanted.all() else rows.keys.filter(pa.array(wanted))
    taken = offset_map.add(keys, offsets)
    return int(offsets[taken]) if taken < len(offsets) else None


def retain_rows(rows: Rows, offset_map: OffsetMap, cleaning: Cleaning) -> RetainedRows:
    """Decide which rows of a block stay, and their horizons (A–F).

    offset_map: has all rows of the dirty range that A and B do not drop, see `add_dirty_rows`
    """
    below: Bools = rows.offsets < cleaning.end
    aborted = below & rows.aborted
    left = below & ~aborted
    without_key = left & ~_with_key(rows.keys)
    left &= ~without_key
    superseded = _superseded(rows, left, offset_map)
    left &= ~superseded
    aging = left & rows.tombstones & rows.settled
    passed = aging & cleaning.passed(rows.horizons)
    horizons = rows.horizons
    fresh = aging & (horizons == NO_HORIZON)
    if fresh.any():
        horizons = np.where(fresh, cleaning.new_horizon, horizons)
    return RetainedRows(
        ~(aborted | without_key | superseded | passed),
        horizons,
        int(aborted.sum()),
        int(without_key.sum()),
        int(superseded.sum()),
        int(passed.sum()),
        int(rows.offsets[passed].max()) + 1 if passed.any() else 0,
    )


def _superseded(rows: Rows, wanted: Bools, offset_map: OffsetMap) -> Bools:
    """Return which of the `wanted` rows the map has a newer offset for (C)."""
    start, end = offset_map.covered(rows.offsets)
    found = wanted.copy()
    found[start:end] &= ~offset_map.newest(rows.offsets[start:end])
    for part in (slice(0, start), slice(end, len(found))):  # the map has not got these rows
        asked = np.flatnonzero(wanted[part]) + part.start
        if len(asked):
            latest = offset_map.latest(rows.keys.take(fixed_column(asked)))
            found[asked] = latest > rows.offsets[asked]
    return found


def _with_key(keys: pa.Array) -> Bools:
    if not keys.null_count:
        return np.ones(len(keys), bool)
    found: Bools = keys.is_valid().to_numpy(zero_copy_only=False)
    return found


# -- batches of a log ------------------------------------------------------------------------------


class BatchColumns(NamedTuple):
    """The headers of a block of whole batches, in offset order."""

    base_offsets: I64
    last_offsets: I64
    rows: I64  #: rows of data: 0 for a control batch
    producer_ids: I64
    producer_epochs: I64
    transactional: Bools  #: of a transaction; not a control batch
    control: Bools
    aborted: Bools
    horizons: I64

    @classmethod
    def of(cls, headers: Sequence[Header], aborted: AbortedRanges) -> BatchColumns:
        """Return the columns of `headers`.

        aborted: every aborted transaction with records below the end of the cleaning, also those
            whose markers lie above it
        """
        control = np.array([header.control for header in headers], bool)
        return cls(
            np.array([header.base_offset for header in headers], np.int64),
            np.array([header.last_offset for header in headers], np.int64),
            np.where(control, 0, [header.record_count for header in headers]).astype(np.int64),
            np.array([header.producer_id for header in headers], np.int64),
            np.array([header.producer_epoch for header in headers], np.int64),
            np.array([header.transactional for header in headers], bool) & ~control,
            control,
            np.array([aborted.contains(header) for header in headers], bool),
            np.array(
                [h.base_timestamp if h.has_delete_horizon else NO_HORIZON for h in headers],
                np.int64,
            ),
        )

    def whole(self, cleaning: Cleaning) -> Bools:
        """Return which batches lie wholly below the end of the cleaning."""
        found: Bools = self.last_offsets < cleaning.end
        return found

    def rows_of(self, offsets: I64, keys: pa.Array, tombstones: Bools, cleaning: Cleaning) -> Rows:
        """Return the rows of the data batches, joined in their order, as `Rows`."""
        assert len(offsets) == int(self.rows.sum())
        return Rows(
            offsets,
            keys,
            tombstones,
            np.repeat(self.horizons, self.rows),
            np.repeat(self.aborted, self.rows),
            np.repeat(cleaning.settled(self.last_offsets), self.rows),
        )


class MarkerColumns(NamedTuple):
    """The rows of the control batches of a block, in their order."""

    batches: I64  #: the index of the row's batch in the block
    producer_ids: I64
    epochs: I64

    @classmethod
    def of(cls, markers: Iterable[tuple[int, Marker]]) -> MarkerColumns:
        """Return the columns of markers, each with the index of its batch in the block."""
        found = [(batch, marker.producer_id, marker.producer_epoch) for batch, marker in markers]
        table = np.array(found, np.int64).reshape(len(found), 3)
        return cls(table[:, 0], table[:, 1], table[:, 2])


class LiveProducers(NamedTuple):
    """The producers that a log knows, and the batches that their windows need (rule L14).

    It must not be older than the end of the cleaning: of a producer whose last batch it lacks, the
    cleaning would drop that batch.
    """

    ids: I64  #: ascending
    epochs: I64
    windows: I64  #: base offsets of the batches in the windows

    @classmethod
    def of(cls, producers: Sequence[tuple[int, ProducerStateEntry]]) -> LiveProducers:
        """Return the columns of `Producers.items()`."""
        return cls(
            np.array([each for each, _ in producers], np.int64),
            np.array([entry.epoch for _, entry in producers], np.int64),
            np.array([b.base_offset for _, entry in producers for b in entry.batches], np.int64),
        )

    def need(self, markers: MarkerColumns) -> Bools:
        """Return which markers have the current epoch of a live producer (M).

        Without such a marker a replay of the log would find an older epoch, and the log would
        accept a late batch of it (rule X6).
        """
        at = np.searchsorted(self.ids, markers.producer_ids)
        found: Bools = np.zeros(len(at), bool)
        inside = np.flatnonzero(at < len(self.ids))
        known = at[inside]
        found[inside] = (self.ids[known] == markers.producer_ids[inside]) & (
            markers.epochs[inside] >= self.epochs[known]
        )
        return found


class OpenTransactions:
    """The transactions of which the cleaning has kept a batch and not yet read the marker.

    One object serves all blocks of a cleaning.
    """

    def __init__(self) -> None:
        self._producer_ids: I64 = np.zeros(0, np.int64)
        self._epochs: I64 = np.zeros(0, np.int64)

    def ended(self, batches: BatchColumns, keep: Bools, markers: MarkerColumns) -> Bools:
        """Return which markers of a block end a transaction with a kept batch (K).

        A marker whose epoch is not above that of the transaction is a repetition of an earlier
        marker and ends nothing (rule X1).  The marker behind it does.
        """
        kept = np.flatnonzero(keep & batches.transactional)
        earlier, count = len(self._producer_ids), len(markers.batches)
        ids = np.concatenate([self._producer_ids, batches.producer_ids[kept], markers.producer_ids])
        epochs = np.concatenate([self._epochs, batches.producer_epochs[kept], markers.epochs])
        at = np.concatenate([np.full(earlier, NONE), kept, markers.batches])
        is_marker = np.zeros(len(ids), bool)
        is_marker[len(ids) - count :] = True

        order: I64 = np.lexsort((at, ids))
        places = np.arange(len(order))
        batch_at = np.maximum.accumulate(np.where(is_marker[order], NONE, places))
        open_batch = order[np.maximum(batch_at, 0)]  # the last batch before each place
        has_batch = (batch_at != NONE) & (ids[open_batch] == ids[order])
        repeated = is_marker[order] & has_batch & (epochs[order] <= epochs[open_batch])
        order = order[~repeated]

        same = ids[order[1:]] == ids[order[:-1]]
        closed = np.zeros(len(ids), bool)
        closed[order[1:]] = same & is_marker[order[1:]] & ~is_marker[order[:-1]]
        newest = order[~np.append(same, False)] if len(order) else order
        still_open = newest[~is_marker[newest]]
        self._producer_ids, self._epochs = ids[still_open], epochs[still_open]
        return closed[len(ids) - count :]


class RetainedBatches(NamedTuple):
    """What a cleaning keeps of a block of batches."""

    keep: Bools  #: the others are dropped
    empty: Bools  #: kept, without a row: an empty header, or already one
    horizons: I64  #: of every batch of the block, kept or not


def retain_batches(
    batches: BatchColumns,
    markers: MarkerColumns,
    rows: RetainedRows,
    tombstones: Bools,
    live: LiveProducers,
    open_transactions: OpenTransactions,
    cleaning: Cleaning,
) -> RetainedBatches:
    """Decide which batches of a block stay, and their horizons (H–O).

    rows: what `retain_rows` decided about the rows of the data batches
    tombstones: as in `Rows`
    """
    count = len(batches.rows)
    owner = np.repeat(np.arange(count), batches.rows)
    left = np.bincount(owner[rows.keep], minlength=count)
    whole = batches.whole(cleaning)
    in_window = np.isin(batches.base_offsets, live.windows)
    keep: Bools = batches.control | (left > 0) | in_window | ~whole

    horizons = batches.horizons.copy()
    aging = rows.keep & tombstones & (rows.horizons != NO_HORIZON)
    horizons[owner[aging]] = rows.horizons[aging]

    needed = open_transactions.ended(batches, keep, markers)
    free = batches.control & cleaning.settled(batches.last_offsets)
    free[markers.batches[needed]] = False  # K
    passed = free & cleaning.passed(horizons)
    fresh = free & (horizons == NO_HORIZON)  # L
    if fresh.any():
        horizons[fresh] = cleaning.new_horizon
    passed[markers.batches[live.need(markers)]] = False  # M
    keep &= ~passed
    return RetainedBatches(keep, keep & ~batches.control & (left == 0), horizons)
