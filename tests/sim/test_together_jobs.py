"""Jobs whose batches a Delta table decides, in simulated clusters (rule X11)."""

from __future__ import annotations

import pytest

import pk.sim.options as options_of_seeds
from pk.sim.campaign import Run, RunResult
from pk.sim.canary import SAFE, THREE
from pk.sim.options import BROKER, KEPT, LAKE_FAULTS, LAKE_URL, SimOptions, TopicPlan, drawn
from pk.sim.world import SimWorld

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SETTINGS = {
    "participant_lease_ms": 5_000,
    "participant_transaction_max_ms": 15_000,
    "prepared_max_ms": 1_000,
    "resolver_table_urls": LAKE_URL,
}


def run(seed: int, *faults: str, jobs: int = 0) -> RunResult:
    configs = {**SAFE, **KEPT, "flush_on_ack": "true"}
    options = SimOptions(
        topics=(TopicPlan("t", 1, SAFE, 3),),
        nodes=THREE,
        faults=faults,
        chores=(),
        fault_ms=10_000,
        fault_every_ms=(300, 1_500),
        pace_ms=(10, 100),
        transaction_topics=(TopicPlan("tx", 2, configs, 3), TopicPlan("ty", 1, configs, 3)),
        jobs=jobs,
        together_jobs=2,
        server=SETTINGS,
    )
    report = Run(seed, options).execute()
    assert not report.violation, f"{report.violation}\n{report.line}"
    return report


def test_log_and_table_agree_while_drivers_are_lost_at_each_step() -> None:
    """Rule X11: without a fault, returning drivers and resolvers commit and abort on evidence."""
    counts = run(1).counts
    for name in ("prepared batches committed", "prepared batches aborted", "batches in the lake"):
        assert counts[name], name


def test_log_and_table_agree_while_the_table_is_away_slow_and_late() -> None:
    """Rule X11: no absence is read from a table that cannot be read."""
    others = ("kill_coordinator", "late_control", "kill_client")
    counts = run(5, *LAKE_FAULTS, *others, jobs=1).counts
    for name in ("reads refused by the lake", "commits late in the lake", "coordinators moved"):
        assert counts[name], name


def test_a_share_of_the_seeds_with_enough_brokers_has_such_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeds draw them last: the other options of a seed stay the same."""
    monkeypatch.setattr(options_of_seeds, "TOGETHER_CHANCE", 0.0)
    before = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    monkeypatch.setattr(options_of_seeds, "TOGETHER_CHANCE", 0.2)
    plans = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    some = [each for each in plans if each.together_jobs]
    assert len(plans) / 8 <= len(some) <= len(plans) / 3
    for old, plan in zip(before, plans, strict=True):
        if not plan.together_jobs:
            assert plan == old
            continue
        assert (plan.jobs, plan.transactions) == (old.jobs, old.transactions)
        assert len(plan.with_role(BROKER)) >= options_of_seeds.JOB_BROKERS_MIN
        assert set(SETTINGS) <= set(plan.server)
