"""One segment: a `.log` file of whole batches, and the files derived from it.

    00000000000000001200.log        batches, from offset 1200 on
    00000000000000001200.index      offset → position              log/index
    00000000000000001200.timeindex  time → offset                  log/index
    00000000000000001200.txnindex   aborted transactions           log/aborted
    00000000000000001200.snapshot   producer state at offset 1200  log/producers

Indexes are written when a segment is sealed, and those of the active one at a checkpoint and at a
clean close, unless it is short (log/closed_logs B5).  The log file is authoritative; the others are
rebuilt from it if they are missing or torn.

`decided` runs ahead of `written`: the loop assigns offsets, the write lane writes, and readers see
`written` only.  A sealed segment keeps no descriptor open.  Each read opens the file, so that it
can be removed at any time.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from crc32c import crc32c

from pk import errors, formats
from pk.log import aborted, damage, index
from pk.log import batch as batches
from pk.log.aborted import AbortedEntry
from pk.log.batch import HEADER_BYTES, Header
from pk.log.damage import UNKNOWN, Damage, ReadAt
from pk.log.index import Extent, SparseIndex
from pk.log.recovery import Stop
from pk.log.storage import File, Storage
from pk.types import NONE

LOG, INDEX, TIMEINDEX, TXNINDEX, SNAPSHOT = ".log", ".index", ".timeindex", ".txnindex", ".snapshot"
DELETED = ".deleted"
#: The last part of the name of a file that a cleaning has written and that is not in place yet.
CLEANED = ".cleaned"
#: The leading fields of a header: base offset, length, magic, last offset delta.
_BRIEF = struct.Struct("<qi4xI8xi")
#: Bytes that a walk over headers reads at a time; larger batches are stepped over.
WALK_BYTES = 64 * 1024
#: How many positions a segment remembers for sequential readers.
HINTS_MAX = 64


def file_name(base_offset: int, suffix: str) -> str:
    return f"{base_offset:020d}{suffix}"


def base_offset_of(name: str, suffix: str = LOG) -> int | None:
    """Return the base offset in a file's name; None for other files."""
    stem = name.removesuffix(suffix)
    return int(stem) if name.endswith(suffix) and len(stem) == 20 and stem.isdigit() else None


class BatchWalk:
    """Iterates `(position, header)` of the batches in `[position, end)`.  Afterwards `stop` says
    why and where the walk ended.

    `verify_from`: the checksum is checked for batches that reach this offset (None = for none).
    `dense`: the offsets must follow each other without gaps; otherwise they must only grow.
    `damage`: the known damaged ranges, which are stepped over.
    """

    def __init__(
        self,
        read: ReadAt,
        position: int,
        end: int,
        next_offset: int,
        *,
        verify_from: int | None = None,
        dense: bool = False,
        damage: tuple[Damage, ...] = (),
    ) -> None:
        self._damage = damage
        self._read = read
        self._end = end
        self._verify_from = verify_from
        self._dense = dense
        self.position = position  #: position after the last good batch
        self.next_offset = next_offset
        self.stop = Stop.END
        self.problem = ""

    def __iter__(self) -> Iterator[tuple[int, Header]]:
        chunk, start = b"", self.position
        while self.position < self._end:
            if self._damage and self._step_over():
                continue
            at = self.position - start
            if len(chunk) - at < HEADER_BYTES:
                start, at = self.position, 0
                chunk = self._read(start, min(WALK_BYTES, self._end - start))
                if len(chunk) < HEADER_BYTES:
                    self._stopped(Stop.SHORT, f"{len(chunk)} bytes are no batch header")
                    return
            header = Header._make(batches.HEADER.unpack_from(chunk, at))
            if not self._good(header, chunk, at):
                return
            position = self.position
            self.position += header.length
            self.next_offset = header.next_offset
            yield position, header

    def _step_over(self) -> bool:
        """Leave a damaged range if the walk is in one; an index entry may even point into it."""
        for each in self._damage:
            if each.position <= self.position < each.end_position:
                self.position = each.end_position
                self.next_offset = max(self.next_offset, each.end)
                return True
        return False

    def _good(self, header: Header, chunk: bytes, at: int) -> bool:
        try:
            batches.check_structure(header)
        except errors.CorruptBatch as cause:
            return self._stopped(Stop.BAD, cause.message)
        if header.base_offset < self.next_offset or (
            self._dense and header.base_offset != self.next_offset
        ):
            return self._stopped(
                Stop.BAD, f"offset {header.base_offset} instead of {self.next_offset}"
            )
        if self.position + header.length > self._end:
            left = self._end - self.position
            return self._stopped(Stop.SHORT, f"{header.length} bytes announced, {left} left")
        if self._verify_from is None or header.last_offset < self._verify_from:
            return True
        if len(chunk) - at >= header.length:
            body = memoryview(chunk)[at : at + header.length]
        else:
            body = memoryview(self._read(self.position, header.length))
        if len(body) < header.length:
            return self._stopped(Stop.SHORT, f"{header.length} bytes announced, {len(body)} there")
        found = crc32c(body[batches.CRC_START :])
        if found != header.crc:
            return self._stopped(Stop.BAD, f"checksum 0x{found:08x} instead of 0x{header.crc:08x}")
        return True

    def _stopped(self, stop: Stop, problem: str) -> bool:
        self.stop, self.problem = stop, problem
        return False


