"""The driver of a compaction: what it plans, and when it hands nothing over (design/0018, C5)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pk import errors
from pk.clock import MedianTime
from pk.compaction.plan import CompactionLimits
from pk.sparkconnector.maintenance import tables
from pk.sparkconnector.maintenance.compaction import (
    CLEANING_MS,
    ROUNDS_MAX,
    _Compaction,
    _Round,
)
from pk.sparkconnector.maintenance.compaction_plan import Portion, RewriteRun, TopicLimits
from pk.sparkconnector.maintenance.compaction_rows import RewrittenRun
from pk.sparkconnector.maintenance.tables import TableVersion
from pk.tiering import layout
from pk.tiering.data_files import DataFile
from pk.tiering.layout import PartitionCounters
from pk.tiering.rewrites import LANDS_WITHIN_MS
from pk.tiering.table import Snapshot
from pk.wire import pk_pb2 as wire
from tests.unit.sparkconnector.maintenance.compaction_bench import Bench

LIMITS = TopicLimits(CompactionLimits(0.5, 0, 2**63 - 1), 100)


class Lease:
    """A lease that lives, and takes every hand-over."""

    def __init__(self) -> None:
        self.time_ms: int | None = 1_000
        self.starts = {0: 7}
        self.holds: dict[int, int] = {}
        self.changes: list[wire.CommitToTableRequest] = []

    def check(self) -> None:
        pass

    def now(self) -> MedianTime | None:
        return None if self.time_ms is None else MedianTime(self.time_ms, self.time_ms)

    def local_log_starts(self) -> dict[int, int]:
        return self.starts

    def retention_holds(self, partitions: list[int]) -> dict[int, int]:
        return self.holds

    def commit(self, change: wire.CommitToTableRequest) -> None:
        self.changes.append(change)


@pytest.fixture
def table(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, LIMITS)
    bench.append([(b"k", b"1"), (b"k", None)])
    return bench


def driver(table: Bench, lease: Lease, partitions: Sequence[int] = (0,)) -> _Compaction:
    given: Any = lease
    spark: Any = None
    return _Compaction(spark, table.place, partitions, given, LIMITS, 1 << 20, 10)


def cleanings(made: _Compaction, table: Bench, *, force: bool = False) -> Any:
    version = TableVersion(table.place, table.snapshot)
    return made._cleanings(version, force, lambda partition, status: None)


def test_times_come_with_the_lease(table: Bench) -> None:
    """A partition without a report of its replicas has no settled offset (C4)."""
    lease = Lease()
    (found,) = cleanings(driver(table, lease), table)
    cleaning = found.cleaning
    assert (cleaning.now_ms, cleaning.settled_end, cleaning.end) == (1_000, 7, 2)
    assert cleaning.deadline_ms is not None
    assert cleaning.deadline_ms >= 1_000 + CLEANING_MS
    lease.time_ms, lease.starts = None, {}
    (found,) = cleanings(driver(table, lease), table)
    assert (found.cleaning.now_ms, found.cleaning.deadline_ms) == (None, None)
    assert found.cleaning.settled_end == 0


def test_nothing_that_a_query_holds_is_compacted(table: Bench) -> None:
    """The cleanable range ends at the hold (C1, S1)."""
    lease = Lease()
    lease.holds = {0: 1, 1: 0}
    (found,) = cleanings(driver(table, lease), table, force=True)
    assert found.cleaning.end <= 1


def test_a_partition_that_is_not_due_is_left_alone(table: Bench) -> None:
    table.compact()
    table.append([(b"l", b"2")])
    (found,) = cleanings(driver(table, Lease()), table, force=True)
    assert found.plan.first_dirty == 2
    left_alone = driver(table, Lease())
    left_alone._limits = TopicLimits(CompactionLimits(1.0, 0, 2**63 - 1), 100)
    assert cleanings(left_alone, table) == []
    assert left_alone._status == {0: "not due"}


@pytest.mark.parametrize("horizons", [0, 1])
@pytest.mark.parametrize("late_ms", [-1, 1, None])
def test_horizons_are_handed_over_in_time(table: Bench, horizons: int, late_ms: int | None) -> None:
    """The driver may have slept; rows without a horizon may leave late."""
    lease = Lease()
    made = driver(table, lease)
    (cleaning,) = cleanings(made, table)
    version = TableVersion(table.place, table.snapshot)
    one = _Round(version, [cleaning])
    deadline_ms = cleaning.cleaning.deadline_ms
    lease.time_ms = None if late_ms is None else deadline_ms - 2 * LANDS_WITHIN_MS + late_ms
    result = RewrittenRun(0, b"", (), 0, 0, 0, horizons, 0)
    run = RewriteRun(0, 0, 0, 2, ())
    results = [result] if horizons else []
    portion = Portion((run,) if horizons else (), (cleaning,), True)
    if horizons and late_ms != -1:
        with pytest.raises(errors.UnknownTierRange):
            made._hand_over(one, portion, results)
        assert lease.changes == []
        return
    made._hand_over(one, portion, results)
    (change,) = lease.changes
    assert change.deadline_ms == (deadline_ms if horizons else 0)
    assert change.counters[0].cleaned == 2


class Refusing(Lease):
    """A lease whose owner refuses hand-overs that have a partition."""

    def __init__(self, refused: int, times: int) -> None:
        super().__init__()
        self.refused, self.times = refused, times

    def commit(self, change: wire.CommitToTableRequest) -> None:
        if self.times and any(each.partition == self.refused for each in change.counters):
            self.times -= 1
            raise errors.UnknownTierRange("a file is gone: plan again")
        super().commit(change)


def cleaned(job: _Compaction, table: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the job over a file in each of its partitions of which no row leaves."""

    @contextlib.contextmanager
    def decisions(_one: _Round) -> Iterator[Any]:
        frame: Any = None
        yield frame

    files, counters = {}, {}
    for partition in job._partitions:
        path = layout.data_path(layout.DataName(partition, 0, 2, 0, "a", 0, 0))
        files[path] = DataFile(path, partition, 0, 1, 0, 0, 2, 100)
        counters[partition] = PartitionCounters(end=2, rows=2)
    version = TableVersion(table.place, Snapshot(1, "id", files, counters))
    monkeypatch.setattr(tables, "newest", lambda *_: version)
    monkeypatch.setattr(sys.modules[_Compaction.__module__], "_counts", lambda _: [])
    monkeypatch.setattr(job, "_decisions", decisions)
    return job.run(True, lambda partition, status: None)


def test_a_partition_that_loses_files_does_not_undo_the_work_for_others(
    table: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As retention of a `compact,delete` topic does."""
    lease = Refusing(1, ROUNDS_MAX)
    report = cleaned(driver(table, lease, [0, 1, 2]), table, monkeypatch)
    handed_over = [[each.partition for each in change.counters] for change in lease.changes]
    assert handed_over == [[0], [2], [1]]
    # the first attempt has all of them, the second finishes two
    assert report.plans == ROUNDS_MAX + 1


def test_a_partition_that_always_loses_files_is_given_up(
    table: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Refusing(0, 10**6)
    with pytest.raises(errors.UnknownTierRange, match="run the job again"):
        cleaned(driver(table, lease), table, monkeypatch)
    assert lease.times == 10**6 - ROUNDS_MAX
