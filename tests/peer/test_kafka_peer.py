"""Apache Kafka as the peer of the benchmarks: it starts, works again after a stop, is timed, and
agrees with pk.

`make peer`; needs Java and, the first time, a Maven repository.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from bench import sides, values
from bench.kafka import side as kafka_side
from bench.kafka.side import KafkaSide
from pk.client.partitioner import partition_of

pytestmark = [pytest.mark.peer, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSide]:
    side = KafkaSide()
    side.start(tmp_path_factory.mktemp("kafka"))
    try:
        sides.settle(side)
        yield side
    finally:
        side.stop()


def test_it_comes_back_after_a_stop(kafka: KafkaSide) -> None:
    """bench M2: it was stopped for longer than a request waits, and is timed again only when it is
    steady.
    """
    before = kafka.probe()
    sides.freeze(kafka)
    time.sleep(3)
    sides.thaw(kafka)
    assert set(kafka.probe()) == set(before)


def test_its_java_clients_are_timed_in_their_steady_window(
    kafka: KafkaSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_side, "WARM_UP", 100_000)
    path = tmp_path / "values"
    values.write(path, values.make(1000))
    kafka.create_topic("timed")
    sent = kafka.produce("timed", path, 6_000_000, "lz4", "java")
    read = kafka.consume("timed", 6_000_000, "java")
    for sample in (sent, read):
        assert sample.value > 10_000
        assert 0 < sample.records < 6_000_000
        assert sample.client_cpu_s > 0
        assert sample.server_peak_mb > 100


def test_keys_go_where_the_java_client_sends_them(kafka: KafkaSide) -> None:
    """Same key, same partition as Kafka's own producer: the murmur2 partitioner (semantics 1)."""
    keys = ["", "a", "ab", "abc", "abcd", "Zürich", "日本", "\U0001f600"]
    keys += [f"key-{n}" * (n % 7 + 1) for n in range(500)]
    kafka.create_topic("keyed", partitions=7)
    command = kafka.broker.command(
        "client.options",
        "org.apache.kafka.tools.ConsoleProducer",
        *("--bootstrap-server", kafka.broker.address, "--topic", "keyed"),
        *("--property", "parse.key=true", "--property", "key.separator=="),
    )
    lines = "".join(f"{key}=value\n" for key in keys)
    subprocess.run(command, input=lines.encode(), check=True, timeout=60, capture_output=True)
    found = _read_all(kafka, "keyed", 7, len(keys))
    assert len(found) == len(keys)
    assert {key: partition_of(key, 7) for key in found} == found


def _read_all(kafka: KafkaSide, topic: str, partitions: int, count: int) -> dict[bytes, int]:
    settings = {"bootstrap.servers": kafka.broker.address, "group.id": "peer"}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    found: dict[bytes, int] = {}
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        while len(found) < count:
            message: Any = consumer.poll(10)
            assert message is not None, f"{len(found)} of {count} records"
            assert message.error() is None
            found[message.key()] = message.partition()
    finally:
        consumer.close()
    return found
