"""Cleans the sealed segments of one local log into files beside them (rule C1).

The runner of the core (compaction/retain.py) for logs without a tier.  It reads the segments twice,
in blocks of whole batches: once for the offset map of the dirty range, once to write what stays.
It changes no file of the log: the broker puts the written files in place (log/swap.py).

The work runs in a process of its own, on a `Storage`.  Python runs per batch, never per row.

Rules
  N1  Offsets, order, and the range of offsets that a batch covers do not change.
  N2  The last batch of every segment stays, if necessary as an empty header.  So segments join
      without a gap, as in a log that was never cleaned: after a power loss a gap between segments
      means that the end of a segment was lost (log/recovery L).  The next cleaning drops such a
      header once its segment was merged into another one.
  N3  An entry of an aborted index stays as long as its marker does.  A reader may have got the
      records of the transaction before the swap, and asks for the entry after it.
  N4  Memory: the offset map, one block, and the parts of one block that were encoded again.
  N5  A segment that stays as it is, is not written.
  N7  The first batch of every leader epoch stays, if necessary as an empty header.  A follower that
      copies the log learns from it where the epoch began.  With a later start it would answer
      wrongly where another log diverges (rule R5): a tail that was never committed would survive.
  N8  The windows of the producers (rule L14) are those at the end of the cleaning, not at the end
      of the log.  A cut takes batches from the end of the log, and a replica that is filled from
      the log may stop at any offset above the end: both must find the windows of that offset.
  N6  A batch that does not match its checksum ends the cleaning with `CorruptLog`, and nothing is
      replaced (rule L9).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pk import errors, limits
from pk.compaction import retain
from pk.compaction.cleaning_job import CleanedSegment, CleaningJob, CleaningResult, SealedSegment
from pk.compaction.offset_map import HashKeys, OffsetMap
from pk.compaction.retain import (
    NO_HORIZON,
    BatchColumns,
    Cleaning,
    LiveProducers,
    MarkerColumns,
    OpenTransactions,
    RetainedBatches,
    RetainedRows,
)
from pk.log import batch as batches
from pk.log import columns, control_rows, encoding
from pk.log.aborted import AbortedEntry, AbortedRanges
from pk.log.batch import HEADER_BYTES, Header
from pk.log.index import SPAN_MAX
from pk.log.producers import CorruptSnapshot, Producers
from pk.log.segment import LOG, SNAPSHOT, OpenFile, Segment, file_name
from pk.log.storage import Buffer, Storage
from pk.types import NONE, Offset

#: Stored bytes of a block, and decoded ones; a block has at least one batch.
BLOCK_BYTES = 4 * limits.MIB
DECODED_BLOCK_BYTES = 64 * limits.MIB


class _Block(NamedTuple):
    """Whole batches of one segment, in offset order."""

    headers: Sequence[Header]
    raw: Sequence[memoryview]
    last: bool  #: whether the segment ends here


class _Decoded(NamedTuple):
    """A block whose batches are decompressed and parsed."""

    block: _Block
    batches: BatchColumns
    bodies: Sequence[columns.Body | None]  #: of the data batches with rows
    columns: retain.Rows

    @classmethod
    def of(cls, block: _Block, ranges: AbortedRanges, cleaning: Cleaning) -> _Decoded:
        found = BatchColumns.of(block.headers, ranges)
        bodies = [
            columns.body_of(raw, header, columns.DECODED_BYTES_MAX) if count else None
            for header, raw, count in zip(
                block.headers, block.raw, found.rows.tolist(), strict=True
            )
        ]
        some = [
            (header, body)
            for header, body in zip(block.headers, bodies, strict=True)
            if body is not None
        ]
        rows = found.rows_of(
            columns.joined_offsets(some),
            columns.joined_keys(some),
            columns.joined_tombstones(some),
            cleaning,
        )
        return cls(block, found, bodies, rows)


def clean(storage: Storage, job: CleaningJob, hash_keys: HashKeys) -> CleaningResult:
    """Write the cleaned segments of a log beside the log.

    hash_keys: of the offset map, from `offset_map.key_hasher`

    Raises `CorruptLog`, `StorageFull`, `StorageFailed`, `FileNotFoundError` if a segment is
    dropped meanwhile, and `InvalidOption` if a key does not fit into the map.  The written files
    are then left for the broker to remove.
    """
    ranges = AbortedRanges(job.aborted)
    offset_map = OffsetMap(job.map_bytes, hash_keys)
    end = _fill(storage, job, offset_map, ranges)
    job = job._replace(cleaning=job.cleaning._replace(end=end))
    return _Rewriting(storage, job, offset_map, ranges, _live_producers(storage, job)).run()


def _live_producers(storage: Storage, job: CleaningJob) -> LiveProducers:
    """Return the producers of the job as they are at the end of the cleaning (N8), from the newest
    snapshot below it and the batches behind that.
    """
    end, segments = job.cleaning.end, job.segments
    if not segments:
        return LiveProducers.of([])
    bases = [*(each.base_offset for each in segments), segments[-1].next_offset]
    state, start = Producers(), bases[0]
    for at in sorted((base for base in bases if base <= end), reverse=True):
        with contextlib.suppress(FileNotFoundError, CorruptSnapshot):
            raw = storage.read_file(f"{job.path}/{file_name(at, SNAPSHOT)}")
            found, state = Producers.from_snapshot(raw)
            if found == at:
                start = at
                break
            state = Producers()
    for segment in segments:
        if start < segment.next_offset and segment.base_offset < end:
            for block in _blocks(storage, job.path, segment):
                for header, batch in zip(block.headers, block.raw, strict=True):
                    if start <= header.base_offset and header.last_offset < end:
                        rows = header.control and header.record_count
                        markers = control_rows.decode_markers(batch) if rows else ()
                        state.apply(header, header.base_offset, 0, markers)
    known = set(job.producer_ids.tolist())
    return LiveProducers.of([each for each in state.items() if each[0] in known])


def _fill(
    storage: Storage, job: CleaningJob, offset_map: OffsetMap, ranges: AbortedRanges
) -> Offset:
    """Add the keys of the dirty range to the map; return where it ends, or where the map is
    full.
    """
    for segment in job.segments:
        if segment.next_offset <= job.first_dirty:
            continue
        for block in _blocks(storage, job.path, segment):
            if block.headers[-1].last_offset < job.first_dirty:
                continue
            rows = _Decoded.of(block, ranges, job.cleaning).columns
            full = retain.add_dirty_rows(offset_map, rows, job.first_dirty, job.cleaning.end)
            if full is not None:
                return full
    return job.cleaning.end


class _Rewriting:
    """The second pass: writes what stays of the segments below the end."""

    def __init__(
        self,
        storage: Storage,
        job: CleaningJob,
        offset_map: OffsetMap,
        ranges: AbortedRanges,
        live: LiveProducers,
    ) -> None:
        self._storage = storage
        self._job = job
        self._map = offset_map
        self._ranges = ranges
        self._live = live
        self._transactions = OpenTransactions()
        self._entries: dict[Offset, list[AbortedEntry]] = {}
        for entry in job.entries:
            self._entries.setdefault(entry.last_offset, []).append(entry)
        self._leader_epoch = NONE  #: of the last batch that was read
        self._dropped = np.zeros(4, np.int64)
        self._read = self._written = 0
        self._forgotten_end: Offset = 0
        self._found: list[CleanedSegment] = []

    def run(self) -> CleaningResult:
        out: _Output | None = None
        for segment in self._job.segments:
            if segment.base_offset >= self._job.cleaning.end:
                break
            if out is None or not out.has_room(segment, self._job.segment_bytes):
                self._finish(out)
                out = _Output(self._storage, self._job, segment.base_offset)
            self._rewrite(segment, out)
            self._read += segment.size
        self._finish(out)
        without_key, aborted_rows, superseded, tombstones = self._dropped.tolist()
        return CleaningResult(
            self._job.cleaning.end, self._found, self._read, self._written, len(self._map),
            superseded, aborted_rows, tombstones, without_key, self._forgotten_end,
        )  # fmt: skip

    def _finish(self, out: _Output | None) -> None:
        """Store what was written of a segment, or discard it if it is as before (N5)."""
        if out is None:
            return
        if not out.changed:
            out.discard()
            return
        out.seal()
        self._written += out.segment.decided.size
        self._found.append(CleanedSegment(out.segment.base_offset, out.replaces))

    def _rewrite(self, segment: SealedSegment, out: _Output) -> None:
        out.begin(segment)
        for block in _blocks(self._storage, self._job.path, segment):
            decoded = _Decoded.of(block, self._ranges, self._job.cleaning)
            rows = retain.retain_rows(decoded.columns, self._map, self._job.cleaning)
            kept = self._retain_batches(decoded, rows)
            self._dropped += (rows.without_key, rows.aborted, rows.superseded, rows.tombstones)
            self._write(decoded, rows, kept, out)

    def _retain_batches(self, decoded: _Decoded, rows: RetainedRows) -> RetainedBatches:
        block, live = decoded.block, self._live
        needed = self._epoch_starts(block.headers)
        if block.last:  # N2
            needed.append(len(block.headers) - 1)
        if needed:
            bases = [block.headers[at].base_offset for at in needed]
            live = live._replace(windows=np.append(live.windows, bases).astype(np.int64))
        markers = MarkerColumns.of(
            (at, marker)
            for at, header in enumerate(block.headers)
            if header.control and header.record_count
            for marker in control_rows.decode_markers(block.raw[at])
        )
        tombstones = decoded.columns.tombstones
        kept = retain.retain_batches(
            decoded.batches, markers, rows, tombstones, live, self._transactions, self._job.cleaning
        )
        kept.keep[needed] = True  # also if the core drops the marker
        markers_dropped = (
            header.next_offset
            for header, keep in zip(block.headers, kept.keep.tolist(), strict=True)
            if header.control and not keep
        )
        self._forgotten_end = max(self._forgotten_end, rows.forgotten_end, *markers_dropped)
        return kept

    def _epoch_starts(self, headers: Sequence[Header]) -> list[int]:
        """Return which of the batches begin a leader epoch (N7)."""
        found = []
        for at, header in enumerate(headers):
            if header.leader_epoch != self._leader_epoch:
                self._leader_epoch = header.leader_epoch
                found.append(at)
        return found

    def _write(
        self, decoded: _Decoded, rows: RetainedRows, kept: RetainedBatches, out: _Output
    ) -> None:
        ends = np.cumsum(decoded.batches.rows)
        left = np.add.accumulate(rows.keep)  # rows kept up to each row
        before = 0
        for at, header in enumerate(decoded.block.headers):
            start, end = int(ends[at] - decoded.batches.rows[at]), int(ends[at])
            upto = int(left[end - 1]) if end else 0
            count, before = upto - before, upto
            if not kept.keep[at]:
                out.changed = True
                continue
            raw = decoded.block.raw[at]
            horizon = int(kept.horizons[at])
            same_horizon = horizon == decoded.batches.horizons[at]
            if header.control:
                out.changed |= not same_horizon
                out.add([raw] if same_horizon else self._again(raw, header, horizon))
                for entry in self._entries.get(header.last_offset, ()):  # N3
                    out.segment.aborted.append(entry)
                continue
            if (count == end - start and same_horizon) or not header.record_count:
                out.add([raw])
                continue
            out.changed = True
            if not count:
                out.add([batches.empty(header)])
                continue
            body = decoded.bodies[at]
            assert body is not None
            part = columns.rows_of(header, body)
            if count < end - start:
                part = part.filter(pa.array(rows.keep[start:end]))
            out.add(encoding.rewritten(header, part, _horizon(horizon)))
        out.flush()

    @staticmethod
    def _again(raw: memoryview, header: Header, horizon: int) -> list[Buffer]:
        """Encode a control batch with another horizon."""
        rows = columns.decode(raw, decoded_bytes_max=columns.DECODED_BYTES_MAX, header=header)
        return encoding.rewritten(header, rows, _horizon(horizon))


def _horizon(horizon: int) -> int | None:
    return None if horizon == NO_HORIZON else min(horizon, batches.TIMESTAMP_MS_MAX)


class _Output:
    """A segment that is being written."""

    def __init__(self, storage: Storage, job: CleaningJob, base_offset: Offset) -> None:
        self._storage = storage
        self._interval = job.index_interval_bytes
        self.segment = Segment(storage, job.path, base_offset, job.tail)
        self.segment.create()
        self.changed = False  #: whether it differs from the segment that it replaces
        self.replaces: list[Offset] = []
        self._parts: list[Buffer] = []

    def has_room(self, segment: SealedSegment, segment_bytes: int) -> bool:
        """Whether the segment fits, even if all of it stays."""
        mine = self.segment
        fits = mine.decided.size + segment.size <= segment_bytes
        return fits and segment.next_offset - mine.base_offset <= SPAN_MAX

    def begin(self, segment: SealedSegment) -> None:
        """Note that the content of another segment follows."""
        self.changed |= bool(self.replaces)
        self.replaces.append(segment.base_offset)

    def add(self, parts: Sequence[Buffer]) -> None:
        """Add one batch."""
        header = batches.read_header(parts[0])
        self._parts += parts
        self.segment.grow(
            header, header.base_offset, header.max_timestamp, header.crc, 0, self._interval
        )

    def flush(self) -> None:
        """Write the batches that were added."""
        assert self.segment.file is not None
        if self._parts:
            self.segment.file.append(self._parts)
            self._parts = []

    def seal(self) -> None:
        """Make the file SYNCED, and write its indexes."""
        segment = self.segment
        assert segment.file is not None
        segment.file.sync()
        segment.close()
        segment.write_indexes(segment.decided)

    def discard(self) -> None:
        """Remove the file; no index was written."""
        self.segment.close()
        self._storage.remove(self.segment.path(LOG))


def _blocks(storage: Storage, path: str, segment: SealedSegment) -> Iterator[_Block]:
    """Read a segment.  Every checksum is checked (N6)."""
    name = f"{path}/{file_name(segment.base_offset, LOG)}"
    position, expected = 0, segment.base_offset
    with OpenFile(storage, name) as file:
        while position < segment.size:
            data = file.read(position, min(BLOCK_BYTES, segment.size - position))
            try:
                length = batches.read_header(data).length
                if len(data) < length <= segment.size - position:
                    data = file.read(position, length)
                headers, raw = _whole_batches(data, expected)
            except errors.CorruptBatch as cause:
                raise errors.CorruptLog(
                    f"{name} at {position}: {cause.message}", file=name, offset=str(expected)
                ) from cause
            position += sum(header.length for header in headers)
            expected = headers[-1].next_offset
            yield _Block(headers, raw, position >= segment.size)


def _whole_batches(data: bytes, expected: Offset) -> tuple[list[Header], list[memoryview]]:
    """Return the batches that lie wholly in `data`, as many as a block may have, at least one."""
    view, at, decoded = memoryview(data), 0, 0
    headers: list[Header] = []
    raw: list[memoryview] = []
    while len(data) - at >= HEADER_BYTES:
        header = batches.read_header(data, at)
        batches.check_structure(header)
        if at + header.length > len(data):
            break
        decoded += _decoded_bytes(header, view[at:])
        if raw and decoded > DECODED_BLOCK_BYTES:
            break
        if header.base_offset < expected:
            raise errors.CorruptBatch(f"offset {header.base_offset} instead of {expected}")
        raw.append(view[at : at + header.length])
        headers.append(batches.check(raw[-1]))
        at += header.length
        expected = header.next_offset
    if not raw:
        raise errors.CorruptBatch(f"{len(data)} bytes are no whole batch")
    return headers, raw


def _decoded_bytes(header: Header, batch: memoryview) -> int:
    if header.codec == "none" or not header.record_count:
        return header.length
    size: int = encoding.LENGTH.unpack_from(batch, HEADER_BYTES)[0]
    return size
