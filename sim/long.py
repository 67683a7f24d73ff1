"""`python -m pk.sim.long`: a campaign of many seeds over several processes that can be resumed.

A results file gets one JSON line for each seed: seed, verdict, counters, what was tested.  A seed
whose line is there already for these sources and options is not run again.  So an interrupted
campaign can go on, also after a commit of documentation or tests.  When a seed fails, the command
that replays it is printed at once.  At the end the counters of the whole campaign are printed.  The
campaign fails if a seed failed, or if an event that every campaign must meet (`MET`) never
happened: a promise that was never in danger was not tested.

The rows are committed (docs/sim-long.jsonl), so that a campaign of many hours can go on in another
checkout.  `--summary FILE` writes the outcome as a page: which sources and seeds, the verdict, the
counters.

The key of a row is the code of the production modules that the simulator imports and of the module
that draws a seed's options, committed or not (sim/campaign_key K1, sim/campaign_key K2); the commit
is recorded beside it.  The rest of the simulator makes and judges the histories.  Rows of another
version of the simulator count, and their number is printed; seeds that failed under another version
are run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from contextlib import contextmanager
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import pk
from pk import clock
from pk.server.node.run_config import die_with
from pk.sim.campaign import Run, RunResult
from pk.sim.campaign_key import imported, simulator, tested
from pk.sim.options import (
    CHORES,
    COMPACTION_CHANCE,
    COMPACTION_FAULTS,
    FAULTS,
    JOBS_CHANCE,
    LAKE_FAULTS,
    MAINTENANCE_CHANCE,
    TOGETHER_CHANCE,
    TRANSACTION_FAULTS,
    TRANSACTIONS_CHANCE,
    drawn,
)
from pk.sim.world import TRACE_TAIL, SimWorld

RESULTS = "docs/sim-long.jsonl"
FAULT_MS = 120_000
ACKNOWLEDGED_MIN = 2_000
EVENTS_PER_S_MIN = 20_000
#: Number of seeds after which all processes are replaced, so that memory that Arrow holds is freed.
#: (max_tasks_per_child, which replaces one process at a time, hangs if all processes reach their
#: limit at once: gh-115634.)
SEEDS_PER_PROCESS = 50
#: Pause between two progress lines where no progress bar is shown.
TELL_EVERY_MS = 60_000
#: Number of new objects between two collections of young objects: a run makes few cycles.
GC_YOUNG = 20_000
#: Events of transactions that a campaign must meet, if its seeds draw any.
MET_WITH_TRANSACTIONS = (
    "chore grow of transactions",
    "chore move_coordinator of transactions",
    "coordinators killed",
    "coordinators killed at markers",
    "coordinators moved",
    "full coordinators",
    "late add_partitions_to_txn",
    "late end_txn",
    "late init_producer_id",
    "late write_txn_markers",
    "markers",
    "producers fenced",
    "transactions aborted",
    "transactions committed",
    "transactions timed out",
    "transactions unknown",
    *(f"fault {name}" for name in TRANSACTION_FAULTS),
)
#: Events of jobs that a campaign must meet, if its seeds draw any.
MET_WITH_JOBS = (
    "attempts joined",
    "batches aborted",
    "batches already committed",
    "batches committed",
    "batches committed before",
    "batches executed again",
    "batches without rows",
    "coordinators killed",
    "coordinators moved",
    "drivers after commit",
    "drivers after finish",
    "drivers before join",
    "drivers outlived",
    "drivers somewhere",
    "drivers within commit",
    "late commit_participants",
    "late join_transaction",
    "late write_txn_markers",
    "ProducerFenced of jobs",
    "TransactionAborted of jobs",
    "TransactionTimedOut of jobs",
    *(f"fault {name}" for name in TRANSACTION_FAULTS),
)
#: Events of jobs whose batches a table decides that a campaign must meet, if its seeds draw any.
MET_WITH_TOGETHER = (
    "batches in the lake",
    "commits late in the lake",
    "commits refused by the lake",
    "commits skipped by the lake",
    "lakes away",
    "late prepare_participants",
    "prepared batches aborted",
    "prepared batches committed",
    "reads refused by the lake",
    "resolved by resolvers",
    "both decided abort",
    "both decided commit",
    "unresolved batches",
    *(f"drivers of both: {name}" for name in ("before", "somewhere", "stops", "within")),
    *(f"fault {name}" for name in LAKE_FAULTS),
)
#: Events of compacted topics that a campaign must meet, if its seeds draw any.
MET_WITH_COMPACTION = (
    "cleanings",
    "deaths in swaps",
    "elections in cleanings",
    "full disks in swaps",
    "power losses in swaps",
    "reads of compacted topics",
    "tombstones removed",
    *(f"fault {name}" for name in COMPACTION_FAULTS),
)
#: Events of maintained tables that a campaign must meet.
MET_WITH_MAINTENANCE = (
    "compactions of tables",
    "compactions of tables refused: rows are missing",
    "compactions planned again",
    "drivers of tables: dies",
    "drivers of tables: late",
    "drivers of tables: twice",
    "hand-overs refused the second time",
    "merges of tables",
    "repairs refused",
    "snapshots increment",
    "snapshots whole",
    "tombstones of tables removed",
)
_OF_SOME_RUNS = (*TRANSACTION_FAULTS, *LAKE_FAULTS, *COMPACTION_FAULTS)
#: Events that a campaign must meet at least once (Report.counts).
MET = (
    "ISR expand",
    "ISR shrink",
    "ISR changes lost",
    "ISR changes unheard of",
    "START_AT",
    "Delta logs refused",
    "deaths anew",
    "elections clean",
    "elections from the ELR",
    "elections unclean",
    "controller disks replaced",
    "controllers voting again",
    "eras",
    "files of rows deleted",
    "group assignments",
    "group commits",
    "late frames",
    "leaderless",
    "looks at holds",
    "looks at offsets",
    "operations without room",
    "quorum elections",
    "replicas made anew",
    "rot of Delta logs",
    "rot of index",
    "rot of log",
    "rot of metadata",
    "rot of offsets",
    "rot of producers",
    "snapshot loads of brokers",
    "snapshot loads of voters",
    "stalled frames",
    "stalls of reads",
    "stalls of the store",
    "stalls of writes",
    "tier commits late",
    "tier commits lost",
    "tier commits refused",
    "truncations",
    *(f"chore {name}" for name in CHORES),
    *(f"fault {name}" for name in FAULTS if name not in _OF_SOME_RUNS),
    *(MET_WITH_TRANSACTIONS if TRANSACTIONS_CHANCE else ()),
    *(MET_WITH_JOBS if JOBS_CHANCE else ()),
    *(MET_WITH_TOGETHER if TOGETHER_CHANCE else ()),
    *(MET_WITH_COMPACTION if COMPACTION_CHANCE else ()),
    *(MET_WITH_MAINTENANCE if MAINTENANCE_CHANCE else ()),
)


def counters(report: RunResult) -> dict[str, int]:
    """Return all counters of one run, those of its faults included."""
    faults = {f"fault {name}": count for name, count in report.faults.items()}
    return {**report.counts, **faults}


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and collect new ones rarely."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def result_of(run: Run) -> RunResult:
    """Return the result of a run.  An exception, of pk or of the simulator, is a violation like
    any other: the campaign goes on, and the replay shows the traceback."""
    try:
        return run.execute()
    except Exception as raised:
        return RunResult(run.seed, run.world.digest, f"raised {type(raised).__name__}: {raised}")


def run_seed(seed: int, given: dict[str, Any]) -> dict[str, Any]:
    """Run one seed and return its row of the results."""
    logging.disable(logging.CRITICAL)
    options = drawn(SimWorld(seed).random("options"), **given)
    run = Run(seed, options)
    run.world.trace = deque(maxlen=TRACE_TAIL)  # the digest covers the whole trace
    began = os.times()
    with rare_collections():
        report = result_of(run)
    ended = os.times()
    return {
        "seed": seed,
        "verdict": report.violation.splitlines()[0][:2_000] if report.violation else "ok",
        "digest": report.digest,
        "events": report.events,
        "virtual_ms": report.virtual_ms,
        "cpu_s": round(ended.user - began.user + ended.system - began.system, 2),
        "acknowledged": report.acknowledgements,
        "unknown": report.unknown,
        "rows_read": report.rows_read,
        "tiered_rows": report.tiered_rows,
        "nodes": [list(node.roles) for node in options.nodes],
        "counters": counters(report),
    }


def commit() -> str:
    """Return the current commit, with a mark if files were changed since."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def known(results: Path, key: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the rows of earlier runs of the same campaign, by seed."""
    found: dict[int, dict[str, Any]] = {}
    if results.exists():
        for line in results.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line whose write was interrupted
            if all(row.get(name) == value for name, value in key.items()):
                found[row["seed"]] = row
    return found


