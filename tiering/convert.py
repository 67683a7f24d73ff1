"""Converts log batches to the tier's Parquet files and back, column-wise; Python touches no single
row.

Forward: whole batches of a stable range become one file with the columns of rule T10.  Control
batches and the batches of aborted transactions are left out, so the table is read_committed by
nature (rule T12).  Back: rows of a file become log batches for a cold fetch.  Gaps between offsets
stay, and each batch has one leader epoch and one timestamp type.

Invariants
  F1  Rows are in offset order.  A file holds exactly the rows of its range that are neither markers
      nor aborted.
  F2  Memory is bounded by one decoded batch, two row groups and the output.  A run of batches
      becomes rows as soon as it fills a row group, and rows are written as soon as a row group is
      full.  The output's memory is reused (output_buffer.py).
  F3  A row group has at most ROWS_PER_GROUP rows and, unless one row alone is larger, GROUP_BYTES
      bytes.
  F4  batches_of(rows_of(batches)) holds the same offsets, timestamps, keys, values, headers and
      epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pk.log import batch as log_batch
from pk.log import batch_decoder, columns
from pk.log.aborted import AbortedRanges
from pk.log.batch import Header
from pk.log.batch_decoder import PlainBatch
from pk.tiering import rowhash
from pk.tiering.footers import footer_crc
from pk.tiering.layout import FILE_SCHEMA, SUM_MODULUS
from pk.tiering.output_buffer import OutputBuffer, OutputBufferFull
from pk.types import NONE, AbortedTransaction, Offset

ROWS_PER_GROUP = 16_384
GROUP_BYTES = 4 * 1024 * 1024
ZSTD_LEVEL = 3
#: A row group of more batches than this is copied together first: hashing and encoding many small
#: pieces costs more than the copy.
PIECES_MAX = 8
#: All values of a row group are in one page, because each page has a fixed cost.
PAGE_BYTES = 2 * GROUP_BYTES
#: Values are stored uncompressed if compression leaves more than this share of a sample.
#: Compressing them costs as much as the rest of the file, and every reader must decompress them.
_COMPRESSED_SHARE = 0.95
_SAMPLE_BYTES = 256 * 1024
#: A key column with a larger share of distinct values than this is stored without a dictionary.
_KEY_DISTINCT_SHARE = 0.5
#: Size that batches of a cold fetch aim at, like a producer's.
COLD_BATCH_BYTES = 1024 * 1024

LOG_APPEND = 1
CREATE = 0
_STATISTICS = ["offset", "timestamp"]
#: Names of the columns in Parquet.
_PATHS = (
    *(name for name in FILE_SCHEMA.names if name != "headers"),
    "headers.list.element.key",
    "headers.list.element.value",
)
_I64 = npt.NDArray[np.int64]
#: What the batches of a run have in common: their `shape_of` and their delete horizon.
_Shape = tuple[int | None, int | None]


@dataclass(slots=True, frozen=True)
class BuiltFile:
    """A finished file and the facts that its commit states (rule T2)."""

    data: memoryview
    rows: int
    row_sum: int
    min_offset: Offset
    max_offset: Offset
    min_timestamp_ms: int
    max_timestamp_ms: int
    null_keys: int
    null_values: int
    footer_crc: int  #: part of the file's name (rule T10)


def _rows_of_run(
    run: Sequence[PlainBatch], alone: Sequence[pa.RecordBatch], bounds: tuple[Offset, Offset]
) -> pa.RecordBatch:
    """Returns the rows of a run of batches with offsets in `bounds`, in the columns of a file.

    alone: the decoded batches, if they were decoded one by one
    """
    if alone:
        decoded = alone[0] if len(alone) == 1 else pa.concat_batches(alone)
        headers = _file_headers(decoded.column("headers"))
    else:
        decoded = batch_decoder.decode_batches(run, "us")
        headers = pa.nulls(decoded.num_rows, FILE_SCHEMA.field("headers").type)
    return _between(_file_rows(decoded, headers, [member.header for member in run]), *bounds)


def _file_rows(
    decoded: pa.RecordBatch, headers: pa.Array, batches: Sequence[Header]
) -> pa.RecordBatch:
    """Returns decoded rows in the columns of a file.

    `decoded` has the rows of `batches`.  All rows get the delete horizon of the first batch.
    """
    count = decoded.num_rows
    counts = [header.record_count for header in batches]
    types = [LOG_APPEND if header.log_append_time else CREATE for header in batches]
    horizon = batches[0].delete_horizon_ms
    return pa.RecordBatch.from_arrays(
        [
            decoded.column("offset"),
            decoded.column("timestamp"),
            _repeated(types, counts),
            decoded.column("key"),
            decoded.column("value"),
            headers,
            _repeated([header.leader_epoch for header in batches], counts),
            pa.nulls(count, pa.int64())
            if horizon is None
            else pa.array(np.full(count, horizon, np.int64)),
        ],
        schema=FILE_SCHEMA,
    )


def _repeated(numbers: Sequence[int], counts: Sequence[int]) -> pa.Array:
    return pa.array(np.repeat(np.array(numbers, np.int32), counts))


def _between(rows: pa.RecordBatch, start: Offset, limit: Offset) -> pa.RecordBatch:
    offsets = rows.column("offset").to_numpy()
    if start <= offsets[0] and offsets[-1] < limit:
        return rows
    low, high = np.searchsorted(offsets, [start, limit])
    return rows.slice(int(low), int(high - low))


def _file_headers(column: pa.Array) -> pa.Array:
    """Returns the headers column.  A row without headers is null, as in Kafka's connector."""
    kind = FILE_SCHEMA.field("headers").type
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    if not lengths.any():
        return pa.nulls(len(column), kind)
    items = column.flatten().cast(kind.value_type)
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    mask = pa.array(lengths == 0)
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=kind, mask=mask)


