"""How a client applies metadata replies, and how options are checked."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pk import errors
from pk.client.bootstrap import addresses
from pk.client.metadata import Metadata
from pk.client.options import consumer_options, producer_options
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire


def reply(*topics: tuple[str, str, list[tuple[int, int]]]) -> wire.MetadataReply:
    """Return a reply with topics as (name, id, [(leader, epoch) per partition]) and the brokers 1
    and 2.
    """
    made = wire.MetadataReply(cluster_id="c")
    for node in (1, 2):
        made.brokers.add(node_id=node, address=f"b{node}:1")
    for name, topic_id, leaders in topics:
        info = made.topics.add(name=name, topic_id=topic_id)
        for partition, (leader, epoch) in enumerate(leaders):
            info.partitions.add(partition=partition, leader=leader, leader_epoch=epoch)
    return made


def metadata() -> Metadata:
    return Metadata(max_age_ms=1000, backoff_ms=100)


def test_leaders_by_topic_id_and_never_an_older_epoch() -> None:
    known = metadata()
    known.update(reply(("t", "id", [(1, 5), (-1, 2)])), ["t"], 0)
    key = known.key(TopicPartition("t", 0))
    assert key == PartitionKey("id", 0)
    assert known.leader(key) == (1, 5, NONE)
    assert known.leader(PartitionKey("id", 1)) is None, "nobody leads it"
    known.update(reply(("t", "id", [(2, 4), (2, 3)])), ["t"], 1)
    assert known.leader(key) == (1, 5, NONE), "older news"
    assert known.leader(PartitionKey("id", 1)) == (2, 3, NONE)
    assert known.available(known.topic("t")) == [0, 1]


def test_partitions_never_shrink() -> None:
    known = metadata()
    known.update(reply(("t", "id", [(1, 1)] * 3)), ["t"], 0)
    known.update(reply(("t", "id", [(1, 1)] * 2)), ["t"], 1)
    assert known.topic("t").partitions == 3
    with pytest.raises(errors.UnknownTopicOrPartition, match="no partition 3"):
        known.key(TopicPartition("t", 3))


def test_what_was_deleted_and_what_was_recreated_are_told_apart() -> None:
    known = metadata()
    known.update(reply(("t", "old", [(1, 1)])), ["t"], 0)
    key = known.key(TopicPartition("t", 0))
    assert known.loss_of(key) is None
    known.update(reply(), ["t"], 1)
    assert isinstance(known.loss_of(key), errors.UnknownTopicId)
    with pytest.raises(errors.UnknownTopicOrPartition):
        known.topic("t")
    known.update(reply(("t", "new", [(1, 1)])), ["t"], 2)
    assert isinstance(known.loss_of(key), errors.TopicRecreated)
    assert known.loss_of(PartitionKey("never heard of", 0)) is None


def test_an_answer_about_some_topics_says_nothing_of_others() -> None:
    known = metadata()
    known.update(reply(("a", "1", [(1, 1)]), ("b", "2", [(1, 1)])), None, 0)
    assert known.complete
    known.update(reply(("a", "1", [(1, 1)])), ["a"], 1)
    assert not known.complete
    assert "b" in known.topics
    known.update(reply(("a", "1", [(1, 1)])), None, 2)
    assert "b" not in known.topics
    assert known.matching(re.compile("[ab]")) == ["a"]


def test_a_topics_own_error_is_kept() -> None:
    known = metadata()
    made = reply()
    made.topics.add(name="t", error=frames.error_of(errors.InvalidTopic("bad name")))
    known.update(made, ["t"], 0)
    with pytest.raises(errors.InvalidTopic, match="bad name"):
        known.topic("t")


def test_when_to_ask_again() -> None:
    known = metadata()
    assert known.next_refresh_ms(0) == 0
    known.asked(0)
    known.update(reply(), None, 10)
    assert known.next_refresh_ms(10) == 1010, "max_age"
    known.want()
    assert known.next_refresh_ms(20) == 100, "but not more often than the back-off"
    assert known.next_refresh_ms(500) == 500


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("h:1", ["h:1"]),
        ("h", ["h:9292"]),
        (" a:1 , b:2,", ["a:1", "b:2"]),
        (["a:1", "[::1]:5"], ["a:1", "[::1]:5"]),
        ("unix:/tmp/x", ["unix:/tmp/x"]),
    ],
)
def test_bootstrap_addresses(given: Any, found: list[str]) -> None:
    assert addresses(given) == found


@pytest.mark.parametrize("given", ["", ",", "h:x", "h:0", "h:70000", ":1"])
def test_bad_bootstrap_addresses(given: str) -> None:
    with pytest.raises(errors.InvalidOption):
        addresses(given)


def test_idempotence_follows_acks() -> None:
    # rule L6
    assert producer_options({})[1]
    assert not producer_options({"acks": 1})[1]
    assert not producer_options({"acks": "0"})[1]
    assert not producer_options({"enable.idempotence": False})[1]
    assert not producer_options({"acks": 1, "max_in_flight": 20})[1]
    with pytest.raises(errors.InvalidConfig, match="needs acks=all"):
        producer_options({"acks": 1, "enable_idempotence": True})
    with pytest.raises(errors.InvalidConfig, match="max_in_flight of at most 5"):
        producer_options({"max_in_flight": 6})


def test_kafkas_names_are_understood() -> None:
    options, _ = producer_options(
        {"linger.ms": 7, "compression.type": "zstd", "max.in.flight.requests.per.connection": 3}
    )
    assert (options["linger_ms"], options["compression"], options["max_in_flight"]) == (
        7,
        "zstd",
        3,
    )
    assert consumer_options({"auto.offset.reset": "none"})["auto_offset_reset"] == "none"
    with pytest.raises(errors.InvalidConfig, match="twice"):
        producer_options({"compression": "lz4", "compression.type": "zstd"})
    with pytest.raises(errors.InvalidConfig, match="did you mean isolation_level"):
        consumer_options({"isolation_levle": "x"})
    options = consumer_options({"group.id": "g"})
    assert (options["group_id"], options["assignors"]) == ("g", ["range", "cooperative-sticky"])
    strategy = {"partition.assignment.strategy": "cooperative-sticky , range"}
    assert consumer_options(strategy)["assignors"] == ["cooperative-sticky", "range"]
    for wrong in ("", "mine", "range,mine"):
        with pytest.raises(errors.InvalidConfig, match="takes names of range"):
            consumer_options({"partition_assignment_strategy": wrong})
    with pytest.raises(errors.InvalidConfig, match="needs a group_id"):
        consumer_options({"group_instance_id": "1"})
    with pytest.raises(errors.InvalidConfig, match="less than session_timeout_ms"):
        consumer_options({"session_timeout_ms": 1_000})


def test_a_broker_that_is_behind_takes_nothing_away() -> None:
    """client/metadata M2: topics that it does not know yet, or still knows, change nothing."""
    known = metadata()
    fresh = reply(("t", "id", [(2, 5)]))
    fresh.metadata_offset = 10
    known.update(fresh, None, 0)
    behind = reply(("s", "other", [(1, 1)]), ("t", "older", [(1, 1)]))
    behind.metadata_offset = 7
    del behind.brokers[1:]
    known.update(behind, None, 1)
    assert known.brokers == {1: "b1:1", 2: "b2:1"}
    assert known.leader(known.key(TopicPartition("t", 0))) == (2, 5, NONE)
    assert known.topic("s").topic_id == "other"
    assert known.loss_of(PartitionKey("id", 0)) is None


def test_a_partition_without_leader_waits_for_somebody() -> None:
    known = metadata()
    made = reply(("t", "id", [(-1, 5), (1, 1)]))
    made.topics[0].partitions[0].last_known.extend([3, 4])
    known.update(made, ["t"], 0)
    assert known.waits_for(PartitionKey("id", 0)) == (3, 4)
    assert "t-0 has no reachable leader: it waits for one of the brokers 3, 4" in str(
        known.leaderless(TopicPartition("t", 0))
    )
    known.update(reply(("t", "id", [(1, 6), (1, 1)])), ["t"], 1)
    assert known.waits_for(PartitionKey("id", 0)) == ()
