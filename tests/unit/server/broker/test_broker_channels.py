"""Calls of one broker to the others, and to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pk import errors, settings, tracing
from pk.server.broker.broker_channels import BrokerChannels
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import BrokerState
from pk.server.replica.context import Environment
from pk.server.replica.metrics import BrokerMetrics
from pk.sim.world import SimWorld
from pk.wire import pk_pb2 as wire
from pk.wire.calls import CALLS_MAX, PROTOCOL, accept_stream, serve_control
from pk.world import Stream, StreamKind

QUESTION = wire.WriteTxnMarkersRequest()


class Brokers:
    """Broker 1 with its channels, and brokers that answer with their id."""

    def __init__(self, direct: dict[int, str] | None = None) -> None:
        self.world = SimWorld(3)
        self.mine = self.world.world_of("broker-1")
        self.metadata = MetadataCache(
            1, "incarnation-1", {}, tier_enabled=False, peer_addresses=direct or {}
        )
        self.bugs: list[BaseException] = []
        env = Environment(
            self.mine,
            1,
            settings.SERVER.resolve({}),
            BrokerMetrics(tracing.Metrics()),
            lambda where, bug: self.bugs.append(bug),
            lambda event, **facts: None,
        )
        hello = wire.Hello(protocol=PROTOCOL, node_id=1, incarnation_id="incarnation-1")
        self.channels = BrokerChannels(env, hello, self.metadata)
        self.hellos: list[tuple[int, wire.Hello]] = []  #: (broker, hello) of every accepted stream
        self.gate: asyncio.Event | None = None  #: replies wait for it

    def register(self, node_id: int, epoch: int = 1, address: str = "") -> None:
        self.metadata.image.brokers[node_id] = BrokerState(
            broker_id=node_id, broker_epoch=epoch, incarnation_id=f"incarnation-{node_id}",
            boot_id="", directory_ids=(), address=address or f"broker-{node_id}:9292", rack="",
        )  # fmt: skip

    async def listen(self, node_id: int, address: str = "") -> None:
        async def answer(request: Any, _frame: Any) -> wire.WriteTxnMarkersReply:
            if self.gate is not None:
                await self.gate.wait()
            reply = wire.WriteTxnMarkersReply()
            reply.results.add(marker=node_id)
            return reply

        async def serve(_kind: StreamKind, stream: Stream) -> None:
            said = await accept_stream(stream, wire.HelloReply(protocol=PROTOCOL))
            assert said is not None
            self.hellos.append((node_id, said))
            await serve_control(stream, {"write_txn_markers": answer})

        network = self.world.world_of(f"broker-{node_id}").network
        await network.listen(address or f"broker-{node_id}:9292", serve)

    async def ask(self, node_id: int) -> int:
        reply = await self.channels.call(node_id, QUESTION, 1_000)
        assert isinstance(reply, wire.WriteTxnMarkersReply)
        return int(reply.results[0].marker)

    def run(self, story: Callable[[Brokers], Awaitable[None]]) -> None:
        self.world.run(story(self))
        assert not self.world.loop.failures
        self.world.close()


def test_brokers_are_called_by_their_id_over_one_stream_each() -> None:
    """broker/broker_channels B4: the hello proves this broker (rule L17)."""

    async def story(brokers: Brokers) -> None:
        for each in (2, 3):
            brokers.register(each)
            await brokers.listen(each)
        asked = [brokers.ask(each) for each in (2, 3, 2, 3)]
        assert await asyncio.gather(*asked) == [2, 3, 2, 3]
        assert sorted(node for node, _ in brokers.hellos) == [2, 3]
        assert {said.incarnation_id for _, said in brokers.hellos} == {"incarnation-1"}
        await brokers.channels.close()

    Brokers().run(story)


def test_the_address_of_the_settings_has_precedence() -> None:
    """`peer_addresses` names the address to which this node connects instead."""

    async def story(brokers: Brokers) -> None:
        brokers.register(2, address="advertised:9292")
        await brokers.listen(2, "direct:9292")
        assert await brokers.ask(2) == 2
        await brokers.channels.close()

    Brokers({2: "direct:9292"}).run(story)


def test_another_registration_or_address_gets_another_stream() -> None:
    """broker/broker_channels B4: and streams to brokers that left are closed."""

    async def story(brokers: Brokers) -> None:
        for each in (2, 3):
            brokers.register(each)
            await brokers.listen(each)
            await brokers.ask(each)
        brokers.register(2, epoch=9)
        assert await brokers.ask(2) == 2
        assert len(brokers.hellos) == 3
        await brokers.listen(2, "moved:9292")
        brokers.register(2, epoch=9, address="moved:9292")
        del brokers.metadata.image.brokers[3]
        assert await brokers.ask(2) == 2
        assert len(brokers.hellos) == 4
        assert list(brokers.channels._channels) == [2]
        with pytest.raises(errors.BrokerUnavailable, match="not registered"):
            await brokers.ask(3)
        await brokers.channels.close()

    Brokers().run(story)


def test_what_a_call_raises() -> None:
    """A peer that cannot be reached, that is silent, or that refuses."""

    async def story(brokers: Brokers) -> None:
        with pytest.raises(errors.BrokerUnavailable, match="broker 2 is not registered"):
            await brokers.ask(2)
        brokers.register(2)
        with pytest.raises(errors.BrokerUnavailable):
            await brokers.ask(2)
        await brokers.listen(2)
        brokers.gate = asyncio.Event()
        with pytest.raises(errors.RequestTimedOut):
            await brokers.ask(2)
        with pytest.raises(errors.UnsupportedFeature):
            await brokers.channels.call(2, wire.AddPartitionsToTxnRequest(), 1_000)
        await brokers.channels.close()

    Brokers().run(story)


def test_calls_to_one_broker_are_bounded() -> None:
    """broker/broker_channels B5: calls to another broker and later calls go on."""

    async def story(brokers: Brokers) -> None:
        brokers.register(2)
        await brokers.listen(2)
        brokers.gate = asyncio.Event()
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(brokers.ask(2)) for _ in range(CALLS_MAX)]
        await brokers.mine.clock.sleep_ms(100)
        with pytest.raises(errors.ThrottledError):
            await brokers.ask(2)
        brokers.gate.set()
        assert await asyncio.gather(*asked) == [2] * CALLS_MAX
        assert await brokers.ask(2) == 2
        await brokers.channels.close()

    Brokers().run(story)


def test_a_call_to_the_own_broker_uses_no_network() -> None:
    """Its refusals, its silence and its bugs look like those of another broker."""

    async def story(brokers: Brokers) -> None:
        seen: list[tuple[Any, int]] = []

        async def answer(request: Any, frame: Any) -> Any:
            seen.append((request, frame.head.timeout_ms))
            if len(seen) == 2:
                raise errors.NotCoordinator("broker 2 is")
            if len(seen) == 3:
                await asyncio.Event().wait()
            if len(seen) == 4:
                raise ZeroDivisionError
            reply = wire.WriteTxnMarkersReply()
            reply.results.add(marker=1)
            return reply

        with pytest.raises(errors.UnsupportedFeature):
            await brokers.ask(1)
        brokers.channels.handlers["write_txn_markers"] = answer
        assert await brokers.ask(1) == 1
        assert seen == [(QUESTION, 1_000)]
        for kind in (errors.NotCoordinator, errors.RequestTimedOut, errors.InternalError):
            with pytest.raises(kind):
                await brokers.ask(1)
        assert [type(bug) for bug in brokers.bugs] == [ZeroDivisionError]
        await brokers.channels.close()

    Brokers().run(story)


def test_a_close_fails_calls_in_flight_and_refuses_later_ones() -> None:
    async def story(brokers: Brokers) -> None:
        brokers.register(2)
        await brokers.listen(2)
        brokers.gate = asyncio.Event()
        asked = asyncio.get_running_loop().create_task(brokers.ask(2))
        await brokers.mine.clock.sleep_ms(100)
        await brokers.channels.close()
        with pytest.raises(errors.BrokerUnavailable):
            await asked
        for each in (1, 2):
            with pytest.raises(errors.BrokerUnavailable, match="shutting down"):
                await brokers.ask(each)

    Brokers().run(story)
