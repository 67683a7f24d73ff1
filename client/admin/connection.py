"""The connection of an administration client, which every subject's calls share.

`AdminConnection` carries a request from the caller's thread to the client's loop, repeats it within
its time-out, and returns the reply.  A class of calls (`TopicCalls`, `QuorumCalls`, …) receives the
connection by its constructor, builds requests and converts replies.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from pk import errors, settings
from pk.client import arguments, connection
from pk.client.network_client import NetworkClient

T = TypeVar("T")

#: The least time that a later step of a call gets, so that its error is about the request.
_LEAST_S = 0.001


class AdminConnection:
    """The requests of one administration client; safe to share between threads.

    of_controllers: `bootstrap` has addresses of controllers, which are asked directly (KIP-919).
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        of_controllers: bool,
        client_id: str,
        request_timeout_ms: int,
    ) -> None:
        self._of_controllers = of_controllers
        self._closed = False
        self._ending = threading.Lock()
        with connection.opening() as self._thread:
            option = settings.CONSUMER.by_name["request_timeout_ms"]
            self.cluster = NetworkClient(
                self._thread.world,
                bootstrap,
                client_id=client_id,
                request_timeout_ms=option.parse(request_timeout_ms),
            )
        connection.close_at_exit(self, self.close)

    def ask(self, request: Message, kind: type[T], timeout_s: float) -> T:
        """Ask any server that answers for the cluster; returns its reply of type `kind`."""
        cluster = self.cluster

        async def attempt(one_ms: int) -> Message:
            if self._of_controllers:
                return await ask_active(cluster, request, one_ms)
            if not cluster.metadata.generation:
                cluster.start()  # learn the brokers: a moved one is then found
            return await cluster.call_any(request, timeout_ms=one_ms)

        reply = self.retrying(attempt, timeout_s)
        if not isinstance(reply, kind):
            raise errors.InternalError(f"{type(reply).__name__} answers {request.DESCRIPTOR.name}")
        return reply

    def retrying(self, attempt: Callable[[int], Awaitable[T]], timeout_s: float) -> T:
        """Call `attempt(its time-out in ms)` until it succeeds or its error is not retriable.

        A broker that reports an unknown topic speaks for the whole cluster, its own writes
        included: that error is not retried.
        """
        final = errors.UnknownTopicOrPartition
        return self.run(lambda ms: self.cluster.retrying(attempt, ms, final=final), timeout_s)

    def run(self, work: Callable[[int], Awaitable[T]], timeout_s: float) -> T:
        """Run `work(time-out in ms)` on the client's loop and wait for its result.

        Raises `ClosedError` if the client was closed.
        """
        timeout_ms = int(arguments.seconds(timeout_s) * 1000)

        async def run() -> T:
            return await work(timeout_ms)

        if self._closed:
            raise errors.ClosedError("the admin client was closed")
        return self._thread.run(run(), timeout_s)

    def deadline_s(self, timeout_s: float) -> float:
        """Return when a call of several steps ends, on the monotonic clock."""
        return self._now_s() + arguments.seconds(timeout_s)

    def left_s(self, deadline_s: float) -> float:
        """Return the time-out of the next step of a call that ends at `deadline_s`."""
        return max(_LEAST_S, deadline_s - self._now_s())

    def _now_s(self) -> float:
        return self.cluster.world.clock.monotonic_ms() / 1000

    def close(self) -> None:
        """Disconnect.  Idempotent; a slow disconnect continues in the background."""
        if threading.current_thread() is self._thread.thread:
            raise errors.InvalidRequest("a delivery callback must not block")
        with self._ending:  # if several threads close, one does the work
            if self._closed:
                return
            self._closed = True
        connection.end(self, self._thread, self.cluster.close())


async def ask_active(cluster: NetworkClient, request: Message, timeout_ms: int) -> Message:
    """Ask the configured controllers in turn, once each; a leader named in a refusal is asked
    next.
    """
    waiting, asked = list(cluster.bootstrap), dict[str, None]()
    error: errors.PkError = errors.BrokerUnavailable("no controller is known")
    while waiting:
        address = waiting.pop(0)
        if address in asked:
            continue
        asked[address] = None
        try:
            return await cluster.call_at(address, request, timeout_ms=timeout_ms)
        except errors.ControllerUnavailable as cause:
            error = cause
            if named := cause.details.get("address"):
                waiting.insert(0, named)
        except (errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
            error = cause
    raise error


def only(results: Sequence[T]) -> T:
    """Return the only result.  Raises `InternalError` if there is not exactly one."""
    if len(results) != 1:
        raise errors.InternalError(f"{len(results)} results came for one request")
    return results[0]
