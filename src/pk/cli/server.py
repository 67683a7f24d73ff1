"""`pk server start`: one node in the foreground, under its supervisor.  `pk server format`: the
directories of a node of a cluster, before its first start.  `pk server status`, `pk server stop`: a
node that runs on this machine.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pk import errors
from pk.cli import server_state
from pk.cli.common import AsJson, toml_file

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def _server() -> None:
    """Format a node's directories, start it, see how it is, stop it."""


app.command()(server_state.status)
app.command()(server_state.stop)


@app.command()
def start(
    dir: Annotated[
        list[str] | None, typer.Option("--dir", help="data directory; repeat for several disks")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to bind (default 127.0.0.1:9292)")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="HOST:PORT that clients are told; default: listen")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file: server settings and topic defaults")
    ] = None,
    tier_url: Annotated[
        str | None, typer.Option(help="object store of the tier: file:///… or s3://bucket/…")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="HOST:PORT of the Prometheus and health endpoint")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value of any setting; repeatable")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the ready line as JSON")] = False,
) -> None:
    """Start a node and serve until Ctrl-C, which drains; a second Ctrl-C kills.

    Settings come from --config, then from PK_<NAME> in the environment, then from flags.

    Example: pk server start --dir /tmp/pk --tier-url file:///tmp/pk-tier
    """
    from pk.server.node.settings import resolve
    from pk.server.node.supervisor import serve

    flags = _assignments(settings or [])
    for name, value in (
        ("listen", listen),
        ("advertise", advertise),
        ("tier_url", tier_url),
        ("metrics", metrics),
    ):
        if value is not None:
            if name in flags:
                raise errors.InvalidConfig(f"{name} is given twice", option=name)
            flags[name] = value
    resolved = resolve(toml_file(config), os.environ, flags)
    raise SystemExit(serve(dir or (), resolved, _json_line if as_json else _human_line))


@app.command("format")
def format_(
    config: Annotated[
        Path | None, typer.Option(help="TOML file of the node: the one that start is given")
    ] = None,
    dir: Annotated[
        list[str] | None, typer.Option("--dir", help="data directory; repeat for several disks")
    ] = None,
    cluster_id: Annotated[
        str, typer.Option(help="the same on every node; default: the setting cluster_id")
    ] = "",
    initial_controllers: Annotated[
        bool,
        typer.Option(
            "--initial-controllers",
            help="a new cluster: this node is one of the first voters, controller_quorum_voters",
        ),
    ] = False,
    ignore_formatted: Annotated[
        bool, typer.Option("--ignore-formatted", help="format only what is not formatted yet")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value of any setting; repeatable")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Format a node's directories, as kafka-storage does; a node that is alone needs none of it.

    Without --initial-controllers a controller gets an identity of its own: it follows the quorum
    and votes once `pk quorum add-controller` has added it. A replaced disk is formatted that way:
    what the lost one had voted for is not known here.

    Example: pk server format --config node1.toml --initial-controllers
    """
    from pk.server.node.format import format_node
    from pk.server.node.settings import resolve

    resolved = resolve(toml_file(config), os.environ, _assignments(settings or []))
    made = format_node(
        dir or resolved.dirs,
        resolved,
        cluster_id=cluster_id,
        initial_controllers=initial_controllers,
        ignore_formatted=ignore_formatted,
    )
    if as_json:
        print(json.dumps(asdict(made)))
        return
    for path in made.made:
        print(f"formatted {path} for node {made.node_id} of cluster {made.cluster_id}")
    if not made.made:
        print(f"nothing to format: node {made.node_id} of cluster {made.cluster_id}")
    if made.metadata_directory_id:
        what = "a first voter" if made.voter else "no voter until it is added"
        print(f"controller {made.node_id}, directory {made.metadata_directory_id}: {what}")


def _assignments(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise errors.InvalidConfig(f"--set takes name=value, not {pair!r}", option=name)
        if name in found:
            raise errors.InvalidConfig(f"{name} is set twice", option=name)
        found[name] = value
    return found


def _json_line(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


def _human_line(facts: dict[str, Any]) -> None:
    parts = [f"cluster {facts['cluster_id']}", f"data {', '.join(facts['dirs'])}"]
    if facts["tier_url"]:
        parts.append(f"tier {facts['tier_url']}")
    if facts["metrics"]:
        parts.append(f"metrics http://{facts['metrics']}/metrics")
    parts.append(" ".join(f"{role} {pid}" for role, pid in facts["pids"].items()))
    if facts["roles"] != ["controller", "broker"]:
        parts.insert(0, f"{' and '.join(facts['roles'])} only")
    print(f"pk serves on {facts['address']} ({'; '.join(parts)})", flush=True)
    print("Ctrl-C drains and stops", file=sys.stderr)
