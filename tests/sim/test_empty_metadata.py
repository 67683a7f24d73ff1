"""A controller that comes back with an empty disk (sim/operations.py, rule Q1, KIP-853)."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from pk.sim.campaign import Report, Run
from pk.sim.machine import Machine
from pk.sim.operations import Operator
from pk.sim.options import CONTROLLER, NodePlan, SimOptions, TopicPlan

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OPTIONS = SimOptions(
    topics=(TopicPlan("t", 1, {"tier_enable": "false"}, 2),),
    nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
    faults=("empty_metadata", "empty_metadata", "kill_controller", "split"),
    chores=("configure", "grow"),
    unrest_ms=12_000,
    heal_ms=30_000,
    fault_every_ms=(200, 1_000),
    chore_every_ms=(50, 200),
    pace_ms=(100, 400),
)
SEED = 1


def executed() -> Report:
    return Run(SEED, OPTIONS).execute()


def test_an_empty_metadata_disk_is_another_voter_and_votes_once_it_was_added() -> None:
    report = executed()
    assert not report.violation, report.line
    replaced = report.counts["controller disks replaced"]
    assert replaced
    assert report.counts["controllers voting again"] == replaced


def test_a_voter_without_its_memory_that_goes_on_voting_is_a_violation() -> None:
    """The directory's uuid is part of who votes: an empty disk under the old one forgets."""

    def unseen(self: Operator, machine: Machine, restart_ms: float) -> None:
        run = machine.run
        machine.replace_disk(CONTROLLER, restart_ms)
        machine.run = run

    with patch.object(Operator, "replace_metadata", unseen):
        violation = executed().violation
    assert violation.split(":")[0] in ("V10", "V11", "V15"), violation or "nothing was noticed"
