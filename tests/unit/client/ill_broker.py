"""A cluster of one broker that fails at a chosen step, and clients of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pk import AdminClient, Consumer, Producer
from pk.client import produce_engine, producer
from pk.settings import CONSUMER
from pk.sim.world import SimWorld
from pk.sparkconnector import connection, scan
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of
from pk.world import Disconnected
from tests.kit.fake_broker import FakeBroker, FakeCluster

#: Every time-out, and how long a call may last beyond it: for its error, and for closing.
LIMIT_MS = 500
BEYOND_MS = 300

_REPLIES = {"AddVoterRequest": "ChangeVotersReply", "RemoveVoterRequest": "ChangeVotersReply"}


def reply_to(request: Any) -> Any:
    """Return an empty message of the right kind."""
    name = request.DESCRIPTOR.name
    return getattr(wire, _REPLIES.get(name, name.removesuffix("Request") + "Reply"))()


class Ill:
    """A stream of a broker that works for a given number of steps."""

    def __init__(self, stream: Any, broker: IllBroker) -> None:
        self._stream = stream
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def recv(self) -> bytes | None:
        while True:
            raw = await self._stream.recv()
            step = self._broker.steps
            self._broker.steps += 1
            if raw is None or step < self._broker.well:
                return raw
            await self._misbehave(self._broker.mode, frames.decode(raw).head)

    async def _misbehave(self, mode: str, head: Any) -> None:
        if mode == "hangs":
            await asyncio.get_running_loop().create_future()
        elif mode == "dies":
            self._broker._break(self._stream)
            raise Disconnected("the broker died")
        elif mode == "garbage":
            await self._stream.send(b"\xff" * 32)
        else:
            body = getattr(head, head.WhichOneof("body"))
            if mode == "wrong kind":
                reply: Any = wire.UnregisterBrokerReply()
                if head.WhichOneof("body") == "unregister_broker":
                    reply = wire.MetadataReply()
            elif head.WhichOneof("body") == "hello":
                reply = wire.HelloReply()
            elif head.WhichOneof("body") in ("produce", "fetch"):
                reply = wire.ProduceReply() if body is head.produce else wire.FetchReply()
            else:
                reply = reply_to(body)
            answer = head_of(reply, correlation_id=head.correlation_id)
            await self._stream.send(frames.encode(answer))


class IllBroker(FakeBroker):
    """Answers every request, some of them with an empty reply, until it fails."""

    steps = 0
    well = 1 << 30
    mode = "hangs"

    async def _serve(self, kind: Any, stream: Any) -> None:
        await super()._serve(kind, Ill(stream, self))

    def _handlers(self) -> Any:
        async def empty(request: Any, frame: Any) -> Any:
            return reply_to(request)

        fields = wire.Head.DESCRIPTOR.oneofs_by_name["body"].fields
        return {field.name: empty for field in fields} | super()._handlers()


class SimMonitor:
    """A monitor whose wait runs the simulation."""

    def __init__(self, sim: SimWorld) -> None:
        self.sim = sim
        self.lock = threading.RLock()

    def notify_all(self) -> None:
        pass

    def wait_for(self, holds: Callable[[], Any], timeout_s: float | None = None) -> Any:
        until = self.sim.loop.time() + (60.0 if timeout_s is None else timeout_s)
        while not holds() and self.sim.loop.time() < until:
            self.sim.loop.run_for_ms(1)
        return holds()


class SimQueue:
    """A queue whose wait runs the simulation."""

    def __init__(self, sim: SimWorld) -> None:
        self.sim = sim
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self) -> Any:
        self.sim.run_until(lambda: bool(self.items))
        return self.items.pop(0)


class World:
    """A cluster of one failing broker, and a client of it."""

    def __init__(self, sim_thread: Any, patch: pytest.MonkeyPatch, mode: str, well: int) -> None:
        self.sim = SimWorld(1)
        self.cluster = FakeCluster()
        self.broker = IllBroker(self.cluster, self.sim.world_of("b1"), 1)
        self.sim.spawn("b1", self.broker.listen("b1:9292"))
        self.sim.loop.run_for_ms(10)
        self.cluster.create("t", 2)
        self.broker.mode, self.broker.well = mode, well
        thread = sim_thread(self.sim)
        patch.setattr(produce_engine, "Monitor", lambda: SimMonitor(self.sim))
        patch.setattr(producer, "monotonic_s", thread.now_s)
        patch.setattr(scan.queue, "SimpleQueue", lambda: SimQueue(self.sim))
        patch.setattr(
            connection.asyncio,
            "run_coroutine_threadsafe",
            lambda work, loop: self.sim.spawn(thread.name, work),
        )

    def after_ms(self, wait_ms: int, call: Callable[[], None]) -> None:
        async def later() -> None:
            await asyncio.sleep(wait_ms / 1000)
            call()

        self.sim.spawn("client", later())


TIMES = {"request_timeout_ms": 300, "retry_backoff_ms": 10, "retry_backoff_max_ms": 50}


def make_producer(**more: Any) -> Producer:
    return Producer(
        "b1:9292", max_block_ms=LIMIT_MS, delivery_timeout_ms=LIMIT_MS, linger_ms=0, **TIMES, **more
    )


def make_transactional() -> Producer:
    return make_producer(transactional_id="id")


def make_consumer() -> Consumer:
    return Consumer(
        "b1:9292", default_api_timeout_ms=LIMIT_MS, auto_offset_reset="earliest", **TIMES
    )


def make_admin() -> AdminClient:
    return AdminClient("b1:9292", request_timeout_ms=300)


def make_admin_of_controllers() -> AdminClient:
    return AdminClient(bootstrap_controllers="b1:9292", request_timeout_ms=300)


def make_spark() -> connection.ClusterClient:
    client = {**TIMES, "default_api_timeout_ms": LIMIT_MS}
    return connection.ClusterClient(connection._Process(), "b1:9292", CONSUMER.resolve(client))
