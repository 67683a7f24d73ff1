"""`pk quorum`: describe the metadata quorum, add and remove controllers."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    toml_file,
)

if TYPE_CHECKING:
    from pk.client.admin import QuorumDescription, QuorumReplica

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

ControllerOption = Annotated[
    str,
    typer.Option("--controller", help="HOST:PORT,… of any controllers, asked instead of a broker"),
]


def _admin(bootstrap: str, controller: str) -> Any:
    from pk.client.admin import AdminClient

    if controller:
        return opened(AdminClient(bootstrap_controllers=controller), controller)
    return opened(AdminClient(bootstrap), bootstrap)


@app.command()
def describe(
    status: Annotated[
        bool, typer.Option("--status", help="the quorum as a whole; default: both")
    ] = False,
    replication: Annotated[
        bool, typer.Option("--replication", help="each voter and observer; default: both")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    controller: ControllerOption = "",
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Show who leads, what is committed, and how far every controller is.

    Example: pk quorum describe --controller 127.0.0.1:9393
    """
    with quiet_end(), _admin(bootstrap, controller) as admin:
        found: QuorumDescription = admin.describe_metadata_quorum(timeout_s=timeout_ms / 1000)
        if as_json:
            say(
                asdict(found)
                | {"max_lag": found.max_lag, "max_caught_up_ago_ms": found.max_caught_up_ago_ms}
            )
            return
        if status or not replication:
            _status(found)
        if not status and not replication:
            typer.echo("")
        if replication or not status:
            _replication(found)


def _status(found: QuorumDescription) -> None:
    lines = (
        ("LeaderId", found.leader_id),
        ("LeaderEpoch", found.leader_epoch),
        ("HighWatermark", found.high_watermark),
        ("MaxFollowerLag", found.max_lag),
        ("MaxFollowerLagTimeMs", found.max_caught_up_ago_ms),
        ("CurrentVoters", ", ".join(map(_name, found.voters))),
        ("CurrentObservers", ", ".join(map(_name, found.observers)) or "none"),
    )
    for name, value in lines:
        typer.echo(f"{name + ':':<22}{value}")


def _name(replica: QuorumReplica) -> str:
    return f"{replica.node_id}@{replica.address}" if replica.address else str(replica.node_id)


def _replication(found: QuorumDescription) -> None:
    rows = []
    for voting, replicas in ((True, found.voters), (False, found.observers)):
        for each in replicas:
            leads = voting and each.node_id == found.leader_id
            rows.append(
                (
                    each.node_id,
                    each.directory_id,
                    each.log_end if each.log_end >= 0 else "never fetched",
                    each.lag,
                    _ago(each.last_fetch_ago_ms),
                    _ago(each.last_caught_up_ago_ms),
                    "Leader" if leads else "Follower" if voting else "Observer",
                )
            )
    columns = ["node", "directory", "log_end", "lag", "last_fetch", "caught_up", "status"]
    table(columns, rows)


def _ago(ms: int) -> str:
    return "never" if ms < 0 else f"{ms} ms ago"


@app.command("add-controller")
def add_controller(
    config: Annotated[
        Path | None, typer.Option(help="TOML file of that controller's node, on its machine")
    ] = None,
    node_id: Annotated[int | None, typer.Option("--id", help="instead of --config")] = None,
    directory_id: Annotated[
        str, typer.Option("--directory-id", help="as `pk server format` printed it")
    ] = "",
    address: Annotated[str, typer.Option(help="HOST:PORT where the others reach it")] = "",
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    controller: ControllerOption = "",
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Make a controller a voter; it must be running and have caught up.

    Example: pk quorum add-controller --config node2.toml
    """
    if config is not None:
        node_id, directory_id, address = _identity(config)
    if node_id is None or not directory_id or not address:
        raise errors.InvalidOption("give --config, or --id, --directory-id and --address")
    with quiet_end(), _admin(bootstrap, controller) as admin:
        voters = admin.add_raft_voter(node_id, directory_id, address, timeout_s=timeout_ms / 1000)
        _voters(f"controller {node_id} votes", voters, as_json)


@app.command("remove-controller")
def remove_controller(
    node_id: Annotated[int, typer.Option("--id", help="the controller's node id")],
    directory_id: Annotated[
        str, typer.Option("--directory-id", help="only if it votes with this directory")
    ] = "",
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    controller: ControllerOption = "",
    timeout_ms: TimeoutMs = 60_000,
    as_json: AsJson = False,
) -> None:
    """Remove a controller from the voters; it may continue as an observer.

    Example: pk quorum remove-controller --id 2
    """
    with quiet_end(), _admin(bootstrap, controller) as admin:
        voters = admin.remove_raft_voter(node_id, directory_id, timeout_s=timeout_ms / 1000)
        _voters(f"controller {node_id} votes no more", voters, as_json)


def _voters(done: str, voters: tuple[int, ...], as_json: bool) -> None:
    if as_json:
        say({"voters": list(voters)})
    else:
        typer.echo(f"{done}; the voters are {', '.join(map(str, voters))}")


def _identity(config: Path) -> tuple[int, str, str]:
    from pk.server.node.format import controller_identity
    from pk.server.node.settings import resolve

    resolved = resolve(toml_file(config), os.environ, {})
    return controller_identity(resolved.dirs, resolved)
