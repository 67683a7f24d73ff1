"""`pk transactions`: list and describe transactions, abort or forget them, find hanging ones."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    countdown,
    duration,
    error_json,
    opened,
    quiet_end,
    say,
    table,
)

if TYPE_CHECKING:
    from pk.client.admin import (
        AdminClient,
        JobDescription,
        ParticipantDescription,
        TransactionDescription,
        TransactionListings,
    )
    from pk.types import TopicPartition

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="a transactional id")]


def _admin(bootstrap: str) -> AbstractContextManager[AdminClient]:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


@app.command("list")
def list_transactions(
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="Empty, Ongoing, AwaitingTable, PrepareCommit, PrepareAbort, CompleteCommit or "
            "CompleteAbort; repeatable",
        ),
    ] = None,
    producer_id: Annotated[
        list[int] | None, typer.Option("--producer-id", help="a producer id; repeatable")
    ] = None,
    open_longer_ms: Annotated[
        int,
        typer.Option(
            parser=duration(0),
            metavar="DURATION",
            help="only transactions that are open for longer than this: 1500 (ms), 90s",
        ),
    ] = 0,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show the transactional ids of all coordinators.

    Every broker is asked.  Coordinators that still load, and brokers that do not answer, are named.

    Example: pk transactions list
    """
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.list_transactions(
            state or (),
            producer_id or (),
            open_longer_ms=open_longer_ms,
            timeout_s=timeout_ms / 1000,
        )
        if as_json:
            say({**asdict(found), "complete": found.complete})
            return
        rows = [
            (
                each.transactional_id,
                each.kind,
                each.coordinator_id,
                "" if each.producer_id < 0 else each.producer_id,
                each.state,
            )
            for each in found.transactions
        ]
        table(["transactional id", "kind", "coordinator", "producer id", "state"], rows)
        _say_missing(found)


def _say_missing(found: TransactionListings) -> None:
    """Print which coordinators the list lacks, on stderr."""
    if found.loading:
        numbers = ", ".join(map(str, found.loading))
        typer.echo(
            f"not complete: the coordinators of __transaction_state partitions {numbers} still "
            "load; list again in a moment",
            err=True,
        )
    if found.silent:
        brokers = ", ".join(map(str, found.silent))
        typer.echo(f"not complete: no answer from brokers {brokers}", err=True)


@app.command()
def describe(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="transactional ids")],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show the state of transactional ids, and the partitions of their open transactions.

    A job, which the tasks of a query write together, is shown with its query, its run, its batches
    and its participants.

    Example: pk transactions describe billing-1
    """
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.describe_transactions(ids, timeout_s=timeout_ms / 1000)
        if as_json:
            say({"transactions": [_json_of(each) for each in found]})
        else:
            for number, each in enumerate(found):
                if number:
                    typer.echo("")
                _show(each)
    if any(each.error is not None for each in found):
        raise SystemExit(1)


def _json_of(found: TransactionDescription) -> dict[str, Any]:
    shown = {name: getattr(found, name) for name in found.__slots__}
    return {
        **shown,
        "kind": found.kind,
        "partitions": [_place_json(each) for each in found.partitions],
        "error": error_json(found.error),
        "job": None if found.job is None else asdict(found.job),
        "held": [{**_place_json(e.partition), **asdict(e.transaction)} for e in found.held],
    }


def _place_json(place: TopicPartition) -> dict[str, Any]:
    return {"topic": place.topic, "partition": place.partition}


def _show(found: TransactionDescription) -> None:
    if found.error is not None:
        typer.echo(f"{found.transactional_id}: {found.error.message}")
        return
    rows: list[tuple[str, Any]] = [
        ("transactional id", found.transactional_id),
        ("kind", found.kind),
        ("coordinator", found.coordinator_id),
        ("state", found.state),
    ]
    if found.job is None:
        rows.append(("producer id", found.producer_id))
        rows.append(("producer epoch", found.producer_epoch))
        rows.append(("timeout ms", found.timeout_ms))
    else:
        rows += _job_rows(found.job, is_open=found.started_ms is not None)
    if found.started_ms is not None:
        rows.append(("open since", _time(found.started_ms)))
        rows.append(("partitions", _places(found.partitions) or "none yet"))
        held = [f"{e.partition} at {e.transaction.first_offset}" for e in found.held]
        rows.append(("holds the last stable offset of", ", ".join(held) or "no partition"))
    if found.reason:
        rows.append(("aborted because", found.reason))
    table(["field", "value"], rows)
    if found.job is not None and found.job.participants:
        table(
            ["participant", "epoch", "finished", "last heard"],
            [_participant_row(each) for each in found.job.participants],
        )


def _job_rows(job: JobDescription, *, is_open: bool) -> list[tuple[str, Any]]:
    """Return what only a job has."""
    rows: list[tuple[str, Any]] = [
        ("query", job.query),
        ("run", job.run),
        ("written by", "a batch write" if job.batch_write else "a streaming query"),
        ("open batch", job.batch if is_open else "none"),
        ("last committed batch", "none" if job.last_committed is None else job.last_committed),
    ]
    if is_open:
        rows.append(("participants", len(job.participants)))
    if job.awaited is not None:
        table = job.awaited
        rows.append(("waits for table", f"{table.url} (id {table.table_id})"))
        rows.append(("commits if it has", f"version {table.version} of application {table.app!r}"))
        rows.append(("waits since", _time(table.since_ms)))
    return rows


def _participant_row(each: ParticipantDescription) -> tuple[Any, ...]:
    if each.heard_ago_ms is None:
        return each.producer_id, each.producer_epoch, "not known", "not by this coordinator"
    finished = "yes" if each.finished else "no"
    heard = f"{each.heard_ago_ms / 1000:.1f} s ago"
    return each.producer_id, each.producer_epoch, finished, heard


def _places(places: Iterable[TopicPartition]) -> str:
    """Return partitions as text, those of a topic together: `orders 0 1 2, payments 0`."""
    topics: dict[str, list[int]] = {}
    for place in places:
        topics.setdefault(place.topic, []).append(place.partition)
    return ", ".join(f"{topic} {' '.join(map(str, its))}" for topic, its in topics.items())


def _time(ms: int) -> str:
    found = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    return found.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")


@app.command()
def abort(
    transactional_id: IdArgument,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Abort the open transaction of an id; its producer learns it from its next call.

    Example: pk transactions abort billing-1
    """
    with quiet_end(), _admin(bootstrap) as admin:
        admin.abort_transaction(transactional_id, timeout_s=timeout_ms / 1000)
    if as_json:
        say({"aborted": transactional_id})
    else:
        typer.echo(f"the transaction of {transactional_id} is aborted")