class Piece(NamedTuple):
    """Whole batches of one segment."""

    data: bytes
    base_offset: int
    next_offset: int


class Segment:
    """One segment: its log file, its index, and how far it is decided, written and SYNCED.  Fields
    belong to the loop unless their comment says otherwise.
    """

    __slots__ = (
        "_storage",
        "aborted",
        "base_offset",
        "damage",
        "decided",
        "directory",
        "dropped",
        "file",
        "hints",
        "index",
        "synced",
        "tail",
        "written",
    )

    def __init__(self, storage: Storage, directory: str, base_offset: int, tail: str = "") -> None:
        self._storage = storage
        self.directory = directory
        self.base_offset = base_offset
        self.decided = Extent(0, base_offset)
        self.written = Extent(0, base_offset)
        self.index: SparseIndex | None = SparseIndex(
            base_offset
        )  #: None = the segment is sealed; the index is loaded on demand
        self.aborted: list[AbortedEntry] = []
        #: write lane: the file, open for append; None = the segment is sealed
        self.file: File | None = None
        self.synced = False  #: whether the whole file is SYNCED (sealed segments)
        self.dropped = False
        #: ranges that are known to be damaged; the tuple is replaced as a whole
        self.damage: tuple[Damage, ...] = ()
        self.hints: dict[int, int] = {}
        #: What the names of the files have behind their suffix until the files are put in place
        #: (log/swap.py); the write lane removes it.
        self.tail = tail

    @property
    def is_hole(self) -> bool:
        """Whether the segment has no batch because the file that held its offsets is missing."""
        return not self.written.size and bool(self.damage)

    def path(self, suffix: str = LOG) -> str:
        return f"{self.directory}/{file_name(self.base_offset, suffix)}{self.tail}"

    def stored_bytes(self) -> int:
        """Return the size of the log file, whatever is known of its content."""
        with self._open() as file:
            return file.size()

    def read_file(self, suffix: str) -> bytes:
        """Read a derived file.  Raises `FileNotFoundError`."""
        tail = self.tail  # first: the write lane may remove it
        path = self.path(suffix)
        try:
            return self._storage.read_file(path)
        except FileNotFoundError:
            if not tail:
                raise
            return self._storage.read_file(path.removesuffix(tail))  # put in place meanwhile

    def _open(self) -> OpenFile:
        tail = self.tail  # first: the write lane may remove it
        path = self.path()
        return OpenFile(self._storage, path, path.removesuffix(tail) if tail else path + DELETED)

    # -- decide (loop) -----------------------------------------------------------------------------
    def grow(
        self,
        header: Header,
        base_offset: int,
        max_timestamp: int,
        crc: int,
        now_ms: int,
        interval: int,
    ) -> None:
        """Account for one more batch at the decided end."""
        before = self.decided
        if self.index is not None and before.size - self.index.last_position >= max(interval, 1):
            self.index.add(base_offset, before.size, before.max_timestamp)
        self.decided = before.grown(header, base_offset, max_timestamp, crc, now_ms)

    def revert(self) -> None:
        """Forget the batches that were decided and not written."""
        self.decided = self.written
        if self.index is not None:
            self.index.truncate(self.written.size)
        self.aborted = [
            entry for entry in self.aborted if entry.last_offset < self.written.next_offset
        ]

    # -- write lane --------------------------------------------------------------------------------
    def create(self) -> None:
        """Create the log file, empty and open for append."""
        self.file = self._storage.open(self.path(), create=True)
        if self.file.size():
            self.file.truncate(0)

    def open_for_append(self) -> File:
        if self.file is None:
            self.file = self._storage.open(self.path())
            self.synced = False
        return self.file

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()

    def write_indexes(self, extent: Extent, sparse: SparseIndex | None = None) -> None:
        """Write the derived files as of `extent`.  They are not synced, because a torn one is
        rebuilt.

        The index of aborted transactions is the exception: an older version of it looks as whole as
        the newest.  It is SYNCED, and written first.
        """
        sparse = sparse if sparse is not None else self.index
        if sparse is None:
            return
        offsets, times = index.encode(sparse, extent)
        entries = [entry for entry in self.aborted if entry.last_offset < extent.next_offset]
        write = self._storage.replace_file if entries else partial(write_file, self._storage)
        write(self.path(TXNINDEX), aborted.encode(entries))
        for suffix, raw in ((INDEX, offsets), (TIMEINDEX, times)):
            write_file(self._storage, self.path(suffix), raw)

    def load_index(self) -> tuple[SparseIndex, Extent]:
        """Load the index.  Raises `index.CorruptIndex` if it is torn or does not belong to the
        content of the log, and `FileNotFoundError`.
        """
        with formats.named(self.path(INDEX)):
            sparse, extent = index.decode(
                self.base_offset, self.read_file(INDEX), self.read_file(TIMEINDEX)
            )
        if extent.size:
            last = self.read_at(extent.last_position, HEADER_BYTES)
            header = batches.read_header(last) if len(last) == HEADER_BYTES else None
            if header is not None and (header.crc, header.next_offset) != (
                extent.last_crc,
                extent.next_offset,
            ):
                raise index.CorruptIndex("the log does not hold the batch the index ends with")
        return sparse, extent

    # -- read lane ---------------------------------------------------------------------------------
    def read_at(self, position: int, size: int) -> bytes:
        """Read bytes of the log file.  Raises `FileNotFoundError` once the segment is removed."""
        file = self.file
        if file is not None:
            try:
                return file.read(position, size)
            except FileNotFoundError:
                pass  # sealed and closed in the meantime
        with self._open() as opened:
            return opened.read(position, size)

    def piece(
        self,
        sparse: SparseIndex,
        offset: int,
        bound: int,
        max_bytes: int,
        min_one: bool,
        *,
        dense: bool = False,
    ) -> Piece | None:
        """Return the whole batches below `bound`, from the batch that holds `offset` (or the
        next) on; None if there is none.

        dense: each batch begins at the offset where the batch before it ends
        """
        if self.file is not None:
            found = self._cut(self.read_at, sparse, offset, bound, max_bytes, min_one, dense)
        else:
            with self._open() as opened:
                found = self._cut(opened.read, sparse, offset, bound, max_bytes, min_one, dense)
        if found is None:
            return None
        if len(self.hints) >= HINTS_MAX:
            self.hints = {}
        return found

    def _cut(
        self,
        read: ReadAt,
        sparse: SparseIndex,
        offset: int,
        bound: int,
        max_bytes: int,
        min_one: bool,
        dense: bool,
    ) -> Piece | None:
        """Find and read whole batches; see the function `cut`.  Raises `CorruptLog`, with the
        range.
        """
        extent = self.written
        try:
            return cut(
                read, sparse, extent, self.hints, offset, bound, max_bytes, min_one, self.damage,
                dense=dense,
            )  # fmt: skip
        except NoBatch as stop:
            size, end = extent.size, extent.next_offset
            raise stop.named(self.path(), read, size, sparse, end) from stop

    def reindexed(self, interval: int, *, dense: bool = False) -> SparseIndex:
        """Rebuild the index from the log's headers (a derived file was missing or torn).  Raises
        `CorruptLog`.
        """
        sparse = SparseIndex(self.base_offset)
        extent = Extent(0, self.base_offset)
        walk = BatchWalk(
            self.read_at, 0, self.written.size, self.base_offset, dense=dense, damage=self.damage
        )
        for position, header in walk:
            if position > extent.size:
                extent = extent.beyond(position, header.base_offset)
            if position - sparse.last_position >= max(interval, 1):
                sparse.add(header.base_offset, position, extent.max_timestamp)
            extent = extent.grown(header, header.base_offset, header.max_timestamp, header.crc, 0)
        if walk.stop is not Stop.END:
            raise corrupt(self.path(), walk)
        return sparse


