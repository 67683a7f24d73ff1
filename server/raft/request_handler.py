"""What the other nodes of the metadata quorum ask of this one, on their control streams.

World-generic.  A message goes to the machine; what its answer promises of the log is read here.

Invariants
  A1  records go out only while this node still leads the epoch it promised them in: later, those of
      another leader may stand where they stood
  A2  a leader does not go on naming a snapshot that it could not hand out: who asks is behind its
      log, and could do nothing but ask for the same one again
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
    """See the module.  `ask` takes what the machine is asked; `renew` has it hear of the log, which
    nobody cuts while this node leads.
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
