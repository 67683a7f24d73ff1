"""`pk tier list`: the tables of all topics, or those that no topic owns any more."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    opened,
    quiet_end,
    say,
    size_text,
    table,
)

if TYPE_CHECKING:
    from pk.client.admin import AdminClient, TierDescription

NO_TIER = "no topic of this cluster has a table: give the server's --tier-url"


def list_tables(
    orphans: Annotated[
        bool, typer.Option("--orphans", help="only tables of topics that were deleted")
    ] = False,
    tier_url: Annotated[
        str | None,
        typer.Option(help="with --orphans: the server's tier_url; default: where the topics' are"),
    ] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """List the tables of the tier: status, lag and size; or those that no topic owns.

    With --orphans this command lists the store itself, so it needs access to it.  It deletes
    nothing: remove the directory of a table that is no longer needed with the store's own tools.
    Tables of another cluster in the same tier are orphans to this one.

    Example: pk tier list --orphans
    """
    from pk.client.admin import AdminClient

    if tier_url is not None and not orphans:
        raise errors.InvalidOption("--tier-url goes with --orphans", option="tier_url")
    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        if orphans:
            _show_orphans(admin, tier_url, timeout_ms / 1000, as_json)
        else:
            _show_tables(_described(admin, timeout_ms / 1000), as_json)


def _described(admin: AdminClient, timeout_s: float) -> list[TierDescription]:
    names = [each.name for each in admin.list_topics(timeout_s=timeout_s)]
    found = []
    for name in names:
        try:
            found.append(admin.describe_tier(name, timeout_s=timeout_s))
        except errors.UnknownTopicOrPartition:
            continue  # it was deleted meanwhile
    return found


def _show_tables(found: list[TierDescription], as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "topic": each.topic,
            "status": each.status,
            "version": each.version,
            "rows": sum(partition.rows for partition in each.partitions),
            "lag": sum(partition.lag for partition in each.partitions),
            "files": sum(partition.files for partition in each.partitions),
            "bytes": sum(partition.bytes for partition in each.partitions),
            "uri": each.uri,
        }
        for each in found
    ]
    if as_json:
        say({"tables": rows})
        return
    table(list(rows[0]) if rows else ["topic"], [_cells(each) for each in rows])


def _cells(row: dict[str, Any]) -> list[Any]:
    return [size_text(value) if name == "bytes" else value for name, value in row.items()]


def _show_orphans(
    admin: AdminClient, tier_url: str | None, timeout_s: float, as_json: bool
) -> None:
    from pk.sparkconnector import orphan_tables
    from pk.sparkconnector.table_versions import time_text

    place = next((each for each in _described(admin, timeout_s) if each.uri), None)
    if tier_url is None and place is None:
        raise errors.InvalidOption(NO_TIER, option="tier_url")
    url = tier_url or orphan_tables.tier_of(place.uri if place else "")
    options = place.storage_options if place else {}
    tables = orphan_tables.listed(url, options)
    ids = {each.topic_id for each in admin.list_topics(internal=True, timeout_s=timeout_s)}
    found = orphan_tables.orphans(url, options, tables, ids)
    if as_json:
        say({"tier_url": url, "tables": len(tables), "orphans": [asdict(each) for each in found]})
        return
    table(
        ["topic", "modified", "files", "bytes", "table"],
        [
            [each.topic, time_text(each.modified_ms), each.files, size_text(each.bytes), each.uri]
            for each in found
        ],
    )
    size = size_text(sum(each.bytes for each in found))
    typer.echo(f"{len(found)} of {len(tables)} tables below {url} have no topic: {size}", err=True)