def corrupt(path: str, walk: BatchWalk) -> errors.CorruptLog:
    """Return the error of rule L9, with the place."""
    return errors.CorruptLog(
        f"{path} at {walk.position}, offset {walk.next_offset}: {walk.problem}",
        file=path,
        position=str(walk.position),
        offset=str(walk.next_offset),
    )


class NoBatch(Exception):
    """No whole batch begins at `position` of a segment, where offset `offset` is expected."""

    def __init__(self, position: int, offset: int, problem: str = "no batch begins here") -> None:
        super().__init__(problem)
        self.position = position
        self.offset = offset
        self.problem = problem

    def named(
        self, path: str, read: ReadAt, size: int, sparse: SparseIndex, end_offset: int = UNKNOWN
    ) -> errors.CorruptLog:
        """Return the error of rule L9 with the segment file and the range.  Reads up to the next
        whole batch.
        """
        end = UNKNOWN
        with contextlib.suppress(errors.PkError, FileNotFoundError):
            end = damage.end_of_range(
                read, size, self.position, self.offset, end_offset=end_offset,
                index=sparse, base_offset=sparse.base_offset,
            )  # fmt: skip
        lost = Damage(self.offset, end, self.position, self.position, self.problem)
        known = {} if end == UNKNOWN else {"next_offset": str(end)}
        return errors.CorruptLog(
            f"{path} at {self.position}: offsets {lost} are damaged: {self.problem}",
            file=path,
            position=str(self.position),
            offset=str(self.offset),
            **known,
        )


