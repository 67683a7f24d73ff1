"""Rule T10: a flipped bit of a data file is an error that names the file, never other rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pk import errors
from pk.clock import SystemClock
from pk.log import columns
from pk.tiering import convert, footers, layout
from pk.tiering.data_files import DataFile
from pk.tiering.layout import FILE_SCHEMA, DataName, PartitionCounters
from pk.tiering.objects import MemoryStore
from pk.tiering.reader import TablePartition, TierReader
from pk.tiering.table import Snapshot

HOME = "t/id"
ROWS = 120


def rows_from(start: int, count: int = ROWS) -> pa.RecordBatch:
    offsets = range(start, start + count)
    found: dict[str, list[Any]] = {
        "offset": list(offsets),
        "timestamp": [offset * 1_000 for offset in offsets],
        "timestamp_type": [0] * count,
        "key": [b"k%d" % (offset % 7) for offset in offsets],
        "value": [b"value %d" % offset if offset % 9 else None for offset in offsets],
        "headers": [[{"key": "h", "value": b"x"}] if offset % 3 else None for offset in offsets],
        "leader_epoch": [3] * count,
        "delete_horizon_ms": [None] * count,
    }
    arrays = [pa.array(found[field.name], field.type) for field in FILE_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=FILE_SCHEMA)


def built(start: int) -> tuple[DataFile, bytes]:
    """Build a file of two row groups as the copier does, with its own name."""
    builder = convert.FileBuilder()
    builder.add(rows_from(start, ROWS // 2))
    builder._flush()
    builder.add(rows_from(start + ROWS // 2, ROWS // 2))
    made = builder.finish()
    assert made is not None
    name = DataName(0, start, start + ROWS, 3, "a", made.footer_crc, made.row_sum)
    raw = bytes(made.data)
    path = layout.data_path(name)
    stamps = made.min_timestamp_ms, made.max_timestamp_ms
    file = DataFile(path, 0, made.min_offset, made.max_offset, *stamps, made.rows, len(raw))
    return file, raw


class Tier:
    """Three files in a row; nothing is cached, so that each read verifies."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.files = []
        for start in (0, ROWS, 2 * ROWS):
            file, raw = built(start)
            self.files.append(file)
            self.store.objects[f"{HOME}/{file.path}"] = raw

        async def here(work: Callable[[], Any]) -> Any:
            return work()

        self._here = here
        self.end = 3 * ROWS

    def raw(self, number: int) -> bytes:
        return self.store.objects[f"{HOME}/{self.files[number].path}"]

    def put(self, number: int, raw: bytes) -> None:
        self.store.objects[f"{HOME}/{self.files[number].path}"] = raw

    def fetch(self, start: int, end: int, max_bytes: int = 10**6) -> tuple[int, list[Any]]:
        """Return where the read ended, and its rows."""
        files = {file.path: file for file in self.files}
        place = TablePartition(
            HOME, 0, Snapshot(1, "id", files, {0: PartitionCounters(end=self.end)})
        )
        reader = TierReader(self.store, self._here, SystemClock(), 0, 0)  # type: ignore[arg-type]

        async def read() -> tuple[int, list[Any]]:
            fetched = await reader.fetch(place, start, end, max_bytes)
            await reader.close()
            found: list[Any] = []
            for batch in fetched.batches:
                found += columns.decode(batch, decoded_bytes_max=1 << 20).to_pylist()
            return fetched.next_offset, found

        return asyncio.run(read())


GOOD = Tier().fetch(0, 3 * ROWS)


def flipped(raw: bytes, bit: int) -> bytes:
    bad = bytearray(raw)
    bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


def test_a_whole_file_reads_back() -> None:
    end, found = GOOD
    assert end == 3 * ROWS
    assert [row["offset"] for row in found] == list(range(3 * ROWS))


def test_every_bit_of_a_footer_is_covered_by_the_name() -> None:
    file, raw = built(0)
    size = footers.footer_size(raw)
    for bit in range(8 * (len(raw) - size), 8 * len(raw)):
        with pytest.raises(footers.UnreadableFile):
            footers.check_footer(file.path, flipped(raw, bit)[-size:])
    footers.check_footer(file.path, raw[-size:])


