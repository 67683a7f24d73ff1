"""`pk groups reset-offsets` and `pk groups delete-offsets`: the committed offsets of a group.

A file of offsets has Kafka's form: one line TOPIC,PARTITION,OFFSET for each partition.
"""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from pk import errors, topic_names
from pk.cli import positions
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    countdown,
    duration,
    opened,
    quiet_end,
    say,
    table,
)
from pk.clock import wall_ms
from pk.types import TopicPartition

if TYPE_CHECKING:
    from pk.client.admin import AdminClient

#: A file of offsets is refused above this number of lines.
LINES_MAX = 1_000_000
_OFFSET_MAX = 2**63 - 1
_AGO_MAX_MS = 100 * 365 * 86_400_000

Group = Annotated[str, typer.Argument(metavar="GROUP", help="a group id")]
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", help="TOPIC or TOPIC:PARTITION,…; repeatable"),
]
AllTopics = Annotated[
    bool, typer.Option("--all-topics", help="every partition with a committed offset")
]
ToDatetime = Annotated[
    str | None,
    typer.Option(help="the first record since this time: 2026-11-27T12:00:00Z, @MILLISECONDS"),
]
ByDuration = Annotated[
    int | None,
    typer.Option(
        "--by-duration",
        parser=duration(0, _AGO_MAX_MS),
        metavar="DURATION",
        help="the first record since so long ago: 90s, 12h, 1d",
    ),
]
FromFile = Annotated[
    Path | None,
    typer.Option("--from-file", help="lines TOPIC,PARTITION,OFFSET, as --export prints them"),
]


class Target(NamedTuple):
    """Where the offsets go: exactly one option of `reset-offsets`."""

    to_earliest: bool
    to_latest: bool
    to_current: bool
    to_offset: int | None
    shift_by: int | None
    to_time_ms: int | None
    from_file: Mapping[TopicPartition, int] | None


