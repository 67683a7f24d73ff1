"""Jobs in simulated clusters: drivers and tasks write batches while coordinators die or move."""

from __future__ import annotations

import pytest

import pk.sim.options as options_of_seeds
from pk.sim.campaign import Run, RunResult
from pk.sim.canary import SAFE, THREE
from pk.sim.options import BROKER, KEPT, SimOptions, TopicPlan, drawn
from pk.sim.world import SimWorld

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LEASES = {"participant_lease_ms": 5_000, "participant_transaction_max_ms": 15_000}


def run(seed: int, *faults: str, transactions: int = 0) -> RunResult:
    configs = {**SAFE, **KEPT, "flush_on_ack": "true"}
    options = SimOptions(
        topics=(TopicPlan("t", 1, SAFE, 3),),
        nodes=THREE,
        faults=faults,
        chores=(),
        fault_ms=5_000,
        fault_every_ms=(300, 1_500),
        pace_ms=(10, 100),
        transactions=transactions,
        transaction_topics=(TopicPlan("tx", 2, configs, 3), TopicPlan("ty", 1, configs, 3)),
        jobs=2,
        server=LEASES,
    )
    report = Run(seed, options).execute()
    assert not report.violation, f"{report.violation}\n{report.line}"
    return report


def test_batches_of_lost_drivers_are_visible_once() -> None:
    """Rules X5, X7 to X9: without a fault, every planned batch is committed by one call."""
    counts = run(1).counts
    assert counts["batches committed"] <= counts["batches planned"]
    for name in ("batches executed again", "batches committed before", "ProducerFenced of jobs"):
        assert counts[name], name


def test_batches_are_visible_once_while_coordinators_die_and_control_requests_come_late() -> None:
    """Rules X4, X5, X7 to X9, beside plain transactions in the same topics."""
    faults = ("late_control", "kill_coordinator", "kill_at_markers", "kill_client")
    counts = run(2, *faults, transactions=1).counts
    for name in ("batches committed", "transactions committed", "coordinators moved"):
        assert counts[name], name


def test_a_share_of_the_seeds_with_enough_brokers_has_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options_of_seeds, "JOBS_CHANCE", 0.0)
    before = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    monkeypatch.setattr(options_of_seeds, "JOBS_CHANCE", 0.3)
    plans = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    some = [each for each in plans if each.jobs]
    assert len(plans) / 5 <= len(some) <= len(plans) * 2 / 5
    for old, plan in zip(before, plans, strict=True):
        if not plan.jobs:
            assert plan == old
            continue
        assert len(plan.with_role(BROKER)) >= options_of_seeds.JOB_BROKERS_MIN
        assert set(LEASES) <= set(plan.server)
        assert all(topic.flushed and topic.keeps for topic in plan.transaction_topics)
