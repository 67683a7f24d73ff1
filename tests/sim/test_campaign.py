"""Whole clusters from seeds: controllers, brokers, tiers and clients in virtual time.

The CHOSEN seeds, FAULT_MS each, spread over the machine's cores.  `PK_SIM_SEEDS=N` runs N seeds
(from `PK_SIM_FIRST` on) instead; a failure names its seed, and `python -m pk.sim SEED --fault-ms …`
replays it.  Campaigns of many more are `make sim-long`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import pytest

import pk.sim
from pk.sim.campaign import Run, RunResult
from pk.sim.checkers import Violation
from pk.sim.long import MET, run_seed, verdict
from pk.sim.options import BROKER, CHORES, CONTROLLER, FAULTS, SimOptions, TopicPlan, drawn
from pk.sim.world import SimWorld

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: Seeds that together meet most events of `pk.sim.long.MET` for their CPU time.  Many short runs
#: meet more than few long ones: the later faults of a run find the states that the earlier ones
#: made already.
CHOSEN = (2, 3, 5, 7, 13, 19, 23, 26, 29, 38, 43, 46, 47, 48)
#: The chosen seeds missed 13 of 181 events when they were chosen; `make sim-long` must meet all.
#: A change of the code moves the histories: so many may be missed before others are chosen.
MISSED_MAX = 20
ASKED = int(os.environ.get("PK_SIM_SEEDS", "0"))
FIRST = int(os.environ.get("PK_SIM_FIRST", "1"))
SEEDS = range(FIRST, FIRST + ASKED) if ASKED else CHOSEN
FAULT_MS = 12_000
SHORT_MS = 2_000


def held(report: RunResult) -> RunResult:
    assert not report.violation, f"{report.violation}\n{report.line}"
    return report


@pytest.mark.timeout(3_000)
def test_every_promise_holds_and_nine_dangers_of_ten_are_met() -> None:
    """The seeds are one test, because together they must meet most events of a campaign.

    If a change of the code changed the histories and too many events are missed, choose other seeds
    from the rows of `python -m pk.sim.long --fault-ms 12000 --acknowledged-min 0 --seeds 50`: again
    and again the seed with the most new events for its `cpu_s`.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(run_seed, SEEDS, repeat({"fault_ms": FAULT_MS})))
    found = verdict(rows)[1]
    missed = [each for each in found if each.startswith("never met")]
    failed = [each for each in found if each not in missed]
    assert not failed, f"{failed}; a seed again: python -m pk.sim SEED --fault-ms {FAULT_MS}"
    assert ASKED or len(missed) <= MISSED_MAX, missed
    assert all(row["virtual_ms"] >= FAULT_MS for row in rows)
    assert all(row["rows_read"] for row in rows), "a run that stores nothing shows nothing"


QUICK = {
    "segment_bytes": "14336",
    "tier_max_lag_ms": "50",
    "tier_file_bytes": "4000",
    "local_drop_delay_ms": "0",
    "local_retention_bytes": "0",
    "file_delete_delay_ms": "0",
}


def test_a_reader_from_0_crosses_tier_and_hot_log_while_local_segments_go() -> None:
    """The run has no fault: every row is read once, from the tables or from the local log."""
    plan = TopicPlan("flights", 1, QUICK)
    report = held(Run(5, SimOptions(topics=(plan,), faults=(), chores=())).execute())
    assert report.unknown == 0
    assert report.tiered_rows == report.acknowledged == report.sent
    assert report.rows_read >= 2 * report.sent  # a consumer all along, and the last reader


def test_power_losses_without_flush_cost_a_suffix_at_most() -> None:
    plans = (TopicPlan("soft", 1, QUICK), TopicPlan("hard", 1, {**QUICK, "flush_on_ack": "true"}))
    options = SimOptions(topics=plans, faults=("power",), chores=(), fault_ms=SHORT_MS)
    report = held(Run(3, options).execute())
    assert report.faults["power"] >= 1