def reset_offsets(
    group: Group,
    topic: Topics = None,
    all_topics: AllTopics = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest")] = False,
    to_current: Annotated[
        bool, typer.Option("--to-current", help="the committed offsets; with --export, a backup")
    ] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0)] = None,
    shift_by: Annotated[
        int | None, typer.Option("--shift-by", help="forward, or back if negative")
    ] = None,
    to_datetime: ToDatetime = None,
    by_duration: ByDuration = None,
    to_time_ms: Annotated[
        int | None, typer.Option("--to-time-ms", min=0, help="the first record since this time")
    ] = None,
    from_file: FromFile = None,
    export: Annotated[
        bool, typer.Option("--export", help="print lines for --from-file instead of a table")
    ] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="commit the offsets; without it, show them only")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Set the committed offsets of a group without members.

    Offsets are limited to the range that the partition has.  With --from-file, the file names the
    partitions, and --topic selects among them.

    Examples: pk groups reset-offsets billing --topic flights --to-earliest --execute

              pk groups reset-offsets billing --all-topics --to-current --export

              pk groups reset-offsets billing --from-file offsets.csv --execute
    """
    if export and as_json:
        raise errors.InvalidOption("give --export or --json", option="export")
    given = [to_datetime, by_duration, to_time_ms, to_offset, shift_by, from_file]
    _check_one([to_earliest, to_latest, to_current, *(each is not None for each in given)])
    target = Target(
        to_earliest,
        to_latest,
        to_current,
        to_offset,
        shift_by,
        _since_ms(to_datetime, by_duration) if to_time_ms is None else to_time_ms,
        None if from_file is None else file_offsets(from_file),
    )
    left_s = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        committed = admin.group_offsets(group, timeout_s=left_s())
        if target.from_file is not None:
            places = _of_file(admin, target.from_file, topic or [], all_topics, left_s)
        else:
            places = _chosen(admin, topic or [], committed, all_topics=all_topics, left_s=left_s())
        new = _targets(admin, target, places, committed, left_s)
        if execute and new:
            admin.alter_group_offsets(group, new, timeout_s=left_s())
    _show(group, new, committed, executed=execute, as_json=as_json, export=export)


def _admin(bootstrap: str) -> contextlib.AbstractContextManager[AdminClient]:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


def _since_ms(to_datetime: str | None, by_duration: int | None) -> int | None:
    """Return a time in ms since 1970, or None.  Raises `InvalidOption`."""
    if to_datetime is None:
        return None if by_duration is None else max(0, wall_ms() - by_duration)
    try:
        return positions.time_ms(to_datetime, wall_ms())
    except ValueError:
        raise errors.InvalidOption(
            f"--to-datetime is 2026-11-27T12:00:00Z, with a zone, or @MILLISECONDS; not "
            f"{to_datetime!r}",
            option="to_datetime",
        ) from None


def _check_one(given: list[bool]) -> None:
    """Raise `InvalidOption` unless exactly one target is given."""
    if sum(given) != 1:
        raise errors.InvalidOption(
            "give one of --to-earliest, --to-latest, --to-current, --to-offset, --shift-by, "
            "--to-datetime, --by-duration, --to-time-ms, --from-file"
        )


def _targets(
    admin: AdminClient,
    target: Target,
    places: list[TopicPartition],
    committed: Mapping[TopicPartition, int],
    left_s: Callable[[], float],
) -> dict[TopicPartition, int]:
    """Return the new offset of each partition, within the range that the partition has."""
    asked: Mapping[TopicPartition, str | int] = dict.fromkeys(places, "earliest")
    if not asked:
        return {}
    first = {place: at[0] for place, at in admin.list_offsets(asked, timeout_s=left_s()).items()}
    last = ends(admin, places, left_s())
    wanted: Mapping[TopicPartition, int]
    if target.to_time_ms is not None:
        times: Mapping[TopicPartition, str | int] = dict.fromkeys(places, target.to_time_ms)
        listed = admin.list_offsets(times, timeout_s=left_s())
        wanted = {place: last[place] if at[0] < 0 else at[0] for place, at in listed.items()}
    elif target.from_file is not None:
        wanted = target.from_file
    elif target.to_offset is not None:
        wanted = dict.fromkeys(places, target.to_offset)
    elif target.shift_by is not None:
        wanted = {place: committed.get(place, first[place]) + target.shift_by for place in places}
    elif target.to_current:
        wanted = {place: committed.get(place, last[place]) for place in places}
    else:
        wanted = first if target.to_earliest else last
    return {place: max(first[place], min(wanted[place], last[place])) for place in places}


def _show(
    group: str,
    new: Mapping[TopicPartition, int],
    committed: Mapping[TopicPartition, int],
    *,
    executed: bool,
    as_json: bool,
    export: bool,
) -> None:
    if export:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows((place.topic, place.partition, offset) for place, offset in new.items())
    else:
        rows = [
            {"topic": place.topic, "partition": place.partition, "before": committed.get(place),
             "offset": offset}
            for place, offset in new.items()
        ]  # fmt: skip
        if as_json:
            say({"group": group, "executed": executed, "offsets": rows})
            return
        table(["topic", "partition", "before", "offset"], [list(each.values()) for each in rows])
    if not executed:
        typer.echo("nothing was changed; --execute commits these offsets", err=True)


def delete_offsets(
    group: Group,
    topic: Topics = None,
    all_topics: AllTopics = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="delete the offsets; without it, show them only")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Delete committed offsets of topics to which no member of the group subscribes.

    A member that subscribes to the topic later starts where its auto_offset_reset says.

    Example: pk groups delete-offsets billing --topic flights:0,1 --execute
    """
    left_s = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        admin.describe_group(group, timeout_s=left_s())  # raises for an unknown group
        committed = admin.group_offsets(group, timeout_s=left_s())
        chosen = _chosen(admin, topic or [], committed, all_topics=all_topics, left_s=left_s())
        places = [place for place in chosen if place in committed]
        if execute and places:
            admin.delete_group_offsets(group, places, timeout_s=left_s())
    rows = [
        {"topic": place.topic, "partition": place.partition, "offset": committed[place]}
        for place in places
    ]
    if as_json:
        say({"group": group, "executed": execute, "offsets": rows})
        return
    table(["topic", "partition", "offset"], [list(each.values()) for each in rows])
    if not execute:
        typer.echo("nothing was changed; --execute deletes these offsets", err=True)


