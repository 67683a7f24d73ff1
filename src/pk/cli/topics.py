"""`pk topics`: create, list, describe, alter and delete topics; offsets, deletion of records."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli import topic_description, topic_offsets
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    Configs,
    TimeoutMs,
    countdown,
    error_json,
    opened,
    pairs,
    quiet_end,
    say,
    table,
)
from pk.cli.topic_description import PartitionStates

if TYPE_CHECKING:
    from pk.client.admin import PartitionDescription, TopicResult

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Names = Annotated[list[str], typer.Argument(help="topic names", metavar="TOPIC…")]

ReplicaAssignmentOption = Annotated[
    str | None,
    typer.Option(
        help="brokers of each new partition, as kafka-topics takes them: 1:2:3,2:3:1 gives two "
        "partitions three replicas each; the first leads",
        metavar="B:B,B:B…",
    ),
]

#: The note on a topic that existed before `create --if-not-exists`.
EXISTS = "already exists (unchanged)"
#: The note on a topic that did not exist before `delete --if-exists`.
ABSENT = "does not exist (unchanged)"


def _admin(bootstrap: str) -> Any:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


def _report(results: list[TopicResult], done: str, as_json: bool) -> None:
    """Print one line per topic; then the first error decides the exit code."""
    if as_json:
        failed = [result.error for result in results if result.error is not None]
        if failed and len(results) == 1:
            raise failed[0]
        say(
            {
                "topics": [
                    {
                        "name": r.name,
                        "topic_id": r.topic_id,
                        "note": r.note,
                        "error": error_json(r.error),
                    }
                    for r in results
                ]
            }
        )
        if failed:
            raise SystemExit(1)
        return
    for result in results:
        if result.error is None and result.note in (EXISTS, ABSENT):
            typer.echo(f"topic {result.name} {result.note}")
        elif result.error is None:
            typer.echo(f"{done} {result.name}" + (f": {result.note}" if result.note else ""))
    for result in results:
        if result.error is not None:
            raise result.error


@app.command()
def create(
    names: Names,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="default: the server's default_num_partitions")
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option(min=1, help="default: the server's default_replication_factor")
    ] = None,
    replica_assignment: ReplicaAssignmentOption = None,
    config: Configs = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="a topic that is there already is fine")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Create topics.

    Example: pk topics create flights --partitions 4 --config retention.ms=7d
    """
    from pk.client.admin import NewTopic

    configs = pairs(config, "--config")
    placed = _assignment(replica_assignment)
    if placed and (partitions or replication_factor):
        raise errors.InvalidOption(
            "--replica-assignment says how many partitions and replicas there are: "
            "leave out --partitions and --replication-factor"
        )
    with quiet_end(), _admin(bootstrap) as admin:
        factor = replication_factor or 0
        new = [NewTopic(name, partitions or 0, configs, factor, placed) for name in names]
        results = admin.create_topics(new, timeout_s=timeout_ms / 1000)
        if if_not_exists:
            results = [_forgiven(result) for result in results]
        _report(results, "created", as_json)


def _assignment(text: str | None) -> list[list[int]]:
    """Return the broker ids for each partition of kafka-topics' notation "1:2,2:3"."""
    if text is None:
        return []
    try:
        return [[int(one) for one in part.split(":")] for part in text.split(",")]
    except ValueError:
        raise errors.InvalidOption(
            f"--replica-assignment {text[:100]!r}: write broker ids as 1:2,2:3, a colon between "
            "replicas and a comma between partitions"
        ) from None


def _forgiven(result: TopicResult) -> TopicResult:
    from pk.client.admin import TopicResult as Result

    if isinstance(result.error, errors.TopicAlreadyExists):
        return Result(result.name, result.topic_id, EXISTS)
    return result


def _absent_is_fine(result: TopicResult) -> TopicResult:
    from pk.client.admin import TopicResult as Result

    if isinstance(result.error, errors.UnknownTopicOrPartition):
        return Result(result.name, result.topic_id, ABSENT)
    return result


