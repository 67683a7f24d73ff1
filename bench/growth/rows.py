"""Rows: one point of one curve each, and the store that keeps the newest row of each point."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.report import machine
from bench.runs import ROOT

STORE = ROOT / "docs" / "growth.jsonl"

Row = dict[str, Any]
Figures = dict[str, float]


def load() -> float:
    """Return the load average of the last minute."""
    return round(os.getloadavg()[0], 1)


def measured(curve: str, side: str, n: int, work: Callable[[], Figures]) -> Row:
    """Measure one point; returns its row (bench/growth B1)."""
    before, begin = load(), time.monotonic()
    figures = work()
    return {
        "curve": curve,
        "side": side,
        "n": n,
        "figures": {name: tidy(value) for name, value in figures.items()},
        "load": [before, load()],
        "took_s": round(time.monotonic() - begin, 1),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }


def tidy(value: float) -> float:
    """Round to four significant digits; whole numbers stay what they are."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def told(figures: Figures) -> Figures:
    """Print the figures of a part of a point as progress; return them."""
    words = ", ".join(f"{name} {tidy(value):g}" for name, value in figures.items())
    print(f"  {datetime.now(UTC):%H:%M:%S} {words}", file=sys.stderr, flush=True)
    return figures


def key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return str(row["curve"]), str(row["side"]), int(row["n"])


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Return `old` with the points of `new` in place of its own, in order."""
    found = {key(row): row for row in (*old, *new)}
    return [found[name] for name in sorted(found)]


def read(path: Path = STORE) -> list[Row]:
    """Return the rows of a store; none if there is no store."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def add(row: Row, path: Path = STORE) -> None:
    """Put one row into the store; programs that do so at the same time take turns."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rows = merged(read(path), [row])
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def points(rows: Sequence[Row], curve: str, side: str, figure: str) -> list[tuple[int, float]]:
    """Return (n, figure) of a curve's rows that have this figure, by n."""
    return sorted(
        (row["n"], row["figures"][figure])
        for row in rows
        if (row["curve"], row["side"]) == (curve, side) and figure in row["figures"]
    )
