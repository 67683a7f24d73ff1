"""Runs with compacted topics: what a seed draws, and faults that hit cleanings (rules C1 to C8)."""

from __future__ import annotations

import pytest

from pk.sim import options as options_of_seeds
from pk.sim.campaign import Run
from pk.sim.canary import COMPACTED, HOT, THREE
from pk.sim.options import COMPACTION_FAULTS, SimOptions, TopicPlan, drawn
from pk.sim.world import SimWorld

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_every_reader_gets_the_newest_records_while_faults_hit_cleanings() -> None:
    """Rules C4, C7: the machine of a cleaning dies, loses power or room, or its leader dies."""
    own = {"min_insync_replicas": "2", "delete_retention_ms": "300"}
    plan = TopicPlan("compacted", 1, {**COMPACTED, **own}, 3)
    options = SimOptions(
        topics=(TopicPlan("t", 1, HOT),),
        nodes=THREE,
        faults=COMPACTION_FAULTS,
        chores=(),
        fault_ms=10_000,
        fault_every_ms=(400, 1_500),
        server={"log_cleaner_backoff_ms": 100},
        compacted_topics=(plan,),
    )
    report = Run(4, options).execute()
    assert not report.violation, report.violation
    for name in ("cleanings", "reads of compacted topics", "tombstones removed"):
        assert report.counts[name], name
    for name in ("deaths in swaps", "power losses in swaps", "full disks in swaps"):
        assert report.counts[name], name


def test_a_share_of_the_seeds_has_compacted_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_of_seeds, "MAINTENANCE_CHANCE", 0.0)
    monkeypatch.setattr(options_of_seeds, "COMPACTION_CHANCE", 0.0)
    before = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    monkeypatch.setattr(options_of_seeds, "COMPACTION_CHANCE", 0.25)
    plans = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    some = [each for each in plans if each.compacted_topics]
    assert len(plans) / 8 <= len(some) <= len(plans) * 3 / 8
    for old, plan in zip(before, plans, strict=True):
        if not plan.compacted_topics:
            assert plan == old
            continue
        assert plan.topics == old.topics
        for topic in plan.compacted_topics:
            assert not topic.tiered
            assert topic.keeps
