"""Log batches → file → log batches: the same rows, without aborted ones and markers (rules T10,
T12).
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from pk import errors
from pk.log import batch as log_batch
from pk.log import columns, control_rows, encoding
from pk.log.aborted import AbortedRanges
from pk.tiering import convert, row_groups, rowhash
from pk.tiering.footers import UnreadableFile
from pk.tiering.layout import FILE_SCHEMA
from pk.tiering.output_buffer import OutputBuffer, OutputBufferFull
from pk.types import AbortedTransaction

MAX = 1 << 26
NOTHING = AbortedRanges(())
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def encode(
    rows: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]],
    base: int,
    **more: object,
) -> bytes:
    made = pa.record_batch(
        {
            "timestamp": pa.array([row[0] for row in rows], pa.int64()),
            "key": pa.array([row[1] for row in rows], pa.binary()),
            "value": pa.array([row[2] for row in rows], pa.binary()),
            "headers": pa.array(
                [[{"key": k, "value": v} for k, v in row[3]] for row in rows], HEADERS
            ),
        }
    )
    return b"".join(columns.encode(made, base_offset=base, **more))  # type: ignore[arg-type]


def plain(count: int, base: int, **more: object) -> bytes:
    return encode([(1_000 + i, b"k", b"v%d" % i, []) for i in range(count)], base, **more)


def with_horizon(rows: list[Any], base: int, horizon_ms: int) -> bytes:
    """A batch as the cleaner writes it again."""
    header = log_batch.read_header(encode(rows, base))
    decoded = columns.decode(encode(rows, base), decoded_bytes_max=MAX)
    return b"".join(encoding.rewritten(header, decoded, horizon_ms))


def build(*buffers: bytes, start: int = 0, limit: int = 2**62, aborted: object = ()) -> pa.Table:
    built = convert.build_file(
        [memoryview(each) for each in buffers],
        start=start,
        limit=limit,
        aborted=aborted,  # type: ignore[arg-type]
        decoded_bytes_max=MAX,
    )
    assert built is not None
    table = pq.read_table(pa.BufferReader(built.data))
    assert built.rows == table.num_rows
    assert built.row_sum == rowhash.row_sum(row_groups.canonical(table))
    offsets = table.column("offset").to_pylist()
    assert (built.min_offset, built.max_offset) == (offsets[0], offsets[-1])
    return table


BYTES = st.none() | st.binary(max_size=20)
ROWS = st.lists(
    st.tuples(
        st.integers(-(2**40), 2**41),
        BYTES,
        BYTES,
        st.lists(st.tuples(st.text(max_size=4), BYTES), max_size=2),
    ),
    min_size=1,
    max_size=20,
)


@given(
    st.lists(
        st.tuples(ROWS, st.sampled_from(["none", "lz4", "zstd"]), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_rows_survive_the_way_there_and_back(batches: list[tuple[Any, str, int]]) -> None:
    base, buffers = 0, []
    for rows, codec, epoch in batches:
        buffers.append(encode(rows, base, codec=codec, leader_epoch=epoch))
        base += len(rows)
    want = [
        columns.decode(each, decoded_bytes_max=MAX).append_column(
            "epoch", pa.array([log_batch.read_header(each).leader_epoch] * n, pa.int32())
        )
        for each, n in zip(buffers, (len(rows) for rows, _, _ in batches), strict=True)
    ]
    table = build(*buffers)
    back = [
        columns.decode(each, decoded_bytes_max=MAX).append_column(
            "epoch",
            pa.array([header.leader_epoch] * header.record_count, pa.int32()),
        )
        for each in convert.batches_of(row_groups.canonical(table))
        for header in [log_batch.check(each)]
    ]
    assert pa.Table.from_batches(back).to_pylist() == pa.Table.from_batches(want).to_pylist()


def test_aborted_batches_and_markers_are_left_out() -> None:
    marker = b"".join(control_rows.encode_markers([control_rows.Marker(7, 0, False)], 5))
    kept = plain(3, 0)
    dropped = plain(4, 3, producer_id=7, producer_epoch=0, transactional=True)
    control = b"".join(log_batch.patched(marker, 7, 0))
    later = plain(2, 8, producer_id=7, producer_epoch=0, transactional=True)
    other = plain(2, 10, producer_id=8, producer_epoch=0, transactional=True)
    table = build(kept, dropped, control, later, other, aborted=[AbortedTransaction(7, 3, 7)])
    assert table.column("offset").to_pylist() == [0, 1, 2, 8, 9, 10, 11]


def test_a_range_without_rows_makes_no_file() -> None:
    marker = b"".join(control_rows.encode_markers([control_rows.Marker(7, 0, True)], 5))
    found = convert.build_file(
        [memoryview(marker)], start=0, limit=10, aborted=(), decoded_bytes_max=MAX
    )
    assert found is None


def test_ranges_cut_batches_at_both_ends() -> None:
    table = build(plain(10, 0), plain(10, 10), start=4, limit=13)
    assert table.column("offset").to_pylist() == list(range(4, 13))


def test_row_groups_are_bounded_by_rows_and_bytes() -> None:
    """tiering/convert F3; every row group also states its offsets, so that a cold read needs only
    one of them.
    """
    small = [plain(9_000, i * 9_000) for i in range(5)]
    built = convert.build_file(
        [memoryview(each) for each in small],
        start=0,
        limit=2**62,
        aborted=(),
        decoded_bytes_max=MAX,
    )
    assert built is not None
    metadata = pq.read_metadata(pa.BufferReader(built.data))
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [16_384, 16_384, 45_000 - 2 * 16_384]
    stats = [group.column(0).statistics for group in groups]
    assert [(each.min, each.max) for each in stats] == [
        (0, 16_383),
        (16_384, 32_767),
        (32_768, 44_999),
    ]
    value = np.random.default_rng(1).bytes(1 << 20)
    large = encode([(1, None, value, [])] * 20, 0)
    table_file = convert.build_file(
        [memoryview(large)], start=0, limit=2**62, aborted=(), decoded_bytes_max=MAX
    )
    assert table_file is not None
    metadata = pq.read_metadata(pa.BufferReader(table_file.data))
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3] * 6 + [2]


def test_a_batch_that_does_not_fit_begins_a_row_group() -> None:
    three, two = bytes(3 << 20), bytes(2 << 20)
    batches = [encode([(1, None, three, [])], 0), encode([(1, None, two, [])], 1)]
    views = [memoryview(each) for each in batches]
    built = convert.build_file(views, start=0, limit=2**62, aborted=(), decoded_bytes_max=MAX)
    assert built is not None
    assert pq.read_metadata(pa.BufferReader(built.data)).num_row_groups == 2


def test_many_small_batches_make_one_row_group() -> None:
    odd = [(1, None, b"v", [("h", b"1")])] * 3
    small = [
        memoryview(encode(odd, i * 3) if i % 3 else plain(3, i * 3))
        for i in range(8 * convert.PIECES_MAX)
    ]
    built = convert.build_file(small, start=0, limit=2**62, aborted=(), decoded_bytes_max=MAX)
    assert built is not None
    table = pq.read_table(pa.BufferReader(built.data))
    assert table.column("offset").to_pylist() == list(range(3 * len(small)))
    assert built.row_sum == rowhash.row_sum(row_groups.canonical(table))
    assert pq.read_metadata(pa.BufferReader(built.data)).num_row_groups == 1


def test_a_sink_takes_one_file_after_another() -> None:
    """A smaller file after a larger one contains nothing of it; both equal the files that a fresh
    buffer gives.
    """
    value = np.random.default_rng(1).bytes(1 << 20)
    buffers = [
        [encode([(1, b"k", value, [])] * 5, 0)],
        [plain(10, 0)],
        [encode([(1, None, value[::-1], [])] * 7, 100)],
    ]
    used = OutputBuffer()
    for each in buffers:
        files = []
        for buffer in (used, OutputBuffer()):
            builder = convert.FileBuilder(buffer=buffer)
            for batch in map(memoryview, each):
                header = log_batch.read_header(batch)
                builder.add_batch(header, batch, 0, 2**62, NOTHING, MAX)
            built = builder.finish()
            assert built is not None
            files.append(bytes(built.data))
        assert files[0] == files[1]


def test_a_sink_that_is_too_small_says_so_and_grows() -> None:
    value = np.random.default_rng(1).bytes(1 << 20)
    batch = memoryview(encode([(1, None, value, [])] * 3, 0))
    buffer = OutputBuffer(2 << 20)

    def built() -> convert.BuiltFile | None:
        builder = convert.FileBuilder(buffer=buffer)
        builder.add_batch(log_batch.read_header(batch), batch, 0, 2**62, NOTHING, MAX)
        return builder.finish()

    with pytest.raises(OutputBufferFull):
        built()
    buffer.grow()
    file = built()
    assert file is not None
    assert pq.read_table(pa.BufferReader(file.data)).num_rows == 3
    del file
    buffer.rest()
    assert buffer._memory is None  # an unusually large file does not keep its memory,
    assert built() is not None  # but the next one need not be built twice


def test_runs_of_batches_are_what_the_batches_are() -> None:
    """log/batch_decoder D1, with gaps, both widths of timestamps, batches with and without keys,
    and unusual ones.
    """
    wide = [(2**41 * (i % 2), b"k%d" % i, b"w%d" % i, []) for i in range(5)]
    sparse = row_groups.canonical(build(plain(9, 40))).take(pa.array([0, 3, 8]))
    batches = [
        plain(3, 0),
        plain(4, 3, codec="lz4"),
        encode(wide, 10, leader_epoch=3),
        next(convert.batches_of(sparse)),
        encode([(5, None, b"x", [])] * 4, 60),
        encode([(5, None, b"x", [("h", b"1")])] * 2, 64),
        encode([(5, None, None, [])] * 3, 66),
        encode([(5, b"a", b"y", []), (6, None, b"z", [])], 70),
        with_horizon([(5, b"a", None, [])], 72, 1_000),
        with_horizon([(5, b"b", None, []), (5, b"c", None, [("h", b"1")])], 73, 1_000),
        with_horizon([(5, b"d", None, [])], 75, 2_000),
        encode([(5, b"e", None, [("h", b"1"), ("i", None)])] * 2, 76),
    ]
    table = build(*batches)
    single = [build(each) for each in batches]
    assert table.to_pylist() == pa.concat_tables(single).to_pylist()
    horizons = table.column("delete_horizon_ms").to_pylist()[-6:]
    assert horizons == [1_000, 1_000, 1_000, 2_000, None, None]
    names = ["offset", "timestamp", "key", "value"]
    decoded = [columns.decode(b, decoded_bytes_max=MAX, timestamp_unit="us") for b in batches]
    want = pa.Table.from_batches(decoded).select(names)
    assert table.select(names).to_pylist() == want.to_pylist()
    cut = build(*batches, start=2, limit=48)
    assert cut.to_pylist() == [row for row in table.to_pylist() if 2 <= row["offset"] < 48]


@pytest.mark.parametrize("random", [True, False])
def test_values_that_do_not_compress_are_stored_as_they_are(random: bool) -> None:
    rng = np.random.default_rng(1)
    values = [rng.bytes(100) if random else b"%0100d" % i for i in range(5_000)]
    built = convert.build_file(
        [memoryview(encode([(1, None, value, []) for value in values], 0))],
        start=0,
        limit=2**62,
        aborted=(),
        decoded_bytes_max=MAX,
    )
    assert built is not None
    metadata = pq.read_metadata(pa.BufferReader(built.data)).row_group(0)
    codecs = {metadata.column(i).path_in_schema: metadata.column(i).compression for i in range(8)}
    assert codecs.pop("value") == ("UNCOMPRESSED" if random else "ZSTD")
    assert set(codecs.values()) == {"ZSTD"}
    assert pq.read_table(pa.BufferReader(built.data)).column("value").to_pylist() == values


def test_log_append_time_is_kept_as_such() -> None:
    stamped = [
        b"".join(log_batch.patched(plain(3, i * 3), i * 3, 1, append_time_ms=5_000 + i))
        for i in range(2)
    ]
    table = build(*stamped)
    assert table.column("timestamp_type").to_pylist() == [1] * 6
    back = list(convert.batches_of(row_groups.canonical(table)))
    heads = [log_batch.check(each) for each in back]
    assert [(h.base_offset, h.record_count, h.log_append_time, h.max_timestamp) for h in heads] == [
        (0, 3, True, 5_000),
        (3, 3, True, 5_001),
    ]


def test_scattered_rows_are_merged_and_an_offset_comes_once() -> None:
    rows = row_groups.canonical(build(plain(10, 0)))
    mixed = pa.concat_batches([rows.slice(5), rows.slice(0, 7)])
    merged = row_groups.in_offset_order(mixed, 2, 9)
    assert merged.column("offset").to_pylist() == list(range(2, 9))


def test_gaps_wider_than_a_batch_can_say_split_it() -> None:
    rows = row_groups.canonical(build(plain(2, 0), plain(2, 2**31 + 10), plain(1, 2**40)))
    back = [log_batch.check(each) for each in convert.batches_of(rows)]
    assert [header.base_offset for header in back] == [0, 2**31 + 10, 2**40]


def test_foreign_files_come_in_our_columns() -> None:
    """Outside maintenance may write other types, and another order of columns."""
    table = build(plain(4, 0))
    value = table.column("value").cast(pa.large_binary())
    foreign = table.drop_columns("value").append_column("value", value)
    rows = row_groups.canonical(foreign)
    assert rows.schema == FILE_SCHEMA
    heads = [log_batch.check(each) for each in convert.batches_of(rows)]
    assert sum(header.record_count for header in heads) == 4


@pytest.mark.parametrize("name", FILE_SCHEMA.names)
def test_a_column_that_is_missing_is_never_taken_for_nulls(name: str) -> None:
    with pytest.raises(UnreadableFile, match=f"no column {name}"):
        row_groups.canonical(build(plain(4, 0)).drop_columns(name))


@pytest.mark.parametrize("name", ["offset", "timestamp"])
def test_nulls_in_place_of_an_offset_or_a_time_are_refused(name: str) -> None:
    table = build(plain(4, 0))
    at = table.schema.get_field_index(name)
    with pytest.raises(UnreadableFile, match="has nulls"):
        row_groups.canonical(table.set_column(at, name, pa.nulls(4, table.schema.field(at).type)))


def test_a_damaged_batch_is_never_copied() -> None:
    broken = bytearray(plain(3, 0))
    broken[-1] ^= 1
    with pytest.raises(errors.CorruptBatch):
        build(bytes(broken))


def test_no_bit_of_a_header_may_hide_a_batch_from_the_table() -> None:
    """Rule L9: a damaged header may claim a marker, an empty batch, or an offset below the
    start.
    """
    good = plain(2, 3)
    for position in range(log_batch.CRC_START, log_batch.HEADER_BYTES):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(errors.CorruptBatch):
                build(plain(3, 0), bytes(bad), plain(1, 5))
