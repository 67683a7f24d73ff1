"""Rows of row groups, cut to a range and in offset order (tiering/row_groups, rule T10)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk.tiering import footers, row_groups
from pk.tiering.footers import UnreadableFile


def rows_of(offsets: list[int]) -> pa.RecordBatch:
    values = [str(offset).encode() * 50 for offset in offsets]
    arrays = [pa.array(offsets, pa.int64()), pa.array(values, pa.binary())]
    return pa.RecordBatch.from_arrays(arrays, ["offset", "value"])


def offsets_of(rows: pa.RecordBatch) -> list[int]:
    offsets: list[int] = rows.column("offset").to_pylist()
    assert rows.column("value").to_pylist() == [str(each).encode() * 50 for each in offsets]
    return offsets


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=20), min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(0, 41),
)
def test_overlapping_row_groups_give_each_offset_of_the_range_once(
    groups: list[list[int]], start: int, end: int
) -> None:
    expected = sorted({o for each in groups for o in each if start <= o < end})
    found = row_groups.merge((rows_of(each) for each in groups), start, end)
    assert found is not None
    assert offsets_of(found) == expected
    together = pa.concat_batches([rows_of(each) for each in groups])
    assert offsets_of(row_groups.in_offset_order(together, start, end)) == expected


def test_no_row_groups_are_no_rows() -> None:
    assert row_groups.merge([], 0, 10) is None


@pytest.mark.parametrize("offsets", [list(range(1000)), list(range(999, -1, -1))])
def test_what_is_kept_for_a_merge_does_not_hold_the_row_group(offsets: list[int]) -> None:
    """Rule T10: after a Z-order every row group has a few rows of the range."""
    whole = rows_of(offsets)
    kept = row_groups.clipped(whole, 10, 20)
    assert sorted(offsets_of(kept)) == list(range(10, 20))
    assert kept.get_total_buffer_size() < whole.get_total_buffer_size() / 10
    assert row_groups.clipped(whole, 0, 1000) is whole


def test_rows_that_their_footer_does_not_have_are_refused() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([rows_of([3, 4, 5])]), sink)
    raw = sink.getvalue()
    metadata = pq.read_metadata(pa.BufferReader(raw))
    part = footers.Part(0, 0)
    schema = pa.schema([pa.field("offset", pa.int64()), pa.field("value", pa.binary())])

    def read(low: int, high: int, count: int) -> pa.RecordBatch:
        group = footers.Group(0, low, high, 0, count, *part, 0, ())
        footer = footers.Footer(metadata, (group,), 0)
        return row_groups.read_rows(pa.BufferReader(raw), footer, [group], schema)

    assert offsets_of(read(3, 5, 3)) == [3, 4, 5]
    with pytest.raises(UnreadableFile, match="3 rows were read"):
        read(3, 5, 4)
    with pytest.raises(UnreadableFile, match="offsets 3 to 5 were read"):
        read(3, 4, 3)


@pytest.mark.parametrize(
    ("length", "size", "longer"),
    [(100, 1_000, None), (footers.TAIL_BYTES, 10**6, (10**6 - 70_008, 70_008)), (300, 300, None)],
)
def test_a_footer_longer_than_the_tail_is_read_again(
    length: int, size: int, longer: tuple[int, int] | None
) -> None:
    assert footers.tail_part(size) == (size - min(size, footers.TAIL_BYTES), min(size, 65_536))
    needed = 92 if longer is None and size > 300 else 70_000
    tail = bytes(length - 8) + needed.to_bytes(4, "little") + b"PAR1"
    assert footers.longer_tail(tail, size) == longer
