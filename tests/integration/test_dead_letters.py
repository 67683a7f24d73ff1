"""Records that a consumer cannot deserialise go to a dead-letter topic of a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pk import AdminClient, Consumer, DeadLetterTopic, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration


def test_records_that_cannot_be_deserialised_go_to_a_dead_letter_topic(
    tmp_path: Path,
) -> None:
    with EmbeddedServer(tmp_path / "pk") as server:
        _dead_letters(server, "flights")
        _no_dead_letter_topic(server, "flights")


def _dead_letters(server: EmbeddedServer, topic: str) -> None:
    place = TopicPartition(topic, 0)
    letters = f"{topic}.dlq"
    with Producer(server.address) as producer, AdminClient(server.address) as admin:
        admin.create_topic(topic, partitions=1)
        admin.create_topic(letters, partitions=1)
        for value in (b"1", b"{", b"3", b"\xff"):
            producer.send(topic, value, b"key", {"h": b"1"}, partition=0, timestamp_ms=1234)
        producer.flush()
        with Consumer(
            server.address,
            auto_offset_reset="earliest",
            value_deserializer="json",
            on_deserialize_error=DeadLetterTopic(letters, producer),
        ) as consumer:
            consumer.assign([place])
            found: list[Any] = []
            while consumer.position(place) < 4:
                found += consumer.poll(10)
        assert [(r.offset, r.value) for r in found] == [(0, 1), (2, 3)]
        with Consumer(server.address, auto_offset_reset="earliest") as reader:
            reader.assign([TopicPartition(letters, 0)])
            dead: list[Any] = []
            while len(dead) < 2:
                dead += reader.poll(10)
    assert [(r.key, r.value, r.timestamp_ms) for r in dead] == [
        (b"key", b"{", 1234),
        (b"key", b"\xff", 1234),
    ]
    headers = dict(dead[0].headers)
    assert headers["h"] == b"1"
    assert headers["__connect.errors.topic"] == topic.encode()
    assert headers["__connect.errors.partition"] == b"0"
    assert headers["__connect.errors.offset"] == b"1"
    assert b"Error" in headers["__connect.errors.exception.class.name"]
    assert b"not JSON" in headers["__connect.errors.exception.message"]


def _no_dead_letter_topic(server: EmbeddedServer, topic: str) -> None:
    """The poll names the missing topic, long before `send` would give up, and goes on once it is
    there.
    """
    with (
        Producer(server.address, delivery_timeout_ms="1h", max_block_ms="1h") as producer,
        Consumer(
            server.address,
            auto_offset_reset="earliest",
            value_deserializer="json",
            on_deserialize_error=DeadLetterTopic("later.dlq", producer),
        ) as consumer,
    ):
        consumer.assign([TopicPartition(topic, 0)])
        assert [record.value for record in consumer.poll(10)] == [1]
        with pytest.raises(errors.UnknownTopicOrPartition, match=r"later\.dlq"):
            consumer.poll(10)
        with AdminClient(server.address) as admin:
            admin.create_topic("later.dlq", partitions=1)
        assert [record.value for record in consumer.poll(10)] == [3]
