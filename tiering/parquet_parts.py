"""Parts of a Parquet file by byte range: the footer, and single row groups.

A cold read fetches what it needs with two range requests (footer once, then one row group) and
hands the bytes to Arrow under their absolute positions, so that no other part of the file is asked
for.  A look-up by time, which retention makes of every partition again and again, fetches the few
kilobytes of three columns instead of the row group.
"""

from __future__ import annotations

import datetime
import io
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pk import errors
from pk.tiering import convert
from pk.tiering.layout import FILE_SCHEMA
from pk.tiering.table import OFFSET_MAX
from pk.types import Offset

#: A footer is looked for in so many last bytes first; a longer one costs a second request.
TAIL_BYTES = 64 * 1024
FOOTER_BYTES_MAX = 64 * 1024 * 1024
TIME_MIN, TIME_MAX = -(2**62), 2**62
#: What a look-up by time reads.
TIMES = pa.schema([FILE_SCHEMA.field(name) for name in ("offset", "timestamp", "leader_epoch")])
_TRAILER = struct.Struct("<I4s")


class Part(NamedTuple):
    """So many bytes of a file from `start` on."""

    start: int
    size: int


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
    times: tuple[Part, ...]  #: where the columns of TIMES are, those that adjoin as one


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
    parts = [_part(found.column(i)) for i in range(found.num_columns)]
    start = min(part.start for part in parts)
    end = max(part.start + part.size for part in parts)
    names = [found.column(i).path_in_schema for i in range(found.num_columns)]
    times = [part for name, part in zip(names, parts, strict=True) if name in TIMES.names]
    return Group(
        number,
        low,
        high,
        latest,
        found.num_rows,
        start,
        max(0, end - start),
        found.total_byte_size,
        _adjoined(times),
    )


def _part(chunk: Any) -> Part:
    first = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        first = min(first, chunk.dictionary_page_offset)
    return Part(first, chunk.total_compressed_size)


def _adjoined(parts: Iterable[Part]) -> tuple[Part, ...]:
    found: list[Part] = []
    for part in sorted(parts):
        if found and found[-1].start + found[-1].size == part.start:
            part = Part(found[-1].start, found.pop().size + part.size)
        found.append(part)
    return tuple(found)


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


def read_group(footer: Footer, group: Group, data: bytes, file_size: int) -> pa.RecordBatch:
    """The rows of one row group, in the columns of a file; `data` are its bytes."""
    parts = [(Part(group.start, group.size), data)]
    return _read(footer, group, parts, file_size, FILE_SCHEMA, None)


def read_times(
    footer: Footer, group: Group, parts: Sequence[bytes], file_size: int
) -> pa.RecordBatch:
    """The rows of one row group in the columns of TIMES; `parts` are the bytes of `group.times`."""
    known = [name for name in TIMES.names if name in footer.metadata.schema.names]
    fetched = list(zip(group.times, parts, strict=True))
    return _read(footer, group, fetched, file_size, TIMES, known)


def _read(
    footer: Footer,
    group: Group,
    parts: Sequence[tuple[Part, bytes]],
    file_size: int,
    schema: pa.Schema,
    names: Sequence[str] | None,
) -> pa.RecordBatch:
    if any(len(data) < part.size for part, data in parts):
        raise errors.UnknownTierRange("a file of the table is shorter than its footer says")
    window = _Window([(part.start, data) for part, data in parts], file_size)
    try:
        with pq.ParquetFile(
            pa.PythonFile(window, mode="r"), metadata=footer.metadata, pre_buffer=False
        ) as file:
            table = file.read_row_group(group.number, columns=names, use_threads=False)
        return convert.canonical(table, schema)
    except (pa.ArrowException, OSError) as cause:
        raise errors.UnknownTierRange(f"a row group does not decode: {cause}") from cause
