"""`pk groups`: list, describe and delete consumer groups, reset their offsets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
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
    from pk.types import TopicPartition

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

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
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show the state of a group, and for each partition its owner, its offset and its lag.

    The lag is the number of offsets up to the last stable offset.

    Example: pk groups describe billing
    """
    left_s = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.describe_group(group, timeout_s=left_s())
        committed = admin.group_offsets(group, timeout_s=left_s())
        owners = {place: each for each in found.members for place in each.partitions}
        places = sorted({*committed, *owners})
        ends = _ends(admin, places, left_s())
    rows = [
        {
            "topic": place.topic,
            "partition": place.partition,
            "offset": committed.get(place),
            "end": ends.get(place),
            "lag": _lag(committed.get(place), ends.get(place)),
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


def _ends(
    admin: AdminClient, places: list[TopicPartition], timeout_s: float
) -> dict[TopicPartition, int]:
    """Return the last stable offsets; partitions of deleted topics have none."""
    existing = {each.name for each in admin.list_topics(timeout_s=timeout_s)}
    wanted: Mapping[TopicPartition, str | int] = {
        place: "latest" for place in places if place.topic in existing
    }
    found = admin.list_offsets(wanted, timeout_s=timeout_s) if wanted else {}
    return {place: at[0] for place, at in found.items()}


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


@app.command("reset-offsets")
def reset_offsets(
    group: GroupArgument,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", help="TOPIC or TOPIC:PARTITION,…; repeatable"),
    ] = None,
    all_topics: Annotated[
        bool, typer.Option("--all-topics", help="every partition with a committed offset")
    ] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0)] = None,
    shift_by: Annotated[
        int | None, typer.Option("--shift-by", help="forward, or back if negative")
    ] = None,
    to_time_ms: Annotated[
        int | None, typer.Option("--to-time-ms", min=0, help="the first record since this time")
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="commit the offsets; without it, show them only")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Set the committed offsets of a group without members.

    Offsets are limited to the range that the partition has.

    Example: pk groups reset-offsets billing --topic flights --to-earliest --execute
    """
    left_s = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        committed = admin.group_offsets(group, timeout_s=left_s())
        places = _chosen(admin, topic or [], committed, all_topics=all_topics, left_s=left_s())
        asked: Mapping[TopicPartition, str | int] = dict.fromkeys(places, "earliest")
        first = {p: at[0] for p, at in admin.list_offsets(asked, timeout_s=left_s()).items()}
        last = _ends(admin, places, left_s())
        spec = _spec(to_earliest, to_latest, to_offset, shift_by, to_time_ms)
        wanted = dict(spec(places, first, last, committed))
        if to_time_ms is not None:
            times: Mapping[TopicPartition, str | int] = dict.fromkeys(places, to_time_ms)
            listed = admin.list_offsets(times, timeout_s=left_s())
            wanted = {p: last[p] if at[0] < 0 else at[0] for p, at in listed.items()}
        new = {place: max(first[place], min(wanted[place], last[place])) for place in places}
        if execute:
            admin.alter_group_offsets(group, new, timeout_s=left_s())
    rows = [
        {
            "topic": place.topic,
            "partition": place.partition,
            "before": committed.get(place),
            "offset": new[place],
        }
        for place in places
    ]
    if as_json:
        say({"group": group, "executed": execute, "offsets": rows})
        return
    table(["topic", "partition", "before", "offset"], [list(each.values()) for each in rows])
    if not execute:
        typer.echo("nothing was changed; --execute commits these offsets", err=True)


def _spec(
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    shift_by: int | None,
    to_time_ms: int | None,
) -> Any:
    """Return the function that computes the new offsets.  Raises `InvalidOption` unless exactly one
    target is given.
    """
    given = [to_earliest, to_latest, to_offset is not None, shift_by is not None,
             to_time_ms is not None]  # fmt: skip
    if sum(given) != 1:
        raise errors.InvalidOption(
            "give one of --to-earliest, --to-latest, --to-offset, --shift-by, --to-time-ms"
        )

    def compute(
        places: list[TopicPartition],
        first: Mapping[TopicPartition, int],
        last: Mapping[TopicPartition, int],
        committed: Mapping[TopicPartition, int],
    ) -> dict[TopicPartition, int]:
        if to_earliest:
            return {place: first[place] for place in places}
        if to_offset is not None:
            return dict.fromkeys(places, to_offset)
        if shift_by is not None:
            return {place: committed.get(place, first[place]) + shift_by for place in places}
        return {place: last[place] for place in places}

    return compute


def _chosen(
    admin: AdminClient,
    topics: list[str],
    committed: Mapping[TopicPartition, int],
    *,
    all_topics: bool,
    left_s: float,
) -> list[TopicPartition]:
    """Return the partitions to reset, sorted.  Raises `InvalidOption` if none is named."""
    from pk.types import TopicPartition

    if all_topics == bool(topics):
        raise errors.InvalidOption("give --topic or --all-topics")
    if all_topics:
        existing = {each.name for each in admin.list_topics(timeout_s=left_s)}
        return sorted(place for place in committed if place.topic in existing)
    found: set[TopicPartition] = set()
    for each in topics:
        name, _, numbers = each.partition(":")
        if numbers:
            if not all(part.isdigit() for part in numbers.split(",")):
                raise errors.InvalidOption(f"--topic takes TOPIC:PARTITION,…, not {each!r}")
            found |= {TopicPartition(name, int(part)) for part in numbers.split(",")}
        else:
            found |= set(admin.offsets(name, "earliest", timeout_s=left_s))
    return sorted(found)
