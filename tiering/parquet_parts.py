"""Parts of a Parquet file by byte range: the footer, and single row groups.

A cold read fetches what it needs with two range requests (footer once, then one row group) and
hands the bytes to Arrow under their absolute positions, so that no other part of the file is asked
for.
"""

from __future__ import annotations

import datetime
import io
import struct
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pk import errors
from pk.tiering import convert
from pk.tiering.table import OFFSET_MAX
from pk.types import Offset

#: A footer is looked for in so many last bytes first; a longer one costs a second request.
TAIL_BYTES = 64 * 1024
FOOTER_BYTES_MAX = 64 * 1024 * 1024
TIME_MIN, TIME_MAX = -(2**62), 2**62
_TRAILER = struct.Struct("<I4s")


class Group(NamedTuple):
    """One row group; statistics that are missing mean "anything"."""

    number: int  #: in its file
    min_offset: Offset
    max_offset: Offset
    max_timestamp_ms: int
    rows: int
    start: int  #: first byte in the file
    size: int  #: bytes in the file
    decoded: int  #: bytes uncompressed, as the file says


class Footer(NamedTuple):
    """A file's parsed footer."""

    metadata: pq.FileMetaData
    groups: tuple[Group, ...]
    size: int  #: bytes it takes in memory, about


def footer_size(tail: bytes) -> int:
    """Bytes from the file's end that hold the footer; raises `UnknownTierRange` if it is no Parquet
    file."""
    if len(tail) >= _TRAILER.size:
        length, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
        if magic == b"PAR1" and length <= FOOTER_BYTES_MAX:
            return int(length) + _TRAILER.size
    raise errors.UnknownTierRange("a file of the table is no Parquet file")


def parse_footer(tail: bytes) -> Footer:
    """The footer at the end of `tail`."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as cause:
        raise errors.UnknownTierRange(f"a footer does not parse: {cause}") from cause
    columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if "offset" not in columns:
        raise errors.TierTableChanged("a file of the table has no column offset")
    at = {name: columns.index(name) for name in ("offset", "timestamp") if name in columns}
    groups = tuple(_group(metadata.row_group(i), i, at) for i in range(metadata.num_row_groups))
    return Footer(metadata, groups, int(metadata.serialized_size) * 3)


def _group(found: Any, number: int, at: dict[str, int]) -> Group:
    low, high = 0, OFFSET_MAX
    stats = found.column(at["offset"]).statistics
    if stats is not None and stats.has_min_max:
        low, high = int(stats.min), int(stats.max)
    latest = TIME_MAX
    if "timestamp" in at:
        latest = _latest(found.column(at["timestamp"]).statistics)
    start, end = 2**62, 0
    for i in range(found.num_columns):
        chunk = found.column(i)
        first = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            first = min(first, chunk.dictionary_page_offset)
        start = min(start, first)
        end = max(end, first + chunk.total_compressed_size)
    return Group(
        number, low, high, latest, found.num_rows, start, max(0, end - start), found.total_byte_size
    )


def _latest(stats: Any) -> int:
    """Largest timestamp in ms, rounded up; TIME_MAX if the file does not tell."""
    try:
        if stats is None or not stats.has_min_max:
            return TIME_MAX
        top = stats.max
        if isinstance(top, datetime.datetime):
            since = top - datetime.datetime(1970, 1, 1, tzinfo=top.tzinfo)
            return -(-since // datetime.timedelta(milliseconds=1))
    except (OverflowError, ValueError, NotImplementedError, pa.ArrowException):
        pass  # beyond what Python's datetime holds
    return TIME_MAX


class _Window(io.RawIOBase):
    """A file of which only `[start, start + len(data))` is at hand."""

    def __init__(self, data: bytes, start: int, size: int) -> None:
        super().__init__()
        self._data = memoryview(data)
        self._start = start
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
        low = self._at - self._start
        wanted = self._size - self._at if size is None or size < 0 else size
        if low < 0 or low + wanted > len(self._data):
            raise OSError(f"bytes {self._at}+{wanted} were not fetched")
        self._at += wanted
        return self._data[low : low + wanted]


def read_group(footer: Footer, group: Group, data: bytes, file_size: int) -> pa.RecordBatch:
    """The rows of one row group, in the columns of a file; `data` are its bytes."""
    if len(data) < group.size:
        raise errors.UnknownTierRange("a file of the table is shorter than its footer says")
    try:
        with pq.ParquetFile(
            pa.PythonFile(_Window(data, group.start, file_size), mode="r"),
            metadata=footer.metadata,
            pre_buffer=False,
        ) as file:
            table = file.read_row_group(group.number, use_threads=False)
        return convert.canonical(table)
    except (pa.ArrowException, OSError) as cause:
        raise errors.UnknownTierRange(f"a row group does not decode: {cause}") from cause
