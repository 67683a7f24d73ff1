"""The control streams of one broker to the others.

World-generic.  A coordinator asks the leaders of partitions to write markers, and a leader asks the
coordinator about a producer.  Each of them calls a broker by its id.  A call to the own broker goes
to the same handler as a call from another broker, without the network.

Invariants
  B4  There is at most one stream per broker of the metadata image.  It belongs to one registration
      and one address of the peer: a call after either has changed opens a new stream.
  B5  At most `CALLS_MAX` calls to one broker wait for their reply.  One more is refused with
      `ThrottledError`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import Environment
from pk.tasks import TaskRegistry
from pk.types import NodeId
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import CALLS_MAX, Caller, Handler, head_of


class _Channel:
    """The stream to one registration of a broker."""

    def __init__(self, session: tuple[str, int], caller: Caller | None) -> None:
        self.session = session  #: the address and the broker epoch
        self.caller = caller  #: None = the own broker
        self.calls = 0  #: that wait for their reply


class BrokerChannels:
    """Calls brokers by their id.

    `handlers`: the requests that brokers send each other, by their names in the protocol.  Calls to
    the own broker use them directly; control streams offer them to proven brokers only
    (handlers/peers.py).  Parts add their handlers before the broker serves.
    """

    def __init__(self, env: Environment, hello: wire.Hello, metadata: MetadataCache) -> None:
        self.handlers: dict[str, Handler] = {}
        self._env = env
        self._hello = hello
        self._metadata = metadata
        self._own = _Channel(("", 0), None)
        self._channels: dict[NodeId, _Channel] = {}
        self._tasks = TaskRegistry(partial(env.bug, "closing a control stream"))
        self._closed = False

    async def call(self, node_id: NodeId, request: Message, timeout_ms: int) -> Any:
        """Send `request` to a broker; return the body of its reply.

        Raises the typed error of the reply, `BrokerUnavailable`, `RequestTimedOut`,
        `ThrottledError`.  After the first two of these the peer may have carried the request out.
        """
        channel = self._own if node_id == self._env.node_id else self._channel(node_id)
        if self._closed:
            raise errors.BrokerUnavailable("this broker is shutting down")
        if channel.calls >= CALLS_MAX:
            raise errors.ThrottledError(f"{CALLS_MAX} calls to broker {node_id} wait")  # B5
        channel.calls += 1
        try:
            if channel.caller is None:
                return await self._call_own(request, timeout_ms)
            frame = await channel.caller.call(request, timeout_ms=timeout_ms)
        finally:
            channel.calls -= 1
        return getattr(frame.head, frame.head.WhichOneof("body") or "error")

    async def _call_own(self, request: Message, timeout_ms: int) -> Any:
        head = head_of(request, timeout_ms=timeout_ms)
        name = head.WhichOneof("body") or ""
        handler = self.handlers.get(name)
        if handler is None:
            raise errors.UnsupportedFeature(f"this server does not answer {name!r}")
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                reply = await handler(request, frames.Frame(head, memoryview(b"")))
        except TimeoutError:
            raise errors.RequestTimedOut(f"no reply to {name} within {timeout_ms} ms") from None
        except errors.PkError:
            raise
        except Exception as bug:
            self._env.bug(f"handling {name}", bug)
            raise errors.InternalError(f"{name}: {bug!r}") from bug
        return reply[0] if isinstance(reply, tuple) else reply

    def _channel(self, node_id: NodeId) -> _Channel:
        """Return the channel to the current registration of a broker (B4)."""
        session = self._session(node_id)
        if session is None:
            raise errors.BrokerUnavailable(f"broker {node_id} is not registered")
        channel = self._channels.get(node_id)
        if channel is None or channel.session != session:
            self._drop_outdated()
            world, address = self._env.world, session[0]
            caller = Caller(world.network, world.clock, address, self._hello)
            channel = self._channels[node_id] = _Channel(session, caller)
        return channel

    def _session(self, node_id: NodeId) -> tuple[str, int] | None:
        broker = self._metadata.image.brokers.get(node_id)
        address = self._metadata.address_of(node_id)
        return None if broker is None or not address else (address, broker.broker_epoch)

    def _drop_outdated(self) -> None:
        """Close the streams to former registrations and addresses; their calls fail."""
        for node_id, channel in list(self._channels.items()):
            if channel.session != self._session(node_id):
                del self._channels[node_id]
                assert channel.caller is not None
                self._tasks.spawn(channel.caller.close())

    async def close(self) -> None:
        """Close all streams.  Calls in flight fail with `BrokerUnavailable`."""
        self._closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            assert channel.caller is not None
            await channel.caller.close()
        await self._tasks.close()
