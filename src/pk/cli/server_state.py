"""`pk server status` and `pk server stop`: a node that runs on this machine.

Both find the node by its data directory, not by its address.  So they also work while the node
starts, while it hangs, and where another node has taken its port.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli.common import AsJson, duration, quiet_end, say, table, toml_file
from pk.clock import block_s, monotonic_s

if TYPE_CHECKING:
    from pk.server.node.running import RunningNode

#: Beyond `shutdown_timeout_ms`: the runner of schedules, the controller, and what ends late.
MARGIN_MS = 30_000
ANSWER_MS = 5_000
NODE = ("address", "roles", "cluster_id", "node_id")

Directory = Annotated[
    str | None, typer.Option("--dir", help="the node's first data directory, as start was given it")
]
Config = Annotated[
    Path | None, typer.Option(help="TOML file of the node, instead of --dir")
]  # fmt: skip


def status(
    dir: Directory = None,
    config: Config = None,
    timeout_ms: Annotated[
        int,
        typer.Option(
            "--timeout-ms",
            parser=duration(1),
            metavar="DURATION",
            help="how long the node may take to answer",
        ),
    ] = ANSWER_MS,
    as_json: AsJson = False,
) -> None:
    """Show a node of this machine: processes, directories, and whether it answers.

    The exit code is 0 if the node serves, and 1 if it is stopped, starting, or does not answer.

    Example: pk server status --dir /tmp/pk
    """
    from pk.server.node import running

    directory = _directory(dir, config)
    with quiet_end():
        found = running.find(directory)
        if found is None:
            if as_json:
                say({"state": "stopped", "dir": directory})
            else:
                typer.echo(f"stopped: no node runs from {directory}")
            raise typer.Exit(1)
        answer, problem = _asked(found, timeout_ms / 1000)
        state = _state(found, problem)
        facts = {
            "state": state,
            "problem": problem,
            "pid": found.pid,
            "uptime_s": round(found.uptime_s),
            **{name: found.facts.get(name) for name in NODE},
            "processes": [asdict(each) for each in found.processes],
            "directories": _directories(found.facts.get("dirs") or [directory]),
            **answer,
        }  # fmt: skip
        if as_json:
            say(facts)
        else:
            _show(facts)
    raise typer.Exit(0 if state == "serving" else 1)


def stop(
    dir: Directory = None,
    config: Config = None,
    timeout_ms: Annotated[
        int | None,
        typer.Option(
            "--timeout-ms",
            parser=duration(1),
            metavar="DURATION",
            help="how long to wait; default: the node's shutdown_timeout_ms and 30 s",
        ),
    ] = None,
    kill: Annotated[
        bool, typer.Option("--kill", help="after that time, kill the processes of the node")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a node of this machine as Ctrl-C does: it drains, and gives its leadership away.

    The exit code is 0 once the node has ended, and 1 if none ran.

    Example: pk server stop --dir /tmp/pk
    """
    from pk.server.node import running
    from pk.server.node.run_config import RunConfig

    directory = _directory(dir, config)
    if timeout_ms is None:
        timeout_ms = MARGIN_MS
        if (Path(directory) / "run" / "config.json").is_file():
            server = RunConfig.load(str(Path(directory) / "run")).server
            timeout_ms += int(server["shutdown_timeout_ms"])
    began_s = monotonic_s()
    with quiet_end():
        ran = running.stop(
            directory, timeout_ms / 1000, kill=kill, monotonic_s=monotonic_s, block_s=block_s
        )
        took_s = monotonic_s() - began_s
        if as_json:
            say({"stopped": ran, "seconds": round(took_s, 1)})
        elif ran:
            typer.echo(f"the node of {directory} has stopped after {took_s:.1f} s")
        else:
            typer.echo(f"no node runs from {directory}")
    raise typer.Exit(0 if ran else 1)


def _directory(dir: str | None, config: Path | None) -> str:
    """Return the first data directory.  Raises `InvalidOption`."""
    if (dir is None) == (config is None):
        raise errors.InvalidOption("give --dir, or the node's --config", option="dir")
    if dir is not None:
        return dir
    given = toml_file(config)
    named = given.get("dir", given.get("dirs", ()))
    first = named if isinstance(named, str) else next(iter(named), None)
    if not isinstance(first, str):
        raise errors.InvalidOption(f"{config} names no data directory: give --dir", option="dir")
    return first


def _asked(found: RunningNode, timeout_s: float) -> tuple[dict[str, Any], str]:
    """Ask the node's broker; return its answer and what is wrong ("" = nothing)."""
    if "broker" not in found.facts.get("roles", ()):
        return {}, ""
    from pk.client.admin import AdminClient

    try:
        with AdminClient(str(found.facts["address"])) as admin:
            cluster = admin.describe_cluster(timeout_s=timeout_s)
            brokers = admin.list_brokers(timeout_s=timeout_s)
    except errors.PkError as error:
        return {}, f"it does not answer: {error.message}"
    mine = [each for each in brokers if each.broker_id == found.facts["node_id"]]
    state = mine[0].state if mine else "not registered"
    answer = {"broker_state": state, "controller_id": cluster.controller_id}
    return answer, "" if state == "active" else f"the broker is {state}"


def _state(found: RunningNode, problem: str) -> str:
    if found.stopping:
        return "stopping"
    if not found.facts:
        return "starting"
    if found.missing:
        return "restarting " + ", ".join(found.missing)
    return "not serving" if problem else "serving"


def _directories(paths: list[str]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        try:
            usage = shutil.disk_usage(path)
            found.append({"path": path, "bytes": usage.total, "free_bytes": usage.free})
        except OSError as cause:
            found.append({"path": path, "problem": cause.strerror})
    return found


def _show(facts: dict[str, Any]) -> None:
    who = (
        f"node {facts['node_id']} of cluster {facts['cluster_id']}" if facts["address"] else "node"
    )
    typer.echo(f"{facts['state']}: {who}, process {facts['pid']}, up {facts['uptime_s']} s")
    if facts["problem"]:
        typer.echo(f"problem: {facts['problem']}")
    if facts["address"]:
        typer.echo(f"serves on {facts['address']} as {' and '.join(facts['roles'])}")
    if "controller_id" in facts:
        typer.echo(f"the active controller is node {facts['controller_id']}")
    rows = [
        (each["role"], each["pid"], _mib(each["memory_bytes"]) if each["memory_bytes"] else "gone")
        for each in facts["processes"]
    ]
    table(["process", "pid", "memory_MiB"], rows)
    table(
        ["directory", "size_MiB", "free_MiB", "problem"],
        [
            (each["path"], _mib(each.get("bytes")), _mib(each.get("free_bytes")),
             each.get("problem", ""))
            for each in facts["directories"]
        ],
    )  # fmt: skip


def _mib(count: int | None) -> str:
    return "" if count is None else str(count >> 20)
