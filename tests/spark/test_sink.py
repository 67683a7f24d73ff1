"""Writes on a real server, batch and stream."""

from __future__ import annotations

import datetime
import socket

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

STAMP = datetime.datetime(2013, 1, 1, 10, 17, tzinfo=datetime.UTC)
PAIR = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
SCHEMA = StructType(
    [
        StructField("key", StringType()),
        StructField("value", BinaryType()),
        StructField("partition", IntegerType()),
        StructField("headers", ArrayType(PAIR)),
        StructField("timestamp", TimestampType()),
    ]
)


def write(frame, cluster, **options):
    given = {"kafka.bootstrap.servers": cluster.address, **options}
    return frame.write.format("pk").options(**given)


def test_every_column_arrives(spark, cluster):
    topic = cluster.topic(3, tier_enable=False)
    rows = [
        ("k", bytearray(b"1"), 2, [("h", bytearray(b"x")), ("h", None)], STAMP),
        (None, bytearray(b"2"), 0, None, STAMP),
        ("k", None, 2, [], STAMP),
    ]
    write(spark.createDataFrame(rows, SCHEMA).coalesce(1), cluster, topic=topic).mode(
        "append"
    ).save()
    assert [row[:4] + row[5:] for row in cluster.consumed(topic)] == [
        (0, 0, None, b"2", []),
        (2, 0, b"k", b"1", [("h", b"x"), ("h", None)]),
        (2, 1, b"k", None, []),
    ]
    assert {row[4] for row in cluster.consumed(topic)} == {STAMP}


def test_keys_choose_partitions_as_kafkas_client_does(spark, cluster):
    """The same keys through the Producer and through Spark land in the same partitions."""
    sent, written = cluster.topic(5, tier_enable=False), cluster.topic(5, tier_enable=False)
    cluster.fill(sent, 200)
    frame = spark.range(200).selectExpr(
        "concat('k', cast(id % 7 AS string)) AS key", "cast(id AS string) AS value"
    )
    write(frame, cluster, topic=written).mode("append").save()

    def place(topic):
        return sorted((row[2], row[3], row[0]) for row in cluster.consumed(topic))

    assert place(written) == place(sent)


def test_rows_choose_their_topic_and_overwrite_replaces(spark, cluster):
    one, two = cluster.topic(1, tier_enable=False), cluster.topic(1, tier_enable=False)
    frame = spark.createDataFrame(
        [(one, "a"), (two, "b"), (one, "c")], "topic string, value string"
    )
    write(frame, cluster).mode("append").save()
    assert sorted(row[3] for row in cluster.consumed(one)) == [b"a", b"c"]
    assert [row[3] for row in cluster.consumed(two)] == [b"b"]
    fresh = spark.createDataFrame([("d",)], "value string").coalesce(1)
    write(fresh, cluster, topic=one, truncateTopic="true").mode("overwrite").save()
    assert [row[3] for row in cluster.consumed(one)] == [b"d"]


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "option topic, or a column topic"), ({"topic": "x", "kafka.ssl.ca": "y"}, "no security")],
)
def test_bad_writes_are_refused_before_a_task_runs(spark, cluster, options, words):
    frame = spark.createDataFrame([("d",)], "value string")
    with pytest.raises(PySparkException, match=words):
        write(frame, cluster, **options).mode("append").save()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("overwrite", r'would delete what the topic holds: use mode\("append"\)'),
        ("errorifexists", r"""Please use either the "Append" or "Overwrite" mode"""),  # Spark alone
    ],
)
def test_only_append_needs_no_second_thought(spark, cluster, mode, words):
    topic = cluster.topic(1, tier_enable=False)
    cluster.fill(topic, 3)
    frame = spark.createDataFrame([("d",)], "value string")
    with pytest.raises(PySparkException, match=words):
        write(frame, cluster, topic=topic).mode(mode).save()
    assert len(cluster.consumed(topic)) == 3


@pytest.mark.parametrize("listens", [False, True], ids=["dead port", "black hole"])
def test_an_address_where_nobody_answers_is_said_soon(spark, listens):
    """The error comes after connectTimeoutMs and names it, so the test reads no clock."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if listens:
            sock.listen(64)
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        given = {"pk.bootstrap.servers": address, "connectTimeoutMs": "1200"}
        reader = spark.read.format("pk").options(subscribe="t", **given)
        with pytest.raises(PySparkException, match=rf"{address}.*connectTimeoutMs=1200"):
            reader.load().count()
        frame = spark.createDataFrame([("d",)], "value string").coalesce(1)
        with pytest.raises(PySparkException, match=rf"{address}.*tried for 1200 ms"):
            frame.write.format("pk").options(topic="t", **given).mode("append").save()


def test_from_topic_to_topic(spark, cluster, tmp_path, patiently):
    """A query reads one topic and writes another; after a restart it continues."""
    source, target = cluster.topic(2, tier_enable=False), cluster.topic(3, tier_enable=False)
    cluster.fill(source, 500)

    def run() -> None:
        reader = spark.readStream.format("pk").option("pk.bootstrap.servers", cluster.address)
        frame = reader.options(subscribe=source, startingOffsets="earliest", includeHeaders="true")
        writer = (
            frame.load()
            .select("key", "value", "headers")
            .writeStream.format("pk")
            .option("pk.bootstrap.servers", cluster.address)
            .option("topic", target)
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
        )
        query = patiently(writer.start, lambda query: query.awaitTermination(300))
        assert not query.isActive
        assert query.exception() is None

    run()
    cluster.fill(source, 100)
    run()

    def content(topic):
        return sorted((row[3], row[2], str(row[5])) for row in cluster.consumed(topic))

    assert content(target) == content(source)
    assert len(content(target)) == 600
