"""`pk topics offsets` and `pk topics delete-records`: where a topic's records are, and their
deletion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pk import errors
from pk.cli import positions
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
from pk.clock import wall_ms
from pk.types import TopicPartition

if TYPE_CHECKING:
    from pk.client.admin import AdminClient

Topic = Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")]
Partitions = Annotated[
    list[int] | None,
    typer.Option("--partition", min=0, help="only this partition; repeatable"),
]


def offsets(
    topic: Topic,
    at: Annotated[str, typer.Option(help=positions.EXAMPLES)] = "end",
    partition: Partitions = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show the offset of each partition at a position: the end, a time, and so on.

    The end is the last stable offset: readers of read_committed get no record behind it.

    Example: pk topics offsets flights --at 2026-11-27T12:00:00Z
    """
    from pk.client.admin import AdminClient

    position = positions.parse(at, "--at", wall_ms())
    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        found = _resolved(admin, topic, position, partition, timeout_ms, "read_committed")
        rows = [(place.partition, offset) for place, offset in sorted(found.items())]
        if as_json:
            say({"topic": topic, "offsets": [{"partition": p, "offset": o} for p, o in rows]})
            return
        table(["partition", "offset"], rows)


def delete_records(
    topic: Topic,
    before: Annotated[
        str, typer.Option(help=f"delete what is before this position: {positions.EXAMPLES}")
    ],
    partition: Partitions = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="delete; without it, show the offsets only")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Delete the oldest records of a topic, in the log and in the table, for good.

    Example: pk topics delete-records flights --before 7d --execute
    """
    from pk.client.admin import AdminClient

    position = positions.parse(before, "--before", wall_ms())
    left_s = countdown(timeout_ms)
    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        wanted = _resolved(admin, topic, position, partition, timeout_ms, "read_uncommitted")
        first = {
            place: at[0]
            for place, at in admin.list_offsets(
                dict.fromkeys(wanted, "earliest"), timeout_s=left_s()
            ).items()
        }
        done: Mapping[TopicPartition, int] = wanted
        if execute:
            done = admin.delete_records(wanted, timeout_s=left_s())
        rows = [(p.partition, first[p], offset) for p, offset in sorted(done.items())]
        if as_json:
            listed = [{"partition": p, "before": b, "log_start": o} for p, b, o in rows]
            say({"topic": topic, "executed": execute, "partitions": listed})
            return
        table(["partition", "log_start", "new log_start"], rows)
        if not execute:
            typer.echo("nothing was deleted; --execute deletes the records below", err=True)


def _resolved(
    admin: AdminClient,
    topic: str,
    position: positions.TopicPosition,
    partitions: Sequence[int] | None,
    timeout_ms: int,
    isolation: str,
) -> Mapping[TopicPartition, int]:
    left_s = countdown(timeout_ms)
    places = list(admin.offsets(topic, "earliest", timeout_s=left_s()))
    if partitions:
        unknown = sorted(set(partitions) - {place.partition for place in places})
        if unknown:
            raise errors.UnknownTopicOrPartition(
                f"{topic} has no partition {unknown[0]}: there are {len(places)}"
            )
        places = [place for place in places if place.partition in partitions]

    def listed(spec: str | int) -> dict[TopicPartition, int]:
        found = admin.list_offsets(
            dict.fromkeys(places, spec), isolation_level=isolation, timeout_s=left_s()
        )
        return {place: at[0] for place, at in found.items()}

    return positions.resolved(position, listed("earliest"), listed("latest"), listed)
