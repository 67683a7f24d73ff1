"""`pk doctor capacity`: what a planned cluster needs, and what of this machine it fills first."""

from __future__ import annotations

import os
import resource
import textwrap
from dataclasses import asdict
from typing import Annotated, Any

import typer

from pk import capacity, descriptors, errors, limits, units
from pk.capacity import ClusterPlan, Limit, Need, NodeMachine, Prices
from pk.cli.common import AsJson, say
from pk.server.node.memory import memory_bytes, partitions_max
from pk.settings import SERVER, TOPIC
from pk.wire.socket_network import connections_max

_DEEP = " " * 6
_SETTINGS = {
    "tier_max_lag_ms": TOPIC, "tier_file_bytes": TOPIC, "tier_refresh_max_ms": SERVER,
}  # fmt: skip


def machine_of(memory: str = "", cores: int = 0, files: int = 0) -> NodeMachine:
    """Return this machine, or what is given in its place.  Raises `InvalidOption`."""
    try:
        size = units.size_bytes(memory) if memory else memory_bytes()
    except ValueError:
        raise errors.InvalidOption(f"--memory {memory!r}: write 64GiB", option="--memory") from None
    if size < limits.MIB:
        raise errors.InvalidOption("--memory must be at least 1 MiB", option="--memory")
    for option, value in (("--cores", cores), ("--descriptors", files)):
        if value < 0:
            raise errors.InvalidOption(f"{option} must be at least 1, not {value}", option=option)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = descriptors.UNLIMITED
    files = files or hard
    cores = cores or len(os.sched_getaffinity(0))
    return NodeMachine(size, cores, files, partitions_max(size), connections_max(files))


def _rate(mb_per_s: float, gb_per_day: float | None) -> float:
    """Return MB/s of either option.  Raises `InvalidOption`."""
    if gb_per_day is None:
        return mb_per_s
    if mb_per_s:
        raise errors.InvalidOption("give one of --mb-per-s and --gb-per-day")
    most = capacity.MB_PER_S_MOST * 86.4
    if not 0 <= gb_per_day <= most:
        words = f"--gb-per-day must be from 0 to {most:,g}, not {gb_per_day}"
        raise errors.InvalidOption(words, option="--gb-per-day")
    return gb_per_day / 86.4


def _settings(**given: str) -> dict[str, Any]:
    """Return the settings that are given.  Raises `InvalidConfig`."""
    return {name: _SETTINGS[name].by_name[name].parse(text) for name, text in given.items() if text}


def lines(
    plan: ClusterPlan, found: list[Need], limiting: list[Limit], machine: NodeMachine
) -> list[str]:
    """Return the answer for people."""
    said = [
        f"plan: {plan.partitions:,} partitions in {plan.topics:,} topics, "
        f"{plan.mb_per_s:,.4g} MB/s ({plan.gb_per_day:,.4g} GB a day), "
        f"read {plan.readers:g} times; {plan.nodes} nodes, {plan.replication} replicas, "
        f"{'a' if plan.tiered else 'no'} tier",
    ]
    titles = {
        "node": f"each node ({plan.replicas:,} replicas, {plan.connections:,} connections):",
        "cluster": f"the tier, in {capacity.MONTH_DAYS} days:",
    }
    of = ""
    for need in found:
        if need.of != of:
            of = need.of
            said.append(titles[of])
        least = "at least " if need.missing and need.value is not None else ""
        value = "not measured" if need.value is None else capacity.number(need.value)
        unit = "" if need.value is None else f" {need.unit}"
        said.append(f"  {need.name}: {least}{value}{unit}")
        said += textwrap.wrap(f"= {need.words}", 100, initial_indent=_DEEP, subsequent_indent=_DEEP)
    memory = f"{machine.memory_bytes / limits.MIB:,.0f} MiB, {machine.cores} cores"
    said.append(f"a machine with {memory}, ulimit -Hn {machine.descriptors:,} is filled by:")
    for each in limiting:
        mark = "TOO MUCH " if each.hard and each.share > 1 else ""
        said.append(f"  {each.share:7.1%} {mark}{each.name}: {each.words}")
    said.append(f"first: {limiting[0].name}. What moves it: {limiting[0].advice}")
    if lacking := sorted({name for need in found for name in need.missing}):
        said.append(f"not measured, and in no sum: {', '.join(lacking)}")
    return said


