"""Faults and chores that last one moment: each happens, and the promise follows the requested
settings.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from pk import errors
from pk.log.validate import ValidationResult
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.sim.campaign import Run, RunResult
from pk.sim.loss_model import LossModel, PartitionFacts
from pk.sim.options import NodePlan, SimOptions, TopicPlan
from pk.sim.oracle import Oracle
from pk.types import PartitionKey

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONFIGS = {"segment_bytes": "14336", "tier_enable": "false", "min_insync_replicas": "2"}
TIERED = {
    "segment_bytes": "14336",
    "min_insync_replicas": "2",
    "tier_max_lag_ms": "50",
    "tier_file_bytes": "4000",
    "local_drop_delay_ms": "0",
    "local_retention_bytes": "0",
    "file_delete_delay_ms": "0",
}


ISR_FAULTS = ("lost_isr_change", "lost_isr_change", "pause", "kill_broker")
ISR_SEED = 9


def executed(
    seed: int,
    *faults: str,
    chores: tuple[str, ...] = (),
    configs: dict[str, str] = CONFIGS,
    fault_ms: int = 8_000,
) -> RunResult:
    options = SimOptions(
        topics=(TopicPlan("t", 2, configs, 3),),
        nodes=tuple(NodePlan(number) for number in (1, 2, 3, 4)),
        faults=faults,
        chores=chores,
        fault_ms=fault_ms,
        heal_ms=60_000,
        fault_every_ms=(100, 800),
        chore_every_ms=(100, 400),
        pace_ms=(20, 200),
        server={"replica_lag_time_max_ms": 500, "broker_session_timeout_ms": 1_500},
    )
    return Run(seed, options).execute()


def test_answers_to_isr_changes_get_lost_both_ways() -> None:
    met: dict[str, int] = {}
    for seed in (1, ISR_SEED):
        report = executed(seed, *ISR_FAULTS)
        assert not report.violation, report.line
        met.update(report.counts)
    assert met["ISR changes lost"]
    assert met["ISR changes unheard of"]


def test_a_wish_that_is_forgotten_with_its_answer_is_a_violation() -> None:
    """Rule R2: the change may have been made already, so it stays pending and is sent again
    (replica/alter_partition A2).
    """
    ask = AlterPartitionManager._ask

    async def forgetful(self: AlterPartitionManager) -> None:
        asked = dict(self._pending)
        try:
            await ask(self)
        except errors.PkError:
            for key, change in asked.items():
                self._pending.pop(key, None)
                change.leader.on_isr_refused(change.isr)
            raise

    with patch.object(AlterPartitionManager, "_ask", forgetful):
        violation = executed(ISR_SEED, *ISR_FAULTS).violation
    assert violation.split(":")[0] in ("V12", "V13", "V14", "V6"), violation or "nothing"


def test_brokers_die_while_a_log_is_begun_anew() -> None:
    report = executed(8, "crash_anew", "replace_disk", "kill_leader", configs=TIERED)
    assert not report.violation, report.line
    assert report.counts["deaths anew"]


def test_damage_that_cannot_be_told_costs_nothing() -> None:
    report = executed(1, "rot_and_cut")
    assert not report.violation, report.line
    assert report.counts["rot of log"]
    assert report.counts["eras"] == 0


def test_moves_turn_back_and_durability_changes_in_flight() -> None:
    report = executed(1, "kill_broker", "power", chores=("reassign_back", "toggle", "recreate"))
    assert not report.violation, report.line
    assert report.counts["chore reassign_back"]
    assert report.counts["chore toggle"]


KEY = PartitionKey("id", 0)
FACTS = PartitionFacts("t", KEY, (1, 2, 3), (1, 2, 3), 1, 0, (1, 2, 3))


def test_what_was_weakened_once_is_promised_no_more() -> None:
    plan = TopicPlan("t", 1, {"min_insync_replicas": "2", "flush_on_ack": "true"}, 3)
    oracle = Oracle([plan])
    kept = LossModel(oracle, [plan])
    assert (kept.copies("t"), kept.flushed("t")) == (2, True)
    kept.hit(1, disk=False, partitions=[FACTS], registered=None, now_ms=0.0)
    assert not oracle.lossy
    oracle.weakening("t", 1)
    oracle.weakening("t", 2)
    assert (kept.copies("t"), kept.flushed("t")) == (1, False)
    kept.hit(2, disk=False, partitions=[FACTS], registered=None, now_ms=0.0)
    assert oracle.era(*KEY) == 1


def test_requests_of_a_broken_stream_are_executed_late_and_cost_nothing() -> None:
    report = executed(1, "late_frames")
    assert not report.violation, report.line
    assert report.counts["late frames"]


def test_a_late_request_that_is_taken_for_a_new_one_is_a_violation() -> None:
    """Rule L6: the batch was sent again on another stream meanwhile."""
    with patch("pk.log.validate.check_producer", lambda *_: (ValidationResult.ASSIGN, None)):
        violation = executed(1, "late_frames").violation
    assert violation.split(":")[0] in ("V5", "V6", "V7"), violation or "nothing"


def test_copies_that_are_lost_when_fewer_are_asked_for_end_the_era() -> None:
    """From now on fewer copies are required, and the last of them is rotten: loss is permitted."""
    plan = TopicPlan("t", 1, {"min_insync_replicas": "2"}, 3)
    oracle = Oracle([plan])
    oracle.created("t", "id", 1)
    kept = LossModel(oracle, [plan])
    kept.rotted(FACTS, 1, lambda: True, 0.0)
    assert kept.eras == 0
    oracle.weakening("t", 1)
    assert (kept.eras, list(kept.stranded)) == (1, [KEY])
