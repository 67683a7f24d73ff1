"""`pk reassign`: give partitions other replicas, with Kafka's JSON file.

    {"version": 1, "partitions": [{"topic": "t", "partition": 0, "replicas": [1, 2, 3]}, …]}

The first replica of each is its preferred leader.  `execute` prints the assignment it replaces in
the same format: given to `execute`, it goes back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    countdown,
    error_json,
    opened,
    quiet_end,
    say,
)

if TYPE_CHECKING:
    from pk.client.admin import AdminClient
    from pk.types import TopicPartition

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

FileArgument = Annotated[
    Path, typer.Argument(help="the JSON file of a reassignment", metavar="FILE")
]
#: Partitions in one request to the controller.
CHUNK = 1_000

Assignment = dict["TopicPartition", tuple[int, ...]]


def read_plan(path: Path) -> Assignment:
    """Return the assignment in a file.  Raises `InvalidOption` that names the mistake in it."""
    from pk.types import TopicPartition

    try:
        given = json.loads(path.read_text())
    except OSError as cause:
        raise errors.InvalidOption(f"{path}: {cause.strerror}") from cause
    except ValueError as cause:
        raise errors.InvalidOption(f"{path} is not JSON: {cause}") from cause
    if not isinstance(given, dict) or given.get("version", 1) != 1:
        raise errors.InvalidOption(f'{path}: an object with "version": 1 and "partitions"')
    found: Assignment = {}
    for each in given.get("partitions") or ():
        try:
            place = TopicPartition(str(each["topic"]), int(each["partition"]))
            replicas = tuple(int(member) for member in each["replicas"])
        except (KeyError, TypeError, ValueError) as cause:
            raise errors.InvalidOption(
                f"{path}: {each!r} needs topic, partition and replicas"
            ) from cause
        if any(where != "any" for where in each.get("log_dirs") or ()):
            raise errors.InvalidOption(f"{path}: {place} names log_dirs; pk places replicas itself")
        if place in found:
            raise errors.InvalidOption(f"{path} names {place} twice")
        found[place] = replicas
    if not found:
        raise errors.InvalidOption(f"{path} names no partitions")
    return found


def plan_text(assignment: Assignment) -> str:
    """Return an assignment in the file's format."""
    partitions = [
        {"topic": place.topic, "partition": place.partition, "replicas": list(replicas)}
        for place, replicas in sorted(assignment.items())
    ]
    return json.dumps({"version": 1, "partitions": partitions})


def _admin(bootstrap: str) -> AbstractContextManager[AdminClient]:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


def _alter(
    admin: AdminClient, wanted: dict[Any, Any], seconds: Callable[[], float]
) -> dict[Any, Any]:
    """Reassign the partitions, chunk by chunk; return each partition's error or None."""
    found: dict[Any, Any] = {}
    places = list(wanted)
    for start in range(0, len(places), CHUNK):
        chunk = {place: wanted[place] for place in places[start : start + CHUNK]}
        found.update(admin.alter_partition_reassignments(chunk, timeout_s=seconds()))
    return found


def _report(results: dict[Any, Any], done: str, as_json: bool, **more: Any) -> None:
    """Print one line per partition; the exit code is 1 if any has an error."""
    if as_json:
        listed = [
            {"topic": p.topic, "partition": p.partition, "error": error_json(error)}
            for p, error in results.items()
        ]
        say({"partitions": listed, **more})
    else:
        for place, error in results.items():
            typer.echo(f"{place}: {done if error is None else error.message}")
    if any(error is not None for error in results.values()):
        raise SystemExit(1)


@app.command()
def execute(
    file: FileArgument,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Begin a reassignment; the copying goes on after the command (see verify)."""
    plan, seconds = read_plan(file), countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        before = admin.partition_replicas({place.topic for place in plan}, timeout_s=seconds())
        old = {place: before[place] for place in plan if place in before}
        if not as_json:
            typer.echo(f"to go back, execute this:\n{plan_text(old)}\n")
        results = _alter(admin, dict(plan), seconds)
        _report(results, "begun", as_json, before=json.loads(plan_text(old)))


@app.command()
def verify(
    file: FileArgument,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Say which partitions are where the file wants them; exit code 1 until all are."""
    plan, seconds = read_plan(file), countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        topics = {place.topic for place in plan}
        moving = {
            (each.topic, each.partition): each
            for each in admin.list_partition_reassignments(topics, timeout_s=seconds())
        }
        now = admin.partition_replicas(topics, timeout_s=seconds())
        states: dict[Any, str] = {}
        for place, wanted in plan.items():
            if place in moving:
                states[place] = "in progress"
            else:
                there = now.get(place)
                states[place] = "complete" if there == wanted else f"replicas are {there}"
        if as_json:
            listed = [
                {"topic": p.topic, "partition": p.partition, "state": s} for p, s in states.items()
            ]
            say({"partitions": listed})
        else:
            for place, state in states.items():
                typer.echo(f"{place}: {state}")
    if any(state != "complete" for state in states.values()):
        raise SystemExit(1)


@app.command()
def cancel(
    file: FileArgument,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Go back to the replicas from before, where the reassignment is not complete."""
    plan = read_plan(file)
    with quiet_end(), _admin(bootstrap) as admin:
        results = _alter(admin, dict.fromkeys(plan), countdown(timeout_ms))
        done = {
            place: None if isinstance(error, errors.NoReassignmentInProgress) else error
            for place, error in results.items()
        }
        _report(done, "not being reassigned any more", as_json)
