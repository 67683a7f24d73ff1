"""Where a file ends, and what happens if its memory is too small (tiering/uploads.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pk.log import columns
from pk.log.files import RealStorage
from pk.tiering import uploads
from pk.tiering.sink import Sink
from pk.tiering.uploads import Source


def source(directory: Path, values: list[bytes], codec: str) -> Source:
    """A live log of one-record batches."""
    (directory / "t-0").mkdir()
    with open(directory / "t-0" / f"{0:020d}.log", "wb") as out:
        for offset, value in enumerate(values):
            rows = pa.record_batch({"value": pa.array([value], pa.binary())})
            out.writelines(columns.encode(rows, base_offset=offset, codec=codec))
    return Source(RealStorage(str(directory)), "t-0", 1 << 26)


def test_a_file_that_does_not_fit_is_built_in_more_memory(tmp_path: Path) -> None:
    values = [np.random.default_rng(i).bytes(1 << 20) for i in range(5)]
    sink = Sink(1 << 20)
    copied = uploads.copy(source(tmp_path, values, "none"), 0, 5, 1 << 26, (), sink)
    assert (copied.end, sink.size > 5 << 20) == (5, True)
    assert copied.file is not None
    table = pq.read_table(pa.BufferReader(copied.file.data))
    assert table.column("value").to_pylist() == values


def test_a_file_far_larger_than_its_log_ends_early(tmp_path: Path) -> None:
    """The sample did not compress, what follows does, as the log shows: the next file decides
    anew."""
    values = [np.random.default_rng(1).bytes(4 << 20), *[bytes(4 << 20)] * 30]
    log = source(tmp_path, values, "lz4")
    first = uploads.copy(log, 0, 31, 5 << 20, ())
    assert first.file is not None
    assert 1 < first.end < 31
    assert len(first.file.data) < 40 << 20
    second = uploads.copy(log, first.end, 31, 5 << 20, ())
    assert second.file is not None
    assert (second.end, len(second.file.data) < 1 << 20) == (31, True)
