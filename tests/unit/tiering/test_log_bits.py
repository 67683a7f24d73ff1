"""Rule L9 for every bit of a batch, in the copier and in a follower.

A flipped bit is an error, or is in a place that no reader uses.  It never becomes another record:
not in the table, for which all replicas drop their data, and not in a follower's log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.log.files import RealStorage
from pk.tiering import uploads
from pk.tiering.uploads import PartitionDirectory

COLUMNS = ["offset", "timestamp", "key", "value", "leader_epoch"]


def written(codec: str) -> list[bytes]:
    """Return three batches of two records."""
    found = []
    for n in range(3):
        rows = pa.record_batch(
            {
                "value": pa.array([b"value %d" % n * 3, None], pa.binary()),
                "key": pa.array([b"k", b"l"], pa.binary()),
                "timestamp": pa.array([n, n + 1], pa.int64()),
            }
        )
        found.append(b"".join(columns.encode(rows, base_offset=2 * n, codec=codec, leader_epoch=1)))
    return found


def flips(raw: bytes) -> list[tuple[int, int]]:
    return [(at, bit) for at in range(len(raw)) for bit in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_no_bit_of_a_batch_reaches_the_table_as_another_record(tmp_path: Path, codec: str) -> None:
    good = written(codec)
    (tmp_path / "t-0").mkdir()
    path = tmp_path / "t-0" / f"{0:020d}.log"
    log = PartitionDirectory(RealStorage(str(tmp_path)), "t-0", 1 << 20, epochs=((1, 0),))

    def copied() -> list[Any]:
        file = uploads.copy(log, 0, 6, 1 << 20, ()).file
        assert file is not None
        table = pq.read_table(pa.BufferReader(file.data), page_checksum_verification=True)
        return table.select(COLUMNS).to_pylist()

    path.write_bytes(b"".join(good))
    whole = copied()
    assert len(whole) == 6
    told = 0
    some = flips(good[1])[::5]
    for at, bit in some:
        bad = bytearray(good[1])
        bad[at] ^= 1 << bit
        path.write_bytes(good[0] + bad + good[2])
        try:
            assert copied() in (whole, whole[:2]), (at, bit)
        except (errors.CorruptLog, errors.CorruptBatch, errors.OffsetOutOfRange):
            told += 1
    assert told > len(some) * 0.8


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_no_bit_of_a_batch_passes_the_check_of_a_follower(codec: str) -> None:
    """`Partition.append_fetched` checks every batch of a leader.  No checksum covers the base
    offset and the leader epoch; they must continue the log (`append_as_follower`).
    """
    for raw in written(codec):
        for at, bit in flips(raw):
            bad = bytearray(raw)
            bad[at] ^= 1 << bit
            try:
                header = batches.check(bytes(bad))
            except errors.CorruptBatch:
                continue
            known = batches.read_header(raw)
            assert header != known, (at, bit)
            patched = header._replace(
                base_offset=known.base_offset, leader_epoch=known.leader_epoch
            )
            assert patched == known, (at, bit)
