"""The demo's proof: its result for a topic does not depend on the engine that computes it."""

from __future__ import annotations

import duckdb
import pyarrow as pa

from pk.cli import demo
from pk.cli.proof import duckdb_sql, spark_sql


def test_spark_sql_computes_what_duckdb_computes(spark) -> None:
    """Two engines use one definition, on keys and values that are null, empty and not text."""
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
    schema = "partition int, `offset` bigint, key binary, value binary"
    spark.createDataFrame([tuple(row) for row in rows], schema).createOrReplaceTempView("log")
    row = spark.sql(spark_sql("log")).first()
    found = demo.sums(row["rows"], row["checksum"], row["content"])
    with duckdb.connect() as db:
        db.register("log", table)
        assert demo.sums(*db.execute(duckdb_sql("log")).fetchone()) == found