@app.command("list")
def list_(
    internal: Annotated[bool, typer.Option("--internal", help="pk's own topics too")] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """List topics.

    Example: pk topics list --json
    """
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.list_topics(internal=internal, timeout_s=timeout_ms / 1000)
        if as_json:
            say({"topics": [asdict(topic) for topic in found]})
            return
        table(
            ["topic", "partitions", "topic_id"],
            [(topic.name, topic.partitions, topic.topic_id) for topic in found],
        )


@app.command()
def describe(
    names: Annotated[
        list[str] | None, typer.Argument(help="topic names; default: all", metavar="[TOPIC]…")
    ] = None,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", help="all settings, and where each value comes from")
    ] = False,
    under_replicated: Annotated[
        bool,
        typer.Option("--under-replicated", help="only those with a replica out of sync"),
    ] = False,
    at_min_isr: Annotated[
        bool,
        typer.Option("--at-min-isr", help="only those with exactly min_insync_replicas in sync"),
    ] = False,
    under_min_isr: Annotated[
        bool, typer.Option("--under-min-isr", help="only those that refuse acks=all")
    ] = False,
    unavailable: Annotated[
        bool, typer.Option("--unavailable", help="only partitions without a leader")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show where each partition's log stands, and the settings that are not defaults.

    Example: pk topics describe flights --all-configs
    """
    seconds = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.describe_topics(names or None, timeout_s=seconds())
        by_name: dict[str, list[PartitionDescription]] = {}
        for each in found:
            by_name.setdefault(each.topic, []).append(each)
        listed = {name: admin.describe_configs(name, timeout_s=seconds()) for name in by_name}
    states = PartitionStates(under_replicated, at_min_isr, under_min_isr, unavailable)
    chosen = topic_description.chosen(by_name, listed, states)
    if as_json:
        objects = [
            topic_description.as_object(name, partitions, listed[name], all_configs)
            for name, partitions in chosen.items()
        ]
        say({"topics": objects})
        return
    with quiet_end():
        for name, partitions in chosen.items():
            topic_description.show(name, partitions, listed[name], all_configs)


@app.command()
def alter(
    name: Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")],
    partitions: Annotated[
        int | None, typer.Option(min=1, help="grow to so many partitions (they are never removed)")
    ] = None,
    add_partitions: Annotated[
        int | None, typer.Option(min=1, help="so many partitions more")
    ] = None,
    replica_assignment: ReplicaAssignmentOption = None,
    config: Configs = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", help="setting that returns to its default; repeatable"),
    ] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Change settings of a topic, or give it more partitions.

    Example: pk topics alter flights --config retention.ms=12h
    """
    changes = pairs(config, "--config")
    if partitions and add_partitions:
        raise errors.InvalidOption(
            "--partitions and --add-partitions contradict each other: give one"
        )
    if not (changes or unset or partitions or add_partitions):
        raise errors.InvalidOption(
            "nothing to alter: give --config, --unset, --partitions or --add-partitions"
        )
    placed = _assignment(replica_assignment)
    if placed and not (partitions or add_partitions):
        raise errors.InvalidOption(
            "--replica-assignment places new partitions: give --partitions or --add-partitions "
            "too; `pk reassign` moves those that exist"
        )
    seconds = countdown(timeout_ms)
    notes: list[str] = []
    with quiet_end(), _admin(bootstrap) as admin:
        if changes or unset:
            admin.alter_configs(name, changes, unset or (), timeout_s=seconds())
            notes.append(f"settings changed: {', '.join([*changes, *(unset or ())])}")
        if add_partitions:
            partitions = len(admin.describe_topics([name], timeout_s=seconds())) + add_partitions
        if partitions:
            result = admin.create_partitions(
                name, partitions, replica_assignment=placed, timeout_s=seconds()
            )
            notes.append(f"{partitions} partitions" + (f"; {result.note}" if result.note else ""))
        if as_json:
            say({"name": name, "notes": notes})
            return
        for note in notes:
            typer.echo(f"{name}: {note}")


@app.command()
def delete(
    names: Names,
    purge_tier: Annotated[
        bool, typer.Option("--purge-tier", help="remove the table in the tier too, for good")
    ] = False,
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="a topic that is not there is fine")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Delete topics.  The table of a topic in the tier stays unless --purge-tier, and its path is
    printed.

    Example: pk topics delete flights --purge-tier
    """
    with quiet_end(), _admin(bootstrap) as admin:
        results = admin.delete_topics(names, purge_tier=purge_tier, timeout_s=timeout_ms / 1000)
        if if_exists:
            results = [_absent_is_fine(result) for result in results]
        _report(results, "deleted", as_json)


@app.command("elect-leaders")
def elect_leaders(
    names: Annotated[
        list[str] | None, typer.Argument(help="topic names; default: all", metavar="[TOPIC]…")
    ] = None,
    preferred: Annotated[
        bool, typer.Option("--preferred", help="the first replica, where it is in sync")
    ] = False,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean", help="where nobody leads; what only missing replicas hold is LOST"
        ),
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Elect leaders: the preferred leaders, or any replica for partitions without a leader.

    Example: pk topics elect-leaders flights --preferred
    """
    if preferred == unclean:
        raise errors.InvalidOption("give one of --preferred and --unclean")
    seconds = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        places = list(admin.partition_replicas(names, timeout_s=seconds())) if names else None
        results = admin.elect_leaders(places, unclean=unclean, timeout_s=seconds())
        needed = {
            place: error
            for place, error in results.items()
            if not isinstance(error, errors.ElectionNotNeeded)
        }
        if as_json:
            listed = [
                {"topic": p.topic, "partition": p.partition, "error": error_json(error)}
                for p, error in needed.items()
            ]
            say({"partitions": listed})
        else:
            for place, error in needed.items():
                typer.echo(f"{place}: {'elected' if error is None else error.message}")
            if not needed:
                typer.echo("no election was needed")
    if any(error is not None for error in needed.values()):
        raise SystemExit(1)


app.command("offsets")(topic_offsets.offsets)
app.command("delete-records")(topic_offsets.delete_records)
