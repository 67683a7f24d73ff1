"""When a snapshot may be brought forward by an increment, and when it is rebuilt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.client.admin.described import TierDescription, TierPartition
from pk.client.snapshots import check_usable
from pk.sparkconnector.maintenance import snapshot_plan
from pk.sparkconnector.maintenance.snapshot_plan import is_stale, plan, why_whole
from pk.tiering import layout, snapshot_table
from pk.tiering.data_files import DataFile
from pk.tiering.layout import DataName, PartitionCounters
from pk.tiering.snapshot_table import SnapshotVersion, attempt_of, bucket_of, check_of
from pk.tiering.table import Snapshot
from pk.types import NONE, TopicPartition


def file_of(
    partition: int, start: int, end: int, *, bucket: tuple[int, int] | None = None
) -> DataFile:
    attempt = "a1" if bucket is None else attempt_of(*bucket, "0f")
    path = layout.job_path(DataName(partition, start, end, NONE, attempt, 7, 9))
    return DataFile(path, partition, start, end - 1, 0, 0, end - start, 1_000)


def table_of(*counters: PartitionCounters, step: int = 10) -> Snapshot:
    """A table whose files have `step` offsets each."""
    files = [
        file_of(partition, at, min(at + step, each.end))
        for partition, each in enumerate(counters)
        for at in range(each.start, each.end, step)
    ]
    return Snapshot(5, "table", {f.path: f for f in files}, dict(enumerate(counters)))


def before_of(*positions: int, buckets: int = 4) -> SnapshotVersion:
    files = [
        file_of(partition, 0, end, bucket=(0, buckets))
        for partition, end in enumerate(positions)
        if end
    ]
    return SnapshotVersion("t", "u", 3, dict(enumerate(positions)), {f.path: f for f in files})


def counters(start: int, end: int, forgotten: int = 0) -> PartitionCounters:
    return PartitionCounters(start, end, forgotten=forgotten)


def test_an_increment_reads_what_is_behind_x_with_the_buckets_of_the_snapshot() -> None:
    found = plan(table_of(counters(0, 100), counters(0, 50)), before_of(90, 50))
    assert (found.why_whole, found.since, found.ends) == ("", {0: 90, 1: 50}, {0: 100, 1: 50})
    assert (found.buckets, found.slices) == ({0: 4, 1: 4}, (0,))


@pytest.mark.parametrize(
    ("table", "before", "why"),
    [
        (table_of(counters(0, 100)), None, "no usable snapshot"),
        (table_of(counters(0, 100), counters(0, 9)), before_of(100), "partition 1 is new"),
        (table_of(counters(0, 100)), before_of(101), "below 101"),
        (table_of(counters(0, 100, forgotten=96)), before_of(95), "forgot tombstones"),
        (table_of(counters(0, 100)), before_of(70), "30 of 100 rows are new"),
    ],
)
def test_a_whole_run_has_its_reason(table: Snapshot, before: Any, why: str) -> None:
    assert why in why_whole(table, before)
    found = plan(table, before)
    assert found.why_whole == why_whole(table, before)
    assert found.since == {each: table.partition(each).start for each in table.counters}


def test_a_tombstone_below_x_that_compaction_forgot_is_in_the_snapshot() -> None:
    assert why_whole(table_of(counters(0, 100, forgotten=95)), before_of(95)) == ""


def test_files_of_another_engine_in_the_snapshot_are_replaced() -> None:
    before = before_of(95)
    other = DataFile("partition=0/part-1.parquet", 0, 0, 9, 0, 0, 10, 10)
    foreign = SnapshotVersion("t", "u", 3, before.positions, {other.path: other})
    assert "another build" in why_whole(table_of(counters(0, 100)), foreign)


def test_retention_behind_x_leaves_no_old_row_and_reads_from_the_start() -> None:
    table = table_of(counters(97, 100), counters(0, 1_000))
    found = plan(table, before_of(95, 1_000))
    assert (found.why_whole, found.since[0]) == ("", 97)
    assert is_stale(file_of(0, 40, 97), table)
    assert not is_stale(file_of(0, 97, 99), table)


@given(
    st.lists(st.tuples(*[st.integers(0, 60)] * 4), min_size=1, max_size=3),
    st.lists(st.integers(0, 90), min_size=1, max_size=3),
)
def test_a_plan_reads_every_row_that_the_snapshot_lacks(
    drawn: list[tuple[int, int, int, int]], positions: list[int]
) -> None:
    """Below `since`, the snapshot has the rows, or they are below the start."""
    table = table_of(*(counters(a, a + b, min(c, a + b)) for a, b, c, _ in drawn))
    before = before_of(*positions)
    found = plan(table, before)
    for partition, each in table.counters.items():
        assert found.ends[partition] == each.end
        assert each.start <= found.since[partition]
        if found.why_whole:
            assert found.since[partition] == each.start
        else:
            assert found.since[partition] <= max(before.positions[partition], each.start)
            assert before.positions[partition] >= each.forgotten
        assert 1 <= found.buckets[partition] <= snapshot_plan.BUCKETS_MAX


# -- the table -------------------------------------------------------------------------------------


@given(st.integers(0, 99_999), st.integers(1, 99_999))
def test_a_file_names_its_bucket(bucket: int, buckets: int) -> None:
    assert bucket_of(file_of(3, 5, 9, bucket=(bucket, buckets)).path) == (bucket, buckets)
    assert bucket_of(file_of(3, 5, 9).path) is None


def test_the_check_covers_positions_and_files() -> None:
    files = [file_of(0, 0, 5), file_of(1, 0, 5)]
    check = check_of({0: 5, 1: 5}, files)
    assert check == check_of({1: 5, 0: 5}, files[::-1]) < 2**63
    others = [
        check_of({0: 5, 1: 6}, files),
        check_of({0: 5}, files),
        check_of({0: 5, 1: 5}, files[:1]),
        check_of({0: 5, 1: 5}, [files[0], file_of(1, 0, 6)]),
    ]
    assert check not in others


def test_a_snapshot_is_beside_the_topics_table() -> None:
    found = snapshot_table.snapshot_uri("s3://b/tier/t/id-1", "t", "id-1")
    assert found == "s3://b/tier/t__snapshot/id-1"


# -- a consumer ------------------------------------------------------------------------------------


def usable(position: int, *, first: int = 0, forgotten: int = 0) -> None:
    part = TierPartition(0, first, 100, 0, 0, 0, 0, 0, 0, 0, 0, forgotten)
    tier = TierDescription("t", "id", "u", 1, "ok", (part,), {})
    check_usable(before_of(position), tier, {TopicPartition("t", 0): first})


def test_a_consumer_goes_on_only_where_the_log_has_all_that_the_snapshot_lacks() -> None:
    usable(50, first=50, forgotten=50)
    with pytest.raises(errors.SnapshotUnusable, match="tombstones"):
        usable(50, forgotten=51)
    with pytest.raises(errors.SnapshotUnusable, match="the log begins at 51"):
        usable(50, first=51)
