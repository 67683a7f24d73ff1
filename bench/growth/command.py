"""`python -m bench growth`: measures points, and prints one row of JSON for each."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import page
from bench.growth import curves, picture, rows
from bench.growth.curves import Curve
from bench.runs import RunFailed
from bench.sides import SideFailed
from pk.errors import PkError


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench growth", description="How cost grows with what there is."
    )
    parser.add_argument("--only", default="", help=f"curves: {', '.join(curves.BY_NAME)}")
    parser.add_argument("--side", choices=("pk", "kafka"), help="measure this side alone")
    parser.add_argument("--least", type=int, default=0, help="leave smaller points out")
    parser.add_argument("--most", type=int, default=10**9, help="leave larger points out")
    parser.add_argument("--folder", type=Path, help="where servers work (default: /tmp)")
    parser.add_argument(
        "--write", action="store_true", help="keep the rows in docs/growth.jsonl, and draw them"
    )
    parser.add_argument(
        "--draw", action="store_true", help="draw docs/growth.svg from the rows; measure nothing"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of the servers")
    found = parser.parse_args(given)
    found.only = [name for name in found.only.split(",") if name] or list(curves.BY_NAME)
    if unknown := [name for name in found.only if name not in curves.BY_NAME]:
        parser.error(f"unknown curve {unknown[0]!r}")
    return found


def chosen(curve: Curve, side: str | None, least: int, most: int) -> list[tuple[str, int]]:
    """Return side and n of the points to measure."""
    return [
        (kind, n)
        for kind, limit in curve.sides.items()
        for n in curve.points
        if side in (None, kind)
        if least <= n <= min(most, limit)
    ]


def _point(given: argparse.Namespace, curve: Curve, side: str, n: int) -> bool:
    """Measure and print one point; returns whether it succeeded."""
    folder = Path(tempfile.mkdtemp(prefix=f"pk-growth-{curve.name}-", dir=given.folder))
    try:
        measure = curve.measure(side)
        row = rows.measured(curve.name, side, n, lambda: measure(n, folder))
    except (SideFailed, RunFailed, OSError, PkError) as failure:
        print(f"{curve.name} {side} {n}: {type(failure).__name__}: {failure}", file=sys.stderr)
        return False
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(row), flush=True)
    if given.write:
        rows.add(row)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the points in question; returns the exit code."""
    given = _arguments(arguments)
    if given.draw:
        _made()
        return 0
    done = [
        _point(given, curves.BY_NAME[name], side, n)
        for name in given.only
        for side, n in chosen(curves.BY_NAME[name], given.side, given.least, given.most)
    ]
    if given.write:
        _made()
    return 0 if all(done) else 1


def _made() -> None:
    """Make what is made from the rows: the picture, and docs/capacity.md with its costs."""
    picture.write(rows.read())
    page.make_pages()
