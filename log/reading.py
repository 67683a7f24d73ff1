"""The read side of a partition log.  Everything here may run on any thread, beside the loop and the
write lane.

Rules
  A1  A read takes the tuple of segments and the written end once; neither changes during the read.
  A2  A read looks at nothing beyond the written end, or beyond its bound if that is lower.
  A3  Batches are returned whole and as they are stored.  Rows are decoded only for a search by
      time.
  A4  A swap of cleaned segments (log/swap.py) may rename the files that a read is about to open.
      A read during which a swap became visible is void, whatever it found, and is done again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pk import errors
from pk.log import aborted, columns, damage
from pk.log import batch as batches
from pk.log.aborted import AbortedPage
from pk.log.batch import Header
from pk.log.damage import Damage
from pk.log.encoding import numbers
from pk.log.epochs import LeaderEpochs
from pk.log.index import NO_TIMESTAMP, SparseIndex
from pk.log.local_log import LocalLog, segment_at
from pk.log.plan import Read, TimeOffset
from pk.log.recovery import Stop
from pk.log.segment import SNAPSHOT, BatchWalk, NoBatch, Segment, file_name
from pk.types import NONE

Numbers = npt.NDArray[Any]
T = TypeVar("T")


class LocalLogReader:
    """Reads the stored part of one partition's log, on any thread.

    epochs: the log's; their entries may be replaced at any time (log/epochs E2)
    """

    def __init__(self, local: LocalLog, epochs: LeaderEpochs) -> None:
        self._local = local
        self._epochs = epochs

    def read(
        self,
        offset: int,
        *,
        bound: int,
        max_bytes: int,
        min_one_batch: bool = True,
        verify: bool = False,
        verify_first: bool = False,
        stored: bool = False,
    ) -> Read:
        """Return the whole batches of `[offset, bound)`; empty if there are none.  `verify` checks
        every checksum, `verify_first` only that of the first batch.  `stored` also reads records
        below log_start if their segment is still there: a follower's copy begins where a segment
        begins.

        Raises `OffsetOutOfRange` below local_log_start or above written_end, `CorruptLog`
        (rule L9), and `DataLoss` in a range that is known to be damaged.
        """
        return self._again_after_swap(
            lambda: self._read(
                offset, bound, max_bytes, min_one_batch, verify, verify_first, stored
            )
        )

    def _again_after_swap(self, work: Callable[[], T]) -> T:
        """Return what `work` returns or raises, unless a swap became visible meanwhile (A4).  A log
        has one swap at a time, each after a whole cleaning, so few repetitions follow.
        """
        while True:
            swaps = self._local.swaps
            try:
                found = work()
            except Exception:
                if self._local.swaps == swaps:
                    raise
            else:
                if self._local.swaps == swaps:
                    return found

    def _read(
        self,
        offset: int,
        bound: int,
        max_bytes: int,
        min_one_batch: bool,
        verify: bool,
        verify_first: bool,
        stored: bool,
    ) -> Read:
        segments, end = self._local.segments, self._local.written_end
        start = (
            segments[0].base_offset
            if stored
            else max(segments[0].base_offset, self._local.log_start)
        )
        if not start <= offset <= end:
            raise errors.OffsetOutOfRange(
                f"{self._local.topic_partition} holds [{start}, {end}) here, not offset {offset}",
                local_log_start=str(start),
                log_start=str(self._local.log_start),
                log_end=str(end),
            )
        bound = min(bound, end)
        if offset >= bound:
            return Read(b"", offset, offset, NONE)
        at = max(0, segment_at(segments, offset))
        for segment in segments[at:]:
            if segment.base_offset >= bound:
                break
            limit = _whole_until(segment, offset, bound) if segment.damage else bound
            with self._guarding(segment):
                piece = segment.piece(
                    self._index(segment), offset, limit, max_bytes, min_one_batch, dense=self._dense
                )
            if piece is None:
                continue  # nothing at or above `offset` is left in this segment
            begins = piece.base_offset if piece.data else piece.next_offset
            if begins > offset and self._dense:
                raise errors.CorruptLog(  # the checksum does not cover the offset in a header
                    f"{segment.path()}: offsets [{offset}, {begins}) are in no batch",
                    offset=str(offset),
                    next_offset=str(begins),
                )
            if verify or verify_first:
                verify_batches(
                    segment.path(), piece.data, first_only=not verify, offset=piece.base_offset
                )
                self._check_epoch(segment, piece.data)
            epoch = self._epochs.epoch_of(piece.next_offset - 1) if piece.data else NONE
            return Read(piece.data, piece.next_offset, piece.base_offset, epoch)
        return Read(b"", bound, bound, NONE)

    def _check_epoch(self, segment: Segment, data: bytes) -> None:
        """Check the epoch of the first batch: no checksum covers it, and no follower accepts a
        wrong one.
        """
        if not data:
            return
        header = batches.read_header(data)
        known = self._epochs.epoch_of(header.base_offset)
        if known not in (NONE, header.leader_epoch):
            raise errors.CorruptLog(
                f"{segment.path()}: the batch at offset {header.base_offset} says leader epoch "
                f"{header.leader_epoch}, it is of {known}",
                offset=str(header.base_offset),
                next_offset=str(header.next_offset),
            )

    @property
    def _dense(self) -> bool:
        """Whether each batch begins at the offset where the batch before it ends."""
        return not self._local.config.compacted

    def _index(self, segment: Segment) -> SparseIndex:
        interval = self._local.config.index_interval_bytes
        return self._local.cache.get(segment, interval, dense=self._dense)

    @contextlib.contextmanager
    def _guarding(self, segment: Segment) -> Iterator[None]:
        """Handle a segment file that is not there: retention dropped it, the partition was deleted,
        or the file is really missing (`CorruptLog`).
        """
        try:
            yield
        except FileNotFoundError as cause:
            if segment.dropped:
                raise errors.OffsetOutOfRange(
                    f"{self._local.topic_partition}: segment {segment.base_offset} was dropped",
                    log_start=str(self._local.log_start),
                ) from cause
            if self._local.retired:
                gone = errors.NotLeaderOrFollower(
                    f"{self._local.topic_partition} was closed or deleted"
                )
                raise gone from cause
            raise errors.CorruptLog(
                f"{segment.path()} is missing",
                file=segment.path(),
                offset=str(segment.base_offset),
            ) from cause

    def newest_append_ms(self) -> int | None:
        """Return when the last batch was appended (LogAppendTime).  None = its timestamp is the
        producer's, it is a control batch, or the log is empty.  Reads the disk.
        """
        return self._again_after_swap(self._newest_append_ms)

    def _newest_append_ms(self) -> int | None:
        for segment in reversed(self._local.segments):
            if segment.written.size:
                raw = segment.read_at(segment.written.last_position, batches.HEADER_BYTES)
                last = batches.read_header(raw)
                return last.max_timestamp if last.log_append_time and not last.control else None
        return None

    def aborted_in(self, start: int, end: int, limit: int | None = None) -> AbortedPage:
        """Return the aborted transactions with records in `[start, end)`; see `aborted.find`."""
        segments = self._local.segments
        at = max(0, segment_at(segments, start))
        # a marker may lie arbitrarily far behind the records of its transaction
        return aborted.find((segment.aborted for segment in segments[at:]), start, end, limit)

    def snapshot_at(self, offset: int) -> bytes:
        """Return the producer state at the base offset of a segment; empty if the segment has no
        snapshot.
        """
        local = self._local
        try:
            return local.storage.read_file(f"{local.path}/{file_name(offset, SNAPSHOT)}")
        except FileNotFoundError:
            return b""

    # -- damage --------------------------------------------------------------------------------

    @property
    def damage(self) -> list[Damage]:
        """The ranges that are known to be damaged, ascending."""
        return [each for segment in self._local.segments for each in segment.damage]

    def survey(self, offset: int) -> list[Damage]:
        """Check every batch of the segment that holds `offset`; return the damaged ranges that were
        not known.  From now on reads of these ranges raise `DataLoss`, and everything else is
        readable.  Takes as long as reading the segment; for the read lane.
        """
        return self._again_after_swap(lambda: self._survey(offset))

    def _survey(self, offset: int) -> list[Damage]:
        segments = self._local.segments
        at = max(0, segment_at(segments, offset))
        segment, extent = segments[at], segments[at].written
        try:
            found = damage.survey(
                segment.read_at,
                extent.size,
                segment.base_offset,
                end_offset=extent.next_offset,
                index=self._index_if_whole(segment),
                epoch_of=self._epochs.epoch_of,
                dense=self._dense,
            )
        except FileNotFoundError:
            if segment.dropped or self._local.retired:
                return []
            gone = f"{segment.path()} is missing"
            found = [Damage(segment.base_offset, extent.next_offset, 0, extent.size, gone)]
        fresh = [each for each in found if each not in segment.damage]
        if fresh:
            segment.damage = tuple(found)
            self._local.cache.forget(segment)
        return fresh

    def _index_if_whole(self, segment: Segment) -> SparseIndex | None:
        """Return the segment's index; None if it is missing and cannot be rebuilt because the
        segment is damaged.
        """
        try:
            return self._index(segment)
        except errors.CorruptLog:
            return None

    def offset_for_time(self, timestamp_ms: int, bound: int) -> TimeOffset | None:
        """Return the first offset in `[local_log_start, bound)` with a timestamp of at least
        `timestamp_ms`.
        """
        return self._again_after_swap(lambda: self._offset_for_time(timestamp_ms, bound))

    def _offset_for_time(self, timestamp_ms: int, bound: int) -> TimeOffset | None:
        segments, start = self._local.segments, self._local.local_log_start
        for segment in segments:
            if segment.written.max_timestamp < timestamp_ms or segment.written.next_offset <= start:
                continue
            if segment.base_offset >= bound:
                break
            with self._guarding(segment):
                found = self._time_in(segment, timestamp_ms, start)
            if found is not None:
                return found if found.offset < bound else None
        return None

    def _time_in(self, segment: Segment, timestamp_ms: int, start: int) -> TimeOffset | None:
        sparse = self._index(segment)
        position, base = sparse.floor_position(sparse.floor_time(timestamp_ms))
        walk = BatchWalk(
            segment.read_at, position, segment.written.size, base, damage=segment.damage
        )
        for at, header in walk:
            if (
                header.max_timestamp < timestamp_ms
                or header.last_offset < start
                or not header.record_count
            ):
                continue
            offsets, stamps = _times_of(segment, at, header)
            hits = ((stamps >= timestamp_ms) & (offsets >= start)).nonzero()[0]
            if len(hits):
                row = int(hits[0])
                return TimeOffset(int(offsets[row]), int(stamps[row]), header.leader_epoch)
        if walk.stop is not Stop.END:
            raise _stopped(segment, walk, sparse)
        return None

    def offset_of_max_timestamp(self, bound: int) -> TimeOffset | None:
        """Return the first record with the largest timestamp in `[local_log_start, bound)`
        (KIP-734).  `bound` must be where a batch begins, or the end.
        """
        return self._again_after_swap(lambda: self._offset_of_max_timestamp(bound))

    def _offset_of_max_timestamp(self, bound: int) -> TimeOffset | None:
        segments = self._local.segments
        start = max(segments[0].base_offset, self._local.log_start)
        top = NO_TIMESTAMP
        for segment in segments:
            extent = segment.written
            if extent.next_offset <= start or extent.max_timestamp <= top:
                continue
            if segment.base_offset >= bound:
                break
            # in a compacted log the batch with this timestamp may be an empty header
            trusted = not self._local.config.compacted
            if trusted and start <= extent.max_timestamp_offset < bound:
                top = extent.max_timestamp
                continue
            with self._guarding(segment):
                top = max(top, self._latest_in(segment, start, bound))
        return None if top == NO_TIMESTAMP else self._offset_for_time(top, bound)

    def _latest_in(self, segment: Segment, start: int, bound: int) -> int:
        """Return the largest timestamp of the segment's records in `[start, bound)`.  The segment's
        own maximum may belong to a record outside of the range.
        """
        sparse = self._index(segment)
        position, base = sparse.floor_position(sparse.floor(start))
        top = NO_TIMESTAMP
        walk = BatchWalk(
            segment.read_at, position, segment.written.size, base, damage=segment.damage
        )
        for at, header in walk:
            if header.base_offset >= bound:
                return top
            if header.last_offset < start or header.max_timestamp <= top or not header.record_count:
                continue
            if start <= header.base_offset:
                top = header.max_timestamp
                continue
            offsets, stamps = _times_of(segment, at, header)
            top = max(top, int(stamps[offsets >= start].max(initial=NO_TIMESTAMP)))
        if walk.stop is not Stop.END:
            raise _stopped(segment, walk, sparse)
        return top

    def bytes_at(self, offsets: Sequence[int]) -> list[int]:
        """Return the local bytes below each offset, at index granularity, from the first segment
        on; the result grows with the offset.
        """
        return self._again_after_swap(lambda: self._bytes_at(offsets))

    def _bytes_at(self, offsets: Sequence[int]) -> list[int]:
        segments = self._local.segments
        starts = [0]
        for segment in segments:
            starts.append(starts[-1] + segment.written.size)
        found = []
        for offset in offsets:
            at = segment_at(segments, offset)
            if at < 0:
                found.append(0)
            elif offset >= segments[at].written.next_offset:
                found.append(starts[at + 1])
            else:
                with self._guarding(segments[at]):
                    found.append(starts[at] + self._index(segments[at]).floor(offset))
        return found

    def sample_offsets(self, start: int, end: int, samples_max: int) -> list[tuple[int, int]]:
        """Return at most `samples_max` pairs (offset, bytes of [start, offset)) at segment and
        index boundaries, both ends included.
        """
        return self._again_after_swap(lambda: self._sample_offsets(start, end, samples_max))

    def _sample_offsets(self, start: int, end: int, samples_max: int) -> list[tuple[int, int]]:
        start = max(start, self._local.local_log_start)
        end = max(start, min(end, self._local.written_end))
        inner = [np.empty(0, np.int64)]
        for segment in self._local.segments:
            if segment.written.next_offset > start and segment.base_offset < end:
                entries = np.array(self._index(segment).offsets, np.int64) + segment.base_offset
                inner += [np.array([segment.base_offset]), entries]
        found = np.concatenate(inner)
        found = found[(found > start) & (found < end)]
        most = max(0, samples_max - 2)
        if len(found) > most:
            found = found[np.linspace(0, len(found) - 1, most).round().astype(np.int64)]
        marks = [start, *found.tolist(), *([end] if end > start else [])]
        sizes = self._bytes_at(marks)
        return [(offset, size - sizes[0]) for offset, size in zip(marks, sizes, strict=True)]


def _whole_until(segment: Segment, offset: int, bound: int) -> int:
    """Return how far batches can be read from `offset` on.  Raises `DataLoss` if `offset` is
    damaged.
    """
    for each in segment.damage:
        if max(offset, segment.base_offset) < each.end:
            if each.start <= offset:
                raise damage.lost(segment.path(), each)
            return min(bound, each.start)
    return bound


def _stopped(segment: Segment, walk: BatchWalk, sparse: SparseIndex) -> errors.CorruptLog:
    """Return the error for damage that a walk over headers met; it names the file and the range
    (rule L9).
    """
    size, end = segment.written.size, segment.written.next_offset
    stop = NoBatch(walk.position, walk.next_offset, walk.problem)
    return stop.named(segment.path(), segment.read_at, size, sparse, end)


def _times_of(segment: Segment, position: int, header: Header) -> tuple[Numbers, Numbers]:
    """Return offset and timestamp of each record of one batch.  Raises `CorruptLog` (rule L9)."""
    raw = segment.read_at(position, header.length)
    verify_batches(segment.path(), raw)
    rows = columns.decode(raw, decoded_bytes_max=columns.DECODED_BYTES_MAX)
    return numbers(rows.column("offset")), numbers(rows.column("timestamp").view("int64"))


def verify_batches(path: str, data: bytes, *, first_only: bool = False, offset: int = NONE) -> None:
    """Check the checksums of consecutive batches.  Raises `CorruptLog` at the first that does not
    match (rule L9).  `offset`: where the first batch begins.
    """
    start = end = offset
    try:
        for position, header in batches.iter_headers(data):
            start, end = header.base_offset, header.next_offset
            batches.check(memoryview(data)[position : position + header.length])
            if first_only:
                return
            start = end = header.next_offset
    except errors.CorruptBatch as cause:
        where = f"offsets [{start}, {end}) are" if start < end else f"the batch at {start} is"
        raise errors.CorruptLog(
            f"{path}: {where} damaged: {cause.message}", offset=str(start), next_offset=str(end)
        ) from cause
