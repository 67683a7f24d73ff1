"""Whole clusters from seeds: controller, broker, tier and one client in virtual time.

`PK_SIM_SEEDS=N` runs N seeds (from `PK_SIM_FIRST` on) instead of the usual few; a failure names its
seed, and `make sim SEED=…` replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pk.sim.campaign import Report, Run
from pk.sim.options import CHORES, FAULTS, SimOptions, TopicPlan, drawn
from pk.sim.world import SimWorld

pytestmark = [
    pytest.mark.sim,
    # what a killed node left half done is unwound when its world ends, and may complain
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LONG = int(os.environ.get("PK_SIM_SEEDS", "0"))
FIRST = int(os.environ.get("PK_SIM_FIRST", "1"))
SEEDS = range(FIRST, FIRST + (LONG or 20))
SHORT_MS = 2_000


def options_of(seed: int) -> SimOptions:
    """What the seed draws; shorter, unless a long campaign was asked for."""
    more = {} if LONG else {"unrest_ms": SHORT_MS}
    return drawn(SimWorld(seed).random("options"), **more)


def held(report: Report) -> Report:
    assert not report.violation, f"{report.violation}\n{report.line}"
    return report


@pytest.mark.parametrize("seed", SEEDS)
def test_every_promise_holds(seed: int) -> None:
    report = held(Run(seed, options_of(seed)).execute())
    assert report.acknowledged, "a run that stores nothing shows nothing"
    assert report.rows_read


QUICK = {
    "segment_bytes": "14336",
    "tier_max_lag_ms": "50",
    "tier_file_bytes": "4000",
    "local_drop_delay_ms": "0",
    "local_retention_bytes": "0",
    "file_delete_delay_ms": "0",
}


def test_a_reader_from_0_crosses_tier_and_hot_log_while_local_segments_go() -> None:
    """Nothing fails here: what is read was in the tables, and in the hot log, once each."""
    plan = TopicPlan("flights", 1, QUICK)
    report = held(Run(5, SimOptions(topics=(plan,), faults=(), chores=())).execute())
    assert report.unknown == 0
    assert report.tiered_rows == report.acknowledged == report.sent
    assert report.rows_read >= 2 * report.sent  # a consumer all along, and the last reader


def test_power_losses_without_flush_cost_a_suffix_at_most() -> None:
    plans = (TopicPlan("soft", 1, QUICK), TopicPlan("hard", 1, {**QUICK, "flush_on_ack": "true"}))
    options = SimOptions(topics=plans, faults=("power",), chores=(), unrest_ms=SHORT_MS)
    report = held(Run(3, options).execute())
    assert report.faults["power"] >= 1


CODE = """
import logging, sys
logging.disable(logging.CRITICAL)
from pk.sim.campaign import Run
from pk.sim.options import drawn
from pk.sim.world import SimWorld
seed = int(sys.argv[1])
options = drawn(SimWorld(seed).random("options"), unrest_ms=1500)
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
        [sys.executable, "-m", "pk.sim", "4", "--unrest-ms", "500"],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "SEED=4"
    assert lines[-1] == "replay: python -m pk.sim 4 --unrest-ms 500"


ALONE = """
import os, sys
from pk.sim.__main__ import main
from pyarrow import fs  # numpy and Arrow's allocator have threads of their own
before = len(os.listdir("/proc/self/task"))
assert main(["4", "--unrest-ms", "500"]) == 0
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_seed_runs_in_one_thread_and_starts_none_of_arrows() -> None:
    """Such a thread, still holding Python's bytes at the end, aborts the process."""
    done = subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True, text=True)
    *_, report, replay, started = done.stdout.splitlines()
    assert ", 0 in tables" not in report
    assert started == "0", (replay, started)


def test_every_fault_and_chore_is_drawn_by_some_seed() -> None:
    plans = [options_of(seed) for seed in range(40)]
    assert {name for each in plans for name in each.faults} == set(FAULTS)
    assert {name for each in plans for name in each.chores} == set(CHORES)
