"""The footer of a data file: where its row groups are and what they hold.

Arrow trusts a damaged footer: single flipped bits lost rows, made columns null, or ended the
process.  Therefore a footer is parsed only after its checksum was compared with the checksum in the
file's name (rule T10).  Pages carry checksums of their own, which Arrow verifies.

Invariants
  H1  The checksum covers the footer, its length and the magic behind it: everything that tells
      Arrow where a page is, its length, its encoding and its column.
  H2  A parsed footer states the same offsets and rows as the file's add action in the table.
  H3  A file with another name (outside maintenance wrote it) has no footer checksum.  H2 holds for
      it as far as its add action has statistics.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from pk.tiering.data_files import OFFSET_MAX
from pk.tiering.layout import FILE_SCHEMA, parse_written_path
from pk.types import Offset

#: Number of last bytes that are read first to find a footer; a longer footer costs a second
#: request.
TAIL_BYTES = 64 * 1024
FOOTER_BYTES_MAX = 64 * 1024 * 1024
TIME_MAX = 2**62
#: Columns that a look-up by time reads.
TIMES = pa.schema([FILE_SCHEMA.field(name) for name in ("offset", "timestamp", "leader_epoch")])
_TRAILER = struct.Struct("<I4s")
_MAGIC = b"PAR1"


class UnreadableFile(Exception):
    """The bytes of a data file differ from those that were written, or were never a file of pk's
    table.

    This error never leaves the tier's modules: a caller that knows the file's name raises
    `DamagedTierFile` instead.
    """


class Listed(Protocol):
    """The facts of the table's add action about a file; `rows` 0 = unknown."""

    @property
    def path(self) -> str: ...

    @property
    def min_offset(self) -> Offset: ...

    @property
    def max_offset(self) -> Offset: ...

    @property
    def rows(self) -> int: ...

    @property
    def size(self) -> int: ...


class Part(NamedTuple):
    """A part of a file: `size` bytes from `start` on."""

    start: int
    size: int


class Group(NamedTuple):
    """One row group; missing statistics mean "anything"."""

    number: int  #: index in its file
    min_offset: Offset
    max_offset: Offset
    max_timestamp_ms: int
    rows: int
    start: int  #: first byte in the file
    size: int  #: bytes in the file
    decoded: int  #: uncompressed bytes, as the file states
    times: tuple[Part, ...]  #: parts with the columns of TIMES; adjoining columns are one part


class Footer(NamedTuple):
    """The parsed footer of a file."""

    metadata: pq.FileMetaData
    groups: tuple[Group, ...]
    size: int  #: approximate bytes in memory


def footer_size(tail: bytes | bytearray | memoryview) -> int:
    """Returns how many bytes at the file's end hold the footer.  Raises `UnreadableFile`."""
    if len(tail) >= _TRAILER.size:
        length, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
        if magic == _MAGIC and length <= FOOTER_BYTES_MAX:
            return int(length) + _TRAILER.size
    raise UnreadableFile("it does not end like a Parquet file")


def tail_part(size: int) -> Part:
    """Returns the end of a file of `size` bytes, where its footer is looked for first."""
    least = min(size, TAIL_BYTES)
    return Part(size - least, least)


def longer_tail(tail: bytes, size: int) -> Part | None:
    """Returns the part of a file of `size` bytes to read if `tail` does not hold its whole footer;
    None = it does, or the file is too short.  Raises `UnreadableFile`."""
    needed = footer_size(tail)
    return Part(size - needed, needed) if len(tail) < needed <= size else None


def footer_crc(tail: bytes | memoryview) -> int:
    """Returns the CRC-32C of the footer at the end of `tail`, of its length and the magic (H1)."""
    size = footer_size(tail)
    if size > len(tail):
        raise UnreadableFile(f"its footer of {size} bytes is longer than what there is")
    return crc32c(memoryview(tail)[len(tail) - size :])


def check_footer(path: str, tail: bytes | memoryview) -> None:
    """Compares the footer at the end of `tail` with the checksum in its file's name, if pk wrote
    the file (H1, H3).  Raises `UnreadableFile`."""
    name = parse_written_path(path)
    found = footer_crc(tail)
    if name is not None and found != name.footer_crc:
        raise UnreadableFile(
            f"its footer has the checksum {found:08x}, its name says {name.footer_crc:08x}"
        )


def open_footer(file: Listed, tail: bytes) -> Footer:
    """Verifies and parses the footer at the end of `tail` (H1, H2).  Raises `UnreadableFile`."""
    check_footer(file.path, tail)
    footer = parse_footer(tail)
    rows = footer.metadata.num_rows
    if file.rows and rows != file.rows:
        raise UnreadableFile(f"it has {rows} rows, the table's log says {file.rows}")
    if sum(group.rows for group in footer.groups) != rows:
        raise UnreadableFile(f"its row groups do not have the {rows} rows of the file")
    groups = []
    for group in footer.groups:
        if group.max_offset == OFFSET_MAX:  # no statistics
            group = group._replace(min_offset=file.min_offset, max_offset=file.max_offset)
        if not (file.min_offset <= group.min_offset and group.max_offset <= file.max_offset):
            raise UnreadableFile(
                f"it has offsets {group.min_offset} to {group.max_offset}, the table's log says "
                f"{file.min_offset} to {file.max_offset}"
            )
        if not (group.start >= 0 and group.start + group.size <= file.size):
            raise UnreadableFile("its footer names bytes behind its end")
        groups.append(group)
    return footer._replace(groups=tuple(groups))


def parse_footer(tail: bytes) -> Footer:
    """Parses the footer at the end of `tail`, whose checksum is valid.  Raises `UnreadableFile`."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as cause:
        raise UnreadableFile(f"its footer does not parse: {cause}") from cause
    fields = dict.fromkeys(
        metadata.schema.column(i).path.partition(".")[0] for i in range(metadata.num_columns)
    )
    lacking = [name for name in FILE_SCHEMA.names if name not in fields]
    if lacking:
        raise UnreadableFile(f"it has no column {lacking[0]}")
    columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    at = {name: columns.index(name) for name in ("offset", "timestamp") if name in columns}
    if len(at) < 2:
        raise UnreadableFile("its columns offset and timestamp are nested")
    groups = tuple(_group(metadata.row_group(i), i, at) for i in range(metadata.num_row_groups))
    return Footer(metadata, groups, int(metadata.serialized_size) * 3)


def _group(found: Any, number: int, at: dict[str, int]) -> Group:
    low, high = 0, OFFSET_MAX
    stats = found.column(at["offset"]).statistics
    if stats is not None and stats.has_min_max:
        low, high = int(stats.min), int(stats.max)
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
    """Returns the largest timestamp in ms, rounded up; TIME_MAX if the file does not state it."""
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


def check_rows(rows: pa.RecordBatch | pa.Table, groups: Sequence[Group]) -> None:
    """Compares decoded rows with the footer's statements about their row groups (H2).  Raises
    `UnreadableFile`."""
    wanted = sum(group.rows for group in groups)
    if rows.num_rows != wanted:
        raise UnreadableFile(f"{rows.num_rows} rows were read where its footer says {wanted}")
    if not wanted:
        return
    offsets = rows.column("offset").to_numpy()
    found = int(offsets.min()), int(offsets.max())
    low, high = min(each.min_offset for each in groups), max(each.max_offset for each in groups)
    if not (low <= found[0] and found[1] <= high):
        raise UnreadableFile(
            f"offsets {found[0]} to {found[1]} were read where its footer says {low} to {high}"
        )
