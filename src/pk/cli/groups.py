"""`pk groups`: list, describe and delete consumer groups; show, reset and delete their offsets."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pk.cli import group_lag, group_offsets
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    countdown,
    opened,
    quiet_end,
    say,
    table,
)

if TYPE_CHECKING:
    from pk.client.admin import AdminClient, GroupDescription

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.command("reset-offsets")(group_offsets.reset_offsets)
app.command("delete-offsets")(group_offsets.delete_offsets)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="a group id")]


def _admin(bootstrap: str) -> AbstractContextManager[AdminClient]:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


@app.command("list")
def list_groups(
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="Empty, PreparingRebalance, CompletingRebalance or Stable; repeatable",
        ),
    ] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show the groups of all coordinators.  Every broker is asked.

    Example: pk groups list --state Stable
    """
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.list_groups(state or (), timeout_s=timeout_ms / 1000)
    if as_json:
        say({**asdict(found), "complete": found.complete})
        return
    rows = [
        (each.group_id, each.kind, each.state, each.members, each.coordinator_id)
        for each in found.groups
    ]
    table(["group", "kind", "state", "members", "coordinator"], rows)
    if not found.complete:
        missing = [f"partition {each} of __consumer_offsets loads" for each in found.loading]
        missing += [f"no answer from broker {each}" for each in found.silent]
        typer.echo(f"not complete: {'; '.join(missing)}", err=True)


@app.command()
def describe(
    group: GroupArgument,
    lag_time: Annotated[
        bool,
        typer.Option(
            "--lag-time",
            help="also the lag in ms: from the next record to the newest; reads a record of each "
            "partition",
        ),
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show the state of a group, and for each partition its owner, its offset and its lag.

    The end is the last stable offset, and the lag counts the offsets up to it.  Behind it are
    records of open transactions, up to the high watermark.

    Example: pk groups describe billing --lag-time
    """
    left_s = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.describe_group(group, timeout_s=left_s())
        committed = admin.group_offsets(group, timeout_s=left_s())
        owners = {place: each for each in found.members for place in each.partitions}
        places = sorted({*committed, *owners})
        ends = group_offsets.ends(admin, places, left_s())
        marks = group_offsets.ends(admin, places, left_s(), "read_uncommitted")
        lags = {place: _lag(committed.get(place), ends.get(place)) for place in places}
        behind = {place: committed[place] for place, lag in lags.items() if lag}
        waited = group_lag.times_ms(admin, bootstrap, behind, left_s) if lag_time else {}
    rows = [
        {
            "topic": place.topic,
            "partition": place.partition,
            "offset": committed.get(place),
            "end": ends.get(place),
            "lag": lags[place],
            **({"lag_ms": _lag_ms(lags[place], waited.get(place))} if lag_time else {}),
            "high_watermark": marks.get(place),
            "member": owners[place].member_id if place in owners else None,
        }
        for place in places
    ]
    if as_json:
        say({**asdict(found), "offsets": rows})
        return
    _show(found)
    if rows:
        table(list(rows[0]), [list(each.values()) for each in rows])


def _lag(offset: int | None, end: int | None) -> int | None:
    return None if offset is None or end is None else max(0, end - offset)


def _lag_ms(lag: int | None, waited: int | None) -> int | None:
    """0 when all is read; None while it is not known."""
    return 0 if lag == 0 else waited


def _show(found: GroupDescription) -> None:
    if found.kind == "query":
        at = datetime.fromtimestamp(found.committed_ms / 1000, UTC).isoformat(timespec="seconds")
        typer.echo(
            f"group {found.group_id}: the progress of a streaming query as of {at}, coordinator "
            f"{found.coordinator_id}"
        )
        if found.holds_retention:
            typer.echo(
                "holds retention: what it has not processed neither expires nor is compacted"
            )
        for each in found.fallen:
            place = each.partition
            typer.echo(f"the hold of {place.topic}-{place.partition} has fallen: {each.why}")
        return
    typer.echo(
        f"group {found.group_id}: {found.state}, generation {found.generation}, "
        f"coordinator {found.coordinator_id}"
        + (f", assignor {found.assignor}" if found.assignor else "")
    )
    if found.members:
        rows = [
            (
                each.member_id,
                each.group_instance_id,
                each.client_id,
                len(each.partitions),
                each.heard_ago_ms,
            )
            for each in found.members
        ]
        table(["member", "instance", "client", "partitions", "heard ago ms"], rows)


@app.command()
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP…", help="group ids")],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
) -> None:
    """Delete groups without members, with their offsets.

    Example: pk groups delete billing
    """
    left_s = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        for each in groups:
            admin.delete_group(each, timeout_s=left_s())
            typer.echo(f"deleted group {each}")
