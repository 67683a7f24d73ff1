"""What becomes of the committed offsets of a lost cluster (rule T13)."""

from __future__ import annotations

from pk import TopicPartition
from pk.cli.tier_restore_offsets import GONE, KEPT, PUT_BACK, QUERY, planned
from pk.tiering.offset_files import StoredGroup, StoredOffset
from pk.types import PartitionKey

THERE = {PartitionKey("a", 0): "t", PartitionKey("a", 1): "t"}


def group(run: str = "") -> StoredGroup:
    made = StoredGroup("g", run, topics={"a": "t", "b": "old", "c": ""})
    for number, key in enumerate((("a", 0), ("a", 1), ("b", 0), ("c", 0))):
        made.offsets[PartitionKey(*key)] = StoredOffset(10 + number, 0, "", 0)
    return made


def test_offsets_are_put_back_by_topic_id_and_never_over_later_ones() -> None:
    found = list(planned(group(), THERE, {TopicPartition("t", 1): 0}))
    assert [(each.topic, each.partition, each.offset, each.outcome) for each in found] == [
        ("t", 0, 10, PUT_BACK),
        ("t", 1, 11, KEPT),
        ("old", 0, 12, GONE),
        ("c", 0, 13, GONE),
    ]


def test_the_group_of_a_query_is_left_out() -> None:
    assert {each.outcome for each in planned(group("run"), THERE, {})} == {QUERY}
