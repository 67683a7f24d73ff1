"""Other builds on stopped nodes (sim/format_faults.py): rules L21, Q6 and Q7 hold in a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pk.sim.campaign import Run
from pk.sim.options import NodePlan, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OPTIONS = SimOptions(
    topics=(TopicPlan("t", 2, {"tier_enable": "false", "min_insync_replicas": "2"}, 3),),
    nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
    faults=("other_version", "unknown_field", "kill_leader"),
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

#: One older build at a time, with pauses in which the level can be raised.
LEVELS = replace(
    OPTIONS,
    faults=("older_build", "older_build", "kill_leader", "kill_controller"),
    chores=("upgrade", "elect"),
    fault_ms=25_000,
    fault_every_ms=(1_500, 4_000),
    chore_every_ms=(50, 300),
)


@pytest.mark.parametrize("seed", [1])
def test_a_node_waits_for_the_build_that_wrote_its_file(seed: int) -> None:
    report = Run(seed, OPTIONS).execute()
    assert not report.violation, report.line
    assert report.counts["files of another build"]


@pytest.mark.parametrize("seed", [4])
def test_nodes_of_two_levels_are_in_one_cluster(seed: int) -> None:
    """Q6: an older build joins a cluster of the first level; a newer level stops it."""
    report = Run(seed, LEVELS).execute()
    assert not report.violation, report.line
    assert report.counts["older builds in a cluster of level 1"]
    assert report.counts["older builds in a cluster of level 2"]
