"""`pk tier`: the Delta table behind a topic."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk.cli import tier_history, tier_list, tier_restore, tier_restore_offsets
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    error_json,
    opened,
    quiet_end,
    say,
    size_text,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pk.client.admin import TierDescription, TierRows

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.command()(tier_history.history)
app.command("list")(tier_list.list_tables)
app.command()(tier_restore.restore)
app.command()(tier_restore_offsets.restore_offsets)


@app.command()
def describe(
    topic: Annotated[str, typer.Argument(help="topic name")],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show a topic's table: where it is, what it covers, how to open it without pk.

    Example: pk tier describe flights
    """
    from pk.client.admin import AdminClient

    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        found = admin.describe_tier(topic, timeout_s=timeout_ms / 1000)
    if as_json:
        say(as_object(found))
        return
    with quiet_end():
        show(found)


@app.command()
def repair(
    topic: Annotated[str, typer.Argument(help="topic name")],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 300_000,
    as_json: AsJson = False,
) -> None:
    """Bring back rows that another engine deleted from the table, as far as local logs have them.

    Do not run it after an intended DELETE: the command undoes as much of it as it can.

    Example: pk tier repair flights
    """
    from pk.client.admin import AdminClient

    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        print_rows(
            admin.repair_tier(topic, timeout_s=timeout_ms / 1000), "brought back", as_json=as_json
        )


@app.command()
def accept(
    topic: Annotated[str, typer.Argument(help="topic name")],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Accept that rows which another engine deleted from the table stay deleted.

    Example: pk tier accept flights
    """
    from pk.client.admin import AdminClient

    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        print_rows(
            admin.accept_tier(topic, timeout_s=timeout_ms / 1000), "accepted", as_json=as_json
        )


def print_rows(found: dict[int, TierRows], what: str, *, as_json: bool) -> None:
    """Print, by partition, how many missing rows were repaired or accepted, and which remain."""
    if as_json:
        say({"partitions": {partition: asdict(each) for partition, each in found.items()}})
        return
    table(
        ["partition", what, "still missing", "offsets in no file"],
        [[p, each.rows, each.missing, spans(each.ranges)] for p, each in sorted(found.items())],
    )


def spans(ranges: Iterable[tuple[int, int]]) -> str:
    """Return half-open ranges as text."""
    return " ".join(f"[{start}, {end})" for start, end in ranges)


def as_object(found: TierDescription) -> dict[str, Any]:
    """Return the description as a JSON object, for scripts."""
    return {
        "topic": found.topic,
        "topic_id": found.topic_id,
        "uri": found.uri,
        "version": found.version,
        "status": found.status,
        "problem": error_json(found.problem),
        "partitions": [asdict(each) for each in found.partitions],
        "damaged": [
            {
                "partition": each.partition,
                "start": each.start,
                "end": each.end,
                "path": each.path,
                "problem": error_json(each.problem),
            }
            for each in found.damaged
        ],
        "rows_missing": [asdict(each) for each in found.rows_missing],
        "storage_options": dict(found.storage_options),
        "open_with": open_with(found.uri, found.storage_options) if found.uri else {},
    }


def show(found: TierDescription) -> None:
    """Print the description for people."""
    typer.echo(f"{found.topic}  {found.topic_id}  status: {found.status}")
    if found.problem is not None:
        typer.echo(f"problem: {found.problem.message}")
    if found.uri:
        version = f"version {found.version}" if found.version >= 0 else "no version yet"
        typer.echo(f"{found.uri}  {version}")
    if found.partitions:
        table(
            ["partition", "start", "end", "lag", "rows", "removed", "files", "bytes"],
            [
                [p.partition, p.start, p.end, p.lag, p.rows, p.removed, p.files, size_text(p.bytes)]
                for p in found.partitions
            ],
        )
    if found.damaged:
        typer.echo("missing or damaged files:")
        table(
            ["partition", "start", "end", "file"],
            [[each.partition, each.start, each.end, each.path] for each in found.damaged],
        )
    if found.rows_missing:
        typer.echo("rows that another engine took away (pk tier repair | accept):")
        table(
            ["partition", "rows", "offsets in no file"],
            [[each.partition, each.rows, spans(each.ranges)] for each in found.rows_missing],
        )
    for name, value in sorted(found.storage_options.items()):
        typer.echo(f"{name}={value}")
    if found.uri and found.version >= 0:
        typer.echo("open it without pk:")
        for name, text in open_with(found.uri, found.storage_options).items():
            typer.echo(f"  {name:<7} {text}")


def open_with(uri: str, options: Any) -> dict[str, str]:
    """Return a line each that opens the table in Spark, DuckDB and pandas, without credentials."""
    given = f", storage_options={dict(options)!r}" if options else ""
    files = f"DeltaTable({uri!r}{given}).file_uris()"
    spark = f"s3a{uri[2:]}" if uri.startswith("s3://") else uri
    return {
        "spark": f'spark.read.format("delta").load({spark!r})',
        "duckdb": f"duckdb.read_parquet({files}, hive_partitioning=True)",
        "pandas": f"deltalake.DeltaTable({uri!r}{given}).to_pandas()",
    }
