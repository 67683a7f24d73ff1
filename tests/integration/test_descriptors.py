"""More partitions than descriptors: files that stay open share what a process may have
(log/descriptor_pool).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import monotonic_s

pytestmark = pytest.mark.integration

DESCRIPTORS, PARTITIONS, ROUNDS = 400, 600, 3
PATIENCE_S = 120


def produce(address: str, topic: str, turn: int) -> None:
    with Producer(address, linger_ms=0) as producer:
        sent = [
            producer.send(topic, b"%d-%d" % (turn, place), partition=place)
            for place in range(PARTITIONS)
        ]
        for future in sent:
            future.result(PATIENCE_S)


def consumed(address: str, topic: str, turns: int) -> set[bytes | None]:
    places = [TopicPartition(topic, place) for place in range(PARTITIONS)]
    found: list[bytes | None] = []
    with Consumer(address, auto_offset_reset="earliest") as consumer:
        consumer.assign(places)
        deadline = monotonic_s() + PATIENCE_S
        while len(found) < turns * PARTITIONS:
            assert monotonic_s() < deadline, f"{len(found)} records"
            found += [record.value for record in consumer.poll(0.5)]
    assert len(found) == turns * PARTITIONS
    return set(found)


def test_a_broker_serves_more_partitions_than_it_may_open_files(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    server.spawn()
    # before the supervisor starts its children, which inherit it
    resource.prlimit(server.pids()["supervisor"], resource.RLIMIT_NOFILE, (DESCRIPTORS,) * 2)
    server.wait_ready()
    try:
        with AdminClient(server.address) as admin:
            admin.create_topic("wide", partitions=PARTITIONS)
        for turn in range(ROUNDS):
            produce(server.address, "wide", turn)
            if turn == 1:
                server.kill("broker")  # the supervisor starts it again, under the same limit
        expected = {b"%d-%d" % (t, p) for t in range(ROUNDS) for p in range(PARTITIONS)}
        assert consumed(server.address, "wide", ROUNDS) == expected
        broker = server.pids()["broker"]
        assert resource.prlimit(broker, resource.RLIMIT_NOFILE) == (DESCRIPTORS,) * 2
        assert len(os.listdir(f"/proc/{broker}/fd")) < DESCRIPTORS
        with AdminClient(server.address) as admin:
            states = admin.describe_topics(["wide"])
        assert {(state.leader, state.log_end) for state in states} == {(1, ROUNDS)}
        said = server.log.read_text()
        assert "Too many open files" not in said, said
        assert "offline" not in said, said
    finally:
        server.stop()


def test_a_broker_refuses_partitions_that_it_may_not_hold(tmp_path: Path) -> None:
    """They are refused before the metadata name them, so those that exist are served."""
    with (
        EmbeddedServer(tmp_path, settings={"partitions_max": 20}) as server,
        AdminClient(server.address) as admin,
    ):
        admin.create_topic("t", partitions=15)
        with pytest.raises(errors.TooManyPartitions, match="holds 15 replicas and may hold 20"):
            admin.create_topic("u", partitions=6)
        assert [topic.name for topic in admin.list_topics()] == ["t"]
        with pytest.raises(errors.TooManyPartitions, match="cannot take 6 more"):
            admin.create_partitions("t", 21)
        admin.create_partitions("t", 20)
        with Producer(server.address) as producer:
            producer.send("t", b"value", partition=19).result(PATIENCE_S)


def test_a_node_without_descriptors_says_so_before_it_opens_anything(tmp_path: Path) -> None:
    command = f"ulimit -n 100 && exec {sys.executable} -m pk.cli server start --dir {tmp_path}/d"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "100 open files, and a node needs 256" in ended.stderr, ended.stderr
    assert not (tmp_path / "d").exists()
