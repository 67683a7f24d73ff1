"""Where a segment is damaged, and what is still whole: ranges of offsets and of bytes.

A survey checks the place in the log, the leader epoch and the checksum of every batch.  Where a
batch fails, the survey looks for the next whole batch.  The bytes between are one damaged range
(rule L9).

A survey finds the next whole batch in one of three ways:
  - from the damaged batch's own length and number of offsets, or from these with one bit flipped,
    if a batch that continues the offsets begins there.  After a single flipped bit this always
    succeeds;
  - from the sparse index, whose entries are places where batches begin;
  - by a search for the magic number.

A record's value may hold a copy of a batch with a valid checksum.  So a batch that was found by
searching counts only if the batches after it lead, one behind the other, to a known place: an entry
of the index or the segment's end.

Invariants
  D1  A range begins where the last whole batch ended.  It ends where the next whole batch begins
      whose place is proven.  One flipped bit costs one batch.  A whole batch between several
      damaged ones may be reported as lost, up to the next entry of the index.
  D2  The ranges of one survey are disjoint and ascending, and each covers at least one offset.
  D3  `end` is UNKNOWN only for a tail: no later batch and no `end_offset` says which offsets it
      held.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from crc32c import crc32c

from pk import errors
from pk.limits import BATCH_RECORDS_MAX
from pk.log import batch as batches
from pk.log.batch import HEADER_BYTES, Header
from pk.log.index import SparseIndex
from pk.types import NONE, Epoch, Offset

ReadAt = Callable[[int, int], bytes]

UNKNOWN = NONE
#: The least number of bytes that is read at a time.
CHUNK_BYTES = 1024 * 1024
_MAGIC = struct.pack("<I", batches.MAGIC)
#: Positions of fields in a header.
_MAGIC_AT, _LENGTH_AT, _DELTA_AT = 16, 8, 28
_I32 = struct.Struct("<i")


class Damage(NamedTuple):
    """A range of offsets that cannot be read.  `position` and `end_position` bound its bytes; they
    are equal where bytes are missing."""

    start: Offset
    end: Offset  #: the first offset behind the range; UNKNOWN if nothing says it
    position: int
    end_position: int
    problem: str

    def __str__(self) -> str:
        end = "?" if self.end == UNKNOWN else str(self.end)
        return f"[{self.start}, {end})"


def lost(where: str, damage: Damage) -> errors.DataLoss:
    """Return the error that a reader of the only copy gets for an offset in a damaged range."""
    return errors.DataLoss(
        f"{where}: offsets {damage} are damaged: {damage.problem}",
        offset=str(damage.start),
        next_offset=str(damage.end),
    )


def corrupt(where: str, damage: Damage) -> errors.CorruptLog:
    """Return the error that the operator gets (rule L9)."""
    return errors.CorruptLog(
        f"{where}: offsets {damage} are damaged: {damage.problem}; "
        "stop the broker and run pk log repair to skip them",
        offset=str(damage.start),
        next_offset=str(damage.end),
    )


def missing_in_front(start: Offset, first_offset: Offset) -> Damage | None:
    """Return the range that is missing at the beginning of a log.  The log must begin at `start` or
    below, and its first segment begins at `first_offset`.
    """
    if first_offset <= start:
        return None
    return Damage(start, first_offset, 0, 0, f"the segment file that held offset {start} is gone")


def survey(
    read: ReadAt,
    size: int,
    base_offset: Offset,
    *,
    end_offset: Offset = UNKNOWN,
    index: SparseIndex | None = None,
    epoch_of: Callable[[Offset], Epoch] | None = None,
    dense: bool = True,
) -> list[Damage]:
    """Return the damaged ranges of a segment of `size` bytes.

    end_offset: where the last batch ends, if that is known.  index: the entries whose offset and
    position agree with the segment.  epoch_of: returns the leader epoch of an offset, NONE =
    unknown.  dense: each batch begins at the offset where the batch before it ends.
    """
    return list(_Survey(read, size, base_offset, end_offset, index, epoch_of, dense).run())


def end_of_range(
    read: ReadAt,
    size: int,
    position: int,
    offset: Offset,
    *,
    end_offset: Offset = UNKNOWN,
    index: SparseIndex | None = None,
    base_offset: Offset = 0,
) -> Offset:
    """Return the end of the damaged range that begins with `offset`, at `position`; UNKNOWN if
    nothing says where it ends.

    Reads from `position` to the next whole batch.  index: the index of the segment, whose first
    offset is `base_offset`.
    """
    rest = _Survey(read, size, base_offset, end_offset, index, None, True)
    return rest.next_whole(position, offset)[1]


def is_torn(read: ReadAt, size: int, position: int, offset: Offset, *, dense: bool) -> bool:
    """Whether the last bytes of a segment, from `position` on, are the beginning of one batch that
    a dying process left.  They are not if a whole batch lies among them, or if they are one
    whole batch whose header announces another length.  In the second case the length is damaged,
    and the batch may have been acknowledged.
    """
    tail = _Survey(read, size, offset, UNKNOWN, None, None, dense)
    return tail.next_whole(position, offset)[1] == UNKNOWN


class _Survey:
    """The state of one survey; see the function `survey`."""

    def __init__(
        self,
        read: ReadAt,
        size: int,
        base_offset: Offset,
        end_offset: Offset,
        index: SparseIndex | None,
        epoch_of: Callable[[Offset], Epoch] | None,
        dense: bool,
    ) -> None:
        self._read_at = read
        self._size = size
        self._base_offset = base_offset
        self._end_offset = end_offset
        self._epoch_of = epoch_of
        self._dense = dense
        positions = index.positions if index is not None else ()
        offsets = index.offsets if index is not None else ()
        #: Positions of batches → their base offsets, from the index.
        self._places = {
            at: base_offset + delta for at, delta in zip(positions, offsets, strict=False)
        }
        self._chunk, self._chunk_at = b"", 0

    def run(self) -> Iterator[Damage]:
        position, offset = 0, self._base_offset
        while position < self._size:
            header, problem = self._whole(position, offset)
            if header is not None:
                position, offset = position + header.length, header.next_offset
                continue
            next_position, next_offset = self.next_whole(position, offset)
            yield Damage(offset, next_offset, position, next_position, problem)
            if next_offset == UNKNOWN:
                return
            position, offset = next_position, next_offset
        if self._end_offset != UNKNOWN and offset < self._end_offset:
            yield Damage(offset, self._end_offset, self._size, self._size, "bytes are missing")

    # -- one batch ---------------------------------------------------------------------------------

    def _bytes(self, position: int, size: int) -> memoryview:
        """Return at most `size` bytes of the segment, from a chunk that is kept in memory."""
        size = max(0, min(size, self._size - position))
        at = position - self._chunk_at
        if at < 0 or at + size > len(self._chunk):
            wanted = min(max(size, CHUNK_BYTES), self._size - position)
            self._chunk, self._chunk_at, at = self._read_at(position, wanted), position, 0
        return memoryview(self._chunk)[at : at + size]

    def _header(self, position: int) -> tuple[Header | None, str]:
        """Return the header at a position if its fields are consistent and the batch fits into the
        segment.
        """
        raw = self._bytes(position, HEADER_BYTES)
        if len(raw) < HEADER_BYTES:
            return None, f"{len(raw)} bytes are no batch header"
        header = batches.read_header(raw)
        try:
            batches.check_structure(header)
        except errors.CorruptBatch as cause:
            return None, cause.message
        if position + header.length > self._size:
            left = self._size - position
            return None, f"{header.length} bytes announced, {left} left"
        return header, ""

    def _whole(self, position: int, offset: Offset) -> tuple[Header | None, str]:
        """Return the batch at `position` if it is whole and continues the log at `offset`."""
        header, problem = self._header(position)
        if header is None:
            return None, problem
        base = header.base_offset
        if base < offset or (self._dense and base != offset):
            return None, f"offset {base} instead of {offset}"
        if self._end_offset != UNKNOWN and header.next_offset > self._end_offset:
            return None, f"it reaches beyond {self._end_offset}, where the segment ends"
        known = NONE if self._epoch_of is None else self._epoch_of(base)
        if known not in (NONE, header.leader_epoch):
            return None, f"leader epoch {header.leader_epoch} instead of {known}"
        raw = self._bytes(position, header.length)
        found = crc32c(raw[batches.CRC_START :])
        if len(raw) < header.length or found != header.crc:
            return None, f"checksum 0x{found:08x} instead of 0x{header.crc:08x}"
        return header, ""

    # -- the next whole one ------------------------------------------------------------------------

    def next_whole(self, position: int, offset: Offset) -> tuple[int, Offset]:
        """Return position and offset of the next whole batch behind the damaged one at `position`;
        if there is none, those of the segment's end.
        """
        following = self._by_its_header(position, offset)
        if following is not None:
            return following
        places = [at for at in self._places if at > position]
        for place in sorted(places):
            base = self._places[place]
            if base > offset and self._whole(place, base)[0] is not None:
                found = self._search(position + 1, place, offset, base)
                return (place, base) if found is None else found
        found = self._search(position + 1, self._size, offset, self._end_offset)
        return (self._size, self._end_offset) if found is None else found

    def _by_its_header(self, position: int, offset: Offset) -> tuple[int, Offset] | None:
        """Return where the damaged batch ends according to its own header, if a batch that
        continues the offsets begins there.  One bit of the header's length or number of offsets may
        be flipped.
        """
        raw = self._bytes(position, HEADER_BYTES)
        if len(raw) < HEADER_BYTES:
            return None
        (length,) = _I32.unpack_from(raw, _LENGTH_AT)
        (delta,) = _I32.unpack_from(raw, _DELTA_AT)
        if self._continues(position, offset, length, delta, said=True):
            return position + length, offset + delta + 1
        if self._matches(position):
            return None  # then both numbers are right, and `offset` is wrong
        following = self._end_by_its_checksum(position, offset)
        if following is not None:
            return self._size, following
        for size, last in _variants(length, delta):
            if self._continues(position, offset, size, last, said=False):
                return position + size, offset + last + 1
        return None

    def _continues(
        self, position: int, offset: Offset, size: int, last: int, *, said: bool
    ) -> bool:
        """Whether a batch of `size` bytes whose last offset is `offset + last` fits at `position`.

        The base offset of the next batch, or of the one after it, must confirm the numbers.  Both
        must if the damaged batch's header does not have exactly these numbers (`said` is false): no
        checksum covers a base offset, so a bit of it may be flipped.
        """
        end, following = position + size, offset + last + 1
        if size < HEADER_BYTES or last < 0 or end > self._size:
            return False
        if end == self._size:
            return self._ends_with(position, offset, following)
        header, _ = self._header(end)
        if header is None:
            return False
        behind, after = end + header.length, following + header.last_offset_delta + 1
        if behind == self._size:
            confirmed = after == self._end_offset
        else:
            other, _ = self._header(behind)
            confirmed = other is not None and other.base_offset == after
        if header.base_offset == following:
            return said or confirmed
        return said and confirmed

    def _end_by_its_checksum(self, position: int, offset: Offset) -> Offset | None:
        """Return the offset behind the batch at `position` if all bytes up to the segment's end
        match its checksum.  The checksum covers the number of offsets but not the length, so only
        the length is wrong.
        """
        header = batches.read_header(self._bytes(position, HEADER_BYTES))
        base = offset if self._dense else max(offset, header.base_offset)
        following = base + header.last_offset_delta + 1
        if header.magic != batches.MAGIC or self._end_offset not in (UNKNOWN, following):
            return None
        raw = self._bytes(position, self._size - position)
        return following if crc32c(raw[batches.CRC_START :]) == header.crc else None

    def _matches(self, position: int) -> bool:
        """Whether the checksum of the batch at `position` matches."""
        header, _ = self._header(position)
        if header is None:
            return False
        return crc32c(self._bytes(position, header.length)[batches.CRC_START :]) == header.crc

    def _ends_with(self, position: int, offset: Offset, following: Offset) -> bool:
        """Whether the damaged last batch of the segment ends at offset `following`."""
        if self._end_offset != UNKNOWN:
            return self._end_offset == following
        header, _ = self._header(position)
        return header is not None and (header.base_offset, header.next_offset) == (
            offset,
            following,
        )

    def _search(
        self, position: int, limit: int, offset: Offset, limit_offset: Offset
    ) -> tuple[int, Offset] | None:
        """Return the first batch in `[position, limit)` from which a chain of batches leads to
        `limit`.
        """
        origin = position
        while position < limit:
            raw = bytes(self._bytes(position, min(CHUNK_BYTES, limit - position)))
            at = raw.find(_MAGIC, _MAGIC_AT)
            while at >= 0:
                start = position + at - _MAGIC_AT
                header, _ = self._header(start)
                base = offset if header is None else header.base_offset
                if (
                    offset < base <= offset + span(start - origin)
                    and self._whole(start, base)[0] is not None
                    and self._leads_to(start, base, limit, limit_offset)
                ):
                    return start, base
                at = raw.find(_MAGIC, at + 1)
            if position + len(raw) >= limit or len(raw) <= HEADER_BYTES:
                return None
            position += len(raw) - HEADER_BYTES
        return None

    def _leads_to(self, position: int, offset: Offset, limit: int, limit_offset: Offset) -> bool:
        """Whether consecutive batches lead from `position` to `limit`; damaged ones may lie
        between.
        """
        while position < limit:
            header, _ = self._header(position)
            if header is not None and header.base_offset == offset:
                position, offset = position + header.length, header.next_offset
                continue
            found = self._by_its_header(position, offset)
            if found is None:
                return False
            position, offset = found
        return position == limit and limit_offset in (UNKNOWN, offset)


def _variants(length: int, delta: int) -> Iterator[tuple[int, int]]:
    """Yield both numbers with one bit of either flipped."""
    for bit in range(31):
        yield length ^ 1 << bit, delta
        yield length, delta ^ 1 << bit


def span(size: int) -> int:
    """Return the largest number of offsets that damaged batches of `size` bytes can have had."""
    return (size // HEADER_BYTES + 1) * BATCH_RECORDS_MAX
