"""Looks for seeds that notice a canary sooner: `make canaries-faster`.

`python -m pk.sim.canaries` records the first seed that notices a canary.  Most canaries are noticed
by many seeds, some of them after a fraction of the virtual time, and CI replays the recorded one.
For each canary this program tries other seeds, each for at most two thirds of the CPU time of the
best one so far.  It records a seed only if the seed passes with the rule whole, as pk.sim.canaries
does.  The record is written after each canary: interrupt the program when there is no more time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from pk.sim.canaries import CANARIES, RECORD, recorded

#: A seed that takes more with the rule whole is not tried further.
PASSES_S = 300.0
SHARE = 2 / 3


class Outcome(NamedTuple):
    violation: str
    cpu_s: float


def bounded(work: Callable[[], str], limit_s: float) -> Outcome | None:
    """Run in a child; return None if it takes more CPU time than the limit."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        limit = ceil(limit_s)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        violation = work()
        os.write(writing, json.dumps([violation[:200], time.process_time()]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        return None
    found = Outcome(*json.loads(text))
    return found if found.cpu_s <= limit_s else None


def faster(name: str, seed: int, least_s: float, seeds: int) -> int:
    """Return the seed that notices the canary soonest: the recorded one, or one up to `seeds`."""
    canary = CANARIES[name]
    best = bounded(lambda: canary.notices(seed), PASSES_S)
    if best is None or not canary.caught(best.violation):
        print(f"{name}: seed {seed} does not notice it: python -m pk.sim.canaries", flush=True)
        return seed
    print(f"{name}: seed {seed}: {best.cpu_s:.1f} s", flush=True)
    for other in range(1, seeds + 1):
        if other == seed or best.cpu_s < least_s:
            continue
        found = bounded(lambda other=other: canary.notices(other), SHARE * best.cpu_s)
        if found is None or not canary.caught(found.violation):
            continue
        known = bounded(lambda other=other: canary.passes(other), PASSES_S)
        if known is not None and not known.violation:
            print(f"  seed {other}: {found.cpu_s:.1f} s", flush=True)
            seed, best = other, found
    return seed


def main() -> int:
    """Try the named canaries, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="default: all canaries")
    parser.add_argument("--seeds", type=int, default=8, help="try the seeds up to this one")
    parser.add_argument("--least", type=float, default=4.0, help="CPU seconds that are good enough")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in given.names or CANARIES:
        seed = faster(name, recorded()[name], given.least, given.seeds)
        if seed != recorded()[name]:
            record = json.dumps({**recorded(), name: seed}, indent=1, sort_keys=True)
            RECORD.write_text(record + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
