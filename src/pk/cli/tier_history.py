"""`pk tier history`: the versions of a topic's table, for reads AS OF one of them."""

from __future__ import annotations

from typing import Annotated

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
    table,
)

LIMIT = 20


def history(
    topic: Annotated[str, typer.Argument(help="topic name")],
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="newest versions to show")] = LIMIT,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """List the versions of a topic's table: when, what made them, and where their rows end.

    A batch reads one of them with the option versionAsOf or timestampAsOf.  This command reads the
    table's log itself, so it needs access to the store.

    Example: pk tier history flights --limit 5
    """
    from pk.client.admin import AdminClient
    from pk.sparkconnector import table_history, table_versions

    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        place = admin.describe_tier(topic, timeout_s=timeout_ms / 1000)
    if not place.uri or place.version < 0:
        raise errors.InvalidOption(
            f"{topic} has no table yet: its setting tier_enable is off, or nothing was "
            "tiered (pk tier describe)"
        )
    found = table_history.history(place.uri, place.storage_options, place.topic_id, limit)
    with quiet_end():
        if as_json:
            for each in found:
                say({**each._asdict(), "time": table_versions.time_text(each.time_ms)})
            return
        table(
            ["version", "time", "operation", "engine", "files", "rows added", "starts", "ends"],
            [
                [
                    each.version,
                    table_versions.time_text(each.time_ms),
                    each.operation,
                    each.engine,
                    f"+{each.files_added} -{each.files_removed}",
                    each.rows_added,
                    _moved(each.starts),
                    _moved(each.ends),
                ]
                for each in found
            ],
        )


def _moved(counters: dict[int, int]) -> str:
    """Return new counters by partition as text."""
    return " ".join(f"{partition}:{value}" for partition, value in sorted(counters.items()))
