"""`pk maintenance`: jobs that keep topics' tables small and check them, now or on a schedule."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors, schedules
from pk.cli import maintenance_runner
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    opened,
    quiet_end,
    say,
    size_text,
    table,
)
from pk.cli.maintenance_runner import BAD_INPUT, DAMAGED, DONE, FAILED, HELD
from pk.schedules import Entry

if TYPE_CHECKING:
    from pk.client.admin import ScheduleListings
    from pk.sparkconnector.maintenance import CompactionReport
    from pk.sparkconnector.maintenance.jobs import JobReport

__all__ = ["app", "carry_out", "BAD_INPUT", "DAMAGED", "DONE", "FAILED", "HELD"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
schedule_app = typer.Typer(no_args_is_help=True, help="set, list and delete schedules of jobs")
app.add_typer(schedule_app, name="schedule")

_JOBS = ", ".join(schedules.JOBS)
MasterOption = Annotated[str, typer.Option(help="Spark's master")]
EveryOption = Annotated[str | None, typer.Option(help="interval: 90s, 15m, 1h, 7d; at least 10s")]


@app.command()
def run(
    job: Annotated[str | None, typer.Argument(help=_JOBS)] = None,
    topic: Annotated[str | None, typer.Argument(help="topic name")] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    master: MasterOption = "local[*]",
    due: Annotated[
        bool, typer.Option("--due", help="run the schedules that are due, once")
    ] = False,
    every: EveryOption = None,
    target_bytes: Annotated[
        int | None, typer.Option("--target-bytes", min=1, help="bytes of a file that is written")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="sweep: age of an upload, at least 1h; default 24h")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="compaction: partitions that are not due, too")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="snapshot: read all rows, not only the new ones")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run one job on a topic's table; with --due, what is due; with --every, again and again.

    Exit codes: 0 done, or nothing to do; 1 failed, and may be run again; 2 bad input; 3 another job
    or runner holds the lease; 4 the audit found damage.

    Example: pk maintenance run compaction flights
    """
    options: dict[str, Any] = {} if target_bytes is None else {"target_bytes": target_bytes}
    options |= {"force": True} if force else {}
    options |= {"whole": True} if whole else {}
    with quiet_end():
        try:
            if older_than is not None:
                options["older_than_ms"] = schedules.duration_ms(older_than)
            _check_combination(job, topic, due=due, every=every, options=options)
        except errors.PkError as error:
            raise typer.Exit(maintenance_runner.show_error(error, as_json=as_json)) from None
        if due:
            code = maintenance_runner.run_due(bootstrap, master, as_json=as_json)
        elif every is not None:
            only = schedules.Schedule(str(topic), "", str(job), schedules.duration_ms(every))
            code = maintenance_runner.serve(bootstrap, master, only=only, as_json=as_json)
        else:
            code = carry_out(str(job), str(topic), bootstrap, master, options, as_json=as_json)
    raise typer.Exit(code)


def _check_combination(
    job: str | None, topic: str | None, *, due: bool, every: str | None, options: dict[str, Any]
) -> None:
    if due and (job is not None or every is not None or options):
        raise errors.InvalidOption("--due runs what the schedules say: give no job and no option")
    if due:
        return
    if job is None or topic is None:
        raise errors.InvalidOption("give a job and a topic, or --due")
    if every is not None:
        if options:
            raise errors.InvalidOption("a job that runs again and again takes no option")
        schedules.check(job, schedules.duration_ms(every), "", 0)


def carry_out(
    job: str,
    topic: str,
    bootstrap: str,
    master: str,
    options: dict[str, Any] | None = None,
    *,
    as_json: bool,
) -> int:
    """Run a job once, print its report or its error, and return the exit code.

    The run is noted, so that a schedule of the job counts from it.
    """
    from pk.client.maintenance_lease import MaintenanceLease
    from pk.sparkconnector.maintenance.jobs import SparkHolder, check_options, run_job
    from pk.sparkconnector.maintenance.runner import failure_text, runner_name

    spark = SparkHolder(master)
    progress = {"progress": _progress} if job == "compaction" else {}
    try:
        check_options(job, options or {})
        with MaintenanceLease(bootstrap, topic, job, kind="run") as lease:
            try:
                report = run_job(spark, bootstrap, topic, job, {**(options or {}), **progress})
            except errors.UserError:
                raise  # the request was wrong: this says nothing about the table
            except Exception as error:
                _note(lease, schedules.FAILED, failure_text(error), runner_name())
                raise
            _note(lease, report.outcome, report.summary(), runner_name())
    except errors.PkError as error:
        return maintenance_runner.show_error(error, as_json=as_json)
    return show(report, as_json=as_json)


