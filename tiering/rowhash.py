"""Computes a hash per row, column-wise.  The sums of the hashes show whether two sets of rows are
equal.

The tier keeps a running sum of row hashes per partition in the table (rule T2).  Audit and
compaction compare it with the content of the files.  It detects mistakes, not forgery.

Definition, all arithmetic modulo 2^64, `R` = 0x9E3779B97F4A7C15 (odd):
  bytes(b)  = mix(sum of word[j] * R^j, plus len(b) * 0xD6E8FEB86659FD93), where word[j] are the
              bytes b[8j … 8j + 7] as a little-endian integer, zeros behind the end
  null      = 0x2545F4914F6CDD1D
  headers   = sum over the row's j-th header of mix(3 * bytes(key) + 5 * bytes(value) + j + 1);
              none = 0
  row       = mix(offset * c0 + timestamp in ms * c1 + key * c2 + value * c3 + headers * c4)
              modulo 2^63
  mix       = the 64-bit finaliser of MurmurHash3
A sum is taken modulo 2^63.  The offset is part of the row's hash, so swapping the offsets of two
rows changes the sum.

Rows with the same number of words are hashed together, as a matrix of words times the powers of R.
The loops below run per number of words and per block, never per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pk.tiering.layout import SUM_MODULUS

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_R = 0x9E3779B97F4A7C15
_NULL = np.uint64(0x2545F4914F6CDD1D)
_LENGTH = np.uint64(0xD6E8FEB86659FD93)
_COLUMNS = tuple(
    np.uint64(constant)
    for constant in (
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
        0x9FB21C651E98DF25,
        0xD1B54A32D192ED03,
        0xAEF17502108EF2D9,
    )
)
_33 = np.uint64(33)
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
#: The term that a column of nulls adds to every row's hash.
_NULL_TIMES = {c: np.uint64(int(_NULL) * int(c) % 2**64) for c in _COLUMNS}
#: Bytes of rows that are hashed at a time, so that they stay in the CPU's cache.
_BLOCK_BYTES = 1 << 17


def _powers(base: int, count: int) -> U64:
    out = np.ones(count, np.uint64)
    filled = 1
    while filled < count:
        step = np.uint64(pow(base, filled, 2**64))
        size = min(filled, count - filled)
        out[filled : filled + size] = out[:size] * step
        filled += size
    return out


_POWERS = _powers(_R, 1 << 10)
#: Masks the bytes of a row's last word that belong to the row, by its length modulo 8.
_TAILS: U64 = np.array([2**64 - 1, *((1 << 8 * n) - 1 for n in range(1, 8))], np.uint64)


def _mix(values: U64) -> U64:
    """Mixes `values` in place and returns them."""
    shifted = values >> _33
    values ^= shifted
    values *= _MIX_1
    np.right_shift(values, _33, out=shifted)
    values ^= shifted
    values *= _MIX_2
    np.right_shift(values, _33, out=shifted)
    values ^= shifted
    return values


def _powers_of(words: int) -> U64:
    return _POWERS[:words] if words <= len(_POWERS) else _powers(_R, words)


def _adjoining(data: npt.NDArray[np.uint8], count: int, length: int) -> U64:
    """Returns the sums of `count` adjoining rows of the same `length`, a matrix already."""
    words = (length + 7) // 8
    powers = _powers_of(words)
    matrix = data.reshape(count, length)
    out = np.empty(count, np.uint64)
    step = min(count, max(1, _BLOCK_BYTES // (8 * words)))
    block = np.zeros((step, 8 * words), np.uint8)
    for low in range(0, count, step):
        high = min(low + step, count)
        padded = block[: high - low]
        padded[:, :length] = matrix[low:high]
        np.matmul(padded.view("<u8"), powers, out=out[low:high])
    return out


def _scattered(data: npt.NDArray[np.uint8], starts: I64, lengths: I64, words: int) -> U64:
    """Returns the sums of the rows of `words` words each that begin at `starts`.

    The last word of a row is read whole and then masked.  `data` must therefore extend seven bytes
    beyond the rows.
    """
    count, width = len(starts), 8 * words
    powers = _powers_of(words)
    windows: npt.NDArray[np.uint8] = np.ndarray(
        (len(data) - width + 1, width), np.uint8, data, strides=(1, 1)
    )
    out = np.empty(count, np.uint64)
    step = max(1, _BLOCK_BYTES // width)
    for low in range(0, count, step):
        high = min(low + step, count)
        terms = windows[starts[low:high]].view("<u8")
        terms[:, -1] &= _TAILS[lengths[low:high] & 7]
        np.matmul(terms, powers, out=out[low:high])
    return out


def hash_bytes(column: pa.Array) -> U64:
    """Returns one hash per row of a binary or string column."""
    rows = len(column)
    if not rows:
        return np.zeros(0, np.uint64)
    if column.null_count == rows:
        return np.full(rows, _NULL)
    _, offsets_buffer, data_buffer = column.buffers()
    wide = column.type in (pa.large_binary(), pa.large_string())
    kind: Any = np.int64 if wide else np.int32
    offsets = np.frombuffer(offsets_buffer, kind, rows + 1, column.offset * np.dtype(kind).itemsize)
    first, last = int(offsets[0]), int(offsets[-1])
    starts: I64 = offsets[:-1].astype(np.int64) - first
    lengths: I64 = (offsets[1:] - offsets[:-1]).astype(np.int64)
    hashed = lengths.astype(np.uint64) * _LENGTH
    if last > first:
        data = np.frombuffer(data_buffer, np.uint8, last - first, first)
        length = int(lengths[0])
        if length * rows == last - first and bool((lengths == length).all()):
            hashed += _adjoining(data, rows, length)
        else:
            _add_scattered(hashed, data, starts, lengths)
    hashed = _mix(hashed)
    if column.null_count:
        hashed[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashed


def _add_scattered(hashed: U64, data: npt.NDArray[np.uint8], starts: I64, lengths: I64) -> None:
    """Adds each row's sum to `hashed`, the rows of one number of words at a time."""
    readable = np.concatenate([data, np.zeros(7, np.uint8)])
    words = (lengths + 7) >> 3
    order = np.argsort(words, kind="stable")
    ends = np.flatnonzero(np.diff(words[order], append=-1))
    at = 0
    for end in (ends + 1).tolist():
        same, at = order[at:end], end
        count = int(words[same[0]])
        if count:
            hashed[same] += _scattered(readable, starts[same], lengths[same], count)


