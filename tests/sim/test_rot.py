"""Bit rot in a whole cluster (sim/corruption.py): rule L9 holds, and without it a run fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from pk.log import batch as batches
from pk.server.metadata.image import PartitionState, TopicState
from pk.sim.campaign import Run, RunResult
from pk.sim.loss_model import LossModel, PartitionFacts
from pk.sim.options import NodePlan, SimOptions, TopicPlan
from pk.sim.oracle import Oracle
from pk.types import NONE, NodeId, PartitionKey

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HOT = {"segment_bytes": "14336", "tier_enable": "false", "min_insync_replicas": "2"}
OPTIONS = SimOptions(
    topics=(TopicPlan("t", 2, HOT, 3),),
    nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
    faults=("rot", "rot", "rot", "kill_client"),
    chores=(),
    fault_ms=8_000,
    heal_ms=15_000,
    fault_every_ms=(100, 500),
    pace_ms=(20, 200),
    server={"broker_session_timeout_ms": 1_500},
)
SEED = 4


def executed() -> RunResult:
    return Run(SEED, OPTIONS).execute()


def test_a_copy_that_rots_is_noticed_and_made_anew_and_costs_nothing() -> None:
    report = executed()
    assert not report.violation, report.line
    assert report.counts["rot of log"]
    assert report.counts["replicas made anew"]
    assert report.counts["eras"] == 0


def _trusting(raw: Any, *_: Any) -> batches.Header:
    return batches.read_header(raw)


@pytest.mark.parametrize(
    ("broken", "value", "noticed_as"),
    [
        ("pk.log.reading.verify_batches", lambda *_, **__: None, "liveness"),
        ("pk.log.batch.check", _trusting, "V5 V6"),
    ],
    ids=["the leader does not look", "nobody looks"],
)
def test_without_checksums_rot_is_a_violation(broken: str, value: Any, noticed_as: str) -> None:
    with patch(broken, value):
        violation = executed().violation
    assert violation.split(":")[0] in noticed_as.split(), violation or "nothing was noticed"


# -- what is promised ------------------------------------------------------------------------------

KEY = PartitionKey("id", 0)
FACTS = PartitionFacts("t", KEY, (1, 2, 3), (1, 2, 3), 1, 0, (1, 2, 3))


def promise(factor: int = 3, **configs: str) -> tuple[LossModel, Oracle]:
    plan = TopicPlan("t", 1, {"min_insync_replicas": "2", **configs}, factor)
    oracle = Oracle([plan])
    return LossModel(oracle, [plan]), oracle


def test_a_rotten_copy_is_a_lost_one_until_it_is_off_the_disk_and_in_sync_again() -> None:
    kept, oracle = promise(flush_on_ack="true")
    damage = [True]
    assert kept.may_rot(FACTS, 1)
    kept.rotted(FACTS, 1, lambda: damage[0], 0.0)
    assert (kept.is_hit(KEY, 1), kept.is_rotten(KEY, 1), kept.eras) == (True, True, 0)
    assert not kept.may_rot(FACTS, 2), "the last but one that is promised"
    kept.seen(FACTS, {})
    assert kept.is_rotten(KEY, 1), "in sync, and nobody knows yet"
    damage[0] = False
    kept.seen(FACTS._replace(isr=(2, 3)), {})
    assert kept.is_rotten(KEY, 1), "set aside, and not made anew yet"
    kept.seen(FACTS, {})
    assert not kept.is_hit(KEY, 1)
    assert not oracle.lossy


def test_a_broker_that_is_a_replica_again_has_its_rotten_copy_again() -> None:
    """A reassignment that is cancelled leaves the directory on the disk for a while."""
    kept, _ = promise(flush_on_ack="true")
    damage = [True, True]
    for broker in (1, 2):
        kept.rotted(FACTS, broker, lambda n=broker - 1: damage[n], 0.0)
    kept.seen(FACTS._replace(replicas=(3,), isr=(3,)), {})
    assert not kept.is_rotten(KEY, 1)
    damage[1] = False  # the second directory is deleted
    kept.seen(FACTS._replace(isr=(3,)), {})
    assert (kept.is_rotten(KEY, 1), kept.is_rotten(KEY, 2)) == (True, False)


def test_a_disk_that_goes_with_a_rotten_copy_ends_the_era_and_an_operator_may_elect() -> None:
    kept, oracle = promise()
    kept.rotted(FACTS, 1, lambda: True, 0.0)
    kept.hit(2, disk=True, partitions=[FACTS], registered=None, now_ms=0.0)
    assert (kept.eras, list(kept.stranded), oracle.era(*KEY)) == (1, [KEY], 1)
    kept.elected_uncleanly(FACTS._replace(leader=3), (1, 2, 3), 0.0)
    assert kept.eras == 2


@pytest.mark.parametrize("rots_first", [True, False])
def test_a_rotten_copy_among_copies_without_power_waits_for_an_operator(rots_first: bool) -> None:
    """Rule L3 empties ISR and ELR; SYNCED records survive if a last-known replica is elected."""
    kept, oracle = promise(flush_on_ack="true")
    steps: list[Callable[[], None]] = [
        lambda: kept.rotted(FACTS, 1, lambda: True, 0.0),
        lambda: kept.hit(2, disk=False, partitions=[FACTS], registered=None, now_ms=0.0),
    ]
    for step in steps if rots_first else reversed(steps):
        assert not kept.stranded, "one of those that are promised is whole and in sync"
        step()
    assert (kept.eras, list(kept.stranded), oracle.era(*KEY)) == (0, [KEY], 0)
    kept.elected_uncleanly(FACTS._replace(leader=2), (1, 2), 0.0)
    assert kept.eras == 0, "2 has everything"
    kept.elected_uncleanly(FACTS._replace(leader=3), (1, 2), 0.0)
    assert kept.eras == 1, "3 may have been behind"
    kept.elected_uncleanly(FACTS._replace(leader=1), (1, 2), 0.0)
    assert kept.eras == 2, "1 is damaged"


def test_a_rotten_copy_that_alone_was_ever_in_sync_waits_for_an_operator() -> None:
    """With fewer copies than `min_insync_replicas` no record was acknowledged (rule R1): whichever
    replica is elected, all acknowledged records are there.
    """
    kept, oracle = promise(min_insync_replicas="3")
    facts = FACTS._replace(isr=(1,), known=(1, 2))
    kept.rotted(facts, 1, lambda: True, 0.0)
    assert not kept.stranded, "2 may come back and lead"
    kept.hit(3, disk=True, partitions=[facts], registered=None, now_ms=0.0)
    assert not kept.stranded, "3 was never in sync"
    kept.rotted(facts._replace(isr=(1,), known=(1,)), 1, lambda: True, 0.0)
    assert list(kept.stranded) == list(oracle.stranded) == [KEY]
    kept.elected_uncleanly(FACTS._replace(leader=2), (1,), 0.0)
    assert kept.eras == 0
    kept.hit(2, disk=True, partitions=[FACTS], registered=None, now_ms=0.0)
    kept.elected_uncleanly(FACTS._replace(leader=3), (1, 2), 0.0)
    assert kept.eras == 2, "one for the disks of as many as are asked for, one for the election"


def test_a_rotten_copy_strands_nobody_while_enough_others_have_their_power() -> None:
    kept, _ = promise(flush_on_ack="true")
    kept.rotted(FACTS, 1, lambda: True, 0.0)
    kept.hit(1, disk=False, partitions=[FACTS], registered=None, now_ms=0.0)
    assert not kept.stranded, "the same copy"


def test_a_rotten_copy_is_the_last_one_while_no_broker_opens_another() -> None:
    """A broker without descriptors cannot open its copy, which then leaves the ELR (rule L9)."""
    kept, oracle = promise(flush_on_ack="true", min_insync_replicas="2")
    kept.rotted(FACTS, 1, lambda: True, 0.0)
    kept.seen(FACTS._replace(isr=(1,), known=(1, 2)), {})
    assert not kept.stranded, "2 may come back and lead"
    kept.seen(FACTS._replace(isr=(1,), known=(1,)), {})
    assert (kept.eras, list(kept.stranded), list(oracle.stranded)) == (0, [KEY], [KEY])


def test_copies_without_power_are_stranded_when_fewer_are_asked_for() -> None:
    kept, oracle = promise(flush_on_ack="true", min_insync_replicas="2")
    oracle.created("t", "id", 1)
    kept.rotted(FACTS, 1, lambda: True, 0.0)
    oracle.weakening("t", 1)
    assert list(kept.stranded) == [KEY]


def test_an_operator_elects_where_nobody_in_isr_or_elr_may_come_back() -> None:
    run = Run(SEED, OPTIONS)
    run.observer.image.topics["id"] = topic = TopicState("t", "id")
    run.observer.losses.stranded[KEY] = None

    def stranded(leader: NodeId, isr: tuple[NodeId, ...], elr: tuple[NodeId, ...]) -> bool:
        topic.partitions[0] = PartitionState((1, 2), isr, leader, 1, 1, elr)
        return bool(run.operator._stranded())

    try:
        assert stranded(NONE, (), ())
        assert not stranded(NONE, (), (2,))
        assert not stranded(NONE, (2,), ())
        assert not stranded(2, (2,), ())
    finally:
        run.world.close()


def test_an_only_copy_never_rots_and_where_it_is_asked_for_loss_is_permitted() -> None:
    kept, _ = promise(unclean_leader_election_enable="true", min_insync_replicas="1")
    assert kept.may_rot(FACTS, 1)
    assert not kept.may_rot(FACTS._replace(replicas=(1,)), 1)
    moving, _ = promise(1, unclean_leader_election_enable="true")
    assert not moving.may_rot(FACTS, 1), "one copy is left when the move is over"
    strict, _ = promise(min_insync_replicas="1")
    assert not strict.may_rot(FACTS, 1)
