"""Where requests are encoded: small ones on the loop, others on threads, ahead of their turn."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pk.client import produce_engine
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


def test_small_requests_are_encoded_on_the_loop(bench: Any) -> None:
    b = bench(compression="lz4", linger_ms=0)
    b.cluster.create("t")
    at_once = b.encode_slowly(random.Random(1))

    async def work() -> None:
        for size in (10, 100_000, 10):
            await b.send("t", b"x" * size)
            await b.flush(60_000)

    b.run(work)
    assert [len(v) for _, _, v in b.cluster.log("t").rows()] == [10, 100_000, 10]
    assert len(at_once) == 1, "only the large request was worth a thread"


def test_a_small_request_behind_a_large_one_is_not_encoded_twice_at_once(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """client/produce_engine E2: a thread may encode it already, ahead of its turn."""
    b = bench(compression="lz4", linger_ms=0, batch_size=50_000)
    b.cluster.create("t")
    b.encode_slowly(random.Random(1), small_ms=200)
    begun: list[bool] = []
    real = produce_engine.ProduceConnection._encode

    def encode(self: Any, request: Any) -> Any:
        tasks = [batch.encoding for batch in request.batches if batch.encoding is not None]
        assert all(task.done() for task in tasks)
        begun.append(request.size < 100 and bool(tasks))
        return real(self, request)

    monkeypatch.setattr(produce_engine.ProduceConnection, "_encode", encode)

    async def work() -> None:
        for size in (49_900, 10, 49_990, 10):
            await b.send("t", b"x" * size)
        await b.flush(60_000)

    b.run(work)
    assert any(begun)
    assert [len(v) for _, _, v in b.cluster.log("t").rows()] == [49_900, 10, 49_990, 10]


def test_frames_are_encoded_ahead_and_sent_in_order(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce_engine, "INLINE_BYTES", 0)
    b = bench(compression="lz4", batch_size=64, linger_ms=0, max_in_flight=5)
    b.cluster.create("t")
    at_once = b.encode_slowly(random.Random(1))

    async def work() -> None:
        for i in range(100):
            await b.send("t", b"%03d" % i)
        await b.flush(60_000)

    b.run(work)
    assert [v for _, _, v in b.cluster.log("t").rows()] == [b"%03d" % i for i in range(100)]
    assert max(at_once) == produce_engine.AHEAD
