"""`pk reassign`: give partitions other replicas, with Kafka's JSON file.

    {"version": 1, "partitions": [
        {"topic": "t", "topic_id": "…", "partition": 0, "replicas": [1, 2, 3]}, …]}

The first replica of a partition is its preferred leader.  `current` prints the present
assignment in this format, as the beginning of a plan.  The topic id keeps a plan from moving
another topic that was created under the same name since.  "expected" lists the replicas for which
the plan was made; it may be left out.  `execute` prints the assignment that it replaces in the same
format; `execute` of that output restores the assignment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="also if fewer replicas stay in sync than min_insync_replicas asks for: the failure of"
        " one more disk may then lose acknowledged records",
    ),
]
#: Partitions in one request to the controller.
CHUNK = 1_000

Assignment = dict["TopicPartition", tuple[int, ...]]


@dataclass(slots=True)
class ReassignmentPlan:
    """The file of a reassignment.

    assignment: the new replicas of each partition, the preferred leader first.
    topic_ids: the id of each topic when the plan was made (rule R10).
    expected: the replicas of partitions when the plan was made, if the file names them.
    """

    assignment: Assignment = field(default_factory=dict)
    topic_ids: dict[str, str] = field(default_factory=dict)
    expected: Assignment = field(default_factory=dict)

    def text(self) -> str:
        """Return the plan in the file's format."""
        partitions = []
        for place, replicas in sorted(self.assignment.items()):
            entry = {
                "topic": place.topic,
                "topic_id": self.topic_ids.get(place.topic, ""),
                "partition": place.partition,
                "replicas": list(replicas),
            }
            if place in self.expected:
                entry["expected"] = list(self.expected[place])
            partitions.append(entry)
        return json.dumps({"version": 1, "partitions": partitions})


