"""The sink writes each batch once: replays, lost drivers, speculation and repeated batch writes."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from pk import AdminClient


def committed(cluster, topic: str) -> Counter:
    """Return how often a read_committed consumer sees each value."""
    return Counter(row[3] for row in cluster.consumed(topic))


def numbers(first: int, last: int) -> Counter:
    return Counter(str(n).encode() for n in range(first, last))


class Pipe:
    """A streaming query from one topic to another, 100 offsets a trigger."""

    def __init__(self, spark, cluster, folder, patiently, **options: str) -> None:
        self.spark, self.cluster, self.patiently = spark, cluster, patiently
        self.source = cluster.topic(2, tier_enable=False)
        self.target = cluster.topic(3, tier_enable=False)
        self.checkpoint = folder / "checkpoint"
        self.options = options

    def fill(self, first: int, last: int) -> None:
        self.cluster.fill_values(self.source, [str(n).encode() for n in range(first, last)])

    def run(self, **options: str) -> None:
        given = {"pk.bootstrap.servers": self.cluster.address}
        frame = (
            self.spark.readStream.format("pk")
            .options(
                subscribe=self.source, startingOffsets="earliest", maxOffsetsPerTrigger="100",
                **given,
            )
            .load()
            .select("key", "value")
        )  # fmt: skip
        writer = (
            frame.writeStream.format("pk")
            .options(topic=self.target, **given, **self.options, **options)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
        )
        query = self.patiently(writer.start, lambda query: query.awaitTermination(300))
        assert query.exception() is None

    def forget_last_commit(self) -> int:
        """Remove the newest entry of `commits`, as after a driver that died before writing it."""
        newest = max(
            int(p.name) for p in (self.checkpoint / "commits").iterdir() if p.name.isdigit()
        )
        for name in (str(newest), f".{newest}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)
        return newest


@pytest.fixture
def pipe(spark, cluster, tmp_path, patiently):
    return Pipe(spark, cluster, tmp_path, patiently)


def test_a_replayed_batch_is_not_written_again(pipe, cluster):
    pipe.fill(0, 250)
    pipe.run()
    assert committed(cluster, pipe.target) == numbers(0, 250)
    for _ in range(2):
        pipe.forget_last_commit()
        pipe.run()
        assert committed(cluster, pipe.target) == numbers(0, 250)
    pipe.fill(250, 400)
    pipe.run()
    assert committed(cluster, pipe.target) == numbers(0, 400)


def test_at_least_once_writes_a_replayed_batch_again(pipe, cluster):
    """The test above would not notice a replay that writes nothing anyway."""
    pipe.options["pk.delivery"] = "at_least_once"
    pipe.fill(0, 100)
    pipe.run()
    pipe.forget_last_commit()
    pipe.run()
    assert set(committed(cluster, pipe.target).values()) == {2}


def test_a_batch_with_other_rows_is_refused_or_accepted(pipe, cluster):
    pipe.fill(0, 100)
    pipe.run()
    newest = pipe.forget_last_commit()
    offsets = pipe.checkpoint / "offsets" / str(newest)
    (pipe.checkpoint / "offsets" / f".{newest}.crc").unlink(missing_ok=True)
    # the checkpoint of a copy whose batch ended earlier
    text = offsets.read_text()
    assert '"0": 50' in text
    offsets.write_text(text.replace('"0": 50', '"0": 40', 1))
    with pytest.raises(StreamingQueryException, match="onReplayMismatch"):
        pipe.run()
    assert committed(cluster, pipe.target) == numbers(0, 100)
    pipe.run(onReplayMismatch="accept")
    assert set(committed(cluster, pipe.target)) == set(numbers(0, 100))


def test_a_deleted_checkpoint_is_another_query(pipe, cluster):
    """Another query id is another job: as with every sink, its first batch is new."""
    pipe.fill(0, 50)
    pipe.run()
    shutil.rmtree(pipe.checkpoint)
    pipe.run()
    assert set(committed(cluster, pipe.target).values()) == {2}
    with AdminClient(cluster.address) as admin:
        jobs = [
            each.transactional_id
            for each in admin.list_transactions().transactions
            if each.transactional_id.endswith(f":{pipe.target}")
        ]
    assert len(jobs) == 2


def write(spark, cluster, topic: str, values, **options):
    frame = spark.createDataFrame([(str(v),) for v in values], "value string").repartition(2)
    given = {"pk.bootstrap.servers": cluster.address, "topic": topic, **options}
    return frame.write.format("pk").options(**given).mode("append")


def test_a_batch_write_of_the_same_version_is_written_once(spark, cluster):
    topic = cluster.topic(2, tier_enable=False)
    app = {"txnAppId": f"app-{topic}"}
    for _ in range(2):
        write(spark, cluster, topic, range(20), **app, txnVersion="1").save()
    assert committed(cluster, topic) == numbers(0, 20)
    with pytest.raises(PySparkException, match="committed with other rows"):
        write(spark, cluster, topic, range(21), **app, txnVersion="1").save()
    write(spark, cluster, topic, range(21), **app, txnVersion="1", onReplayMismatch="accept").save()
    write(spark, cluster, topic, range(20, 30), **app, txnVersion="5").save()
    with pytest.raises(PySparkException, match="ReplayDiffers"):
        write(spark, cluster, topic, range(3), **app, txnVersion="4").save()
    assert committed(cluster, topic) == numbers(0, 30)
    write(spark, cluster, topic, range(30, 40)).save()
    assert committed(cluster, topic) == numbers(0, 40)


def test_a_job_that_fails_leaves_nothing_visible(spark, cluster):
    topic = cluster.topic(2, tier_enable=False)
    frame = spark.range(0, 40, 1, 4).selectExpr(
        "CAST(IF(id = 39, raise_error('on purpose'), id) AS string) AS value"
    )
    given = {"pk.bootstrap.servers": cluster.address, "topic": topic}
    with pytest.raises(PySparkException, match="on purpose"):
        frame.write.format("pk").options(**given).mode("append").save()
    write(spark, cluster, topic, range(3)).save()  # stable at once: the failed batch was aborted
    assert committed(cluster, topic) == numbers(0, 3)


def test_empty_batches_and_topics_of_a_column(spark, cluster):
    one, two = cluster.topic(2, tier_enable=False), cluster.topic(1, tier_enable=False)
    given = {"pk.bootstrap.servers": cluster.address, "txnAppId": f"app-{one}"}

    def save(rows, version: int) -> None:
        frame = spark.createDataFrame(rows, "topic string, value string").coalesce(1)
        frame.write.format("pk").options(txnVersion=str(version), **given).mode("append").save()

    save([], 0)
    save([(one, "1"), (two, "2"), (one, "3")], 1)
    save([(one, "1"), (two, "2"), (one, "3")], 1)
    save([], 2)
    with pytest.raises(PySparkException, match="ReplayDiffers"):
        save([(one, "1")], 2)
    assert committed(cluster, one) == Counter({b"1": 1, b"3": 1})
    assert committed(cluster, two) == Counter({b"2": 1})


def test_two_writes_of_foreach_batch_have_their_own_names(spark, cluster, tmp_path, patiently):
    source = cluster.topic(1, tier_enable=False)
    targets = [cluster.topic(1, tier_enable=False) for _ in range(2)]
    cluster.fill_values(source, [str(n).encode() for n in range(30)])
    given = {"pk.bootstrap.servers": cluster.address}
    failures = iter([True])

    def both(frame, batch_id: int) -> None:
        for target in targets:
            (
                frame.select("value").write.format("pk")
                .options(topic=target, txnAppId="both", txnVersion=str(batch_id), **given)
                .mode("append").save()
            )  # fmt: skip
            if next(failures, False):
                raise RuntimeError("between the writes")

    def run() -> None:
        frame = spark.readStream.format("pk").options(
            subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="10", **given
        )
        writer = (
            frame.load().writeStream.foreachBatch(both)
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        )  # fmt: skip
        patiently(writer.start, lambda query: query.awaitTermination(300))

    with pytest.raises(StreamingQueryException, match="between the writes"):
        run()
    run()
    for target in targets:
        assert committed(cluster, target) == numbers(0, 30)
