"""Handles requests of the other nodes of the metadata quorum, on their control streams.

World-generic.  The handler gives a message to the machine.  If the answer names a range of the log,
the handler reads the records.

Invariants
  A1  Records are sent only while this node still leads the epoch of the answer.  Afterwards another
      leader's records may be at the same offsets.
  A2  A leader stops naming a snapshot that it cannot send.  The node that asks is behind the start
      of the log, and could only ask for the same snapshot again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pk import errors
from pk.server.raft import codec
from pk.server.raft.fetch_source import FetchSource
from pk.server.raft.machine import Quorum
from pk.server.raft.messages import FetchReply, FetchStatus, RequestReceived
from pk.server.raft.voters import Voters
from pk.wire import frames
from pk.wire.calls import Handler


class RaftRequestHandler:
    """Handlers of the quorum's requests.

    `ask`: gives a request to the machine and returns its answer.  `renew`: posts the present state
    of the log to the machine; no truncation runs while this node leads.
    """

    def __init__(
        self,
        quorum: Quorum,
        source: FetchSource,
        voters: Voters[Any],
        *,
        ask: Callable[[RequestReceived], None],
        renew: Callable[[], None],
    ) -> None:
        self._quorum = quorum
        self._source = source
        self._voters = voters
        self._ask = ask
        self._renew = renew

    def handlers(self) -> dict[str, Handler]:
        names = ("quorum_vote", "quorum_begin", "quorum_end", "quorum_fetch")
        return {**dict.fromkeys(names, self._answer), "fetch_snapshot": self._answer_piece}

    async def _answer_piece(self, request: Any, _frame: frames.Frame) -> Any:
        try:
            reply, piece = await self._source.piece(request)
        except errors.SnapshotNotFound:
            if self._quorum.leader_state is not None:
                self._renew()  # A2
            raise
        return reply, (piece,)

    async def _answer(self, request: Any, _frame: frames.Frame) -> Any:
        quorum = self._quorum
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        message: Any = codec.decode(request)
        self._voters.learn(request)
        self._ask(RequestReceived(future, message))
        reply = await future
        payload: bytes = b""
        if isinstance(reply, FetchReply) and reply.status is FetchStatus.DATA:
            filled, payload = await self._source.filled(reply)
            if payload and (quorum.leader_state is None or quorum.epoch != reply.epoch):  # A1
                raise errors.ControllerUnavailable("the leader changed meanwhile")
            reply = filled
        return self._voters.naming(codec.encode(reply)), (payload,)
