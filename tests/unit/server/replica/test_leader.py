"""The leader's view of a partition: rules R1, R2, L2 and KIP-207."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.server.replica.leader import Leader


def leader(**changed: Any) -> Leader:
    given: dict[str, Any] = {
        "node_id": 1,
        "leader_epoch": 5,
        "partition_epoch": 0,
        "replicas": (1,),
        "isr": (1,),
        "log_end": 0,
        "synced_end": 0,
        "high_watermark": 0,
        "min_insync_replicas": 1,
        "flush_on_ack": False,
    }
    return Leader(**{**given, **changed})


def test_the_only_replica_commits_what_it_has_written() -> None:
    one = leader()
    assert one.on_local_end(10, 0)
    assert one.high_watermark == 10
    assert not one.on_local_end(10, 10)


def test_flush_on_ack_commits_only_what_is_synced() -> None:
    # rule L2
    one = leader(flush_on_ack=True)
    assert not one.on_local_end(10, 0)
    assert one.on_local_end(10, 10)
    assert one.high_watermark == 10


def test_a_checkpointed_watermark_above_a_torn_tail_is_cut() -> None:
    assert leader(log_end=4, synced_end=4, high_watermark=9).high_watermark == 4


def test_a_new_leader_is_ready_once_its_old_log_is_committed() -> None:
    """KIP-207: until then a reader above the high watermark waits."""
    new = leader(replicas=(1, 2), isr=(1, 2), log_end=10, synced_end=10, high_watermark=6)
    assert not new.ready
    new.on_follower_end(2, 8)
    assert (new.high_watermark, new.ready) == (8, False)
    new.on_follower_end(2, 10)
    assert new.ready


def test_a_leader_is_settled_once_all_in_sync_were_heard_with_what_was_there_before() -> None:
    """Rule L6: a member that has confirmed nothing may have any records, also above an empty
    log.
    """
    new = leader(replicas=(1, 2, 3), isr=(1, 2), log_end=10, synced_end=10, high_watermark=10)
    assert new.ready
    assert not new.settled
    new.on_follower_end(2, 9, broker_epoch=4)
    assert not new.settled
    new.on_follower_end(2, 10, broker_epoch=4)
    assert new.settled
    new.on_local_end(20, 20)
    assert new.settled, "what came since is its own"
    new.on_isr_proposed((1, 2, 3))
    assert not new.settled
    new.on_isr_refused((1, 2, 3))
    assert new.settled
    empty = leader(replicas=(1, 2), isr=(1, 2))
    assert not empty.settled
    empty.on_follower_end(2, 0, broker_epoch=4)
    assert empty.settled
    assert leader().settled, "nobody else is in sync"


def test_a_pending_addition_holds_the_watermark_and_does_not_count() -> None:
    """Rule R2: the maximal ISR holds the watermark back; rule R1: only committed members count for
    the minimum.
    """
    one = leader(replicas=(1, 2, 3), isr=(1, 2), min_insync_replicas=3)
    one.on_local_end(10, 0)
    one.on_follower_end(2, 10)
    one.on_isr_proposed((1, 2, 3))
    assert one.high_watermark == 0
    assert one.on_follower_end(3, 4) is False
    assert one.on_isr_committed((1, 2, 3), (1, 2, 3), 1)
    assert one.high_watermark == 4


def test_an_old_partition_epoch_is_ignored() -> None:
    one = leader(partition_epoch=3)
    assert not one.on_isr_committed((1,), (1,), 3)
    assert one.partition_epoch == 3


def test_acks_all_needs_the_minimum() -> None:
    one = leader(replicas=(1, 2), isr=(1,), min_insync_replicas=2)
    with pytest.raises(errors.NotEnoughReplicas):
        one.check_acks(-1)
    one.check_acks(1)
    one.on_config(1, False)
    one.check_acks(-1)


def test_epochs_are_compared() -> None:
    """KIP-320: a request with another leader epoch is refused."""
    one = leader()
    one.check_epoch(-1)
    one.check_epoch(5)
    with pytest.raises(errors.FencedLeaderEpoch):
        one.check_epoch(4)
    with pytest.raises(errors.UnknownLeaderEpoch):
        one.check_epoch(6)


def test_a_follower_cannot_be_ahead() -> None:
    one = leader(replicas=(1, 2), isr=(1, 2))
    with pytest.raises(errors.OffsetOutOfRange):
        one.on_follower_end(2, 1)
    with pytest.raises(errors.NotLeaderOrFollower):
        one.on_follower_end(9, 0)
