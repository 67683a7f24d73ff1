"""Futures that coroutines and executors wait for, and the metrics of a consumer, on a real
server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("waits") / "pk") as running:
        with AdminClient(running.address) as admin:
            for topic in ("awaited", "lagging"):
                admin.create_topic(topic, partitions=1)
        yield running


def test_a_coroutine_awaits_sends(server: EmbeddedServer) -> None:
    async def sends(producer: Producer) -> list[Any]:
        futures = [producer.send("awaited", b"%d" % number) for number in range(100)]
        stored = [await future for future in futures]
        batch = pa.record_batch([pa.array([b"a", b"b"])], names=["value"])
        stored += await producer.send_batch("awaited", batch)
        again = await asyncio.wait_for(futures[0], 10)
        assert again == stored[0]
        one, two = await asyncio.gather(
            producer.send("awaited", b"x"), producer.send("awaited", b"y")
        )
        assert two.offset == one.offset + 1
        with pytest.raises(errors.RecordTooLarge):
            await producer.send("awaited", bytes(9 << 20))
        return stored

    with Producer(server.address, max_request_size="16MiB") as producer:
        stored = asyncio.run(sends(producer))
    assert [each.offset for each in stored[:100]] == list(range(100))
    assert stored[100].base_offset == 100


def test_an_await_that_is_cancelled_leaves_the_record(server: EmbeddedServer) -> None:
    async def cancelled(producer: Producer) -> int:
        future = producer.send("awaited", b"late")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.0001)
        return (await future).offset

    with Producer(server.address, linger_ms=200) as producer:
        assert asyncio.run(cancelled(producer)) >= 0


def test_executors_wait_for_sends(server: EmbeddedServer) -> None:
    with Producer(server.address) as producer:
        futures = [producer.send("awaited", b"v").as_concurrent() for _ in range(10)]
        done, open_ = concurrent.futures.wait(futures, timeout=30)
        assert not open_
        assert len({each.result().offset for each in done}) == 10

        async def wrapped() -> int:
            future = producer.send("awaited", b"w").as_concurrent()
            return (await asyncio.wrap_future(future)).offset

        assert asyncio.run(wrapped()) > 0
        own = [producer.send("awaited", b"x") for _ in range(2)]
        for wait in (
            concurrent.futures.wait,
            lambda some: next(concurrent.futures.as_completed(some)),
        ):
            with pytest.raises(TypeError, match=r"future\.as_concurrent\(\)"):
                wait(own)


#: The producer is never closed.  It computes, and connects, when no executor takes work any more.
LEFT = """
import sys
from pk import Producer
producer = Producer(sys.argv[1], compression="zstd", linger_ms=60_000)
for number in range(20_000):
    producer.send("left", b"%d" % number * 200)
    if number == 10_000 and sys.argv[2] == "warm":
        producer.flush(60)
raise SystemError("mine")
"""


@pytest.mark.parametrize("warm", ["cold", "warm"])
def test_records_of_a_producer_that_was_not_closed_are_stored(
    server: EmbeddedServer, warm: str
) -> None:
    with AdminClient(server.address) as admin:
        admin.create_topic("left", partitions=1)
        ran = subprocess.run(
            [sys.executable, "-c", LEFT, server.address, warm],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.stderr.count("Traceback") == 1, ran.stderr
        assert ran.stderr.endswith("SystemError: mine\n")
        with Consumer(server.address) as consumer:
            place = TopicPartition("left", 0)
            assert consumer.end_offsets([place]) == {place: 20_000}
        admin.delete_topic("left")


def test_a_partition_that_does_not_exist_is_named(server: EmbeddedServer) -> None:
    with Consumer(server.address, request_timeout_ms=1_000) as consumer:
        consumer.assign([TopicPartition("awaited", 77)])
        with pytest.raises(errors.UnknownTopicOrPartition, match="awaited has no partition 77"):
            consumer.poll(60)


def test_a_consumer_tells_its_lag_and_counts(server: EmbeddedServer) -> None:
    place = TopicPartition("lagging", 0)
    with Producer(server.address) as producer:
        for number in range(10):
            producer.send("lagging", b"x" if number == 3 else b"%d" % number)
        producer.flush()
    options: dict[str, Any] = {"value_deserializer": "json", "on_deserialize_error": "skip"}
    with Consumer(
        server.address, auto_offset_reset="earliest", max_poll_records=5, **options
    ) as consumer:
        consumer.assign([place])
        told = consumer.metrics()["records_lag"]
        assert told in ({place: None}, {place: 10})  # before and after the first fetch's answer
        assert [record.offset for record in consumer.poll(10)] == [0, 1, 2, 4]
        assert consumer.current_lag(place) == 5
        told = consumer.metrics()
        assert told["records_lag_max"] == 5
        assert told["records_consumed_total"] == 5
        assert told["records_skipped_total"] == 1
        assert told["polls_total"] == 1
        assert len(consumer.poll(10)) == 5
        assert consumer.current_lag(place) == 0
        assert consumer.current_lag(TopicPartition("lagging", 1)) is None
        consumer.seek(place, 8)
        assert consumer.current_lag(place) == 2


def test_a_producer_counts_outcomes_and_what_waits(server: EmbeddedServer) -> None:
    with Producer(server.address, linger_ms=60_000) as producer:
        none = {"records_failed_total": 0, "requests_in_flight": 0}
        assert none.items() <= producer.metrics().items()
        futures = [producer.send("awaited", b"v") for _ in range(10)]
        while not producer.metrics()["buffer_used_bytes"]:
            assert not futures[0].done()
        producer.flush()
        told = producer.metrics()
        assert told["records_acknowledged_total"] == 10
        assert told["batches_acknowledged_total"] == 1
        assert told["records_failed_total"] == told["requests_in_flight"] == 0
