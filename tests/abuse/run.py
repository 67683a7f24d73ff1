"""Abuse: damaged files, wrong clocks, full disks and hostile peers against real processes.

    python tests/abuse/run.py [--only AREA,…] [--short] [--seed N] [--json FILE]

Each area is a module of this folder with a function `run(seed, work, short)` (verdicts.py).  The
areas run one after the other, each in a directory of its own.  The run prints its seed and a table
of verdicts.  Exit 1: at least one verdict is broken, or an area raised.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from verdicts import Verdict

HERE = Path(__file__).parent

#: Modules of this folder that are no areas.
_SHARED = frozenset({"run", "verdicts"})


def areas() -> list[str]:
    """The names of all areas, sorted."""
    return sorted(
        path.stem
        for path in HERE.glob("*.py")
        if path.stem not in _SHARED and not path.stem.startswith(("_", "test_"))
    )


def run_area(area: str, seed: int, short: bool) -> list[Verdict]:
    """Run one area.  An exception is a broken verdict: the other areas still run."""
    with tempfile.TemporaryDirectory(prefix=f"pk-abuse-{area}-") as work:
        try:
            return list(importlib.import_module(area).run(seed, Path(work), short))
        except Exception as error:
            traceback.print_exc()
            return [Verdict(area, False, f"{type(error).__name__}: {error}")]


def main(argv: list[str] | None = None) -> int:
    """Run the areas and print the table.  Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="areas, separated by commas")
    parser.add_argument("--short", action="store_true", help="the short form that CI runs")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the verdicts to this file")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    chosen = [name for name in options.only.split(",") if name] or areas()
    unknown = sorted(set(chosen) - set(areas()))
    if unknown:
        parser.error(f"no such area: {', '.join(unknown)}; there are: {', '.join(areas())}")
    print(f"SEED {seed}", flush=True)
    rows: list[tuple[str, Verdict]] = []
    for area in chosen:
        for verdict in run_area(area, seed, options.short):
            rows.append((area, verdict))
            word = "kept  " if verdict.kept else "BROKEN"
            print(f"{word} {area:12} {verdict.case}: {verdict.figures}", flush=True)
    if options.json is not None:
        table = [{"area": area, **asdict(verdict)} for area, verdict in rows]
        options.json.write_text(json.dumps({"seed": seed, "verdicts": table}, indent=1) + "\n")
    broken = sum(not verdict.kept for _, verdict in rows)
    print(f"{len(rows) - broken} kept, {broken} broken", flush=True)
    if broken:
        again = " --short" if options.short else ""
        print(f"again: python tests/abuse/run.py --seed {seed} --only {','.join(chosen)}{again}")
    return 1 if broken or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
