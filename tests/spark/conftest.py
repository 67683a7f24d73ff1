"""One Spark session and one server for all Spark tests: both are slow to start."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items) -> None:
    """Set a time limit for every test here: a JVM on a busy machine may hang."""
    for item in items:
        if "tests/spark" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(600))


class Cluster:
    """The server, and helpers for its topics."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.address = server.address
        self.admin = AdminClient(server.address)

    def topic(self, partitions: int = 1, **configs: Any) -> str:
        """Create a new topic with a name of its own; its records are of 2013 and do not expire.

        Its small files are not merged: tests look at single files.
        """
        name = f"topic-{next(_numbers)}"
        defaults = {"retention_ms": -1, "tier_small_file_bytes": 0}
        self.admin.create_topic(name, partitions, {**defaults, **configs})
        return name

    def fill(self, topic: str, count: int, **options: Any) -> None:
        """Produce records `key = k<n % 7>`, `value = <n>`, every third one with a header."""
        with Producer(self.address, **options) as producer:
            sent = [
                producer.send(
                    topic,
                    value=str(n).encode(),
                    key=b"k%d" % (n % 7),
                    headers=[("n", str(n).encode()), ("n", None)] if n % 3 == 0 else None,
                    timestamp_ms=1_356_998_400_000 + n,
                )
                for n in range(count)
            ]
            producer.flush(60)
        for future in sent:
            future.result(0)

    def fill_one(self, topic: str, value: bytes) -> None:
        """Produce a record that is a batch of its own."""
        with Producer(self.address) as producer:
            producer.send(topic, value=value, partition=0).result(60)

    def fill_values(self, topic: str, values: list[bytes]) -> None:
        """Produce values, in turn to each partition."""
        places = len(self.admin.offsets(topic))
        with Producer(self.address) as producer:
            for number, value in enumerate(values):
                producer.send(topic, value=value, partition=number % places)
            producer.flush(60)

    def consumed(self, topic: str, *, transaction_open: bool = False) -> list[tuple[Any, ...]]:
        """Return all that a plain consumer sees: (partition, offset, key, value, timestamp,
        headers).

        transaction_open: a transaction that stays open ends the read; otherwise the read waits for
        the markers that are still on their way.
        """
        found = []
        ends = {}
        for each in self.admin.describe_topics([topic]):
            end = each.last_stable_offset if transaction_open else each.log_end
            ends[TopicPartition(topic, each.partition)] = end
        with Consumer(self.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(topic, place.partition) for place in ends])
            deadline = monotonic_s() + 60
            while any(consumer.position(place) < end for place, end in ends.items()):
                assert monotonic_s() < deadline, "the consumer stands still"
                for place, rows in consumer.poll_batches(0.2):
                    for row in rows.to_pylist():
                        headers = [(h["key"], h["value"]) for h in row["headers"]]
                        found.append(
                            (place.partition, row["offset"], row["key"], row["value"],
                             row["timestamp"], headers)
                        )  # fmt: skip
        return sorted(found, key=lambda row: row[:2])

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = 90) -> None:
        deadline = monotonic_s() + timeout_s
        while not holds():
            assert monotonic_s() < deadline, (
                f"{what}: not within {timeout_s} s\n{self.server.tail()}"
            )
            block_s(0.1)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("pk")
    tier = directory / "tier"
    tier.mkdir()
    with EmbeddedServer(directory, tier_url=tier.as_uri()) as server:
        yield Cluster(server)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from pk.sparkconnector import columnar_jar, session

    if columnar_jar.find_javac() is not None:  # CI has one (PK_JAVAC)
        columnar_jar.build()  # the tests of the columnar reader need it; the others ignore it
    found = session(
        app_name="pk tests",
        master="local[2]",
        spark_sql_shuffle_partitions=2,
        **{"spark.driver.memory": "1g", "spark.ui.showConsoleProgress": "false"},
    )
    found.sparkContext.setLogLevel("ERROR")
    yield found
    found.stop()


def compile_peers(folder: Path) -> str:
    """Compile the Java programs of the tests beside the jar, and return the class path of both."""
    from pk.sparkconnector import columnar_jar
    from pk.sparkconnector.jars import spark_jars_folder

    javac = columnar_jar.find_javac()
    assert javac is not None
    path = f"{columnar_jar.build()}:{spark_jars_folder()}/*"
    sources = sorted(map(str, (Path(__file__).parent / "java").rglob("*.java")))
    quick = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")
    subprocess.run([javac, *quick, "-cp", path, "-d", str(folder), *sources], check=True)
    return f"{folder}:{path}"


@pytest.fixture(scope="session")
def java_peers(tmp_path_factory) -> str:
    return compile_peers(tmp_path_factory.mktemp("peers"))


@pytest.fixture
def patiently() -> Callable[..., Any]:
    """`patiently(start, wait)`: `wait(start())`, again if Spark gave up on a worker of its own.

    Every start of a streaming query starts a Python of its own, for which Spark 4.2 waits 10 s and
    has no setting; `pk.sparkconnector.session` brings that down to half a second of work.  A
    machine too busy even for that is no failure of ours.
    """
    from pyspark.errors import StreamingQueryException

    def started(start: Callable[[], Any], wait: Callable[[Any], object]) -> Any:
        for _ in range(5):
            query = start()
            try:
                wait(query)
            except StreamingQueryException as cause:
                if "connect back" not in str(cause):
                    raise
                continue
            return query
        raise AssertionError("the machine is too busy for Spark's Python workers")

    return started


@pytest.fixture
def run_available(patiently):
    """`run_available(frame, checkpoint, into)`: run a query until everything present now has been
    read; return it.
    """
    return partial(_run_available, patiently)


def _run_available(patiently, frame, checkpoint, into):
    writer = (
        frame.selectExpr("partition", "offset", "CAST(value AS STRING) AS value")
        .writeStream.format("parquet")
        .option("path", str(into))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    return patiently(writer.start, lambda query: query.awaitTermination(400))


@pytest.fixture
def seen(spark) -> Callable[[Any], list[tuple[int, int]]]:
    """`seen(into)`: partition and offset of every row that a query wrote there, sorted."""

    def found(into: Any) -> list[tuple[int, int]]:
        rows = spark.read.parquet(str(into)).select("partition", "offset").collect()
        return sorted(tuple(row) for row in rows)

    return found


@pytest.fixture
def load(spark, cluster) -> Callable[..., Any]:
    """`load(topic, **options)`: a batch read."""

    def loaded(topic: str, **options: Any) -> Any:
        given = {"subscribe": topic, **options}
        return (
            spark.read.format("pk")
            .option("pk.bootstrap.servers", cluster.address)
            .options(**given)
            .load()
        )

    return loaded
