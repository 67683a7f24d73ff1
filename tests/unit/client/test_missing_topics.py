"""Records sent to a topic that does not exist at the moment: it may be created, or come back
(client/produce_engine E4).
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pk import errors
from pk.client.record_arguments import normalise
from pk.client.record_set import RecordSet, RecordSlice
from tests.unit.client.test_produce_engine import Bench


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def deleted(b: Bench, topic: str = "t") -> None:
    """Delete the topic, and wait until the producer knows."""
    await b.send(topic, b"first")
    await b.flush(10_000)
    b.cluster.delete(topic)
    b.engine.cluster.want_metadata()
    await b.world.clock.sleep_ms(200)
    assert topic not in b.engine.cluster.metadata.topics


async def leave(b: Bench, value: bytes) -> Any:
    """`send` of an open door: the topic is not looked at."""
    accumulator = b.engine.accumulators["t"]
    future = accumulator.append(value, size=64)
    b.engine.poke()
    return future


async def leave_batch(b: Bench, value: bytes) -> RecordSet:
    rows = pa.record_batch([pa.array([value], pa.binary())], names=["value"])
    accumulator = b.engine.accumulators["t"]
    taken = accumulator.new_set()
    taken.count = 1
    taken.size = 64
    taken.split([RecordSlice(taken, 0, 0, rows.num_rows, normalise(rows, 1)[0], 64)])
    assert accumulator.append_set(taken)
    b.engine.poke()
    return taken


def test_a_topic_that_comes_back_gets_what_was_sent_meanwhile_in_order(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")

    async def work() -> None:
        await deleted(b)
        futures = []
        for number in range(20):
            if number % 5 == 4:
                await leave_batch(b, b"%d" % number)
            else:
                futures.append(await leave(b, b"%d" % number))
            await b.world.clock.sleep_ms(50)
        assert not any(future.done() for future in futures)
        b.cluster.create("t")
        await leave(b, b"20")
        await b.flush(10_000)
        assert {future.exception(0) for future in futures} == {None}

    b.run(work)
    assert [value for _, _, value in b.cluster.rows("t")] == [b"%d" % n for n in range(21)]


@pytest.mark.parametrize(("block_ms", "delivery_ms"), [(3_000, 60_000), (60_000, 4_000)])
def test_a_topic_that_does_not_come_back_is_told_when_time_is_up(
    bench: Any, block_ms: int, delivery_ms: int
) -> None:
    b = bench(max_block_ms=block_ms, delivery_timeout_ms=delivery_ms, request_timeout_ms=1_000)
    b.cluster.create("t")
    limit = min(block_ms, delivery_ms)

    async def work() -> None:
        await deleted(b)
        begun = b.world.clock.monotonic_ms()
        future = await leave(b, b"1")
        taken = await leave_batch(b, b"2")
        await b.world.clock.sleep_ms(limit - 200)
        assert not future.done()
        await b.flush(10_000)
        error = future.exception(0)
        assert type(error) is errors.UnknownTopicOrPartition
        assert "create it first" in error.message
        assert error.acts == "user"
        assert isinstance(taken.outcome(None), errors.UnknownTopicOrPartition)
        assert limit <= b.world.clock.monotonic_ms() - begun < limit + 100

    b.run(work)


def test_what_waits_for_a_topic_fails_when_the_producer_closes(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")

    async def work() -> None:
        await deleted(b)
        future = await leave(b, b"1")
        taken = await leave_batch(b, b"2")
        await b.engine.close()
        assert isinstance(future.exception(0), errors.ClosedError)
        assert isinstance(taken.outcome(None), errors.ClosedError)

    b.run(work)


def test_a_topic_that_is_created_late_is_waited_for(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        async def create() -> None:
            await b.world.clock.sleep_ms(20_000)
            b.cluster.create("t")

        b.sim.spawn("b1", create())
        await b.engine.open("t", 60_000, 60_000)
        with pytest.raises(errors.UnknownTopicOrPartition, match="create it first"):
            await b.engine.open("u", 30_000, 30_000)

    b.run(work)
    assert 50_000 <= b.sim.loop.now_us / 1000 < 51_000
