"""Records as rows of Arrow columns: building, sizes, and cuts by size.

Invariants
  A3  No work is done per record: numpy and Arrow build, hash, sort and cut columns.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pk import limits
from pk.log import columns
from pk.log.columns import HEADER_TYPE, binary_column
from pk.log.encoding import fixed_column, numbers, offsets_of

I64 = npt.NDArray[np.int64]

#: Bytes that a record counts for besides its key and value.
RECORD_OVERHEAD = 16
#: Bytes that a row of a column counts for besides its data: a length.
COLUMN_OVERHEAD = 4
_OFFSET = struct.Struct("<i")
#: Columns of rows; `timestamp` exists only if the create times differ.
ROWS = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("headers", HEADER_TYPE)])
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


def rows_of(
    key: pa.Array, value: pa.Array, headers: pa.Array, stamps: I64 | None
) -> pa.RecordBatch:
    if stamps is None:
        return pa.RecordBatch.from_arrays([key, value, headers], schema=ROWS)
    return pa.RecordBatch.from_arrays([key, value, headers, fixed_column(stamps)], schema=_STAMPED)


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
