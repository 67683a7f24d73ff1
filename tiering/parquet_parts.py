"""Parts of a Parquet file by byte range: single row groups, verified.

A cold read fetches what it needs with two range requests (footer once, then one row group) and
hands the bytes to Arrow under their absolute positions, so that no other part of the file is asked
for.  A look-up by time, which retention makes of every partition again and again, fetches the few
kilobytes of three columns instead of the row group.

Every page is compared with its checksum (rule T10); what was decoded, with the footer's row count
and offsets.  A file of outside maintenance is verified as far as its pages have checksums.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pk.tiering import convert
from pk.tiering.footers import TIMES, Footer, Group, Part, UnreadableFile, check_rows
from pk.tiering.layout import FILE_SCHEMA


class _Window(io.RawIOBase):
    """A file of which only some parts are at hand, each with where it starts."""

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


def read_group(
    footer: Footer, group: Group, data: bytes, file_size: int, schema: pa.Schema = FILE_SCHEMA
) -> pa.RecordBatch:
    """The rows of one row group, in the columns of `schema`; `data` are its bytes.

    Raises `UnreadableFile`.
    """
    parts = [(Part(group.start, group.size), data)]
    return _read(footer, group, parts, file_size, schema)


def read_times(
    footer: Footer, group: Group, parts: Sequence[bytes], file_size: int
) -> pa.RecordBatch:
    """The rows of one row group in the columns of TIMES; `parts` are the bytes of `group.times`."""
    fetched = list(zip(group.times, parts, strict=True))
    return _read(footer, group, fetched, file_size, TIMES)


def _read(
    footer: Footer,
    group: Group,
    parts: Sequence[tuple[Part, bytes]],
    file_size: int,
    schema: pa.Schema,
) -> pa.RecordBatch:
    if any(len(data) < part.size for part, data in parts):
        raise UnreadableFile("it is shorter than its footer says")
    window = _Window([(part.start, data) for part, data in parts], file_size)
    names = None if schema is FILE_SCHEMA else schema.names
    try:
        with pq.ParquetFile(
            pa.PythonFile(window, mode="r"),
            metadata=footer.metadata,
            pre_buffer=False,
            page_checksum_verification=True,
        ) as file:
            table = file.read_row_group(group.number, columns=names, use_threads=False)
        rows = convert.canonical(table, schema)
    except (pa.ArrowException, OSError, ValueError) as cause:
        raise UnreadableFile(f"row group {group.number} does not decode: {cause}") from cause
    check_rows(rows, [group])
    return rows
