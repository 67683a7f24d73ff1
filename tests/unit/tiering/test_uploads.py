"""Where a file ends, and the second attempt if its memory is too small (tiering/uploads.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pk import errors
from pk.log import columns
from pk.log.files import RealStorage
from pk.log.index import Extent
from pk.log.segment import BatchWalk, Segment
from pk.tiering import uploads
from pk.tiering.output_buffer import OutputBuffer
from pk.tiering.uploads import PartitionDirectory


def source(directory: Path, values: list[bytes], codec: str) -> PartitionDirectory:
    """Return a live log of one-record batches."""
    (directory / "t-0").mkdir()
    with open(directory / "t-0" / f"{0:020d}.log", "wb") as out:
        for offset, value in enumerate(values):
            rows = pa.record_batch({"value": pa.array([value], pa.binary())})
            out.writelines(columns.encode(rows, base_offset=offset, codec=codec))
    return PartitionDirectory(RealStorage(str(directory)), "t-0", 1 << 26)


def test_a_file_that_does_not_fit_is_built_in_more_memory(tmp_path: Path) -> None:
    values = [np.random.default_rng(i).bytes(1 << 20) for i in range(5)]
    buffer = OutputBuffer(1 << 20)
    copied = uploads.copy(source(tmp_path, values, "none"), 0, 5, 1 << 26, (), buffer)
    assert (copied.end, buffer.size > 5 << 20) == (5, True)
    assert copied.file is not None
    table = pq.read_table(pa.BufferReader(copied.file.data))
    assert table.column("value").to_pylist() == values


def test_a_file_far_larger_than_its_log_ends_early(tmp_path: Path) -> None:
    """The sample did not compress and the rest does, as the log shows: the next file decides
    again.
    """
    values = [np.random.default_rng(1).bytes(4 << 20), *[bytes(4 << 20)] * 30]
    log = source(tmp_path, values, "lz4")
    first = uploads.copy(log, 0, 31, 5 << 20, ())
    assert first.file is not None
    assert 1 < first.end < 31
    assert len(first.file.data) < 40 << 20
    second = uploads.copy(log, first.end, 31, 5 << 20, ())
    assert second.file is not None
    assert (second.end, len(second.file.data) < 1 << 20) == (31, True)


def index(log: PartitionDirectory) -> None:
    """Write the index files of a sealed segment: with them no headers need be walked."""
    segment = Segment(log.storage, log.path, 0)
    size = len(log.storage.read_file(segment.path()))
    segment.written = extent = Extent(size, 0)
    sparse, extent = segment.reindexed(1), Extent(0, 0)
    for _, header in BatchWalk(segment.read_at, 0, size, 0):
        extent = extent.grown(header, header.base_offset, header.max_timestamp, header.crc, 0)
    segment.write_indexes(extent, sparse)


@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.parametrize("bit", [0, 1, 2, 3, 4, 10, 40, 62])
def test_rows_never_stand_at_an_offset_that_rotted(tmp_path: Path, bit: int, at: int) -> None:
    """Rule L9: no checksum covers a batch's offset.  In the table the damage would be permanent:
    another record's offset twice, and its own missing.
    """
    log = source(tmp_path, [b"%d" % number for number in range(10)], "none")
    file = log.storage.open(f"t-0/{0:020d}.log")
    position = at * (file.size() // 10) + bit // 8
    file.write_at(position, bytes([file.read(position, 1)[0] ^ 1 << bit % 8]))
    damage: errors.CorruptLog | None = None
    try:
        copied = uploads.copy(log, 0, 10, 1 << 20, ())
    except errors.CorruptLog as found:
        damage = found
    if damage is not None:
        assert int(damage.details["offset"]) == at
        return
    assert copied.end <= at
    assert copied.file is not None
    table = pq.read_table(pa.BufferReader(copied.file.data))
    assert table.column("offset").to_pylist() == list(range(copied.end))
    with pytest.raises((errors.CorruptLog, errors.OffsetOutOfRange)):
        uploads.copy(log, copied.end, 10, 1 << 20, ())


@pytest.mark.parametrize("inside", [16, 100], ids=["header", "body"])
def test_the_damaged_batch_is_named_and_not_the_one_before_it(tmp_path: Path, inside: int) -> None:
    """Rule L9: the operator looks at the batch that the error names; a header that does not parse
    has no offsets.
    """
    log = source(tmp_path, [bytes(200)] * 3, "none")
    index(log)
    (tmp_path / "t-0" / f"{3:020d}.log").touch()
    path = tmp_path / "t-0" / f"{0:020d}.log"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3 + inside] ^= 1
    path.write_bytes(raw)
    with pytest.raises(errors.CorruptLog, match=r"offsets \[1, ") as caught:
        uploads.copy(log, 0, 3, 1 << 20, ())
    assert caught.value.details["offset"] == "1"


def rotted(directory: Path, batch: int, at: int, bit: int) -> PartitionDirectory:
    """Return a sealed log of six batches of one record, with one bit changed in one header."""
    log = source(directory, [bytes([n]) * 200 for n in range(6)], "none")
    index(log)
    (directory / "t-0" / f"{6:020d}.log").touch()
    path = directory / "t-0" / f"{0:020d}.log"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 6 * batch + at] ^= bit
    path.write_bytes(raw)
    return log


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize(
    ("byte", "bit"), [(4, 1), (0, 4), (0, 2)], ids=["beyond the range", "ahead", "back"]
)
def test_no_row_is_left_out_for_where_its_batch_says_it_begins(
    tmp_path: Path, start: int, byte: int, bit: int
) -> None:
    """No checksum covers the base offset, and replicas drop records that the table seems to hold
    (rule L9).
    """
    log = rotted(tmp_path, 3, byte, bit)
    with pytest.raises(errors.CorruptLog) as caught:
        uploads.copy(log, start, 6, 1 << 20, ())
    assert caught.value.details["offset"] == "3"


def test_the_leader_tells_a_batchs_epoch_not_the_disk(tmp_path: Path) -> None:
    """A table and a log are compared by their last epoch (rule T15): a wrong one makes them
    diverge.
    """
    log = replace(rotted(tmp_path, 5, 13, 1), epochs=((2, 0), (3, 4)))
    copied = uploads.copy(log, 0, 6, 1 << 20, ())
    assert copied.file is not None
    table = pq.read_table(pa.BufferReader(copied.file.data))
    assert (copied.epoch, table.column("leader_epoch").to_pylist()) == (3, [2, 2, 2, 2, 3, 3])