def _progress(partition: int, status: str) -> None:
    typer.echo(f"partition {partition}: {status}", err=True)


def _note(lease: Any, outcome: str, detail: str, runner: str) -> None:
    try:
        lease.note(outcome, detail, runner)
    except errors.PkError as error:
        typer.echo(f"warning: the run could not be noted: {error.message}", err=True)


def show(report: JobReport, *, as_json: bool) -> int:
    """Print a report and return the exit code."""
    from pk.sparkconnector.maintenance import AuditReport, CompactionReport
    from pk.sparkconnector.maintenance.audit import as_object

    if as_json:
        found: Any = report  # a data class
        say(as_object(report) if isinstance(report, AuditReport) else asdict(found))
    elif isinstance(report, AuditReport):
        rows = [[p.partition, p.files, p.rows, p.verdict] for p in report.partitions]
        table(["partition", "files", "rows", "verdict"], rows, f"version {report.version}")
        for each in report.partitions:
            for text in (*each.problems, *(f"note: {note}" for note in each.notes)):
                typer.echo(f"partition {each.partition}: {text}")
    elif isinstance(report, CompactionReport):
        _show_compaction(report)
    else:
        typer.echo(report.summary())
    return DAMAGED if report.outcome == schedules.DAMAGED else DONE


def _show_compaction(report: CompactionReport) -> None:
    names = ["partition", "status", "dirty", "files", "rows", "bytes", "superseded", "tombstones"]
    rows = [
        [
            each.partition,
            each.status,
            f"{each.dirty_ratio:.0%}",
            f"{each.files_before} → {each.files_after}",
            f"{each.rows_before} → {each.rows_after}",
            f"{size_text(each.bytes_before)} → {size_text(each.bytes_after)}",
            each.superseded + each.without_key,
            each.tombstones,
        ]
        for each in report.partitions
    ]
    table(names, rows, f"version {report.version}")


