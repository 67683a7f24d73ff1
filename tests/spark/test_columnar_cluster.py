"""The columnar reader where executors are processes of their own, and clients have no JVM.

A standalone cluster of two workers on loopback.  One driver (cluster_driver.py) has two sessions,
one after the other: in the first its executors lack the jar.  The second one also serves Spark
Connect.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from java_compiler import needs_javac
from real_cluster import until
from spark_cluster import standalone

from pk import Producer
from pk.cli.embedded import ReservedPorts
from pk.sparkconnector import columnar_jar
from tests.spark.test_columnar_faults import sockets_to

pytestmark = needs_javac
HERE = Path(__file__).parent
#: partition → records; what partition 0 has is more than the buffers between broker and task hold
RECORDS = {0: (3000, 8000), 1: (1000, 10), 2: (1000, 10), 3: (1000, 10)}
PLACES = sorted((place, offset) for place, (count, _) in RECORDS.items() for offset in range(count))
WARNING = "pk reads through Python: pk-columnar.jar is not in spark.jars"

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def options(cluster: Any) -> dict[str, str]:
    """The options of a read of the topic."""
    topic = cluster.topic(len(RECORDS), tier_enable=False)
    with Producer(cluster.address) as producer:
        for place, (count, size) in RECORDS.items():
            for _ in range(count):
                producer.send(topic, value=os.urandom(8) + bytes(size), partition=place)
        producer.flush(60)
    start = {"startingOffsets": "earliest"}
    return {"pk.bootstrap.servers": cluster.address, "subscribe": topic, **start}


@pytest.fixture(scope="module")
def connect_port() -> Iterator[int]:
    ports = ReservedPorts()
    yield ports.draw()
    del ports  # reserved until here


@pytest.fixture(scope="module")
def log(tmp_path_factory: Any) -> Path:
    """What the driver and its JVM wrote to stderr."""
    return tmp_path_factory.mktemp("driver") / "driver.log"


@pytest.fixture(scope="module")
def ask(
    tmp_path_factory: Any, options: dict[str, str], connect_port: int, log: Path
) -> Iterator[Ask]:
    """`ask(command, shipped=…)`: the driver's answer, from a session with or without the jar."""
    columnar_jar.build()
    with standalone(tmp_path_factory.mktemp("standalone")) as master, log.open("wb") as errors:
        given = {"master": master, "options": options, "connect": connect_port}
        process = subprocess.Popen(
            [sys.executable, str(HERE / "cluster_driver.py"), json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        )  # fmt: skip
        running: list[bool] = []

        def send(**command: Any) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("reply "):
                    found: dict[str, Any] = json.loads(line[6:])
                    return found
            raise AssertionError(log.read_text(errors="replace")[-4000:])

        def asked(command: str, *, shipped: bool) -> dict[str, Any]:
            if running != [shipped]:
                send(do="start", shipped=shipped)
                running[:] = [shipped]
            return send(do=command) if command else {}

        try:
            yield asked
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


def executors_of(found: dict[str, Any]) -> set[int]:
    """Check that each offset was read once; return the executors' processes."""
    assert sorted((place, offset) for _, place, offset in found["rows"]) == PLACES
    return {executor for executor, _, _ in found["rows"]}


def test_executors_without_the_jar_read_through_python(ask: Ask, log: Path) -> None:
    """The driver has the jar and executors would lack it; it warns once."""
    for _ in range(2):
        found = ask("read", shipped=False)
        assert len(executors_of(found)) == 2
        assert found["scan"].endswith(".PythonScan")
        assert found["counts"] == []
    assert log.read_text(errors="replace").count(WARNING) == 1


def test_every_executor_reads_in_columns(ask: Ask) -> None:
    """The jar reaches them through spark.jars."""
    found = ask("read", shipped=True)
    assert len(executors_of(found)) == 2
    assert found["scan"] == "pk.reader.ColumnarScan"
    assert found["counts"] == [len(PLACES), 0, 0]


def test_killed_and_failed_tasks_count_nothing_and_leave_no_socket(
    ask: Ask, options: dict[str, str]
) -> None:
    """A task is killed because its speculative copy ended, one runs again."""
    executors = executors_of(ask("read", shipped=True))
    port = int(options["pk.bootstrap.servers"].rpartition(":")[2])
    found: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: found.update(ask("hinder", shipped=True)))
    thread.start()

    def open_sockets() -> int:
        return sum(sockets_to(each, port) for each in executors)

    until(lambda: open_sockets() > 0 or not thread.is_alive(), "a task is connected")
    assert thread.is_alive(), "the query ended before"
    thread.join(120)
    assert not thread.is_alive(), "the query hangs"
    executors_of(found)
    assert found["counts"] == [len(PLACES), 0, 0]
    until(lambda: open_sockets() == 0, "the tasks closed their sockets")


def test_a_client_of_spark_connect_reads_in_columns(
    ask: Ask, options: dict[str, str], connect_port: int, tmp_path: Path
) -> None:
    """A client without a JVM: `explain`, the metrics and a stream's progress say so to it, too."""
    ask("", shipped=True)
    given = {"remote": f"sc://127.0.0.1:{connect_port}", "options": options}
    given["checkpoint"] = str(tmp_path / "checkpoint")
    ran = subprocess.run(
        [sys.executable, str(HERE / "connect_client.py"), json.dumps(given)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert [tuple(row) for row in found["batch"]["rows"]] == PLACES
    assert found["batch"]["readers"] == [f"Reader: JVM, ranges of the log: {len(RECORDS)}"]
    metrics = found["batch"]["metrics"]
    assert metrics["pkRowsInColumns"] == len(PLACES)
    assert metrics["pkRowsThroughPython"] == 0
    (progress,) = found["stream"]
    assert progress["rowsInColumns"] == str(len(PLACES))
    assert progress["lagSum"] == "0"
