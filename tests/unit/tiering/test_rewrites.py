"""What a maintenance job hands over: rows and sums add up, or nothing is taken (rules C5, C6)."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.tiering import layout, rewrites
from pk.tiering.data_files import DataFile
from pk.tiering.layout import DataName, PartitionCounters
from pk.tiering.plan import LogStart, Plan, Submission, plan
from pk.tiering.table import Snapshot
from pk.wire import pk_pb2 as wire

TOKEN = 9


def data(start: int, end: int, row_sum: int) -> DataFile:
    path = layout.data_path(DataName(0, start, end, 0, "a", 0, row_sum))
    return DataFile(path, 0, start, end - 1, 0, 0, end - start, 5)


SMALL = [data(0, 10, 7), data(10, 20, 5), data(20, 30, 4)]
TABLE = Snapshot(
    5, "id", {f.path: f for f in SMALL}, {0: PartitionCounters(end=30, rows=30, sum=16)}
)


def hand_over(
    files: list[DataFile], start: int, end: int, row_sum: int, *, rows: int = 0, **counter: int
) -> wire.CommitToTableRequest:
    """Return the hand-over of one file in place of `files`."""
    path = layout.job_path(DataName(0, start, end, -1, "j", 1, row_sum))
    add = wire.AddFile(
        path=path, start=start, end=end, rows=rows or end - start, row_sum=row_sum,
        min_offset=start, max_offset=end - 1, size=9,
    )  # fmt: skip
    change = wire.CommitToTableRequest(
        adds=[add], counters=[wire.TierCounter(**counter)], lease_token=TOKEN, version_read=5
    )
    for file in files:
        name = layout.parse_written_path(file.path)
        total = 0 if name is None else name.row_sum
        change.removes.add(path=file.path, rows=file.rows, row_sum=total)
    return change


def planned(change: wire.CommitToTableRequest, on: Snapshot = TABLE, **more: Any) -> Plan:
    return plan(on, [Submission("a", change, 10**9)], {}, **more)


def refusal(result: Plan) -> errors.PkError:
    assert result.commit is None
    (refused,) = result.refused
    return refused[1]


def test_files_with_the_same_rows_replace_others() -> None:
    result = planned(hand_over(SMALL[:2], 0, 20, 12))
    assert result.commit is not None
    assert (len(result.commit.adds), len(result.commit.removes)) == (1, 2)
    assert not result.commit.data_change
    assert not result.commit.adds[0].data_change
    assert result.commit.counters == {}


def test_rows_that_a_job_takes_away_are_counted_and_summed() -> None:
    change = hand_over(
        SMALL[:2], 0, 20, 8, rows=15, removed_added=5, removed_sum_added=4, cleaned=20, forgotten=3
    )
    change.data_change = True
    result = planned(change)
    assert result.commit is not None
    assert result.commit.counters[0] == TABLE.partition(0)._replace(
        removed=5, removed_sum=4, cleaned=20, forgotten=3
    )
    assert result.commit.data_change


def test_a_range_without_rows_to_remove_is_cleaned_all_the_same() -> None:
    counter = wire.TierCounter(cleaned=20)
    change = wire.CommitToTableRequest(counters=[counter], lease_token=TOKEN, version_read=5)
    first = planned(change)
    assert first.commit is not None
    assert (first.commit.adds, first.commit.removes) == ((), ())
    assert first.commit.counters == {0: TABLE.partition(0)._replace(cleaned=20)}
    again = planned(change, TABLE.after(first.commit, 6))  # the answer was lost
    assert (again.commit, len(again.done), again.refused) == (None, 1, [])


def test_files_may_leave_without_a_file_that_comes() -> None:
    change = hand_over(SMALL[:1], 0, 10, 7, removed_added=10, removed_sum_added=7, cleaned=30)
    change.data_change = True
    del change.adds[:]
    result = planned(change)
    assert result.commit is not None
    assert result.commit.removes == (SMALL[0].path,)
    assert result.commit.counters[0].removed == 10


@pytest.mark.parametrize(("now_ms", "taken"), [(0, True), (40_001, False), (None, False)])
def test_horizons_land_before_their_deadline(now_ms: int | None, taken: bool) -> None:
    """C4: otherwise they would count from a time before the older rows left."""
    change = wire.CommitToTableRequest(deadline_ms=100_000)
    if taken:
        rewrites.check_deadline(change, now_ms)
        return
    with pytest.raises(errors.UnknownTierRange):
        rewrites.check_deadline(change, now_ms)


def test_an_answer_that_was_lost_is_found_by_the_files() -> None:
    """The job sends the hand-over again; the first one had landed (T5)."""
    change = hand_over(SMALL[:2], 0, 20, 12)
    first = planned(change)
    assert first.commit is not None
    again = planned(change, TABLE.after(first.commit, 6))
    assert (again.commit, len(again.done), again.refused) == (None, 1, [])


def test_the_second_of_two_jobs_plans_again() -> None:
    first = planned(hand_over(SMALL[:2], 0, 20, 12))
    assert first.commit is not None
    second = planned(hand_over(SMALL[1:], 10, 30, 9), TABLE.after(first.commit, 6))
    assert isinstance(refusal(second), errors.UnknownTierRange)


def test_an_older_lease_is_refused() -> None:
    change = hand_over(SMALL[:2], 0, 20, 12)
    assert isinstance(refusal(planned(change, lease_newest=TOKEN + 1)), errors.LeaseHeld)
    assert planned(change, lease_newest=TOKEN).commit is not None


def test_files_below_the_start_are_not_merged_with_later_ones() -> None:
    """Their rows were counted as removed; in the merged file they would be live again."""
    on = Snapshot(5, "id", TABLE.files, {0: TABLE.partition(0)._replace(start=10, removed=10)})
    change = hand_over(SMALL[:2], 0, 20, 12)
    assert isinstance(refusal(planned(change, on)), errors.UnknownTierRange)


def appended(start: int, end: int) -> wire.CommitToTableRequest:
    new = data(start, end, 3)
    add = wire.AddFile(
        path=new.path, start=start, end=end, rows=new.rows, row_sum=3,
        min_offset=start, max_offset=end - 1, size=5,
    )  # fmt: skip
    counter = wire.TierCounter(start=start, end=end, rows_added=new.rows, sum_added=3)
    return wire.CommitToTableRequest(adds=[add], counters=[counter], data_change=True)


def test_rows_that_leave_share_no_version_with_appends() -> None:
    """A reader of the table's stream may skip the version with the removals whole (T16).  The two
    take turns, so a constant load of one does not hold up the other.
    """
    change = hand_over(SMALL[:2], 0, 20, 8, rows=15, removed_added=5, removed_sum_added=4)
    change.data_change = True
    waiting = [Submission("a", appended(30, 40), 9), Submission("b", change, 9)]
    for first, turn in (("b", False), ("a", True)):
        result = plan(TABLE, waiting, {}, hand_overs_first=turn)
        assert [item.request for item in result.taken] == [first]
        assert [item.request for item in result.waiting] == ["a" if first == "b" else "b"]
        assert result.commit is not None
        assert bool(result.commit.removes) == (first == "b")


def test_a_job_lands_under_constant_retention() -> None:
    """Retention removes files in every version; files with the same rows wait for one without."""
    change = hand_over(SMALL[1:], 10, 30, 9)
    starts = {0: LogStart(10)}
    first = plan(TABLE, [Submission("a", change, 9)], starts)
    assert (first.taken, len(first.waiting)) == ([], 1)
    assert first.commit is not None
    assert first.commit.removes == (SMALL[0].path,)
    starts = {0: LogStart(20)}
    later = TABLE.after(first.commit, 6)
    second = plan(later, first.waiting, starts, hand_overs_first=True)
    assert isinstance(refusal_in(second), errors.UnknownTierRange)
    starts = {0: LogStart(15)}
    third = plan(later, first.waiting, starts, hand_overs_first=True)
    assert [item.request for item in third.taken] == ["a"]
    assert third.commit is not None
    assert not third.commit.data_change


def refusal_in(result: Plan) -> errors.PkError:
    (refused,) = result.refused
    return refused[1]


def altered(change: wire.CommitToTableRequest, what: str) -> wire.CommitToTableRequest:
    match what:
        case "a row too many":
            change.adds[0].rows += 1
        case "another row sum":
            change.adds[0].path = layout.job_path(DataName(0, 0, 20, -1, "j", 1, 13))
            change.adds[0].row_sum = 13
        case "rows that the table does not know":
            change.removes[0].rows += 1
        case "a sum that the name does not state":
            change.removes[0].row_sum += 1
        case "a name of the copier":
            change.adds[0].path = layout.data_path(DataName(0, 0, 20, 0, "j", 1, 12))
        case "offsets outside of its range":
            change.adds[0].max_offset = 20
        case "a range outside of what it replaces":
            change.adds[0].path = layout.job_path(DataName(0, 0, 30, -1, "j", 1, 12))
            change.adds[0].end = 30
        case "another partition":
            change.adds[0].partition = 1
        case "nothing replaced":
            del change.removes[:]
        case "rows appended":
            change.counters[0].rows_added = 5
        case "cleaned above the end":
            change.counters[0].cleaned = 31
        case "a tombstone above the end":
            change.counters[0].forgotten = 31
        case "counters without files":
            change.counters.add(partition=1)
        case "counters that remove rows without files":
            change.counters.add(partition=1, cleaned=1, removed_added=1)
        case "rows leave without data change":
            change.counters[0].removed_added = 5
    return change


@pytest.mark.parametrize(
    "what",
    [
        "a row too many", "another row sum", "rows that the table does not know",
        "a sum that the name does not state", "a name of the copier",
        "offsets outside of its range", "a range outside of what it replaces",
        "another partition", "nothing replaced", "rows appended", "rows leave without data change",
        "cleaned above the end", "a tombstone above the end", "counters without files",
        "counters that remove rows without files",
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(what: str) -> None:
    change = altered(hand_over(SMALL[:2], 0, 20, 12), what)
    assert isinstance(refusal(planned(change)), errors.InvalidRequest), what
