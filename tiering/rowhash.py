"""A hash per row, computed column-wise, whose sums tell whether two sets of rows are the same.

The tier keeps a running sum of row hashes per partition in the table (rule T2): audit and
compaction compare it with what the files hold.  It guards against mistakes, not against malice.

Definition, all arithmetic modulo 2^64, `R` = 0x9E3779B97F4A7C15 (odd):
  bytes(b)  = mix(sum of word[j] * R^j, plus len(b) * 0xD6E8FEB86659FD93), where word[j] are the
              bytes b[8j … 8j + 7] as a little-endian integer, zeros behind the end
  null      = 0x2545F4914F6CDD1D
  headers   = sum over the row's j-th header of mix(3 * bytes(key) + 5 * bytes(value) + j + 1);
              none = 0
  row       = mix(offset * C0 + timestamp in ms * C1 + key * C2 + value * C3 + headers * C4)
              modulo 2^63
  mix       = the 64-bit finaliser of MurmurHash3
A sum is taken modulo 2^63.  The offset is in the row's hash, so equal rows at swapped offsets
differ.

Rows of one length are hashed together, as a matrix of words times the powers of R; lengths repeat
in real data, so the loop below runs per distinct length and block, never per row.
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
#: Bytes of rows that are hashed at a time: they stay in the cache.
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


def _mix(values: U64) -> U64:
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xC4CEB9FE1A85EC53)
    mixed: U64 = values ^ (values >> np.uint64(33))
    return mixed


def _polynomials(data: npt.NDArray[np.uint8], starts: I64, length: int) -> U64:
    """The sums of the rows of one `length` that begin at `starts`, in ascending order.

    Rows without anything between them are a matrix already and are not gathered first.
    """
    count, words = len(starts), (length + 7) // 8
    powers = _POWERS[:words] if words <= len(_POWERS) else _powers(_R, words)
    first = int(starts[0])
    adjoin = int(starts[-1]) - first == (count - 1) * length
    matrix: npt.NDArray[np.uint8] = np.ndarray(
        (count, length) if adjoin else (len(data) - length + 1, length),
        np.uint8,
        data,
        first if adjoin else 0,
        (length, 1) if adjoin else (1, 1),
    )
    out = np.empty(count, np.uint64)
    step = min(count, max(1, _BLOCK_BYTES // (8 * words)))
    block = np.zeros((step, 8 * words), np.uint8)
    for low in range(0, count, step):
        high = min(low + step, count)
        padded = block[: high - low]
        padded[:, :length] = matrix[low:high] if adjoin else matrix[starts[low:high]]
        np.matmul(padded.view("<u8"), powers, out=out[low:high])
    return out


def hash_bytes(column: pa.Array) -> U64:
    """One hash per row of a binary or string column."""
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
            hashed += _polynomials(data, starts, length)
        else:
            _add_by_length(hashed, data, starts, lengths)
    hashed = _mix(hashed)
    if column.null_count:
        hashed[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashed


def _add_by_length(hashed: U64, data: npt.NDArray[np.uint8], starts: I64, lengths: I64) -> None:
    """Add each row's polynomial to `hashed`, the rows of one length at a time."""
    order = np.argsort(lengths, kind="stable")
    ends = np.flatnonzero(np.diff(lengths[order], append=-1))
    at = 0
    for end in (ends + 1).tolist():
        same, at = order[at:end], end
        length = int(lengths[same[0]])
        if length:
            hashed[same] += _polynomials(data, starts[same], length)


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


def hash_rows(rows: pa.RecordBatch) -> U64:
    """One hash in [0, 2^63) per row of a batch with the columns of the tier's files."""
    if not rows.num_rows:
        return np.zeros(0, np.uint64)
    stamps = rows.column("timestamp")
    unit = stamps.type.unit
    numbers = stamps.view(pa.int64()).to_numpy()
    if unit == "us":
        numbers = numbers // 1000
    parts = (
        rows.column("offset").to_numpy().astype(np.uint64),
        numbers.astype(np.uint64),
        hash_bytes(rows.column("key")),
        hash_bytes(rows.column("value")),
        _hash_headers(rows.column("headers")),
    )
    total = np.zeros(rows.num_rows, np.uint64)
    for part, constant in zip(parts, _COLUMNS, strict=True):
        total += part * constant
    return _mix(total) & np.uint64(SUM_MODULUS - 1)


def row_sum(rows: pa.RecordBatch) -> int:
    """Sum of the row hashes modulo 2^63."""
    return int(hash_rows(rows).sum(dtype=np.uint64)) % SUM_MODULUS
