"""A client's connections to the cluster: metadata kept fresh, requests sent to whoever answers
them.

World-generic.  One `Caller` per broker address; the metadata loop asks any broker it can reach,
those it knows first, then the bootstrap addresses.  Broken connections are noticed by the next
call.

Invariants
  K1  one metadata request at a time; everybody who waits for news waits for the same one.
  K2  every call has a deadline; retries back off with jitter and stop at the deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

import pk
from pk import errors
from pk.client.metadata import Metadata, Topic
from pk.types import PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.world import World

T = TypeVar("T")

_log = logging.getLogger("pk.client")

#: How long a topic nobody knows is asked for again before that is believed: metadata travels.
UNKNOWN_TOPIC_MS = 2_000
DEFAULT_PORT = 9292


def given_up(error: errors.PkError) -> errors.PkError:
    """`error` after the client's own retries: now a person must act, and the error says who."""
    if type(error) is errors.UnknownTopicOrPartition:
        error = errors.UnknownTopicOrPartition(
            f"{error.message}; create it first (pk topics create …)", **error.details
        )
        setattr(error, "acts", "user")  # noqa: B010 - the class says what holds otherwise
    elif type(error) is errors.BrokerUnavailable:
        error = errors.BrokerUnavailable(
            f"{error.message}; is a server running there?", **error.details
        )
        setattr(error, "acts", "operator")  # noqa: B010
    return error


def addresses(bootstrap: str | Iterable[str]) -> list[str]:
    """`HOST:PORT[,HOST:PORT…]` as a list.  Raises `InvalidOption`."""
    items = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    found = []
    for item in items:
        text = str(item).strip()
        if not text:
            continue
        if text.startswith("unix:"):
            found.append(text)
            continue
        host, separator, port = text.rpartition(":")
        if not separator:
            host, port = text, str(DEFAULT_PORT)
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise errors.InvalidOption(
                f"bootstrap server {text!r} is not HOST:PORT", option="bootstrap"
            )
        found.append(f"{host}:{port}")
    if not found:
        raise errors.InvalidOption("no bootstrap server given (HOST:PORT)", option="bootstrap")
    return found