@pytest.mark.parametrize(("rule", "end_ms"), [("V22", 1_000), ("liveness", 3_000)])
def test_the_wait_for_tables_ends_when_they_stand_still(
    rule: str, end_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables cover one more offset in each of the first two seconds."""
    run = Run(1, SimOptions(topics=(), faults=(), chores=()))

    def covered() -> int:
        return min(round(run.world.loop.now_us / 1e6), 2)

    monkeypatch.setattr(run.cluster.store, "covered", covered)
    with pytest.raises(Violation, match=f"{rule}: tables: not within 1000 ms: behind"):
        run.world.run(run._until("tables", lambda: "behind", 1_000, rule))
    assert run.world.loop.now_us / 1000 == pytest.approx(end_ms, abs=200)
    run.world.close()


CODE = """
import logging, sys
logging.disable(logging.CRITICAL)
from pk.sim.campaign import Run
from pk.sim.options import drawn
from pk.sim.world import SimWorld
seed = int(sys.argv[1])
options = drawn(SimWorld(seed).random("options"), fault_ms=1500)
print(Run(seed, options).execute().digest)
"""


def test_a_seed_is_one_history_in_every_process() -> None:
    digests = []
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", CODE, "12"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        digests.append(done.stdout.strip())
    assert len(digests[0]) == 64
    assert digests[0] == digests[1]


def test_the_command_prints_the_seed_first_and_the_replay_line_last() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pk.sim", "4", "--fault-ms", "500"],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "SEED=4"
    assert lines[-1] == "replay: python -m pk.sim 4 --fault-ms 500"


ALONE = """
import os, sys
from pk.sim.__main__ import main
from pyarrow import fs  # numpy and Arrow's allocator have threads of their own
before = len(os.listdir("/proc/self/task"))
assert main(["4", "--fault-ms", "500"]) == 0
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_seed_runs_in_one_thread_and_starts_none_of_arrows() -> None:
    """An Arrow thread that still holds Python's bytes at the end aborts the process."""
    done = subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True, text=True)
    *_, report, replay, started = done.stdout.splitlines()
    assert ", 0 in tables" not in report
    assert started == "0", (replay, started)


def test_every_fault_and_chore_is_drawn_by_some_seed() -> None:
    plans = [drawn(SimWorld(seed).random("options")) for seed in range(40)]
    assert {name for each in plans for name in each.faults} == set(FAULTS)
    assert {name for each in plans for name in each.chores} == set(CHORES)
    sizes = {(len(each.with_role(CONTROLLER)), len(each.with_role(BROKER))) for each in plans}
    assert {controllers for controllers, _ in sizes} == {1, 3, 5}
    assert {brokers for _, brokers in sizes} >= {1, 3, 4, 5}


def test_a_campaign_fails_if_something_was_never_met() -> None:
    row = {
        "seed": 1, "verdict": "ok", "events": 1, "virtual_ms": 1, "acknowledged": 1, "cpu_s": 1.0,
        "counters": dict.fromkeys(MET, 1),
    }  # fmt: skip
    assert verdict([row])[1] == []
    row["counters"] = {**dict.fromkeys(MET, 1), "truncations": 0}
    assert verdict([row])[1] == ["never met: truncations"]
    row["verdict"] = "V6: lost"
    assert "seed 1: V6: lost" in verdict([row])[1]


def test_the_checkers_know_nothing_of_how_pk_works() -> None:
    """A checker must not share a bug with the code that it checks."""
    home = Path(pk.sim.__file__).parent
    todo = ["checkers", "cluster_checkers", "job_checkers", "move_check", "transaction_checkers"]
    seen = set[str]()
    while todo:
        name = todo.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((home / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pk."):
                module = str(node.module)
                assert module == "pk.types" or module.startswith("pk.sim."), (name, module)
                inner = module.removeprefix("pk.sim.")
                if module.startswith("pk.sim.") and inner not in seen:
                    todo.append(inner)
    assert "oracle" in seen
