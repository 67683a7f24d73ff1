"""Consecutive batches decoded as one: their sections are joined, not their columns.

To build Arrow columns costs the same for ten rows as for ten thousand; whoever reads a long stretch
of a log (the tier's copier) pays it once a run.  A run is made of plain batches of one shape:
without headers, nulls or a delete horizon, and all with keys or all without, the same for values.
Everything else is decoded batch by batch (`columns.decode`).

Invariants
  D1  decode_batches(run) == the concatenation of `decode` of each of its batches.
  D2  a run's rows take one copy, whatever its batches were compressed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk.log import batch as batches
from pk.log import columns
from pk.log.batch import Header
from pk.log.columns import Body

#: Batches of one run agree on these …
_SHAPE = batches.KEY | batches.VALUE
#: … and have none of these.
_ODD = batches.KEY_NULLS | batches.VALUE_NULLS | batches.HEADERS | batches.DELETE_HORIZON


class PlainBatch(NamedTuple):
    """One batch of a run."""

    header: Header
    body: Body


def shape_of(header: Header) -> int | None:
    """What batches of one run have in common; None if this one is decoded alone."""
    if header.attributes & _ODD or not header.record_count:
        return None
    return header.attributes & _SHAPE


def decode_batches(run: Sequence[PlainBatch], timestamp_unit: str = "ms") -> pa.RecordBatch:
    """The rows of the run in the columns of `columns.schema(timestamp_unit)`.

    All batches have one `shape_of`, not None; bodies come from `columns.parse`, so nothing here can
    fail.  Together they hold less than 2^31 bytes of keys, and of values.
    """
    rows = sum(member.header.record_count for member in run)
    target = columns.schema(timestamp_unit)
    keys = [(member.body.key_lengths, member.body.key_data) for member in run]
    values = [(member.body.value_lengths, member.body.value_data) for member in run]
    arrays = [
        _fixed(_offsets(run, rows), pa.int64()),
        _fixed(_timestamps(run, rows, timestamp_unit), target.field("timestamp").type),
        _joined(keys, rows),
        _joined(values, rows),
        columns.no_headers(rows),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _fixed(numbers: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)], 0)


def _offsets(run: Sequence[PlainBatch], rows: int) -> npt.NDArray[np.int64]:
    first = run[0].header.base_offset
    if run[-1].header.next_offset - first == rows:
        return np.arange(first, first + rows, dtype=np.int64)  # no gap, between batches or inside
    found = np.empty(rows, np.int64)
    at = 0
    for header, body in run:
        end = at + header.record_count
        deltas: Any = np.arange(end - at) if body.deltas is None else body.deltas
        np.add(deltas, header.base_offset, out=found[at:end], casting="unsafe")
        at = end
    return found


def _timestamps(run: Sequence[PlainBatch], rows: int, unit: str) -> npt.NDArray[np.int64]:
    found = np.empty(rows, np.int64)
    at = 0
    for header, body in run:
        end = at + header.record_count
        if header.log_append_time or body.timestamps is None:
            found[at:end] = header.max_timestamp
        else:
            found[at:end] = body.timestamps
            if not header.attributes & batches.TIMESTAMPS_I64:
                found[at:end] += header.base_timestamp
        at = end
    if columns.UNITS[unit] != 1:
        found *= columns.UNITS[unit]
    return found


def _joined(parts: Sequence[tuple[Any, memoryview]], rows: int) -> pa.Array:
    if parts[0][0] is None:
        return columns.nulls(rows)
    if len(parts) == 1:
        return columns.binary(parts[0][0], parts[0][1])
    lengths = np.concatenate([lengths for lengths, _ in parts])
    return columns.binary(lengths, memoryview(b"".join([data for _, data in parts])))
