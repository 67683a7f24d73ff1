"""Files of another build on stopped nodes (sim/format_faults.py): rules L21 and Q7 hold in a
cluster."""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run
from pk.sim.options import FORMAT_FAULTS, NodePlan, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OPTIONS = SimOptions(
    topics=(TopicPlan("t", 2, {"tier_enable": "false", "min_insync_replicas": "2"}, 3),),
    nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
    faults=(*FORMAT_FAULTS, "kill_leader"),
    chores=("delete_records", "configure"),
    fault_ms=8_000,
    heal_ms=60_000,
    fault_every_ms=(500, 2_000),
    pace_ms=(20, 200),
    server={
        "broker_session_timeout_ms": 1_500,
        "metadata_log_max_record_bytes_between_snapshots": 3_000,
    },
)


@pytest.mark.parametrize("seed", [1])
def test_a_node_waits_for_the_build_that_wrote_its_file(seed: int) -> None:
    report = Run(seed, OPTIONS).execute()
    assert not report.violation, report.line
    assert report.counts["files of another build"]
