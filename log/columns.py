"""The body of a batch: Arrow columns ⇄ raw columns with lengths (docs/design/0001, 0002).

Encoding is in log/encoding.py.  Decoding rebuilds Arrow offsets by a prefix sum and points into the
received bytes.  A body from the network is not trusted until it is parsed (rule L13): every count
is compared with the number of bytes present before anything is allocated for it.

Body of a batch with n records and m headers in all.  A section that is absent takes no bytes:

    timestamps               u32 or i64 × n
    offset deltas            u32 × n
    key lengths              u32 × n
    value lengths            u32 × n
    header counts            u32 × n
    header key lengths       u32 × m
    header value lengths     u32 × m
    key validity             bits
    value validity           bits
    header value validity    bits
    key data                 bytes
    value data               bytes
    header key data          bytes (utf-8)
    header value data        bytes

A compressed body is `u32 decoded length | blob`; lz4 is the frame format.

Invariants
  F1  `parse` accepts exactly the bodies whose sections fill the decoded size; a null row has length
      0.
  F2  Decoding allocates at most the announced decoded size (<= decoded_bytes_max) plus 16 bytes per
      record or header.
  F3  decode(encode(rows)) == rows in the canonical types of `schema`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk import errors
from pk.log import batch as batches
from pk.log import small_batches
from pk.log.batch import HEADER_BYTES, Header
from pk.log.encoding import (
    DECODED_BYTES_MAX,
    FEW,
    I64,
    LENGTH,
    U32,
    UNITS,
    encode,
    encode_lists,
    few_offsets,
    fixed_column,
    total,
)
from pk.log.storage import Buffer

__all__ = [
    "DECODED_BYTES_MAX",
    "HEADER_TYPE",
    "Body",
    "UNITS",
    "binary",
    "body_of",
    "decode",
    "encode",
    "encode_lists",
    "joined_keys",
    "joined_offsets",
    "joined_tombstones",
    "key_values_of",
    "no_headers",
    "null_headers",
    "nulls",
    "parse",
    "rows_of",
    "schema",
    "validate_body",
]

HEADER_TYPE = pa.list_(
    pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.binary())])
)
_STAMP = struct.Struct("<q")


def schema(timestamp_unit: str = "ms") -> pa.Schema:
    """Return the schema of a decoded batch."""
    return pa.schema(
        [
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp(timestamp_unit, tz="UTC"), nullable=False),
            ("key", pa.binary()),
            ("value", pa.binary()),
            pa.field("headers", HEADER_TYPE, nullable=False),
        ]
    )


_SCHEMAS = {unit: schema(unit) for unit in ("ms", "us")}
_STAMPS = {unit: kind.field("timestamp").type for unit, kind in _SCHEMAS.items()}


# -- decoding --------------------------------------------------------------------------------------


class Body(NamedTuple):
    """A parsed body: views of the decoded bytes; the size of every section was checked."""

    timestamps: npt.NDArray[Any] | None
    deltas: U32 | None
    key_lengths: U32 | None
    value_lengths: U32 | None
    header_counts: U32 | None
    header_key_lengths: U32 | None
    header_value_lengths: U32 | None
    key_validity: memoryview | None
    value_validity: memoryview | None
    header_validity: memoryview | None
    key_data: memoryview
    value_data: memoryview
    header_key_data: memoryview
    header_value_data: memoryview


class _Cursor:
    """Cuts sections off the front of a body.  Running past the end is an error of the sender."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.position = 0

    def take(self, size: int, what: str) -> memoryview:
        end = self.position + size
        if end > len(self.view):
            raise errors.InvalidRecord(
                f"batch body: {what} take {size} bytes, {len(self.view) - self.position} are left"
            )
        start, self.position = self.position, end
        return self.view[start:end]

    def ints(self, present: int, count: int, what: str, kind: str = "<u4") -> Any:
        if not present:
            return None
        return np.frombuffer(self.take(count * int(kind[2]), what), kind)


