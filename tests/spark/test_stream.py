"""Streaming reads on a real server: restarts, limits, AvailableNow, lag, data loss."""

from __future__ import annotations

import json
import os
import threading

import pytest
from pyspark.errors import StreamingQueryException

from pk import AdminClient, Consumer, Producer, TopicPartition, errors


def stream(spark, cluster, topic, **options):
    given = {"subscribe": topic, "startingOffsets": "earliest", **options}
    reader = spark.readStream.format("pk").option("kafka.bootstrap.servers", cluster.address)
    return reader.options(**given).load()


def test_available_now_ends_although_records_keep_coming(
    spark, cluster, tmp_path, run_available, seen
):
    topic = cluster.topic(2, tier_enable=False)
    cluster.fill(topic, 1000)
    stop = threading.Event()

    def produce() -> None:
        with Producer(cluster.address) as producer:
            while not stop.wait(0.05):
                producer.send(topic, value=b"later").result(30)

    writer = threading.Thread(target=produce)
    writer.start()
    try:
        frame = stream(spark, cluster, topic, maxOffsetsPerTrigger="400")
        query = run_available(frame, tmp_path / "checkpoint", tmp_path / "out")
    finally:
        stop.set()
        writer.join()
    assert query.exception() is None
    batches = [p.numInputRows for p in query.recentProgress if p.numInputRows]
    assert len(batches) >= 3
    assert max(batches) <= 400
    lag = json.loads(query.recentProgress[0].sources[0].latestOffset)
    assert sum(lag["topics"][topic]["offsets"].values()) >= 1000, "lag is reported"

    # the next run takes the rest up where this one ended: every record once
    query = run_available(stream(spark, cluster, topic), tmp_path / "checkpoint", tmp_path / "out")
    ends = cluster.admin.offsets(topic)
    expected = sorted((place.partition, o) for place, end in ends.items() for o in range(end))
    assert seen(tmp_path / "out") == expected


def test_a_trigger_over_many_small_partitions_has_few_tasks(spark, cluster, tmp_path):
    topic = cluster.topic(24, tier_enable=False)
    cluster.fill_values(topic, [b"%d" % number for number in range(240)])
    tasks: list[int] = []
    values: list[int] = []

    def take(rows, _batch) -> None:
        tasks.append(rows.rdd.getNumPartitions())
        values.extend(int(row.value) for row in rows.select("value").collect())

    for pack in ("true", "false"):
        frame = stream(spark, cluster, topic, packPartitions=pack)
        writer = frame.writeStream.foreachBatch(take).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / pack)).start().awaitTermination()
    assert sorted(values) == sorted([*range(240)] * 2)
    assert tasks[0] <= (os.cpu_count() or 1)
    assert tasks[-1] == 24


@pytest.mark.parametrize("ways", [("true", "false"), ("false", "true")], ids=["jvm", "python"])
def test_a_batch_that_was_not_committed_is_read_again_alike(
    spark, cluster, tmp_path, run_available, seen, ways
):
    """A crash between the offset log and the commit: the same range is read again, without a gap
    and with the same end, though once in the JVM and once through Python.
    """
    first, second = ways
    topic = cluster.topic(2, tier_enable=False)
    cluster.fill(topic, 300)
    frame = stream(spark, cluster, topic, columnar=first)
    run_available(frame, tmp_path / "checkpoint", tmp_path / "first")
    before = (tmp_path / "checkpoint" / "offsets" / "0").read_text()
    for name in (tmp_path / "checkpoint" / "commits").iterdir():
        name.unlink()
    cluster.fill(topic, 100)
    frame = stream(spark, cluster, topic, columnar=second)
    query = run_available(frame, tmp_path / "checkpoint", tmp_path / "second")
    assert (tmp_path / "checkpoint" / "offsets" / "0").read_text() == before
    assert [p.numInputRows for p in query.recentProgress if p.numInputRows] == [300, 100]
    ends = cluster.admin.offsets(topic)
    assert seen(tmp_path / "second") == sorted(
        (place.partition, o) for place, end in ends.items() for o in range(end)
    )