def _hash_headers(column: pa.Array) -> U64:
    rows = len(column)
    out = np.zeros(rows, np.uint64)
    if column.null_count == rows:
        return out
    counts: I64 = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    total = int(counts.sum())
    if not total:
        return out
    items = column.flatten()
    keys, values = items.field("key"), items.field("value")
    ends = np.cumsum(counts)
    position = np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
    each = hash_bytes(keys) * np.uint64(3) + hash_bytes(values) * np.uint64(5)
    each = _mix(each + position.astype(np.uint64) + np.uint64(1))
    sums = np.zeros(total + 1, np.uint64)
    np.cumsum(each, out=sums[1:])
    summed: U64 = sums[ends] - sums[ends - counts]
    return summed


def _content_terms(rows: pa.RecordBatch) -> U64:
    """Returns the terms of key, value and headers, those of them that the rows have."""
    _, _, key_factor, value_factor, header_factor = _COLUMNS
    total: U64 = np.zeros(rows.num_rows, np.uint64)
    names = rows.schema.names
    for name, factor in (("key", key_factor), ("value", value_factor)):
        if name not in names or rows.column(name).null_count == rows.num_rows:
            total += _NULL_TIMES[factor]
        else:
            hashed = hash_bytes(rows.column(name))
            hashed *= factor
            total += hashed
    if "headers" in names and rows.column("headers").null_count < rows.num_rows:
        total += _hash_headers(rows.column("headers")) * header_factor
    return total


def hash_rows(rows: pa.RecordBatch) -> U64:
    """Returns one hash in [0, 2^63) per row of a batch with the columns of the tier's files."""
    if not rows.num_rows:
        return np.zeros(0, np.uint64)
    stamps = rows.column("timestamp")
    unit = stamps.type.unit
    numbers = stamps.view(pa.int64()).to_numpy()
    if unit == "us":
        numbers = numbers // 1000
    offset_factor, stamp_factor, *_ = _COLUMNS
    total = _content_terms(rows)
    total += rows.column("offset").to_numpy().view(np.uint64) * offset_factor
    total += numbers.view(np.uint64) * stamp_factor
    return _mix(total) & np.uint64(SUM_MODULUS - 1)


def row_sum(rows: pa.RecordBatch) -> int:
    """Returns the sum of the row hashes modulo 2^63."""
    return int(hash_rows(rows).sum(dtype=np.uint64)) % SUM_MODULUS


def sink_sum(rows: pa.RecordBatch) -> int:
    """Returns the sum modulo 2^64 of the hashes of rows that have no offset yet.

    rows: any of the columns `key`, `value`, `headers`, `partition` and `timestamp`, as a sink gets
    them.  Partitions and timestamps are part of the hash in the places of offset and timestamp.
    """
    if not rows.num_rows:
        return 0
    total = _content_terms(rows)
    for name, factor in zip(("partition", "timestamp"), _COLUMNS[:2], strict=True):
        if name not in rows.schema.names:
            continue
        column = rows.column(name)
        wide = column.cast(pa.int64()) if name == "partition" else column.view(pa.int64())
        numbers: U64 = pc.fill_null(wide, 0).to_numpy().view(np.uint64) * factor
        if column.null_count:
            numbers = np.where(pc.is_null(wide).to_numpy(zero_copy_only=False), _NULL, numbers)
        total += numbers
    return int(_mix(total).sum(dtype=np.uint64))
