"""Requests and replies over a control stream, in the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pk import errors
from pk.sim.world import SimWorld
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import (
    PROTOCOL,
    Caller,
    accept_stream,
    common_protocol,
    head_of,
    open_stream,
    serve_control,
)
from pk.world import Stream, StreamKind, World

ADDRESS = "server:1"
Story = Callable[["Scene"], Coroutine[Any, Any, None]]


class Scene:
    """A server whose handlers a test replaces, and a client."""

    def __init__(self, seed: int = 1) -> None:
        self.sim = SimWorld(seed)
        self.server: World = self.sim.world_of("server")
        self.client: World = self.sim.world_of("client")
        self.handlers: dict[str, Any] = {}
        self.bugs: list[str] = []
        self.pushes: list[frames.Frame] = []
        self.breaks = 0
        self.streams: list[Stream] = []
        self.calls_max = 256

    async def serve(self, _kind: StreamKind, stream: Stream) -> None:
        reply = wire.HelloReply(cluster_id="c", protocol=PROTOCOL, role="broker")
        if await accept_stream(stream, reply) is not None:
            self.streams.append(stream)
            await serve_control(
                stream,
                self.handlers,
                on_error=lambda where, _bug: self.bugs.append(where),
                calls_max=self.calls_max,
            )

    def caller(self, **hello: Any) -> Caller:
        said = wire.Hello(**{"protocol": PROTOCOL, "cluster_id": "c", **hello})
        return Caller(
            self.client.network,
            self.client.clock,
            ADDRESS,
            said,
            on_push=self.pushes.append,
            on_break=self._broke,
        )

    def _broke(self) -> None:
        self.breaks += 1


def play(story: Story) -> None:
    scene = Scene()

    async def main() -> None:
        listener = await scene.server.network.listen(ADDRESS, scene.serve)
        await story(scene)
        await listener.close(0)

    with scene.sim as sim:
        sim.run(main())
        assert not sim.loop.failures


ASK = wire.InitProducerIdRequest()


def test_calls_share_a_stream_and_replies_may_overtake() -> None:
    async def story(scene: Scene) -> None:
        async def init(request: Any, frame: frames.Frame) -> Any:
            await scene.server.clock.sleep_ms(1_000 - request.producer_id)
            reply = wire.InitProducerIdReply(producer_id=request.producer_id)
            return reply, (b"got ", bytes(frame.payload))

        scene.handlers["init_producer_id"] = init
        caller = scene.caller()
        order: list[int] = []

        async def one(n: int) -> None:
            request = wire.InitProducerIdRequest(producer_id=n)
            frame = await caller.call(request, timeout_ms=5_000, payload=(b"<", b"%d>" % n))
            assert frame.head.init_producer_id_reply.producer_id == n
            assert bytes(frame.payload) == b"got <%d>" % n
            order.append(n)

        await asyncio.gather(*(one(n * 100) for n in range(5)))
        assert order == [400, 300, 200, 100, 0]
        assert len(scene.streams) == 1
        assert caller.peer is not None
        assert caller.peer.role == "broker"
        await caller.close()
        with pytest.raises(errors.ClosedError):
            await caller.call(ASK, timeout_ms=100)

    play(story)


def test_errors_arrive_as_their_class() -> None:
    async def story(scene: Scene) -> None:
        async def refuse(_request: Any, _frame: Any) -> Any:
            raise errors.InvalidTopic("no", topic="t")

        async def bug(_request: Any, _frame: Any) -> Any:
            raise ZeroDivisionError("oops")

        scene.handlers |= {"init_producer_id": refuse, "metadata": bug}
        caller = scene.caller()
        with pytest.raises(errors.InvalidTopic, match="no") as caught:
            await caller.call(ASK, timeout_ms=1_000)
        assert caught.value.details == {"topic": "t"}
        with pytest.raises(errors.InternalError, match="oops"):
            await caller.call(wire.MetadataRequest(), timeout_ms=1_000)
        with pytest.raises(errors.UnsupportedFeature, match="list_offsets"):
            await caller.call(wire.ListOffsetsRequest(), timeout_ms=1_000)
        assert scene.bugs == ["handling metadata"]
        await caller.close()

    play(story)


def test_deadlines_and_late_replies() -> None:
    """wire/calls A1: a reply for which no caller waits any more is dropped; the stream
    continues.
    """

    async def story(scene: Scene) -> None:
        async def slow(request: Any, _frame: Any) -> Any:
            await scene.server.clock.sleep_ms(request.producer_id)
            return wire.InitProducerIdReply(producer_id=request.producer_id)

        scene.handlers["init_producer_id"] = slow
        caller = scene.caller()
        started = scene.client.clock.monotonic_ms()
        with pytest.raises(errors.RequestTimedOut):
            await caller.call(wire.InitProducerIdRequest(producer_id=300), timeout_ms=100)
        assert scene.client.clock.monotonic_ms() - started == 100
        await scene.client.clock.sleep_ms(500)
        frame = await caller.call(wire.InitProducerIdRequest(producer_id=7), timeout_ms=100)
        assert frame.head.init_producer_id_reply.producer_id == 7
        assert len(scene.streams) == 1
        await caller.close()

    play(story)


def test_a_break_fails_calls_in_flight_and_the_next_call_reconnects() -> None:
    async def story(scene: Scene) -> None:
        async def slow(_request: Any, _frame: Any) -> Any:
            await scene.server.clock.sleep_ms(200)
            return wire.InitProducerIdReply()

        scene.handlers["init_producer_id"] = slow
        caller = scene.caller()
        task = asyncio.get_running_loop().create_task(caller.call(ASK, timeout_ms=5_000))
        await scene.client.clock.sleep_ms(50)
        scene.sim.network.break_streams("client", "server")
        with pytest.raises(errors.BrokerUnavailable):
            await task
        assert scene.breaks == 1
        assert not caller.connected
        await caller.call(ASK, timeout_ms=5_000)
        assert len(scene.streams) == 2
        scene.sim.network.refuse(ADDRESS)
        scene.sim.network.break_streams("client", "server")
        await scene.client.clock.sleep_ms(1)
        with pytest.raises(errors.BrokerUnavailable, match="refused"):
            await caller.call(ASK, timeout_ms=5_000)
        await caller.close()
        assert scene.breaks == 2

    play(story)


def test_the_hello_is_checked() -> None:
    async def story(scene: Scene) -> None:
        with pytest.raises(errors.ClusterIdMismatch):
            await scene.caller(cluster_id="other").connect()
        with pytest.raises(errors.UnsupportedFeature):
            await scene.caller(protocol=99, protocol_min=99).connect()
        newer = await scene.caller(protocol=99).connect()
        assert newer.protocol == PROTOCOL, "the highest number that both speak"
        for first in (b"", b"\xff\xff\xff\x7fjunk", frames.encode(head_of(ASK))):
            stream = await scene.client.network.connect(ADDRESS, StreamKind.CONTROL)
            await stream.send(first)
            raw = await stream.recv()
            assert raw is not None
            assert frames.decode(raw).head.HasField("error")
            assert await stream.recv() is None
            stream.close()

    play(story)


def test_who_says_no_hello_does_not_keep_the_stream() -> None:
    # wire/calls A3

    async def story(scene: Scene) -> None:
        stream = await scene.client.network.connect(ADDRESS, StreamKind.CONTROL)
        async with asyncio.timeout(11):
            assert await stream.recv() is None
        assert not scene.streams

    play(story)


def test_pushes_reach_the_caller() -> None:
    async def story(scene: Scene) -> None:
        caller = scene.caller()
        await caller.connect()
        await scene.client.clock.sleep_ms(5)
        await scene.streams[0].send(frames.encode(head_of(wire.MetadataReply(cluster_id="x"))))
        await scene.client.clock.sleep_ms(5)
        assert [push.head.metadata_reply.cluster_id for push in scene.pushes] == ["x"]
        await caller.close()

    play(story)


def test_requests_in_flight_are_bounded() -> None:
    # wire/calls A2

    async def story(scene: Scene) -> None:
        running, most = 0, 0

        async def count(_request: Any, _frame: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await scene.server.clock.sleep_ms(10)
            running -= 1
            return wire.InitProducerIdReply()

        scene.handlers["init_producer_id"] = count
        scene.calls_max = 3
        caller = scene.caller()
        await asyncio.gather(*(caller.call(ASK, timeout_ms=5_000) for _ in range(20)))
        assert most == 3
        await caller.close()

    play(story)


def test_replies_to_who_does_not_read_do_not_pile_up() -> None:
    """wire/calls A2: a reply that waits for its stream is a request in flight."""

    async def story(scene: Scene) -> None:
        handled = 0
        big = bytes(1 << 20)

        async def count(_request: Any, _frame: Any) -> Any:
            nonlocal handled
            handled += 1
            return wire.InitProducerIdReply(), (big,)

        scene.handlers["init_producer_id"] = count
        scene.calls_max = 3
        stream, _ = await open_stream(
            scene.client.network, ADDRESS, StreamKind.CONTROL, wire.Hello(protocol=PROTOCOL)
        )

        async def ask() -> None:
            for number in range(1, 201):
                await stream.send(frames.encode(head_of(ASK, correlation_id=number)))

        asking = asyncio.ensure_future(ask())
        await scene.client.clock.sleep_ms(10_000)
        assert scene.calls_max < handled < 40
        answered = 0
        while answered < 200:
            assert await stream.recv() is not None
            answered += 1
        await asking
        assert handled == 200
        stream.close()

    play(story)


def test_what_is_closed_while_it_connects_leaves_no_stream() -> None:
    async def story(scene: Scene) -> None:
        asked: list[Any] = []

        async def answer(request: Any, _frame: Any) -> Any:
            asked.append(request)
            return wire.InitProducerIdReply()

        scene.handlers["init_producer_id"] = answer
        caller = scene.caller()
        calls = [asyncio.ensure_future(caller.call(ASK, timeout_ms=5_000)) for _ in range(2)]
        await asyncio.sleep(0)
        await caller.close()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found] == [errors.BrokerUnavailable] * 2
        assert not caller.connected
        assert asked == []

    play(story)


@pytest.mark.parametrize(
    ("peer", "mine", "common"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((0, 2), (1, 3), 2)],
)
def test_the_highest_common_protocol_is_spoken(
    peer: tuple[int, int], mine: tuple[int, int], common: int
) -> None:
    hello = wire.Hello(protocol_min=peer[0], protocol=peer[1])
    assert common_protocol(hello, *mine) == common


@pytest.mark.parametrize(("peer", "mine"), [((3, 4), (1, 2)), ((1, 2), (3, 4)), ((0, 9), (1, 3))])
def test_no_common_protocol_is_refused_with_both_ranges(
    peer: tuple[int, int], mine: tuple[int, int]
) -> None:
    hello = wire.Hello(protocol_min=peer[0], protocol=peer[1])
    with pytest.raises(errors.UnsupportedFeature, match="in common"):
        common_protocol(hello, *mine)
