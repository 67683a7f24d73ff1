"""Turns record batches of the log and of the tier into exactly the columns that Spark asked for.

Spark compares the schema of the first batch strictly with its own.  Then it copies every batch
through a socket, and row by row into its own format.  This module therefore uses the exact types
from the start, builds only the requested columns, and cuts constant columns from one cached array.
It merges small batches and splits large ones.  Python code never touches single rows.

Invariants
  A1  A row is returned exactly if its offset lies in the range and its batch is neither a control
      batch nor (for read_committed) part of an aborted transaction.  The broker names the first and
      last offset of each aborted transaction.
  A2  Every batch has exactly the schema of the `Shape`.
  A3  A batch from the network is not trusted until its checksum and its body are checked (rule
      L13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pk import errors
from pk.client.completed_fetch import headers_of
from pk.log import batch as batches
from pk.log import columns
from pk.log.aborted import AbortedRanges
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.options import MAY_BE_NULL, Column

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
#: Arrow types of the columns by lower-case name: the types that Spark derives from `COLUMNS`.
TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamptype": pa.int32(),
    "headers": HEADERS,
}
CREATE_TIME, LOG_APPEND_TIME = 0, 1
#: Sizes of batches for Spark: smaller ones are merged (a copy, worth it for tiny ones only), larger
#: ones are cut.
BATCH_BYTES_LEAST = 256 << 10
BATCH_BYTES_MOST = 16 << 20
BATCH_ROWS_LEAST = 2_000
BATCH_ROWS_MOST = 50_000
#: Cached constant arrays of a read; one of a topic's name may have 100 KB.
CONSTANTS_MAX = 16


class LogRows(NamedTuple):
    """Rows of one batch of the log, which are not in the shape yet: small ones are joined first."""

    rows: pa.RecordBatch
    topic: str
    partition: int
    timestamp_type: int
    size: int  #: bytes, about

    @property
    def num_rows(self) -> int:
        return int(self.rows.num_rows)


#: What a read finds: rows of the log, or rows of the tier in the shape.
Found: TypeAlias = LogRows | pa.RecordBatch


class Shape:
    """The columns of one read, and some cached constant arrays."""

    def __init__(self, columns: Sequence[Column]) -> None:
        assert all(one.name.lower() in TYPES for one in columns), columns
        self.names = tuple(one.name.lower() for one in columns)
        self.schema = pa.schema(
            [pa.field(one.name, TYPES[one.name.lower()], one.nullable) for one in columns]
        )
        self._constants: dict[tuple[str, Any], pa.Array] = {}

    def constant(self, name: str, value: Any, rows: int) -> pa.Array:
        """Return an array of `rows` times `value`, cut from one cached array."""
        found = self._constants.get((name, value))
        if found is None or len(found) < rows:
            if len(self._constants) >= CONSTANTS_MAX:
                self._constants.clear()
            found = _repeated([value], [max(BATCH_ROWS_LEAST, 2 * rows)])
            self._constants[name, value] = found
        return found.slice(0, rows)

    def assemble(
        self, rows: pa.RecordBatch, topic: str, partition: int, timestamp_type: Any
    ) -> pa.RecordBatch:
        """Return rows of a partition in this shape (A2).

        `timestamp_type` is one number for all rows, or a column.
        """
        values = {"topic": topic, "partition": partition}
        arrays = []
        for name in self.names:
            if name in values:
                arrays.append(self.constant(name, values[name], rows.num_rows))
            elif name == "timestamptype" and isinstance(timestamp_type, int):
                arrays.append(self.constant(name, timestamp_type, rows.num_rows))
            elif name == "timestamptype":
                arrays.append(timestamp_type)
            elif name == "headers":
                arrays.append(null_where_empty(rows.column(name)))
            else:
                arrays.append(rows.column(name))
            if name not in MAY_BE_NULL and arrays[-1].null_count:
                raise errors.InvalidRecord(f"{topic}: a row has no {name}")
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def joined(self, pieces: Sequence[LogRows]) -> pa.RecordBatch:
        """Return the rows of all pieces in this shape (A2).

        An array costs about as much as 20 rows, so pieces are joined before there are more arrays.
        """
        if len(pieces) == 1:
            (one,) = pieces
            return self.assemble(one.rows, one.topic, one.partition, one.timestamp_type)
        counts = [one.num_rows for one in pieces]
        arrays = []
        for name in self.names:
            if name == "topic":
                arrays.append(_repeated([one.topic for one in pieces], counts))
            elif name == "partition":
                arrays.append(_repeated([one.partition for one in pieces], counts))
            elif name == "timestamptype":
                arrays.append(_repeated([one.timestamp_type for one in pieces], counts))
            else:
                # columns of the log are null only where MAY_BE_NULL says so (pk.log.columns)
                whole = pa.concat_arrays([one.rows.column(name) for one in pieces])
                arrays.append(null_where_empty(whole) if name == "headers" else whole)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _repeated(values: Sequence[int] | Sequence[str], counts: Sequence[int]) -> pa.Array:
    """Return an array with each value as many times as its count says; texts or int32.

    `pa.array` and `pa.scalar` import pandas: 0.2 s of CPU time in each Python worker of Spark.
    """
    rows = sum(counts)
    if not isinstance(values[0], str):
        whole = np.repeat(np.array(values, np.int32), counts)
        return pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(whole)])
    texts = [str(value).encode() for value in values]
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(np.repeat([len(text) for text in texts], counts), out=ends[1:])
    data = b"".join(text * count for text, count in zip(texts, counts, strict=True))
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def null_where_empty(headers: pa.Array) -> pa.Array:
    """Return the headers with null for an empty list, as Kafka's connector shows them."""
    rows = len(headers)
    some = pc.greater(pc.fill_null(pc.list_value_length(headers), 0), 0)
    count = pc.sum(some).as_py() or 0
    if count == 0:
        return pa.nulls(rows, HEADERS)
    if headers.offset:
        # copied, so that the buffers begin at the first row
        headers = headers.take(pa.array(np.arange(rows)))
    bits = None
    if count < rows:
        packed = np.packbits(some.to_numpy(zero_copy_only=False), bitorder="little")
        bits = pa.py_buffer(packed)
    pairs = [headers.values.field("key"), headers.values.field("value")]
    items = pa.StructArray.from_arrays(pairs, fields=list(HEADERS.value_type))
    return pa.Array.from_buffers(HEADERS, rows, [bits, headers.buffers()[1]], children=[items])


