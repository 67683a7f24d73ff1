"""The client's loop thread beside the threads of an application, with a real server."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("threads") / "pk") as running:
        yield running


@pytest.fixture
def topic(server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    name = re.sub("[^a-z0-9_]+", "-", request.node.name)[:100].strip("-")
    with AdminClient(server.address) as admin:
        admin.create_topic(name, partitions=3)
    return name


def test_a_callback_must_not_block(server: EmbeddedServer, topic: str) -> None:
    told: list[Any] = []
    with Producer(server.address) as producer:

        def callback(_metadata: Any, _error: Any) -> None:
            try:
                producer.flush(1)
            except errors.InvalidRequest as refusal:
                told.append(refusal)

        producer.send(topic, b"x", on_delivery=callback).result(10)
        producer.flush(10)
    assert len(told) == 1


def test_flush_returns_when_the_last_callback_has(server: EmbeddedServer, topic: str) -> None:
    told: list[Any] = []

    def callback(*each: Any) -> None:
        block_s(0)  # lets the thread go on that flush has woken, if it has
        told.append(each)

    with Producer(server.address) as producer:
        for _ in range(20):
            told.clear()
            for _ in range(200):
                producer.send(topic, b"x" * 100, on_delivery=callback)
            producer.flush(30)
            assert len(told) == 200


def test_a_callback_may_send_and_what_it_raises_harms_nobody(
    server: EmbeddedServer, topic: str
) -> None:
    sent: list[Any] = []
    with Producer(server.address) as producer:

        def callback(_metadata: Any, _error: Any) -> None:
            sent.append(producer.send(topic, b"second"))
            raise SystemExit(1)

        first = [producer.send(topic, b"first", on_delivery=callback) for _ in range(100)]
        producer.flush(10)
        assert len(sent) == 100, "flush waits for the callbacks of what was sent before"
        producer.flush(10)
        assert all(future.done() for future in [*first, *sent])


def test_what_must_not_be_called_in_a_callback_changes_nothing_there(
    server: EmbeddedServer, topic: str
) -> None:
    refused: list[Any] = []
    with Producer(server.address) as producer, Consumer(server.address) as consumer:

        def callback(_metadata: Any, _error: Any) -> None:
            for call in (producer.close, consumer.close, producer.flush):
                try:
                    call()
                except errors.InvalidRequest as refusal:
                    refused.append(refusal)

        producer.send(topic, b"x", on_delivery=callback)
        producer.flush(10)
        assert len(refused) == 3
        producer.send(topic, b"y").result(10)
        consumer.assign([])
        assert consumer.assignment() == []


@pytest.mark.parametrize("turn", range(10))
def test_threads_that_close_and_send_at_once_end_with_typed_errors(
    server: EmbeddedServer, topic: str, turn: int
) -> None:
    producer = Producer(server.address)
    producer.send(topic, b"first").result(10)
    begun = threading.Barrier(4)
    futures: list[Any] = []
    failures: list[BaseException] = []

    def work(function: Any) -> None:
        begun.wait()
        try:
            function()
        except errors.ClosedError:
            pass
        except BaseException as failure:
            failures.append(failure)

    def send() -> None:
        while True:
            futures.append(producer.send(topic, b"x" * 100))

    def close() -> None:
        producer.close(1.0)

    threads = [threading.Thread(target=work, args=(each,)) for each in (send, send, close, close)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert all(future.done() for future in futures)


def test_a_seek_right_behind_an_assignment_is_never_too_late(
    server: EmbeddedServer, topic: str
) -> None:
    """The loop's thread handles the partitions at once; the application's seek comes later."""
    places = [TopicPartition(topic, partition) for partition in range(3)]
    with Producer(server.address) as producer:
        for place in places:
            for i in range(10):
                producer.send(topic, b"%d" % i, partition=place.partition)
    for policy in ("none", "earliest", "latest"):
        with Consumer(server.address, auto_offset_reset=policy) as consumer:
            for turn in range(60):
                consumer.assign(places)
                for place in places:
                    consumer.seek(place, turn % 10)
                assert [consumer.position(place) for place in places] == [turn % 10] * 3
                found: list[Any] = []
                while len(found) < 3 * (10 - turn % 10):
                    found += consumer.poll(10)
                for place in places:
                    mine = [r.offset for r in found if r.partition == place.partition]
                    assert mine == list(range(turn % 10, 10))
                consumer.assign([])
