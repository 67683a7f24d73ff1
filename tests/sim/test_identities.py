"""Lost identities and directories of logs (sim/identity_faults.py): rule L15 holds in a cluster."""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run
from pk.sim.options import NodePlan, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HOT = {"segment_bytes": "14336", "tier_enable": "false", "min_insync_replicas": "2"}
OPTIONS = SimOptions(
    topics=(TopicPlan("t", 2, HOT, 3),),
    nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
    faults=("identity_lost", "identity_rot", "partition_lost", "kill_leader"),
    chores=(),
    fault_ms=8_000,
    heal_ms=60_000,
    fault_every_ms=(100, 500),
    pace_ms=(20, 200),
    server={"broker_session_timeout_ms": 1_500},
)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_goes_is_restored_or_rebuilt_and_costs_nothing(seed: int) -> None:
    report = Run(seed, OPTIONS).execute()
    assert not report.violation, report.line
    assert report.counts["lost files"]
    assert report.counts["rotten identities"]
    assert report.counts["lost logs"]
    assert report.counts["replicas made anew"]
    assert report.counts["eras"] == 0
