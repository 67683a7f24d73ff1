"""What the optimize job hands over when files go while it merges (maintenance/optimize O1, O2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.sparkconnector.maintenance import tables
from pk.sparkconnector.maintenance.optimize import MergedRun, OptimizeReport, _Optimize
from pk.sparkconnector.maintenance.tables import TablePlace, TableVersion
from pk.tiering import layout
from pk.tiering.data_files import DataFile
from pk.tiering.layout import DataName, PartitionCounters
from pk.tiering.table import Snapshot
from pk.wire import pk_pb2 as wire

PLACE = TablePlace("file:///t", "t", "id", {})
FILES = 40  #: of each partition
ROWS = 10


def name_of(partition: int, start: int, end: int, attempt: str) -> str:
    return layout.data_path(DataName(partition, start, end, 0, attempt, 0, 0))


class Table:
    """A table of which the oldest files go while a job merges."""

    def __init__(self, going: Callable[[int], int], partitions: int = 2, hot: int = 1) -> None:
        #: files of each of the first `hot` partitions that go during the n-th round of tasks
        self.going, self.hot = going, hot
        self.version, self.tasks = 1, 0
        self.files: dict[str, DataFile] = {}
        self.starts, self.ends = dict.fromkeys(range(partitions), 0), {}
        self.ends.update(self.starts)
        for partition in self.starts:
            for _ in range(FILES):
                self.append(partition)

    def append(self, partition: int) -> None:
        start = self.ends[partition]
        self.add(partition, start, start + ROWS, "a")
        self.ends[partition] = start + ROWS

    def add(self, partition: int, start: int, end: int, attempt: str) -> None:
        path = name_of(partition, start, end, attempt)
        rows = end - start
        self.files[path] = DataFile(path, partition, start, end - 1, 0, 0, rows, rows)

    def newest(self, _place: TablePlace, _partitions: Any) -> TableVersion:
        counters = {
            each: PartitionCounters(start=start, end=self.ends[each])
            for each, start in self.starts.items()
        }
        return TableVersion(PLACE, Snapshot(self.version, "id", dict(self.files), counters))

    def run_tasks(self, _spark: Any, tasks: list[Any], *_: Any) -> list[MergedRun]:
        self.tasks += 1
        for partition in list(range(self.hot)) * self.going(self.tasks):
            self.starts[partition] += ROWS
            self.append(partition)
        for file in list(self.files.values()):
            if file.max_offset < self.starts[file.partition]:
                del self.files[file.path]
        self.version += 1
        return [
            MergedRun(
                run,
                wire.AddFile(
                    path=name_of(run.partition, run.start, run.end, f"m{self.tasks}"),
                    partition=run.partition, min_offset=run.start, max_offset=run.end - 1,
                ).SerializeToString(),
                (0,) * len(run.files),
            )
            for run in (task.run for task in tasks)
        ]  # fmt: skip

    # -- the lease ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Return; the lease stands."""

    def commit(self, change: wire.CommitToTableRequest) -> None:
        if any(each.path not in self.files for each in change.removes):
            raise errors.UnknownTierRange("a file is gone: plan again")
        for each in change.removes:
            del self.files[each.path]
        for each in change.adds:
            self.add(each.partition, each.min_offset, each.max_offset + 1, "m")
        self.version += 1


def run(table: Table, monkeypatch: pytest.MonkeyPatch) -> OptimizeReport:
    monkeypatch.setattr(tables, "newest", table.newest)
    monkeypatch.setattr(tables, "run_tasks", table.run_tasks)
    job: Any = _Optimize
    found: OptimizeReport = job(None, PLACE, list(table.starts), table, 10_000).run()
    return found


def test_a_quiet_table_is_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(lambda _: 0)
    report = run(table, monkeypatch)
    assert (report.files_before, report.files_after) == (2 * FILES, 2)
    assert (report.plans, report.refused_runs) == (1, 0)
    assert "lost" not in report.summary()


def test_under_constant_retention_all_but_the_oldest_files_are_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three files of partition 0 go, and three come, during every round of tasks."""
    table = Table(lambda _: 3)
    report = run(table, monkeypatch)
    assert report.refused_runs == 1
    assert report.plans == 2
    # the run of partition 1 is not merged a second time
    assert report.rewritten_rows == ROWS * FILES + ROWS * (FILES - 3 - 6)
    merged = [f for f in table.files.values() if f.partition == 0 and f.rows > ROWS]
    assert [(f.min_offset, f.max_offset + 1) for f in merged] == [(90, 400)]
    assert "1 runs lost files" in report.summary()


def test_a_job_of_many_portions_plans_again_as_soon_as_files_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """maintenance/optimize O2: each plan holds for twice as long; few runs are merged in vain."""
    table = Table(lambda _: 1, partitions=200, hot=100)
    report = run(table, monkeypatch)
    merged = {f.partition for f in table.files.values() if f.rows > ROWS}
    assert merged == set(range(200))
    assert report.plans <= 5
    assert report.refused_runs <= 10 * report.plans  # one portion of each plan
    left = [f for f in table.files.values() if f.partition >= 100]
    assert len(left) == 100, "nothing is left alone where nothing goes"


def test_a_table_that_goes_faster_than_it_is_merged_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table(lambda _: FILES)
    for path in [f.path for f in table.files.values() if f.partition == 1]:
        del table.files[path]
    with pytest.raises(errors.UnknownTierRange, match="run the job again"):
        run(table, monkeypatch)


def test_files_that_come_meanwhile_do_not_keep_the_job_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table(lambda n: 2 if n == 1 else 0)
    run(table, monkeypatch)
    late = [f for f in table.files.values() if f.partition == 0 and f.min_offset >= ROWS * FILES]
    assert [f.rows for f in late] == [ROWS, ROWS]
