"""`AsyncProducer` and `AsyncConsumer` on a real server: the loop never waits for the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest

from pk import AdminClient, AsyncConsumer, AsyncProducer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("aio") / "pk") as running:
        yield running


@pytest.fixture
def topic(server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name)
    with AdminClient(server.address) as admin:
        admin.create_topic(name, partitions=1)
    return name


@asynccontextmanager
async def ticking() -> AsyncIterator[list[int]]:
    """Count the turns that the loop has for others."""
    turns = [0]

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0.001)

    task = asyncio.create_task(tick())
    try:
        yield turns
    finally:
        task.cancel()


async def read(consumer: AsyncConsumer, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += await consumer.poll(10)
    return found


def test_what_coroutines_send_a_group_reads(server: EmbeddedServer, topic: str) -> None:
    async def story() -> None:
        async with AsyncProducer(server.address, value_serializer="json") as producer:
            stored = await asyncio.gather(
                *(producer.send_and_wait(topic, number) for number in range(200))
            )
            assert producer.metrics()["records_acknowledged_total"] == 200
        async with AsyncProducer(server.address) as producer:
            rows = pa.record_batch([pa.array([b"200", b"201"])], names=["value"])
            await (await producer.send_batch(topic, rows))
        assert sorted(each.offset for each in stored) == list(range(200))
        given: dict[str, Any] = {"group_id": topic, "auto_offset_reset": "earliest"}
        async with AsyncConsumer(server.address, value_deserializer="json", **given) as consumer:
            await consumer.subscribe(topic)
            found = [record.value for record in await read(consumer, 202)]
            assert sorted(found) == list(range(202))
            await consumer.commit()
            place = TopicPartition(topic, 0)
            assert await consumer.committed(place) == 202
            assert await consumer.current_lag(place) == 0
            await consumer.seek(place, 200)
            async for record in consumer:
                assert record.value == 200
                break

    asyncio.run(story())


def test_the_loop_turns_while_a_call_waits(server: EmbeddedServer, topic: str) -> None:
    """Polls without records, a full buffer, a topic that does not exist."""

    async def story() -> None:
        async with ticking() as turns, AsyncConsumer(server.address) as consumer:
            await consumer.subscribe(topic)
            assert await consumer.poll(0.5) == []
            assert turns[0] > 10
            async with AsyncProducer(server.address, buffer_memory=1 << 20) as producer:
                futures = [await producer.send(topic, bytes(100_000)) for _ in range(50)]
                await producer.flush()
                assert all(future.done() for future in futures)
            before = turns[0]
            async with AsyncProducer(server.address, max_block_ms="1s") as producer:
                with pytest.raises(errors.UnknownTopicOrPartition):
                    await producer.send("nope", b"v")
            assert turns[0] > before + 10

    asyncio.run(story())


def test_a_cancelled_poll_costs_no_record(server: EmbeddedServer, topic: str) -> None:
    """client/aio N1: the next poll returns what a cancelled one got."""

    async def story() -> None:
        async with AsyncProducer(server.address) as producer:
            given: dict[str, Any] = {"auto_offset_reset": "earliest", "max_poll_records": 7}
            async with AsyncConsumer(server.address, **given) as consumer:
                await consumer.assign([TopicPartition(topic, 0)])
                found: list[int] = []
                sent = cancelled = 0
                while len(found) < 300:
                    if sent < 300:
                        await producer.send_and_wait(topic, b"%d" % sent)
                        sent += 1
                    try:
                        async with asyncio.timeout(0.0005 if sent % 2 else 0.01):
                            found += [record.offset for record in await consumer.poll(5)]
                    except TimeoutError:
                        cancelled += 1
                assert found == list(range(300))
                assert cancelled

    asyncio.run(story())


def test_a_transaction_is_whole_or_nothing(server: EmbeddedServer, topic: str) -> None:
    async def broken(producer: AsyncProducer) -> None:
        async with producer.transaction():
            await producer.send(topic, b"dropped")
            raise ValueError("mine")

    async def story() -> None:
        async with AsyncProducer(server.address, transactional_id=topic) as producer:
            await producer.init_transactions()
            async with producer.transaction():
                await producer.send(topic, b"kept")
            with pytest.raises(ValueError, match="mine"):
                await broken(producer)
            async with producer.transaction():
                await producer.send(topic, b"kept, too")
        async with AsyncConsumer(server.address, auto_offset_reset="earliest") as consumer:
            await consumer.assign([TopicPartition(topic, 0)])
            assert [record.value for record in await read(consumer, 2)] == [b"kept", b"kept, too"]

    asyncio.run(story())


def test_a_closed_client_says_so(server: EmbeddedServer, topic: str) -> None:
    async def story() -> None:
        consumer, producer = AsyncConsumer(server.address), AsyncProducer(server.address)
        await consumer.subscribe(topic)
        reading = asyncio.create_task(read_all(consumer))
        await asyncio.sleep(0.05)
        for client in (consumer, producer):
            await client.close()
            await client.close()
        assert await asyncio.wait_for(reading, 30) == []
        with pytest.raises(errors.ClosedError):
            await consumer.poll(1)
        with pytest.raises(errors.ClosedError):
            await producer.send(topic, b"v")

    async def read_all(consumer: AsyncConsumer) -> list[Any]:
        return [record async for record in consumer]

    asyncio.run(story())
