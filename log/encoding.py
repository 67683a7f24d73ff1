"""Encodes rows as the parts of a batch (docs/design/0001, 0002).  log/columns.py decodes them and
documents the layout.

Nothing is copied except for a codec: key and value data are views of the Arrow buffers, the lengths
are one subtraction, and the checksum runs over the parts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pk import errors, limits
from pk.log import batch as batches
from pk.log.batch import Header
from pk.log.storage import Buffer
from pk.types import NONE

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

#: Arrow's binary offsets are i32, so no decoded body may be larger, whatever a topic allows.
DECODED_BYTES_MAX = 2**31 - 1

_INT64 = pa.int64()
_WIDE = (pa.large_binary(), pa.large_string())
_PLAIN = (pa.binary(), pa.string(), *_WIDE)
#: Units of timestamps: how many make a millisecond; for s, how many milliseconds make a second.
UNITS = {"s": 1000, "ms": 1, "us": 1000, "ns": 1_000_000}
LENGTH = struct.Struct("<I")


#: Up to so many numbers, Python adds them up faster than numpy.
FEW = 32


def numbers(column: pa.Array) -> npt.NDArray[Any]:
    """Return the values of a numeric column without nulls, not copied.

    `Array.to_numpy` would import pandas where it is installed.  That costs a third of a second of
    CPU in the first thread that calls it, and blocks a client's loop if it happens there.
    """
    found: npt.NDArray[Any] = np.from_dlpack(column)
    return found


def fixed_column(values: npt.NDArray[Any], kind: pa.DataType = _INT64) -> pa.Array:
    """Return a column of numbers, not copied; `pa.array` would import pandas, too."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)


def offsets_of(column: pa.Array) -> npt.NDArray[Any]:
    """Return the offsets of a binary or text column, not copied: one more than it has rows."""
    kind = np.dtype(np.int64 if column.type in _WIDE else np.int32)
    start = column.offset * kind.itemsize
    return np.frombuffer(column.buffers()[1], kind, len(column) + 1, start)


_ENDS = [struct.Struct(f"<{count + 1}i") for count in range(FEW + 1)]


def few_offsets(lengths: Sequence[int]) -> pa.Buffer:
    """Return the offsets of at most `FEW` values of a binary column.  numpy would release the
    interpreter lock, and getting it back from a busy thread takes far longer than the work.
    """
    return pa.py_buffer(_ENDS[len(lengths)].pack(0, *accumulate(lengths)))


def total(lengths: U32 | None) -> int:
    """Return the sum, without overflow."""
    if lengths is None:
        return 0
    if len(lengths) <= FEW:
        return sum(lengths.tolist())
    return int(lengths.sum(dtype=np.uint64))


class _Blob(NamedTuple):
    """A binary column ready to be written.  `lengths` None = every row is null, and the column is
    left out.
    """

    lengths: U32 | None
    validity: bytes | None  #: None = no nulls
    data: Buffer


_ABSENT = _Blob(None, None, b"")


def encode(
    rows: pa.RecordBatch,
    *,
    codec: str = "none",
    level: int = 3,
    producer_id: int = NONE,
    producer_epoch: int = NONE,
    base_sequence: int = NONE,
    default_timestamp: int = 0,
    transactional: bool = False,
    control: bool = False,
    base_offset: int = 0,
    leader_epoch: int = NONE,
    keep_offsets: bool = False,
) -> list[Buffer]:
    """Encode `rows` as one batch, in parts to be joined or written with one writev; other columns
    are ignored.

    Columns: value, and any of key (binary or text types), timestamp (int64 ms or any Arrow
    timestamp), headers (list<struct<key, value>>).  `keep_offsets` takes the batch's offsets from
    the column `offset` (sparse if they have gaps).  Raises `SerializationError` for a column of
    another type, `RecordTooLarge`.
    """
    count = rows.num_rows
    if not 0 < count <= limits.BATCH_RECORDS_MAX:
        raise errors.RecordTooLarge(
            f"a batch has 1 to {limits.BATCH_RECORDS_MAX} records, not {count}"
        )
    names = rows.schema.names
    deltas: U32 | None = None
    last_delta = count - 1
    if keep_offsets:
        offsets = numbers(rows.column("offset"))
        base_offset, last_delta = int(offsets[0]), int(offsets[-1] - offsets[0])
        if last_delta != count - 1:
            deltas = (offsets - base_offset).astype(np.uint32)
    key = _blob(rows.column("key"), "key") if "key" in names else _ABSENT
    value = _blob(rows.column("value"), "value") if "value" in names else _ABSENT
    headers = rows.column("headers") if "headers" in names else None
    stamps = _stamps(rows.column("timestamp") if "timestamp" in names else None, default_timestamp)
    return _seal(
        Header(
            base_offset,
            0,
            leader_epoch,
            batches.MAGIC,
            0,
            _kind(transactional, control),
            producer_epoch,
            last_delta,
            0,
            0,
            producer_id,
            base_sequence,
            count,
        ),
        stamps,
        deltas,
        key,
        value,
        _headers(headers),
        codec,
        level,
    )