@app.command()
def resolve(
    transactional_id: IdArgument,
    commit: Annotated[
        bool | None,
        typer.Option(
            "--commit/--abort", help="the table has the batch / the table does not have it"
        ),
    ] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """End the batch of a job that waits for a Delta table, as you found the table.

    `pk transactions describe` names the table and the version that it has if the batch is in it.
    With the wrong answer, topics and table differ.

    Example: pk transactions resolve billing-1 --commit
    """
    if commit is None:
        raise typer.BadParameter("say what the table has: --commit or --abort")
    with quiet_end(), _admin(bootstrap) as admin:
        admin.resolve_transaction(transactional_id, commit=commit, timeout_s=timeout_ms / 1000)
    ended = "committed" if commit else "aborted"
    if as_json:
        say({"resolved": transactional_id, "ended": ended})
    else:
        typer.echo(f"the batch of {transactional_id} is {ended}")


@app.command()
def forget(
    transactional_id: IdArgument,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Remove a transactional id that no producer uses any more.

    Example: pk transactions forget billing-1
    """
    with quiet_end(), _admin(bootstrap) as admin:
        admin.forget_transactional_id(transactional_id, timeout_s=timeout_ms / 1000)
    if as_json:
        say({"forgotten": transactional_id})
    else:
        typer.echo(f"{transactional_id} is forgotten")


@app.command("find-hanging")
def find_hanging(
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="a topic; repeatable; default: all")
    ] = None,
    max_timeout_ms: Annotated[
        int,
        typer.Option(
            parser=duration(1),
            metavar="DURATION",
            help="a transaction that is open for longer hangs: give the brokers' "
            "transaction_max_timeout_ms if it is not the default",
        ),
    ] = 900_000,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Find open transactions that their coordinators will not end in time; exit code 1 if any.

    They hold back the last stable offset of a partition.  The producers of the partitions are
    compared with the transactions that the coordinators know.

    Example: pk transactions find-hanging --topic flights
    """
    seconds = countdown(timeout_ms)
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.find_hanging_transactions(
            topic, max_timeout_ms=max_timeout_ms, timeout_s=seconds()
        )
        if as_json:
            shown = [
                {
                    **asdict(each),
                    "partition": each.partition.partition,
                    "topic": each.partition.topic,
                }
                for each in found
            ]
            say({"hanging": shown})
        elif not found:
            typer.echo("no transaction hangs")
        else:
            rows = [
                (
                    str(each.partition), each.producer_id, each.producer_epoch, each.start_offset,
                    each.open_ms, each.transactional_id, each.reason,
                )
                for each in found
            ]  # fmt: skip
            table(
                ["partition", "producer id", "epoch", "start offset", "open ms",
                 "transactional id", "why"],
                rows,
            )  # fmt: skip
    if any(each.certain for each in found):
        raise SystemExit(1)
