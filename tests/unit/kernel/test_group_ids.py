"""The partition that coordinates a group (group_ids)."""

from __future__ import annotations

from pk import group_ids


def test_a_group_has_one_partition_for_ever() -> None:
    """The numbers are in the logs of every cluster: they must not change."""
    names = ["", "app", "spark-1", "ü"]
    assert [group_ids.partition_of_group(each) for each in names] == [0, 3, 1, 15]
    assert group_ids.PARTITIONS == 16
    assert group_ids.TOPIC == "__consumer_offsets"
