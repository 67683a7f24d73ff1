"""`pk maintenance`: Spark jobs that keep topics' tables small and check them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    quiet_end,
    say,
    size_text,
    table,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pk.sparkconnector.maintenance import AuditReport, OptimizeReport

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

#: Exit codes of a run.
DONE, FAILED, BAD_INPUT, HELD, DAMAGED = 0, 1, 2, 3, 4


@app.callback()
def _group() -> None:
    """Keep `run` a command of its own."""


@app.command()
def run(
    job: Annotated[str, typer.Argument(help="optimize or audit")],
    topic: Annotated[str, typer.Argument(help="topic name")],
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    master: Annotated[str, typer.Option(help="Spark's master")] = "local[*]",
    target_bytes: Annotated[
        int | None, typer.Option("--target-bytes", min=1, help="optimize: bytes of a merged file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one job on a topic's table, in this process's Spark session.

    Exit codes: 0 done, or nothing to do; 1 failed, and may be run again; 2 bad input; 3 another job
    holds the lease of the table; 4 the audit found damage.
    """
    with quiet_end():
        code = carry_out(job, topic, bootstrap, master, target_bytes, as_json=as_json)
    raise typer.Exit(code)


def carry_out(
    job: str, topic: str, bootstrap: str, master: str, target_bytes: int | None, *, as_json: bool
) -> int:
    """Run the job, print its report or its error, and return the exit code."""
    from pk.cli.app import error_line, error_object

    try:
        work = job_of(job, topic, bootstrap, target_bytes)
        report = work(session_of(master))
    except errors.PkError as error:
        if as_json:
            typer.echo(json.dumps(error_object(error)))
        else:
            typer.echo(error_line(error), err=True)
        return exit_code(error)
    return show(report, as_json=as_json)


def job_of(
    job: str, topic: str, bootstrap: str, target_bytes: int | None
) -> Callable[[SparkSession], Any]:
    """Return the job as a function of a Spark session.  Raises `InvalidRequest` for an unknown job,
    `InvalidOption` for an option of another job."""
    if job not in ("optimize", "audit"):
        raise errors.InvalidRequest(f"there is no job {job!r}: this build has optimize and audit")
    if job == "audit" and target_bytes is not None:
        raise errors.InvalidOption("--target-bytes is an option of optimize")

    def work(spark: SparkSession) -> Any:
        from pk.sparkconnector import maintenance

        if job == "audit":
            return maintenance.audit(spark, bootstrap, topic)
        options = {} if target_bytes is None else {"target_bytes": target_bytes}
        return maintenance.optimize(spark, bootstrap, topic, **options)

    return work


def session_of(master: str) -> SparkSession:
    from pk.sparkconnector import session

    spark = session("pk maintenance", master=master)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def exit_code(error: errors.PkError) -> int:
    """Return the exit code for an error of a job."""
    if isinstance(error, errors.LeaseHeld):
        return HELD
    bad = (errors.UserError, errors.UnknownTopicOrPartition, errors.JavaMissing, errors.JarsMissing)
    return BAD_INPUT if isinstance(error, bad) else FAILED


def show(report: AuditReport | OptimizeReport, *, as_json: bool) -> int:
    """Print a report and return the exit code."""
    from pk.sparkconnector.maintenance import AuditReport
    from pk.sparkconnector.maintenance.audit import as_object

    if not isinstance(report, AuditReport):
        if as_json:
            say(asdict(report))
        else:
            typer.echo(
                f"version {report.version}: {report.files_before} files before, "
                f"{report.files_after} after; {report.rewritten_rows} rows rewritten, "
                f"{size_text(report.rewritten_bytes)} became {size_text(report.written_bytes)}"
            )
        return DONE
    if as_json:
        say(as_object(report))
    else:
        rows = [[p.partition, p.files, p.rows, p.verdict] for p in report.partitions]
        table(["partition", "files", "rows", "verdict"], rows, f"version {report.version}")
        for each in report.partitions:
            for text in (*each.problems, *(f"note: {note}" for note in each.notes)):
                typer.echo(f"partition {each.partition}: {text}")
    return DAMAGED if report.verdict == "damaged" else DONE
