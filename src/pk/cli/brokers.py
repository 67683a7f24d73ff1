"""`pk brokers`: list the brokers of a cluster, confirm a broker's wall clock."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pk import errors
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    opened,
    quiet_end,
    say,
    table,
)

if TYPE_CHECKING:
    from pk.client.admin import AdminClient

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def _admin(bootstrap: str) -> AbstractContextManager[AdminClient]:
    from pk.client.admin import AdminClient

    return opened(AdminClient(bootstrap), bootstrap)


@app.command("list")
def list_brokers(
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show every registered broker, and how far its clock is from those of the other nodes.

    Example: pk brokers list
    """
    with quiet_end(), _admin(bootstrap) as admin:
        found = admin.list_brokers(timeout_s=timeout_ms / 1000)
        if as_json:
            say({"brokers": [asdict(each) for each in found]})
            return
        rows = [
            (
                each.broker_id,
                each.address,
                each.state,
                each.epoch,
                "not known" if each.clock_skew_ms is None else each.clock_skew_ms,
                _clock(each.clock_trusted, each.clock_doubt, each.clock_skew_ms),
            )
            for each in found
        ]
        table(["broker", "address", "state", "epoch", "clock_skew_ms", "clock"], rows)


def _clock(trusted: bool, doubt: str, skew_ms: int | None) -> str:
    if skew_ms is None:
        return "not known"
    return "trusted" if trusted else f"not trusted ({doubt})"


@app.command("confirm-clock")
def confirm_clock(
    broker_ids: Annotated[
        list[int] | None, typer.Argument(help="ids of brokers whose clocks are right")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="every broker in service")] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Confirm that the wall clocks of brokers are right: records may expire by them again.

    A broker whose clock does not fit its last run, was set, or is ahead of the other nodes' lets
    nothing expire by age.  Look at its clock before you confirm it: records that expire by a clock
    that is ahead are deleted.

    Example: pk brokers confirm-clock 2
    """
    if bool(broker_ids) == everyone:
        raise errors.InvalidOption("give ids of brokers, or --all")
    seconds = timeout_ms / 1000
    with quiet_end(), _admin(bootstrap) as admin:
        ids = list(broker_ids or ())
        if everyone:
            ids = [
                b.broker_id for b in admin.list_brokers(timeout_s=seconds) if b.state == "active"
            ]
        ended = {each: admin.confirm_clock(each, timeout_s=seconds) for each in ids}
    if as_json:
        say({"confirmed": [{"broker_id": each, "doubt": doubt} for each, doubt in ended.items()]})
        return
    for each, doubt in ended.items():
        was = f"the doubt is over: {doubt}" if doubt else "it was trusted before"
        typer.echo(f"the clock of broker {each} is confirmed; {was}")
