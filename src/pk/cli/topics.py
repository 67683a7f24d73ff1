"""`pk topics`: create, list, describe, alter and delete topics; offsets, deletion of records."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli import topic_offsets
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
    size_text,
    table,
)

if TYPE_CHECKING:
    from pk.client.admin import OpenTransaction, PartitionDescription, TopicResult

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Names = Annotated[list[str], typer.Argument(help="topic names", metavar="TOPIC…")]

#: The note on a topic that existed before `create --if-not-exists`.
EXISTS = "already exists (unchanged)"
_OFFSETS = ("log_start", "local_log_start", "tiered_end", "LSO", "HW", "log_end")


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
        if result.error is None and result.note == EXISTS:
            typer.echo(f"topic {result.name} {EXISTS}")
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
    with quiet_end(), _admin(bootstrap) as admin:
        new = [NewTopic(n, partitions or 0, configs, replication_factor or 0) for n in names]
        results = admin.create_topics(new, timeout_s=timeout_ms / 1000)
        if if_not_exists:
            results = [_forgiven(result) for result in results]
        _report(results, "created", as_json)


def _forgiven(result: TopicResult) -> TopicResult:
    from pk.client.admin import TopicResult as Result

    if isinstance(result.error, errors.TopicAlreadyExists):
        return Result(result.name, result.topic_id, EXISTS)
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
    settings = {
        name: {entry.name: entry.value for entry in entries if entry.source == "topic"}
        for name, entries in listed.items()
    }
    if as_json:
        objects = [_object(n, ps, settings[n]) for n, ps in by_name.items()]
        if all_configs:
            for each in objects:
                each["all_configs"] = [asdict(entry) for entry in listed[each["name"]]]
        say({"topics": objects})
        return
    with quiet_end():
        for name, partitions in by_name.items():
            shown = " ".join(f"{key}={value}" for key, value in settings[name].items())
            head = f"{name}  {partitions[0].topic_id}  {len(partitions)} partitions"
            table(
                ["partition", "leader", "replicas", "isr", *_OFFSETS, "bytes", "tier_bytes"],
                [_row(each) for each in partitions],
                title=f"{head}  {shown}".rstrip(),
            )
            for each in partitions:
                if each.error is not None:
                    typer.echo(f"partition {each.partition}: {each.error.message}")
                elif each.under_replicated:
                    missing = ", ".join(str(n) for n in each.replicas if n not in each.isr)
                    typer.echo(f"partition {each.partition}: under-replicated, without {missing}")
                if each.oldest_transaction is not None:
                    typer.echo(f"partition {each.partition}: {_held_back(each.oldest_transaction)}")
            if all_configs:
                rows = [(entry.name, entry.value, entry.source) for entry in listed[name]]
                table(["setting", "value", "from"], rows)


def _held_back(oldest: OpenTransaction) -> str:
    began = datetime.fromtimestamp(oldest.began_ms / 1000, UTC).isoformat(timespec="seconds")
    return (
        f"producer {oldest.producer_id} (epoch {oldest.producer_epoch}) holds the last stable "
        f"offset at {oldest.first_offset}, with a transaction that is open since {began}"
    )


def _row(each: PartitionDescription) -> list[Any]:
    leader = "none" if each.leader < 0 else each.leader
    replicas, isr = (",".join(map(str, nodes)) for nodes in (each.replicas, each.isr))
    offsets = [
        each.log_start, each.local_log_start, each.tiered_end, each.last_stable_offset,
        each.high_watermark, each.log_end,
    ]  # fmt: skip
    return [
        each.partition,
        leader,
        replicas,
        isr,
        *offsets,
        size_text(each.bytes),
        size_text(each.tier_bytes),
    ]


def _object(
    name: str, partitions: list[PartitionDescription], settings: dict[str, str]
) -> dict[str, Any]:
    listed = []
    for each in partitions:
        item = {
            **asdict(each),
            "bytes": each.bytes,
            "under_replicated": each.under_replicated,
            "error": error_json(each.error),
        }
        del item["topic"], item["topic_id"]
        listed.append(item)
    topic_id = partitions[0].topic_id
    return {"name": name, "topic_id": topic_id, "configs": settings, "partitions": listed}


@app.command()
def alter(
    name: Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")],
    partitions: Annotated[
        int | None, typer.Option(min=1, help="grow to so many partitions (they are never removed)")
    ] = None,
    add_partitions: Annotated[
        int | None, typer.Option(min=1, help="so many partitions more")
    ] = None,
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
    seconds = countdown(timeout_ms)
    notes: list[str] = []
    with quiet_end(), _admin(bootstrap) as admin:
        if changes or unset:
            admin.alter_configs(name, changes, unset or (), timeout_s=seconds())
            notes.append(f"settings changed: {', '.join([*changes, *(unset or ())])}")
        if add_partitions:
            partitions = len(admin.describe_topics([name], timeout_s=seconds())) + add_partitions
        if partitions:
            result = admin.create_partitions(name, partitions, timeout_s=seconds())
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