class OpenFile:
    """Opens a file for reading for the length of a `with`.

    other: the name that the file gets when it is renamed.  By default that of a dropped segment
    """

    def __init__(self, storage: Storage, path: str, other: str = "") -> None:
        try:
            self._file = storage.open(path, write=False)
        except FileNotFoundError:
            self._file = storage.open(other or path + DELETED, write=False)

    def __enter__(self) -> File:
        return self._file

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def cut(
    read: ReadAt,
    sparse: SparseIndex,
    extent: Extent,
    hints: dict[int, int],
    offset: int,
    bound: int,
    max_bytes: int,
    min_one: bool,
    damage: tuple[Damage, ...] = (),
    *,
    dense: bool = False,
) -> Piece | None:
    """Find the byte range of the whole batches in `[offset, bound)` by index and headers, then read
    it in one go.  `damage` is outside of `[offset, bound)`.  Raises `NoBatch`.

    dense: each batch begins where the batch before it ends.  No checksum covers the offset of a
        batch.  A reader compares it with the batches on both sides, and the last batch of a piece
        has none behind it: its place follows from the index, and from the headers in front of it.
    """
    for each in damage:
        if offset < each.start:  # for the reader the segment ends there
            extent = extent.beyond(each.position, each.start)
            break
    start, base = hints.get(offset, NONE), offset
    if not NONE < start < extent.size:
        start, base = _start_of(read, sparse, extent, offset, damage, dense)
    if start == NONE:
        return None
    end, next_offset = _end_of(
        read, sparse, extent, start, base, bound, start + max(max_bytes, 0), dense
    )
    if end == start:
        header = _header_at(read, start, offset)
        if header.base_offset >= bound:
            return Piece(b"", bound, bound)
        # or only its header says so: a reader would never get past it
        if header.last_offset >= bound:
            try:
                batches.check(read(start, header.length))
            except errors.CorruptBatch as cause:
                raise NoBatch(start, offset) from cause
        if header.last_offset >= bound or not min_one:
            return Piece(b"", offset, offset)
        end, next_offset = start + header.length, header.next_offset
    data = read(start, end - start)
    if len(data) < end - start:
        raise NoBatch(start, offset)
    first = _header_at(lambda at, size: data[at - start : at - start + size], start, offset)
    hints[next_offset] = end
    return Piece(data, first.base_offset, next_offset)


