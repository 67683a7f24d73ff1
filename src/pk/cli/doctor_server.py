"""`pk doctor server`: what this machine lets a node have, and what is too little."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass

import typer

from pk import descriptors, limits
from pk.server.node.memory import memory_bytes, partitions_max
from pk.wire.socket_network import connections_max

#: With fewer descriptors many partitions work, but their files are closed and opened in turn.
DESCRIPTORS_ADVISED = 65_536
MEMORY_ADVISED = 1024 * limits.MIB


@dataclass(slots=True, frozen=True)
class Allowance:
    """What one resource allows.  verdict: ok, warning or too little."""

    resource: str
    found: str
    verdict: str = "ok"
    advice: str = ""


def look_at_descriptors() -> Allowance:
    """Say what the hard limit of open files allows; a node raises its soft limit to it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = descriptors.UNLIMITED
    files = int(hard * descriptors.FILES_SHARE)
    found = f"{hard}: {files} partitions keep their file open, {connections_max(hard)} connections"
    advice = f"ulimit -Hn {DESCRIPTORS_ADVISED}, or LimitNOFILE={DESCRIPTORS_ADVISED} of systemd"
    if hard < descriptors.LEAST:
        return Allowance(
            "open files", f"{hard}; a node needs {descriptors.LEAST}", "too little", advice
        )
    if hard < DESCRIPTORS_ADVISED:
        return Allowance("open files", found, "warning", advice)
    return Allowance("open files", found)


def look_at_memory() -> Allowance:
    memory = memory_bytes()
    most = partitions_max(memory)
    found = f"{memory / limits.MIB:.0f} MiB: partitions_max is {most} unless it is set"
    if memory < MEMORY_ADVISED:
        advice = "at least 1 GiB: three processes need 250 MB before the first partition"
        return Allowance("memory", found, "warning", advice)
    return Allowance("memory", found)


def server(
    as_json: bool = typer.Option(False, "--json", help="print the findings as JSON"),
) -> None:
    """Say what this machine lets a node have: open files, connections, memory, partitions.

    Example: pk doctor server
    """
    findings = [look_at_descriptors(), look_at_memory()]
    if as_json:
        print(json.dumps([asdict(each) for each in findings]))
    else:
        for each in findings:
            print(f"{each.verdict}: {each.resource}: {each.found}")
            if each.advice:
                print(f"  advice: {each.advice}")
    raise typer.Exit(1 if any(each.verdict == "too little" for each in findings) else 0)
