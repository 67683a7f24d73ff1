"""The 64-byte header of a record batch: read, check, patch.  The rows are not read here.

Layout (docs/design/0001): little endian, naturally aligned, CRC-32C over bytes 24..length.  The
base offset and the leader epoch are outside the checksum, so the broker assigns both without
reading the body; only LogAppendTime rewrites a checksummed field.

Invariants
  B1  Every field of a header that `check` accepted can be trusted, except base_offset, leader_epoch
      and the body.
  B2  record_count <= BATCH_RECORDS_MAX and length >= HEADER_BYTES, so no allocation depends on an
      unchecked number.
  B3  An empty batch (record_count 0, rule L14) keeps the offsets, producer id, epoch and sequence
      of the batch whose records were removed.
  B4  The codec is a number of three bits.  A batch with a number that this build does not know
      still has a header that can be walked over (rule L19).  `check` raises `NewerFormat` for it if
      the checksum matches; a checksum that does not match is damage, whatever the number says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crc32c import crc32c

from pk import errors, limits
from pk.log.storage import Buffer
from pk.types import NONE

HEADER = struct.Struct("<qiiIIHhiqqqii")
HEADER_BYTES = limits.HEADER_BYTES
MAGIC = 0x50  #: as u32: bytes 17..19 are zero
CRC_START = 24  #: the checksum covers [24, length)
BATCH_BYTES_MAX = 2**31 - 1
#: The years 1 to 9999: the range that the languages of readers and the tier (rule T10) can all
#: express.
TIMESTAMP_MS_MIN = -62_135_596_800_000
TIMESTAMP_MS_MAX = 253_402_300_799_999

CODECS = ("none", "lz4", "zstd")
#: Bits 0, 1 and 15 are the bits 0, 1 and 2 of the codec's number.
CODEC_MASK = 0x8003
CODEC_NUMBERS = 8
LOG_APPEND_TIME = 1 << 2
TRANSACTIONAL = 1 << 3
CONTROL = 1 << 4
DELETE_HORIZON = 1 << 5
TIMESTAMPS = 1 << 6
TIMESTAMPS_I64 = 1 << 7
OFFSET_DELTAS = 1 << 8
KEY = 1 << 9
KEY_NULLS = 1 << 10
VALUE = 1 << 11
VALUE_NULLS = 1 << 12
HEADERS = 1 << 13
HEADER_NULLS = 1 << 14
#: Flags that describe the body: an empty batch has none of them.
BODY_FLAGS = CODEC_MASK | 0x7FC0
#: Each flag with the flag that it requires.
_NEEDS = (
    (TIMESTAMPS_I64, TIMESTAMPS),
    (KEY_NULLS, KEY),
    (VALUE_NULLS, VALUE),
    (HEADER_NULLS, HEADERS),
)

assert HEADER.size == HEADER_BYTES

_PATCH_OFFSET = struct.Struct("<q")
_PATCH_EPOCH = struct.Struct("<i")
_U32 = struct.Struct("<I")


class Header(NamedTuple):
    """The fields of a header, as stored in the batch."""

    base_offset: int
    length: int  #: size of the whole batch in bytes, header included
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    producer_epoch: int
    last_offset_delta: int
    base_timestamp: int  #: the smallest timestamp, ms; the delete horizon if that flag is set
    #: the largest timestamp, ms; that of every record if the type is LogAppendTime
    max_timestamp: int
    producer_id: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The first offset after this batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec_number(self) -> int:
        return self.attributes & 0b11 | self.attributes >> 13 & 0b100

    @property
    def codec(self) -> str:
        """The name of the codec.  Raises `NewerFormat` if this build does not know the number."""
        number = self.codec_number
        if number >= len(CODECS):
            raise errors.NewerFormat(
                f"the batch at offset {self.base_offset} is encoded with codec {number}; "
                f"this pk knows the codecs 0 to {len(CODECS) - 1}: use a newer pk"
            )
        return CODECS[number]

    @property
    def log_append_time(self) -> bool:
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def has_delete_horizon(self) -> bool:
        return bool(self.attributes & DELETE_HORIZON)

    @property
    def delete_horizon_ms(self) -> int | None:
        return self.base_timestamp if self.attributes & DELETE_HORIZON else None

    @property
    def sparse(self) -> bool:
        return bool(self.attributes & OFFSET_DELTAS)

    @property
    def has_null_keys(self) -> bool:
        """Whether some key is null.  This is exact, because an all-null column is left out, and a
        column without nulls does not have the flag.
        """
        return self.record_count > 0 and (self.attributes & (KEY | KEY_NULLS)) != KEY

    @property
    def idempotent(self) -> bool:
        return self.producer_id != NONE

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record; sequences wrap from 2^31 - 1 to 0 (KIP-98)."""
        if self.base_sequence == NONE:
            return NONE
        return (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF


def read_header(buffer: Buffer, position: int = 0) -> Header:
    """Read the header at `position`, without checks.  Raises `CorruptBatch` if fewer than 64 bytes
    are left.
    """
    if position < 0 or len(buffer) - position < HEADER_BYTES:
        raise errors.CorruptBatch(f"{max(0, len(buffer) - position)} bytes are no batch header")
    return Header._make(HEADER.unpack_from(buffer, position))


def check_structure(header: Header) -> None:
    """Raise `CorruptBatch` unless the fields are consistent."""
    problem = _structure_problem(header)
    if problem:
        raise errors.CorruptBatch(f"batch header: {problem}")


def _structure_problem(header: Header) -> str:  # noqa: C901 - one flat list of independent checks
    attributes, count = header.attributes, header.record_count
    if header.magic != MAGIC:
        return (
            f"magic 0x{header.magic:08x} is not 0x{MAGIC:08x}: the bytes are damaged, or a newer "
            "pk wrote them"
        )
    if header.length < HEADER_BYTES:
        return f"length {header.length}"
    if not 0 <= count <= limits.BATCH_RECORDS_MAX:
        return f"record count {count}"
    if header.last_offset_delta < max(0, count - 1):
        return f"{count} records in {header.last_offset_delta + 1} offsets"
    if header.codec_number < len(CODECS):  # a newer encoding gives the body's flags its own meaning
        for flag, needed in _NEEDS:
            if attributes & flag and not attributes & needed:
                return f"contradictory attributes 0x{attributes:04x}"
        if count == 0:
            if attributes & BODY_FLAGS or header.length != HEADER_BYTES:
                return "an empty batch with a body"
        elif not attributes & OFFSET_DELTAS and header.last_offset_delta != count - 1:
            return f"{count} dense records in {header.last_offset_delta + 1} offsets"
    if header.base_offset < 0 or header.base_offset > 2**63 - 2 - header.last_offset_delta:
        return f"base offset {header.base_offset}"
    if not (
        TIMESTAMP_MS_MIN <= header.base_timestamp <= TIMESTAMP_MS_MAX
        and TIMESTAMP_MS_MIN <= header.max_timestamp <= TIMESTAMP_MS_MAX
    ):
        return f"timestamps {header.base_timestamp}, {header.max_timestamp}"
    if attributes & DELETE_HORIZON:
        if count and not attributes & TIMESTAMPS_I64 and header.codec_number < len(CODECS):
            return "a delete horizon without absolute timestamps"
    elif header.base_timestamp > header.max_timestamp:
        return f"timestamps from {header.base_timestamp} to {header.max_timestamp}"
    if header.producer_id < NONE or header.producer_epoch < NONE or header.base_sequence < NONE:
        return f"producer {header.producer_id}, {header.producer_epoch}, {header.base_sequence}"
    if header.producer_id == NONE and header.base_sequence != NONE:
        return f"sequence {header.base_sequence} without a producer id"
    if header.producer_id != NONE and header.producer_epoch == NONE:
        return "a producer id without an epoch"
    return ""


def check(batch: Buffer, size_max: int = BATCH_BYTES_MAX) -> Header:
    """Return the header of exactly one whole batch after checking its structure and checksum.

    Raises `RecordTooLarge` above `size_max` bytes, `NewerFormat` for an intact batch with a codec
    that this build does not know (B4), and `CorruptBatch` for any other fault.
    Computing a large checksum releases the GIL.
    """
    if len(batch) > size_max:
        raise errors.RecordTooLarge(
            f"a batch of {len(batch)} bytes; at most {size_max} are allowed"
        )
    header = read_header(batch)
    check_structure(header)
    if header.length != len(batch):
        raise errors.CorruptBatch(f"a batch of {len(batch)} bytes says it has {header.length}")
    found = crc32c(memoryview(batch)[CRC_START:])
    if found != header.crc:
        raise errors.CorruptBatch(f"checksum 0x{found:08x} instead of 0x{header.crc:08x}")
    if header.attributes & CODEC_MASK >= len(CODECS):
        _ = header.codec  # raises
    return header


def seal(header: Header, body: Sequence[Buffer]) -> list[Buffer]:
    """Return `header` with its length and checksum computed, followed by the unchanged `body`
    parts.
    """
    length = HEADER_BYTES + sum(len(part) for part in body)
    if length > BATCH_BYTES_MAX:
        raise errors.RecordTooLarge(
            f"a batch of {length} bytes; at most {BATCH_BYTES_MAX} are allowed"
        )
    raw = bytearray(HEADER.pack(*header._replace(length=length, crc=0)))
    crc = crc32c(memoryview(raw)[CRC_START:])
    for part in body:
        crc = crc32c(part, crc)
    _U32.pack_into(raw, 20, crc)
    return [bytes(raw), *body]


def patched(
    batch: Buffer, base_offset: int, leader_epoch: int, append_time_ms: int | None = None
) -> list[Buffer]:
    """Return the batch with offsets assigned: a new header and a view of the rest.

    `append_time_ms` stamps it with LogAppendTime, which is the only change that needs a new
    checksum.  The timestamps in the body stay, and readers ignore them.
    """
    view = memoryview(batch)
    if append_time_ms is not None:
        header = read_header(batch)
        stamped = header._replace(
            base_offset=base_offset,
            leader_epoch=leader_epoch,
            attributes=(header.attributes | LOG_APPEND_TIME) & ~DELETE_HORIZON,
            base_timestamp=append_time_ms,
            max_timestamp=append_time_ms,
        )
        return seal(stamped, [view[HEADER_BYTES:]] if len(view) > HEADER_BYTES else [])
    raw = bytearray(view[:HEADER_BYTES])
    _PATCH_OFFSET.pack_into(raw, 0, base_offset)
    _PATCH_EPOCH.pack_into(raw, 12, leader_epoch)
    return [bytes(raw), view[HEADER_BYTES:]] if len(view) > HEADER_BYTES else [bytes(raw)]


def empty(header: Header) -> bytes:
    """Return the batch without its records (rule L14); offsets, times and producer state stay."""
    bare = header._replace(attributes=header.attributes & ~BODY_FLAGS, record_count=0)
    (raw,) = seal(bare, [])
    return bytes(raw)


def iter_headers(buffer: Buffer, position: int = 0) -> Iterator[tuple[int, Header]]:
    """Yield `(position, header)` of each whole batch.  The structure is checked, the checksums are
    not.

    Raises `CorruptBatch`, with the position, where a batch does not parse or is cut short.
    """
    size = len(buffer)
    while position < size:
        if size - position < HEADER_BYTES:
            raise errors.CorruptBatch(f"at {position}: {size - position} bytes are no batch header")
        header = Header._make(HEADER.unpack_from(buffer, position))
        problem = _structure_problem(header)
        if not problem and header.length > size - position:
            problem = f"{header.length} bytes announced, {size - position} left"
        if problem:
            raise errors.CorruptBatch(f"at {position}: {problem}")
        yield position, header
        position += header.length


def iter_batches(buffer: Buffer) -> Iterator[tuple[Header, memoryview]]:
    """Yield each whole batch with its header; raises like `iter_headers`."""
    view = memoryview(buffer)
    for position, header in iter_headers(buffer):
        yield header, view[position : position + header.length]


def check_place(
    header: Header, before: int, after: int, *, first: bool, dense: bool = False
) -> None:
    """Check that a fetched batch fits between its neighbours: it must not begin below `before`,
    where the batch before it ends, and must not end above `after`, where the next batch begins.  No
    checksum covers its offsets (B1).  If two batches overlap, the batch that continues its
    predecessor is accepted.  The `first` batch of a fetch is accepted if it holds `before`, because
    the broker has checked its place.  dense: the batches have no gaps between them, so a batch must
    begin at `before`, or hold it if it is the `first`.

    Raises `CorruptBatch`.
    """
    begins = header.base_offset
    believed = begins <= before if first else begins == before
    misplaced = (begins < before and not first) or (header.next_offset > after and not believed)
    if misplaced or (dense and not believed):
        raise errors.CorruptBatch(
            f"a batch says that it holds offsets [{begins}, {header.next_offset}); "
            f"it stands between {before} and {after}"
        )
