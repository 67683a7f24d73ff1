"""Topics of pk's own: their creation, their replicas, and what clients may not do with them."""

from __future__ import annotations

from collections import Counter

import pytest

from pk import errors, transactional_ids
from pk.log.plan import LogConfig
from pk.server.controller import commands as c
from pk.server.controller.internal_topics import Raised, short
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench, alter_isr, item

NAME = transactional_ids.TOPIC


def create(bench: Bench, broker: int = 1, name: str = NAME, topic_id: str = "own") -> int:
    request = wire.CreateInternalTopicRequest(
        broker_id=broker, broker_epoch=bench.image.brokers[broker].broker_epoch, name=name,
        topic_id=topic_id,
    )  # fmt: skip
    reply: wire.CreateInternalTopicReply = bench.do(c.CreateInternalTopic(request))
    return reply.metadata_offset


def raised(bench: Bench) -> tuple[int, bool]:
    reply: Raised = bench.do(c.RaiseReplication(dict(bench.reports)))
    return len(reply.partitions), reply.again


def all_join(bench: Bench) -> None:
    """Let every replica that is being added join its ISR."""
    for number in range(transactional_ids.PARTITIONS):
        for member in bench.state(NAME, number).adding:
            state = bench.state(NAME, number)
            wanted = item(bench, NAME, [*state.isr, member], number)
            assert not alter_isr(bench, state.leader, wanted).HasField("error")


def factors(bench: Bench) -> Counter[int]:
    topic = bench.image.topic(NAME)
    assert topic is not None
    return Counter(len(state.replicas) for state in topic.partitions.values())


def test_a_broker_has_an_internal_topic_created_once() -> None:
    bench = Bench()
    bench.up(1, 2, 3, 4)
    assert create(bench) == bench.image.offset
    topic = bench.image.topic(NAME)
    assert topic is not None
    assert (topic.topic_id, topic.internal) == ("own", True)
    assert list(topic.partitions) == list(range(transactional_ids.PARTITIONS))
    assert factors(bench) == {3: 16}
    leaders = Counter(state.leader for state in topic.partitions.values())
    assert leaders == {1: 4, 2: 4, 3: 4, 4: 4}
    assert all(len(state.isr) == 3 for state in topic.partitions.values())
    end = len(bench.log)
    assert create(bench, 2, topic_id="other") == bench.image.offset
    assert len(bench.log) == end, "another broker asked at the same time"


def test_its_settings_do_not_depend_on_the_clusters_defaults() -> None:
    """Retention deletes nothing of it, and an unclean election needs an operator."""
    bench = Bench()
    bench.up(1)
    bench.alter("broker", "", unclean_leader_election_enable="true", retention_ms="1")
    bench.alter("broker", "", min_insync_replicas="1", segment_bytes="20000")
    create(bench)
    found = bench.image.topic_config(NAME)
    assert found["cleanup_policy"] == "compact"
    assert found["tier_enable"] is False
    assert (found["min_insync_replicas"], found["segment_bytes"]) == (2, 16 * 2**20)
    assert not bench.rules.unclean_enabled(bench.image, NAME)
    assert not LogConfig.of(found).deletes


@pytest.mark.parametrize(
    ("name", "topic_id", "error"),
    [
        ("flights", "own", errors.InvalidTopic),
        ("__flights", "own", errors.InvalidTopic),
        (NAME, "", errors.InvalidRequest),
        (NAME, "id0", errors.InvalidRequest),
    ],
)
def test_what_a_broker_may_not_ask_for(
    name: str, topic_id: str, error: type[errors.PkError]
) -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    with pytest.raises(error):
        create(bench, name=name, topic_id=topic_id)


def test_only_a_registered_broker_may_ask() -> None:
    bench = Bench()
    bench.up(1)
    request = wire.CreateInternalTopicRequest(broker_id=1, name=NAME, topic_id="own")
    with pytest.raises(errors.StaleBrokerEpoch):
        bench.do(c.CreateInternalTopic(request))
    bench.fence(1)
    with pytest.raises(errors.BrokerUnavailable):
        create(bench)


