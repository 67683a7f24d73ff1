"""The sparse index of a segment: offset → position, and the largest timestamp before each entry.

There is one entry per `index_interval_bytes` of log: the offset of a batch relative to the
segment's base, its position, and the largest timestamp of all batches before it.  Because of the
last column, a look-up by time is the same search as one by offset.

Files, little endian.  Each is written whole and carries a checksum, so that a torn one is detected
and rebuilt:

    .index      head | (relative offset u32, position u32) × count
    .timeindex  head | (largest timestamp before i64, offset i64) × count

    head        magic 4s | version u16 | 0 u16 | base_offset i64 | covered bytes u64
                | next_offset i64 | max_timestamp i64 | offset of max_timestamp i64
                | first_append_ms i64 | batches u64 | position of the last batch u64
                | checksum of the last batch u32 | count u32 | crc u32 (of everything else)

The head has the checksum of the last batch.  The segment compares it with the header of that batch
in the log.  If they differ, the index belongs to another log: this log was truncated, or replaced
under the same name.

Invariants
  I1  Offsets and positions grow strictly; timestamps do not fall.
  I2  An entry is added when its batch is decided.  Readers look only below the written end, so they
      never meet an entry of a batch that is not written.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from pk import formats
from pk.log.batch import Header
from pk.types import NONE

_HEAD = struct.Struct("<4sHHqQqqqqQQII")
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CRC.size
OFFSETS = b"pkix"
TIMES = b"pktx"
VERSION = 0
#: A segment spans fewer offsets and bytes than this: relative offsets and positions are u32.
SPAN_MAX = 2**31 - 1
NO_TIMESTAMP = -(2**63)


class Extent(NamedTuple):
    """What a segment holds up to a position."""

    size: int  #: size in bytes
    next_offset: int
    max_timestamp: int = NO_TIMESTAMP
    #: base offset of the first batch that has the largest timestamp
    max_timestamp_offset: int = NONE
    first_append_ms: int = NONE  #: broker's clock at the first append, from which segment_ms counts
    batches: int = 0
    last_position: int = 0  #: position of the last batch, and its checksum
    last_crc: int = 0

    def grown(
        self, header: Header, base_offset: int, max_timestamp: int, crc: int, now_ms: int
    ) -> Extent:
        """Return the extent with one more batch, at `base_offset`."""
        newer = max_timestamp > self.max_timestamp
        return Extent(
            self.size + header.length,
            base_offset + header.last_offset_delta + 1,
            max_timestamp if newer else self.max_timestamp,
            base_offset if newer else self.max_timestamp_offset,
            self.first_append_ms if self.first_append_ms >= 0 else now_ms,
            self.batches + 1,
            self.size,
            crc,
        )

    def beyond(self, size: int, next_offset: int) -> Extent:
        """Return this extent with another end.  The bytes behind the last batch are damaged."""
        return self._replace(size=size, next_offset=next_offset)


class SparseIndex:
    """The entries of one segment in memory."""

    __slots__ = ("base_offset", "offsets", "positions", "times")

    def __init__(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self.offsets = array("I")
        self.positions = array("I")
        self.times = array("q")

    def __len__(self) -> int:
        return len(self.times)

    def add(self, offset: int, position: int, max_timestamp_before: int) -> None:
        self.positions.append(position)
        self.times.append(max_timestamp_before)
        # set last: a thread that sees it sees the other arrays, too
        self.offsets.append(offset - self.base_offset)

    @property
    def last_position(self) -> int:
        """The position of the last entry; 0 without entries."""
        return self.positions[-1] if self.positions else 0

    def floor(self, offset: int) -> int:
        """Return a position at or before the batch that holds `offset`."""
        at = bisect_right(self.offsets, min(max(0, offset - self.base_offset), 2**32 - 1))
        return self.positions[at - 1] if at else 0

    def floor_position(self, position: int) -> tuple[int, int]:
        """Return the last entry at or before `position`: (position, offset); (0, base offset) if
        there is none.
        """
        at = bisect_right(self.positions, position, 0, len(self.offsets))
        return (
            (self.positions[at - 1], self.base_offset + self.offsets[at - 1])
            if at
            else (0, self.base_offset)
        )

    def floor_time(self, timestamp_ms: int) -> int:
        """Return a position before which every timestamp is smaller than `timestamp_ms`."""
        at = bisect_left(self.times, timestamp_ms, 0, len(self.offsets))
        return self.positions[at - 1] if at else 0

    def truncate(self, size: int) -> None:
        """Forget entries at or above position `size`."""
        at = bisect_left(self.positions, size)
        del self.offsets[at:]
        del self.times[at:]
        del self.positions[at:]

    def nbytes(self) -> int:
        return 16 * len(self.offsets)


class CorruptIndex(ValueError):
    """An index file is torn, belongs to another segment or does not fit its log; the caller
    rebuilds it.
    """


def encode(index: SparseIndex, extent: Extent) -> tuple[bytes, bytes]:
    """Encode the contents of the two files; entries beyond `extent.size` are left out."""
    count = bisect_left(index.positions, max(extent.size, 0), 0, len(index.offsets))
    offsets = np.array(index.offsets[:count], np.uint32)
    positions = np.array(index.positions[:count], np.uint32)
    times = np.array(index.times[:count], np.int64)
    pairs = np.empty((count, 2), "<u4")
    pairs[:, 0], pairs[:, 1] = offsets, positions
    stamps = np.empty((count, 2), "<i8")
    stamps[:, 0], stamps[:, 1] = times, offsets.astype(np.int64) + index.base_offset
    return (
        _sealed(OFFSETS, index.base_offset, extent, count, pairs.tobytes()),
        _sealed(TIMES, index.base_offset, extent, count, stamps.tobytes()),
    )


def _sealed(magic: bytes, base_offset: int, extent: Extent, count: int, entries: bytes) -> bytes:
    head = _HEAD.pack(
        magic,
        VERSION,
        0,
        base_offset,
        extent.size,
        extent.next_offset,
        extent.max_timestamp,
        extent.max_timestamp_offset,
        extent.first_append_ms,
        extent.batches,
        extent.last_position,
        extent.last_crc,
        count,
    )
    return head + _CRC.pack(crc32c(entries, crc32c(head))) + entries


def decode_entries(
    raw: bytes, magic: bytes
) -> tuple[int, Extent, np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
    """Decode one file: `(base offset, extent, entries n × 2)`.  Raises `CorruptIndex`,
    `NewerFormat`.
    """
    if len(raw) < HEAD_BYTES:
        raise CorruptIndex(f"{len(raw)} bytes are no index")
    found, version, _, base_offset, *fields, count = _HEAD.unpack_from(raw)
    (crc,) = _CRC.unpack_from(raw, _HEAD.size)
    entries = raw[HEAD_BYTES:]
    if found != magic:
        raise CorruptIndex(f"begins with {found!r}")
    if crc != crc32c(entries, crc32c(raw[: _HEAD.size])):
        raise CorruptIndex("the checksum does not match")
    formats.require_version("an index of a segment", version, VERSION)
    kind = "<u4" if magic == OFFSETS else "<i8"
    width = 8 if magic == OFFSETS else 16
    if len(entries) != count * width:
        raise CorruptIndex(f"{count} entries in {len(entries)} bytes")
    rows = np.frombuffer(entries, kind).reshape(count, 2).astype(np.int64)
    return base_offset, Extent(*fields), rows


def decode(base_offset: int, index_raw: bytes, times_raw: bytes) -> tuple[SparseIndex, Extent]:
    """Decode both files of the segment `base_offset`.  Raises `CorruptIndex`, also if they
    contradict each other.
    """
    base, extent, pairs = decode_entries(index_raw, OFFSETS)
    other_base, other_extent, stamps = decode_entries(times_raw, TIMES)
    if (
        base != base_offset
        or other_base != base_offset
        or extent != other_extent
        or len(pairs) != len(stamps)
    ):
        raise CorruptIndex("the files are of another segment or of different times")
    if len(pairs) and (
        np.any(np.diff(pairs[:, 0]) <= 0)
        or np.any(np.diff(pairs[:, 1]) <= 0)
        or np.any(np.diff(stamps[:, 0]) < 0)
        or np.any(stamps[:, 1] - base_offset != pairs[:, 0])
        or pairs[-1, 1] >= extent.size
    ):
        raise CorruptIndex("entries do not grow")
    index = SparseIndex(base_offset)
    index.offsets = array("I", pairs[:, 0].astype(np.uint32).tobytes())
    index.positions = array("I", pairs[:, 1].astype(np.uint32).tobytes())
    index.times = array("q", stamps[:, 0].tobytes())
    return index, extent