def ends(
    admin: AdminClient,
    places: Iterable[TopicPartition],
    timeout_s: float,
    isolation_level: str = "read_committed",
) -> dict[TopicPartition, int]:
    """Return the last stable offsets, or the high watermarks for read_uncommitted.

    Partitions of deleted topics have none.
    """
    existing = {each.name for each in admin.list_topics(timeout_s=timeout_s)}
    wanted: Mapping[TopicPartition, str | int] = {
        place: "latest" for place in places if place.topic in existing
    }
    if not wanted:
        return {}
    found = admin.list_offsets(wanted, isolation_level=isolation_level, timeout_s=timeout_s)
    return {place: at[0] for place, at in found.items()}


def file_offsets(path: Path) -> dict[TopicPartition, int]:
    """Return the offsets that a file names.  Raises `InvalidOption` with the line at fault."""
    found: dict[TopicPartition, int] = {}
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            for number, row in enumerate(csv.reader(lines, strict=True), 1):
                if number > LINES_MAX:
                    raise errors.InvalidOption(f"{path} has more than {LINES_MAX} lines")
                if row:
                    place, offset = _parsed(row, f"{path}, line {number}")
                    if place in found:
                        raise errors.InvalidOption(
                            f"{path}, line {number}: {place.topic}-{place.partition} is there twice"
                        )
                    found[place] = offset
    except OSError as cause:
        raise errors.InvalidOption(f"cannot read {path}: {cause.strerror}") from cause
    except (csv.Error, UnicodeDecodeError) as cause:
        raise errors.InvalidOption(f"{path} has no lines TOPIC,PARTITION,OFFSET: {cause}") from None
    if not found:
        raise errors.InvalidOption(f"{path} names no partition: write TOPIC,PARTITION,OFFSET")
    return found


def _parsed(row: list[str], where: str) -> tuple[TopicPartition, int]:
    words = [each.strip() for each in row]
    numbers = words[1:]
    if len(words) != 3 or not all(each.isascii() and each.isdigit() for each in numbers):
        raise errors.InvalidOption(f"{where}: write TOPIC,PARTITION,OFFSET, not {','.join(row)!r}")
    partition, offset = (int(each[:20]) for each in numbers)
    if partition > 2**31 - 1 or offset > _OFFSET_MAX:
        raise errors.InvalidOption(f"{where}: a number is too large in {','.join(row)!r}")
    if problem := topic_names.what_is_wrong(words[0]):
        raise errors.InvalidOption(f"{where}: the topic {words[0]!r} {problem}")
    return TopicPartition(words[0], partition), offset


def _of_file(
    admin: AdminClient,
    wanted: Mapping[TopicPartition, int],
    topics: list[str],
    all_topics: bool,
    left_s: Callable[[], float],
) -> list[TopicPartition]:
    """Return the partitions of a file that --topic selects.  Raises `UnknownTopicOrPartition` if
    one of them does not exist: then nothing is changed.
    """
    if all_topics:
        raise errors.InvalidOption("--from-file names the partitions: leave --all-topics out")
    selected = set(wanted)
    if topics:
        selected &= set(_named(admin, topics, left_s()))
    counts = {each.name: each.partitions for each in admin.list_topics(timeout_s=left_s())}
    for place in sorted(selected):
        if place.partition >= counts.get(place.topic, 0):
            raise errors.UnknownTopicOrPartition(
                f"the file names {place.topic}-{place.partition}, which does not exist"
            )
    return sorted(selected)


def _chosen(
    admin: AdminClient,
    topics: list[str],
    committed: Mapping[TopicPartition, int],
    *,
    all_topics: bool,
    left_s: float,
) -> list[TopicPartition]:
    """Return the partitions to change, sorted.  Raises `InvalidOption` if none is named."""
    if all_topics == bool(topics):
        raise errors.InvalidOption("give --topic or --all-topics")
    if all_topics:
        existing = {each.name for each in admin.list_topics(timeout_s=left_s)}
        return sorted(place for place in committed if place.topic in existing)
    return sorted(_named(admin, topics, left_s))


def _named(admin: AdminClient, topics: list[str], left_s: float) -> set[TopicPartition]:
    found: set[TopicPartition] = set()
    for each in topics:
        name, _, numbers = each.partition(":")
        if numbers:
            if not all(part.isdigit() for part in numbers.split(",")):
                raise errors.InvalidOption(f"--topic takes TOPIC:PARTITION,…, not {each!r}")
            found |= {TopicPartition(name, int(part)) for part in numbers.split(",")}
        else:
            found |= set(admin.offsets(name, "earliest", timeout_s=left_s))
    return found
