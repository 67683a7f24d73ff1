"""Spark after a restore from the tier (rule T13): reads, streams and sinks of real processes.

The lost cluster had acknowledged more than its tables had.  Its tier process was stopped before the
last records of topic t, and before batch 1 of the query to topic late.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from metadata_copy import copied
from pyspark.errors import PySparkException, StreamingQueryException
from real_cluster import until, values

from pk import AdminClient, Producer, errors, generations
from pk.cli.embedded import EmbeddedServer
from pk.sparkconnector import commit_together, read_topic
from pk.sparkconnector.planner import PkWarning
from tests.integration.test_restore import COPIES, restored

FIRST = generations.OFFSETS
STORED, LOST, NEW = 200, 10, 10  #: records of topic t, in turn to its two partitions
END = STORED // 2  #: of both partitions of t in the table
SINKS = ("again", "late", "job", "lake")
GAP = r"t-0 \[{}, {}\) is gone: the cluster was restored from its tier"


class World:
    """The cluster that runs, and what Spark does with it."""

    def __init__(self, spark: Any, folder: Path, patiently: Any) -> None:
        self.spark, self.folder, self.patiently = spark, folder, patiently
        self.address = ""

    def fill(self, first: int, last: int) -> None:
        with Producer(self.address) as producer:
            for n in range(first, last):
                producer.send("t", value=b"%d" % n, partition=n % 2)
            producer.flush(60)

    def load(self, **options: str) -> Any:
        given = {"pk.bootstrap.servers": self.address, "subscribe": "t", **options}
        return self.spark.read.format("pk").options(**given).load()

    def run(self, sink: str, *, columnar: str, on_loss: str = "fail", **options: str) -> Any:
        """Run the query from t to a sink until everything is written; return it."""
        given = {"pk.bootstrap.servers": self.address}
        reader = self.spark.readStream.format("pk").options(**given, columnar=columnar)
        frame = reader.options(subscribe="t", startingOffsets="earliest", **options).load()
        writer = frame.select("value").writeStream.format("pk").options(**given, topic=sink)
        writer.options(onLostHistory=on_loss, checkpointLocation=str(self.folder / sink))
        writer.trigger(availableNow=True)
        return self.patiently(writer.start, lambda query: query.awaitTermination(300))

    def forget(self, sink: str, kind: str, batch: int) -> None:
        """Remove a batch from the checkpoint of a query, as after a driver that died."""
        for name in (str(batch), f".{batch}.crc"):
            (self.folder / sink / kind / name).unlink(missing_ok=True)

    def write(self, first: int, last: int, **options: str) -> None:
        frame = self.numbers(first, last)
        given = {"pk.bootstrap.servers": self.address, "topic": "job", **options}
        frame.write.format("pk").options(**given).mode("append").save()

    def together(self, batch: int, first: int, last: int, **options: str) -> bool:
        given = {"pk.bootstrap.servers": self.address, **options}
        rows = self.numbers(first, last)
        return commit_together(rows, batch, "lake-job", self.lake, "lake", options=given)

    def numbers(self, first: int, last: int) -> Any:
        return self.spark.range(first, last, 1, 1).selectExpr("cast(id as string) as value")

    @property
    def lake(self) -> str:
        return (self.folder / "table").as_uri()

    def counts(self, topic: str) -> Counter[bytes | None]:
        return Counter(value for _, _, value in self.rows(topic))

    def rows(self, topic: str) -> list[Any]:
        given = {"pk.bootstrap.servers": self.address, "failOnDataLoss": "false"}
        frame = self.spark.read.format("pk").options(**given, subscribe=topic).load()
        found = frame.select("partition", "offset", "value").collect()
        return [(row.partition, row.offset, bytes(row.value)) for row in found]


def once(first: int, last: int) -> Counter[bytes]:
    return Counter(b"%d" % n for n in range(first, last))


def is_stored(address: str, topics: tuple[str, ...]) -> bool:
    """Return whether the tables have everything that is stable."""
    with AdminClient(address) as admin:
        for topic in topics:
            ends = {each.partition: each.end for each in admin.describe_tier(topic).partitions}
            for each in admin.describe_topics([topic]):
                if ends.get(each.partition) != each.last_stable_offset:
                    return False
    return True


def lose(old: EmbeddedServer, stopped: int) -> None:
    """Kill a node whose tier process is stopped."""
    living = old.pids()
    os.kill(living["supervisor"], signal.SIGKILL)
    os.kill(stopped, signal.SIGKILL)
    old.wait()
    old.wait_gone(living)


@pytest.fixture(scope="module")
def world(spark: Any, tmp_path_factory: Any) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("restored")
    tier = folder / "tier"
    tier.mkdir()
    made = {**COPIES, "tier_url": tier.as_uri(), "tier_offsets_interval_ms": 0}
    old = EmbeddedServer(folder / "old", settings={**made, "cluster_id": "lost"})
    new = EmbeddedServer(folder / "new", settings={**made, "cluster_id": "restored"})
    found = World(spark, folder, again_if_busy)
    with old:
        found.address = old.address
        with AdminClient(old.address) as admin:
            admin.create_topic("t", 2, {"retention_ms": "-1"})
            for topic in SINKS:
                admin.create_topic(topic, 1)
        until(lambda: {"t", *SINKS} <= set(copied(tier, "lost").topic_ids), "metadata are copied")
        found.fill(0, STORED // 2)
        found.run("again", columnar="false")
        found.forget("again", "commits", 0)
        found.run("late", columnar="true")
        found.write(0, 10, txnAppId="app", txnVersion="0")
        found.write(0, 10, txnAppId="later", txnVersion="7")
        found.numbers(0, 0).write.format("delta").save(found.lake)
        found.together(0, 0, 10)
        found.fill(STORED // 2, STORED)
        until(lambda: is_stored(old.address, ("t", *SINKS)), "the tables have everything")
        stopped = old.pids()["tier"]
        os.kill(stopped, signal.SIGSTOP)
        found.fill(STORED, STORED + LOST)
        found.run("late", columnar="true")
        assert Counter(values(old.address, "late")) == once(0, STORED + LOST)
        lose(old, stopped)
    new.write_config()
    restored(new)
    with new:
        found.address = new.address
        found.fill(STORED + LOST, STORED + LOST + NEW)
        yield found


def again_if_busy(start: Any, wait: Any) -> Any:
    """Start a query again if the machine was too busy for Spark's Python worker (conftest)."""
    for _ in range(5):
        query = start()
        try:
            wait(query)
        except StreamingQueryException as cause:
            if "connect back" in str(cause):
                continue
            raise
        return query
    raise AssertionError("the machine is too busy for Spark's Python workers")


