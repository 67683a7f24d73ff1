"""Requests to the coordinator of one transactional id or group, whichever broker it is.

World-generic.

Invariants
  K1  Every call ends by its time-out: with the reply, with the coordinator's refusal, or with
      `RequestTimedOut`, which says what it waited for.
  K2  A request without an answer is sent again.  So only requests that may be repeated are sent
      with this class: each names the batch that it is about, and the coordinator answers a
      repetition like the first one, or adds a participant, which no commit names.
"""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.backoff import Backoff, client_jitter
from pk.client.network_client import NetworkClient
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

#: The key types of FindCoordinator.
GROUP, TRANSACTION = 0, 1
#: The waits before the next attempt: markers are written within milliseconds.
BACKOFF_MS = (20, 1_000)
#: How long before its time-out a call raises the coordinator's retriable error.
LAST_WORD_MS = 50
#: These errors come from the coordinator itself; after any other, it is looked up again.
_SAME_COORDINATOR = (
    errors.ConcurrentTransactions,
    errors.CoordinatorLoading,
    errors.RebalanceInProgress,
)


class CoordinatorCalls:
    """Calls for the transactional id or the group `key`.

    attempt_ms: how long one attempt may take
    key_type: TRANSACTION or GROUP
    """

    def __init__(
        self,
        world: World,
        cluster: NetworkClient,
        key: str,
        attempt_ms: int,
        key_type: int = TRANSACTION,
    ) -> None:
        self._world = world
        self._cluster = cluster
        self.key = key
        self._attempt_ms = attempt_ms
        self._key_type = key_type
        self._address: str | None = None

    async def call(
        self, request: Message, timeout_ms: int, final: tuple[type[errors.PkError], ...] = ()
    ) -> Any:
        """Return the coordinator's reply.  Raises its refusal, or `RequestTimedOut` (K1).

        final: retriable errors that are raised at once.
        """
        problem: errors.PkError | None = None
        backoff: Backoff | None = None
        self._cluster.start()  # a coordinator that leaves the metadata holds up no call
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while True:
                    try:
                        return await self._attempt(request)
                    except errors.RetriableError as failure:
                        if isinstance(failure, final):
                            raise
                        problem = failure
                        if not isinstance(failure, _SAME_COORDINATOR):
                            self._address = None
                    backoff = backoff or Backoff(BACKOFF_MS, client_jitter(self._world.rng))
                    await self._world.clock.sleep_ms(backoff.next_ms())
        except TimeoutError:
            self._address = None  # it may be the address that did not answer
            name = request.DESCRIPTOR.name
            why = "" if problem is None else f" ({type(problem).__name__}: {problem.message})"
            raise errors.RequestTimedOut(
                f"{name} of {self.key!r}: no outcome within {timeout_ms} ms{why}"
            ) from problem

    async def call_of_one(self, request: Message, timeout_ms: int) -> Any:
        """Return the reply to a request about this group alone.  If it has a list of groups, that
        list has one.

        Raises the error of the group; retriable ones are retried.
        """
        deadline_ms = self._world.clock.monotonic_ms() + timeout_ms
        backoff = Backoff(BACKOFF_MS, client_jitter(self._world.rng))
        while True:
            left_ms = max(1, deadline_ms - self._world.clock.monotonic_ms())
            reply = await self.call(request, left_ms)
            groups = getattr(reply, "groups", None)
            if groups is None:
                return reply
            if len(groups) != 1:
                raise errors.InternalError(f"{len(groups)} results came for one request")
            if not groups[0].HasField("error"):
                return reply
            error = frames.raise_error(groups[0].error)
            # The caller's own deadline would replace the reason by "no answer".
            wait_ms = backoff.next_ms()
            left_ms = deadline_ms - self._world.clock.monotonic_ms()
            if not error.retriable or left_ms <= wait_ms + LAST_WORD_MS:
                raise error
            self._address = None  # a part of the reply says so
            await self._world.clock.sleep_ms(wait_ms)

    async def _attempt(self, request: Message) -> Message:
        if self._address is None:
            find = wire.FindCoordinatorRequest(key=self.key, key_type=self._key_type)
            found: Any = await self._cluster.call_any(find, timeout_ms=self._attempt_ms)
            self._address = found.address
        return await self._cluster.call_at(self._address, request, timeout_ms=self._attempt_ms)