def test_replicas_are_added_as_brokers_come() -> None:
    """R8, R9: the old replicas stay, and nothing stops while the new ones copy."""
    bench = Bench()
    bench.up(1)
    create(bench)
    assert factors(bench) == {1: 16}
    assert raised(bench) == (0, False)
    bench.register(2)
    assert raised(bench) == (0, False), "it is not available yet"
    bench.up(2)
    end = len(bench.log)
    assert raised(bench) == (16, False)
    assert len(bench.log) == end + 16
    state = bench.state(NAME)
    assert (state.adding, state.isr, state.leader, state.leader_epoch) == ((2,), (1,), 1, 0)
    assert raised(bench) == (0, False), "it is under way"
    all_join(bench)
    assert factors(bench) == {2: 16}
    assert not bench.state(NAME).adding
    bench.up(3, 4)
    assert raised(bench) == (16, False)
    all_join(bench)
    assert factors(bench) == {3: 16}
    assert raised(bench) == (0, False)
    topic = bench.image.topic(NAME)
    assert topic is not None
    for state in topic.partitions.values():
        assert (state.leader, state.leader_epoch, set(state.isr)) == (1, 0, set(state.replicas))
    first = Counter(state.replicas[0] for state in topic.partitions.values())
    assert max(first.values()) <= 5, "the preferred leaders are spread"
    held = Counter(member for state in topic.partitions.values() for member in state.replicas)
    assert held[1] == 16
    assert max(held[n] for n in (2, 3, 4)) - min(held[n] for n in (2, 3, 4)) <= 16


def test_new_replicas_go_to_other_racks_first() -> None:
    bench = Bench()
    for broker, rack in ((1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "c")):
        bench.register(broker, rack=rack)
    bench.beat(1)
    create(bench)
    for broker in (2, 3, 4, 5):
        bench.beat(broker)
    assert raised(bench) == (16, False)
    topic = bench.image.topic(NAME)
    assert topic is not None
    assert {frozenset(state.replicas) for state in topic.partitions.values()} == {
        frozenset({1, 4, 5})
    }


def test_what_cannot_be_raised_now_is_tried_again() -> None:
    """A partition that moves, and one without a leader; the others are raised."""
    bench = Bench()
    bench.up(1, 2)
    create(bench)
    request = wire.AlterReassignmentsRequest()
    bench.up(3)
    request.reassignments.add(topic=NAME, topic_id="own", partition=0, replicas=(1, 3))
    reply = bench.do(c.AlterReassignments(request, dict(bench.reports)))
    assert not reply.results[0].HasField("error")
    assert len(list(short(bench.image))) == 16
    assert raised(bench) == (15, True)
    state = bench.state(NAME)
    wanted = item(bench, NAME, [*state.isr, 3])
    assert not alter_isr(bench, state.leader, wanted).HasField("error")
    assert set(bench.state(NAME).replicas) == {1, 3}
    assert raised(bench) == (1, False)


def test_a_lost_broker_lowers_nothing() -> None:
    """Two available brokers of three: the third replica stays assigned."""
    bench = Bench()
    bench.up(1, 2, 3)
    create(bench)
    bench.fence(3)
    assert raised(bench) == (0, False)
    assert factors(bench) == {3: 16}


def test_acks_need_as_many_in_sync_as_there_are_replicas_at_most() -> None:
    """R1: the recorded 2 counts as 1 while there is one replica, so elections keep no ELR then."""
    bench = Bench()
    bench.up(1)
    create(bench)
    assert bench.rules.min_isr(bench.image, NAME) == 2
    bench.up(2)
    raised(bench)
    all_join(bench)
    bench.fence(2)
    assert (bench.state(NAME).isr, bench.state(NAME).elr) == ((1,), (2,))


def test_clients_may_not_change_it() -> None:
    bench = Bench()
    bench.up(1)
    create(bench)
    end = len(bench.log)
    (made,) = bench.create(wire.NewTopic(name="__mine", partitions=1, replication_factor=1))
    deleted = bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=[NAME]))).results[0]
    by_id = bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(topic_ids=["own"]))).results[0]
    grow = wire.CreatePartitionsRequest()
    grow.topics.add(name=NAME, total_count=32)
    grown = bench.do(c.CreatePartitions(grow)).results[0]
    altered = bench.alter("topic", NAME, cleanup_policy="delete")
    unset = bench.alter("topic", NAME, unset=("cleanup_policy",))
    for result in (made, deleted, by_id, grown, altered, unset):
        assert result.error.code == errors.InvalidTopic.code
        assert "pk's own" in result.error.message
    assert len(bench.log) == end


def test_an_operator_decides_whether_its_records_wait_for_the_disk() -> None:
    """They are as durable as acknowledged records are by default in this cluster."""
    bench = Bench()
    bench.up(1)
    create(bench)
    assert bench.image.topic_config(NAME)["flush_on_ack"] is False
    bench.alter("broker", "", flush_on_ack="true")
    assert bench.image.topic_config(NAME)["flush_on_ack"] is True
    assert not bench.alter("topic", NAME, flush_on_ack="false").HasField("error")
    assert bench.image.topic_config(NAME)["flush_on_ack"] is False
    assert not bench.alter("topic", NAME, unset=("flush_on_ack",)).HasField("error")
    assert bench.image.topic_config(NAME)["flush_on_ack"] is True
    both = bench.alter("topic", NAME, flush_on_ack="false", segment_bytes="20000")
    assert both.error.code == errors.InvalidTopic.code
    assert "only flush_on_ack" in both.error.message