class Cluster:
    """Metadata and control calls of one client."""

    def __init__(
        self,
        world: World,
        bootstrap: str | Iterable[str],
        *,
        client_id: str = "",
        request_timeout_ms: int = 30_000,
        retry_backoff_ms: int = 100,
        retry_backoff_max_ms: int = 1_000,
        metadata_max_age_ms: int = 300_000,
    ) -> None:
        self.world = world
        self.bootstrap = addresses(bootstrap)
        self.request_timeout_ms = request_timeout_ms
        self._backoff_ms = retry_backoff_ms
        self._backoff_max_ms = retry_backoff_max_ms
        self.metadata = Metadata(
            max_age_ms=metadata_max_age_ms, backoff_ms=max(retry_backoff_ms, 10)
        )
        self.client_id = client_id
        self.hello = wire.Hello(client_id=client_id, build=pk.__version__, protocol=PROTOCOL)
        self._callers: dict[str, Caller] = {}
        self._names: dict[str, None] | None = {}  #: topics of interest; None = all
        self._task: asyncio.Task[None] | None = None
        self._poked: asyncio.Event | None = None
        self._news: asyncio.Future[None] | None = None
        self._last_error: errors.PkError | None = None
        self._closed = False
        self.on_change: list[Callable[[], None]] = []  #: called after every update

    # -- calls -------------------------------------------------------------------------------------

    def caller(self, address: str) -> Caller:
        found = self._callers.get(address)
        if found is None:
            if self._closed:
                raise errors.ClosedError("the client was closed")
            found = Caller(
                self.world.network, self.world.clock, address, self.hello, on_push=self._on_push
            )
            self._callers[address] = found
        return found

    async def call_node(self, node: int, request: Message, *, timeout_ms: int) -> Message:
        """One attempt at one broker; the reply's body."""
        address = self.metadata.brokers.get(node)
        if address is None:
            self.want_metadata()
            raise errors.BrokerUnavailable(f"broker {node} is not known")
        return await self.call_address(address, request, timeout_ms=timeout_ms)

    async def call_address(self, address: str, request: Message, *, timeout_ms: int) -> Message:
        """One attempt at whoever listens there; the reply's body."""
        return _body(await self.caller(address).call(request, timeout_ms=timeout_ms))

    async def call_any(self, request: Message, *, timeout_ms: int) -> Message:
        """One round over the brokers we know and the bootstrap addresses."""
        known = list(self.metadata.brokers.values())
        if len(known) > 1:
            self.world.rng.shuffle(known)
        error: errors.PkError = errors.BrokerUnavailable("no broker is known")
        for address in dict.fromkeys([*known, *self.bootstrap]):
            try:
                return await self.call_address(address, request, timeout_ms=timeout_ms)
            except (errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
                error = cause
        raise error

    async def retrying(
        self,
        attempt: Callable[[int], Awaitable[T]],
        timeout_ms: int,
        *,
        final: type[errors.PkError] | tuple[type[errors.PkError], ...] = (),
    ) -> T:
        """`attempt(timeout of this one)` until it raises no retriable error, or time is up.

        Errors of the kinds `final` are not retried.
        """
        clock = self.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        tries = 0
        while True:
            left = deadline - clock.monotonic_ms()
            try:
                return await attempt(max(1, min(left, self.request_timeout_ms)))
            except errors.RetriableError as cause:
                tries += 1
                wait = self.backoff(tries)
                late = clock.monotonic_ms() + wait >= deadline
                if late or self._closed or isinstance(cause, final):
                    raise given_up(cause) from cause
                _log.debug("retrying in %d ms: %s", wait, cause)
                await clock.sleep_ms(wait)

    def backoff(self, tries: int) -> float:
        wait: float = min(self._backoff_max_ms, self._backoff_ms * 2 ** min(tries - 1, 16))
        return wait * (0.8 + 0.4 * self.world.rng.random())

    # -- metadata ----------------------------------------------------------------------------------

    def watch_topics(self, names: Iterable[str] | None) -> None:
        """Keep these topics' metadata fresh too; None = all topics."""
        if names is None:
            self._names = None
            self.want_metadata()
        elif self._names is not None:
            new = [name for name in names if name not in self._names]
            if new:
                self._names.update(dict.fromkeys(new))
                self.want_metadata()

    def want_metadata(self) -> None:
        self.metadata.want()
        if self._poked is not None:
            self._poked.set()

    def start(self) -> None:
        """Begin to keep metadata fresh (idempotent)."""
        if self._task is None and not self._closed:
            self._poked = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._keep_fresh())

    async def news(self, timeout_ms: float) -> None:
        """Wait for the next answer (or failure) of the metadata loop.  Raises `TimeoutError`."""
        self.start()
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(timeout_ms / 1000):
            await asyncio.shield(self._news)

    async def topic(self, name: str, timeout_ms: int) -> Topic:
        """A topic's metadata; waits for brokers, and a moment for topics that were just created."""
        self.start()
        self.watch_topics([name])
        clock = self.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        unknown_deadline = clock.monotonic_ms() + min(timeout_ms, UNKNOWN_TOPIC_MS)
        while name not in self.metadata.topics:
            problem = self.metadata.problems.get(name)
            now = clock.monotonic_ms()
            until = unknown_deadline if problem is not None else deadline
            if problem is not None and not isinstance(problem, errors.UnknownTopicOrPartition):
                raise problem
            if now >= until or self._closed:
                raise given_up(
                    problem
                    or self._last_error
                    or errors.RequestTimedOut(f"no metadata of topic {name} within {timeout_ms} ms")
                )
            if isinstance(self._last_error, errors.OperatorError | errors.UnsupportedFeature):
                raise self._last_error
            self.want_metadata()
            try:
                await self.news(until - now)
            except TimeoutError:
                continue
        return self.metadata.topics[name]

    async def refresh(self, timeout_ms: int) -> None:
        """Ask now, whatever is known already; raises the error if nobody answers in time."""
        clock = self.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        generation = self.metadata.generation
        while self.metadata.generation == generation:
            left = deadline - clock.monotonic_ms()
            if left <= 0:
                raise given_up(
                    self._last_error
                    or errors.RequestTimedOut(f"no metadata within {timeout_ms} ms")
                )
            self.want_metadata()
            try:
                await self.news(left)
            except TimeoutError:
                continue
            if isinstance(self._last_error, errors.OperatorError | errors.UnsupportedFeature):
                raise self._last_error

    async def _keep_fresh(self) -> None:
        clock = self.world.clock
        assert self._poked is not None
        failures = 0
        while not self._closed:
            self._poked.clear()
            wait = self.metadata.next_refresh_ms(clock.monotonic_ms()) - clock.monotonic_ms()
            if failures:
                wait = max(wait, int(self.backoff(failures)))
            if wait > 0:
                try:
                    async with asyncio.timeout(wait / 1000):
                        await self._poked.wait()
                        if failures or wait <= self.metadata.backoff_ms:
                            await clock.sleep_ms(wait)
                    continue
                except TimeoutError:
                    pass
            failures = 0 if await self._ask() else failures + 1
            news, self._news = self._news, None
            if news is not None and not news.done():
                news.set_result(None)

    async def _ask(self) -> bool:
        names = None if self._names is None else list(self._names)
        self.metadata.asked(self.world.clock.monotonic_ms())
        if names == []:  # only the brokers: a name that no topic has
            request = wire.MetadataRequest(topic_ids=["-"], watch=False)
        else:
            request = wire.MetadataRequest(topics=names or [], watch=True)
        try:
            reply = await self.call_any(request, timeout_ms=min(self.request_timeout_ms, 10_000))
        except errors.PkError as cause:
            self._last_error = cause
            _log.debug("metadata: %s", cause)
            return False
        assert isinstance(reply, wire.MetadataReply)
        self._last_error = None
        if names == []:
            del reply.topics[:]
        self._update(reply, names)
        return True

    def _update(self, reply: wire.MetadataReply, names: list[str] | None) -> None:
        self.metadata.update(reply, names, self.world.clock.monotonic_ms())
        self.hello.cluster_id = reply.cluster_id  # from now on another cluster is refused
        for address in list(self._callers):
            caller = self._callers[address]
            known = address in self.bootstrap or address in self.metadata.brokers.values()
            if not known and not caller.connected:
                del self._callers[address]
        for call in list(self.on_change):
            call()

    def _on_push(self, frame: frames.Frame) -> None:
        """Somebody changed something we asked for: a hint, the whole answer follows."""
        if frame.head.WhichOneof("body") == "metadata_reply":
            self.want_metadata()

    def leader_address(self, key: PartitionKey) -> str | None:
        leader = self.metadata.leader(key)
        return None if leader is None else self.metadata.brokers.get(leader.node)

    async def close(self) -> None:
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            await caller.close()


def _body(frame: frames.Frame) -> Message:
    body: Message = getattr(frame.head, frame.head.WhichOneof("body") or "error")
    return body
