"""Records as rows of Arrow columns: building, sizes, and cuts by size.

Invariants
  A3  No work is done per record: numpy and Arrow build, hash, sort and cut columns.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pk import errors, limits
from pk.log import columns
from pk.log.batch import TIMESTAMP_MS_MAX
from pk.log.columns import HEADER_TYPE
from pk.log.encoding import FEW, few_offsets, fixed_column, numbers, offsets_of
from pk.types import NONE

I64 = npt.NDArray[np.int64]

#: Bytes that a record counts for besides its key and value.
RECORD_OVERHEAD = 16
#: Bytes that a row of a column counts for besides its data: a length.
COLUMN_OVERHEAD = 4
_BINARY = pa.binary()
_BYTES = (
    _BINARY, pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string(), pa.string_view(),
    pa.null(),
)  # fmt: skip
_OFFSET = struct.Struct("<i")
#: Columns of rows; `timestamp` exists only if the create times differ.
ROWS = pa.schema([("key", _BINARY), ("value", _BINARY), ("headers", HEADER_TYPE)])
_STAMPED = ROWS.append(pa.field("timestamp", pa.int64()))


# -- rows ------------------------------------------------------------------------------------------


class FewRows(NamedTuple):
    """A few rows without headers, create times or columns: they are not worth Arrow arrays."""

    values: list[bytes | None]
    keys: list[bytes | None] | None

    def columns(self) -> pa.RecordBatch:
        """Return the same rows as columns."""
        count = len(self.values)
        key, value = binary_column(self.keys, count), binary_column(self.values, count)
        return rows_of(key, value, columns.null_headers(count), None)


def binary_column(items: Sequence[bytes | None] | None, count: int) -> pa.Array:
    """Build a `binary` column from Python bytes.

    It avoids the first call of `pa.array`, which imports pandas if that is installed: 0.3 s on the
    thread that sends.  Items that are None need `pa.array`.
    """
    if items is None:
        return columns.nulls(count)
    try:
        data = b"".join(items)  # type: ignore[arg-type]
    except TypeError:
        return pa.array(items, _BINARY)
    lengths = list(map(len, items))  # type: ignore[arg-type]
    if count <= FEW:
        buffers = [None, few_offsets(lengths), pa.py_buffer(data)]
        return pa.Array.from_buffers(_BINARY, count, buffers, 0)
    first = lengths[0]
    offsets = np.zeros(count + 1, np.int32)
    if lengths.count(first) == count:  # then numpy need not convert the list
        offsets[1:] = first
    else:
        offsets[1:] = lengths
    np.cumsum(offsets, out=offsets)
    return pa.Array.from_buffers(
        _BINARY, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0
    )


def rows_of(
    key: pa.Array, value: pa.Array, headers: pa.Array, stamps: I64 | None
) -> pa.RecordBatch:
    if stamps is None:
        return pa.RecordBatch.from_arrays([key, value, headers], schema=ROWS)
    return pa.RecordBatch.from_arrays([key, value, headers, fixed_column(stamps)], schema=_STAMPED)


def normalise(
    batch: pa.RecordBatch, now_ms: int
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32] | None]:
    """Return a caller's columns as rows, and the partitions that it chose (NONE = no choice).

    Raises `SerializationError`, `InvalidPartitions`.
    """
    names = batch.schema.names
    unknown = [n for n in names if n not in ("key", "value", "timestamp", "headers", "partition")]
    if unknown or len(set(names)) != len(names):
        raise errors.SerializationError(
            "send_batch takes the columns value, key, timestamp, headers, partition once each, not "
            f"{', '.join(names)}"
        )
    count = batch.num_rows

    def column(name: str, kind: pa.DataType) -> pa.Array:
        if name not in names:
            return columns.null_headers(count) if name == "headers" else columns.nulls(count)
        found = batch.column(name)
        if isinstance(found, pa.DictionaryArray):
            found = found.dictionary_decode()
        if found.type == kind:
            return found
        try:
            bytes_like = found.type in _BYTES or pa.types.is_fixed_size_binary(found.type)
            if kind == _BINARY and not bytes_like:
                raise pa.ArrowInvalid("not bytes or text")
            return found.cast(kind)
        except pa.ArrowException as cause:
            raise errors.SerializationError(
                f"column {name} holds {found.type}, which is not {kind}: {cause}", column=name
            ) from cause

    stamps = _stamps(batch.column("timestamp"), now_ms) if "timestamp" in names else None
    rows = rows_of(
        column("key", _BINARY), column("value", _BINARY), column("headers", HEADER_TYPE), stamps
    )
    if "partition" not in names:
        return rows, None
    partition = column("partition", pa.int32())
    chosen = numbers(partition.fill_null(NONE)).astype(np.int32, copy=False)
    if chosen.min() < NONE or (chosen.min() < 0 and not partition.null_count):
        raise errors.InvalidPartitions(f"partition {int(chosen.min())} does not exist")
    return rows, chosen


def _stamps(column: pa.Array, now_ms: int) -> I64:
    kind = column.type
    try:
        if pa.types.is_timestamp(kind):
            column = column.cast(pa.timestamp("ms", kind.tz), safe=False).view(pa.int64())
        elif pa.types.is_integer(kind) or pa.types.is_null(kind):
            column = column.cast(pa.int64())
        else:
            raise pa.ArrowInvalid("neither int64 milliseconds nor a timestamp")
    except pa.ArrowException as cause:
        raise errors.SerializationError(
            f"column timestamp holds {kind}: {cause}", column="timestamp"
        ) from cause
    if column.null_count:
        column = pc.fill_null(column, now_ms)
    stamps: I64 = numbers(column)
    if int(stamps.min()) < 0 or int(stamps.max()) > TIMESTAMP_MS_MAX:
        raise errors.SerializationError(
            "column timestamp: a value is out of range", column="timestamp"
        )
    return stamps


def size_of(rows: pa.RecordBatch) -> int | None:
    """Return the bytes that all rows count for, from two offsets per column; None if they have
    headers.

    This does not use numpy, which releases the interpreter lock for columns of this size.  To get
    the lock back from a busy loop thread takes longer than everything else in `send_batch`.
    """
    headers = rows.column("headers")
    if headers.null_count < len(headers):
        return None
    total = 0
    for name in ("key", "value"):
        array = rows.column(name)
        if array.null_count < len(array):
            offsets = memoryview(array.buffers()[1]).cast("B")
            first = _OFFSET.unpack_from(offsets, array.offset * 4)[0]
            last = _OFFSET.unpack_from(offsets, (array.offset + len(array)) * 4)[0]
            total += last - first + COLUMN_OVERHEAD * len(array)
    return total or rows.num_rows * COLUMN_OVERHEAD


def sizes(rows: pa.RecordBatch) -> I64:
    """Return the bytes that each row counts for: the bytes its columns take in a batch."""
    total = np.zeros(rows.num_rows, np.int64)
    for name in ("key", "value"):
        array = rows.column(name)
        if array.null_count < len(array):
            total += np.diff(offsets_of(array))
            total += COLUMN_OVERHEAD
    if not total.any():
        total += COLUMN_OVERHEAD
    headers = rows.column("headers")
    if headers.null_count < len(headers) and len(headers.values):
        counts = numbers(pc.fill_null(pc.list_value_length(headers), 0))
        items = headers.flatten()
        each = np.full(len(items), RECORD_OVERHEAD, np.int64)
        for child in items.flatten():
            each += numbers(pc.fill_null(pc.binary_length(child), 0))
        ends = np.cumsum(each)
        bounds = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(counts)])]
        total += np.diff(bounds)
    return total


# -- batches ---------------------------------------------------------------------------------------


def batch_limit(batch_size: int, configs: Mapping[str, str]) -> int:
    """Return batch_size, or less if the topic's max_message_bytes allows less."""
    known = int(configs.get("max_message_bytes", 0) or 0)
    return min(batch_size, max(1, known // 2)) if known else batch_size


def cuts_by_size(row_sizes: I64, batch_size: int) -> list[int]:
    """Return the ends of consecutive runs of at most `batch_size` bytes; a larger row is a run of
    its own.
    """
    ends = np.cumsum(row_sizes)
    cuts: list[int] = []
    start, count = 0, len(row_sizes)
    while start < count:
        base = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, base + batch_size, side="right"))
        end = min(max(end, start + 1), start + limits.BATCH_RECORDS_MAX, count)
        cuts.append(end)
        start = end
    return cuts
