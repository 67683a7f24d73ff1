"""Carries the files of a table's checkpoint over into the next one.  Pure.

A checkpoint names every live file, and most of them are those of the checkpoint before.  To
deltalake a checkpoint of 100,000 files takes 160 MB of memory, and again the CPU time of all its
files.  So deltalake merges only the rest of the checkpoint, the protocol, the properties, the
transactions and the removals, with the commits behind it (delta_checkpoint).  The files that no
commit names are copied here, a few thousand at once, without a look at their fields.

Delta's protocol ("Action Reconciliation"): a checkpoint has one add action for each live file, in
any order.  A file is live until an action behind it names its path.

Invariants
  B1  Rows that are carried over are the same rows: all columns of the checkpoint before, and no
      other.  If deltalake's columns differ, nothing is carried over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

#: The column of add actions.
ADD = "add"
#: Rows of a checkpoint that are in memory at once, and of a row group; a row has some 350 bytes.
ROWS_AT_ONCE = 4_096
#: What Spark writes, and every reader reads.  The statistics of files have much in common.
COMPRESSION = "snappy"


class Merged(NamedTuple):
    """A checkpoint with the files that were carried over."""

    data: bytes
    files: int  #: how many were
    plain_bytes: int  #: its size before compression


def rows_of(checkpoint: bytes) -> int:
    return int(pq.read_metadata(pa.BufferReader(checkpoint)).num_rows)


def without_files(checkpoint: bytes) -> bytes:
    """Returns a checkpoint without its add actions.  Raises `ValueError` if it is damaged."""
    file = _opened(checkpoint)
    batches = file.iter_batches(ROWS_AT_ONCE, use_threads=False)
    rest = (batch.filter(pc.is_null(batch.column(ADD))) for batch in batches)
    data, _ = _written(file.schema_arrow, rest)
    return data


def with_files(rest: bytes, before: bytes, paths: Iterable[str]) -> Merged | None:
    """Returns a checkpoint with all rows of `rest`, and with the add actions of `before` except
    those that name one of `paths`; None if their columns differ (B1).

    paths: as the log states them
    """
    first, second = _opened(rest), _opened(before)
    schema = first.schema_arrow
    if second.schema_arrow != schema:
        return None
    gone, files = pa.array(paths, schema.field(ADD).type.field("path").type), 0

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal files
        yield from first.iter_batches(ROWS_AT_ONCE, use_threads=False)
        for batch in second.iter_batches(ROWS_AT_ONCE, use_threads=False):
            add = batch.column(ADD)
            named = pc.is_in(pc.struct_field(add, "path"), gone)
            some = batch.filter(pc.and_not(pc.is_valid(add), named))
            files += some.num_rows
            yield some

    data, plain_bytes = _written(schema, rows())
    return Merged(data, files, plain_bytes)


def paths_of(commits: Iterable[bytes]) -> list[str]:
    """Returns the paths that commits add and remove, as the log states them.

    Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for what is no commit.
    """
    found: dict[str, None] = {}
    for data in commits:
        for line in data.split(b"\n"):
            action = json.loads(line) if line.strip() else {}
            for kind in (ADD, "remove"):
                if kind in action:
                    found[action[kind]["path"]] = None
    return list(found)


def _opened(checkpoint: bytes) -> pq.ParquetFile:
    return pq.ParquetFile(pa.BufferReader(checkpoint), pre_buffer=False)


def _written(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> tuple[bytes, int]:
    """Returns a Parquet file with these rows, and its size before compression."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, schema, compression=COMPRESSION, use_dictionary=False, store_schema=False
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
            # Arrow's allocator returns freed memory late: it would take that of many batches.
            pa.default_memory_pool().release_unused()
    data = sink.getvalue()
    metadata = pq.read_metadata(pa.BufferReader(data))
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    return data.to_pybytes(), sum(group.total_byte_size for group in groups)