def _header_at(read: ReadAt, position: int, offset: int) -> Header:
    raw = read(position, HEADER_BYTES)
    if len(raw) == HEADER_BYTES:
        header = batches.read_header(raw)
        if (
            header.magic == batches.MAGIC
            and header.length >= HEADER_BYTES
            and header.last_offset >= offset
        ):
            return header
    raise NoBatch(position, offset)


def _start_of(
    read: ReadAt,
    sparse: SparseIndex,
    extent: Extent,
    offset: int,
    damage: tuple[Damage, ...],
    dense: bool,
) -> tuple[int, int]:
    """Return position and base offset of the batch that holds `offset`, or of the next one; NONE =
    there is none.
    """
    position, base = sparse.floor_position(sparse.floor(offset))
    walk = BatchWalk(read, position, extent.size, base, dense=dense, damage=damage)
    for at, header in walk:
        if header.last_offset >= offset:
            return at, header.base_offset
    if walk.stop is not Stop.END:
        raise NoBatch(walk.position, walk.next_offset, walk.problem)
    return NONE, NONE


def _end_of(
    read: ReadAt,
    sparse: SparseIndex,
    extent: Extent,
    start: int,
    base: int,
    bound: int,
    limit: int,
    dense: bool,
) -> tuple[int, int]:
    """Return `(end, next offset)` of the whole batches from `start`, where `base` begins, that end
    by `limit` and lie below `bound`.
    """
    if limit >= extent.size and bound >= extent.next_offset:
        return extent.size, extent.next_offset
    position = min(sparse.floor_position(limit)[0], sparse.floor(bound))
    begin, base = (start, base) if position <= start else sparse.floor_position(position)
    return _whole(read, begin, base, min(extent.size, limit), bound, dense)


def _whole(
    read: ReadAt, position: int, next_offset: int, limit: int, bound: int, dense: bool
) -> tuple[int, int]:
    """Step over batches from `position`: return `(end, next offset)` of the last one that ends by
    `limit` and below `bound`.  It is a `BatchWalk` with few checks, because every fetch runs it.
    """
    end = position
    while limit - end >= HEADER_BYTES:
        chunk = read(end, min(WALK_BYTES, limit - end))
        start, at, last = end, 0, len(chunk) - HEADER_BYTES
        if last < 0:
            break
        while at <= last:
            base, length, magic, delta = _BRIEF.unpack_from(chunk, at)
            if magic != batches.MAGIC or length < HEADER_BYTES:
                raise NoBatch(end, next_offset)
            if dense and base != next_offset:
                raise NoBatch(end, next_offset, f"offset {base} instead of {next_offset}")
            following = base + delta + 1
            if end + length > limit or following > bound:
                return end, next_offset
            at += length
            end, next_offset = start + at, following
            if following >= bound:  # bytes beyond may be in the middle of being written
                return end, next_offset
    return end, next_offset


def write_file(storage: Storage, path: str, raw: bytes) -> None:
    """Write the whole content of a derived file: WRITTEN and not atomic, because its checksum
    reveals a torn file.
    """
    file = storage.open(path, create=True)
    try:
        size = file.size()
        if size == len(raw) and file.read(0, size) == raw:
            return
        # a file is written over where it is: to cut it to nothing first can wait for the disk
        if size > len(raw):
            file.truncate(len(raw))
        file.write_at(0, raw)
    finally:
        file.close()
