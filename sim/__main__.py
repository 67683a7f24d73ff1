"""`python -m pk.sim SEED …` runs a whole simulated cluster from one seed.

The command prints the seed first and the line that replays the run last, whatever happens in
between.  Exit code 0 means that no check failed.  With `--count N` it runs the seeds SEED,
SEED + 1, … and stops at the first seed that fails.  `--trace` prints every event.
"""

from __future__ import annotations

import argparse
import logging
import sys

from pk.sim.campaign import Run
from pk.sim.options import drawn
from pk.sim.world import SimWorld


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pk.sim", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="so many seeds, from SEED on")
    parser.add_argument("--trace", action="store_true", help="print every event of the run")
    parser.add_argument("--fault-ms", type=int, help="virtual time in which things go wrong")
    parser.add_argument("--acknowledged-min", type=int, help="go on until so many records are")
    given = parser.parse_args(arguments)
    names = ("fault_ms", "acknowledged_min")
    more = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    tail = "".join(f" --{name.replace('_', '-')} {value}" for name, value in more.items())
    logging.disable(logging.WARNING)  # the trace already holds what nodes and clients log
    for seed in range(given.seed, given.seed + given.count):
        print(f"SEED={seed}", flush=True)
        one = Run(seed, drawn(SimWorld(seed).random("options"), **more))
        report = one.execute()
        if given.trace:
            print("\n".join(one.world.trace))
        if report.violation:
            print(report.violation)
        print(report.line)
        if report.violation:
            print(f"replay: python -m pk.sim {seed}{tail}")
            return 1
    count = f" --count {given.count}" if given.count > 1 else ""
    print(f"replay: python -m pk.sim {given.seed}{count}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
