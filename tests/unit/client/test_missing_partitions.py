"""A partition number that a topic does not have: the error comes soon, and names the existing
partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pk import TopicPartition, errors
from pk.client.endings import given_up, no_partition
from pk.client.network_client import UNKNOWN_TOPIC_MS
from tests.unit.client.ill_broker import BEYOND_MS, World, make_admin, make_consumer, make_producer

T7 = TopicPartition("t", 7)
LONG_S = 60.0


@pytest.fixture
def world(sim_thread: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(sim_thread, monkeypatch, "hangs", 1 << 30)
    yield made
    made.sim.close()


CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "end_offsets": (make_consumer, lambda c: c.end_offsets([T7], LONG_S)),
    "offsets_for_times": (make_consumer, lambda c: c.offsets_for_times({T7: 0}, LONG_S)),
    "list_offsets": (make_admin, lambda a: a.list_offsets({T7: "latest"}, timeout_s=LONG_S)),
    "delete_records": (make_admin, lambda a: a.delete_records({T7: 0}, timeout_s=LONG_S)),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_it_is_said_soon_and_nobody_is_told_to_create_the_topic(world: World, name: str) -> None:
    make, call = CALLS[name]
    client = make()
    begun = world.sim.loop.time()
    with pytest.raises(errors.UnknownTopicOrPartition) as told:
        call(client)
    assert (world.sim.loop.time() - begun) * 1000 <= UNKNOWN_TOPIC_MS + BEYOND_MS
    assert told.value.message == "t has no partition 7: it has 2 partitions, 0 to 1"
    assert told.value.acts == "user"
    client.close()


def test_a_partition_that_was_just_added_is_found(world: World) -> None:
    with make_consumer() as consumer:
        assert consumer.end_offsets([TopicPartition("t", 1)], LONG_S) == {("t", 1): 0}
        world.after_ms(UNKNOWN_TOPIC_MS // 2, lambda: world.cluster.create("t", 8))
        assert consumer.end_offsets([T7], LONG_S) == {T7: 0}


def test_a_producer_says_it_at_once(world: World) -> None:
    with make_producer() as producer:
        producer.send("t", b"v", partition=1).result(1)
        begun = world.sim.loop.time()
        with pytest.raises(errors.InvalidPartitions, match="it has 2 partitions, 0 to 1"):
            producer.send("t", b"v", partition=7)
        assert world.sim.loop.time() == begun


def test_a_reader_hears_it(world: World) -> None:
    with make_consumer() as consumer:
        consumer.assign([T7])
        with pytest.raises(errors.UnknownTopicOrPartition) as told:
            consumer.poll(10.0)
        assert told.value.message == "t has no partition 7: it has 2 partitions, 0 to 1"


def test_a_topic_of_one_partition() -> None:
    assert no_partition("t", 1, 1).message == "t has no partition 1: it has one partition, 0"


@pytest.mark.parametrize(
    ("after_ms", "said"),
    [
        (1_500, "b1: no answer (tried for 1500 ms)"),
        (5_000, "b1: no answer within 3000 ms (tried for 5000 ms)"),
    ],
)
def test_an_error_does_not_contradict_itself(after_ms: int, said: str) -> None:
    """The attempt may have begun before the call that waited for it."""
    error = errors.RequestTimedOut("b1: no answer within 3000 ms")
    assert given_up(error, after_ms).message == said
