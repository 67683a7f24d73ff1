"""A topic whose tier is turned off, and on again: rules T1, T4, T6, T15 end to end."""

from __future__ import annotations

from typing import Any

from pk import errors
from tests.unit.server.tier.test_node import (
    QUICK,
    Cluster,
    configure,
    delete,
    partition_of,
    produce,
    read,
)


def test_a_topic_whose_tier_is_turned_off_expires_by_its_own_retention(
    tiered: Cluster, kit: Any
) -> None:
    """Rules T1, T6: no segment waits any more for a copy that is not made.  When the tier is turned
    on again, it copies the records that still exist.
    """
    topic_id = tiered.do(tiered.create("flights", **QUICK, retention_ms="20000"))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.local_log_start >= 9)
    configure(tiered, tier_enable="false")
    tiered.do(produce(tiered, kit, topic_id, 12))
    tiered.world.loop.run_for_ms(10_000)
    assert partition.log.log_start == 0
    tiered.world.run_until(lambda: partition.log.log_start == 24)
    tiered.do(produce(tiered, kit, topic_id, 2))
    configure(tiered, tier_enable="true")
    tiered.world.run_until(lambda: partition.tiered_end == 26)
    assert list(tiered.do(read(tiered, kit, topic_id, 24, 26))) == [24, 25]


def test_a_tier_that_is_turned_on_again_knows_what_it_had(tiered: Cluster, kit: Any) -> None:
    topic_id = tiered.do(tiered.create("flights", **QUICK))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.droppable_end == 12)
    configure(tiered, tier_enable="false")
    configure(tiered, tier_enable="true")
    assert not partition.violations()
    tiered.world.run_until(lambda: partition.log.droppable_end == 12)
    assert list(tiered.do(read(tiered, kit, topic_id, 0, 12))) == list(range(12))


def test_a_log_that_went_on_without_its_table_is_the_truth(tiered: Cluster, kit: Any) -> None:
    """Rule T15: the only disk of a topic is lost while the topic is not tiered.  No claim is made,
    and offsets of the table are assigned again.  When the tier is turned on, no local record is
    dropped because of the table's records, not even at an unclean election (T4).  Once the topic's
    log start has passed all of the table's records, the copier continues.
    """
    topic_id = tiered.do(tiered.create("flights", **QUICK, flush_on_ack="true"))
    tiered.do(produce(tiered, kit, topic_id, 12))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.log.droppable_end == 12)
    configure(tiered, tier_enable="false", local_retention_bytes="-1")
    tiered.kill("broker", "d1")
    tiered.replace_storage("d1")
    tiered.start_broker()
    tiered.world.run_until(lambda: partition_of(tiered, topic_id).leader is not None)
    tiered.do(produce(tiered, kit, topic_id, 5))
    configure(tiered, tier_enable="true", local_retention_bytes="20000")
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tier.problem is not None)  # shorter than the table
    tiered.do(produce(tiered, kit, topic_id, 13))
    tiered.world.loop.run_for_ms(20_000)
    assert isinstance(partition.tier.problem, errors.TierTableChanged)
    assert (partition.log.local_log_start, partition.tiered_end) == (0, 0)
    tiered.kill("broker", "d1", power=True)
    tiered.boot = "boot-2"
    tiered.start_broker()
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.leader is not None)
    tiered.world.loop.run_for_ms(20_000)
    assert (partition.log.local_log_start, partition.log.written_end) == (0, 18)
    assert not any(tiered.do(read(tiered, kit, topic_id, 0, 18)).values())
    tiered.do(delete(tiered, topic_id, 12))
    tiered.world.run_until(lambda: partition.log.local_log_start > 12)
    assert partition.tier.problem is None
    assert list(tiered.do(read(tiered, kit, topic_id, 12, 18))) == list(range(12, 18))


def test_a_tier_that_is_turned_off_during_a_claim_is_off(tiered: Cluster, kit: Any) -> None:
    """Rules T1, T6: otherwise the coverage that the claim found would hold back topic retention
    without an end.
    """
    topic_id = tiered.do(tiered.create("flights", **QUICK, flush_on_ack="true"))
    tiered.do(produce(tiered, kit, topic_id, 4))
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.tiered_end == 4)
    tiered.world.kill("tier")
    tiered.kill("broker", "d1", power=True)
    tiered.boot = "boot-2"
    tiered.start_broker()
    configure(tiered, tier_enable="false", retention_bytes="30000")
    tiered.start_tier()
    partition = partition_of(tiered, topic_id)
    tiered.world.run_until(lambda: partition.leader is not None)
    tiered.do(produce(tiered, kit, topic_id, 12))
    tiered.world.run_until(lambda: partition.log.log_start >= 12)