@pytest.mark.slow
def test_no_flipped_bit_of_a_page_gives_other_rows() -> None:
    """Some bits are never read (statistics in a page's header); a flip of any other bit is an
    error.
    """
    tier = Tier()
    raw = tier.raw(0)
    pages = 8 * (len(raw) - footers.footer_size(raw))
    numbers = random.Random(13)
    refused = 0
    for _ in range(600):
        tier.put(0, flipped(raw, numbers.randrange(pages)))
        try:
            end, found = tier.fetch(0, ROWS)
        except errors.DamagedTierFile:
            refused += 1
            continue
        assert found == GOOD[1][:end]
        refused += end < ROWS  # the second row group is damaged: the first one was returned
    assert refused > 500


def test_page_checksums_are_what_finds_a_flipped_value() -> None:
    """Without them Arrow returns another value and no error: this is the canary of this file."""
    tier = Tier()
    raw = tier.raw(0)
    metadata = pq.read_metadata(pa.BufferReader(raw))
    chunk = metadata.row_group(0).column(metadata.schema.names.index("offset"))
    at = chunk.data_page_offset + chunk.total_compressed_size - 1
    bad = flipped(raw, 8 * at + 3)
    options: dict[str, Any] = {"page_checksum_verification": True}
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(pa.BufferReader(bad), **options).read()
    tier.put(0, bad)
    with pytest.raises(errors.DamagedTierFile):
        tier.fetch(0, ROWS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"x" * len(raw),
        lambda raw: raw[:4] + bytes(400) + raw[404:],
        lambda raw: raw[:-8] + b"\xff\xff\xff\x02PAR1",
        lambda _: built(ROWS)[1],
    ],
)
def test_other_damage_is_the_same_error(damage: Callable[[bytes], bytes]) -> None:
    tier = Tier()
    tier.put(0, damage(tier.raw(0)))
    with pytest.raises(errors.DamagedTierFile) as caught:
        tier.fetch(0, ROWS)
    path = tier.files[0].path
    assert path in caught.value.message
    assert caught.value.acts == "operator"
    assert caught.value.details == {"path": path, "partition": "0", "start": "0", "end": str(ROWS)}


@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_file_fails_its_own_range_only(lost: bool) -> None:
    """The rows before the file come in one read; the rows after it can be read after a seek."""
    tier = Tier()
    if lost:
        del tier.store.objects[f"{HOME}/{tier.files[1].path}"]
    else:
        tier.put(1, b"x" * len(tier.raw(1)))
    end, found = tier.fetch(0, tier.end)
    assert (end, found) == (ROWS, GOOD[1][:ROWS])
    for at in (ROWS, 2 * ROWS - 1):
        with pytest.raises(errors.DamagedTierFile, match=rf"\[{ROWS}, {2 * ROWS}\)"):
            tier.fetch(at, tier.end)
    assert tier.fetch(2 * ROWS, tier.end) == (tier.end, GOOD[1][2 * ROWS :])


@pytest.mark.parametrize(
    "stated", [{"rows": ROWS - 1}, {"rows": ROWS + 1}, {"min_offset": 1}, {"max_offset": ROWS - 2}]
)
def test_a_file_must_hold_what_its_add_action_says(stated: dict[str, int]) -> None:
    tier = Tier()
    tier.files[0] = replace(tier.files[0], **stated)
    with pytest.raises(errors.DamagedTierFile, match="table's log says"):
        tier.fetch(5, ROWS)


def test_files_of_outside_maintenance_stay_readable() -> None:
    """They have another name, hence no footer checksum; page checksums are compared if there are
    any.
    """
    tier = Tier()
    for checksums in (True, False):
        sink = pa.BufferOutputStream()
        options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
        table = pa.Table.from_batches([rows_from(0)])
        pq.write_table(table, sink, write_page_checksum=checksums, **options)
        raw = sink.getvalue().to_pybytes()
        path = "partition=0/part-00000-abc.zstd.parquet"
        tier.files[0] = DataFile(path, 0, 0, ROWS - 1, 0, ROWS, ROWS, len(raw))
        tier.put(0, raw)
        assert tier.fetch(0, ROWS) == (ROWS, GOOD[1][:ROWS])
        no_statistics = {"min_offset": 0, "max_offset": 2**63 - 1, "rows": 0}
        tier.files[0] = replace(tier.files[0], **no_statistics)
        assert tier.fetch(0, ROWS) == (ROWS, GOOD[1][:ROWS])
        if checksums:
            at = raw.index(b"value 100")
            tier.put(0, flipped(raw, 8 * at))
            with pytest.raises(errors.DamagedTierFile, match="CRC"):
                tier.fetch(0, ROWS)
