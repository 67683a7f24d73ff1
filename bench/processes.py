"""Figures of processes from `/proc`, and stopping them for a while.

CPU seconds are user + system of the whole process, all threads.  Peak memory is `VmHWM`, which
`reset_peak` sets back to the present size.  (`ru_maxrss` of an ended child also counts what the
forking parent had before the child's `exec`.)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def cpu_s(pids: Iterable[int]) -> float:
    """Return user and system seconds so far; a process that has ended counts as zero."""
    total = 0
    for pid in pids:
        try:
            fields = _stat(pid)
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def name(pid: int) -> str:
    """Return the program's name; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def tree_cpu_s(root: int) -> float:
    """Return `cpu_s` of a process and its descendants, including descendants that have ended."""
    total = 0
    for pid in children(root):
        try:
            fields = _stat(pid)
        except OSError:
            continue
        total += sum(int(number) for number in fields[11:15])
    return total / _TICKS


def reset_peak(pids: Iterable[int]) -> None:
    """Count the peak memory from here."""
    for pid in pids:
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:
            continue


def peak_rss_mb(pids: Iterable[int]) -> float:
    """Return the sum of the processes' peaks since `reset_peak` (an upper bound of the peak of the
    sum).
    """
    return _memory_mb(pids, "VmHWM:")


def rss_mb(pids: Iterable[int]) -> float:
    """Return the sum of the processes' memory now."""
    return _memory_mb(pids, "VmRSS:")


def _memory_mb(pids: Iterable[int], name: str) -> float:
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(name):
                    total += int(line.split()[1])
        except OSError:
            continue
    return total / 1024


def children(root: int) -> list[int]:
    """Return `root` and all its descendants, parents first."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
            except OSError:
                continue
    found, queue = [], [root]
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue.extend(sorted(parents.get(pid, [])))
    return found


def freeze(pids: Iterable[int]) -> None:
    """Send SIGSTOP, parents first, so that a supervisor does not see its children stop."""
    _signal(pids, signal.SIGSTOP)


def thaw(pids: Iterable[int]) -> None:
    """Send SIGCONT, children first."""
    _signal(reversed(list(pids)), signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
