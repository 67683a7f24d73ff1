"""The demo's proof: four counts and the checksums of three engines must agree.

pk itself computes no hash.  The hash of a row is the first 15 hex digits, as an integer, of the md5
of a text.  A checksum is the sum of the row hashes as DECIMAL(38,0), so it does not depend on the
order of rows.

    row text       partition|offset|hex(key)|hex(value)       null as a dash

Spark SQL computes the count and both checksums over `format("pk")`.  DuckDB computes them over the
Parquet files that the table's Delta log lists, and the content checksum also over the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTENT_TEXT = "concat(coalesce(hex(key), '-'), '|', coalesce(hex(value), '-'))"
ROW_TEXT = (
    "concat(CAST(partition AS STRING), '|', CAST(\"offset\" AS STRING), '|', "
    "coalesce(hex(key), '-'), '|', coalesce(hex(value), '-'))"
)


def spark_hash(text: str) -> str:
    """Return Spark SQL for the row hash of `text`; 15 hex digits always fit a BIGINT."""
    return f"CAST(conv(substr(md5({text}), 1, 15), 16, 10) AS DECIMAL(38, 0))"


def duckdb_hash(text: str) -> str:
    """Return DuckDB SQL for the row hash of `text`."""
    return f"CAST(CAST('0x' || substr(md5({text}), 1, 15) AS BIGINT) AS DECIMAL(38, 0))"


def spark_sql(view: str) -> str:
    """Return Spark SQL for the count and both checksums over a view with Kafka's columns."""
    row, content = ROW_TEXT.replace('"offset"', "`offset`"), CONTENT_TEXT
    return (
        f"SELECT count(*) AS rows, CAST(sum({spark_hash(row)}) AS DECIMAL(38, 0)) AS checksum, "
        f"CAST(sum({spark_hash(content)}) AS DECIMAL(38, 0)) AS content FROM {view}"
    )


def duckdb_sql(source: str, *, with_offsets: bool = True) -> str:
    """Return the same query for DuckDB; the input has no offsets, so only its content is summed."""
    row = f"CAST(sum({duckdb_hash(ROW_TEXT)}) AS DECIMAL(38, 0))" if with_offsets else "NULL"
    return (
        f"SELECT count(*) AS rows, {row} AS checksum, "
        f"CAST(sum({duckdb_hash(CONTENT_TEXT)}) AS DECIMAL(38, 0)) AS content FROM {source}"
    )


@dataclass(slots=True, frozen=True)
class Sums:
    """The count and the checksums that an engine computed."""

    rows: int
    checksum: int | None
    content: int | None


@dataclass(slots=True, frozen=True)
class Proof:
    """The counts and checksums that must agree."""

    sent: int  #: records that the brokers acknowledged to the producer
    log_ends: int  #: sum of log_end - log_start, as the broker reports them
    windows: int  #: sum of the window counts in the query's Delta table
    input: Sums  #: DuckDB over the rows that were sent
    log: Sums  #: Spark SQL over format("pk")
    table: Sums  #: DuckDB over the files of the topic's table

    def counts(self) -> list[tuple[str, int]]:
        return [
            ("records sent", self.sent),
            ("in the log (log_end - log_start)", self.log_ends),
            ('in the log (Spark SQL, format("pk"))', self.log.rows),
            ("rows of the topic's table (DuckDB)", self.table.rows),
            ("rows seen by Spark (sum of the windows)", self.windows),
        ]

    def disagreements(self) -> list[str]:
        """Return a sentence per disagreement; an empty list means that the proof holds."""
        found = _differing("counts", self.counts())
        found += _differing(
            "checksums of partition|offset|key|value",
            [("log, Spark SQL", self.log.checksum), ("table, DuckDB", self.table.checksum)],
        )
        found += _differing(
            "checksums of key|value",
            [
                ("input, DuckDB", self.input.content),
                ("log, Spark SQL", self.log.content),
                ("table, DuckDB", self.table.content),
            ],
        )
        if self.input.rows != self.sent:
            found.append(f"input has {self.input.rows} rows, {self.sent} were acknowledged")
        if self.sent == 0:
            found.append("nothing was sent: equal zeros prove nothing")
        return found


def _differing(what: str, named: Sequence[tuple[str, int | None]]) -> list[str]:
    if len({value for _, value in named}) == 1 and named[0][1] is not None:
        return []
    return [f"{what} differ: " + ", ".join(f"{name} = {value}" for name, value in named)]
