"""`pk demo` on a part of its data: the proof comes out, and says no when it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pk import errors
from pk.cli import demo
from pk.cli.proof import spark_sql

FLIGHTS = 20_000


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_demo_proves_itself_on_a_part_of_the_flights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pk.cli", "demo", "--dir", str(tmp_path / "d"), "--json",
         "--limit", str(FLIGHTS)],
        capture_output=True, text=True, timeout=880, check=False, cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    proof = json.loads(done.stdout)
    assert proof["disagreements"] == []
    counts = (proof["sent"], proof["log_ends"], proof["windows"], proof["log"]["rows"])
    assert counts == (FLIGHTS,) * 4
    assert proof["table"] == proof["log"]
    assert proof["input"]["content"] == proof["log"]["content"]
    assert int(proof["log"]["checksum"]) > 0
    assert "tiered_end" in told


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_sql_computes_what_duckdb_computes() -> None:
    """Two engines, one definition, on keys and values that are null, empty and not text."""
    import pyarrow as pa

    from pk.cli.proof import duckdb_sql
    from pk.sparkconnector import session

    rows = [(0, 0, b"AA", b"{}"), (0, 1, None, b"\x00\xff"), (3, 1 << 40, b"", None)]
    partition, offset, key, value = zip(*rows, strict=True)
    table = pa.table(
        {
            "partition": pa.array(partition, pa.int32()),
            "offset": pa.array(offset, pa.int64()),
            "key": pa.array(key, pa.binary()),
            "value": pa.array(value, pa.binary()),
        }
    )
    spark = session("proof", master="local[1]")
    try:
        schema = "partition int, `offset` bigint, key binary, value binary"
        spark.createDataFrame([tuple(row) for row in rows], schema).createOrReplaceTempView("log")
        row = spark.sql(spark_sql("log")).first()
        found = demo.sums(row["rows"], row["checksum"], row["content"])
    finally:
        spark.stop()
    import duckdb

    with duckdb.connect() as db:
        db.register("log", table)
        assert demo.sums(*db.execute(duckdb_sql("log")).fetchone()) == found


def test_only_a_demos_directory_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(errors.InvalidOption, match="not empty"):
        demo.fresh_directory(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    root = demo.fresh_directory(tmp_path / "new")
    (root / "old").touch()
    assert demo.fresh_directory(root) == root
    assert not (root / "old").exists()
