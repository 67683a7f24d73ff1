"""The columnar reader on a cluster of three nodes that fail while Spark reads.

A Python function behind the scan stops the read in its middle: it takes the first rows, waits for
the fault, and then takes the rest.  What the broker may send without a grant (16 MiB) is less than
what is left, so the JVM needs the broker after the fault.  Every read must return each committed
record once (rules S5 and S6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from java_compiler import needs_javac
from real_cluster import until

from pk import AdminClient, Producer, TopicPartition
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic
from tests.spark.test_columnar import leaf_of

pytestmark = needs_javac

SETTINGS = {
    "broker_session_timeout_ms": 3000, "replica_lag_time_max_ms": 3000,
    "log_cleaner_backoff_ms": 50,
}  # fmt: skip
CONFIGS = {"tier_enable": False, "min_insync_replicas": 1, "retention_ms": -1}
PLACE = TopicPartition("big", 0)
#: transactions of one batch each; every third one is aborted
TRANSACTIONS, ROWS, PAD = 48, 1000, bytes(1000)
COMMITTED = [
    ROWS * turn + row for turn in range(TRANSACTIONS) if turn % 3 != 1 for row in range(ROWS)
]


@pytest.fixture(scope="module")
def three(tmp_path_factory: Any) -> Iterator[EmbeddedCluster]:
    """Three nodes, all with a replica of the topic `big`."""
    with EmbeddedCluster(tmp_path_factory.mktemp("three"), settings=SETTINGS) as made:
        with AdminClient(made.address) as admin:
            (topic,) = admin.create_topics([NewTopic(PLACE.topic, 1, CONFIGS, 3)], timeout_s=60)
            assert topic.error is None, topic.error
        with Producer(made.address, transactional_id="big", batch_size=4 << 20) as producer:
            producer.init_transactions()
            for turn in range(TRANSACTIONS):
                producer.begin_transaction()
                for row in range(ROWS):
                    value = b"%08d" % (ROWS * turn + row) + PAD
                    producer.send(PLACE.topic, value, partition=0)
                if turn % 3 == 1:
                    producer.flush(60)
                    producer.abort_transaction()
                else:
                    producer.commit_transaction()
        yield made


def described(bootstrap: str) -> Any:
    with AdminClient(bootstrap) as admin:
        (one,) = admin.describe_topics([PLACE.topic], timeout_s=60)
        return one


def all_in_sync(three: EmbeddedCluster) -> int:
    """Wait until every replica is in sync; return the leader."""
    until(lambda: len(described(three.address).isr) == 3, "three replicas are in sync")
    return int(described(three.address).leader)


def frame(spark: Any, three: EmbeddedCluster, topic: str = PLACE.topic) -> Any:
    given = {"pk.bootstrap.servers": three.address, "subscribe": topic, "columnar": "true"}
    return spark.read.format("pk").options(**given).load()


@pytest.fixture
def read_around(spark: Any, three: EmbeddedCluster, tmp_path: Path) -> Callable[..., Any]:
    """`read_around(fault)`: the values' numbers in the order of the read, and the counts of
    `rows_of`; `fault()` is called in the middle of the read."""
    reached, go = tmp_path / "reached", tmp_path / "go"

    def held(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        import pyarrow as pa

        rows = 0
        for batch in batches:
            rows += batch.num_rows
            if rows > 3 * ROWS and not go.exists():
                reached.touch()
                for _ in range(3000):
                    if go.exists():
                        break
                    time.sleep(0.02)
            numbers = [int(value[:8]) for value in batch.column(0).to_pylist()]
            yield pa.record_batch({"number": pa.array(numbers, pa.int64())})

    def read(fault: Callable[[], object]) -> tuple[list[int], tuple[int, ...]]:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", ROWS)
        query = frame(spark, three).select("value").mapInArrow(held, "number long")
        leaf = leaf_of(query)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(query.collect()))
        thread.start()
        try:
            until(lambda: reached.exists() or not thread.is_alive(), "the read is in its middle")
            assert thread.is_alive(), "the read ended before the fault"
            fault()
        finally:
            go.touch()
            thread.join(120)
            spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        assert not thread.is_alive(), "the read hangs"
        return [row.number for row in found], tuple(
            leaf.metrics().apply(name).value()
            for name in ("pkRowsInColumns", "pkRowsThroughPython", "pkRangesHandedToPython")
        )

    return read


def check(found: tuple[list[int], tuple[int, ...]]) -> None:
    """Both paths read a part, with one hand-over, and together each record once."""
    numbers, (columns, python, handed) = found
    assert numbers == COMMITTED
    assert columns + python == len(COMMITTED)
    assert columns > 3 * ROWS
    assert python > ROWS
    assert handed == 1


def test_a_read_outlives_a_move_of_the_leader(three: EmbeddedCluster, read_around: Any) -> None:
    """The old leader refuses to send on; Python finds the new one."""
    leader = all_in_sync(three)
    others = [node for node in three.nodes if node != leader]

    def move() -> None:
        with AdminClient(three.address) as admin:
            wanted = {PLACE: [*others, leader]}
            assert admin.alter_partition_reassignments(wanted, timeout_s=60)[PLACE] is None
            until(lambda: not admin.list_partition_reassignments([PLACE.topic]), "reassigned")
            admin.elect_leaders([PLACE], timeout_s=60)
            until(lambda: described(three.address).leader == others[0], "another leader")

    check(read_around(move))


def test_a_read_outlives_a_frozen_leader(three: EmbeddedCluster, read_around: Any) -> None:
    """The JVM waits 3 s for it; Python then reads from the leader that the controller elected."""
    leader = all_in_sync(three)
    pids = [three.nodes[leader].pids()["broker"]]
    try:
        check(read_around(lambda: three.freeze(leader, pids)))
    finally:
        three.thaw(leader, pids)


def sockets_to(pid: int, port: int) -> int:
    """Return how many sockets of a process are connected to a port."""
    own = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(str(each.readlink()))
        except OSError:
            continue  # closed meanwhile
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(
        int(line[2].rpartition(":")[2], 16) == port and f"socket:[{line[9]}]" in own
        for line in lines
    )


def test_a_task_that_is_cancelled_closes_its_socket(spark: Any, three: EmbeddedCluster) -> None:
    """While it waits for a frozen broker; no hand-over starts, and the JVM reads on afterwards."""
    leader = all_in_sync(three)
    pids = [three.nodes[leader].pids()["broker"]]
    port = int(three.nodes[leader].listen.rpartition(":")[2])
    jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())
    query = frame(spark, three).select("offset")
    leaf = leaf_of(query)  # planned while the broker answers
    ended: list[BaseException] = []

    def run() -> None:
        spark.sparkContext.setJobGroup("frozen", "a read from a frozen broker")
        try:
            query.collect()
        except Exception as error:
            ended.append(error)

    three.freeze(leader, pids)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: sockets_to(jvm, port) == 1, "the task is connected")
        spark.sparkContext.cancelJobGroup("frozen")
        until(lambda: sockets_to(jvm, port) == 0, "the task closed its socket")
        thread.join(60)
        assert "cancelled" in str(ended[0]).lower()
        assert leaf.metrics().apply("pkRangesHandedToPython").value() == 0
    finally:
        three.thaw(leader, pids)
    all_in_sync(three)
    assert frame(spark, three).count() == len(COMMITTED)


def test_a_compacted_log_is_read_in_columns(spark: Any, three: EmbeddedCluster) -> None:
    """Its batches have holes, and so have its offsets."""
    given = {"cleanup_policy": "compact", "segment_bytes": 65536, "tier_enable": False}
    given["min_cleanable_dirty_ratio"] = 0.1
    with AdminClient(three.address) as admin:
        (made,) = admin.create_topics([NewTopic("state", 1, given, 1)], timeout_s=60)
        assert made.error is None, made.error
    latest: dict[bytes, bytes] = {}
    with Producer(three.address) as producer:
        for number in range(2000):
            key = b"k%d" % (number * 7919 % 40)
            latest[key] = b"%06d" % number + bytes(500)
            producer.send("state", latest[key], key=key, partition=0)
        producer.flush(60)

    def cleaned() -> Any:
        query = frame(spark, three, "state").select("offset", "key", "value")
        leaf = leaf_of(query)
        rows = query.collect()
        return (rows, leaf) if len(rows) < 1500 else None

    rows, leaf = until(cleaned, "the log is cleaned")
    offsets = [row.offset for row in rows]
    assert offsets == sorted(set(offsets))
    assert {bytes(row.key): bytes(row.value) for row in rows} == latest
    assert leaf.metrics().apply("pkRowsInColumns").value() == len(rows)


def test_a_read_outlives_the_end_of_its_leader(three: EmbeddedCluster, read_around: Any) -> None:
    """`kill -9`; the last test here, because the node stays away."""
    leader = all_in_sync(three)
    check(read_around(lambda: three.kill(leader)))
