"""Tables whose Delta log rots, or whose rows another engine deletes (sim/table_faults.py): both
happen within a run, readers get errors, and nothing is lost once the fault is over.

The canaries of the rules that protect the table are in sim/canaries.py.
"""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run, RunResult
from pk.sim.canaries import TIERED
from pk.sim.options import KEPT, NodePlan, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def executed(seed: int, *faults: str, every_ms: tuple[int, int]) -> RunResult:
    options = SimOptions(
        topics=(TopicPlan("t", 2, {**TIERED, **KEPT}, 2),),
        nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
        faults=faults,
        chores=("delete_records",),
        fault_ms=10_000,
        heal_ms=60_000,
        fault_every_ms=every_ms,
        pace_ms=(20, 200),
    )
    report = Run(seed, options).execute()
    assert not report.violation, report.line
    return report


def test_a_rotten_delta_log_is_refused_and_told_until_it_is_restored() -> None:
    """Rules T2 and T8: no load returns its content, and tiering continues afterwards."""
    faults = ("delta_rot",) * 2 + ("kill_client",) * 2 + ("kill_tier",) * 2 + ("kill_leader",)
    counts = executed(6, *faults, every_ms=(50, 200)).counts
    assert counts["rot of Delta logs"]
    assert counts["Delta logs refused"]
    assert counts["told of rotten Delta logs"]


def test_rows_that_another_engine_deletes_are_told_and_read_once_they_are_back() -> None:
    # rule T17
    faults = ("delete_rows", "delete_rows", "kill_client", "kill_tier")
    counts = executed(3, *faults, every_ms=(50, 300)).counts
    assert counts["files of rows deleted"]
    assert counts["told of missing rows"]