def read_plan(path: Path) -> ReassignmentPlan:
    """Return the plan in a file.  Raises `InvalidOption` that names the mistake in it."""
    try:
        given = json.loads(path.read_text())
    except OSError as cause:
        raise errors.InvalidOption(f"{path}: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:
        raise errors.InvalidOption(f"{path} is not JSON: {cause}") from cause
    if not isinstance(given, dict) or given.get("version", 1) != 1:
        raise errors.InvalidOption(f'{path}: an object with "version": 1 and "partitions"')
    plan = ReassignmentPlan()
    for each in given.get("partitions") or ():
        _read_entry(path, plan, each)
    if not plan.assignment:
        raise errors.InvalidOption(f"{path} names no partitions")
    return plan


def _read_entry(path: Path, plan: ReassignmentPlan, each: Any) -> None:
    """Add one partition of the file to `plan`."""
    from pk.types import TopicPartition

    try:
        place = TopicPartition(str(each["topic"]), int(each["partition"]))
        replicas = tuple(int(member) for member in each["replicas"])
        expected = tuple(int(member) for member in each.get("expected") or ())
        topic_id = str(each.get("topic_id") or "")
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise errors.InvalidOption(
            f"{path}: {each!r} needs topic, topic_id, partition and replicas"
        ) from cause
    if not topic_id:
        raise errors.InvalidOption(
            f"{path}: {place} has no topic_id; begin with the output of "
            f"`pk reassign current {place.topic}`, or add the id that it shows"
        )
    if any(where != "any" for where in each.get("log_dirs") or ()):
        raise errors.InvalidOption(f"{path}: {place} names log_dirs; pk places replicas itself")
    if place in plan.assignment:
        raise errors.InvalidOption(f"{path} names {place} twice")
    if plan.topic_ids.setdefault(place.topic, topic_id) != topic_id:
        raise errors.InvalidOption(f"{path} names two ids of topic {place.topic}")
    plan.assignment[place] = replicas
    if expected:
        plan.expected[place] = expected


def _admin(bootstrap: str) -> AbstractContextManager[AdminClient]:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


def _alter(
    admin: AdminClient,
    plan: ReassignmentPlan,
    wanted: Mapping[TopicPartition, Iterable[int] | None],
    seconds: Callable[[], float],
    *,
    force: bool,
) -> dict[Any, Any]:
    """Reassign the partitions, chunk by chunk; return each partition's error or None."""
    found: dict[Any, Any] = {}
    places = list(wanted)
    for start in range(0, len(places), CHUNK):
        chunk = {place: wanted[place] for place in places[start : start + CHUNK]}
        found |= admin.alter_partition_reassignments(
            chunk,
            topic_ids=plan.topic_ids,
            expected={place: plan.expected[place] for place in chunk if place in plan.expected},
            force=force,
            timeout_s=seconds(),
        )
    return found


def _report(
    results: dict[Any, Any], done: str, as_json: bool, *, aside: bool = False, **more: Any
) -> None:
    """Print one line per partition; the exit code is 1 if any has an error.

    aside: print to standard error, because standard output is a plan
    """
    if as_json:
        listed = [
            {"topic": p.topic, "partition": p.partition, "error": error_json(error)}
            for p, error in results.items()
        ]
        say({"partitions": listed, **more})
    else:
        for place, error in results.items():
            said = done if error is None else error.message.removeprefix(f"{place}: ")
            typer.echo(f"{place}: {said}", err=aside)
    if any(error is not None for error in results.values()):
        raise SystemExit(1)


@app.command()
def current(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC…", help="topics to list")],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
) -> None:
    """Print the present replicas of topics as a plan: edit `replicas`, then execute it.

    Example: pk reassign current flights > moves.json
    """
    seconds = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        found = _present(admin, set(topics), seconds)
        missing = sorted(set(topics) - found.topic_ids.keys())
        if missing:
            raise errors.UnknownTopicOrPartition(f"topic {missing[0]} does not exist")
        found.expected = dict(found.assignment)
        typer.echo(found.text())


def _present(
    admin: AdminClient, topics: set[str], seconds: Callable[[], float]
) -> ReassignmentPlan:
    """Return the replicas and ids that these topics have now, without those that a reassignment
    is adding: they may have no records yet.
    """
    from pk.types import TopicPartition

    replicas = dict(admin.partition_replicas(topics, timeout_s=seconds()))
    for each in admin.list_partition_reassignments(topics, timeout_s=seconds()):
        place = TopicPartition(each.topic, each.partition)
        replicas[place] = tuple(one for one in each.replicas if one not in each.adding)
    return ReassignmentPlan(replicas, admin.topic_ids(topics, timeout_s=seconds()))


@app.command()
def execute(
    file: FileArgument,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    force: ForceOption = False,
    as_json: AsJson = False,
) -> None:
    """Begin a reassignment; the copying goes on after the command (see verify).

    Standard output is the plan that leads back: the replicas that the partitions have now, without
    those that an earlier reassignment is still adding.

    Example: pk reassign execute moves.json
    """
    plan, seconds = read_plan(file), countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        before = _present(admin, set(plan.topic_ids), seconds)
        kept = {p: before.assignment[p] for p in plan.assignment if p in before.assignment}
        old = ReassignmentPlan(kept, before.topic_ids).text()
        if not as_json:
            typer.echo("to go back, execute the plan on standard output", err=True)
            typer.echo(old)
        results = _alter(admin, plan, dict(plan.assignment), seconds, force=force)
        _report(results, "begun", as_json, aside=True, before=json.loads(old))


@app.command()
def verify(
    file: FileArgument,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Say which partitions are where the file wants them; exit code 1 until all are.

    Example: pk reassign verify moves.json
    """
    plan, seconds = read_plan(file), countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        topics = set(plan.topic_ids)
        moving = {
            (each.topic, each.partition): each
            for each in admin.list_partition_reassignments(topics, timeout_s=seconds())
        }
        now = _present(admin, topics, seconds)
        states: dict[Any, str] = {}
        for place, wanted in plan.assignment.items():
            if now.topic_ids.get(place.topic) not in (None, plan.topic_ids[place.topic]):
                states[place] = "the topic was deleted and created again"
            elif place in moving:
                states[place] = "in progress"
            else:
                there = now.assignment.get(place)
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
    force: ForceOption = False,
    as_json: AsJson = False,
) -> None:
    """Return to the former replicas where the reassignment is not complete.

    Their order may be another one, and with it the preferred leader.

    Example: pk reassign cancel moves.json
    """
    plan, seconds = read_plan(file), countdown(timeout_ms)
    plan.expected = {}
    with quiet_end(), _admin(bootstrap) as admin:
        results = _alter(admin, plan, dict.fromkeys(plan.assignment), seconds, force=force)
        done = {
            place: None if isinstance(error, errors.NoReassignmentInProgress) else error
            for place, error in results.items()
        }
        _report(done, "not being reassigned any more", as_json)
