"""A Spark session as a `Party`: stopped and continued with its side, with one command at a time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import processes
from bench.runs import ROOT, RunFailed, Sample
from bench.spark.session import MASTER, MEMORY

_START_S = 300.0
_COMMAND_S = 600.0


class SparkSession:
    """The process, its JVM and its Python workers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = f"spark of {kind}"
        self.description = f"one session a run, {MASTER}, {MEMORY}, warmed by an untimed pass"
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = Path()
        self._rest = b""

    def start(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / "spark.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.spark.session", self.kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
            )
        self._reply(_START_S)

    def pids(self) -> list[int]:
        return [] if self._process is None else processes.children(self._process.pid)

    def probe(self) -> dict[int, int]:
        return {0: int(self.ask(do="ping")["rows"])}

    def ask(self, **command: Any) -> dict[str, float]:
        """Send a command and return its reply.  Raises `RunFailed` with the session's output."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._reply(_COMMAND_S)

    def _reply(self, timeout_s: float) -> dict[str, float]:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while True:
            *lines, self._rest = self._rest.split(b"\n")
            for at, line in enumerate(lines):
                if line.startswith(b"reply "):
                    self._rest = b"\n".join([*lines[at + 1 :], self._rest])
                    found: dict[str, Any] = json.loads(line[6:])
                    if "error" in found:
                        raise RunFailed(f"{self.name}: {found['error']}")
                    return found
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise RunFailed(f"{self.name} gave no answer in {timeout_s:g} s{self._words()}")
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise RunFailed(f"{self.name} ended{self._words()}")
            self._rest += chunk

    def _words(self) -> str:
        return "\n" + self._errors.read_text(errors="replace")[-3000:]

    def timed(self, server: list[int], records: int, **command: Any) -> Sample:
        """Run one command that must see exactly `records` rows; return its cost."""
        assert self._process is not None
        processes.reset_peak([*self.pids(), *server])
        before = self._cpu_s(server)
        reply = self.ask(**command)
        spent = [after - early for early, after in zip(before, self._cpu_s(server), strict=True)]
        if reply["rows"] != records:
            raise RunFailed(f"{self.name}: {reply['rows']} rows instead of {records}: {command}")
        return Sample(
            value=records / reply["seconds"],
            records=records,
            client_cpu_s=spent[0],
            server_cpu_s=spent[2],
            client_peak_mb=processes.peak_rss_mb(self.pids()),
            server_peak_mb=processes.peak_rss_mb(server),
            figures={
                "seconds": reply["seconds"],
                "CPU s of the JVM alone": spent[1],
                **({"trigger_s": reply["trigger_s"]} if "trigger_s" in reply else {}),
            },
        )

    def _cpu_s(self, server: list[int]) -> tuple[float, float, float]:
        """Return the CPU seconds of the session as a whole, of its JVM, and of the server."""
        assert self._process is not None
        root = self._process.pid
        machine = [pid for pid in self.pids() if processes.name(pid) == "java"]
        return processes.tree_cpu_s(root), processes.cpu_s(machine), processes.cpu_s(server)

    def stop(self) -> None:
        """Close its input, then send SIGKILL to the remaining processes of the tree."""
        process, self._process = self._process, None
        if process is None:
            return
        tree = processes.children(process.pid)
        processes.thaw(tree)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in tree:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
