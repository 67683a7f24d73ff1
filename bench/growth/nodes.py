"""Nodes under measurement: what their processes cost, by role."""

from __future__ import annotations

import os
import resource
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import processes
from bench.growth.rows import Figures
from bench.pk_side import SETTINGS, PkSide
from bench.sides import Side, SideFailed

#: A start, a creation or a stop of many partitions on a busy machine.
PATIENCE_S = 600.0
#: How long nothing happens before costs at rest are read.
SETTLE_S = 10.0
STORE_CALLS = "pk_tier_store_calls_total"


class PkNode(PkSide):
    """One pk node; descriptors: its `ulimit -n`, 0 = that of this process."""

    def __init__(
        self,
        *,
        tiered: bool = False,
        descriptors: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tiered)
        self._descriptors = descriptors
        # the stop of many partitions is measured, not cut short
        self._more = {"shutdown_timeout_ms": 300_000, **(settings or {})}
        self._metrics = ""

    def start(self, folder: Path) -> None:
        from pk import AdminClient
        from pk.cli.embedded import EmbeddedServer, ReservedPorts

        self._folder = folder
        self._metrics = ReservedPorts().address()
        tier = (folder / "tier").as_uri() if self.tiered else ""
        given = {**SETTINGS, **self._more, "metrics": self._metrics}
        self._server = EmbeddedServer(folder, tier_url=tier, settings=given)
        self.begin()
        self._admin = AdminClient(self.address)

    def begin(self) -> None:
        """Start the processes (again) and wait until the node serves."""
        self._server.spawn()
        if self._descriptors:
            # before the supervisor starts its children, which inherit it
            limit = (self._descriptors, self._descriptors)
            resource.prlimit(self.roles()["supervisor"], resource.RLIMIT_NOFILE, limit)
        self._server.wait_ready(PATIENCE_S)
        self.address = self._server.address

    def end(self) -> None:
        """Drain and stop the processes; the folder stays.  Raises `SideFailed`."""
        code = self._server.stop(PATIENCE_S)
        if code != 0:
            raise SideFailed(f"the node ended with {code}: {self._server.tail()}")

    def roles(self) -> dict[str, int]:
        pids: dict[str, int] = self._server.pids()
        return pids

    def said(self) -> str:
        """Return the node's log."""
        return (self._folder / "server.log").read_text(errors="replace")

    def create_topic(
        self, topic: str, partitions: int = 4, configs: Mapping[str, str] | None = None
    ) -> None:
        self._admin.create_topic(
            topic, partitions=partitions, configs=configs, timeout_s=PATIENCE_S
        )

    def untiered(self, names: Sequence[str]) -> int:
        """Return how many partitions of these topics have records that no table has."""
        states = self._admin.describe_topics(names, timeout_s=PATIENCE_S)
        return sum(each.tiered_end < each.log_end for each in states)

    def store_calls(self) -> float:
        """Return how many calls to the object store were made so far."""
        return sum(self.store_calls_by_operation().values())

    def store_calls_by_operation(self) -> dict[str, float]:
        """Return the calls to the object store so far, by operation."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith(STORE_CALLS + "{"):
                operation = line.partition('operation="')[2].partition('"')[0]
                found[operation] = found.get(operation, 0.0) + float(line.split()[-1])
        return found


def roles_of(side: Side) -> dict[str, int]:
    """Return the side's processes by role."""
    if isinstance(side, PkNode):
        return side.roles()
    return {f"kafka{number or ''}": pid for number, pid in enumerate(side.pids())}


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class Spent:
    """CPU seconds and seconds of the clock since this object was made."""

    def __init__(self, side: Side) -> None:
        self._pids = list(roles_of(side).values())
        self._cpu_s, self._client_s = processes.cpu_s(self._pids), time.process_time()
        self._begin = time.monotonic()

    def figures(self, name: str) -> Figures:
        """Return what was spent, as figures whose names begin with `name`."""
        return {
            f"{name}_s": time.monotonic() - self._begin,
            f"{name}_cpu_s": processes.cpu_s(self._pids) - self._cpu_s,
            f"{name}_client_cpu_s": time.process_time() - self._client_s,
        }


def held(side: Side) -> Figures:
    """Return memory in MB and descriptors of the side, in all and by role."""
    found: Figures = {"memory_mb": 0.0, "descriptors": 0}
    for role, pid in roles_of(side).items():
        memory = processes.rss_mb([pid])
        open_files = descriptors(pid)
        found |= {f"{role}_mb": memory, f"{role}_descriptors": open_files}
        found["memory_mb"] += memory
        found["descriptors"] += open_files
    return found


def at_rest(side: Side, seconds: float, settle_s: float = SETTLE_S) -> Figures:
    """Return the CPU of the side in percent of a core while nothing happens, by role, and what it
    holds.
    """
    time.sleep(settle_s)
    roles = roles_of(side)
    before = {role: processes.cpu_s([pid]) for role, pid in roles.items()}
    begin = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - begin
    found: Figures = {"rest_cpu_percent": 0.0}
    for role, pid in roles.items():
        percent = 100 * (processes.cpu_s([pid]) - before[role]) / elapsed
        found[f"{role}_rest_cpu_percent"] = percent
        found["rest_cpu_percent"] += percent
    return {**found, **held(side)}
