"""Moves of replicas in a cluster with faults: no copy is lost, no other topic is moved (rules R8 to
R10).

The administrator moves partitions to fewer and to more replicas, cancels some of these moves, and
executes plans of topics that were deleted and created again (sim/workload.py).
"""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run
from pk.sim.options import NodePlan, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HOT = {"tier_enable": "false"}
UNCLEAN = {**HOT, "min_insync_replicas": "1", "unclean_leader_election_enable": "true"}


def options_of(seed: int) -> SimOptions:
    """Return the options of a run: every other seed has topics that may elect uncleanly."""
    return SimOptions(
        topics=(
            TopicPlan("kept", 2, {**HOT, "min_insync_replicas": "2"}, 3),
            TopicPlan("other", 2, UNCLEAN if seed % 2 else HOT, 1 + seed % 3),
        ),
        nodes=tuple(NodePlan(number) for number in (1, 2, 3, 4)),
        faults=("kill_broker", "kill_leader", "kill_controller", "kill_machine", "power",
                "pause", "isolate", "cut", "slow_network", "disk_full"),
        chores=("resize", "resize", "recreate", "reassign", "reassign_back", "elect"),
        fault_ms=15_000,
        heal_ms=120_000,
        fault_every_ms=(300, 2_000),
        chore_every_ms=(50, 400),
        pace_ms=(20, 200),
        server={
            "broker_session_timeout_ms": 1_500,
            "replica_lag_time_max_ms": 700,
            "unclean_recovery_wait_ms": 500,
        },
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_moves_lose_no_copy(seed: int) -> None:
    report = Run(seed, options_of(seed)).execute()
    assert not report.violation, report.line
    assert report.counts["chore resize"] >= 3
