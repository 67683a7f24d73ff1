"""Directed runs with a consumer group: members, coordinators and brokers die (rules X12, L8)."""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run
from pk.sim.canary import SAFE, THREE
from pk.sim.options import KEPT, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("seed", [1, 2])
def test_offsets_never_go_back_while_members_and_coordinators_die(seed: int) -> None:
    """No acknowledged commit is lost, and no partition has two owners in a generation."""
    options = SimOptions(
        topics=(TopicPlan("t", 4, {**SAFE, **KEPT}, 3),),
        nodes=THREE,
        faults=("kill_broker", "kill_leader", "kill_client", "pause", "cut", "isolate"),
        chores=("grow", "elect", "reassign"),
        fault_ms=8_000,
        fault_every_ms=(500, 2_000),
        pace_ms=(200, 500),
        codecs=("none",),
        groups=5,
    )
    report = Run(seed, options).execute()
    assert not report.violation, f"{report.violation}\n{report.line}"
    met = "group commits", "group assignments", "looks at offsets", "looks at waiting heartbeats"
    for name in met:
        assert report.counts[name] > 0, name


@pytest.mark.parametrize("seed", [3, 4])
def test_copies_of_offsets_never_go_back_while_coordinators_and_tiers_die(seed: int) -> None:
    """Rule T13: and after the faults they have what was acknowledged."""
    options = SimOptions(
        topics=(TopicPlan("t", 4, {**SAFE, **KEPT}, 3),),
        nodes=THREE,
        faults=("kill_leader", "kill_tier", "pause", "isolate", "store_outage", "store_flaky"),
        fault_ms=8_000,
        fault_every_ms=(300, 1_500),
        pace_ms=(200, 500),
        codecs=("none",),
        groups=5,
        server={"tier_offsets_interval_ms": 300},
    )
    report = Run(seed, options).execute()
    assert not report.violation, f"{report.violation}\n{report.line}"
    assert report.counts["copies of offsets"] > 5
