"""What the broker sends to the tier, and what the tier reports: rules P6, T1, T4, T6."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.server.replica.tier_state import TierState
from pk.server.tier import view as tier_view
from pk.server.tier.view import TierFeed
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire


def key(partition: int) -> PartitionKey:
    return PartitionKey("t" * 36, partition)


def describe(k: PartitionKey) -> wire.TierPartition:
    return wire.TierPartition(topic_id=k.topic_id, partition=k.partition)


def poll(feed: TierFeed, generation: int, session: str = "s") -> wire.TierPartitionsReply:
    return feed.reply(
        wire.TierPartitionsRequest(session_id=session, generation=generation), describe
    )


def test_a_poll_names_only_what_changed() -> None:
    feed = TierFeed("s")
    for number in range(4):
        feed.restore(key(number))
    first = poll(feed, 0, session="another process's")
    assert first.full
    assert [each.partition for each in first.partitions] == [0, 1, 2, 3]
    assert not feed.news("s", first.generation)
    feed.touch(key(2))
    feed.touch(key(0))
    feed.touch(key(2))
    assert feed.news("s", first.generation)
    second = poll(feed, first.generation)
    assert not second.full
    assert [each.partition for each in second.partitions] == [0, 2]


def test_a_partition_that_left_is_told_once_and_forgotten_in_a_full_list() -> None:
    feed = TierFeed("s")
    feed.restore(key(0))
    start = feed.generation
    feed.remove(key(0), "flights")
    (gone,) = poll(feed, start).partitions
    assert gone.gone
    assert gone.topic == "flights"
    assert not poll(feed, 0, session="x").partitions
    feed.restore(key(0))
    assert [each.gone for each in poll(feed, start).partitions] == [False]


def test_sessions_older_than_the_forgotten_tombstones_get_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_view, "TOMBSTONES_MAX", 2)
    feed = TierFeed("s")
    for number in range(5):
        feed.restore(key(number))
    start = feed.generation
    for number in range(4):
        feed.remove(key(number), "t")
    late = poll(feed, start)
    assert late.full
    assert [each.partition for each in late.partitions] == [4]


def progress(**fields: int) -> wire.TierProgress:
    given: dict[str, Any] = {"leader_epoch": 3, "tiered_end": 10, "droppable_end": 5, **fields}
    return wire.TierProgress(**given)


def test_coverage_grows_and_belongs_to_an_epoch() -> None:
    state = TierState()
    assert state.report(progress(), 3, 100)
    assert (state.tiered_end, state.droppable_end) == (10, 5)
    assert not state.report(progress(leader_epoch=2, tiered_end=50), 3, 100)
    assert not state.report(progress(tiered_end=8, droppable_end=2), 3, 100)
    assert state.tiered_end == 10


def test_nothing_above_what_the_table_covers_may_be_dropped() -> None:
    # rule T6
    state = TierState()
    state.report(progress(droppable_end=99), 3, 100)
    assert state.droppable_end == 10


def test_a_table_ahead_of_the_log_is_not_believed() -> None:
    """Rule T1: tiered_end <= LSO."""
    with pytest.raises(errors.TierTableChanged):
        TierState().report(progress(tiered_end=101), 3, 100)


def test_a_problem_is_kept_typed_and_clears() -> None:
    state = TierState()
    report = progress()
    report.problem.code = errors.TierUnavailable.code
    state.report(report, 3, 100)
    assert isinstance(state.problem, errors.TierUnavailable)
    state.report(progress(), 3, 100)
    assert state.problem is None


def test_what_was_tiered_of_a_log_that_is_cut_says_nothing_of_what_it_goes_on_with(
    rig: Any,
) -> None:
    """T15, replica/tier_state Y5: a follower learns of an unclean election when its log is
    truncated, perhaps together with changed settings of the topic.
    """
    partition = rig.partition(tiered=True)
    partition.step_down(2)
    partition.update_retention(0, 10, 9)
    partition.tier = TierState(tiered_end=10, droppable_end=10, leader_epoch=0)
    partition.cut_watermark(10)
    assert (partition.log.tiered_end, partition.log.droppable_end) == (10, 9)
    assert partition.tier.tiered_end == 10
    partition.cut_watermark(4)
    assert (partition.log.tiered_end, partition.log.droppable_end) == (4, 4)
    assert partition.tier == TierState()
    partition.cut_watermark(0)
    rig.lead(partition, 2)
    assert partition.log.tiered_end == partition.log.local_log_start


def test_what_was_said_in_another_leader_epoch_is_not_believed_after_the_tier_was_off(
    rig: Any,
) -> None:
    # rule T15
    partition = rig.partition(tiered=True)
    for epoch, believed in ((0, 10), (1, 0)):
        partition.tier = TierState(tiered_end=10, droppable_end=10, leader_epoch=0)
        partition.reconfigure(partition.settings, 0, tiered=False)
        rig.lead(partition, epoch)
        partition.reconfigure(partition.settings, 0, tiered=True)
        assert (partition.log.tiered_end, partition.log.droppable_end) == (believed, believed)
