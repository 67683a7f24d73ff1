"""A server of one's own: `pk server start` as a child process, for the demo, chaos and soak.

The child listens on loopback, says one ready line, and logs to `<directory>/server.log`.  Its
processes are found by the pid files that each role writes (rule P1); `kill` is `kill -9`.  It dies
with the program (the thread) that started it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pk import errors
from pk.clock import block_s, monotonic_s

ROLES = ("controller", "broker", "tier")
_TAIL_LINES = 15
_POLL_S = 0.02


class EmbeddedServer:
    """One node under one supervisor.  `settings` are server settings and topic defaults."""

    def __init__(
        self,
        directory: Path,
        *,
        listen: str = "127.0.0.1:0",
        tier_url: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.listen = listen
        self.tier_url = tier_url
        self.settings = dict(settings or {})
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def data(self) -> Path:
        """The node's data directory."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    def start(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Start, wait for the ready line and return it.  Raises the server's own error."""
        self.spawn()
        return self.wait_ready(timeout_s)

    def spawn(self) -> None:
        """Start without waiting: a node of a cluster is ready only once others are there, too."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pk.cli", "server", "start", "--json"]
        command += ["--dir", str(self.data), "--listen", self.address or self.listen]
        if self.tier_url:
            command += ["--tier-url", self.tier_url]
        environment = {f"PK_{name.upper()}": str(value) for name, value in self.settings.items()}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, **environment, "PK_SUPERVISOR_PID": str(os.getpid())},
                start_new_session=True,  # Ctrl-C in a terminal reaches us first; we drain it
            )

    def wait_ready(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """What was spawned is ready: its ready line.  Raises the server's own error."""
        try:
            ready = self._ready_line(timeout_s)
        except BaseException:
            self.stop(grace_s=0)
            raise
        # A restart takes the same port, so that clients find it again.
        self.address = str(ready["address"])
        return ready

    def _ready_line(self, timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        deadline = monotonic_s() + timeout_s
        buffered = b""
        while b"\n" not in buffered:
            left = deadline - monotonic_s()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise errors.BrokerUnavailable(f"no ready line in {timeout_s:g} s\n{self.tail()}")
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                code = process.wait()
                raise errors.BrokerUnavailable(f"the server ended ({code})\n{self.tail()}")
            buffered += chunk
        line: dict[str, Any] = json.loads(buffered.split(b"\n")[0])
        if "error" in line:
            process.wait()
            told = line["error"]
            raise errors.from_wire(int(told["code"]), f"{told['message']} (log: {self.log})")
        return line

    def tail(self) -> str:
        """The last lines of the log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])

    def pids(self) -> dict[str, int]:
        """The living processes by role, the supervisor included."""
        found = {}
        if self._process is not None and self._process.poll() is None:
            found["supervisor"] = self._process.pid
        for role in ROLES:
            try:
                pid = int((self.data / "run" / f"{role}.pid").read_text())
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            # a pid may have been given to somebody else meanwhile
            if b"pk.server" in command and role.encode() in command:
                found[role] = pid
        return found

    def kill(self, role: str) -> bool:
        """`kill -9` of one process; False if it was not there."""
        pid = self.pids().get(role)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        if role == "supervisor" and self._process is not None:
            self._process.wait()
        return True

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_gone(self, pids: Mapping[str, int], timeout_s: float = 10.0) -> None:
        """Wait until none of these processes is left (children die with their supervisor)."""
        deadline = monotonic_s() + timeout_s
        while left := [pid for pid in pids.values() if _is_alive(pid)]:
            if monotonic_s() > deadline:
                raise errors.InternalError(f"processes {left} outlived their supervisor")
            block_s(_POLL_S)

    def stop(self, grace_s: float = 30.0) -> int | None:
        """Drain and stop; returns the exit code, None if it was not running."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()  # the children follow by PR_SET_PDEATHSIG
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return process.returncode


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"
