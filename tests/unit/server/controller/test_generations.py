"""The controller stays in the blocks of its restore generation (rule T13)."""

from __future__ import annotations

import pytest

from pk import errors, generations
from pk.server.controller import commands as c
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench, alter_isr, item


def test_producer_ids_of_the_next_generation_are_never_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restored cluster may give them already."""
    monkeypatch.setattr(generations, "PRODUCER_IDS", 1_500)
    bench = Bench()
    bench.up(1)
    epoch = bench.image.brokers[1].broker_epoch
    ask = c.AllocateProducerIds(wire.AllocateProducerIdsRequest(broker_id=1, broker_epoch=epoch))
    assert bench.do(ask).first == 0
    with pytest.raises(errors.UnsupportedFeature, match="no producer ids left"):
        bench.do(ask)


def test_a_partition_added_to_a_restored_topic_begins_in_its_block_by_a_claim() -> None:
    """An earlier cluster that lives may have created the same partition, from epoch and offset 0
    on.
    """
    bench = Bench()
    bench.up(1)
    bench.up(2)
    bench.topic("t", 1)
    topic = bench.image.topic("t")
    assert topic is not None
    wanted = wire.CreatePartitionsRequest(topics=[wire.NewPartitions(name="t", total_count=2)])
    bench.do(c.CreatePartitions(wanted))
    assert (topic.partitions[1].leader_epoch, topic.partitions[1].unclean_epoch) == (0, NONE)
    epoch = 3 * generations.EPOCHS
    topic.partitions[0] = topic.partitions[0]._replace(leader_epoch=epoch + 5)
    wanted.topics[0].total_count = 3
    bench.do(c.CreatePartitions(wanted))
    made = topic.partitions[2]
    assert (made.leader_epoch, made.unclean, made.unclean_epoch) == (epoch, True, epoch)
    assert made.isr == made.replicas[:1]


def test_a_partition_never_leaves_the_block_of_its_leader_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule T13: the last epoch of a block has no leader, and requests for one are refused."""
    monkeypatch.setattr(generations, "EPOCHS", 4)
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 1, 2)
    for leader in (1, 2):
        bench.fence(leader)
        bench.beat(leader)
        alter_isr(bench, 3 - leader, item(bench, "t", [1, 2]))
    state = bench.state("t")
    assert (state.leader, state.leader_epoch) == (1, 2)
    used_up = errors.UnsupportedFeature.code
    move = wire.AlterReassignmentsRequest()
    move.reassignments.add(topic="t", topic_id="id0", partition=0, replicas=[1])
    (moved,) = bench.do(c.AlterReassignments(move, dict(bench.reports))).results
    assert moved.error.code == used_up, "a replica that leaves takes an epoch"
    bench.fence(1)
    assert (bench.state("t").leader, bench.state("t").leader_epoch) == (NONE, 3)
    bench.beat(1)
    bench.beat(2)
    assert bench.state("t").leader_epoch == 3
    for unclean in (False, True):
        asked = wire.ElectLeadersRequest(unclean=unclean)
        asked.partitions.add(topic_id="id0", partition=0)
        (result,) = bench.do(c.ElectLeaders(asked, dict(bench.reports))).results
        assert (result.error.code, bench.state("t").leader_epoch) == (used_up, 3)
