"""Runs with maintained tables: jobs beside retention, rewrites and deletes of another engine (C2 to
C6, T16, T17), and what the checks of tables accept."""

from __future__ import annotations

import pytest

from pk.sim import options as options_of_seeds
from pk.sim.campaign import Run
from pk.sim.canary import ALONE, HOT, MAINTAINED
from pk.sim.checkers import Violation
from pk.sim.compaction_history import CompactionHistory, Keyed, KeyedRow
from pk.sim.options import SimOptions, TopicPlan, drawn
from pk.sim.oracle import Oracle, Outcome, RecordId
from pk.sim.table_history import (
    LeaseHistory,
    SnapshotState,
    TableFacts,
    check_snapshot,
    check_table_rows,
)
from pk.sim.world import SimWorld
from pk.types import TopicPartition

PLACE = TopicPartition("maintained", 0)


@pytest.mark.sim
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tables_keep_the_newest_records_beside_another_engine() -> None:
    """Drivers die, are late and send twice; files are rewritten and damaged."""
    plan = TopicPlan("maintained", 1, MAINTAINED)
    options = SimOptions(
        topics=(TopicPlan("t", 1, HOT),),
        nodes=ALONE,
        faults=("optimize", "object_rot", "kill_tier", "late_commit"),
        chores=(),
        fault_ms=15_000,
        pace_ms=(100, 500),
        fault_every_ms=(400, 1_500),
        compacted_topics=(plan,),
    )
    report = Run(SEED, options).execute()
    assert not report.violation, report.violation
    for name in ("compactions of tables", "merges of tables", "snapshots whole"):
        assert report.counts[name], (name, report.line)
    assert report.counts["compactions planned again"], report.line


#: A seed in which each of these situations occurs.
SEED = 5


@pytest.mark.sim
def test_a_share_of_the_seeds_has_maintained_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_of_seeds, "MAINTENANCE_CHANCE", 0.0)
    before = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    monkeypatch.setattr(options_of_seeds, "MAINTENANCE_CHANCE", 0.25)
    plans = [drawn(SimWorld(seed).random("options")) for seed in range(200)]
    some = [each for each in plans if each.maintained_topics]
    assert len(plans) / 8 <= len(some) <= len(plans) * 3 / 8
    for old, plan in zip(before, plans, strict=True):
        if not plan.maintained_topics:
            assert plan == old
            continue
        assert plan.compacted_topics[: len(old.compacted_topics)] == old.compacted_topics
        assert plan.fault_ms >= options_of_seeds.MAINTENANCE_MS


def history(*records: tuple[int, bytes, bool]) -> CompactionHistory:
    """Return a history of acknowledged records: offset, key, tombstone."""
    known = Oracle((TopicPlan("maintained", 1, {}),))
    found = CompactionHistory(known, known, {"maintained": 100})
    for offset, key, tombstone in records:
        sent = Keyed(RecordId("w", offset), PLACE, key, tombstone, offset)
        found.send(sent)
        sent.outcome, sent.offset = Outcome.ACKNOWLEDGED, offset
    return found


def row(offset: int, key: bytes, *, tombstone: bool = False) -> KeyedRow:
    return KeyedRow(offset, RecordId("w", offset), key, tombstone, offset, 0.0)


def facts(*rows: KeyedRow, end: int = 9) -> TableFacts:
    return TableFacts(0, end, len(rows), 7, rows, 7)


def test_a_table_has_the_newest_record_of_each_key() -> None:
    known = history((0, b"a", False), (1, b"a", False), (2, b"b", False), (3, b"b", True))
    check_table_rows(known, PLACE, facts(row(1, b"a"), row(3, b"b", tombstone=True)), 50)
    check_table_rows(known, PLACE, facts(row(0, b"a"), row(2, b"b"), end=1), 50)
    check_table_rows(known, PLACE, facts(row(1, b"a")), 150)  # the tombstone has aged
    wrong = [
        (facts(row(0, b"a"), row(3, b"b", tombstone=True)), 50),  # the older record was kept
        (facts(row(1, b"a"), row(1, b"a"), row(3, b"b", tombstone=True)), 50),  # twice
        (facts(row(1, b"a")), 50),  # the tombstone is missing too early
        (facts(row(1, b"a"), row(2, b"b")), 150),  # its record has returned
        (facts(row(1, b"a"), row(3, b"b", tombstone=True))._replace(counted=3), 50),
        (facts(row(1, b"a"), row(3, b"b", tombstone=True))._replace(counted_sum=8), 50),
    ]
    for found, now_ms in wrong:
        with pytest.raises(Violation, match="V30"):
            check_table_rows(known, PLACE, found, now_ms)


def test_a_snapshot_has_no_deleted_key() -> None:
    known = history((0, b"a", False), (1, b"b", False), (2, b"b", True), (3, b"a", False))
    check_snapshot(known, "maintained", SnapshotState({0: 3}, {(0, b"a"): row(0, b"a")}), {}, 9)
    for rows in ({}, {(0, b"a"): row(0, b"a"), (0, b"b"): row(1, b"b")}):
        with pytest.raises(Violation, match="V31"):
            check_snapshot(known, "maintained", SnapshotState({0: 3}, rows), {}, 9)


def test_an_older_lease_changes_nothing_behind_a_newer_one() -> None:
    leases = LeaseHistory()
    leases.taken("t", token=5, sent_ms=0, now_ms=1, epoch=0)
    leases.taken("t", token=9, sent_ms=2, now_ms=4, epoch=0)
    leases.taken("t", token=5, sent_ms=3, now_ms=5, epoch=0)  # sent before that was answered
    leases.taken("t", token=5, sent_ms=6, now_ms=7, epoch=1)  # another leader, whose metadata lag
    with pytest.raises(Violation, match="V32"):
        leases.taken("t", token=5, sent_ms=6, now_ms=7, epoch=0)
