"""Brokers that hold as many replicas as they may (`partitions_max`)."""

from __future__ import annotations

from pathlib import Path

from pk.server.controller import commands as c
from pk.server.node.memory import REPLICA_BYTES, memory_bytes, partitions_max
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench
from tests.unit.server.controller.test_reassignments import reassign

LIMIT_REACHED = 1043


def cluster(**bounds: int) -> Bench:
    """Return brokers 1, 2, … with the bounds b1, b2, …."""
    bench = Bench()
    for name, bound in bounds.items():
        broker = int(name.removeprefix("b"))
        bench.register(broker)
        bench.beat(broker, partitions_max=bound)
    return bench


def new(name: str, partitions: int, factor: int = 1) -> wire.NewTopic:
    return wire.NewTopic(name=name, partitions=partitions, replication_factor=factor)


def held(bench: Bench, broker: int) -> int:
    return len(list(bench.image.partitions_of(broker)))


def test_topics_that_no_broker_has_room_for_are_refused_before_a_record() -> None:
    bench = cluster(b1=5, b2=5)
    log = len(bench.log)
    (result,) = bench.create(new("t", 12))
    assert result.error.code == LIMIT_REACHED
    assert result.error.message.startswith(
        "broker 1 holds 0 replicas and may hold 5 (partitions_max), so it cannot take 6 more"
    )
    assert len(bench.log) == log
    assert [r.error.code for r in bench.create(new("t", 10), new("u", 1))] == [0, LIMIT_REACHED]
    assert (held(bench, 1), held(bench, 2)) == (5, 5)


def test_topics_of_one_request_count_together() -> None:
    bench = cluster(b1=5)
    results = bench.create(new("a", 3), new("b", 3), new("c", 2))
    assert [result.error.code for result in results] == [0, LIMIT_REACHED, 0]


def test_a_broker_without_room_gets_no_new_replica_while_others_have_room() -> None:
    bench = cluster(b1=2, b2=100, b3=100)
    bench.topic("first", 6)
    assert held(bench, 1) == 2
    bench.topic("t", 8, 2)
    assert held(bench, 1) == 2
    (result,) = bench.create(new("three", 1, 3))  # broker 1 would be needed
    assert result.error.code == LIMIT_REACHED
    assert "broker 1 holds 2 replicas" in result.error.message


def test_partitions_that_are_added_and_moved_count_too() -> None:
    bench = cluster(b1=2, b2=1)
    bench.topic("t", 1)
    request = wire.CreatePartitionsRequest()
    request.topics.add(name="t", total_count=9)
    reply = bench.do(c.CreatePartitions(request, dict(bench.reports)))
    assert reply.results[0].error.code == LIMIT_REACHED
    assert reassign(bench, 2) == 0
    bench.topic("u", 1)
    assert bench.state("u").replicas == (1,)
    assert reassign(bench, 2, topic="u") == LIMIT_REACHED
    assert reassign(bench, 1, topic="u") == 0  # nothing moves, so nothing counts


def test_a_broker_that_states_no_bound_has_none() -> None:
    bench = cluster(b1=0)
    bench.topic("t", 500)
    assert held(bench, 1) == 500


def test_the_bound_of_a_node_comes_from_its_memory(tmp_path: Path) -> None:
    machine = memory_bytes(str(tmp_path / "none"))
    assert machine > 1 << 20
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    assert memory_bytes(str(limit)) == machine
    limit.write_text("104857600\n")
    assert memory_bytes(str(limit)) == 104_857_600
    assert partitions_max(104_857_600) == 104_857_600 // 4 // REPLICA_BYTES
    assert partitions_max(1) == 1