def encode_lists(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    timestamps: Sequence[int] | None = None,
    headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
    *,
    codec: str = "none",
    level: int = 3,
    producer_id: int = NONE,
    producer_epoch: int = NONE,
    base_sequence: int = NONE,
    default_timestamp: int = 0,
    transactional: bool = False,
) -> list[Buffer]:
    """Encode Python lists, as an accumulator of single records holds them; otherwise like
    `encode`.
    """
    count = len(values)
    if not 0 < count <= limits.BATCH_RECORDS_MAX:
        raise errors.RecordTooLarge(
            f"a batch has 1 to {limits.BATCH_RECORDS_MAX} records, not {count}"
        )
    stamps = None if timestamps is None else np.array(timestamps, np.int64)
    return _seal(
        Header(
            0,
            0,
            NONE,
            batches.MAGIC,
            0,
            _kind(transactional, False),
            producer_epoch,
            count - 1,
            0,
            0,
            producer_id,
            base_sequence,
            count,
        ),
        stamps if stamps is not None else default_timestamp,
        None,
        _blob_of_list(keys, "key"),
        _blob_of_list(values, "value"),
        _headers_of_list(headers),
        codec,
        level,
    )


def rewritten(
    header: Header, rows: pa.RecordBatch, horizon_ms: int | None, level: int = 3
) -> list[Buffer]:
    """Encode what a cleaning keeps of a batch.  The offsets that the batch covers, its producer,
    sequence, epoch and kind stay those of `header`, and its codec where that saves bytes.

    rows: at least one of its rows, as `columns.decode` returned them
    horizon_ms: the delete horizon of the batch; None = it has none
    """
    offsets = numbers(rows.column("offset"))
    sparse = rows.num_rows <= header.last_offset_delta
    stamps: I64 | int = numbers(rows.column("timestamp").view(pa.int64()))
    if header.log_append_time and horizon_ms is None:
        stamps = header.max_timestamp
    kind = batches.LOG_APPEND_TIME | batches.TRANSACTIONAL | batches.CONTROL
    return _seal(
        header._replace(attributes=header.attributes & kind, record_count=rows.num_rows),
        stamps,
        (offsets - header.base_offset).astype(np.uint32) if sparse else None,
        _blob(rows.column("key"), "key"),
        _blob(rows.column("value"), "value"),
        _headers(rows.column("headers")),
        header.codec,
        level,
        horizon_ms,
    )


def _kind(transactional: bool, control: bool) -> int:
    return (batches.TRANSACTIONAL if transactional else 0) | (batches.CONTROL if control else 0)


