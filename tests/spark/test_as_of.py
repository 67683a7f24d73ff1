"""Batch reads AS OF a version of the topic's table: the same rows until VACUUM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from pk import Producer, TopicPartition, errors
from pk.cli.tier import app
from pk.sparkconnector import read_topic
from pk.sparkconnector.maintenance import compaction, optimize
from tests.spark.test_maintenance import home_of, tiered

KEPT = {"tier_max_lag_ms": 200, "local_retention_ms": -2}


def write(cluster: Any, topic: str, first: int, count: int) -> None:
    with Producer(cluster.address) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, key=b"k%d" % (number % 7), partition=number % 2)
        producer.flush(60)
    tiered(cluster, topic)


def rows(frame: Any) -> list[tuple[int, int, bytes]]:
    found = frame.select("partition", "offset", "value").collect()
    return sorted((row.partition, row.offset, bytes(row.value)) for row in found)


def version_of(cluster: Any, topic: str) -> int:
    return DeltaTable(cluster.admin.describe_tier(topic).uri).version()


def test_a_version_has_the_same_rows_whatever_is_done_to_the_table(spark, cluster, load) -> None:
    policy = {"cleanup_policy": "compact,delete", "min_cleanable_dirty_ratio": "0.0"}
    topic = cluster.topic(2, delete_retention_ms=10**10, **policy, **KEPT)
    write(cluster, topic, 0, 300)
    version = version_of(cluster, topic)
    before = rows(load(topic, versionAsOf=version))
    assert len(before) == 300
    ends = {topic: {"0": 150, "1": 150}}

    def again() -> list[list[tuple[int, int, bytes]]]:
        return [
            rows(load(topic, versionAsOf=version)),
            rows(load(topic, endingOffsets=json.dumps(ends), pinned="true")),
            rows(read_topic(spark, topic, cluster.address, version_as_of=version)),
        ]

    assert again() == [before] * 3
    write(cluster, topic, 300, 300)
    assert again() == [before] * 3, "appends"
    # a new leader holds everything until each coordinator has reported (replica/retention_holds H1)
    cluster.wait("compaction", lambda: compaction(spark, cluster.address, topic).removed_rows > 0)
    assert len(rows(load(topic))) < 600
    assert again() == [before] * 3, "compaction"
    optimize(spark, cluster.address, topic)
    assert again() == [before] * 3, "optimize"
    home = home_of(cluster, topic)
    spark.sql(f"OPTIMIZE delta.`{home}`").collect()
    assert again() == [before] * 3, "another engine's OPTIMIZE"
    cluster.admin.delete_records({TopicPartition(topic, p): 150 for p in (0, 1)})
    cluster.wait("retention", lambda: version_of(cluster, topic) > 0 and _starts(cluster, topic))
    assert again() == [before] * 3, "retention"

    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.sql(f"VACUUM delta.`{home}` RETAIN 0 HOURS").collect()
    with pytest.raises(Exception, match="TableVersionNotFound") as caught:
        rows(load(topic, versionAsOf=version))
    assert f"version {version} can no longer be read" in str(caught.value)
    oldest = int(str(caught.value).partition("the oldest version left is ")[2].split()[0])
    assert rows(load(topic, versionAsOf=oldest))
    with pytest.raises(Exception, match="TableVersionNotFound"):
        rows(load(topic, versionAsOf=oldest - 1))


def _starts(cluster: Any, topic: str) -> bool:
    return all(each.start >= 150 for each in cluster.admin.describe_tier(topic).partitions)


def test_a_time_names_the_version_that_delta_names(spark, cluster, load) -> None:
    topic = cluster.topic(2, **KEPT)
    for part in range(3):
        write(cluster, topic, part * 100, 100)
    home = home_of(cluster, topic)
    given = ["history", topic, "--bootstrap", cluster.address, "--json"]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    told = [json.loads(line) for line in shown.output.splitlines()]
    assert [each["version"] for each in told] == list(range(told[0]["version"], -1, -1))
    appends = [each for each in told if each["operation"] == "append"]
    assert sum(each["rows_added"] for each in appends) == 300
    assert told[-1]["operation"] == "create"
    middle = appends[len(appends) // 2]
    natively = spark.read.format("delta").option("timestampAsOf", middle["time"]).load(str(home))
    expected = rows(natively)
    assert 0 < len(expected) < 300
    assert rows(load(topic, timestampAsOf=middle["time"])) == expected
    assert rows(load(topic, timestampAsOf=str(middle["time_ms"] + 1))) == expected
    frame = read_topic(spark, topic, cluster.address, timestamp_as_of=middle["time"])
    assert rows(frame) == expected


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"versionAsOf": "999"}, "TableVersionNotFound", "the newest one is"),
        ({"timestampAsOf": "2001-01-01T00:00:00Z"}, "TableVersionNotFound", "oldest version left"),
        ({"timestampAsOf": "2999-01-01T00:00:00Z"}, "TableVersionNotFound", "after the newest"),
        ({"timestampAsOf": "2026-01-01"}, "InvalidOption", "with its zone"),
        ({"versionAsOf": "1", "timestampAsOf": "1"}, "InvalidOption", "give one of them"),
        ({"versionAsOf": "-1"}, "InvalidOption", "number of a version"),
        ({"pinned": "true"}, "InvalidOption", "needs endingOffsets"),
        ({"versionAsOf": "1", "startingTimestamp": "5"}, "InvalidOption", "position by time"),
    ],
)
def test_what_cannot_be_read_says_why(cluster, load, bounded, given, error, words) -> None:
    with pytest.raises(Exception, match=error) as caught:
        rows(load(bounded, **given))
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def bounded(cluster) -> str:
    topic = cluster.topic(2, **KEPT)
    write(cluster, topic, 0, 100)
    return str(topic)


def test_a_stream_two_topics_and_a_topic_without_table_are_refused(spark, cluster, load) -> None:
    topic, other = cluster.topic(), cluster.topic(tier_enable=False)
    with pytest.raises(Exception, match="versionAsOf has no meaning for a stream"):
        (
            spark.readStream.format("pk")
            .option("pk.bootstrap.servers", cluster.address)
            .option("subscribe", topic)
            .option("versionAsOf", "0")
            .load()
            .writeStream.format("noop")
            .start()
            .awaitTermination(60)
        )
    with pytest.raises(Exception, match="a version of one table, and 2 topics are read"):
        rows(load(f"{topic},{other}", versionAsOf="0"))
    with pytest.raises(Exception, match="has no table that can be read as of a version"):
        rows(load(other, versionAsOf="0"))
    with pytest.raises(errors.InvalidOption, match="has no table"):
        read_topic(spark, other, cluster.address, version_as_of=0)
