"""The loop behind `pk maintenance runner` and `run --every`, and the one pass of `run --due`.

The jobs run in a thread of their own, so the main thread always receives signals.

    SIGTERM, Ctrl-C   no further job begins; the Spark jobs under way are cancelled; leases are
                      released; exit 0.  What does not end within GRACE_S is left: its lease ends
                      by itself, and its files are named by no version
    a second signal   the process ends at once
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from pk import errors, schedules, tracing
from pk.cli.common import INTERRUPTED, say
from pk.clock import wall_ms

if TYPE_CHECKING:
    from pk.sparkconnector.maintenance.runner import Turn

#: Exit codes of a run.
DONE, FAILED, BAD_INPUT, HELD, DAMAGED = 0, 1, 2, 3, 4
GRACE_S = 25.0
CANCEL_INTERVAL_S = 0.5


def exit_code(error: Exception) -> int:
    """Return the exit code for an error of a job."""
    if isinstance(error, errors.LeaseHeld):
        return HELD
    bad = (errors.UserError, errors.UnknownTopicOrPartition, errors.JavaMissing, errors.JarsMissing)
    return BAD_INPUT if isinstance(error, bad) else FAILED


def show_error(error: errors.PkError, *, as_json: bool) -> int:
    """Print an error and return its exit code."""
    from pk.cli.app import error_line, error_object

    if as_json:
        typer.echo(json.dumps(error_object(error)))
    else:
        typer.echo(error_line(error), err=True)
    return exit_code(error)


def exit_code_of(turns: Sequence[Turn]) -> int:
    """Return the exit code of several runs: damage, then a failure, bad input, a held lease."""
    codes = dict.fromkeys(_code(each) for each in turns)
    return next((code for code in (DAMAGED, FAILED, BAD_INPUT, HELD) if code in codes), DONE)


def _code(turn: Turn) -> int:
    if turn.outcome == schedules.DAMAGED:
        return DAMAGED
    return DONE if turn.error is None else exit_code(turn.error)


def run_due(bootstrap: str, master: str, *, as_json: bool) -> int:
    """Run what is due, each schedule once; return the exit code."""
    found: list[Turn] = []

    def work(runner: Any) -> None:
        found.extend(runner.run_due())
        if not found and not as_json:
            typer.echo("nothing is due")

    code = _in_thread(bootstrap, master, work, None, _shower(as_json=as_json), as_json=as_json)
    return code or exit_code_of(found)


def serve(
    bootstrap: str,
    master: str,
    *,
    only: schedules.Schedule | None = None,
    as_json: bool,
    supervised: bool = False,
) -> int:
    """Run what becomes due until a signal; return the exit code.

    supervised: stdout is a pipe to the supervisor, which expects a ready line.
    """
    shower = _logger() if supervised else _shower(as_json=as_json)

    def work(runner: Any) -> None:
        if supervised:
            say({"ready": "maintenance", "pid": os.getpid()})
        runner.serve()

    return _in_thread(bootstrap, master, work, only, shower, as_json=as_json)


def _in_thread(
    bootstrap: str,
    master: str,
    work: Callable[[Any], None],
    only: schedules.Schedule | None,
    shower: Callable[[Turn], None],
    *,
    as_json: bool,
) -> int:
    """Call `work(runner)` in a thread; return 0 after a signal or its end, or an error's code."""
    from pk import AdminClient
    from pk.sparkconnector.maintenance.jobs import SparkHolder
    from pk.sparkconnector.maintenance.runner import Runner

    stop, spark = threading.Event(), SparkHolder(master)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with AdminClient(bootstrap) as admin:
                work(
                    Runner(
                        admin, bootstrap, spark,
                        only=only, on_turn=shower, on_away=_away, stop=stop,
                    )
                )  # fmt: skip
        except BaseException as error:
            raised.append(error)

    def on_signal(_number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=run, name="maintenance", daemon=True)
    try:
        thread.start()
        while thread.is_alive() and not stop.is_set():
            thread.join(CANCEL_INTERVAL_S)
        left_s = GRACE_S
        while thread.is_alive() and left_s > 0:
            spark.cancel()  # again and again: a job has several Spark jobs
            thread.join(CANCEL_INTERVAL_S)
            left_s -= CANCEL_INTERVAL_S
        if thread.is_alive():
            typer.echo("a job did not end: its lease ends by itself within 30 s", err=True)
            os._exit(DONE)
        spark.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not raised:
        return DONE
    if isinstance(raised[0], errors.PkError):
        return show_error(raised[0], as_json=as_json)
    raise raised[0]


def _away(error: errors.PkError) -> None:
    typer.echo(f"warning: {error.message}", err=True)


def _shower(*, as_json: bool) -> Callable[[Turn], None]:
    def show(turn: Turn) -> None:
        if as_json:
            say(_object(turn))
        else:
            typer.echo(f"{turn.job} of {turn.topic}: {turn.outcome}: {turn.detail}")

    return show


def _logger() -> Callable[[Turn], None]:
    """Return a function that writes each run to the server's log."""
    log = tracing.Log("maintenance", wall_ms)

    def show(turn: Turn) -> None:
        bad = turn.error is not None or turn.outcome == schedules.DAMAGED
        write = log.warning if bad and turn.outcome != "held" else log.info
        write("ran", topic=turn.topic, job=turn.job, outcome=turn.outcome, detail=turn.detail)

    return show


def _object(turn: Turn) -> dict[str, Any]:
    from pk.cli.app import error_object

    found: dict[str, Any] = {
        "topic": turn.topic, "job": turn.job, "outcome": turn.outcome, "detail": turn.detail,
    }  # fmt: skip
    if isinstance(turn.error, errors.PkError):
        found |= error_object(turn.error)
    return found
