"""What a soak reads of processes, disks and metrics endpoints while others work.

Linux only: figures come from /proc.  Reading is cheap (no process is started, no lock is taken), so
a look each second adds no noticeable load.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Sample, median

from pk.cli.embedded import ReservedPorts
from pk.clock import block_s

#: A sample's descriptors are the median of so many looks, this far apart: those that are held.  A
#: checkpoint of the table has a few files open for a tenth of a second.
LOOKS, LOOK_S = 5, 0.1
TOLD_TIMEOUT_S = 10
#: Reserves a port until this process ends.
free_port = ReservedPorts().draw


def sample(pid: int, at_s: float, descriptors: Sequence[int]) -> Sample:
    """Return one process, as the kernel sees it."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    held = int(median(descriptors))
    waited_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return Sample(at_s, rss, held, threads, cpu_s, max(descriptors), waited_s)


def descriptors_of(pids: Mapping[str, int], looks: int = LOOKS) -> dict[str, list[int]]:
    """Return several looks at how many descriptors each process has open."""
    found: dict[str, list[int]] = {role: [] for role in pids}
    for look in range(looks):
        if look:
            block_s(LOOK_S)
        for role, pid in pids.items():
            found[role].append(len(os.listdir(f"/proc/{pid}/fd")))
    return found


def disk_bytes(root: Path) -> int:
    """Return the bytes of the blocks in use below `root`; files may vanish meanwhile."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@dataclass(slots=True, frozen=True)
class Told:
    """What a node's endpoint says at one moment."""

    lag: Mapping[str, Mapping[float, float]]  #: buckets of `pk_loop_lag_ms` by role
    values: Mapping[str, float]  #: every sample of the broker by its name with its labels

    def value(self, name: str) -> float:
        """Return the sum over all labels; 0 if the metric is missing."""
        return sum(
            value
            for full, value in self.values.items()
            if full == name or full.startswith(name + "{")
        )

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram without labels of its own, as `figures.quantile` takes it; {} if it is
        missing.
        """
        pattern = re.compile(rf'{name}_bucket{{le="([^"]+)"}}')
        found = ((pattern.fullmatch(full), value) for full, value in self.values.items())
        return {float(match[1]): value for match, value in found if match}


def told(address: str) -> Told:
    """Ask HOST:PORT.  Raises OSError."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TOLD_TIMEOUT_S) as reply:
        return parsed(reply.read().decode())


def parsed(text: str) -> Told:
    """Parse a node's metrics in Prometheus' text format."""
    lag: dict[str, dict[float, float]] = defaultdict(dict)
    values: dict[str, float] = {}
    for name, value in re.findall(r"^(pk_[^\n]*) (\S+)$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
        if name.startswith("pk_loop_lag_ms_bucket"):
            lag[labels.get("role", "broker")][float(labels["le"])] = float(value)
        else:
            values[name] = float(value)
    return Told(dict(lag), values)


def pressure(resource: str, kind: str) -> int:
    """Milliseconds since the start that tasks waited for cpu, io or memory (PSI); 0 = not told."""
    try:
        text = Path(f"/proc/pressure/{resource}").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{kind} .*total=(\d+)$", text, re.MULTILINE)
    return int(found[1]) // 1000 if found else 0
