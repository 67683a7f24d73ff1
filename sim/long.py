"""`python -m pk.sim.long`: a campaign of many seeds over several processes, resumable.

One JSON line per seed is appended to a results file: seed, commit, verdict, counters.  A seed that
is there already for this commit and these options is not run again, so a campaign that was
interrupted goes on.  At the end the counters of the whole campaign are printed.  It fails if a seed
did, or if something that must be met was not met once: a promise that was never in danger was not
tested.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pk.sim.campaign import Report, Run
from pk.sim.options import CHORES, FAULTS, drawn
from pk.sim.world import SimWorld

RESULTS = ".sim/results.jsonl"
UNREST_MS = 120_000
ACKNOWLEDGED_MIN = 2_000
EVENTS_PER_S_MIN = 20_000
#: A process is replaced after so many seeds: what Arrow keeps is given back.
SEEDS_PER_PROCESS = 25
#: What a campaign must have met (Report.counts).
MET = (
    "ISR expand",
    "ISR shrink",
    "ISR changes lost",
    "ISR changes unheard of",
    "START_AT",
    "deaths anew",
    "elections clean",
    "elections from the ELR",
    "elections unclean",
    "controller disks replaced",
    "controllers voting again",
    "eras",
    "late frames",
    "leaderless",
    "quorum elections",
    "replicas made anew",
    "rot of index",
    "rot of log",
    "rot of metadata",
    "rot of offsets",
    "rot of producers",
    "snapshot loads of brokers",
    "snapshot loads of voters",
    "tier commits late",
    "tier commits lost",
    "tier commits refused",
    "truncations",
    *(f"chore {name}" for name in CHORES),
    *(f"fault {name}" for name in FAULTS),
)


def counters(report: Report) -> dict[str, int]:
    """Everything that was counted in one run."""
    faults = {f"fault {name}": count for name, count in report.faults.items()}
    return {**report.counts, **faults}


def run_seed(seed: int, given: dict[str, Any]) -> dict[str, Any]:
    """One seed as a line of the results."""
    logging.disable(logging.CRITICAL)
    options = drawn(SimWorld(seed).random("options"), **given)
    began = os.times()
    report = Run(seed, options).execute()
    ended = os.times()
    return {
        "seed": seed,
        "verdict": report.violation.splitlines()[0][:2_000] if report.violation else "ok",
        "digest": report.digest,
        "events": report.events,
        "virtual_ms": report.virtual_ms,
        "cpu_s": round(ended.user - began.user + ended.system - began.system, 2),
        "acknowledged": report.acknowledged,
        "unknown": report.unknown,
        "rows_read": report.rows_read,
        "tiered_rows": report.tiered_rows,
        "nodes": [list(node.roles) for node in options.nodes],
        "counters": counters(report),
    }


def commit() -> str:
    """What is run: the commit, and whether something was changed since."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def known(results: Path, key: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The lines of earlier runs of the same campaign, by seed."""
    found: dict[int, dict[str, Any]] = {}
    if results.exists():
        for line in results.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the end of an interrupted write
            if all(row.get(name) == value for name, value in key.items()):
                found[row["seed"]] = row
    return found


def verdict(rows: Iterable[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What is printed of a campaign, and why it fails."""
    total: dict[str, int] = {}
    failed: list[str] = []
    figures = dict.fromkeys(("seeds", "events", "virtual_ms", "acknowledged", "cpu_s"), 0.0)
    for row in sorted(rows, key=lambda each: int(each["seed"])):
        figures["seeds"] += 1
        for name in ("events", "virtual_ms", "acknowledged", "cpu_s"):
            figures[name] += row[name]
        for name, count in row["counters"].items():
            total[name] = total.get(name, 0) + count
        if row["verdict"] != "ok":
            failed.append(f"seed {row['seed']}: {row['verdict'][:300]}")
    failed += [f"never met: {name}" for name in MET if not total.get(name)]
    lines = [f"{name:32} {count:>12}" for name, count in sorted(total.items())]
    speed = figures["events"] / figures["cpu_s"] if figures["cpu_s"] else 0.0
    lines.append(
        f"{figures['seeds']:.0f} seeds, {figures['virtual_ms'] / 1000:.0f} simulated seconds, "
        f"{figures['acknowledged']:.0f} acknowledged records, {figures['events']:.0f} events, "
        f"{speed:.0f} events per CPU second (goal {EVENTS_PER_S_MIN})"
    )
    return lines, failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pk.sim.long", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--unrest-ms", type=int, default=UNREST_MS)
    parser.add_argument("--acknowledged-min", type=int, default=ACKNOWLEDGED_MIN)
    parser.add_argument("--results", type=Path, default=Path(RESULTS))
    asked = parser.parse_args(arguments)
    given = {"unrest_ms": asked.unrest_ms, "acknowledged_min": asked.acknowledged_min}
    key = {"commit": commit(), **given}
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    seeds = range(asked.first, asked.first + asked.seeds)
    rows = {seed: row for seed, row in known(asked.results, key).items() if seed in seeds}
    todo = [seed for seed in seeds if seed not in rows]
    print(f"{len(rows)} seeds are in {asked.results}, {len(todo)} are run; {key}", flush=True)
    tail = f"--unrest-ms {asked.unrest_ms} --acknowledged-min {asked.acknowledged_min}"
    with (
        asked.results.open("a") as out,
        ProcessPoolExecutor(
            asked.jobs, get_context("spawn"), max_tasks_per_child=SEEDS_PER_PROCESS
        ) as pool,
    ):
        for done in as_completed(pool.submit(run_seed, seed, given) for seed in todo):
            row = {**key, **done.result()}
            rows[row["seed"]] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
            if row["verdict"] != "ok":
                print(
                    f"{row['verdict']}\nreplay: python -m pk.sim {row['seed']} {tail}", flush=True
                )
    lines, failed = verdict(rows.values())
    print("\n".join([*lines, *failed, "FAILED" if failed else "ok"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
