"""A controller that comes back with an empty disk (sim/operations.py, rule Q1, KIP-853)."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from pk.sim.campaign import Run, RunResult
from pk.sim.machine import SimMachine
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
    fault_ms=12_000,
    heal_ms=30_000,
    fault_every_ms=(200, 1_000),
    chore_every_ms=(50, 200),
    pace_ms=(100, 400),
)
SEED = 1


def executed() -> RunResult:
    return Run(SEED, OPTIONS).execute()


def test_an_empty_metadata_disk_is_another_voter_and_votes_once_it_was_added() -> None:
    report = executed()
    assert not report.violation, report.line
    replaced = report.counts["controller disks replaced"]
    assert replaced
    assert report.counts["controllers voting again"] == replaced


def test_a_voter_without_its_memory_that_goes_on_voting_is_a_violation() -> None:
    """The directory's uuid is part of a voter's identity: an empty disk with the old uuid has lost
    its votes.
    """

    def unseen(self: Operator, machine: SimMachine, restart_ms: float) -> None:
        run = machine.run
        machine.replace_disk(CONTROLLER, restart_ms)
        machine.run = run

    with patch.object(Operator, "replace_metadata", unseen):
        violation = executed().violation
    assert violation.split(":")[0] in ("V10", "V11", "V15"), violation or "nothing was noticed"


def test_a_controller_that_meets_damage_ends_and_votes_again_from_an_empty_disk() -> None:
    """Rule L9: committed records that are damaged here are neither replayed nor guessed."""
    more = {"metadata_log_max_record_bytes_between_snapshots": 3_000}
    faults = ("rot", "rot", "kill_controller", "power")
    options = replace(OPTIONS, faults=faults, fault_ms=10_000, server=more)
    with patch("pk.sim.corruption.KINDS", ("metadata",)):
        report = Run(1, options).execute()
    assert not report.violation, report.line
    assert report.counts["rot of metadata"]
    assert report.counts["metadata damage met"] == report.counts["controllers voting again"] == 1


def test_an_active_controller_meets_damage_when_a_broker_starts_and_another_takes_over() -> None:
    """Rule L9: otherwise every starting broker would get the damaged records, without an end."""
    options = replace(OPTIONS, faults=("rot", "kill_broker", "kill_broker"), chores=())
    with patch("pk.sim.corruption.KINDS", ("metadata",)):
        report = Run(SEED, options).execute()
    assert not report.violation, report.line
    assert report.counts["metadata damage met"] == report.counts["controllers voting again"] >= 1
