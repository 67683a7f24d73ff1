"""Checks of the records that callers give, before anything is sent: those of `send` one by one,
those of `send_batch` as Arrow columns.

A record is counted here as it counts for buffer_memory and max_request_size.  The other arguments
of the public classes are checked in client/arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pk import errors
from pk.client import arguments
from pk.client.record_set import Headers
from pk.client.rows import I64, RECORD_OVERHEAD, rows_of
from pk.log import columns
from pk.log.batch import TIMESTAMP_MS_MAX
from pk.log.columns import HEADER_TYPE
from pk.log.encoding import numbers
from pk.types import NONE

_BINARY = pa.binary()
_BYTES = (
    _BINARY, pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string(), pa.string_view(),
    pa.null(),
)  # fmt: skip


# -- one record ------------------------------------------------------------------------------------


def header_list(given: Headers | Mapping[str, bytes | None] | None) -> Headers | None:
    """Return headers as a list of pairs."""
    if isinstance(given, Mapping):
        return list(given.items())
    if given is None or type(given) is list:
        return given
    return arguments.items(given, "headers", "pairs (text, bytes or None)")


def record_size(value: Any, key: Any, headers: Headers | None, topic: str) -> int:
    """Return how many bytes of buffer_memory a record uses.

    Raises `SerializationError` unless all its parts are bytes or None.
    """
    size = RECORD_OVERHEAD
    for name, item in (("value", value), ("key", key)):
        if item is None:
            continue
        if not isinstance(item, bytes):
            raise errors.SerializationError(
                f"{topic}: {name} is {type(item).__name__}, not bytes; give {name}_serializer",
                field=name,
            )
        size += len(item)
    for header in headers or ():
        try:
            name, content = header
            # as long as in the column: `sizes` distributes the sum
            size += RECORD_OVERHEAD + len(name.encode()) + len(content or b"")
            bad = not isinstance(name, str) or not (content is None or isinstance(content, bytes))
        except (AttributeError, TypeError, ValueError):  # no pair, or no text that UTF-8 can encode
            bad = True
        if bad:
            raise errors.SerializationError(
                f"{topic}: a header is a pair (text, bytes or None), not {header!r}",
                field="headers",
            )
    return size


def check_size(topic: str, size: int, size_max: int) -> None:
    """Raise `RecordTooLarge` if a record of `size` bytes exceeds the producer's `size_max`."""
    if size > size_max:
        raise errors.RecordTooLarge(
            f"{topic}: a record of {size} bytes; max_request_size and buffer_memory "
            f"allow {size_max}"
        )


# -- columns ---------------------------------------------------------------------------------------


def record_batch(given: Any) -> pa.RecordBatch:
    """Check that a `pa.RecordBatch` is given."""
    if isinstance(given, pa.Table):
        raise errors.SerializationError(
            "send_batch takes a pa.RecordBatch: send table.to_batches() one by one"
        )
    if not isinstance(given, pa.RecordBatch):
        raise TypeError(f"batch must be a pa.RecordBatch, not {arguments.shown(given)}")
    return given


def normalise(
    batch: pa.RecordBatch, now_ms: int
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32] | None]:
    """Return a caller's columns as rows, and the partitions that it chose (NONE = no choice).

    Raises `SerializationError`, `InvalidPartitions`.
    """
    names = batch.schema.names
    unknown = [n for n in names if n not in ("key", "value", "timestamp", "headers", "partition")]
    if unknown or len(set(names)) != len(names):
        raise errors.SerializationError(
            "send_batch takes the columns value, key, timestamp, headers, partition once each, not "
            f"{', '.join(names)}"
        )
    count = batch.num_rows

    def column(name: str, kind: pa.DataType) -> pa.Array:
        if name not in names:
            return columns.null_headers(count) if name == "headers" else columns.nulls(count)
        found = batch.column(name)
        if isinstance(found, pa.DictionaryArray):
            found = found.dictionary_decode()
        if found.type == kind:
            return found
        try:
            bytes_like = found.type in _BYTES or pa.types.is_fixed_size_binary(found.type)
            if kind == _BINARY and not bytes_like:
                raise pa.ArrowInvalid("not bytes or text")
            return found.cast(kind)
        except pa.ArrowException as cause:
            raise errors.SerializationError(
                f"column {name} holds {found.type}, which is not {kind}: {cause}", column=name
            ) from cause

    stamps = _stamps(batch.column("timestamp"), now_ms) if "timestamp" in names else None
    rows = rows_of(
        column("key", _BINARY), column("value", _BINARY), column("headers", HEADER_TYPE), stamps
    )
    if "partition" not in names:
        return rows, None
    partition = column("partition", pa.int32())
    chosen = numbers(partition.fill_null(NONE)).astype(np.int32, copy=False)
    if chosen.min() < NONE or (chosen.min() < 0 and not partition.null_count):
        raise errors.InvalidPartitions(f"partition {int(chosen.min())} does not exist")
    return rows, chosen


def _stamps(column: pa.Array, now_ms: int) -> I64:
    kind = column.type
    try:
        if pa.types.is_timestamp(kind):
            column = column.cast(pa.timestamp("ms", kind.tz), safe=False).view(pa.int64())
        elif pa.types.is_integer(kind) or pa.types.is_null(kind):
            column = column.cast(pa.int64())
        else:
            raise pa.ArrowInvalid("neither int64 milliseconds nor a timestamp")
    except pa.ArrowException as cause:
        raise errors.SerializationError(
            f"column timestamp holds {kind}: {cause}", column="timestamp"
        ) from cause
    if column.null_count:
        column = pc.fill_null(column, now_ms)
    stamps: I64 = numbers(column)
    if int(stamps.min()) < 0 or int(stamps.max()) > TIMESTAMP_MS_MAX:
        raise errors.SerializationError(
            "column timestamp: a value is out of range", column="timestamp"
        )
    return stamps
