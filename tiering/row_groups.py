"""Row groups of Parquet data files: read, verified, cut and sorted by offset (rule T10).

Both readers of the tier use this module: the broker's cold reads (tiering/reader), which fetch byte
ranges and cache rows, and Spark's (sparkconnector/tier_scan), which read through an Arrow file.

    read_rows        row groups of an open file
    read_group       one row group, from its bytes
    read_times       three columns of one row group, from their bytes: a search by time, which
                     retention makes of every partition, reads a few kilobytes instead of all
    clipped          the rows of a range, in a copy
    in_offset_order  the rows of a range, sorted
    merge            the rows of a range from row groups whose offsets overlap

Every page is compared with its checksum.  Decoded rows are compared with the footer's row count and
offsets.  Files of outside maintenance are verified as far as their pages have checksums.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pk.tiering.footers import TIMES, Footer, Group, Part, UnreadableFile, check_rows
from pk.tiering.layout import FILE_SCHEMA
from pk.types import Offset

_NEVER_NULL = ("offset", "timestamp")


# -- decoding --------------------------------------------------------------------------------------


class _Window(io.RawIOBase):
    """A file of which only some parts are in memory, each with its start."""

    def __init__(self, parts: Sequence[tuple[int, bytes]], size: int) -> None:
        super().__init__()
        self._parts = [(start, memoryview(data)) for start, data in parts]
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def read(self, size: int | None = -1) -> Any:
        wanted = self._size - self._at if size is None or size < 0 else size
        for start, data in self._parts:
            low = self._at - start
            if low >= 0 and low + wanted <= len(data):
                self._at += wanted
                return data[low : low + wanted]
        raise OSError(f"bytes {self._at}+{wanted} were not fetched")


def read_rows(
    source: Any,
    footer: Footer,
    groups: Sequence[Group],
    schema: pa.Schema = FILE_SCHEMA,
    *,
    buffered: bool = False,
) -> pa.RecordBatch:
    """Returns the rows of `groups`, as they are stored, in the columns of `schema`.

    source: an open file of Arrow's, or a Python file object
    buffered: Arrow fetches all column chunks at once and decodes them on its threads

    Raises `UnreadableFile` if the bytes are damaged, or if `source` failed: Arrow's errors do not
    distinguish the two.
    """
    names = None if schema is FILE_SCHEMA else schema.names
    numbers = [group.number for group in groups]
    try:
        with pq.ParquetFile(
            source,
            metadata=footer.metadata,
            pre_buffer=buffered,
            page_checksum_verification=True,
        ) as file:
            table = file.read_row_groups(numbers, columns=names, use_threads=buffered)
        rows = canonical(table, schema)
    except (pa.ArrowException, OSError, ValueError) as cause:
        where = ", ".join(map(str, numbers))
        raise UnreadableFile(f"row group {where} does not decode: {cause}") from cause
    check_rows(rows, groups)
    return rows


def read_group(
    footer: Footer, group: Group, data: bytes, file_size: int, schema: pa.Schema = FILE_SCHEMA
) -> pa.RecordBatch:
    """Returns the rows of one row group, in the columns of `schema`; `data` are its bytes.

    Raises `UnreadableFile`.
    """
    return _read_parts(footer, group, [(Part(group.start, group.size), data)], file_size, schema)


def read_times(
    footer: Footer, group: Group, parts: Sequence[bytes], file_size: int
) -> pa.RecordBatch:
    """Returns the rows of one row group in the columns of TIMES; `parts` are the bytes of
    `group.times`.

    Raises `UnreadableFile`.
    """
    fetched = list(zip(group.times, parts, strict=True))
    return _read_parts(footer, group, fetched, file_size, TIMES)


def _read_parts(
    footer: Footer,
    group: Group,
    parts: Sequence[tuple[Part, bytes]],
    file_size: int,
    schema: pa.Schema,
) -> pa.RecordBatch:
    if any(len(data) < part.size for part, data in parts):
        raise UnreadableFile("it is shorter than its footer says")
    window = _Window([(part.start, data) for part, data in parts], file_size)
    return read_rows(pa.PythonFile(window, mode="r"), footer, [group], schema)


def canonical(table: pa.Table, schema: pa.Schema = FILE_SCHEMA) -> pa.RecordBatch:
    """Returns rows read from any file of the table in pk's columns, or some of them.  Outside
    maintenance may have written the file.

    A rewriter writes every column of the table's schema, including those that are all null.  The
    schema has had all columns since its first version.  A missing column was therefore lost, and
    nulls in its place would be wrong.  Raises `UnreadableFile`.
    """
    arrays = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            raise UnreadableFile(f"it has no column {field.name}")
        column = table.column(index)
        if column.type != field.type:
            column = column.cast(field.type)
        if field.name in _NEVER_NULL and column.null_count:
            raise UnreadableFile(f"its column {field.name} has nulls")
        chunks = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        arrays.append(chunks)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# -- clipping and order ----------------------------------------------------------------------------


def in_offset_order(rows: pa.RecordBatch, start: Offset, end: Offset) -> pa.RecordBatch:
    """Returns the rows with offsets in `[start, end)`, in offset order, each offset once.

    The result is a view of `rows` if they are in order.  Otherwise it is a copy that holds no other
    rows: outside maintenance may have scattered offsets over the row groups (rule T10).
    """
    offsets = rows.column("offset").to_numpy()
    if len(offsets) < 2 or bool((offsets[1:] > offsets[:-1]).all()):
        low, high = np.searchsorted(offsets, [start, end])
        return rows.slice(int(low), int(high - low))
    inside = np.flatnonzero((offsets >= start) & (offsets < end))
    order = inside[np.argsort(offsets[inside], kind="stable")]
    first = np.ones(len(order), bool)
    first[1:] = offsets[order][1:] != offsets[order][:-1]
    return rows.take(pa.array(order[first]))


def clipped(rows: pa.RecordBatch, start: Offset, end: Offset) -> pa.RecordBatch:
    """Returns the rows with offsets in `[start, end)`, as they are stored.  The result references
    no other rows, so that the row group can be freed."""
    offsets = rows.column("offset").to_numpy()
    inside = np.flatnonzero((offsets >= start) & (offsets < end))
    return rows if len(inside) == len(offsets) else rows.take(pa.array(inside))


def merge(groups: Iterable[pa.RecordBatch], start: Offset, end: Offset) -> pa.RecordBatch | None:
    """Returns the rows with offsets in `[start, end)` of row groups that overlap, in offset order,
    each offset once; None = there are no row groups.

    Memory: the result, twice, and one row group at a time of an iterator.
    """
    kept = [clipped(rows, start, end) for rows in groups]
    return in_offset_order(pa.concat_batches(kept), start, end) if kept else None
