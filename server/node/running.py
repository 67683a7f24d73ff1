"""What other processes can learn of a node that runs on this machine, from its run directory.

    DIR/run/.lock         held by the supervisor while it lives, with its pid (node/supervisor O1)
    DIR/run/ready.json    the facts of the ready line; absent while the node starts, and
                          {"stopping": true} while it drains
    DIR/run/ROLE.pid      the process of each role

Invariants:
  N1  A process is taken for the supervisor only if it has the lock file open.  So a pid that was
      given to another process since is never signalled.
  N2  A node that drains is not signalled again unless it is to be killed: the supervisor takes a
      second signal for that.
  N3  A look takes the lock for a moment only if it is free; a supervisor that starts waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pk import errors
from pk.log.files import LOCK_NAME

READY = "ready.json"
POLL_S = 0.1
_STAT_START = 21  #: field of /proc/PID/stat: the start of a process in clock ticks after boot


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """One process of a node.  memory_bytes: its resident set; None = the process does not run."""

    role: str
    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A node whose supervisor lives.

    facts: of the ready line; {} = the node is starting.  uptime_s: since the supervisor's start.
    """

    pid: int
    uptime_s: float
    facts: Mapping[str, Any]
    processes: tuple[NodeProcess, ...]

    @property
    def stopping(self) -> bool:
        return bool(self.facts.get("stopping"))

    @property
    def missing(self) -> tuple[str, ...]:
        """The roles whose process does not run at the moment."""
        return tuple(each.role for each in self.processes if each.memory_bytes is None)


def publish(run_dir: str, facts: Mapping[str, Any]) -> None:
    """Write the facts of the ready line.  A full disk does not prevent the start."""
    with contextlib.suppress(OSError):
        fresh = Path(run_dir) / f"{READY}.tmp"
        fresh.write_text(json.dumps(facts))
        fresh.rename(Path(run_dir) / READY)


def withdraw(run_dir: str) -> None:
    """Remove the facts: the node starts, or has ended."""
    with contextlib.suppress(OSError):
        (Path(run_dir) / READY).unlink(missing_ok=True)


def find(directory: str) -> RunningNode | None:
    """Return the node that runs from a data directory; None = no supervisor lives there.

    directory: the node's first data directory.  Raises `InvalidOption` if it is not one,
    `DirectoryLocked` if the supervisor's process cannot be identified.
    """
    run = Path(directory).absolute() / "run"
    if not run.is_dir():
        raise errors.InvalidOption(
            f"{directory} has no run directory: give the first --dir of a node that was started"
        )
    pid = _holder(run / LOCK_NAME)
    if pid is None:
        return None
    facts: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads((run / READY).read_text())
    pids = {"supervisor": pid}
    for path in sorted(run.glob("*.pid")):
        with contextlib.suppress(OSError, ValueError):
            pids.setdefault(path.stem, int(path.read_text()))
    processes = tuple(NodeProcess(role, each, _memory(each)) for role, each in pids.items())
    return RunningNode(pid, _uptime_s(pid), facts, processes)


def stop(
    directory: str, timeout_s: float, *, kill: bool, monotonic_s: Callable[[], float],
    block_s: Callable[[float], None],
) -> bool:  # fmt: skip
    """Ask a node to drain, and wait until its supervisor has ended.  Return False if none runs.

    kill: after the time-out the children are killed, as by a second Ctrl-C.
    Raises `RequestTimedOut` if the node is still there, `DirectoryLocked`, `InvalidOption`.
    """
    lock = Path(directory).absolute() / "run" / LOCK_NAME
    found = find(directory)
    if found is None:
        return False
    for attempt in (1, 2) if kill else (1,):
        if attempt == 2 or not found.stopping:
            _ask(found.pid)
        deadline_s = monotonic_s() + (timeout_s if attempt == 1 else 10.0)
        while monotonic_s() < deadline_s:
            if _holder(lock) != found.pid:
                return True
            block_s(POLL_S)
    raise errors.RequestTimedOut(
        f"process {found.pid} still runs after {timeout_s:g} s: it goes on draining; wait with "
        "`pk server status`, or end it with --kill"
    )


def _ask(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return  # it has ended by itself
    except PermissionError as cause:
        raise errors.DirectoryLocked(
            f"process {pid} belongs to another user: run this as the user of the node"
        ) from cause


def _holder(lock: Path) -> int | None:
    """Return the process that holds the lock; None = it is free.  Raises `DirectoryLocked`."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise errors.DirectoryLocked(f"reading {lock}: {cause.strerror}") from cause
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None  # closing the descriptor releases it (N3)
    except BlockingIOError:
        named = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    pid = int(named) if named.isdecimal() else 0
    if pid and _has_open(pid, lock):
        return pid
    raise errors.DirectoryLocked(
        f"{lock} is held, and process {named or 'unknown'}, which it names, does not hold it as "
        "far as this user may see: run this as the user of the node, on its machine"
    )


def _has_open(pid: int, path: Path) -> bool:
    """Say whether a process has a file open (N1)."""
    target = os.path.realpath(path)
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) == target:
                        return True
    except OSError:
        return False
    return False


def _memory(pid: int) -> int | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # a zombie has no pages


def _uptime_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[_STAT_START - 2]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - began_s)
    except (OSError, ValueError, IndexError):
        return 0.0
