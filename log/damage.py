"""Where a segment is damaged, and what is still whole: ranges of offsets and of bytes.

A survey checks every batch: its place in the log, its leader epoch, its checksum.  Where a batch
fails it looks for the next whole one.  What lies between the two is one damaged range (rule L9).

Three things say where the next whole batch begins:
  the damaged batch's own length and number of offsets, or these with one bit flipped, if a batch
  begins there that continues the offsets: a flipped bit anywhere leaves that so;
  the sparse index, whose entries are places where batches begin;
  a search for the magic number.

A record's value may hold a copy of a batch, which has a valid checksum, too.  So a batch that was
found by searching counts only if the batches after it lead, one behind the other, to a place that
is known: an entry of the index, or the segment's end.

Invariants
  D1  a range begins where the last whole batch ended and ends where the next whole one begins
      whose place is proven.  One flipped bit costs one batch; a whole batch between several
      damaged neighbours may be told as lost, up to the next entry of the index.
  D2  ranges of one survey are disjoint, ascending, and cover at least one offset each.
  D3  `end` is UNKNOWN for a tail alone: no batch, and no `end_offset`, says which offsets it held.
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
#: Bytes that are read at a time, at least.
CHUNK_BYTES = 1024 * 1024
_MAGIC = struct.pack("<I", batches.MAGIC)
#: Of a header.
_MAGIC_AT, _LENGTH_AT, _DELTA_AT = 16, 8, 28
_I32 = struct.Struct("<i")


class Damage(NamedTuple):
    """A range of offsets that cannot be read.  `position` and `end_position` bound its bytes; they
    are equal where bytes are missing."""

    start: Offset
    end: Offset  #: the first offset behind it; UNKNOWN
    position: int
    end_position: int
    problem: str

    def __str__(self) -> str:
        end = "?" if self.end == UNKNOWN else str(self.end)
        return f"[{self.start}, {end})"


def lost(where: str, damage: Damage) -> errors.DataLoss:
    """What a reader of the only copy gets for an offset in a damaged range."""
    return errors.DataLoss(
        f"{where}: offsets {damage} are damaged: {damage.problem}",
        offset=str(damage.start),
        next_offset=str(damage.end),
    )


def corrupt(where: str, damage: Damage) -> errors.CorruptLog:
    """What the operator gets (rule L9)."""
    return errors.CorruptLog(
        f"{where}: offsets {damage} are damaged: {damage.problem}; "
        "pk log repair goes past them while the broker is stopped",
        offset=str(damage.start),
        next_offset=str(damage.end),
    )


def missing_in_front(start: Offset, first_offset: Offset) -> Damage | None:
    """What is missing of a log that is to begin at `start` or below; its first segment begins at
    `first_offset`.
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
    """The damaged ranges of a segment of `size` bytes.

    end_offset: where its last batch ends, if that is known.  index: entries whose offset and
    position agree with the segment.  epoch_of: the leader epoch of an offset, NONE = not known.
    dense: each batch begins where the one before it ends.
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
    """Where the damaged range ends that begins with `offset`, at `position`; UNKNOWN = nothing says
    so.  Reads from there to the next whole batch.  index: of the segment, whose first offset is
    `base_offset`.
    """
    rest = _Survey(read, size, base_offset, end_offset, index, None, True)
    return rest.next_whole(position, offset)[1]


def is_torn(read: ReadAt, size: int, position: int, offset: Offset, *, dense: bool) -> bool:
    """Whether the last bytes of a segment, from `position` on, are the beginning of one batch that
    a dying process left.  They are not if a whole batch lies among them, or if they are one whole
    batch whose header announces another length: then the length is what is damaged, and what is
    there may have been acknowledged.
    """
    tail = _Survey(read, size, offset, UNKNOWN, None, None, dense)
    return tail.next_whole(position, offset)[1] == UNKNOWN


class _Survey:
    """See `survey`."""

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
        #: Position → offset of batches, by the index.
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
        """At most `size` bytes of the segment, from a chunk that is kept."""
        size = max(0, min(size, self._size - position))
        at = position - self._chunk_at
        if at < 0 or at + size > len(self._chunk):
            wanted = min(max(size, CHUNK_BYTES), self._size - position)
            self._chunk, self._chunk_at, at = self._read_at(position, wanted), position, 0
        return memoryview(self._chunk)[at : at + size]

    def _header(self, position: int) -> tuple[Header | None, str]:
        """A header whose fields make sense together and that fits into the segment."""
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
        """The batch at `position` if it is whole and continues the log at `offset`."""
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
        """Position and offset of the next whole batch behind the damaged one at `position`; at the
        end, the segment's own."""
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
        """Where the damaged batch itself says that it ends, if a batch begins there that continues
        the offsets; one bit of what it says may be the one that rotted.
        """
        raw = self._bytes(position, HEADER_BYTES)
        if len(raw) < HEADER_BYTES:
            return None
        (length,) = _I32.unpack_from(raw, _LENGTH_AT)
        (delta,) = _I32.unpack_from(raw, _DELTA_AT)
        if self._continues(position, offset, length, delta, said=True):
            return position + length, offset + delta + 1
        if self._matches(position):
            return None  # then both numbers are right, and `offset` is not
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
        """Whether a batch of `size` bytes that ends with offset `offset + last` fits in here.

        The batch behind it must say so by its base offset, or the one behind that.  Both must
        unless the damaged batch `said` these numbers: no checksum covers a base offset, and a bit
        of it may be the one that rotted.
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
        """The offset behind the batch at `position` if all bytes up to the segment's end match its
        checksum, which covers the number of offsets and not the length: the length alone is wrong.
        """
        header = batches.read_header(self._bytes(position, HEADER_BYTES))
        base = offset if self._dense else max(offset, header.base_offset)
        following = base + header.last_offset_delta + 1
        if header.magic != batches.MAGIC or self._end_offset not in (UNKNOWN, following):
            return None
        raw = self._bytes(position, self._size - position)
        return following if crc32c(raw[batches.CRC_START :]) == header.crc else None

    def _matches(self, position: int) -> bool:
        """Whether the checksum of the batch at `position` is right."""
        header, _ = self._header(position)
        if header is None:
            return False
        return crc32c(self._bytes(position, header.length)[batches.CRC_START :]) == header.crc

    def _ends_with(self, position: int, offset: Offset, following: Offset) -> bool:
        """Whether the segment's last batch, damaged, ends the segment at `following`."""
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
        """The first batch in `[position, limit)` from which a chain of batches leads to `limit`."""
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
        """Whether batch follows batch from here to `limit`; damaged ones may lie between."""
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
    """Both numbers with one bit of either flipped."""
    for bit in range(31):
        yield length ^ 1 << bit, delta
        yield length, delta ^ 1 << bit


def span(size: int) -> int:
    """The most offsets that damaged batches of `size` bytes can have had."""
    return (size // HEADER_BYTES + 1) * BATCH_RECORDS_MAX