def _seal(
    header: Header,
    stamps: I64 | int,
    deltas: U32 | None,
    key: _Blob,
    value: _Blob,
    headers: tuple[U32, _Blob, _Blob] | None,
    codec: str,
    level: int,
    horizon_ms: int | None = None,
) -> list[Buffer]:
    """Put the sections in order, compress, compute the header."""
    attributes = header.attributes
    parts: list[Buffer] = []
    base = top = stamps if isinstance(stamps, int) else 0
    if not isinstance(stamps, int):
        base, top = int(stamps.min()), int(stamps.max())
        if top != base or horizon_ms is not None:
            wide = top - base >= 2**32 or horizon_ms is not None
            attributes |= batches.TIMESTAMPS | (batches.TIMESTAMPS_I64 if wide else 0)
            parts.append(_raw(stamps if wide else (stamps - base).astype("<u4")))
    check_times(base, top)
    if horizon_ms is not None:  # it takes the place of the smallest timestamp
        attributes |= batches.DELETE_HORIZON
        base = horizon_ms
    if deltas is not None:
        attributes |= batches.OFFSET_DELTAS
        parts.append(_raw(deltas))
    bits: list[bytes] = []
    data: list[Buffer] = []
    for blob, flag, nulls in (
        (key, batches.KEY, batches.KEY_NULLS),
        (value, batches.VALUE, batches.VALUE_NULLS),
    ):
        if blob.lengths is None:
            continue
        attributes |= flag | (nulls if blob.validity is not None else 0)
        parts.append(_raw(blob.lengths))
        bits += [blob.validity] if blob.validity is not None else []
        data.append(blob.data)
    if headers is not None:
        counts, names, contents = headers
        assert names.lengths is not None
        assert contents.lengths is not None
        attributes |= batches.HEADERS | (
            batches.HEADER_NULLS if contents.validity is not None else 0
        )
        parts += [_raw(counts), _raw(names.lengths), _raw(contents.lengths)]
        bits += [contents.validity] if contents.validity is not None else []
        data += [names.data, contents.data]
    parts += bits
    parts += [part for part in data if len(part)]
    if codec != "none":
        number, parts = compressed(parts, codec, level)
        attributes |= number
    return batches.seal(
        header._replace(attributes=attributes, base_timestamp=base, max_timestamp=top), parts
    )


def check_times(base: int, top: int) -> None:
    """Raise `SerializationError` unless all timestamps from `base` to `top` can be stored."""
    if base < batches.TIMESTAMP_MS_MIN or top > batches.TIMESTAMP_MS_MAX:
        worst = base if base < batches.TIMESTAMP_MS_MIN else top
        raise errors.SerializationError(f"timestamp {worst} ms is outside the years 1 to 9999")


def compressed(parts: list[Buffer], codec: str, level: int) -> tuple[int, list[Buffer]]:
    """Return the number of the codec, and the compressed body.

    A body that does not become smaller stays as it is, under the codec `none`: a single record
    seldom becomes smaller, and every reader would pay for its decompression.
    """
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(body) > DECODED_BYTES_MAX:
        raise errors.RecordTooLarge(
            f"a body of {len(body)} bytes; at most {DECODED_BYTES_MAX} are allowed"
        )
    coder = pa.Codec(codec, compression_level=level) if codec == "zstd" else pa.Codec(codec)
    # as bytes: a shrunk Arrow buffer misreports its shape
    blob: bytes = coder.compress(body, asbytes=True)
    if LENGTH.size + len(blob) >= len(body):
        return 0, parts
    return batches.CODECS.index(codec), [LENGTH.pack(len(body)), blob]