def test_an_idle_query_makes_no_batches_and_wakes_up(spark, cluster, tmp_path, patiently):
    topic = cluster.topic(11, tier_enable=False)
    cluster.fill(topic, 20)
    writer = stream(spark, cluster, topic).writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(tmp_path))
    query = patiently(writer.start, lambda started: started.processAllAvailable())
    try:
        commits = tmp_path / "commits"
        numbers = sorted(int(p.name) for p in commits.iterdir() if p.name.isdigit())
        assert numbers == [0]
        cluster.fill(topic, 5)
        query.processAllAvailable()
        numbers = sorted(int(p.name) for p in commits.iterdir() if p.name.isdigit())
        assert numbers[-1] >= 1
        read = sum(p.numInputRows for p in query.recentProgress)
        assert read == 25
        assert len([p for p in query.recentProgress if p.numInputRows]) == len(numbers)
    finally:
        query.stop()


def test_records_that_aged_out_fail_the_query_unless_told_otherwise(
    spark, cluster, tmp_path, run_available, seen
):
    topic = cluster.topic(1, tier_enable=False)
    cluster.fill(topic, 50)
    run_available(stream(spark, cluster, topic), tmp_path / "checkpoint", tmp_path / "out")
    cluster.fill(topic, 50)
    cluster.admin.delete_records({TopicPartition(topic, 0): 70})
    with pytest.raises(StreamingQueryException, match=r"\[50, 70\) of .* were deleted or aged out"):
        run_available(stream(spark, cluster, topic), tmp_path / "checkpoint", tmp_path / "out")
    forgiving = stream(spark, cluster, topic, failOnDataLoss="false")
    run_available(forgiving, tmp_path / "checkpoint", tmp_path / "out")
    assert seen(tmp_path / "out") == [(0, o) for o in (*range(50), *range(70, 100))]


def test_a_recreated_topic_is_named(spark, cluster, tmp_path, run_available):
    # rule L8
    topic = cluster.topic(1, tier_enable=False)
    cluster.fill(topic, 50)
    run_available(stream(spark, cluster, topic), tmp_path / "checkpoint", tmp_path / "out")
    cluster.admin.delete_topic(topic)
    cluster.wait("deleted", lambda: topic not in {t.name for t in cluster.admin.list_topics()})
    cluster.admin.create_topic(topic, 1, {"tier_enable": False, "retention_ms": -1})
    cluster.fill(topic, 60)
    with pytest.raises(StreamingQueryException, match="topic re-created"):
        run_available(stream(spark, cluster, topic), tmp_path / "checkpoint", tmp_path / "out")


def test_a_query_shows_its_progress_as_a_group(spark, cluster, tmp_path, patiently):
    """Rule S1: `pk groups` sees what was processed; a group of consumers is left alone, and no
    refusal ends the query.
    """
    topic = cluster.topic(2, tier_enable=False)
    cluster.fill(topic, 20)
    group, admin = f"{topic}-query", AdminClient(cluster.address)

    def started(name: str, group: str):
        frame = stream(spark, cluster, topic, groupId=group, holdRetention="true")
        writer = frame.writeStream.format("noop").trigger(processingTime="100 milliseconds")
        writer = writer.option("checkpointLocation", str(tmp_path / name))
        return patiently(writer.start, lambda query: query.processAllAvailable())

    def processed() -> int:
        return sum(admin.group_offsets(group).values())

    query = started("one", group)
    try:
        cluster.wait("the progress is published", lambda: processed() == 20)
        cluster.fill(topic, 5)
        query.processAllAvailable()
        cluster.wait("the progress goes on", lambda: processed() == 25)
        assert admin.describe_group(group).kind == "query"
        assert admin.describe_group(group).holds_retention
        with Consumer(cluster.address, group_id=group) as consumer:
            consumer.subscribe([topic])
            with pytest.raises(errors.InconsistentGroupProtocol, match="streaming query"):
                consumer.poll(30)
    finally:
        query.stop()
    taken = f"{topic}-consumers"
    with Consumer(cluster.address, group_id=taken) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.commit({TopicPartition(topic, 0): 1})
    query = started("two", taken)
    try:
        assert sum(p.numInputRows for p in query.recentProgress) == 25
        assert query.exception() is None
        assert admin.group_offsets(taken) == {TopicPartition(topic, 0): 1}
    finally:
        query.stop()
        admin.close()
