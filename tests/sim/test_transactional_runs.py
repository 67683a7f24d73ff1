"""Directed runs with transactions: faults that a seed has found once."""

from __future__ import annotations

import pytest

import pk.sim.options as options_of_seeds
from pk.sim.campaign import Run
from pk.sim.canary import SAFE, THREE
from pk.sim.options import KEPT, SimOptions, TopicPlan, drawn
from pk.sim.world import SimWorld

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_a_transaction_that_begins_under_a_clock_that_is_ahead_times_out() -> None:
    """Rules L10, X3: the clock is set right while the transaction is open and its producer dead."""
    options = SimOptions(
        topics=(TopicPlan("t", 1, SAFE, 3),),
        nodes=THREE,
        faults=("clock_jump", "kill_coordinator"),
        chores=(),
        fault_ms=8_000,
        fault_every_ms=(500, 2_000),
        pace_ms=(10, 100),
        transactions=3,
        transaction_topics=(TopicPlan("tx", 2, {**SAFE, **KEPT, "flush_on_ack": "true"}, 3),),
    )
    report = Run(6, options).execute()
    assert not report.violation, f"{report.violation}\n{report.line}"
    assert report.counts["transactions committed"] > 0
    assert report.counts["transactions aborted"] > 0


def test_a_share_of_the_seeds_has_transactions_and_the_others_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for chance in ("JOBS_CHANCE", "TOGETHER_CHANCE"):
        monkeypatch.setattr(options_of_seeds, chance, 0.0)
    plans = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    some = [each for each in plans if each.transactions]
    assert len(plans) / 3 <= len(some) <= len(plans) / 2
    for plan in plans:
        assert bool(plan.transactions) == bool(plan.transaction_topics)
        assert all(topic.flushed and topic.keeps for topic in plan.transaction_topics)
        assert not any(topic.unclean or topic.expires for topic in plan.transaction_topics)
        assert "transactions" not in repr(plan.topics)
        if not plan.transactions:
            assert "transaction" not in repr(plan), "the options are in the trace"
