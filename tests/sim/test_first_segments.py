"""First segments of logs are lost in a whole cluster (sim/identity_faults.py): rule L9 holds."""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run
from pk.sim.options import NodePlan, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HOT = {"segment_bytes": "14336", "tier_enable": "false"}
TIERED = {
    "segment_bytes": "14336",
    "tier_max_lag_ms": "50",
    "tier_file_bytes": "4000",
    "local_drop_delay_ms": "1000",
    "local_retention_bytes": "30000",
}


def options(configs: dict[str, str]) -> SimOptions:
    return SimOptions(
        topics=(TopicPlan("t", 2, configs, 3),),
        nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
        faults=("front_lost", "front_lost", "kill_client", "kill_leader"),
        chores=(),
        fault_ms=8_000,
        heal_ms=60_000,
        fault_every_ms=(200, 1_000),
        pace_ms=(20, 200),
        server={"broker_session_timeout_ms": 1_500},
    )


@pytest.mark.parametrize("configs", [HOT, TIERED], ids=["hot", "tiered"])
def test_a_replica_without_its_first_segments_is_rebuilt(configs: dict[str, str]) -> None:
    report = Run(1, options({**configs, "min_insync_replicas": "2"})).execute()
    assert not report.violation, report.line
    assert report.counts["lost first segments"]
    assert report.counts["replicas made anew"]
    assert report.counts["eras"] == 0


def test_readers_get_data_loss_where_the_last_copy_lost_its_first_segments() -> None:
    """The topic permits an unclean election, so that every copy may be lost."""
    configs = {**HOT, "min_insync_replicas": "1", "unclean_leader_election_enable": "true"}
    report = Run(1, options(configs)).execute()
    assert not report.violation, report.line
    assert report.counts["lost first segments"]
