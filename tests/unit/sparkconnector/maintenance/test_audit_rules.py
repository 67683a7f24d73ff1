"""What an audit calls damage, and what it only notes."""

from __future__ import annotations

import pytest

from pk.sparkconnector.maintenance.audit_rules import (
    NAMED_MAX,
    ClusterFacts,
    FileFacts,
    Judgement,
    LogFacts,
    clusters,
    common,
    judge,
    live_files,
)
from pk.tiering import layout
from pk.tiering.data_files import DataFile
from pk.tiering.layout import SUM_MODULUS, DataName, PartitionCounters
from pk.types import NONE

COUNTERS = PartitionCounters(start=0, end=20, rows=20, sum=12)


def data(start: int, end: int, row_sum: int) -> DataFile:
    path = layout.data_path(DataName(0, start, end, 0, "a", 0, row_sum))
    return DataFile(path, 0, start, end - 1, 0, 0, end - start, 5)


FILES = [data(0, 10, 7), data(10, 20, 5)]


def read(file: DataFile, **other: object) -> ClusterFacts:
    name = layout.parse_written_path(file.path)
    facts = FileFacts(
        file.path, file.rows, 0 if name is None else name.row_sum, file.min_offset, file.max_offset
    )
    common = {"common_rows": file.rows, "common_sum": facts.row_sum}
    return ClusterFacts((facts._replace(**other),), 0, **common)  # type: ignore[arg-type]


def judged(
    counters: PartitionCounters = COUNTERS,
    facts: list[ClusterFacts] | None = None,
    log: LogFacts | None = None,
) -> Judgement:
    return judge(0, counters, FILES, [read(f) for f in FILES] if facts is None else facts, log)


def test_a_table_as_it_was_written_is_ok() -> None:
    found = judged(log=LogFacts(0, 20, 20, 12))
    assert (found.verdict, found.rows, found.problems, found.notes) == ("ok", 20, (), ())


def test_rows_that_left_are_subtracted() -> None:
    counters = COUNTERS._replace(rows=25, sum=2, removed=5, removed_sum=SUM_MODULUS - 10)
    assert judged(counters).verdict == "ok"


@pytest.mark.parametrize(
    ("counters", "facts", "log", "says"),
    [
        (COUNTERS._replace(rows=21), None, None, "1 rows are missing"),
        (COUNTERS._replace(rows=19), None, None, "1 rows more"),
        (COUNTERS._replace(sum=13), None, None, "the row sum is"),
        (COUNTERS._replace(end=19), None, None, "at or above the end 19"),
        (COUNTERS, [read(FILES[0])], None, "was not read"),
        (COUNTERS, [read(FILES[0], error="no such file"), read(FILES[1])], None, "no such file"),
        (COUNTERS, [read(FILES[0], rows=9), read(FILES[1])], None, "has 9 rows"),
        (COUNTERS, [read(FILES[0], row_sum=8), read(FILES[1])], None, "has the row sum"),
        (COUNTERS, [read(FILES[0], most=10), read(FILES[1])], None, "has offsets 0 to 10"),
        (COUNTERS, [read(FILES[0])._replace(repeated=2), read(FILES[1])], None, "2 rows have"),
        (COUNTERS, None, LogFacts(0, 20, 19, 12), "the local log has 19 rows"),
        (COUNTERS, None, LogFacts(0, 20, 20, 11), "the local log has 20 rows"),
    ],
)
def test_damage(
    counters: PartitionCounters, facts: list[ClusterFacts] | None, log: LogFacts | None, says: str
) -> None:
    found = judged(counters, facts, log)
    assert found.verdict == "damaged"
    assert any(says in each for each in found.problems), found.problems


def test_what_cannot_be_compared_is_noted() -> None:
    """It is no damage: an earlier build did not sum what it removed; the log may move on."""
    earlier = judged(COUNTERS._replace(rows=25, sum=40, removed=5))
    assert (earlier.verdict, len(earlier.notes)) == ("ok", 1)
    moved = judged(log=LogFacts(0, 20, error="offset 0 is out of range"))
    assert (moved.verdict, len(moved.notes)) == ("ok", 1)


def test_a_report_names_a_bounded_number_of_problems() -> None:
    files = [data(10 * n, 10 * n + 10, 1) for n in range(NAMED_MAX + 5)]
    found = judge(0, COUNTERS, files, [], None)
    assert len(found.problems) == NAMED_MAX + 1
    assert found.problems[-1].endswith("more")


def test_files_whose_offsets_overlap_are_read_together() -> None:
    scattered = [DataFile("partition=0/z1", 0, 20, 90, 0, 0, 9, 5),
                 DataFile("partition=0/z2", 0, 40, 50, 0, 0, 9, 5)]  # fmt: skip
    found = clusters([*scattered, *FILES, data(91, 95, 1)])
    assert [len(each) for each in found] == [1, 1, 2, 1]


def test_files_below_the_start_do_not_count() -> None:
    assert live_files(FILES, COUNTERS._replace(start=10)) == FILES[1:]


def test_the_log_is_compared_above_what_a_compaction_may_have_cleaned() -> None:
    """A job that was killed may have removed rows above `cleaned`."""
    job = DataFile(layout.job_path(DataName(0, 0, 10, NONE, "a", 0, 7)), 0, 3, 9, 0, 0, 2, 5)
    files = [job, data(10, 20, 5)]
    assert common(COUNTERS, files, 4, compacted=False) == (4, 20)
    assert common(COUNTERS, files, None, compacted=False) == (0, 0)
    assert common(COUNTERS, files, 4, compacted=True) == (10, 20)
    assert common(COUNTERS, files[1:], 4, compacted=True) == (4, 20)
    cleaned = COUNTERS._replace(cleaned=15)
    assert common(cleaned, files, 4, compacted=False) == (15, 20)
    assert common(cleaned, files, 17, compacted=True) == (17, 20)
    assert common(cleaned._replace(cleaned=20), files, 4, compacted=True) == (0, 0)
    assert common(cleaned._replace(start=18), files, 4, compacted=True) == (18, 20)
