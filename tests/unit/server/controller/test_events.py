"""The log lines of the controller about its decisions (server/controller/events.py)."""

from __future__ import annotations

import pytest

from pk.effects import Publish
from pk.server.controller import commands as c
from pk.server.controller.events import EVENT, NAMED_MAX, Event
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench


def said(bench: Bench) -> list[Event]:
    """Return the lines since the last call."""
    found = [e.value for e in bench.effects if isinstance(e, Publish) and e.name == EVENT]
    bench.effects.clear()
    return found


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.up(1, 2, 3)
    bench.effects.clear()
    return bench


def create(bench: Bench, partitions: int = 2) -> None:
    bench.topic("t", partitions, 3)


def test_a_topic_that_is_created_has_one_line(bench: Bench) -> None:
    create(bench)
    (line,) = said(bench)
    assert line.name == "topic_created"
    assert line.facts["topic"] == "t"
    assert (line.facts["partitions"], line.facts["replication_factor"]) == (2, 3)


def test_a_refusal_says_nothing(bench: Bench) -> None:
    create(bench)
    said(bench)
    (result,) = bench.create(wire.NewTopic(name="t", partitions=1, replication_factor=3))
    assert result.HasField("error")
    assert said(bench) == []


def test_settings_of_one_resource_share_a_line(bench: Bench) -> None:
    create(bench)
    said(bench)
    bench.alter("topic", "t", retention_ms="5000", segment_bytes="1048576")
    (line,) = said(bench)
    assert line.name == "config_changed"
    assert line.facts["resource"] == "topic:t"
    assert line.facts["values"] == "retention_ms=5000,segment_bytes=1048576"


def test_a_failover_of_many_partitions_is_one_line_that_names_the_first(bench: Bench) -> None:
    create(bench, partitions=60)
    said(bench)
    bench.fence(1)
    lines = {line.name: line.facts for line in said(bench)}
    assert set(lines) == {"leader_elected", "isr_shrunk"}
    assert lines["leader_elected"]["partitions"] == 20
    assert lines["isr_shrunk"]["partitions"] == 60
    named = lines["leader_elected"]["named"].split("; ")
    assert len(named) == NAMED_MAX
    assert named[0].startswith("t-")
    assert "1 -> " in named[0]
    assert "@" in named[0]


def test_a_partition_without_a_leader_is_named(bench: Bench) -> None:
    create(bench, partitions=1)
    for broker in (1, 2, 3):
        bench.fence(broker)
    names = [line.name for line in said(bench)]
    assert "leader_lost" in names


def test_a_broker_that_serves_again_is_said(bench: Bench) -> None:
    bench.fence(2)
    said(bench)
    bench.register(2, incarnation="j")
    bench.beat(2)
    assert Event("broker_unfenced", {"broker": 2}) in said(bench)


def test_a_topic_that_is_deleted_has_one_line(bench: Bench) -> None:
    create(bench)
    said(bench)
    bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=["t"])))
    (line,) = said(bench)
    assert line.name == "topic_deleted"
    assert line.facts["topic"] == "t"
