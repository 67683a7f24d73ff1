"""Topics that a client touches for the first time (client/metadata_updater U1 to U3)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pk import errors
from pk.client.accumulator import BufferPool, RecordAccumulator
from pk.client.metadata_updater import WATCHES
from pk.client.partitioner import Sticky
from pk.client.produce_engine import ProduceEngine
from pk.client.waiting import Monitor
from pk.clock import SystemClock
from pk.wire import pk_pb2 as wire
from tests.kit.fake_broker import FakeBroker
from tests.unit.client.test_produce_engine import Bench

TOPICS = 60


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, wire.MetadataRequest]]:
    """Return a list with node and request of every metadata call that names topics."""
    found: list[tuple[int, wire.MetadataRequest]] = []
    answer = FakeBroker._metadata

    def note(broker: FakeBroker, request: wire.MetadataRequest) -> wire.MetadataReply:
        if request.topics:
            found.append((broker.node, request))
        return answer(broker, request)

    monkeypatch.setattr(FakeBroker, "_metadata", note)
    return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(nodes=2, retry_backoff_ms=100)
    for number in range(TOPICS):
        made.cluster.create(f"t{number}")
    yield made
    made.close()


def test_each_new_topic_is_asked_for_at_once_and_alone(bench: Bench, requests: Any) -> None:
    """A client that touched 1,000 topics waited 100 ms for each of them."""

    async def story() -> float:
        await bench.engine.open("t0", 5_000)
        await bench.world.clock.sleep_ms(1_000)  # both brokers push now
        begin = bench.world.clock.monotonic_ms()
        for number in range(1, TOPICS):
            await bench.engine.open(f"t{number}", 5_000)
        return bench.world.clock.monotonic_ms() - begin

    assert bench.run(story) < TOPICS * 10
    named = sum(len(request.topics) for _, request in requests)
    assert named <= (TOPICS + 10) * WATCHES, "all topics were asked for again and again"
    for node in (1, 2):  # both push all of them
        watched: set[str] = set()
        for at, request in requests:
            if at == node:
                watched = (watched if request.adds else set()) | set(request.topics)
        assert watched == {f"t{number}" for number in range(TOPICS)}


def test_topics_that_wait_together_are_asked_for_together(bench: Bench, requests: Any) -> None:
    async def story() -> None:
        await bench.engine.open("t0", 5_000)
        await bench.world.clock.sleep_ms(1_000)
        requests.clear()
        await asyncio.gather(*[bench.engine.open(f"t{n}", 5_000) for n in range(1, TOPICS)])

    bench.run(story)
    assert len(requests) <= 2 * WATCHES


def test_a_broker_that_refused_new_topics_is_asked_for_all(bench: Bench, requests: Any) -> None:
    """Its pushes would lack them (client/metadata_updater U3)."""

    async def story() -> None:
        await bench.engine.open("t0", 5_000)
        await bench.world.clock.sleep_ms(1_000)
        requests.clear()
        bench.brokers[1].fail_calls.append(errors.InvalidRequest("watch all of them"))
        await bench.engine.open("t1", 5_000)
        await bench.world.clock.sleep_ms(2_000)

    bench.run(story)
    last = [request for node, request in requests if node == 1][-1]
    assert not last.adds
    assert sorted(last.topics) == ["t0", "t1"]


def test_a_new_topic_does_not_wait_for_the_next_refresh(bench: Bench, requests: Any) -> None:
    """Everything is wanted again, but not before the back-off is over."""

    async def story() -> float:
        await bench.engine.open("t0", 5_000)
        await bench.world.clock.sleep_ms(1_000)
        cluster = bench.engine.cluster
        cluster.metadata.backoff_ms = 500
        cluster.want_metadata()
        await bench.world.clock.sleep_ms(20)
        cluster.want_metadata()
        requests.clear()
        begin = bench.world.clock.monotonic_ms()
        await bench.engine.open("t1", 5_000)
        took = bench.world.clock.monotonic_ms() - begin
        await bench.world.clock.sleep_ms(1_000)
        return took

    assert bench.run(story) < 100
    assert any(not request.adds for _, request in requests), "the refresh was forgotten"


def test_a_topic_named_during_a_round_without_topics_is_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer, which covers no topic, met the wish for a round; no broker watched yet.  The
    topic waited for the refresh, which follows after minutes.
    """
    cluster, answer = bench.engine.cluster, FakeBroker._metadata
    named_at: list[float] = []

    def note(broker: FakeBroker, request: wire.MetadataRequest) -> wire.MetadataReply:
        if not request.topics and not named_at:  # the round is in progress
            named_at.append(bench.world.clock.monotonic_ms())
            cluster.watch_topics(["t1"])
        return answer(broker, request)

    monkeypatch.setattr(FakeBroker, "_metadata", note)

    async def story() -> float:
        await cluster.news(5_000)
        await bench.engine.open("t1", 5_000)
        return bench.world.clock.monotonic_ms() - named_at[0]

    assert bench.run(story) < 100


def test_a_look_costs_nothing_for_topics_without_records(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """client/accumulator I4: 1,000 first touches looked a million times at a topic's records."""
    looks: list[str] = []
    drain = ProduceEngine._drain

    def noted(engine: ProduceEngine, accumulator: RecordAccumulator, now_ms: int) -> None:
        looks.append(accumulator.topic)
        drain(engine, accumulator, now_ms)

    monkeypatch.setattr(ProduceEngine, "_drain", noted)

    async def story() -> None:
        for number in range(TOPICS):
            await bench.send(f"t{number}", b"value")
            await bench.flush(10_000)
        looks.clear()
        bench.engine.poke()

    bench.run(story)
    assert looks == []
    bench.run(lambda: _sent_twice(bench))
    assert set(looks) == {"t7", "t30"}
    assert len(looks) < 20


async def _sent_twice(bench: Bench) -> None:
    for topic in ("t30", "t7"):
        await bench.send(topic, b"value")
    await bench.flush(10_000)


def test_a_record_that_comes_while_the_loop_looks_is_not_forgotten() -> None:
    """client/accumulator I4: the loop removes an accumulator first, and looks then."""
    busy: dict[int, RecordAccumulator] = {}
    options = {"batch_size": 1_000, "max_request_size": 10_000, "linger_ms": 0}
    pool, clock = BufferPool(100_000), SystemClock()
    made = [
        RecordAccumulator(
            name, options, Sticky(1_000, random.Random(1)), pool, Monitor(), clock, busy, number
        )
        for number, name in enumerate("ab")
    ]
    for each in (made[1], made[0]):
        assert each.append(b"1", size=64) is not None
    assert busy == {0: made[0], 1: made[1]}
    assert busy.pop(0) is made[0]
    made[0].seal(0, ready=True)
    made[0].sealed.clear()
    assert made[0].append(b"2", size=64) is not None
    assert busy == {0: made[0], 1: made[1]}