def positions(offset: int) -> str:
    return json.dumps({"t": {"0": offset, "1": offset}})


def test_a_batch_read_learns_of_the_gap(world: World) -> None:
    """startingOffsets and endingOffsets may stand in the gap, as a checkpoint may."""
    cases = [
        ("true", END + 10, 500, GAP.format(END + 10, 500), 0),
        ("false", END + 2, FIRST + 3, GAP.format(END + 2, FIRST), 6),
        ("true", END - 3, FIRST - 1, GAP.format(END, FIRST - 1), 6),
        ("false", -2, -1, GAP.format(END, FIRST), STORED + NEW),
    ]
    for columnar, start, end, words, left in cases:
        given = {"startingOffsets": positions(start), "endingOffsets": positions(end)}
        with pytest.raises(Exception, match=words) as caught:
            world.load(**given, columnar=columnar).count()
        assert "DataLoss" in str(caught.value)
        rows = world.load(**given, columnar=columnar, failOnDataLoss="false").collect()
        assert len(rows) == left, (start, end)
    assert world.load(endingOffsets=positions(END)).count() == STORED
    assert world.load(startingOffsets=positions(FIRST)).count() == NEW


def test_a_native_read_of_the_table_learns_of_the_gap(world: World) -> None:
    """Spark's own reader of Delta tables sees files and no gap: `read_topic` reports it."""
    spark, address = world.spark, world.address
    with AdminClient(address) as admin:
        until(lambda: is_stored(address, ("t",)), "the restored cluster goes on with the table")
        newest = DeltaTable(admin.describe_tier("t").uri).version()
    with pytest.raises(errors.DataLoss, match=GAP.format(END, FIRST)):
        read_topic(spark, "t", address)
    with pytest.warns(PkWarning, match=GAP.format(END, FIRST)):
        frame = read_topic(spark, "t", address, failOnDataLoss="false")
    assert frame.count() == STORED + NEW
    with pytest.raises(errors.DataLoss, match=GAP.format(END, FIRST)):
        read_topic(spark, "t", address, version_as_of=newest)


