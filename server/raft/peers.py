"""Connections to the other nodes of the metadata quorum: sends messages, posts replies as events.

World-generic.  Each peer has one control connection, which is opened for the first message.  A
message is a call.  Its reply, or its failure, becomes an event of the machine.

Invariants
  N1  The number of running calls to a peer is bounded.  A further call is dropped, as the network
      could drop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from pk import errors, formats
from pk.running_since import RunningSince
from pk.server.raft import codec
from pk.server.raft.messages import (
    FetchReply,
    QuorumEpochReply,
    ReplyReceived,
    Unreachable,
    Voter,
    VoteReply,
)
from pk.server.raft.voters import Voters
from pk.tasks import TaskRegistry
from pk.types import NodeId
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Caller
from pk.wire.frames import Frame
from pk.world import World

CALLS_MAX = 16


class Peers:
    """Sends calls to the other nodes.

    `addresses`: HOST:PORT by node id.  `post`: receives the events.  `voters`: knows, and learns,
    the addresses of leaders that messages name.
    """

    def __init__(
        self,
        world: World,
        hello: wire.Hello,
        addresses: Callable[[], Mapping[NodeId, str]],
        post: Callable[[ReplyReceived | Unreachable], None],
        voters: Voters[Any],
        *,
        timeout_ms: int,
        format_level: int = formats.LEVEL,
    ) -> None:
        self._world = world
        self._hello = hello
        self._addresses = addresses
        self._post = post
        self._voters = voters
        self._timeout_ms = timeout_ms
        self._format_level = format_level  #: of `pk.format`, which fetches carry (rule Q6)
        self._running_since = RunningSince(world.clock)
        self._callers: dict[NodeId, Caller] = {}
        self._running: dict[NodeId, int] = {}
        self._tasks = TaskRegistry()

    def send(self, peer: Voter, message: Any) -> None:
        """Send `message`; post its reply or failure as an event."""
        if self._running.get(peer.node_id, 0) >= CALLS_MAX:
            return  # N1
        self._running[peer.node_id] = self._running.get(peer.node_id, 0) + 1
        task = self._tasks.spawn(self._call(peer, message))
        task.add_done_callback(lambda _: self._ended(peer.node_id))

    def _ended(self, node_id: NodeId) -> None:
        self._running[node_id] -= 1

    async def _call(self, peer: Voter, message: Any) -> None:
        caller = self._caller(peer.node_id)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await caller.connect()
        except (TimeoutError, errors.PkError) as failure:
            refused = isinstance(failure, errors.BrokerUnavailable)
            self._post(Unreachable(peer, refused=refused))
            return
        try:
            request = self._voters.naming(codec.encode(message))
            if isinstance(request, wire.QuorumFetchRequest):
                request.clock.CopyFrom(self._running_since.reading())
                request.format_level = formats.level_field(self._format_level)
            frame = await caller.call(request, timeout_ms=self._timeout_ms)
            body = getattr(frame.head, frame.head.WhichOneof("body") or "error")
            reply = codec.decode(body, frame.payload)
        except errors.PkError:
            self._post(Unreachable(peer))
            return
        if isinstance(reply, VoteReply | QuorumEpochReply | FetchReply):
            self._voters.learn(body)
            self._post(ReplyReceived(reply))

    async def ask(self, peer: Voter, request: Message, timeout_ms: int) -> Frame:
        """Make a call that is not a message of the machine.

        Raises the typed error of the reply, or the error of the connection.
        """
        return await self._caller(peer.node_id).call(request, timeout_ms=timeout_ms)

    def _caller(self, node_id: NodeId) -> Caller:
        found = self._callers.get(node_id)
        if found is None:
            world = self._world

            def address() -> str:
                known = self._addresses().get(node_id)
                if known is None:
                    raise errors.BrokerUnavailable(f"no address is known of controller {node_id}")
                return known

            found = Caller(world.network, world.clock, address, self._hello)
            self._callers[node_id] = found
        return found

    async def idle(self) -> None:
        """Return once no call is running."""
        while self._tasks:
            await self._tasks.wait()

    async def close(self) -> None:
        """Cancel the running calls."""
        await self._tasks.close()
        for caller in self._callers.values():
            await caller.close()
