"""The runs of maintenance jobs in the campaign (driver.py): start, kill, and how they ended."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import java_archive

from pk.clock import block_s, monotonic_s

DRIVER = Path(__file__).parent / "driver.py"
READY_S = 240.0
#: A run that takes longer hangs.
RUN_S = 900.0
#: The share of runs that are killed, as long as kills are left.
KILLED = 0.75
#: How long a run of a job takes, until one has been measured.
FIRST_GUESS_S = 3.0
#: Every so many kills, the JVM dies with the driver, and all other runs with them.
WITH_JVM = 5
#: Errors that a job may end with beside others, beyond those that may be retried.
EXPECTED = ("LeaseHeld",)


@dataclass
class JobRun:
    """One run of a job."""

    name: str
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    pid: int = 0
    process: subprocess.Popen[bytes] | None = None  #: that forks it
    #: outcome, or error and whether it is retriable; None = killed
    result: dict[str, Any] | None = None


class Drivers:
    """The process that forks the runs, and its JVM."""

    def __init__(
        self, folder: Path, bootstrap: str, environment: dict[str, str], master: str = "local[2]"
    ) -> None:
        self._folder, self._bootstrap, self._master = folder, bootstrap, master
        self._environment = environment  #: credentials of the store
        self._lock = threading.RLock()
        self._runs: dict[str, JobRun] = {}
        self._number = 0
        self._ready = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.jvms_killed = 0

    def start(self) -> None:
        """Start the process; its first run waits until Spark is ready."""
        quick = {"SPARK_SUBMIT_OPTS": java_archive.quick()}
        with (self._folder / "driver.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(DRIVER), str(self._folder), self._master],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={**quick, **os.environ, **self._environment},
            )  # fmt: skip
        self._ready.clear()
        self._process = process
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(b"{"):
                continue
            told = json.loads(line)
            if "ready" in told:
                self._ready.set()
            elif "began" in told:
                run = self._runs.get(told["began"])
                if run is not None:
                    run.pid = told["pid"]
                    run.began.set()
            else:
                self._end(told["ended"])
        with self._lock:  # the process is gone, and all its runs are
            for name, run in list(self._runs.items()):
                if run.process is process:
                    self._end(name)

    def _end(self, name: str) -> None:
        with self._lock:
            run = self._runs.pop(name, None)
        if run is not None:
            result = self._folder / f"{name}.json"
            run.result = json.loads(result.read_text()) if result.exists() else None
            run.began.set()
            run.ended.set()

    def run(self, job: str, topic: str, options: dict[str, Any]) -> JobRun:
        """Start a run of a job; returns once its process exists."""
        if not self._ready.wait(READY_S):
            raise TimeoutError(f"Spark is not ready: {self.tail()}")
        with self._lock:
            self._number += 1
            run = JobRun(f"{self._number}-{job}", process=self._process)
            self._runs[run.name] = run
            asked = {
                "run": run.name, "job": job, "bootstrap": self._bootstrap, "topic": topic,
                "options": options,
            }  # fmt: skip
            assert self._process is not None
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._end(run.name)
        run.began.wait(READY_S)
        return run

    def kill(self, run: JobRun) -> None:
        """Send SIGKILL to a run, unless it has ended."""
        with self._lock:
            if run.name in self._runs and run.pid:
                with suppress(ProcessLookupError):  # it ended, and its last line is not read yet
                    os.kill(run.pid, signal.SIGKILL)

    def kill_jvm(self) -> None:
        """Send SIGKILL to the JVM, its driver and all runs; start others."""
        with self._lock:
            self.stop()
            self.jvms_killed += 1
            self.start()

    def stop(self) -> None:
        """End everything at once."""
        process = self._process
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._process = None

    def tail(self) -> str:
        """Return the last lines of the process's log."""
        text = (self._folder / "driver.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-20:])


class JobLoop(threading.Thread):
    """Runs one job again and again, and kills it at random moments, until it is done.

    A job that went on would keep the OPTIMIZE of another engine from landing: Delta refuses one
    whose files were replaced meanwhile.
    """

    def __init__(
        self,
        drivers: Drivers,
        job: str,
        topics: tuple[str, ...],
        options: Callable[[random.Random], dict[str, Any]],
        kills: int,
        rng: random.Random,
        *,
        short: bool,
        broken: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True)
        self.job, self.killed, self.finished, self.refused = job, 0, 0, 0
        self._drivers, self._topics, self._options = drivers, topics, options
        self._kills, self._rng, self._broken = kills, rng, broken
        self._short = short
        self._took_s = FIRST_GUESS_S
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it was killed as often as wanted, and has finished once.

        A short campaign lets each job finish at its end only.
        """
        return self.killed >= self._kills and (self._short or self.finished > 0)

    def run(self) -> None:
        while not (self._ended.is_set() or self.done):
            try:
                self._once()
            except Exception as failure:
                self._broken(f"{self.job}: {failure!r}")
                return
            block_s(self._rng.uniform(0.05, 0.6))

    def stop(self) -> None:
        """End after the run under way."""
        self._ended.set()
        self.join(RUN_S)

    def _once(self) -> None:
        began_s = monotonic_s()
        run = self._drivers.run(self.job, self._rng.choice(self._topics), self._options(self._rng))
        killing = self.killed < self._kills and (self._short or self._rng.random() < KILLED)
        if killing and not run.ended.wait(self._rng.uniform(0, self._took_s)):
            if not self._short and self.killed % WITH_JVM == WITH_JVM - 1:
                self._drivers.kill_jvm()
            else:
                self._drivers.kill(run)
        if not run.ended.wait(RUN_S):
            self._broken(f"{self.job} hangs: {self._drivers.tail()}")
            self._drivers.kill(run)
            return
        if run.result is None:
            self.killed += killing
        elif "outcome" in run.result:
            self.finished += 1
            self._took_s = 0.5 * self._took_s + 0.5 * (monotonic_s() - began_s)
        else:
            self.refused += 1
            if not (run.result["retriable"] or run.result["error"] in EXPECTED):
                self._broken(f"{self.job}: {run.result}")
