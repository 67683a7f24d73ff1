"""A batch read planned without Spark: frozen offsets, filters that narrow."""

from __future__ import annotations

import datetime
import pickle
import sys

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
)

from pk import errors
from pk.log import columns
from pk.sparkconnector import options
from pk.sparkconnector.batch_reader import PkReader


def reader(broker, **given) -> PkReader:
    base = {"pk.bootstrap.servers": broker.address, "subscribe": "t"}
    return PkReader(
        options.source({**base, **given}, streaming=False), options.columns_of(["offset"])
    )


def planned(one: PkReader) -> list[tuple[int, int, int]]:
    return [
        (t.range.partition, t.range.start, t.range.end)
        for each in one.partitions()
        for t in each.tasks
    ]


@pytest.fixture
def filled(broker):
    for log in broker.create("t", 3):
        for _ in range(4):
            log.append(columns.encode_lists([b"v"] * 25, default_timestamp=log.end * 1000))
    return broker


def test_everything(filled):
    one = reader(filled)
    assert planned(one) == [(0, 0, 100), (1, 0, 100), (2, 0, 100)]
    rows = [o for task in one.partitions() for b in one.read(task) for o in b.column(0).to_pylist()]
    assert sorted(rows) == sorted([*range(100)] * 3)


@pytest.fixture
def narrow(broker, monkeypatch):
    """24 partitions of 10 records, planned on a driver with two cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    broker.logs = broker.create("t", 24)
    for log in broker.logs:
        log.append(columns.encode_lists([b"v"] * 10, default_timestamp=log.end * 1000))
    return broker


def test_small_partitions_share_a_task_for_each_core(narrow):
    one = reader(narrow)
    assert planned(one) == [(partition, 0, 10) for partition in range(24)]
    tasks = one.partitions()
    assert [len(task.tasks) for task in tasks] == [12, 12]
    rows = [o for task in tasks for b in one.read(task) for o in b.column(0).to_pylist()]
    assert rows == [*range(10)] * 24
    assert repr(tasks[0]).startswith("t-0 [0, 10) of the log; t-1 [0, 10) of the log; ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"packPartitions": "false"}, 24),
        ({"minPartitions": "7"}, 7),
        ({"minPartitions": "48"}, 48),
        ({"maxRecordsPerPartition": "60"}, 4),
        ({"maxRecordsPerPartition": "5"}, 48),
    ],
)
def test_options_that_bound_what_a_task_reads(narrow, given, expected):
    one = reader(narrow, **given)
    assert len(one.partitions()) == expected
    rows = [o for task in one.partitions() for b in one.read(task) for o in b.column(0).to_pylist()]
    assert rows == [*range(10)] * 24


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (errors.InvalidRequest("no"), errors.InvalidRequest),
        (errors.OffsetOutOfRange("no"), errors.DataLoss),
    ],
)
def test_a_range_that_fails_is_named(narrow, cause, raised):
    fifth = narrow.logs[5]
    narrow.on_fetch = lambda log, offset: cause if log is fifth else None
    one = reader(narrow)
    (task, _) = one.partitions()
    with pytest.raises(raised, match="t-5"):
        list(one.read(task))


def test_a_topic_that_is_deleted_while_ranges_are_packed_is_left_to_its_tasks(narrow, monkeypatch):
    def gone(*_):
        raise errors.UnknownTopicId("deleted")

    monkeypatch.setattr("pk.sparkconnector.connection.ClusterClient.curves", gone)
    assert [len(task.tasks) for task in reader(narrow).partitions()] == [12, 12]


def test_a_lost_range_takes_no_other_with_it(narrow, monkeypatch):
    told = []
    monkeypatch.setattr("pk.sparkconnector.planner.warn", told.append)
    fifth, lost = narrow.logs[5], errors.OffsetOutOfRange("no")
    narrow.on_fetch = lambda log, offset: lost if log is fifth else None
    one = reader(narrow, failOnDataLoss="false")
    (task, _) = one.partitions()
    rows = [o for batch in one.read(task) for o in batch.column(0).to_pylist()]
    assert rows == [*range(10)] * 11
    assert len(told) == 1
    assert told[0].startswith("t-5 [0, 10) is gone")


def test_planning_of_a_hot_range_does_not_load_what_reads_tables(filled, monkeypatch):
    """A tenth of a second of imports, which every streaming query would pay."""
    import pk.sparkconnector

    monkeypatch.delattr(pk.sparkconnector, "tier_scan", raising=False)
    monkeypatch.setitem(sys.modules, "pk.sparkconnector.tier_scan", None)  # an import would fail
    assert len(planned(reader(filled))) == 3


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(("partition",), 1)], [(1, 0, 100)]),
        ([In(("partition",), (0, 2)), EqualTo(("partition",), 2)], [(2, 0, 100)]),
        ([EqualTo(("topic",), "other")], []),
        ([GreaterThan(("offset",), 9), LessThan(("offset",), 20), EqualTo(("partition",), 0)],
         [(0, 10, 20)]),
        ([EqualTo(("offset",), 7), EqualTo(("partition",), 0)], [(0, 7, 8)]),
        ([GreaterThanOrEqual(("timestamp",), datetime.datetime.fromtimestamp(50, datetime.UTC)),
          EqualTo(("partition",), 0)], [(0, 50, 100)]),
        ([IsNotNull(("key",)), EqualTo(("headers", "key"), "x")],
         [(0, 0, 100), (1, 0, 100), (2, 0, 100)]),
    ],
)  # fmt: skip
def test_filters_narrow_and_are_left_to_spark(filled, filters, expected):
    one = reader(filled)
    assert list(one.pushFilters(filters)) == filters
    assert planned(pickle.loads(pickle.dumps(one))) == expected


def test_spark_without_push_down_accepts_the_reader(broker):
    """Its check: the method must be the base class's own (plan_data_source_read)."""
    one = reader(broker)
    assert getattr(one.pushFilters, "__func__", None) is DataSourceReader.pushFilters


def test_offsets_that_contradict_each_other(filled):
    starts = '{"t":{"0":-2,"1":50,"2":-2}}'
    ends = '{"t":{"0":-1,"1":-1,"2":10}}'
    one = reader(filled, startingOffsets=starts, endingOffsets=ends)
    assert planned(one) == [(0, 0, 100), (1, 50, 100), (2, 0, 10)]
    late = reader(filled, startingOffsets='{"t":{"0":-2,"1":500,"2":-2}}')
    with pytest.raises(errors.DataLoss, match="asks for 500"):
        late.partitions()


def test_nothing_to_read_is_no_task(broker):
    broker.create("t")
    one = reader(broker)
    assert one.partitions() == []
    assert list(one.read(InputPartition(None))) == []
