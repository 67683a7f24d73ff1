"""The row hash equals the definition in its docstring, however the rows are sliced or sorted (rule
T2).
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
from hypothesis import given

from pk.tiering import rowhash
from pk.tiering.layout import FILE_SCHEMA

R, LENGTH, NULL, ALL = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0x2545F4914F6CDD1D, 2**64


def mix(value: int) -> int:
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD % ALL
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 % ALL
    return value ^ value >> 33


def one(data: bytes | None) -> int:
    """Compute the definition, row by row."""
    if data is None:
        return NULL
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = sum(word * pow(R, j, ALL) for j, word in enumerate(words))
    return mix((total + len(data) * LENGTH) % ALL)


def row(offset: int, stamp: int, key: bytes | None, value: bytes | None, headers: object) -> int:
    inner = sum(
        mix((3 * one(k.encode()) + 5 * one(v) + j + 1) % ALL)
        for j, (k, v) in enumerate(headers or ())  # type: ignore[call-overload]
    )
    parts = (offset, stamp, one(key), one(value), inner)
    constants = (
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
        0x9FB21C651E98DF25,
        0xD1B54A32D192ED03,
        0xAEF17502108EF2D9,
    )
    return mix(sum(p * c for p, c in zip(parts, constants, strict=True)) % ALL) % 2**63


BYTES = st.none() | st.binary(max_size=40)
ROWS = st.lists(
    st.tuples(
        BYTES, BYTES, st.none() | st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=3)
    ),
    max_size=30,
)

Rows = list[tuple[bytes | None, bytes | None, Any]]


def batch(rows: Rows, start: int = 7) -> pa.RecordBatch:
    count = len(rows)
    headers = [
        None if each[2] is None else [{"key": k, "value": v} for k, v in each[2]] for each in rows
    ]
    columns = {
        "offset": list(range(start, start + count)),
        "timestamp": [1_700_000_000_000_000 + i * 1_000 for i in range(count)],
        "timestamp_type": [0] * count,
        "key": [each[0] for each in rows],
        "value": [each[1] for each in rows],
        "headers": headers,
        "leader_epoch": [0] * count,
        "delete_horizon_ms": [None] * count,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in FILE_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=FILE_SCHEMA)


@given(ROWS)
def test_it_is_its_definition(rows: Rows) -> None:
    wanted = [row(7 + i, 1_700_000_000_000 + i, k, v, h) for i, (k, v, h) in enumerate(rows)]
    assert rowhash.hash_rows(batch(rows)).tolist() == wanted
    assert rowhash.row_sum(batch(rows)) == sum(wanted) % 2**63


@given(ROWS, st.integers(0, 30))
def test_sums_add_up_over_slices(rows: Rows, at: int) -> None:
    whole = batch(rows)
    parts = rowhash.row_sum(whole.slice(0, at)) + rowhash.row_sum(whole.slice(at))
    assert rowhash.row_sum(whole) == parts % 2**63


def test_values_that_change_places_are_noticed() -> None:
    rows = [(b"k", b"one", None), (b"k", b"two", None)]
    assert rowhash.row_sum(batch(rows)) != rowhash.row_sum(batch(rows[::-1]))
    moved = [(b"k", None, None), (None, b"k", None)]
    assert rowhash.row_sum(batch(moved)) != rowhash.row_sum(batch(moved[::-1]))


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_rows_of_one_length_are_a_matrix(length: int, count: int, cut: int, odd: bool) -> None:
    """Adjoining rows are not copied together; a longer row or a null in between separates them."""
    values: list[bytes | None] = [
        bytes((i * 7 + j) % 256 for j in range(length)) for i in range(count)
    ]
    if odd:
        values[count // 2 : count // 2] = [b"x" * (length + 3), None]
    column = pa.array(values, pa.binary())
    assert rowhash.hash_bytes(column).tolist() == [one(value) for value in values]
    rest = rowhash.hash_bytes(column.slice(min(cut, len(values))))
    assert rest.tolist() == [one(value) for value in values[cut:]]


def test_rows_larger_than_a_block() -> None:
    big = np.random.default_rng(1).bytes(300_001)
    column = pa.array([big, b"", big[:-1], None], pa.binary())
    assert rowhash.hash_bytes(column).tolist() == [one(big), one(b""), one(big[:-1]), NULL]
    same = pa.array([big[i : i + 90_001] for i in range(5)], pa.binary())
    assert rowhash.hash_bytes(same).tolist() == [one(value) for value in same.to_pylist()]
