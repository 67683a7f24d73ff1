"""The table of README.md's section "Beside Apache Kafka", from the rows of docs/bench.jsonl.

Cases in which pk is slower belong in it, too: a reader chooses by them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import marked_tables

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
STORE = HERE / "bench.jsonl"
#: What a line of the table says, and the cases and variants whose rows it has ("" = all).
LINES = (
    ("Python producer, Arrow batches, acks=all", "produce_columnar", ""),
    ("Python consumer, Arrow batches", "consume_columnar", ""),
    ("Python producer, `send` for each record", "produce_record", ""),
    ("Python consumer, record by record", "consume_record", ""),
    ("producer, Arrow batches, three nodes and replicas", "produce_replicated", ""),
    ("p99 from produce to consume, one record in flight", "latency", ""),
    ("the leader's node is killed: until the next acknowledgement", "failover", "kill -9"),
    ("`spark.read`, hot, beside Spark's Kafka connector", "spark_read", ""),
    ("`spark.readStream`, hot, beside Spark's Kafka connector", "spark_stream", ""),
    ("`spark.read`, all of it cold, beside `spark.read.parquet`", "cold_read", ""),
    ("small requests of 64 clients, one in flight each", "small_requests", ""),
    ("1,000 partitions are created", "partitions_1000", "create"),
)


def _rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of the store with the name of their case."""
    for line in STORE.read_text(encoding="utf-8").splitlines():
        whole = json.loads(line)
        yield whole["name"], whole
        for further in whole.values():
            if isinstance(further, dict) and "ratio" in further:
                yield whole["name"], further


def _value(value: float, unit: str) -> str:
    if unit == "records/s":
        return f"{value / 1e6:.2f} M/s"
    return (
        f"{value:,.3g} {unit}" if value < 1_000 else f"{value:,.0f} {unit.removeprefix('requests')}"
    )


def table() -> list[str]:
    """Return the lines of the table."""
    rows = list(_rows())
    lines = []
    for words, name, variant in LINES:
        found = [row for of, row in rows if of == name and variant in ("", row["variant"])]
        assert found, f"docs/bench.jsonl has no row {name} {variant}"
        cells = [
            " · ".join(_value(row[side], row["unit"]) for row in found) for side in ("pk", "peer")
        ]
        ratios = " · ".join(f"{row['ratio']:.3g}" for row in found)
        lines.append([words, *cells, f"**{ratios}**"])
    return marked_tables.table(" | pk | peer | pk is better by", lines)


def page() -> str:
    """Return README.md with the table as the rows say it is."""
    return marked_tables.replaced(README.read_text(encoding="utf-8"), "figures", table())
