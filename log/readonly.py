"""A read-only view of a log that another process writes: what the tier process sees (rule P1).

The view takes no lock and changes nothing.  Segments are rolled, renamed and removed while it
reads; if a file is missing, the view lists the directory again.  The caller bounds every read by an
offset that the writer guarantees (LSO, high watermark).  Records beyond it may be half written or
about to be cut back, and are not read.

Rules
  H1  A remembered position is a hint.  If no batch begins there, the view forgets everything it
      remembers and tries the read once more from the files.  Only if that fails, too, is the log
      reported as corrupt.
  H2  Memory is bounded: the view keeps the index of one segment and drops it when it reads another.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right

from pk import errors
from pk.log import batch as batches
from pk.log import index
from pk.log.index import Extent, SparseIndex
from pk.log.plan import Read
from pk.log.reading import verify_batches
from pk.log.segment import LOG, NoBatch, OpenFile, Piece, Segment, base_offset_of, cut, file_name
from pk.log.storage import Storage
from pk.types import NONE

_FAR = 2**63 - 1


def open_readonly(storage: Storage, path: str) -> SegmentReader:
    """Return a view of the partition directory `path`, which need not exist yet."""
    return SegmentReader(storage, path)


class SegmentReader:
    """Reads the segments of a log that another process writes.  For one thread at a time."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self.path = path
        self._bases: list[int] = []
        self._at = NONE  #: base offset of the segment the two fields below belong to
        self._index = SparseIndex(0)
        self._hints: dict[int, int] = {}
        self._complete = False  #: the index covers a sealed segment, so it will not improve

    @property
    def base_offset(self) -> int:
        """The base offset of the first segment, as last listed; -1 without any."""
        return self._bases[0] if self._bases else NONE

    def file_of(self, offset: int) -> str:
        """Return the segment file that holds `offset`, as last listed; the directory if there is
        none.
        """
        at = bisect_right(self._bases, offset) - 1
        return self.path if at < 0 else f"{self.path}/{file_name(self._bases[at], LOG)}"

    def refresh(self) -> None:
        """List the segments again and forget every position."""
        names = self._storage.list(self.path)
        self._bases = [base for name in names if (base := base_offset_of(name, LOG)) is not None]
        self._forget()

    def _forget(self) -> None:
        self._at, self._hints, self._complete = NONE, {}, False

    def read(
        self,
        offset: int,
        *,
        bound: int,
        max_bytes: int,
        min_one_batch: bool = True,
        verify: bool = False,
    ) -> Read:
        """Return the whole batches of `[offset, bound)`; empty if there are none yet.

        Raises `OffsetOutOfRange` if the segment that held `offset` is gone, `CorruptLog` (rule L9).
        """
        problem: Exception | None = None
        for attempt in range(3):
            if attempt or not self._bases:
                self.refresh()
            try:
                return self._read(offset, bound, max_bytes, min_one_batch, verify)
            except (FileNotFoundError, errors.CorruptLog) as cause:  # H1
                problem = cause
        if isinstance(problem, errors.CorruptLog):
            raise problem
        raise errors.OffsetOutOfRange(
            f"{self.path}: the segment of offset {offset} is gone"
        ) from problem

    def _read(self, offset: int, bound: int, max_bytes: int, min_one: bool, verify: bool) -> Read:
        if offset >= bound:
            return Read(b"", offset, offset, NONE)
        at = bisect_right(self._bases, offset) - 1
        if at < 0:
            if not self._bases:
                return Read(b"", offset, offset, NONE)
            raise errors.OffsetOutOfRange(
                f"{self.path} begins at {self._bases[0]}, offset {offset} is not here any more",
                local_log_start=str(self._bases[0]),
            )
        while at < len(self._bases) and self._bases[at] < bound:
            last = at == len(self._bases) - 1
            piece = self._piece(self._bases[at], last, offset, bound, max_bytes, min_one)
            if piece is not None:
                if verify:
                    verify_batches(self.file_of(offset), piece.data)
                return Read(
                    piece.data, piece.next_offset, piece.base_offset, _last_epoch(piece.data)
                )
            if last:
                known = self._bases
                self.refresh()
                if self._bases == known:
                    break
                at = bisect_right(self._bases, offset) - 1
                if at >= 0 and self._bases[at] == known[-1]:
                    at += 1  # the log was rolled: the batch is in the next segment
                continue
            at += 1
        return Read(b"", offset, offset, NONE)

    def _piece(
        self, base: int, last: bool, offset: int, bound: int, max_bytes: int, min_one: bool
    ) -> Piece | None:
        segment = Segment(self._storage, self.path, base)
        with OpenFile(self._storage, segment.path()) as file:
            size = file.size()
            self._prepare(segment, size, last, offset)
            extent = Extent(size, _FAR)
            try:
                found = cut(
                    file.read, self._index, extent, self._hints, offset, bound, max_bytes, min_one
                )
            except NoBatch as stop:
                raise stop.named(segment.path(), file.read, size, self._index) from stop
        if len(self._hints) > 4:
            self._hints = dict(list(self._hints.items())[-2:])
        return found

    def _prepare(self, segment: Segment, size: int, last: bool, offset: int) -> None:
        """Load the best index there is for this segment: its file, or none (headers are walked)."""
        if self._at != segment.base_offset:
            self._forget()
            self._at = segment.base_offset
            self._index = SparseIndex(segment.base_offset)
        elif self._complete or offset in self._hints:
            return
        try:
            found, extent = segment.load_index()
        except (index.CorruptIndex, FileNotFoundError):
            return
        if extent.size <= size:
            self._index = found
            self._complete = extent.size == size and not last


def _last_epoch(data: bytes) -> int:
    """Return the epoch of the last batch that parses.  The caller that decodes the next batch
    reports the damage.
    """
    epoch = NONE
    with contextlib.suppress(errors.CorruptBatch):
        for _, header in batches.iter_headers(data):
            epoch = header.leader_epoch
    return epoch