def verdict(rows: Iterable[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the lines to print of a campaign, and the reasons why it fails."""
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
        elif row["acknowledged"] < row.get("acknowledged_min", 0):
            failed.append(f"seed {row['seed']}: only {row['acknowledged']} were acknowledged")
    failed += [f"never met: {name}" for name in dict.fromkeys(MET) if not total.get(name)]
    lines = [f"{name:32} {count:>12}" for name, count in sorted(total.items())]
    speed = figures["events"] / figures["cpu_s"] if figures["cpu_s"] else 0.0
    lines.append(
        f"{figures['seeds']:.0f} seeds, {figures['virtual_ms'] / 1000:.0f} simulated seconds, "
        f"{figures['acknowledged']:.0f} acknowledged records, {figures['events']:.0f} events, "
        f"{speed:.0f} events per CPU second (goal {EVENTS_PER_S_MIN})"
    )
    return lines, failed


def joined(rows: Iterable[dict[str, Any]], name: str) -> str:
    """Join the different values of a column, in the order of the seeds."""
    return ", ".join(dict.fromkeys(str(row[name]) for row in rows))


def summary(key: dict[str, Any], rows: Iterable[dict[str, Any]]) -> str:
    """Return the summary page of a campaign: what was tested, its verdict, its counters."""
    ordered = sorted(rows, key=lambda each: int(each["seed"]))
    lines, failed = verdict(ordered)
    *counts, total = lines
    seeds = [row["seed"] for row in ordered]
    facts = {
        "sources, by content": f"`{key['tested']}`",
        "simulator, by content": joined(ordered, "simulator"),
        "commit": joined(ordered, "commit"),
        "seeds": f"{len(seeds)}, from {seeds[0]} to {seeds[-1]}" if seeds else "none",
        "fault phase of a seed": f"{key['fault_ms']} ms of virtual time",
        "acknowledged records of a seed": f"at least {key['acknowledged_min']}",
        "verdict": f"**{'FAILED' if failed else 'ok'}**",
        "in sum": total,
    }
    return "\n".join(
        [
            "# The last long campaign of simulated clusters", "",
            "`make sim-long` writes this page ([TESTING.md](TESTING.md)). The file",
            "`docs/sim-long.jsonl` has the rows of the newest campaign, which may still go on.", "",
            "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), "",
            *(["## Failures", "", *(f"- {each}" for each in failed), ""] if failed else []),
            "## What it met", "", "| counter | total |", "|---|---:|",
            *("| {} | {} |".format(*each.rsplit(maxsplit=1)) for each in counts), "",
        ]
    )  # fmt: skip


# -- the campaign ----------------------------------------------------------------------------------


class CampaignProgress:
    """The progress of a campaign.  `now_ms` is a wall clock."""

    def __init__(self, seeds: int, known: int, failed: int, now_ms: Callable[[], int]) -> None:
        self.seeds = seeds
        self.done = known
        self._run = 0
        self._failed = failed
        self._events = 0
        self._cpu_s = 0.0
        self._now_ms = now_ms
        self._began_ms = self._told_ms = now_ms()

    def add(self, row: dict[str, Any]) -> None:
        """Count one more finished seed."""
        self.done += 1
        self._run += 1
        self._failed += row["verdict"] != "ok"
        self._events += row["events"]
        self._cpu_s += row["cpu_s"]

    def due(self) -> bool:
        """Return whether a progress line is due: once every `TELL_EVERY_MS`."""
        due = self._now_ms() - self._told_ms >= TELL_EVERY_MS
        if due:
            self._told_ms = self._now_ms()
        return due

    @property
    def line(self) -> str:
        """Return a line with seeds, failures, speed and the expected end of the campaign."""
        words = f"{self.done} of {self.seeds} seeds, {self._failed} failed"
        if not self._run:
            return words
        each_ms = (self._now_ms() - self._began_ms) / self._run
        ends_ms = self._now_ms() + each_ms * (self.seeds - self.done)
        ends = datetime.fromtimestamp(ends_ms / 1000)
        return (
            f"{words}, {self._cpu_s / self._run:.1f} CPU s a seed, "
            f"{self._events / max(self._cpu_s, 0.01):.0f} events per CPU s, ends {ends:%H:%M}"
        )


def processes(jobs: int) -> Executor:
    """Return the executor whose processes run the seeds.  They end with this process, however it
    ends.
    """
    return ProcessPoolExecutor(jobs, get_context("spawn"), die_with, (os.getpid(),))


def finished(
    jobs: int, seeds: Sequence[int], given: dict[str, Any]
) -> Iterator[dict[str, Any] | None]:
    """Yield the row of each finished seed, and None after `TELL_EVERY_MS` without one."""
    at_once = jobs * SEEDS_PER_PROCESS
    for at in range(0, len(seeds), at_once):
        with processes(jobs) as pool:
            pending = {pool.submit(run_seed, seed, given) for seed in seeds[at : at + at_once]}
            while pending:
                done, pending = wait(pending, TELL_EVERY_MS / 1000, FIRST_COMPLETED)
                yield from (each.result() for each in done) if done else [None]


def replay(seed: int, given: dict[str, Any]) -> str:
    """Return the command that runs one seed again."""
    tail = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    return f"replay: python -m pk.sim {seed} {tail}"


def run_all(
    console: Console, standing: CampaignProgress, rows: Iterable[dict[str, Any] | None], out: Any
) -> Iterator[dict[str, Any]]:
    """Write each row to `out`, show the progress, and pass the row on."""
    bar = Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
                   console=console, disable=not console.is_terminal)  # fmt: skip
    with bar:
        task = bar.add_task(standing.line, total=standing.seeds, completed=standing.done)
        for row in rows:
            if row is not None:
                standing.add(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                yield row
            bar.update(task, completed=standing.done, description=standing.line)
            if not console.is_terminal and standing.due():
                console.print(standing.line)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pk.sim.long", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fault-ms", type=int, default=FAULT_MS)
    parser.add_argument("--acknowledged-min", type=int, default=ACKNOWLEDGED_MIN)
    parser.add_argument("--results", type=Path, default=Path(RESULTS))
    parser.add_argument("--summary", type=Path, help="write the outcome there, as Markdown")
    return parser.parse_args(arguments)


def main(arguments: list[str], now_ms: Callable[[], int] = clock.wall_ms) -> int:
    asked = parsed(arguments)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    given = {"fault_ms": asked.fault_ms, "acknowledged_min": asked.acknowledged_min}
    home = Path(pk.__file__).parent
    key = {"tested": tested(home, imported(home)), **given}
    facts = {**key, "commit": commit(), "simulator": simulator(home)}
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    seeds = range(asked.first, asked.first + asked.seeds)
    rows = {
        seed: row
        for seed, row in known(asked.results, key).items()
        if seed in seeds and (row["verdict"] == "ok" or row["simulator"] == facts["simulator"])
    }
    others = sum(row.get("simulator") != facts["simulator"] for row in rows.values())
    todo = [seed for seed in seeds if seed not in rows]
    console.print(f"{len(rows)} seeds are in {asked.results}, {len(todo)} are run; {facts}")
    for row in rows.values():
        if row["verdict"] != "ok":
            console.print(f"{row['verdict']}\n{replay(row['seed'], given)}")
    failures = sum(row["verdict"] != "ok" for row in rows.values())
    standing = CampaignProgress(len(seeds), len(rows), failures, now_ms)
    with asked.results.open("a") as out:
        ran = ({**facts, **row} if row else None for row in finished(asked.jobs, todo, given))
        for row in run_all(console, standing, ran, out):
            rows[row["seed"]] = row
            if row["verdict"] != "ok":
                console.print(f"{row['verdict']}\n{replay(row['seed'], given)}")
    lines, failed = verdict(rows.values())
    if others:
        lines.append(f"{others} seeds were judged by another version of the simulator")
    console.print("\n".join([*lines, *failed, "FAILED" if failed else "ok"]))
    if asked.summary is not None:
        asked.summary.write_text(summary(key, rows.values()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
