"""Faults that hit one thing while everything else continues: each fault happens, and no promise is
broken.  The canaries of the rules that protect from them are in sim/canaries.py.
"""

from __future__ import annotations

import pytest

from pk.server.broker.node import BrokerNode
from pk.sim.campaign import Run, RunResult
from pk.sim.cluster import SimCluster
from pk.sim.machine import SimMachine
from pk.sim.options import BROKER, EXPIRATION_MS, NodePlan, SimOptions, TopicPlan, drawn
from pk.sim.workload import DELIVERY_MS
from pk.sim.world import EPOCH_MS, SimWorld
from tests.sim.test_later_faults import TIERED

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def executed(seed: int, *faults: str, every_ms: tuple[int, int] = (100, 500)) -> RunResult:
    options = SimOptions(
        topics=(TopicPlan("t", 2, TIERED, 3),),
        nodes=tuple(NodePlan(number) for number in (1, 2, 3)),
        faults=faults,
        chores=("elect",),
        fault_ms=6_000,
        fault_every_ms=every_ms,
        chore_every_ms=(100, 400),
        pace_ms=(20, 200),
        server={
            "replica_lag_time_max_ms": 500,
            "broker_session_timeout_ms": 1_500,
            "producer_id_expiration_ms": EXPIRATION_MS[-1],
        },
        recent_bytes=0,
    )
    report = Run(seed, options).execute()
    assert not report.violation, report.line
    assert report.acknowledged
    return report


@pytest.mark.parametrize(
    ("fault", "met"),
    [
        ("disk_stall", ("stalls of reads", "stalls of writes")),
        ("stream_stall", ("stalled frames",)),
        ("disk_short", ("operations without room",)),
        ("no_descriptors", ("operations without a descriptor",)),
        ("store_stall", ("stalls of the store",)),
    ],
)
def test_what_is_held_back_is_met_and_costs_nothing(fault: str, met: tuple[str, ...]) -> None:
    report = executed(1, fault)
    for name in met:
        assert report.counts[name], name


def test_a_clock_that_jumps_costs_nothing() -> None:
    """Rule L10: the alert lasts until the clock is right again."""
    assert executed(1, "clock_jump", "break_streams").faults["clock_jump"]


def test_starts_under_wrong_clocks_cost_nothing() -> None:
    """Rule L10: the clocks are ahead or behind, on one machine or on all."""
    assert executed(1, "wrong_start", "clock_jump", every_ms=(1_000, 3_000)).faults["wrong_start"]


def test_a_broker_starts_at_the_wrong_time_and_with_an_empty_disk_at_the_right_one() -> None:
    # sim/machine K4
    with SimWorld(1) as world:
        options = SimOptions(topics=())
        cluster = SimCluster(world, options)
        machine = cluster.machines[0]
        seen: list[int] = []

        def watch(started: SimMachine, node: BrokerNode) -> None:
            seen.append(started.clock.wall_ms() - world.loop.now_us // 1000 - EPOCH_MS)

        cluster.on_broker = watch
        machine.jump(50_000)
        machine.clock.step(7)  # this belongs to another fault, which ends it
        machine.start(BROKER)
        world.loop.run_for_ms(100)
        assert seen == [50_007]
        machine.replace_disk(BROKER, 0)
        machine.start(BROKER)
        world.loop.run_for_ms(100)
        assert seen == [50_007, 7]


def test_where_producers_expire_soon_no_clock_steps_by_a_little() -> None:
    """Steps below `clock_step_max_ms`, over several lives of a broker, count as time that has
    passed.
    """
    plans = [drawn(SimWorld(seed).random("options")) for seed in range(60)]
    soon = [each for each in plans if each.server["producer_id_expiration_ms"] < 86_400_000]
    assert soon
    assert not any("clock_step" in each.faults for each in soon)
    assert any("clock_jump" in each.faults for each in soon)
    assert min(EXPIRATION_MS) > 60_000 + max(DELIVERY_MS)
    assert {each.recent_bytes for each in plans} >= {None, 0}