def _row_bytes(rows: pa.RecordBatch) -> _I64:
    """Returns the approximate size of each row in bytes."""
    total = np.full(rows.num_rows, 32, np.int64)
    for name in ("key", "value"):
        column = rows.column(name)
        if column.null_count < len(column):
            ends = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
            total += np.diff(ends)
    headers = rows.column("headers")
    if headers.null_count < len(headers):
        total += rows.nbytes // max(1, rows.num_rows)  # an average is enough for a bound
    return total


def cut(rows: pa.RecordBatch, rows_max: int, bytes_max: int) -> list[int]:
    """Returns the ends of consecutive slices of at most `rows_max` rows and about `bytes_max`
    bytes; each slice has at least one row."""
    count = rows.num_rows
    sums = np.cumsum(_row_bytes(rows))
    ends: list[int] = []
    at = 0
    while at < count:
        spent = int(sums[at - 1]) if at else 0
        end = int(np.searchsorted(sums, spent + bytes_max, side="right"))
        at = min(max(end, at + 1), at + rows_max, count)
        ends.append(at)
    return ends


def fitting(rows: pa.RecordBatch, bytes_max: int) -> int:
    """Returns how many of the first rows take about `bytes_max` bytes; at least one."""
    sums = np.cumsum(_row_bytes(rows))
    return max(1, int(np.searchsorted(sums, bytes_max, side="right")))


def _data_bytes(body: columns.Body) -> int:
    """Returns the bytes of the keys, values and headers of a batch."""
    headers = len(body.header_key_data) + len(body.header_value_data)
    return len(body.key_data) + len(body.value_data) + headers


