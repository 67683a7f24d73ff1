"""A log of batches in memory that is cleaned, and the naive oracle of its readers.

The oracle keeps every record of the history and decides with dictionaries.  The log is replayed
with the code that opens a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pk.compaction import retain
from pk.compaction.offset_map import OffsetMap, key_hasher
from pk.compaction.retain import (
    NO_HORIZON,
    BatchColumns,
    Cleaning,
    LiveProducers,
    MarkerColumns,
    OpenTransactions,
)
from pk.log import batch as batches
from pk.log.aborted import AbortedRanges
from pk.log.batch import Header
from pk.log.control_rows import Marker
from pk.log.producers import Producers
from pk.types import NONE, AbortedTransaction

RETENTION_MS = 100
ROOMY = 1 << 20
HASH = key_hasher(bytes(range(32)))


class Record(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None


class Batch(NamedTuple):
    """A batch of the log: its header, and the records or markers that are left."""

    header: Header
    records: tuple[Record, ...]
    markers: tuple[Marker, ...] = ()


def header(offset: int, count: int, flags: int, producer: int, epoch: int, sequence: int) -> Header:
    return Header(
        offset, 64, 0, batches.MAGIC, 0, flags, epoch, count - 1, 0, 0, producer, sequence, count
    )


class History:
    """Every record that producers wrote, and the log that is left of them.

    Producer 0 has no id, 1 and 2 are idempotent, the others write transactions.
    """

    def __init__(self) -> None:
        self.log: list[Batch] = []
        self.every: dict[int, Record] = {}
        self.committed: set[int] = set()
        self.open: dict[int, list[int]] = {}  #: producer → offsets of its open transaction
        self.epochs = dict.fromkeys(range(6), 0)
        self.sequences = dict.fromkeys(range(6), 0)
        self.last_marker: dict[int, Marker] = {}
        self.state = Producers()
        self.aborted: list[AbortedTransaction] = []
        self.forgotten: set[int] = set()
        self.end = 0
        self.cleaned_end = 0
        self.first_cleaned_ms: dict[int, int] = {}  #: offset → when a cleaning first kept it
        self.now_ms = 1000

    # -- producers ---------------------------------------------------------------------------------

    def write(self, who: int, rows: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        if who in self.forgotten:
            return
        records = tuple(Record(self.end + n, *row) for n, row in enumerate(rows))
        flags = batches.VALUE | batches.KEY | (batches.TRANSACTIONAL if who > 2 else 0)
        producer = who or NONE
        made = header(
            self.end,
            len(rows),
            flags,
            producer,
            self.epochs[who] if who else NONE,
            self.sequences[who] if who else NONE,
        )
        self.sequences[who] += len(rows)
        self.every.update((record.offset, record) for record in records)
        offsets = [record.offset for record in records]
        if who > 2:
            self.open.setdefault(who, []).extend(offsets)
        else:
            self.committed.update(offsets)
        self._append(Batch(made, records))

    def finish(self, ids: Sequence[int], *, commit: bool) -> None:
        """End the transactions of some producers with one control batch."""
        markers = []
        for who in ids:
            if who in self.forgotten:
                continue
            self.epochs[who] += 1
            self.sequences[who] = 0
            markers.append(Marker(who, self.epochs[who], commit))
            self.last_marker[who] = markers[-1]
            offsets = self.open.pop(who, [])
            if commit:
                self.committed.update(offsets)
        self._control(markers)

    def repeat_marker(self, who: int) -> None:
        if who in self.last_marker:
            self._control([self.last_marker[who]])

    def forget(self, who: int) -> None:
        """The producer was silent for too long."""
        if who not in self.open:
            self.forgotten.add(who)

    def _control(self, markers: list[Marker]) -> None:
        if markers:
            flags = batches.VALUE | batches.TRANSACTIONAL | batches.CONTROL
            made = header(self.end, len(markers), flags, NONE, NONE, NONE)
            self._append(Batch(made, (), tuple(markers)))

    def _append(self, batch: Batch) -> None:
        undo = self.state.apply(batch.header, self.end, 0, batch.markers)
        self.aborted += [AbortedTransaction(*entry[:3]) for entry in undo.aborted]
        self.log.append(batch)
        self.end = batch.header.next_offset

    @property
    def stable_end(self) -> int:
        return self.state.last_stable_offset(self.end)

    def live(self) -> LiveProducers:
        return LiveProducers.of(
            [each for each in self.state.items() if each[0] not in self.forgotten]
        )

    # -- the cleaner -------------------------------------------------------------------------------

    def clean(
        self, end: int, settled_end: int, *, memory: int, block: int, delay_ms: int, clock: bool
    ) -> Cleaning:
        """Clean the log up to `end`, or as far as the memory suffices."""
        end = max(self.cleaned_end, min(end, self.stable_end))
        now = self.now_ms
        times = (now, now + delay_ms) if clock else (None, None)
        wanted = Cleaning(end, settled_end, RETENTION_MS, *times)
        before = self.log
        self.log, cleaning = cleaned(
            before, self.cleaned_end, wanted, self.live(), self.aborted, memory, block
        )
        self._check_horizons(before)
        self.cleaned_end = cleaning.end
        for batch in self.log:
            for record in batch.records:
                if record.offset < cleaning.end:
                    self.first_cleaned_ms.setdefault(record.offset, now)
        return cleaning

    def _check_horizons(self, before: Sequence[Batch]) -> None:
        """No horizon moves, and a marker goes only after its own."""
        left = {batch.header.base_offset: batch.header for batch in self.log}
        for header in (batch.header for batch in before):
            now, horizon = left.get(header.base_offset), header.delete_horizon_ms
            if horizon is not None and now is not None:
                assert now.delete_horizon_ms == horizon
            if header.control and now is None:
                assert horizon is not None
                assert horizon < self.now_ms

    # -- the oracle --------------------------------------------------------------------------------

    def latest(self) -> dict[bytes, Record]:
        """The newest committed record of each key."""
        found: dict[bytes, Record] = {}
        for offset in sorted(self.committed):
            record = self.every[offset]
            if record.key is not None and offset < self.stable_end:
                found[record.key] = record
        return found

    def read_committed(self, aborted: Sequence[AbortedTransaction]) -> dict[int, Record]:
        """What a read_committed reader gets from the log, by offset."""
        ranges = AbortedRanges(aborted)
        return {
            record.offset: record
            for batch in self.log
            if not batch.header.control and not ranges.contains(batch.header)
            for record in batch.records
            if record.offset < self.stable_end
        }

    def check(self) -> None:
        self.check_records()
        self.check_readers()
        self.check_replay()

    def check_records(self) -> None:
        offsets = [record.offset for batch in self.log for record in batch.records]
        assert offsets == sorted(set(offsets))
        for batch in self.log:
            assert len(batch.records) == (0 if batch.header.control else batch.header.record_count)
            for record in batch.records:
                assert record == self.every[record.offset]
                assert batch.header.base_offset <= record.offset <= batch.header.last_offset
        tail = {offset for offset in self.every if offset >= self.cleaned_end}
        assert tail == {offset for offset in offsets if offset >= self.cleaned_end}
        latest = self.latest()
        for record in (r for batch in self.log for r in batch.records):
            if record.offset < self.cleaned_end:  # nothing more is kept than necessary
                assert record.offset in self.committed
                assert record.key is not None
                newest = [
                    offset
                    for offset in self.committed
                    if offset < self.cleaned_end and self.every[offset].key == record.key
                ]
                assert record.offset == max(newest), (record, latest[record.key])

    def check_readers(self) -> None:
        told = self.read_committed(self.aborted)
        present = {r.offset for batch in self.log for r in batch.records}  # read_uncommitted
        values: dict[bytes | None, bytes | None] = {}
        for offset in sorted(told):
            assert offset in self.committed
            values[told[offset].key] = told[offset].value
        for key, record in self.latest().items():
            assert values.get(key) == record.value, key
            if record.offset not in present:
                assert record.value is None
                age = self.now_ms - self.first_cleaned_ms[record.offset]
                assert age > RETENTION_MS, (record, age)
            else:
                assert record.offset in told

    def check_replay(self) -> None:
        """Open the cleaned log: the producers that write on must find their state."""
        replayed, aborted = Producers(), []
        for batch in self.log:
            undo = replayed.apply(batch.header, batch.header.base_offset, 0, batch.markers)
            aborted += [AbortedTransaction(*entry[:3]) for entry in undo.aborted]
        assert replayed.open_transactions == self.state.open_transactions
        assert replayed.last_stable_offset(self.end) == self.stable_end
        assert self.read_committed(aborted) == self.read_committed(self.aborted)
        for who, entry in self.state.items():
            if who in self.forgotten:
                continue
            found = replayed.get(who)
            assert found is not None, who
            assert (found.epoch, found.last_sequence) == (entry.epoch, entry.last_sequence)
            assert found.batches[len(found.batches) - len(entry.batches) :] == entry.batches


def cleaned(
    log: Sequence[Batch],
    first_dirty: int,
    wanted: Cleaning,
    live: LiveProducers,
    aborted: Sequence[AbortedTransaction],
    memory: int = ROOMY,
    block: int = 3,
) -> tuple[list[Batch], Cleaning]:
    """What a runner does: clean a log up to `wanted.end`, or as far as the memory suffices."""
    offset_map, ranges = OffsetMap(memory, HASH), AbortedRanges(aborted)
    blocks = [log[at : at + block] for at in range(0, len(log), block)]
    for each in blocks:
        rows = rows_of(BatchColumns.of([b.header for b in each], ranges), each, wanted)
        full = retain.add_dirty_rows(offset_map, rows, first_dirty, wanted.end)
        if full is not None:
            wanted = wanted._replace(end=full)
            break
    transactions = OpenTransactions()
    found: list[Batch] = []
    for each in blocks:
        columns = BatchColumns.of([batch.header for batch in each], ranges)
        rows = rows_of(columns, each, wanted)
        kept_rows = retain.retain_rows(rows, offset_map, wanted)
        markers = MarkerColumns.of((n, m) for n, b in enumerate(each) for m in b.markers)
        kept = retain.retain_batches(
            columns, markers, kept_rows, rows.tombstones, live, transactions, wanted
        )
        found += rewritten(each, kept_rows.keep, kept)
    return found, wanted


def rows_of(columns: BatchColumns, block: Sequence[Batch], cleaning: Cleaning) -> retain.Rows:
    records = [record for batch in block for record in batch.records]
    return columns.rows_of(
        np.array([record.offset for record in records], np.int64),
        pa.array([record.key for record in records], pa.binary()),
        np.array([record.value is None for record in records], bool),
        cleaning,
    )


def rewritten(
    block: Sequence[Batch], keep: retain.Bools, kept: retain.RetainedBatches
) -> list[Batch]:
    """What a runner writes."""
    found, at = [], 0
    for n, batch in enumerate(block):
        rows = keep[at : at + len(batch.records)].tolist()
        at += len(rows)
        if not kept.keep[n]:
            continue
        records = tuple(r for r, stays in zip(batch.records, rows, strict=True) if stays)
        assert bool(kept.empty[n]) == (not batch.header.control and not records)
        horizon = int(kept.horizons[n])
        new = batch.header._replace(record_count=len(records) + len(batch.markers))
        if horizon != NO_HORIZON:
            flags = new.attributes | batches.DELETE_HORIZON
            new = new._replace(attributes=flags, base_timestamp=horizon)
        found.append(Batch(new, records, batch.markers))
    assert at == len(keep)
    return found