def test_a_limit_does_not_count_the_gap(world: World) -> None:
    """Batches of 150, 50 and 10 rows, and not the gap's offsets in steps of 150."""
    given = {"pk.bootstrap.servers": world.address, "subscribe": "t", "failOnDataLoss": "false"}
    reader = world.spark.readStream.format("pk").options(**given, startingOffsets="earliest")
    writer = reader.option("maxOffsetsPerTrigger", "150").load().writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(world.folder / "limited"))
    ended: list[bool] = []
    query = world.patiently(
        writer.trigger(availableNow=True).start,
        lambda query: ended.append(query.awaitTermination(100)),
    )
    query.stop()
    assert ended[-1], f"it goes on after {query.lastProgress}"
    sizes = [each.numInputRows for each in query.recentProgress if each.numInputRows]
    assert sizes == [150, 50, 10]


def test_a_query_whose_batches_are_lost_is_refused_and_can_write_them_again(world: World) -> None:
    """Batch 1 was committed and not in the table: its rows are lost, and the checkpoint has it."""
    with pytest.raises(StreamingQueryException, match="restored from its tier"):
        world.run("late", columnar="true")
    with pytest.raises(StreamingQueryException, match="onLostHistory=write") as caught:
        world.run("late", columnar="true", failOnDataLoss="false")
    assert "ReplayDiffers" in str(caught.value)
    assert world.counts("late") == once(0, STORED // 2)
    # the repair of docs/REPAIR.md: the query begins again with the first batch that is lost
    world.forget("late", "commits", 1)
    world.forget("late", "offsets", 2)
    query = world.run("late", columnar="true", on_loss="write", failOnDataLoss="false")
    assert "ColumnarToRow" in query._jsq.explainInternal(False), "the JVM read the rows"
    there = once(0, STORED) + once(STORED + LOST, STORED + LOST + NEW)
    assert world.counts("late") == there
    world.run("late", columnar="true")
    assert world.counts("late") == there, "the memory of batches goes on without the option"


def test_batch_0_of_a_query_is_not_recognised(world: World) -> None:
    """The limit that docs/SEMANTICS.md states: nothing tells this query from a new one.

    Another query on a copy of its checkpoint is repaired as docs/REPAIR.md says.
    """
    assert world.counts("again") == once(0, STORED // 2)
    shutil.copytree(world.folder / "again", world.folder / "fixed")
    with AdminClient(world.address) as admin:
        admin.create_topic("fixed", 1)
    commit = world.folder / "fixed" / "commits" / "0"
    commit.write_text('v1\n{"nextBatchWatermarkMs":0}')
    world.run("fixed", columnar="false", on_loss="write", failOnDataLoss="false")
    later = once(STORED // 2, STORED) + once(STORED + LOST, STORED + LOST + NEW)
    assert world.counts("fixed") == later, "batch 0 is not written"
    world.run("again", columnar="false", failOnDataLoss="false")
    twice = world.counts("again")
    assert {twice[b"%d" % n] for n in range(STORED // 2)} == {2}
    assert {twice[b"%d" % n] for n in range(STORED // 2, STORED)} == {1}


def test_batch_writes_are_recognised_by_a_version_above_0(world: World) -> None:
    before = world.counts("job")
    with pytest.raises(PySparkException, match=r"ReplayDiffers.*onLostHistory=write"):
        world.write(0, 10, txnAppId="later", txnVersion="7")
    assert world.counts("job") == before
    world.write(0, 10, txnAppId="later", txnVersion="7", onLostHistory="write")
    world.write(0, 10, txnAppId="app", txnVersion="0")
    world.write(0, 10)
    assert world.counts("job") == Counter({b"%d" % n: 5 for n in range(10)})


def test_the_table_of_a_joint_commit_remembers_its_batches(world: World) -> None:
    """commit_together: the table decides, and the restore does not touch it."""
    for _ in range(2):
        with pytest.raises(errors.ReplayDiffers, match="the table has batch 0"):
            world.together(0, 0, 10)
        assert world.counts("lake") == once(0, 10)
    assert not world.together(1, 10, 20)
    assert world.together(1, 10, 20)
    assert world.counts("lake") == once(0, 20)
    table = world.spark.read.format("delta").load(world.lake).collect()
    assert Counter(row.value.encode() for row in table) == once(0, 20)
