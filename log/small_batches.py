"""Encodes and checks batches of a few records without Arrow and numpy.

An array of Arrow or numpy costs the same for one value as for a thousand: about a microsecond for
each of the thirty that a batch takes.  With one or two records in a batch, that is most of the cost
of a record.  `struct` writes and reads the same bytes in a fifth of the time.

Invariants
  M1  `encode_few` returns, byte for byte, what `encoding.encode_lists` returns for the same
      records.
  M2  `accepts` returns True only for a body that `columns.parse` accepts with the same header.  It
      also returns False for some bodies that `columns.parse` accepts; the caller asks it then.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from crc32c import crc32c

from pk import errors, limits
from pk.log import batch as batches
from pk.log.batch import HEADER_BYTES, Header
from pk.log.encoding import check_times, compressed
from pk.log.storage import Buffer
from pk.types import NONE

#: Up to so many records, a batch is written and read by `struct`.
FEW_RECORDS = 32

#: The header: what lies before the checksummed fields, and these fields.
_FRONT = struct.Struct("<qiiII")
_COVERED = struct.Struct("<Hhiqqqii")
#: u32 numbers, by how many there are: timestamps, key lengths and value lengths of a few records.
_NUMBERS = [struct.Struct(f"<{count}I") for count in range(3 * FEW_RECORDS + 1)]
#: What the header of a body may say that `accepts` looks at.
_PLAIN = batches.KEY | batches.VALUE | batches.TIMESTAMPS | batches.TRANSACTIONAL

assert _FRONT.size == batches.CRC_START
assert _FRONT.size + _COVERED.size == HEADER_BYTES


def encode_few(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    timestamps: Sequence[int] | int,
    *,
    codec: str = "none",
    level: int = 3,
    producer_id: int = NONE,
    producer_epoch: int = NONE,
    base_sequence: int = NONE,
    transactional: bool = False,
) -> list[Buffer]:
    """Encode records without headers as one batch: its header and its body.

    It takes any number of records, and saves time with few.  timestamps: ms, of each record or of
    all.  Raises like `encode_lists`.
    """
    count = len(values)
    if not 0 < count <= limits.BATCH_RECORDS_MAX:
        raise errors.RecordTooLarge(
            f"a batch has 1 to {limits.BATCH_RECORDS_MAX} records, not {count}"
        )
    attributes = batches.TRANSACTIONAL if transactional else 0
    front, bits = b"", b""
    lengths: list[int] = []
    data: list[bytes | None] = []
    if isinstance(timestamps, int):
        base = top = timestamps
    else:
        base, top = min(timestamps), max(timestamps)
    check_times(base, top)
    if top != base and not isinstance(timestamps, int):
        attributes |= batches.TIMESTAMPS
        if top - base < 2**32:
            front = _u32([each - base for each in timestamps])
        else:
            attributes |= batches.TIMESTAMPS_I64
            front = struct.pack(f"<{count}q", *timestamps)
    for items, flag, nulls in (
        (keys, batches.KEY, batches.KEY_NULLS),
        (values, batches.VALUE, batches.VALUE_NULLS),
    ):
        if items is None:
            continue
        present = [item for item in items if item is not None] if None in items else items
        if not present:
            continue  # a column of nulls only is left out
        attributes |= flag
        if present is not items:
            attributes |= nulls
            bits += _validity(items)
            lengths += [0 if item is None else len(item) for item in items]
        else:
            lengths += map(len, items)  # type: ignore[arg-type]
        data += present
    body = b"".join([front, _u32(lengths), bits, *data])  # type: ignore[list-item]
    parts: list[Buffer] = [body] if body else []
    if codec != "none" and body:
        number, parts = compressed(parts, codec, level)
        attributes |= number
    return _sealed(parts, attributes, producer_epoch, base, top, producer_id, base_sequence, count)


def _sealed(
    parts: list[Buffer],
    attributes: int,
    producer_epoch: int,
    base: int,
    top: int,
    producer_id: int,
    base_sequence: int,
    count: int,
) -> list[Buffer]:
    """Return the header of a batch of these parts, and the parts."""
    covered = _COVERED.pack(
        attributes, producer_epoch, count - 1, base, top, producer_id, base_sequence, count
    )
    crc, length = crc32c(covered), HEADER_BYTES
    for part in parts:
        crc, length = crc32c(part, crc), length + len(part)
    if length > batches.BATCH_BYTES_MAX:
        raise errors.RecordTooLarge(
            f"a batch of {length} bytes; at most {batches.BATCH_BYTES_MAX} are allowed"
        )
    return [_FRONT.pack(0, length, NONE, batches.MAGIC, crc) + covered, *parts]


def _u32(numbers: Sequence[int]) -> bytes:
    if len(numbers) < len(_NUMBERS):
        return _NUMBERS[len(numbers)].pack(*numbers)
    return array("I", numbers).tobytes()


def _validity(items: Sequence[bytes | None]) -> bytes:
    bits = 0
    for row, item in enumerate(items):
        if item is not None:
            bits |= 1 << row
    return bits.to_bytes((len(items) + 7) // 8, "little")


def accepts(header: Header, batch: Buffer) -> bool:
    """Return whether the body of one whole batch of a few plain records is sound (M2)."""
    flags, count = header.attributes, header.record_count
    if flags & ~_PLAIN or not 0 < count <= FEW_RECORDS:
        return False
    stamped = bool(flags & batches.TIMESTAMPS)
    sections = stamped + bool(flags & batches.KEY) + bool(flags & batches.VALUE)
    lengths = _NUMBERS[sections * count]
    size = header.length - HEADER_BYTES
    if lengths.size > size:
        return False
    numbers: tuple[int, ...] = lengths.unpack_from(batch, HEADER_BYTES)
    if stamped:
        if header.base_timestamp + max(numbers[:count]) > header.max_timestamp:
            return False
        numbers = numbers[count:]
    return lengths.size + sum(numbers) == size
