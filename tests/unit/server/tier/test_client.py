"""The broker's calls to the tier, and the time that each has for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.server.tier import client as tier_client
from pk.server.tier.client import TierClient
from pk.sim.world import SimWorld
from pk.types import PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, accept_stream, serve_control
from pk.world import Stream, StreamKind

ADDRESS = "broker:9293"
PARTITION: Any = SimpleNamespace(
    key=PartitionKey("id", 0), topic="t", log=SimpleNamespace(local_log_start=9)
)


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(1) as made:
        yield made


def test_the_time_a_call_waited_for_its_turn_is_not_the_tiers(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call carries the time that is left; otherwise the tier would answer after the caller has
    given up.
    """
    monkeypatch.setattr(tier_client, "CALLS_MAX", 1)
    told: list[int] = []

    async def answer(request: wire.TierFetchRequest, frame: frames.Frame) -> Any:
        told.append(frame.head.timeout_ms)
        await tier.clock.sleep_ms(300)
        return wire.TierFetchReply(next_offset=9)

    async def accept(kind: StreamKind, stream: Stream) -> None:
        if await accept_stream(stream, wire.HelloReply(protocol=PROTOCOL)) is not None:
            await serve_control(stream, {"tier_fetch": answer})

    async def calls() -> list[Any]:
        hello = wire.Hello(protocol=PROTOCOL)
        client = TierClient(broker, ADDRESS, hello, enabled=True, fetch_wait_ms=1_000)
        work = [client.fetch(PARTITION, 0, 1_000) for _ in range(5)]
        ends = await asyncio.gather(*work, return_exceptions=True)
        await client.close()
        return ends

    tier, broker = world.world_of("tier"), world.world_of("broker")
    world.spawn("tier", tier.network.listen(ADDRESS, accept))
    task = world.spawn("broker", calls())
    world.run_until(task.done)
    ends = task.result()
    assert [end[1] for end in ends[:3]] == [9, 9, 9]
    assert all(isinstance(end, errors.TierUnavailable) for end in ends[3:])
    first, second, third, fourth = told
    assert first == 1_000
    assert first - second >= 300
    assert second - third >= 300
    assert fourth < 100
