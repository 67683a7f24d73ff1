"""What a consumer does about records that cannot be deserialised (client/deserialization)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pk import Consumer, DeadLetterTopic, Producer, Record, TopicPartition, errors
from tests.unit.client.test_consumer import T0, T1, World, seen


@pytest.fixture
def world(sim_thread: Any) -> Iterator[World]:
    made = World(sim_thread)
    yield made
    made.close()


def consumer(world: World, **given: Any) -> Consumer:
    options = {"auto_offset_reset": "earliest", "value_deserializer": "json", **given}
    made = world.consumer(**options)
    made.assign([T0])
    return made


def test_the_error_names_the_record_and_its_part(world: World) -> None:
    world.put(T0, b"0", b"{")
    reader = consumer(world)
    assert [r.value for r in reader.poll(1.0)] == [0]
    for _ in range(2):
        with pytest.raises(errors.SerializationError, match="t-0 at offset 1: the value") as told:
            reader.poll(1.0)
        where = {name: told.value.details[name] for name in ("topic", "partition", "offset")}
        assert where == {"topic": "t", "partition": "0", "offset": "1"}
        assert told.value.details["part"] == "value"
    assert reader.position(T0) == 1
    keyed = consumer(world, key_deserializer=lambda topic, key: {}[key])
    with pytest.raises(errors.SerializationError, match="the key cannot") as told:
        keyed.poll(1.0)
    assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.parametrize("max_poll_records", [1, 2, 500])
def test_skipped_records_are_left_out_and_passed(
    world: World, max_poll_records: int, caplog: pytest.LogCaptureFixture
) -> None:
    world.put(T0, b"{", b"1", b"{", b"{", b"4", b"{")
    reader = consumer(world, on_deserialize_error="skip", max_poll_records=max_poll_records)
    found: list[Record] = []
    with caplog.at_level(logging.WARNING, "pk.client"):
        while reader.position(T0) < 6:
            found += reader.poll(0.5)
    assert [(r.offset, r.value) for r in found] == [(1, 1), (4, 4)]
    assert reader._deserializer.skipped == 4
    assert "t-0 left out, the first: t-0 at offset 0" in caplog.text


def test_a_poll_goes_on_behind_a_batch_of_skipped_records(world: World) -> None:
    world.put(T0, b"{", b"{")
    world.put(T0, b"2")
    reader = consumer(world, on_deserialize_error="skip", max_poll_records=2)
    assert [r.offset for r in reader.poll(5.0)] == [2]
    assert reader.poll(0) == []


def test_a_function_gets_the_raw_record_and_may_replace_it(world: World) -> None:
    seen: list[tuple[Any, ...]] = []

    def decide(record: Record, error: errors.SerializationError) -> Record | None:
        seen.append((record.offset, record.value, error.details["offset"]))
        if record.value == b"{":
            return None
        return msgspec.structs.replace(record, value="mended")

    world.put(T0, b"0", b"{", b"x", b"3")
    reader = consumer(world, on_deserialize_error=decide)
    assert [(r.offset, r.value) for r in reader.poll(1.0)] == [(0, 0), (2, "mended"), (3, 3)]
    assert seen == [(1, b"{", "1"), (2, b"x", "2")]


def test_a_function_that_raises_gets_the_record_again(world: World) -> None:
    asked: list[int] = []

    def decide(record: Record, error: errors.SerializationError) -> None:
        asked.append(record.offset)
        if len(asked) < 3:
            raise OSError("the dead-letter store is away")

    world.put(T0, b"{", b"1")
    reader = consumer(world, on_deserialize_error=decide)
    for _ in range(2):
        with pytest.raises(OSError, match="is away"):
            reader.poll(1.0)
        assert reader.position(T0) == 0
    assert [r.value for r in reader.poll(1.0)] == [1]
    assert asked == [0, 0, 0]


def test_a_function_that_returns_something_else_is_refused(world: World) -> None:
    world.put(T0, b"{")
    reader = consumer(world, on_deserialize_error=lambda record, error: record.value)
    with pytest.raises(errors.InvalidOption, match="it returns a Record to be returned"):
        reader.poll(1.0)


@pytest.mark.parametrize(
    ("error", "skips"),
    [
        (errors.RegistryError("it is away"), False),
        (errors.RegistryError("no such id", status="404"), True),
        (errors.RegistryError("wrong password", status="401"), False),
        (errors.TierUnavailable("later"), False),
        (ZeroDivisionError(), True),
    ],
)
def test_only_what_is_wrong_with_the_record_is_skipped(
    world: World, error: Exception, skips: bool
) -> None:
    """client/deserialization N1: a registry that is away must not cost a single record."""

    def decode(topic: str, data: bytes | None) -> Any:
        if data == b"1":
            raise error
        return json.loads(data or b"null")

    world.put(T0, b"1", b"2")
    reader = consumer(world, value_deserializer=decode, on_deserialize_error="skip")
    if skips:
        assert [r.value for r in reader.poll(1.0)] == [2]
        return
    with pytest.raises(type(error), match="t-0 at offset 0: "):
        reader.poll(1.0)
    assert reader.position(T0) == 0


@pytest.mark.parametrize("given", ["ignore", None, 1, "RAISE"])
def test_other_policies_are_refused(given: Any) -> None:
    with pytest.raises(errors.InvalidOption, match='is "raise", "skip", a function'):
        Consumer("h:1", on_deserialize_error=given)


def test_a_dead_letter_topic_needs_a_plain_producer_and_another_topic(world: World) -> None:
    for given in (None, "p"):
        with pytest.raises(errors.InvalidOption, match="without serializers"):
            DeadLetterTopic("dlq", given)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidTopic):
        DeadLetterTopic("a/b", None)  # type: ignore[arg-type]
    with Producer("b1:9292") as plain, Producer("b1:9292", value_serializer="json") as json_only:
        with pytest.raises(errors.InvalidOption, match="without serializers"):
            DeadLetterTopic("dlq", json_only)
        world.put(T0, b"{")
        reader = consumer(world, on_deserialize_error=DeadLetterTopic("t", plain))
        with pytest.raises(errors.InvalidOption, match="is the dead-letter topic itself"):
            reader.poll(1.0)


def test_other_partitions_are_not_held_up(world: World) -> None:
    world.put(T0, b"{")
    world.put(T1, b"1")
    reader = consumer(world)
    reader.assign([T0, T1])
    found: list[tuple[int, int]] = []
    raised = 0
    for _ in range(6):
        try:
            found += [(r.partition, r.offset) for r in reader.poll(0.3)]
        except errors.SerializationError:
            raised += 1
            reader.pause(TopicPartition("t", 0))
    assert found == [(1, 0)]
    assert raised == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.RegistryError, errors.RegistryError),
        (ValueError, errors.SerializationError),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("way", ["poll", "next"])
def test_whatever_a_deserialiser_raises_costs_no_record(
    world: Any, error: Any, told: Any, way: str
) -> None:
    """The registry is away, a function fails, or Ctrl-C: the rows are returned later."""
    broken = [True]

    def deserialise(topic: str, data: bytes | None) -> bytes | None:
        if data == b"2" and broken[0]:
            raise error("not now")
        return data

    world.put(T1, b"1")
    world.put(T0, b"0", b"1", b"2", b"3")
    world.put(T1, *[b"x"] * 30)  # so that poll does not wait for the skipped records
    consumer = world.consumer(
        auto_offset_reset="earliest", value_deserializer=deserialise, max_poll_records=6
    )
    consumer.assign([T0, T1])
    world.pass_ms(500)
    found: list[Any] = []
    raised = 0
    while len(found) < 12:
        try:
            found += consumer.poll(1.0) if way == "poll" else [next(consumer)]
        except told:
            raised += 1
            broken[0] = raised < 3
    assert raised == 3, "each time until it is mended"
    for place in (T0, T1):
        offsets = [record.offset for record in found if record.partition == place.partition]
        assert offsets == list(range(len(offsets)))


def test_a_deserialiser_that_can_again_is_not_asked_for_an_empty_rest(world: Any) -> None:
    """It failed for the whole list and not for its rows: the registry is back."""
    failures = [errors.SerializationError("not now")]

    def deserialise(topic: str, data: bytes | None) -> bytes | None:
        if failures:
            raise failures.pop()
        return data

    world.put(T0, b"0", b"1")
    consumer = world.consumer(auto_offset_reset="earliest", value_deserializer=deserialise)
    consumer.assign([T0])
    assert seen(consumer.poll(1.0)) == [(0, 0), (0, 1)]
    assert consumer.position(T0) == 2
