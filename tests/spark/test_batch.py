"""Batch reads on a real server: Spark sees the same rows as a consumer."""

from __future__ import annotations

import json
import os

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as fn

from pk import Producer, TopicPartition


@pytest.fixture(params=["true", "false"], ids=["columns", "python"])
def load(request, load):
    """`load` on each way: in the JVM, and through Python."""
    return lambda topic, **options: load(topic, columnar=request.param, **options)


def rows_of(frame) -> list[tuple]:
    """Return rows in the form of Cluster.consumed."""
    found = []
    for row in frame.collect():
        headers = [] if row.headers is None else [(h.key, _bytes(h.value)) for h in row.headers]
        stamp = row.ms
        found.append(
            (row.partition, row.offset, _bytes(row.key), _bytes(row.value), stamp, headers)
        )
    return sorted(found, key=lambda row: row[:2])


def _bytes(value):
    return None if value is None else bytes(value)


def as_consumed(frame) -> list[tuple]:
    return rows_of(frame.withColumn("ms", fn.unix_millis("timestamp")))


def consumed_ms(cluster, topic) -> list[tuple]:
    return [(*row[:4], int(row[4].timestamp() * 1000), row[5]) for row in cluster.consumed(topic)]


def test_what_spark_sees_is_what_a_consumer_sees(cluster, load):
    topic = cluster.topic(3, tier_enable=False)
    cluster.fill(topic, 2000, compression="zstd", batch_size=4096)
    frame = load(topic, includeHeaders="true")
    assert [f.simpleString() for f in frame.schema.fields] == [
        "key:binary", "value:binary", "topic:string", "partition:int", "offset:bigint",
        "timestamp:timestamp", "timestampType:int",
        "headers:array<struct<key:string,value:binary>>",
    ]  # fmt: skip
    assert as_consumed(frame) == consumed_ms(cluster, topic)
    assert frame.select("topic", "timestampType").distinct().collect() == [(topic, 0)]

    some = load(topic, columns="offset,partition").where("partition = 1 AND offset < 10")
    assert some.columns == ["offset", "partition"]
    assert some.count() == 10

    starts = {topic: {"0": 5, "1": -2, "2": -2}}
    ends = {topic: {"0": 9, "1": 0, "2": 3}}
    part = load(topic, startingOffsets=json.dumps(starts), endingOffsets=json.dumps(ends))
    found = sorted(tuple(row) for row in part.select("partition", "offset").collect())
    assert found == [(0, 5), (0, 6), (0, 7), (0, 8), (2, 0), (2, 1), (2, 2)]

    by_time = load(topic, startingTimestamp="1356998401900", endingTimestamp="1356998401950")
    assert sorted(int(row.value) for row in by_time.select("value").collect()) == list(
        range(1900, 1950)
    )
    assert load(topic, minPartitions="8").rdd.getNumPartitions() == 8


def test_small_partitions_share_tasks(spark, cluster, load):
    """Tasks are counted: a task costs 27 ms, however little it reads.  Files and hot ranges share
    tasks, too.
    """
    topic = cluster.topic(partitions=24, tier_max_lag_ms=200)
    cluster.fill_values(topic, [b"%d" % number for number in range(120)])

    def tiered() -> int:
        return sum(max(0, p.end) for p in cluster.admin.describe_tier(topic).partitions)

    cluster.wait("the records are tiered", lambda: tiered() == 120)
    cluster.admin.alter_configs(topic, {"tier_max_lag_ms": 3_600_000})
    cluster.fill_values(topic, [b"%d" % number for number in range(120, 240)])
    cores = os.cpu_count() or 1
    packed = load(topic, includeHeaders="true")
    single = load(topic, includeHeaders="true", packPartitions="false")
    assert packed.rdd.getNumPartitions() <= cores
    assert single.rdd.getNumPartitions() == 48, "files and hot ranges"
    found = sorted(int(row.value) for row in packed.select("value").collect())
    assert found == list(range(240))
    assert as_consumed(packed) == as_consumed(single)


def test_a_topic_that_is_all_in_the_table_is_read_by_spark_alone(spark, cluster, load):
    from pk.sparkconnector import read_topic

    topic = cluster.topic(2, tier_max_lag_ms=200)
    cluster.fill(topic, 1000)
    cluster.wait(
        "all is tiered",
        lambda: all(
            one.tiered_end == one.log_end for one in cluster.admin.describe_topics([topic])
        ),
    )
    natively = read_topic(spark, topic, cluster.address, include_headers=True)
    assert as_consumed(natively) == consumed_ms(cluster, topic)
    assert natively.dtypes == load(topic, includeHeaders="true").dtypes
    plan = read_topic(spark, topic, cluster.address).select("value")._jdf.queryExecution()
    assert "BatchScan" not in plan.toString(), "no source of Python"
    assert "offset" not in plan.executedPlan().toString(), "no column to compare"

    cluster.admin.delete_records({TopicPartition(topic, 0): 7})
    left = consumed_ms(cluster, topic)
    assert as_consumed(read_topic(spark, topic, cluster.address, include_headers=True)) == left


def test_a_schema_of_ones_own_names_any_columns(spark, cluster):
    topic = cluster.topic(tier_enable=False)
    cluster.fill(topic, 10)
    reader = spark.read.format("pk").option("kafka.bootstrap.servers", cluster.address)
    reader = reader.option("subscribe", topic)
    for given in ("offset bigint, value binary", "offset bigint NOT NULL, value binary"):
        frame = reader.schema(given).load()
        assert frame.schema["offset"].nullable == ("NOT NULL" not in given)
        assert sorted(row.offset for row in frame.collect()) == list(range(10))
    with pytest.raises(PySparkException, match="drop NOT NULL"):
        reader.schema("value binary NOT NULL").load().count()
    with pytest.raises(PySparkException, match="cast it after load"):
        reader.schema("value string").load().count()
    with pytest.raises(PySparkException, match="did you mean startingOffsets"):
        reader.option("startingOffset", "earliest").schema("value binary").load().count()


def test_cold_and_hot_are_one_log(spark, cluster, load):
    """The cold part comes from the table's files, the rest from the broker; Delta can also read the
    cold part natively.
    """
    topic = cluster.topic(2, tier_file_bytes=4096, tier_max_lag_ms=3_600_000)
    cluster.fill(topic, 3000, batch_size=2048)

    def tiered() -> dict[int, int]:
        return {p.partition: p.end for p in cluster.admin.describe_tier(topic).partitions}

    cluster.wait("both partitions are tiered", lambda: sum(e > 0 for e in tiered().values()) == 2)
    with Producer(cluster.address) as producer:
        for n in range(50):
            producer.send(topic, value=None, key=b"late%d" % n, partition=n % 2)
    expected = consumed_ms(cluster, topic)
    assert len(expected) == 3050
    frame = load(topic, includeHeaders="true")
    assert as_consumed(frame) == expected

    from pk.sparkconnector import options
    from pk.sparkconnector.batch_reader import PkReader

    given = {"pk.bootstrap.servers": cluster.address, "subscribe": topic}
    plan = PkReader(
        options.source(given, streaming=False), options.columns_of(["offset"])
    ).partitions()
    tasks = [task for each in plan for task in each.tasks]
    assert {task.cold is not None for task in tasks} == {True, False}, "cold and hot tasks"

    from pk.sparkconnector import read_topic

    natively = read_topic(spark, topic, cluster.address, include_headers=True)
    assert as_consumed(natively) == expected
    assert natively.columns == frame.columns