class FileBuilder:
    """Builds one Parquet file from batches or rows, in the memory of `buffer` (F2).

    Raises `OutputBufferFull` if that memory is too small: the caller builds the file again in a
    larger buffer.
    """

    def __init__(self, level: int = ZSTD_LEVEL, buffer: OutputBuffer | None = None) -> None:
        self._level = level
        self._buffer = buffer or OutputBuffer()
        self._buffer.clear()
        self._writer: pq.ParquetWriter | None = None
        self._run: list[PlainBatch] = []  #: batches that become rows together, all of `_shape`
        self._alone: list[pa.RecordBatch] = []  #: the same, decoded, if they have no `shape_of`
        self._shape: _Shape = (None, None)
        self._run_rows = 0
        self._run_bytes = 0
        self._bounds: tuple[Offset, Offset] = (0, 0)  #: range of the offsets taken from batches
        self._waiting: list[pa.RecordBatch] = []  #: the next row group
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._rows = 0
        self._sum = 0
        self._offsets = (NONE, NONE)
        self._stamps: tuple[int, int] | None = None
        self._null_keys = 0
        self._null_values = 0

    @property
    def size(self) -> int:
        """Returns the bytes of the file so far, without the last row groups."""
        return self._buffer.size

    def add_batch(
        self,
        header: Header,
        batch: memoryview,
        start: Offset,
        limit: Offset,
        aborted: AbortedRanges,
        decoded_bytes_max: int,
    ) -> None:
        """Adds the rows of one log batch with offsets in `[start, limit)`, unless it is a marker or
        aborted (F1).  `batch` must not change before the file is finished.

        Raises `CorruptBatch` or `InvalidRecord` if the log's own bytes do not decode (rule L9).
        """
        # verify before using any field: a flipped bit may mark the batch as a marker
        log_batch.check(batch)
        if header.base_offset >= limit or header.next_offset <= start:
            return
        if header.control or not header.record_count or aborted.contains(header):
            return
        shape = (batch_decoder.shape_of(header), header.delete_horizon_ms)
        body = columns.body_of(batch, header, decoded_bytes_max)
        size = _data_bytes(body)
        if self._run and (
            shape != self._shape
            or self._bounds != (start, limit)
            or self._run_bytes + size > GROUP_BYTES
        ):
            # a batch larger than a group stays alone: F2, and `decode_batches`'s bound
            self._decode()
        if shape[0] is None:
            self._alone.append(columns.rows_of(header, body, "us"))  # which may refuse it
        self._run.append(PlainBatch(header, body))
        self._shape, self._bounds = shape, (start, limit)
        self._run_rows += header.record_count
        self._run_bytes += size
        if self._run_rows >= ROWS_PER_GROUP:
            self._decode()

    def _decode(self) -> None:
        run, self._run = self._run, []
        alone, self._alone = self._alone, []
        self._run_rows = self._run_bytes = 0
        if run:
            self.add(_rows_of_run(run, alone, self._bounds))

    def add(self, rows: pa.RecordBatch) -> None:
        """Appends rows in the columns of a file; their offsets must be above all earlier ones."""
        while rows.num_rows:
            fits = self._fits(rows)
            if fits:
                piece = rows.slice(0, fits)
                self._waiting.append(piece)
                self._waiting_rows += fits
                self._waiting_bytes += piece.nbytes
                rows = rows.slice(fits)
            if rows.num_rows:
                self._flush()

    def _fits(self, rows: pa.RecordBatch) -> int:
        """Returns how many of the first rows the waiting row group can take (F3)."""
        head = rows.slice(0, ROWS_PER_GROUP - self._waiting_rows)
        spare = GROUP_BYTES - self._waiting_bytes
        if not head.num_rows or head.nbytes <= spare:
            return int(head.num_rows)
        fits = int(np.searchsorted(np.cumsum(_row_bytes(head)), spare, side="right"))
        return fits if fits or self._waiting else 1

    def _flush(self) -> None:
        """Writes the waiting row group."""
        pieces = self._waiting
        if len(pieces) > PIECES_MAX:
            pieces = [pa.concat_batches(pieces)]
        for piece in pieces:
            self._note(piece)
        group = pa.Table.from_batches(pieces, FILE_SCHEMA)
        try:
            if self._writer is None:
                options = _writer_options(pieces[0], self._level)
                self._writer = pq.ParquetWriter(self._buffer.stream(), FILE_SCHEMA, **options)
            self._writer.write_table(group, row_group_size=group.num_rows)
        except OSError as cause:  # a stream into memory fails for no other reason
            raise OutputBufferFull from cause
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def _note(self, rows: pa.RecordBatch) -> None:
        offsets = rows.column("offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        assert first > self._offsets[1], (first, self._offsets)  # F1
        self._offsets = (first if self._offsets[0] == NONE else self._offsets[0], last)
        stamps = rows.column("timestamp").view(pa.int64()).to_numpy()
        low, high = int(stamps.min()), int(stamps.max())
        if self._stamps is not None:
            low, high = min(low, self._stamps[0]), max(high, self._stamps[1])
        self._stamps = (low, high)
        self._rows += rows.num_rows
        self._sum = (self._sum + rowhash.row_sum(rows)) % SUM_MODULUS
        self._null_keys += rows.column("key").null_count
        self._null_values += rows.column("value").null_count

    def finish(self) -> BuiltFile | None:
        """Finishes the file and returns it, valid until the buffer is used again; None if no row
        was added."""
        self._decode()
        if self._waiting:
            self._flush()
        if self._writer is None:
            return None
        assert self._stamps is not None
        try:
            self._writer.close()
        except OSError as cause:
            raise OutputBufferFull from cause
        data = self._buffer.data()
        return BuiltFile(
            data=data,
            rows=self._rows,
            row_sum=self._sum,
            min_offset=self._offsets[0],
            max_offset=self._offsets[1],
            min_timestamp_ms=self._stamps[0] // 1000,
            max_timestamp_ms=self._stamps[1] // 1000,
            null_keys=self._null_keys,
            null_values=self._null_values,
            footer_crc=footer_crc(data),
        )


def _incompressible(values: pa.Array, level: int) -> bool:
    """Returns whether a piece from the middle of the values does not compress well."""
    if values.null_count == len(values):
        return False
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4)
    first, size = int(ends[0]), int(ends[-1] - ends[0])
    if size < _SAMPLE_BYTES:
        return False
    sample = data.slice(first + (size - _SAMPLE_BYTES) // 2, _SAMPLE_BYTES)
    packed = pa.Codec("zstd", level).compress(sample)
    return len(packed) > _COMPRESSED_SHARE * len(sample)


def _writer_options(sample: pa.RecordBatch, level: int) -> dict[str, Any]:
    """Returns the options that measured best: zstd, packed offsets and times, keys as a dictionary
    unless they are unique."""
    encoding = {
        "offset": "DELTA_BINARY_PACKED",
        "timestamp": "DELTA_BINARY_PACKED",
        "value": "DELTA_LENGTH_BYTE_ARRAY",
        "delete_horizon_ms": "PLAIN",
        "headers.list.element.value": "DELTA_LENGTH_BYTE_ARRAY",
    }
    dictionary = ["timestamp_type", "leader_epoch", "headers.list.element.key"]
    keys = sample.column("key")
    known = len(keys) - keys.null_count
    if known and pc.count_distinct(keys).as_py() > known * _KEY_DISTINCT_SHARE and known > 1:
        encoding["key"] = "DELTA_LENGTH_BYTE_ARRAY"
    else:
        dictionary.append("key")
    plain = _incompressible(sample.column("value"), level)
    return {
        "compression": {path: "none" if plain and path == "value" else "zstd" for path in _PATHS},
        "compression_level": {path: level for path in _PATHS if not plain or path != "value"},
        "data_page_size": PAGE_BYTES,
        "use_dictionary": dictionary,
        "column_encoding": encoding,
        "write_page_checksum": True,
        "write_statistics": _STATISTICS,
        "store_schema": False,
        "version": "2.6",
    }


def build_file(
    buffers: Iterable[memoryview],
    *,
    start: Offset,
    limit: Offset,
    aborted: Sequence[AbortedTransaction],
    decoded_bytes_max: int,
    level: int = ZSTD_LEVEL,
) -> BuiltFile | None:
    """Builds one file of the rows of `buffers` (whole log batches, in order) with offsets in
    `[start, limit)`."""
    builder, ranges = FileBuilder(level), AbortedRanges(aborted)
    for buffer in buffers:
        for header, batch in log_batch.iter_batches(buffer):
            builder.add_batch(header, batch, start, limit, ranges, decoded_bytes_max)
    return builder.finish()


# -- back ------------------------------------------------------------------------------------------


def batches_of(rows: pa.RecordBatch, batch_bytes: int = COLD_BATCH_BYTES) -> Iterator[bytes]:
    """Returns log batches of rows in offset order, split where epoch or timestamp type changes, or
    at the target size."""
    if not rows.num_rows:
        return
    at = 0
    for end in _run_ends(rows):
        run = rows.slice(at, end - at)
        at = end
        inner = 0
        for stop in cut(run, ROWS_PER_GROUP, batch_bytes):
            yield _encode(run.slice(inner, stop - inner))
            inner = stop


def _run_ends(rows: pa.RecordBatch) -> list[int]:
    """Returns the ends of runs of rows, each of which a single batch can express."""
    epochs = pc.fill_null(rows.column("leader_epoch"), NONE).to_numpy()
    types = pc.fill_null(rows.column("timestamp_type"), CREATE).to_numpy()
    offsets = rows.column("offset").to_numpy()
    stamps = rows.column("timestamp").view(pa.int64()).to_numpy()
    broken = (epochs[1:] != epochs[:-1]) | (types[1:] != types[:-1])
    broken |= (types[1:] == LOG_APPEND) & (stamps[1:] != stamps[:-1])
    broken |= offsets[1:] - offsets[:-1] >= 2**31 // (2 * ROWS_PER_GROUP)
    return [*(np.flatnonzero(broken) + 1).tolist(), rows.num_rows]


def _encode(rows: pa.RecordBatch) -> bytes:
    epoch = rows.column("leader_epoch")[0].as_py()
    parts = columns.encode(rows, keep_offsets=True, leader_epoch=NONE if epoch is None else epoch)
    batch = b"".join(parts)
    if rows.column("timestamp_type")[0].as_py() == LOG_APPEND:
        header = log_batch.read_header(batch)
        append_time = header.max_timestamp
        stamped = log_batch.patched(batch, header.base_offset, header.leader_epoch, append_time)
        batch = b"".join(stamped)
    return batch
