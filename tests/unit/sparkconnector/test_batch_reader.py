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
        (t.task.range.partition, t.task.range.start, t.task.range.end) for t in one.partitions()
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
