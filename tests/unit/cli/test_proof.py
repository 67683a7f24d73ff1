"""The demo's proof: its SQL compared with hashlib, and that every single disagreement is found."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from pk.cli.proof import Proof, Sums, duckdb_sql

ROWS: list[tuple[int, int, bytes | None, bytes | None]] = [
    (0, 0, b"AA", b'{"a":1}'),
    (0, 1, None, b"\x00\xff"),
    (3, 12, b"", None),
]


def shown(value: bytes | None) -> str:
    return "-" if value is None else value.hex().upper()


def row_hash(text: str) -> int:
    return int(hashlib.md5(text.encode()).hexdigest()[:15], 16)


def table() -> pa.Table:
    partition, offset, key, value = zip(*ROWS, strict=True)
    return pa.table(
        {
            "partition": pa.array(partition, pa.int32()),
            "offset": pa.array(offset, pa.int64()),
            "key": pa.array(key, pa.binary()),
            "value": pa.array(value, pa.binary()),
        }
    )


def test_duckdb_computes_what_the_definition_says() -> None:
    rows = table()
    assert rows.num_rows == len(ROWS)
    with duckdb.connect() as db:
        db.register("source", rows)
        found = db.execute(duckdb_sql("source")).fetchone()
        content_only = db.execute(duckdb_sql("source", with_offsets=False)).fetchone()
    content = sum(row_hash(f"{shown(k)}|{shown(v)}") for _, _, k, v in ROWS)
    full = sum(row_hash(f"{p}|{o}|{shown(k)}|{shown(v)}") for p, o, k, v in ROWS)
    assert found == (len(ROWS), full, content)
    assert content_only == (len(ROWS), None, content)


GOOD = Proof(3, 3, 3, Sums(3, None, 20), Sums(3, 10, 20), Sums(3, 10, 20))


def test_agreement_is_silence() -> None:
    assert GOOD.disagreements() == []


@pytest.mark.parametrize(
    "change",
    [
        {"sent": 4},
        {"log_ends": 4},
        {"windows": 2},
        {"input": Sums(2, None, 20)},
        {"input": Sums(3, None, 21)},
        {"log": Sums(2, 10, 20)},
        {"log": Sums(3, 11, 20)},
        {"log": Sums(3, 10, 21)},
        {"table": Sums(4, 10, 20)},
        {"table": Sums(3, 11, 20)},
        {"table": Sums(3, 10, 21)},
        {"table": Sums(3, None, None)},
    ],
)
def test_any_single_difference_is_told(change: dict[str, Any]) -> None:
    assert dataclasses.replace(GOOD, **change).disagreements()


def test_nothing_proves_nothing() -> None:
    empty = Sums(0, None, None)
    assert Proof(0, 0, 0, empty, empty, empty).disagreements()
