"""Damage and losses that nothing in a run explains are violations (sim/damage_reports.py,
sim/readers.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pk import errors
from pk.sim.campaign import Run
from pk.sim.checkers import ReaderCheck
from pk.sim.loss_model import PartitionFacts
from pk.sim.options import NodePlan, SimOptions, TopicPlan
from pk.sim.readers import SimConsumer
from pk.sim.workload import SimAdmin
from pk.types import PartitionKey, TopicPartition

PLACE = TopicPartition("t", 0)
KEY = PartitionKey("id", 0)
FACTS = PartitionFacts("t", KEY, (1, 2), (1,), 1, 0, (1,))
CONFIGS = {"unclean_leader_election_enable": "true"}


@pytest.fixture
def run() -> Iterator[Run]:
    """Return a run whose topic exists and in which nothing happened yet."""
    nodes = (NodePlan(1), NodePlan(2))
    run = Run(1, SimOptions(topics=(TopicPlan("t", 1, CONFIGS, 2),), nodes=nodes))
    run.oracle.created("t", "id", 1)
    yield run
    run.world.close()


@pytest.fixture
def consumer(run: Run) -> SimConsumer:
    return run._consumer(run.world.world_of("client"), ReaderCheck("c", run.oracle))


def lost(start: int, end: int, **details: str) -> errors.DataLoss:
    return errors.DataLoss("gone", offset=str(start), next_offset=str(end), **details)


def rots(run: Run, broker: int) -> None:
    run.observer.losses.rotted(FACTS, broker, lambda: True, 0.0)


def test_a_lost_range_is_told_only_where_a_copy_rotted(run: Run, consumer: SimConsumer) -> None:
    # rule L9
    consumer._lost(PLACE, lost(5, 9), 5)
    assert [each.split(",")[0] for each in run.troubles] == ["V5: c at t-0"]
    assert "nothing explains" in run.troubles.pop()
    rots(run, 1)
    consumer._lost(PLACE, lost(5, 9), 5)
    assert not run.troubles
    consumer._lost(PLACE, lost(5, 9), 9)
    assert "another range" in run.troubles.pop()
    assert consumer.check.told == {"damaged ranges": 3}


def test_rows_are_told_as_missing_only_where_they_were_deleted(
    run: Run, consumer: SimConsumer
) -> None:
    """Rule T17; neighbouring ranges count as one, and a rotten copy explains no missing rows."""
    rots(run, 1)
    consumer._lost(PLACE, lost(5, 9, partition="0"), 5)
    assert "nothing explains" in run.troubles.pop()
    run.oracle.rows_deleted("id", 0, 7, 20)
    consumer._lost(PLACE, lost(5, 9, partition="0"), 5)
    assert "nothing explains" in run.troubles.pop()
    run.oracle.rows_deleted("id", 0, 3, 7)
    consumer._lost(PLACE, lost(5, 20, partition="0"), 5)
    assert not run.troubles
    consumer._lost(PLACE, lost(5, 21, partition="0"), 5)
    assert "nothing explains" in run.troubles.pop()


def test_a_changed_table_is_told_only_where_its_log_rotted(run: Run, consumer: SimConsumer) -> None:
    # rule T8
    told = errors.TierTableChanged("differs", uri="memory://tier/t/id")
    consumer._problem(told, PLACE)
    assert "no log of a table rotted" in run.troubles.pop()
    run.oracle.rotten_tables["t/id"] = None
    consumer._problem(told, PLACE)
    assert not run.troubles


def test_an_administrator_is_refused_only_where_something_rotted(run: Run) -> None:
    """Rules L9 and T8: a leader that looks for an offset reads its log and its table."""
    world, rng = run.world.world_of("admin"), run.world.random("admin/chores")
    admin = SimAdmin(
        world, "n1:1", run.oracle, run.options, rng, lambda *_: (0, 0), run.troubles.append
    )
    changed = errors.TierTableChanged("differs", uri="memory://tier/t/id")
    corrupt = errors.CorruptLog("damaged")
    assert not admin._explained(changed, "t", 0)
    assert not admin._explained(corrupt, "t", 0)
    run.oracle.rotten_tables["t/id"] = None
    assert admin._explained(changed, "t", 0)
    assert not admin._explained(corrupt, "t", 0)
    rots(run, 1)
    assert admin._explained(corrupt, "t", 0)
    assert not admin._explained(errors.InvalidRequest("no"), "t", 0)


def test_a_broker_reports_a_damaged_range_only_where_its_copy_rotted(run: Run) -> None:
    """Rule L9: also if no reader reads the range."""
    facts: dict[str, object] = {"partition": "t-0", "offset": 5, "next_offset": 9}
    rots(run, 2)
    run.cluster.said("n2/broker", "damaged_range", facts)
    assert not run.cluster.problems
    run.cluster.said("n1/broker", "damaged_range", facts)
    assert run.cluster.problems.pop().startswith("V5: n1 reports a damaged range")


def test_a_tier_misses_only_rows_that_somebody_deleted(run: Run) -> None:
    # rule T17
    facts: dict[str, object] = {
        "topic": "t",
        "partition": 0,
        "rows": 4,
        "ranges": "[5, 9) [12, 13)",
    }
    run.oracle.rows_deleted("id", 0, 5, 9)
    run.cluster.said("n1/tier", "tier_rows_missing", facts)
    assert run.cluster.problems.pop().startswith("V5: n1 misses rows that nobody deleted")
    run.oracle.rows_deleted("id", 0, 12, 13)
    run.cluster.said("n1/tier", "tier_rows_missing", facts)
    assert not run.cluster.problems