# -- the log --------------------------------------------------------------------------------------


def from_log(
    payload: memoryview,
    aborted: Sequence[tuple[int, int, int]],
    one: Range,
    decoded_bytes_max: int,
    next_offset: int,
    dense: bool = False,
) -> Iterator[LogRows]:
    """Yield the rows of log batches whose offsets lie in `one` (A1).

    `one.start` is the requested offset; `next_offset` is the offset after the answer's last batch.
    dense: the broker says that each batch begins where the one before it ends.
    Raises `CorruptBatch` or `InvalidRecord`, with the `position` at which the bad batch was
    expected; all rows below it have been yielded.
    """
    found, damage = headers_of(payload)
    ranges = AbortedRanges(aborted)
    before = one.start
    for index, (at, header) in enumerate(found):
        last = index + 1 == len(found)
        end = next_offset if damage is None else header.next_offset
        after = end if last else found[index + 1][1].base_offset
        raw = payload[at : at + header.length]
        with _placed(before):
            batches.check_place(header, before, after, first=not index, dense=dense)
            # Checked before the header decides anything: a flipped bit in it could make the reader
            # skip a batch that has rows.
            batches.check(raw)
        position, before = before, header.next_offset
        if header.next_offset <= one.start or header.base_offset >= one.end:
            continue
        if header.control or not header.record_count or ranges.contains(header):
            continue
        with _placed(position):
            decoded = columns.decode(
                raw, decoded_bytes_max=decoded_bytes_max, timestamp_unit="us", header=header
            )
        decoded = clip(decoded, one, header.base_offset if not header.sparse else None)
        if decoded.num_rows:
            kind = LOG_APPEND_TIME if header.log_append_time else CREATE_TIME
            plain = not header.codec_number and decoded.num_rows == header.record_count
            size = header.length if plain else decoded.nbytes  # which takes as long as a check
            yield LogRows(decoded, one.topic, one.partition, kind, size)
    if damage is not None:
        with _placed(before):
            raise damage


@contextlib.contextmanager
def _placed(position: int) -> Iterator[None]:
    """Add `position`, where the unreadable batch was expected, to the details of an error."""
    try:
        yield
    except (errors.CorruptBatch, errors.InvalidRecord) as cause:
        cause.details["position"] = str(position)
        raise


def clip(decoded: pa.RecordBatch, one: Range, dense_from: int | None) -> pa.RecordBatch:
    """Return the rows whose offset lies in `one`; the batch's offsets are ascending.

    `dense_from` is the batch's first offset if its offsets have no gaps, else None.
    """
    if dense_from is not None:
        first = max(0, one.start - dense_from)
        last = min(decoded.num_rows, one.end - dense_from)
    else:
        offsets = decoded.column("offset").to_numpy()
        first = int(np.searchsorted(offsets, one.start))
        last = int(np.searchsorted(offsets, one.end))
    if first == 0 and last == decoded.num_rows:
        return decoded
    return decoded.slice(first, max(0, last - first))


# -- the tier -------------------------------------------------------------------------------------


def from_tier(rows: pa.RecordBatch, shape: Shape, one: Range) -> pa.RecordBatch:
    """Return rows of a tier file, which are sorted and cut to the range, in the given shape."""
    kind = rows.column("timestamp_type") if "timestamp_type" in rows.schema.names else CREATE_TIME
    return shape.assemble(rows, one.topic, one.partition, kind)


def tier_columns(shape: Shape) -> list[str]:
    """Return the file columns that a shape needs; always with the offset, to filter and sort by."""
    wanted = {"timestamptype": "timestamp_type"}
    names = {wanted.get(name, name) for name in shape.names if name not in ("topic", "partition")}
    return sorted(names | {"offset"})


# -- sizes ----------------------------------------------------------------------------------------


def right_sized(found: Iterable[Found], shape: Shape) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of 2–50 thousand rows or 0.25–16 MB."""
    waiting: list[Found] = []
    rows = size = 0
    for one in found:
        waiting.append(one)
        rows += one.num_rows
        size += one.size if isinstance(one, LogRows) else one.nbytes
        if rows >= BATCH_ROWS_LEAST or size >= BATCH_BYTES_LEAST:
            yield from _cut(_merged(waiting, shape))
            waiting, rows, size = [], 0, 0
    if waiting:
        yield from _cut(_merged(waiting, shape))


def _merged(waiting: Sequence[Found], shape: Shape) -> pa.RecordBatch:
    parts: list[pa.RecordBatch] = []
    for of_log, group in groupby(waiting, lambda one: isinstance(one, LogRows)):
        found = list(group)
        parts += [shape.joined(found)] if of_log else found
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _cut(one: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    pieces = max(-(-one.num_rows // BATCH_ROWS_MOST), -(-one.nbytes // BATCH_BYTES_MOST))
    pieces = max(1, min(pieces, one.num_rows))
    cuts = [one.num_rows * at // pieces for at in range(pieces + 1)]
    if pieces == 1:
        yield one
        return
    for start, end in pairwise(cuts):
        yield one.slice(start, end - start)
