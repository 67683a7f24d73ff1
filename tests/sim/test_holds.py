"""Directed runs with a query that holds retention (rule S1)."""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run
from pk.sim.canary import THREE
from pk.sim.group_canaries import BOUNDED
from pk.sim.options import SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("seed", [1, 2])
def test_what_a_query_holds_stays_while_leaders_and_coordinators_die(seed: int) -> None:
    options = SimOptions(
        topics=(TopicPlan("t", 2, BOUNDED, 3),),
        nodes=THREE,
        faults=("kill_broker", "kill_leader", "kill_client", "pause", "cut", "isolate"),
        chores=("elect", "reassign"),
        fault_ms=25_000,
        fault_every_ms=(1_000, 3_000),
        pace_ms=(50, 150),
        codecs=("none",),
        holds=True,
    )
    report = Run(seed, options).execute()
    assert not report.violation, f"{report.violation}\n{report.line}"
    for name in ("commits of the query", "looks at holds"):
        assert report.counts[name] > 0, name
