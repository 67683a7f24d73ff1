"""The bytes that rows count for, computed row by row and from two offsets per column; both must
agree.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from pk.client import rows as row_columns
from pk.client.record_arguments import normalise
from pk.client.rows import COLUMN_OVERHEAD
from pk.log.columns import encode
from pk.log.storage import Buffer

ROWS = {
    "values": {"value": [b"a" * n for n in range(50)]},
    "keys and values": {"key": [b"k" * (n % 7) for n in range(50)], "value": [b"v"] * 50},
    "some nulls": {"key": [None, b"abc"] * 25, "value": [b"x", None] * 25},
    "no value at all": {"value": [None] * 50},
}


def _rows(columns: dict[str, list[bytes | None]]) -> pa.RecordBatch:
    arrays = [pa.array(items, pa.binary()) for items in columns.values()]
    rows, _ = normalise(pa.RecordBatch.from_arrays(arrays, names=list(columns)), 0)
    return rows


@pytest.mark.parametrize("columns", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("window", [(0, 50), (7, 20), (49, 1)])
def test_the_quick_sum_is_the_sum(
    columns: dict[str, list[bytes | None]], window: tuple[int, int]
) -> None:
    rows = _rows(columns).slice(*window)
    assert row_columns.size_of(rows) == int(row_columns.sizes(rows).sum())


def test_rows_are_counted_as_long_as_they_become() -> None:
    rows = _rows({"value": [b"x" * 100] * 10_000})
    body: list[Buffer] = encode(rows)[1:]
    assert row_columns.size_of(rows) == sum(map(len, body)) == 10_000 * (100 + COLUMN_OVERHEAD)


def test_headers_are_counted_row_by_row() -> None:
    headers = pa.array([[{"key": "k", "value": b"v"}], []], row_columns.HEADER_TYPE)
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"a", b"b"]), headers], names=["value", "headers"]
    )
    rows, _ = normalise(batch, 0)
    assert row_columns.size_of(rows) is None
    with_header, without = row_columns.sizes(rows).tolist()
    assert with_header > without


def test_absent_columns_are_null_however_many_rows() -> None:
    for count in (1, 1 << 16, (1 << 16) + 1):
        rows = _rows({"value": [b""] * count})
        assert rows.num_rows == count
        assert rows.column("headers").null_count == rows.column("key").null_count == count
        assert rows.column("headers").type == row_columns.HEADER_TYPE