def capacity_command(
    partitions: Annotated[int, typer.Option(help="of all topics together")] = 1,
    topics: Annotated[int, typer.Option(help="topics, each with a table of its own")] = 1,
    mb_per_s: Annotated[float, typer.Option(help="what producers send, compressed or not")] = 0.0,
    gb_per_day: Annotated[float | None, typer.Option(help="instead of --mb-per-s")] = None,
    readers: Annotated[float, typer.Option(help="how many times each byte is read")] = 1.0,
    connections: Annotated[int, typer.Option(help="connections of each node")] = 0,
    nodes: Annotated[int, typer.Option(help="nodes, which share everything evenly")] = 1,
    replication: Annotated[int, typer.Option(help="replicas of each partition")] = 1,
    tier: Annotated[bool, typer.Option("--tier/--no-tier", help="whether there are tables")] = True,
    retention_days: Annotated[float, typer.Option(help="of all data (retention_ms)")] = 7.0,
    local_days: Annotated[
        float | None, typer.Option(help="of data on the nodes' disks (local_retention_ms)")
    ] = None,
    tier_max_lag_ms: Annotated[str, typer.Option(help="the topics' setting, with a unit")] = "",
    tier_file_bytes: Annotated[str, typer.Option(help="the topics' setting, with a unit")] = "",
    tier_refresh_max_ms: Annotated[str, typer.Option(help="the server's setting")] = "",
    put_usd: Annotated[
        float, typer.Option(help="dollars for 1,000 requests that write or list")
    ] = capacity.PUT_USD,
    get_usd: Annotated[
        float, typer.Option(help="dollars for 1,000 requests that read")
    ] = capacity.GET_USD,
    gb_month_usd: Annotated[
        float, typer.Option(help="dollars for a GB stored for a month")
    ] = capacity.GB_MONTH_USD,
    memory: Annotated[str, typer.Option(help="of a node, as 64GiB; default: this machine")] = "",
    cores: Annotated[int, typer.Option(help="of a node; 0 = this machine")] = 0,
    files: Annotated[
        int, typer.Option("--descriptors", help="ulimit -Hn of a node; 0 = this machine")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Say what a planned cluster needs, what limits it first, and which setting moves that.

    The costs were measured (docs/capacity.md).  The default prices are list prices of Amazon S3
    Standard in us-east-1, of 2025: assumptions.  The command ends with 1 if a node of the plan
    needs more than the machine has.

    Example: pk doctor capacity --partitions 10000 --topics 100 --mb-per-s 20
    """
    plan = ClusterPlan(
        partitions=partitions, topics=topics, mb_per_s=_rate(mb_per_s, gb_per_day),
        readers=readers, connections=connections, nodes=nodes, replication=replication,
        tiered=tier, retention_days=retention_days,
        local_days=retention_days if local_days is None else local_days,
        **_settings(
            tier_max_lag_ms=tier_max_lag_ms, tier_file_bytes=tier_file_bytes,
            tier_refresh_max_ms=tier_refresh_max_ms,
        ),
    )  # fmt: skip
    prices = Prices(put_usd, get_usd, gb_month_usd)
    machine = machine_of(memory, cores, files)
    found = capacity.needs(capacity.checked(plan, prices), prices)
    limiting = capacity.limits_of(plan, machine)
    fits = not any(each.hard and each.share > 1 for each in limiting)
    if as_json:
        parts: dict[str, ClusterPlan | Prices | NodeMachine]
        parts = {"plan": plan, "prices": prices, "machine": machine}
        said: dict[str, Any] = {name: asdict(part) for name, part in parts.items()}
        said |= {"fits": fits, "needs": [asdict(each) for each in found]}
        say(said | {"limits": [asdict(each) for each in limiting]})
    else:
        typer.echo("\n".join(lines(plan, found, limiting, machine)))
    raise typer.Exit(0 if fits else 1)
