"""`pk cluster`: describe the level of a cluster, raise it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

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

if TYPE_CHECKING:
    from pk.client.admin import AdminClient

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def _admin(bootstrap: str) -> AbstractContextManager[AdminClient]:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


@app.command()
def describe(
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show the level of the cluster, and the level that each broker and each voter knows.

    Example: pk cluster describe --json
    """
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.describe_cluster(timeout_s=timeout_ms / 1000)
        behind = [f"{each.role} {each.node_id}" for each in found.behind]
        if as_json:
            say({**asdict(found), "behind": behind})
            return
        typer.echo(
            f"cluster {found.cluster_id} is at level {found.level} of pk.format; "
            f"the active controller, node {found.controller_id}, knows {found.known}"
        )
        if behind:
            typer.echo(f"level {found.known} is not known to: {', '.join(behind)}")
        rows = [
            (each.node_id, each.role, each.address, each.level or "not known")
            for each in found.nodes
        ]
        table(["node", "role", "address", "knows_level"], rows)


@app.command()
def upgrade(
    to: Annotated[
        int, typer.Option("--to", help="the level; default: the highest the controller knows")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check that every node knows it; change nothing")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Raise the level of the cluster.  It cannot be lowered: older builds do not start again.

    Example: pk cluster upgrade --dry-run
    """
    with quiet_end(), _admin(bootstrap) as admin:
        before, level = admin.upgrade_cluster(
            to, validate_only=dry_run, timeout_s=timeout_ms / 1000
        )
        if as_json:
            say({"before": before, "level": level, "changed": level != before and not dry_run})
            return
        if before == level:
            typer.echo(f"the cluster is at level {level} already (unchanged)")
        elif dry_run:
            typer.echo(f"every node knows level {level}; the cluster stays at level {before}")
        else:
            typer.echo(f"the cluster was raised from level {before} to level {level}")
