"""One client process that is watched: when its steady window opens and closes, and its costs.

A client prints lines; a `Reader` turns each into None or a `Mark`.  The first `open` mark starts
the window; the last `close` mark ends it and carries the result.  At both, the CPU time of the
client with its children, and that of the side's server processes, is read.  A client that fails,
or prints nothing for `SILENCE_S`, is an error that shows its last lines; it never hangs the
benchmark.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import processes

SILENCE_S = 120
ROOT = Path(__file__).resolve().parents[1]


class RunFailed(Exception):
    """The client process failed, or made no progress."""


@dataclass(slots=True)
class Mark:
    """What a line of a client means: `open` or `close` of the window, with figures."""

    kind: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Sample:
    """One round of one side: `value` in the case's unit, `records` in the window, and its costs."""

    value: float
    records: float
    client_cpu_s: float
    server_cpu_s: float
    client_peak_mb: float
    server_peak_mb: float
    figures: dict[str, float] = field(default_factory=dict)
    #: A joint round's samples, by variant.
    parts: dict[str, Sample] = field(default_factory=dict)


def bare(value: float, figures: dict[str, float] | None = None) -> Sample:
    """Return a sample without costs of its own: bytes, or seconds of a call."""
    return Sample(value, 0, 0, 0, 0, 0, figures or {})


Reader = Callable[[str], Mark | None]


def read_line(line: str) -> Mark | None:
    """Read a line of this package's clients: `open`, `close {figures}` (a `Reader`)."""
    kind, _, figures = line.partition(" ")
    return Mark(kind, json.loads(figures)) if kind in ("open", "close") else None


def watch(
    command: Sequence[str],
    reader: Reader,
    server: Sequence[int],
    *,
    whole_run: bool = False,
) -> Sample:
    """Run a client to its end.  `close` must carry `value`, and the number of `records` that the
    costs are for.

    `whole_run`: for clients without a warm-up; the window opens when they start.
    """
    processes.reset_peak(server)
    opened = (0.0, processes.cpu_s(server)) if whole_run else (0.0, 0.0)
    closed = opened
    result: Mark | None = None
    peak_mb = 0.0
    tail: list[str] = []
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=complaints,
            bufsize=0,
            cwd=ROOT,
        )
        try:
            for line in _lines(process):
                tail = [*tail[-20:], line]
                mark = reader(line)
                if mark is None:
                    continue
                client = processes.children(process.pid)
                costs = (processes.cpu_s(client), processes.cpu_s(server))
                # at every mark, because the process may have ended after the last one
                peak_mb = max(peak_mb, processes.peak_rss_mb(client))
                if mark.kind == "open" and opened == (0.0, 0.0):
                    opened = costs
                elif mark.kind == "close":
                    result, closed = mark, costs
        except BaseException:
            process.kill()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
            _, status = os.waitpid(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0 or result is None:
            complaints.seek(0)
            words = complaints.read().decode(errors="replace")[-3000:]
            raise RunFailed(
                f"{' '.join(command[:6])} … exited with {process.returncode}\n"
                + "\n".join(tail)
                + f"\n{words}"
            )
    figures = result.figures
    return Sample(
        value=figures["value"],
        records=figures.get("records", 0.0),
        client_cpu_s=closed[0] - opened[0],
        server_cpu_s=closed[1] - opened[1],
        client_peak_mb=peak_mb,
        server_peak_mb=processes.peak_rss_mb(server),
        figures={
            name: number for name, number in figures.items() if name not in ("value", "records")
        },
    )


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield lines as they come; raises `RunFailed` after `SILENCE_S` without one."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        rest = b""
        descriptor = process.stdout.fileno()
        while True:
            if not selector.select(SILENCE_S):
                raise RunFailed(f"{process.args!r} printed nothing for {SILENCE_S} s")
            chunk = os.read(descriptor, 65536)
            if not chunk:
                if rest:
                    yield rest.decode()
                return
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode() for line in whole)