def parse(header: Header, body: memoryview) -> Body:
    """Parse the sections of a decompressed `body`; every size is checked against the number of
    bytes present (rule L13).
    """
    flags, n = header.attributes, header.record_count
    cursor = _Cursor(body)
    stamps = cursor.ints(
        flags & batches.TIMESTAMPS,
        n,
        "timestamps",
        "<i8" if flags & batches.TIMESTAMPS_I64 else "<u4",
    )
    deltas = cursor.ints(flags & batches.OFFSET_DELTAS, n, "offset deltas")
    key_lengths = cursor.ints(flags & batches.KEY, n, "key lengths")
    value_lengths = cursor.ints(flags & batches.VALUE, n, "value lengths")
    counts = cursor.ints(flags & batches.HEADERS, n, "header counts")
    m = total(counts)
    names = cursor.ints(flags & batches.HEADERS, m, "header key lengths")
    contents = cursor.ints(flags & batches.HEADERS, m, "header value lengths")

    def bits(flag: int, rows: int, what: str) -> memoryview | None:
        return cursor.take((rows + 7) // 8, what) if flags & flag else None

    key_bits = bits(batches.KEY_NULLS, n, "key validity")
    value_bits = bits(batches.VALUE_NULLS, n, "value validity")
    header_bits = bits(batches.HEADER_NULLS, m, "header validity")
    parsed = Body(
        stamps,
        deltas,
        key_lengths,
        value_lengths,
        counts,
        names,
        contents,
        key_bits,
        value_bits,
        header_bits,
        cursor.take(total(key_lengths), "keys"),
        cursor.take(total(value_lengths), "values"),
        cursor.take(total(names), "header keys"),
        cursor.take(total(contents), "header values"),
    )
    if cursor.position != len(body):
        raise errors.InvalidRecord(f"batch body: {len(body) - cursor.position} bytes too many")
    _check_rows(header, parsed)
    return parsed


def _check_rows(header: Header, body: Body) -> None:
    """Check what sizes alone do not show: nulls are empty, offsets grow, timestamps lie in the
    range that the header announces.
    """
    for lengths, validity in (
        (body.key_lengths, body.key_validity),
        (body.value_lengths, body.value_validity),
        (body.header_value_lengths, body.header_validity),
    ):
        if validity is not None and lengths is not None and _null_with_bytes(lengths, validity):
            raise errors.InvalidRecord("batch body: a null that has bytes")
    if body.deltas is not None and len(body.deltas):
        deltas = body.deltas
        if np.any(deltas[1:] <= deltas[:-1]) or int(deltas[-1]) > header.last_offset_delta:
            raise errors.InvalidRecord("batch body: offsets do not grow within the batch")
    if body.timestamps is not None and len(body.timestamps) and not header.log_append_time:
        few = body.timestamps.tolist() if len(body.timestamps) <= FEW else None
        least = min(few) if few else int(body.timestamps.min())
        most = max(few) if few else int(body.timestamps.max())
        if not header.attributes & batches.TIMESTAMPS_I64:
            least, most = least + header.base_timestamp, most + header.base_timestamp
        floor = batches.TIMESTAMP_MS_MIN if header.has_delete_horizon else header.base_timestamp
        if least < floor or most > header.max_timestamp:
            raise errors.InvalidRecord("batch body: a timestamp outside the header's bounds")


def _null_with_bytes(lengths: U32, validity: memoryview) -> bool:
    if len(lengths) <= FEW:
        valid = int.from_bytes(validity, "little")
        return any(size and not valid >> row & 1 for row, size in enumerate(lengths.tolist()))
    return bool(np.any(lengths[_valid(validity, len(lengths)) == 0]))


def _valid(validity: memoryview, rows: int) -> npt.NDArray[np.uint8]:
    """Return the bits of the rows, 0 or 1."""
    bits = np.frombuffer(validity, np.uint8)
    return np.unpackbits(bits, count=rows, bitorder="little")


def _decompressed(header: Header, batch: Buffer, decoded_bytes_max: int) -> memoryview:
    """Return the decoded body.  The announced size is checked before anything is allocated."""
    body = memoryview(batch)[HEADER_BYTES : header.length]
    bound = min(decoded_bytes_max, DECODED_BYTES_MAX)
    if header.codec == "none":
        size = len(body)
    elif len(body) < LENGTH.size:
        raise errors.InvalidRecord("batch body: compressed, but without a decoded length")
    else:
        (size,) = LENGTH.unpack_from(body)
    if size > bound:
        raise errors.RecordTooLarge(
            f"a batch that decodes to {size} bytes; at most {bound} are allowed"
        )
    if header.codec == "none":
        return body
    blob = pa.py_buffer(body[LENGTH.size :])
    try:
        if header.codec == "zstd":
            return memoryview(pa.Codec("zstd").decompress(blob, decompressed_size=size))
        return _lz4(blob, size)
    except (pa.ArrowException, OSError, ValueError) as cause:
        raise errors.InvalidRecord(f"batch body: {cause}") from cause


def _lz4(blob: pa.Buffer, size: int) -> memoryview:
    """Decode an LZ4 frame of exactly `size` decoded bytes.

    The frame is read as a stream into a buffer of ours.  Arrow's one-shot LZ4 decoders do not
    report that the data ends early, and the rest of their buffer would be whatever the memory held
    before.
    """
    out = np.empty(size + 1, np.uint8)  # one more byte, to notice data that continues
    with pa.CompressedInputStream(pa.BufferReader(blob), "lz4") as stream:
        found = 0
        while found <= size:
            got = stream.readinto(out.data[found:])
            if not got:
                break
            found += got
    if found != size:
        raise errors.InvalidRecord(
            f"batch body: {size} decoded bytes announced, {found} or more found"
        )
    return out.data[:size]


def body_of(batch: Buffer, header: Header, decoded_bytes_max: int) -> Body:
    """Return the parsed body of one whole batch; it points into `batch` where it is not
    compressed.
    """
    return parse(header, _decompressed(header, batch, decoded_bytes_max))


def validate_body(batch: Buffer, header: Header, decoded_bytes_max: int) -> None:
    """Check everything that `decode` would refuse, without building columns; a broker does this
    before an append (rule L13).

    Off the event loop: decompression and checks of large arrays release the GIL.
    """
    if not header.record_count:
        return
    if header.length - HEADER_BYTES <= decoded_bytes_max and small_batches.accepts(header, batch):
        return
    body = body_of(batch, header, decoded_bytes_max)
    if body.header_key_lengths is not None:
        _texts(body.header_key_lengths, body.header_key_data)


def decode(
    batch: Buffer,
    *,
    decoded_bytes_max: int,
    timestamp_unit: str = "ms",
    header: Header | None = None,
) -> pa.RecordBatch:
    """Decode the rows of one whole batch into the columns of `schema(timestamp_unit)`; ms or us.

    The result points into `batch` where it is not compressed.  The checksum is not verified
    (`batch.check` does this).  Raises only `InvalidRecord`, `RecordTooLarge` and `CorruptBatch`.
    """
    if header is None:
        header = batches.read_header(batch)
        batches.check_structure(header)
        if header.length > len(batch):
            raise errors.CorruptBatch(f"{len(batch)} bytes of a batch of {header.length}")
    if not header.record_count:
        return pa.RecordBatch.from_pylist([], schema=_SCHEMAS[timestamp_unit])
    return rows_of(header, body_of(batch, header, decoded_bytes_max), timestamp_unit)


def rows_of(header: Header, body: Body, timestamp_unit: str = "ms") -> pa.RecordBatch:
    """Return what `decode` returns of a batch with rows, after `body_of`."""
    n = header.record_count
    columns = [
        _offsets(header, body),
        _timestamps(header, body, timestamp_unit),
        _binary(n, body.key_lengths, body.key_validity, body.key_data),
        _binary(n, body.value_lengths, body.value_validity, body.value_data),
        _header_lists(n, body),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMAS[timestamp_unit])


def joined_offsets(found: Sequence[tuple[Header, Body]]) -> I64:
    """Return the offsets of the rows of several batches."""
    parts = [_offset_numbers(header, body) for header, body in found]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def joined_keys(found: Sequence[tuple[Header, Body]]) -> pa.Array:
    """Return the keys of several batches, of less than 2 GiB, as one column.  It is a copy."""
    lengths = [body.key_lengths for _, body in found if body.key_lengths is not None]
    if len(lengths) == len(found) and all(body.key_validity is None for _, body in found):
        data = b"".join(body.key_data for _, body in found)
        return binary(np.concatenate([np.zeros(0, np.uint32), *lengths]), memoryview(data))
    return pa.concat_arrays(
        _binary(header.record_count, body.key_lengths, body.key_validity, body.key_data)
        for header, body in found
    )


def joined_tombstones(found: Sequence[tuple[Header, Body]]) -> npt.NDArray[np.bool_]:
    """Return of several batches which rows have no value."""
    parts = [
        np.full(header.record_count, body.value_lengths is None)
        if body.value_validity is None or body.value_lengths is None
        else _valid(body.value_validity, header.record_count) == 0
        for header, body in found
    ]
    return np.concatenate([np.zeros(0, bool), *parts])


#: Rows with these flags are decoded through Arrow.
_NOT_PLAIN = batches.VALUE_NULLS | batches.HEADERS


def values_of(batch: Buffer, header: Header, decoded_bytes_max: int) -> list[tuple[int, Any]]:
    """Return (offset, value) of each row of a checked batch, like `decode`; faster for a few small
    rows.
    """
    plain = header.record_count and not header.attributes & _NOT_PLAIN
    body = body_of(batch, header, decoded_bytes_max) if plain else None
    if body is None or body.value_lengths is None:
        rows = decode(batch, decoded_bytes_max=decoded_bytes_max, header=header)
        values = rows.column("value").to_pylist()
        return list(zip(rows.column("offset").to_pylist(), values, strict=True))
    first, deltas = header.base_offset, body.deltas
    found, at, data = [], 0, body.value_data
    for row, size in enumerate(body.value_lengths.tolist()):
        delta = row if deltas is None else int(deltas[row])
        found.append((first + delta, bytes(data[at : at + size])))
        at += size
    return found


def key_values_of(
    batch: Buffer, header: Header, decoded_bytes_max: int
) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return (offset, key, value) of each row of a checked batch, like `decode`; faster for a few
    small rows.
    """
    if header.attributes & (_NOT_PLAIN | batches.KEY_NULLS) or not header.record_count:
        rows = decode(batch, decoded_bytes_max=decoded_bytes_max, header=header)
        columns = (rows.column(name).to_pylist() for name in ("offset", "key", "value"))
        return list(zip(*columns, strict=True))
    body, first = body_of(batch, header, decoded_bytes_max), header.base_offset
    deltas = range(header.record_count) if body.deltas is None else body.deltas.tolist()
    keys = _pieces(body.key_lengths, body.key_data, header.record_count)
    values = _pieces(body.value_lengths, body.value_data, header.record_count)
    return [(first + at, *row) for at, *row in zip(deltas, keys, values, strict=True)]


def _pieces(lengths: U32 | None, data: memoryview, rows: int) -> list[bytes | None]:
    """Return the values of a column without nulls; an absent column is all null."""
    if lengths is None:
        return [None] * rows
    ends = accumulate(lengths.tolist())
    return [bytes(data[end - size : end]) for size, end in zip(lengths.tolist(), ends, strict=True)]


def _offsets(header: Header, body: Body) -> pa.Array:
    return fixed_column(_offset_numbers(header, body))


def _offset_numbers(header: Header, body: Body) -> I64:
    first = header.base_offset
    if body.deltas is None:
        return np.arange(first, first + header.record_count, dtype=np.int64)
    found: I64 = np.add(body.deltas, first, dtype=np.int64, casting="unsafe")
    return found


def _timestamps(header: Header, body: Body, unit: str) -> pa.Array:
    scale = UNITS[unit]
    raw: Any
    if header.log_append_time or body.timestamps is None:
        raw = _STAMP.pack(header.max_timestamp * scale) * header.record_count
    else:
        raw = body.timestamps.astype(np.int64)
        if not header.attributes & batches.TIMESTAMPS_I64:
            raw += header.base_timestamp
        if scale != 1:
            raw *= scale
    return pa.Array.from_buffers(_STAMPS[unit], header.record_count, [None, pa.py_buffer(raw)], 0)


def _prefix_sum(lengths: U32) -> pa.Buffer:
    """Return Arrow offsets.  The sum was checked against the section's size, so nothing
    overflows.
    """
    if len(lengths) <= FEW:
        return few_offsets(lengths.tolist())
    offsets = np.empty(len(lengths) + 1, np.int32)
    offsets[0] = 0
    sums = offsets[1:]
    sums[:] = lengths.view(np.int32)  # copied first, because numpy adds up unaligned numbers slowly
    np.cumsum(sums, out=sums)
    return pa.py_buffer(offsets)


def _binary(
    rows: int, lengths: U32 | None, validity: memoryview | None, data: memoryview
) -> pa.Array:
    if lengths is None:
        return nulls(rows)
    if validity is None:
        return binary(lengths, data)
    buffers = [pa.py_buffer(validity), _prefix_sum(lengths), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), rows, buffers)


def nulls(rows: int) -> pa.Array:
    """Return a binary column of nulls only."""
    return pa.Array.from_buffers(pa.binary(), rows, [_zeros(rows), _zeros(rows), _NO_BYTES], rows)


def binary_column(items: Sequence[bytes | None] | None, count: int) -> pa.Array:
    """Build a `binary` column from Python bytes.

    It avoids the first call of `pa.array`, which imports pandas if that is installed: 0.3 s on the
    thread that sends.  Items that are None need `pa.array`.
    """
    if items is None:
        return nulls(count)
    try:
        data = b"".join(items)  # type: ignore[arg-type]  # TypeError if one is None
    except TypeError:
        return pa.array(items, pa.binary())
    lengths = list(map(len, items))  # type: ignore[arg-type]  # none is None: they were joined
    if count <= FEW:
        buffers = [None, few_offsets(lengths), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), count, buffers, 0)
    first = lengths[0]
    offsets = np.zeros(count + 1, np.int32)
    if lengths.count(first) == count:  # then numpy need not convert the list
        offsets[1:] = first
    else:
        offsets[1:] = lengths
    np.cumsum(offsets, out=offsets)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0
    )


def binary(lengths: U32, data: memoryview) -> pa.Array:
    """Return a binary column without nulls; the lengths add up to the size of `data`."""
    buffers = [None, _prefix_sum(lengths), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers, 0)


def _texts(lengths: U32, data: memoryview) -> pa.Array:
    array = pa.Array.from_buffers(
        pa.string(), len(lengths), [None, _prefix_sum(lengths), pa.py_buffer(data)], 0
    )
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as cause:
        raise errors.InvalidRecord(f"batch body: a header key is not utf-8: {cause}") from cause
    return array


def _header_lists(rows: int, body: Body) -> pa.Array:
    if body.header_counts is None or body.header_key_lengths is None:
        return no_headers(rows)
    count = len(body.header_key_lengths)
    children = [
        _texts(body.header_key_lengths, body.header_key_data),
        _binary(count, body.header_value_lengths, body.header_validity, body.header_value_data),
    ]
    items = pa.Array.from_buffers(HEADER_TYPE.value_type, count, [None], 0, children=children)
    return pa.Array.from_buffers(
        HEADER_TYPE, rows, [None, _prefix_sum(body.header_counts)], 0, children=[items]
    )


def no_headers(rows: int) -> pa.Array:
    """Return a headers column of empty lists."""
    return pa.Array.from_buffers(HEADER_TYPE, rows, [None, _zeros(rows)], 0, children=[_NO_HEADERS])


def null_headers(rows: int) -> pa.Array:
    """Return a headers column of nulls only."""
    bits = [_zeros(rows), _zeros(rows)]
    return pa.Array.from_buffers(HEADER_TYPE, rows, bits, rows, children=[_NO_HEADERS])


def _zeros(rows: int) -> pa.Buffer:
    """Return offsets, or validity bits, of `rows` rows that hold nothing; one shared buffer unless
    there are many rows.

    Neither this function nor the timestamps above use numpy.  For arrays of this size numpy
    releases the GIL, and getting it back from a busy thread takes far longer than the work.
    """
    return _ZEROS if rows < _ZEROS_ROWS else pa.py_buffer(bytes(4 * (rows + 1)))


_ZEROS_ROWS = 1 << 16
_ZEROS = pa.py_buffer(bytes(4 * _ZEROS_ROWS))
_NO_BYTES = pa.py_buffer(b"")
_NO_HEADERS = pa.Array.from_buffers(  # pa.array would import pandas
    HEADER_TYPE.value_type,
    0,
    [None],
    0,
    children=[pa.nulls(0, pa.string()), pa.nulls(0, pa.binary())],
)
