"""`pk log list | adopt | discard`: the partition directories of a stopped broker (rule L15)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pk.cli.common import AsJson, quiet_end, say, size_text, table
from pk.cli.log_ranges import findings
from pk.log import adoption
from pk.log.files import RealStorage
from pk.log.identity import ADOPTED
from pk.server.node.format import new_id

Home = Annotated[
    Path, typer.Argument(metavar="DIR", help="a data directory of the server: it holds pk.json")
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="the partition's directory in DIR/topics")
]
TopicIdOption = Annotated[
    str, typer.Option("--topic-id", help="whose it is, where nothing on the disk says so")
]
Yes = Annotated[bool, typer.Option("--yes", help="do it; without it the plan is shown")]

#: A status that only `pk log list` shows: the log's identity is intact, some ranges are damaged.
DAMAGED = "damaged"


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command("list")(show)
    app.command()(adopt)
    app.command()(discard)


@contextmanager
def locked(home: Path) -> Iterator[RealStorage]:
    """Lock the data directory during the block.

    Raises `DirectoryLocked` while a broker or another command holds the lock.
    """
    storage = RealStorage(str(home.absolute()))
    adoption.opened(storage)
    storage.lock()
    try:
        yield storage
    finally:
        storage.unlock()


def show(home: Home, as_json: AsJson = False) -> None:
    """List the logs of a data directory, and those that are missing; reads every batch.

    `damaged`: a log whose identity is intact and that has damaged ranges; pk log repair shows them.

    Example: pk log list /tmp/pk
    """
    with quiet_end():
        storage = RealStorage(str(home.absolute()))
        rows = [_with_ranges(storage, each) for each in adoption.survey(storage)]
        if as_json:
            say(rows)
            return
        columns = ["name", "status", "topic_id", "segments", "bytes", "damaged_ranges", "problem"]
        cells = [{**row, "bytes": size_text(row["bytes"])} for row in rows]
        heads = [{"topic_id": "topic id", "bytes": "size"}.get(name, name) for name in columns]
        heads[5] = "damaged ranges"
        table(heads, [[row[name] for name in columns] for row in cells])


def _with_ranges(storage: RealStorage, found: adoption.LogDirectory) -> dict[str, Any]:
    """Return `found` with the number of its damaged ranges.

    The number is 0 if the identity is not intact: the checkpoints that record where a log ended
    refer to it by its identity.
    """
    row = {**found._asdict(), "damaged_ranges": 0}
    if found.status in (adoption.OK, ADOPTED):
        ranges = findings(storage, found.name)
        row["damaged_ranges"] = len(ranges)
        if ranges:
            first = ranges[0].damage
            row["problem"] = f"offsets {first} are damaged: {first.problem}"
            if found.status == adoption.OK:
                row["status"] = DAMAGED
    return row


def adopt(
    home: Home,
    name: Name,
    topic_id: TopicIdOption = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take the segments in DIR/topics/NAME for the log of that partition.

    The server is stopped. At its next start the replica leaves the in-sync set before it takes part
    again: its log may be an older one than the cluster counts on.

    Example: pk log adopt /tmp/pk flights-0 --yes
    """
    with quiet_end(), locked(home) as storage:
        wanted = adoption.to_adopt(storage, name, topic_id)
        found = adoption.of_name(storage, name, "")
        plan = {"action": "adopt", **_plan(storage, found), "topic_id": wanted.topic_id}
        if _confirmed(plan, yes, as_json):
            adoption.adopt(storage, name, wanted)
            plan["done"] = True
        _print_plan(plan, as_json)


def discard(
    home: Home, name: Name, topic_id: TopicIdOption = "", yes: Yes = False, as_json: AsJson = False
) -> None:
    """Give up the log in DIR/topics/NAME, or one that is missing there.

    The server is stopped. At its next start the replica leaves the in-sync set; then its log begins
    empty and is filled from the leader. The records of an only replica are lost, and its offsets
    are given again.

    Example: pk log discard /tmp/pk flights-0 --yes
    """
    with quiet_end(), locked(home) as storage:
        found = adoption.of_name(storage, name, topic_id)
        plan = {"action": "discard", **_plan(storage, found)}
        if _confirmed(plan, yes, as_json):
            plan["removed_at_next_start"] = adoption.discard(storage, found, new_id())
            plan["done"] = True
        _print_plan(plan, as_json)


def _plan(storage: RealStorage, found: adoption.LogDirectory) -> dict[str, Any]:
    return {
        "directory": storage.root,
        "name": found.name,
        "status": found.status,
        "topic_id": found.topic_id,
        **adoption.extent(storage, found.name)._asdict(),
        "done": False,
    }


def _confirmed(plan: dict[str, Any], yes: bool, as_json: bool) -> bool:
    if yes or as_json or not sys.stdin.isatty():
        return yes
    _print_plan(plan, as_json)
    return typer.confirm(f"{plan['action']} {plan['name']}?")


def _print_plan(plan: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say(plan)
        return
    what = (
        f"{plan['directory']}/topics/{plan['name']} ({plan['status']}, topic id "
        f"{plan['topic_id'] or 'unknown'}): {plan['segments']} segments, "
        f"{size_text(plan['bytes'])}, offsets [{plan['first_offset']}, {plan['end_offset']}), "
        f"{plan['damaged']} damaged batches"
    )
    done = {"adopt": "adopted", "discard": "discarded"}[plan["action"]]
    if plan["done"]:
        typer.echo(f"{done} {what}; start the server")
    else:
        typer.echo(f"would {plan['action']} {what}; nothing was changed, --yes does it")
