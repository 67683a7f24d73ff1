"""Decodes consecutive batches as one: it joins their sections instead of their columns.

Building Arrow columns costs the same for ten rows as for ten thousand.  A reader of a long stretch
of a log (the tier's copier) pays this cost once per run.  A run consists of plain batches of one
shape: without headers, nulls or a delete horizon, either all with keys or all without, and the same
for values.  Every other batch is decoded alone (`columns.decode`).

Invariants
  D1  decode_batches(run) == the concatenation of `decode` of each of its batches.
  D2  The rows of a run are copied once, whatever the compression of its batches.
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
from pk.log.encoding import fixed_column

#: Fields that are equal in all batches of a run.
_SHAPE = batches.KEY | batches.VALUE
#: Flags that no batch of a run has.
_ODD = batches.KEY_NULLS | batches.VALUE_NULLS | batches.HEADERS | batches.DELETE_HORIZON


class PlainBatch(NamedTuple):
    """One batch of a run."""

    header: Header
    body: Body


def shape_of(header: Header) -> int | None:
    """Return the shape that batches of one run have in common; None if this batch is decoded
    alone.
    """
    if header.attributes & _ODD or not header.record_count:
        return None
    return header.attributes & _SHAPE


def decode_batches(run: Sequence[PlainBatch], timestamp_unit: str = "ms") -> pa.RecordBatch:
    """Decode the rows of the run into the columns of `columns.schema(timestamp_unit)`.

    All batches have the same `shape_of`, which is not None.  The bodies come from `columns.parse`,
    so nothing here can fail.  Together they have less than 2^31 bytes of keys, and of values.
    """
    rows = sum(member.header.record_count for member in run)
    target = columns.schema(timestamp_unit)
    keys = [(member.body.key_lengths, member.body.key_data) for member in run]
    values = [(member.body.value_lengths, member.body.value_data) for member in run]
    arrays = [
        fixed_column(_offsets(run, rows)),
        fixed_column(_timestamps(run, rows, timestamp_unit), target.field("timestamp").type),
        _joined(keys, rows),
        _joined(values, rows),
        columns.no_headers(rows),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _offsets(run: Sequence[PlainBatch], rows: int) -> npt.NDArray[np.int64]:
    first = run[0].header.base_offset
    if run[-1].header.next_offset - first == rows:
        # no gap between the batches or inside them
        return np.arange(first, first + rows, dtype=np.int64)
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