def _raw(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _blob_of_list(items: Sequence[bytes | None] | None, name: str) -> _Blob:
    if items is None:
        return _ABSENT
    try:
        data = b"".join(items)  # type: ignore[arg-type]
        lengths = np.fromiter(map(len, items), np.uint32, len(items))  # type: ignore[arg-type]
        if total(lengths) != len(data):  # a memoryview whose items are wider than a byte
            raise errors.SerializationError(f"{name}: not bytes")
        return _Blob(lengths, None, data)
    except TypeError:
        try:
            return _blob(pa.array(items, pa.binary()), name)
        except (pa.ArrowException, TypeError) as cause:
            raise errors.SerializationError(f"{name}: {cause}") from cause


def _blob(array: pa.Array, name: str) -> _Blob:
    """Return the lengths, the validity bits and a view of the data of a binary or text column."""
    kind = array.type
    if pa.types.is_null(kind) or array.null_count == len(array):
        return _ABSENT
    if kind not in _PLAIN:
        array = _plain(array, name)
        kind = array.type
    data_buffer, offsets = array.buffers()[2], offsets_of(array)
    lengths = np.subtract(offsets[1:], offsets[:-1])
    lengths = lengths.astype(np.uint32) if offsets.itemsize == 8 else lengths.view(np.uint32)
    validity: bytes | None = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        if lengths[~valid].any():  # Arrow allows bytes under a null row; in a batch its length is 0
            return _blob_with_nulls(pc.fill_null(array, pa.scalar(b"", kind)), valid, name)
        validity = np.packbits(valid, bitorder="little").tobytes()
    start, end = int(offsets[0]), int(offsets[-1])
    data = memoryview(data_buffer)[start:end] if data_buffer is not None else b""
    return _Blob(lengths, validity, data)


def _blob_with_nulls(filled: pa.Array, valid: npt.NDArray[np.bool_], name: str) -> _Blob:
    return _blob(filled, name)._replace(validity=np.packbits(valid, bitorder="little").tobytes())


def _plain(array: pa.Array, name: str) -> pa.Array:
    """Convert other layouts of bytes (views, fixed size, dictionary) to `binary`."""
    try:
        if isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        kind = array.type
        if kind in _PLAIN:
            return array
        if pa.types.is_fixed_size_binary(kind) or kind in (pa.binary_view(), pa.string_view()):
            return array.cast(pa.binary())
    except pa.ArrowException as cause:
        raise errors.SerializationError(f"column {name}: {cause}") from cause
    raise errors.SerializationError(
        f"column {name} holds {array.type}, not bytes or text", column=name
    )


def _stamps(column: pa.Array | None, default_ms: int) -> I64 | int:
    """Return milliseconds per row, or one number for all rows."""
    if column is None or pa.types.is_null(column.type):
        return default_ms
    kind = column.type
    if pa.types.is_timestamp(kind):
        unit = kind.unit
        column = column.view(pa.int64())
    elif pa.types.is_integer(kind):
        unit = "ms"
        column = column.cast(pa.int64())
    else:
        raise errors.SerializationError(
            f"column timestamp holds {kind}, not int64 ms or a timestamp", column="timestamp"
        )
    if unit == "s":
        if column.null_count:
            column = pc.fill_null(column, default_ms // 1000)
        filled = numbers(column)
        bound = batches.TIMESTAMP_MS_MAX // 1000
        if filled.max() > bound or filled.min() < -bound:
            raise errors.SerializationError("a timestamp is out of range", column="timestamp")
        seconds: I64 = np.multiply(filled, 1000, dtype=np.int64)
        return seconds
    if column.null_count:
        column = pc.fill_null(column, default_ms * UNITS[unit])
    whole: I64 = numbers(column)
    return whole if unit == "ms" else whole // UNITS[unit]  # floor, also before 1970


def _headers(column: pa.Array | None) -> tuple[U32, _Blob, _Blob] | None:
    """Return counts per row, keys and values; None if no row has headers."""
    if column is None or pa.types.is_null(column.type) or column.null_count == len(column):
        return None
    kind = column.type
    if pa.types.is_map(kind):
        column = column.cast(
            pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
        )
        kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        raise errors.SerializationError(
            f"column headers holds {kind}, not list<struct<key, value>>", column="headers"
        )
    items = column.flatten()
    if not len(items):
        return None
    if kind.value_type.get_field_index("key") < 0 or kind.value_type.get_field_index("value") < 0:
        raise errors.SerializationError(
            f"column headers holds {kind}, not list<struct<key, value>>", column="headers"
        )
    counts = numbers(pc.fill_null(pc.list_value_length(column), 0)).astype(np.uint32)
    children = items.flatten()
    keys = children[kind.value_type.get_field_index("key")]
    if keys.null_count:
        raise errors.SerializationError("a header key is null", column="headers")
    if keys.type not in (pa.string(), pa.large_string()):
        try:
            keys = keys.cast(pa.string())
        except pa.ArrowException as cause:
            raise errors.SerializationError(
                f"a header key is not text: {cause}", column="headers"
            ) from cause
    values = children[kind.value_type.get_field_index("value")]
    return counts, _blob(keys, "headers"), _header_values(values)


def _header_values(values: pa.Array) -> _Blob:
    blob = _blob(values, "headers")
    if (
        blob.lengths is None
    ):  # all null: the column of lengths stays, because the sections of headers are fixed
        return _Blob(np.zeros(len(values), np.uint32), bytes((len(values) + 7) // 8), b"")
    return blob


def _headers_of_list(
    headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None,
) -> tuple[U32, _Blob, _Blob] | None:
    if headers is None or not any(headers):
        return None
    counts = np.fromiter((len(row) if row else 0 for row in headers), np.uint32, len(headers))
    pairs = [pair for row in headers if row for pair in row]
    try:
        keys = [key.encode() for key, _ in pairs]
        contents = pa.array([value for _, value in pairs], pa.binary())
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as cause:
        raise errors.SerializationError(f"headers are pairs of text and bytes: {cause}") from cause
    return counts, _blob_of_list(keys, "headers"), _header_values(contents)