@app.command()
def runner(
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    master: MasterOption = "local[*]",
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Run the schedules as they become due, one at a time in one Spark session, until SIGTERM.

    Several runners may run: each job is run by one of them.

    Example: pk maintenance runner --master local[2]
    """
    with quiet_end():
        code = maintenance_runner.serve(bootstrap, master, as_json=as_json, supervised=supervised)
    raise typer.Exit(code)


# -- schedules -------------------------------------------------------------------------------------


@schedule_app.command("set")
def set_(
    topic: Annotated[str, typer.Argument(help="topic name")],
    job: Annotated[str, typer.Argument(help=_JOBS)],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    every: EveryOption = None,
    cron: Annotated[str | None, typer.Option(help="minute hour day month weekday, in UTC")] = None,
    as_json: AsJson = False,
) -> None:
    """Set when a job of a topic runs.  A runner must run it: see `pk maintenance runner`.

    Example: pk maintenance schedule set flights optimize --every 1h
    """
    from pk import AdminClient

    def work() -> None:
        every_ms = 0 if every is None else schedules.duration_ms(every)
        schedules.check(job, every_ms, cron or "", 0)
        with opened(AdminClient(bootstrap), bootstrap) as admin:
            before = admin.set_schedule(topic, job, every_ms=every_ms, cron=cron or "")
        after = schedules.Schedule(topic, "", job, every_ms, " ".join((cron or "").split()))
        if as_json:
            say({"topic": topic, "job": job, "schedule": after.text(),
                 "before": None if before is None else before.text()})  # fmt: skip
        elif before is None or before.text() == after.text():
            typer.echo(f"{job} of {topic}: {after.text()}")
        else:
            typer.echo(f"{job} of {topic}: {after.text()} (before: {before.text()})")

    _command(work, as_json=as_json)


@schedule_app.command("delete")
def delete(
    topic: Annotated[str, typer.Argument(help="topic name")],
    job: Annotated[str, typer.Argument(help=_JOBS)],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Delete the schedule of a topic's job.  A run under way goes on.

    Example: pk maintenance schedule delete flights optimize
    """
    from pk import AdminClient

    def work() -> None:
        with opened(AdminClient(bootstrap), bootstrap) as admin:
            # A repeated request would not find it either, so the list decides whether it exists.
            found = admin.list_schedules(topic).entries
            if not any(each.schedule.job == job and each.schedule.is_set for each in found):
                raise errors.InvalidRequest(f"topic {topic} has no schedule of the job {job}")
            admin.delete_schedule(topic, job)
        say({"topic": topic, "job": job, "deleted": True}) if as_json else typer.echo(
            f"{job} of {topic} has no schedule any more"
        )

    _command(work, as_json=as_json)


@schedule_app.command("list")
def schedule_list(
    topic: Annotated[str | None, typer.Argument(help="topic name; default: all")] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """List the schedules, their last runs and when they are due next; as `pk maintenance list`.

    Example: pk maintenance schedule list
    """
    _list(topic, bootstrap, as_json=as_json)


@app.command("list")
def list_(
    topic: Annotated[str | None, typer.Argument(help="topic name; default: all")] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """List the schedules and last runs: outcome, who ran it, when it is due next (UTC).

    Example: pk maintenance list flights
    """
    _list(topic, bootstrap, as_json=as_json)


def _list(topic: str | None, bootstrap: str, *, as_json: bool) -> None:
    from pk import AdminClient

    def work() -> None:
        with opened(AdminClient(bootstrap), bootstrap) as admin:
            found = admin.list_schedules(topic)
        if as_json:
            say(listing(found))
            return
        rows = [_row(each, found.now_ms) for each in found.entries]
        columns = ["topic", "job", "schedule", "last run", "outcome", "by", "next"]
        table(columns, rows, f"controller's time {time_text(found.now_ms)}")

    _command(work, as_json=as_json)


def _command(work: Any, *, as_json: bool) -> None:
    """Run a command; a typed error becomes its exit code."""
    with quiet_end():
        try:
            work()
        except errors.PkError as error:
            raise typer.Exit(maintenance_runner.show_error(error, as_json=as_json)) from None


def listing(found: ScheduleListings) -> dict[str, Any]:
    """Return schedules as a JSON object; times in ms of the controller's clock."""
    return {
        "now_ms": found.now_ms,
        "schedules": [
            {
                **each.schedule._asdict(),
                "last": None if each.last is None else each.last._asdict(),
                "running": each.running or None,
                "next_ms": _next_ms(each, found.now_ms),
            }
            for each in found.entries
        ],
    }


def _next_ms(entry: Entry, now_ms: int) -> int | None:
    known = entry.schedule.is_set and entry.schedule.job in schedules.JOBS
    return schedules.due_ms(entry.schedule, entry.last, now_ms) if known else None


def _row(entry: Entry, now_ms: int) -> list[str]:
    schedule, last = entry.schedule, entry.last
    next_ms = _next_ms(entry, now_ms)
    when = "" if next_ms is None else "due now" if next_ms <= now_ms else time_text(next_ms)
    outcome = "never run"
    if last is not None:
        outcome = (
            last.outcome if last.outcome == schedules.DONE else f"{last.outcome}: {last.detail}"
        )
        if last.failures > 1:
            outcome = f"{last.outcome} ({last.failures} times): {last.detail}"
    return [
        schedule.topic,
        schedule.job,
        schedule.text() or "none",
        "" if last is None else time_text(last.started_ms),
        outcome,
        "" if last is None else last.runner,
        f"running ({entry.running})" if entry.running else when,
    ]


def time_text(ms: int) -> str:
    """Return a time as people read it, in UTC."""
    return datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
