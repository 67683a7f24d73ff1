"""Replicas that a request places: of a new topic, and of new partitions."""

from __future__ import annotations

from pk import limits
from pk.server.controller import commands as c
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench


def on(*brokers: int) -> wire.ReplicaAssignment:
    return wire.ReplicaAssignment(broker_ids=brokers)


def test_replicas_are_placed_as_the_request_says() -> None:
    bench = Bench()
    bench.up(1, 2, 3)
    most = limits.PARTITIONS_PER_TOPIC_MAX + 1
    results = bench.create(
        wire.NewTopic(name="t", assignment=[on(3, 1), on(2, 3)]),
        wire.NewTopic(name="same", partitions=1, assignment=[on(2)]),
        wire.NewTopic(name="both", partitions=2, assignment=[on(2)]),
        wire.NewTopic(name="factor", replication_factor=1, assignment=[on(2)]),
        wire.NewTopic(name="unknown", assignment=[on(4)]),
        wire.NewTopic(name="huge", assignment=[on(1)] * most),
    )
    assert [r.error.code for r in results] == [0, 0, 42, 42, 39, 37]
    assert [bench.state("t", n).replicas for n in (0, 1)] == [(3, 1), (2, 3)]
    assert [bench.state("t", n).leader for n in (0, 1)] == [3, 2]
    for placed, code in (([on(1, 2)], 39), ([on(1, 2), on(1)], 39), ([on(1, 3), on(2, 1)], 0)):
        wanted = [wire.NewPartitions(name="t", total_count=4, assignment=placed)]
        request = wire.CreatePartitionsRequest(topics=wanted)
        (result,) = bench.do(c.CreatePartitions(request)).results
        assert result.error.code == code
    assert bench.state("t", 3).replicas == (2, 1)


def test_a_fenced_replica_of_an_assignment_does_not_lead() -> None:
    bench = Bench()
    bench.up(1, 2)
    bench.fence(1)
    (result,) = bench.create(wire.NewTopic(name="t", assignment=[on(1, 2)]))
    assert not result.HasField("error")
    state = bench.state("t")
    assert (state.replicas, state.isr, state.leader) == ((1, 2), (2,), 2)
