"""A broker with as many client streams as it serves (rule L17): other brokers get theirs, and
clients get an error that says why they do not.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors, limits
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, open_stream
from pk.world import Stream, StreamKind
from tests.kit.cluster import Kit

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Flood:
    """A client that opens control streams to broker 1."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._world = kit.sim.world_of("flood")
        self.streams: list[Stream] = []

    async def _open(self) -> None:
        hello = wire.Hello(client_id="flood", protocol=PROTOCOL)
        stream, _ = await open_stream(self._world.network, "b1:9292", StreamKind.CONTROL, hello)
        self.streams.append(stream)

    async def _until_refused(self) -> errors.PkError:
        for _ in range(1_000):
            try:
                await self._open()
            except errors.PkError as refusal:
                return refusal
        raise AssertionError("a thousand streams were opened")

    def until_refused(self) -> errors.PkError:
        found: Any = self._kit.done("flood", self._until_refused())
        assert isinstance(found, errors.PkError)
        return found

    def open(self) -> None:
        self._kit.done("flood", self._open())

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.streams.clear()


def test_a_flood_of_clients_leaves_streams_to_brokers(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = make(1)
    kit.create("flights")
    kit.soon(lambda: kit.in_sync("flights"))
    monkeypatch.setattr(limits, "STREAMS_MAX", 100)
    flood = Flood(kit)
    refusal = flood.until_refused()
    assert isinstance(refusal, errors.ThrottledError), refusal
    assert "broker 1 serves 100 streams" in refusal.message
    assert kit.events("streams_refused") == 1
    kit.kill(2)
    kit.soon(lambda: kit.in_sync("flights", 2))
    assert isinstance(flood.until_refused(), errors.ThrottledError)  # takes the places of broker 2
    kit.boot(2)
    kit.soon(lambda: kit.in_sync("flights"), 60_000)
    assert isinstance(flood.until_refused(), errors.ThrottledError)
    assert kit.events("streams_refused") == 1, "one line of the log until the streams are fewer"
    flood.close()
    kit.wait(1_000)
    flood.open()
    flood.until_refused()
    assert kit.events("streams_refused") == 2


def test_peers_that_say_nothing_are_bounded_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have HELLO_TIMEOUT_MS to say who they are."""
    monkeypatch.setattr(limits, "STREAMS_MAX", 50)
    monkeypatch.setattr(limits, "STREAMS_RESERVED", 20)
    kit = make(2)
    kit.create("flights")  # broker 1 serves
    world = kit.sim.world_of("silent")

    async def silent() -> int:
        opened = [await world.network.connect("b1:9292", StreamKind.CONTROL) for _ in range(100)]
        await world.clock.sleep_ms(1_000)
        count = len(kit.brokers[1]._streams)
        for stream in opened:
            stream.close()
        return count

    assert kit.done("silent", silent()) == 70


def test_a_stream_keeps_the_handlers_that_its_peer_uses(make: Any) -> None:
    """server/handlers/control: all handlers of a stream would take more than all else of it."""
    kit = make(3)
    kit.create("flights")
    node, world = kit.brokers[1], kit.sim.world_of("client")
    served: list[Any] = []
    original = node._streams_of.handler

    def noted(*given: Any) -> Any:
        served.append(original(*given))
        return served[-1]

    node._streams_of.handler = noted

    async def asked() -> None:
        hello = wire.Hello(client_id="client", protocol=PROTOCOL)
        caller = Caller(world.network, world.clock, "b1:9292", hello)
        for _ in range(3):
            await caller.call(wire.MetadataRequest(), timeout_ms=5_000)
            await caller.call(wire.FindCoordinatorRequest(key="g"), timeout_ms=5_000)
        await caller.close()

    kit.done("client", asked())
    (mine,) = [each for each in served if "metadata" in getattr(each, "_used", ())]
    assert set(mine._used) == {"metadata", "find_coordinator"}
    assert mine.get("nonsense") is None
