"""A consumer is used by one thread at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pk import errors
from tests.unit.client.test_consumer import T0, T1, World


@pytest.fixture
def world(sim_thread: Any) -> Any:
    made = World(sim_thread)
    yield made
    made.close()


def test_a_second_thread_is_refused_by_the_rule(world: World) -> None:
    """While a deserialiser runs, its consumer is in use, and the same thread may call the consumer
    again.
    """
    refused: list[BaseException] = []

    def elsewhere() -> None:
        calls = (lambda: consumer.poll(0), lambda: next(consumer), lambda: consumer.assign([]))
        for call in calls:
            try:
                call()
            except BaseException as error:
                refused.append(error)

    def deserialised(data: bytes) -> bytes:
        other = threading.Thread(target=elsewhere, name="other")
        other.start()
        other.join()
        consumer.pause(T1)
        return data

    world.put(T0, b"v")
    consumer = world.consumer(auto_offset_reset="earliest", value_deserializer=deserialised)
    consumer.assign([T0, T1])
    assert [record.value for record in consumer.poll(5)] == [b"v"]
    assert {type(error) for error in refused} == {errors.InvalidRequest}
    assert len(refused) == 3
    assert "thread other" in str(refused[0])
    assert "one thread at a time" in str(refused[0])
    assert consumer.assignment() == [T0, T1]
    other = threading.Thread(target=lambda: consumer.seek_to_beginning(T0))
    other.start()
    other.join()
    assert [record.offset for record in consumer.poll(5)] == [0], "one after the other is allowed"
