"""A client's connections to the cluster: fresh metadata, and requests to brokers that answer.

World-generic.  There is one `Caller` per broker address.  Requests go to known brokers first, then
to bootstrap addresses.  A broker that refused or did not answer is tried last for a while.  The
metadata updater (metadata_updater.py) keeps the metadata fresh.

Invariants
  K1  Every call has one deadline for everything: connecting, each broker that is asked in turn,
      each retry.  Retries back off with jitter and stop at the deadline.
  K2  A silent broker delays a call by at most HEDGE_MS while another broker answers.  A broker that
      left the metadata (fenced, or moved to another address) holds up no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

import pk
from pk import errors
from pk.backoff import Backoff, client_jitter
from pk.client.bootstrap import addresses
from pk.client.endings import ELSEWHERE, check_answers, given_up, no_partition
from pk.client.metadata import Metadata, TopicMetadata
from pk.client.metadata_updater import HEDGE_MS, NO_TOPIC, MetadataUpdater
from pk.tasks import TaskRegistry, awaited
from pk.types import PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, open_stream
from pk.world import Stream, StreamKind, World

T = TypeVar("T")

_log = logging.getLogger("pk.client")

#: How long an unknown topic is asked for again before its absence is believed: metadata propagates.
UNKNOWN_TOPIC_MS = 2_000
#: A running broker answers a hello at once.
HELLO_TIMEOUT_MS = 5_000
#: How long a failed broker is tried last, and how long after an answer a broker counts as alive.
DOUBT_MS = 10_000
TRUST_MS = 1_000
#: How much longer than its time-out an attempt may last to report why it failed (K1).
LAST_WORD_MS = 50
#: The part of a time-out that is reserved for the last attempt.
LAST_TRY_MS = 100


class NetworkClient:
    """Metadata requests and control calls of one client."""

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
        self._backoff_ms = (retry_backoff_ms, retry_backoff_max_ms)
        self.metadata = Metadata(
            max_age_ms=metadata_max_age_ms, backoff_ms=max(retry_backoff_ms, 10)
        )
        self.client_id = client_id
        self.hello = wire.Hello(client_id=client_id, build=pk.__version__, protocol=PROTOCOL)
        self._callers: dict[str, Caller] = {}
        self._doubted: dict[str, float] = {}  #: address → when it last failed to answer
        self._answered_ms: dict[str, float] = {}  #: address → when it last answered
        self._asks = TaskRegistry(awaited)  #: errors may be ignored: another broker has answered
        self._closed = False
        self.reached = False  #: some broker has answered
        self._updater = MetadataUpdater(self, world.clock)
        self.on_change: list[Callable[[], None]] = []  #: called after every update

    # -- calls -------------------------------------------------------------------------------------

    def caller(self, address: str) -> Caller:
        found = self._callers.get(address)
        if found is None:
            if self._closed:
                raise errors.ClosedError("the client was closed")
            found = Caller(
                self.world.network, self.world.clock, address, self.hello,
                on_push=partial(self._updater.pushed, address),
                on_break=partial(self._on_break, address),
            )  # fmt: skip
            self._callers[address] = found
        return found

    def warn(self, words: str) -> None:
        """Warn the operator in the client's log."""
        _log.warning("%s", words)

    async def call_at(self, address: str, request: Message, *, timeout_ms: int) -> Message:
        """Call one address once.  An address that does not answer is tried last for a while
        (K2).
        """
        try:
            frame = await self.caller(address).call(request, timeout_ms=timeout_ms)
            reply = _body(frame)
            check_answers(address, request, reply)
        except errors.PkError as cause:
            if isinstance(cause, ELSEWHERE):
                self._doubt(address)
            raise
        self._doubted.pop(address, None)
        self._answered_ms[address] = self.world.clock.monotonic_ms()
        self.reached = True
        return reply

    async def open_stream(self, node: int, kind: StreamKind, timeout_ms: int) -> tuple[Stream, str]:
        """Open a stream to a broker; returns it and the address.  Raises `BrokerUnavailable`, or
        the broker's error reply to the hello.
        """
        address = self.metadata.brokers.get(node)
        if address is None:
            raise errors.BrokerUnavailable(f"broker {node} is not known any more")
        try:
            async with asyncio.timeout(min(HELLO_TIMEOUT_MS, timeout_ms) / 1000):
                stream, _ = await open_stream(self.world.network, address, kind, self.hello)
        except TimeoutError:
            raise errors.BrokerUnavailable(f"{address}: no answer to the hello") from None
        return stream, address

    def _doubt(self, address: str) -> None:
        self._doubted[address] = self.world.clock.monotonic_ms()
        self._answered_ms.pop(address, None)

    def by_preference(self) -> list[str]:
        """Return the addresses to try: known brokers in random order, bootstrap addresses, and at
        the end those that failed lately.
        """
        now_ms = self.world.clock.monotonic_ms()
        known = list(self.metadata.brokers.values())
        if len(known) > 1:
            self.world.rng.shuffle(known)
        found = list(dict.fromkeys([*known, *self.bootstrap]))
        doubted = {each for each in found if now_ms - self._doubted.get(each, -DOUBT_MS) < DOUBT_MS}
        return sorted(found, key=doubted.__contains__)

    async def call_node(self, node: int, request: Message, *, timeout_ms: int) -> Message:
        """Call one broker once and return the reply's body.

        Fails at once if the broker leaves the metadata: it was fenced, or has another address now.
        """
        address = self.metadata.brokers.get(node)
        if address is None:
            self.want_metadata()
            raise errors.BrokerUnavailable(f"broker {node} is not known")
        return await self.call_at(address, request, timeout_ms=timeout_ms)

    async def call_any(self, request: Message, *, timeout_ms: int) -> Message:
        """Call known brokers and bootstrap addresses one after another until one answers.  Several
        calls at once would not be safe: a broker that did not answer may have executed the request.
        """
        left = self.by_preference()
        error: errors.PkError = errors.BrokerUnavailable("no broker is known")
        while left:
            address = await self._responsive(left, timeout_ms)
            left.remove(address)
            try:
                return await self.call_at(address, request, timeout_ms=timeout_ms)
            except ELSEWHERE as cause:
                error = cause
        raise error

    async def brokers(self, timeout_ms: int) -> dict[int, str]:
        """Return the brokers in service and their addresses, freshly asked of any broker."""
        reply = await self.call_any(
            wire.MetadataRequest(topic_ids=[NO_TOPIC]), timeout_ms=timeout_ms
        )
        assert isinstance(reply, wire.MetadataReply)
        del reply.topics[:]
        self.apply(reply, [])
        return dict(self.metadata.brokers)

    async def _responsive(self, addresses: list[str], timeout_ms: int) -> str:
        """Return the first address that answered lately, or that answers a ping now; otherwise the
        first of the list.
        """
        since = self.world.clock.monotonic_ms() - TRUST_MS
        for address in addresses:
            if self._answered_ms.get(address, since - 1) >= since:
                return address
        if len(addresses) == 1:
            return addresses[0]

        async def ping(address: str) -> str:
            request = wire.MetadataRequest(topic_ids=[NO_TOPIC])
            await self.call_at(address, request, timeout_ms=timeout_ms)
            return address

        try:
            return await self.first_answer(ping, addresses, at_once=1)
        except errors.PkError:
            return addresses[0]

    async def first_answer(
        self, attempt: Callable[[str], Awaitable[T]], addresses: Iterable[str], *, at_once: int
    ) -> T:
        """Return the first answer; one more broker is asked after each HEDGE_MS without one (K2).

        The other attempts continue, because their answers update the metadata, too.
        """
        left, waiting = deque(addresses), dict[asyncio.Task[T], None]()
        error: errors.PkError = errors.BrokerUnavailable("no broker is known")
        while left or waiting:
            while left and len(waiting) < at_once:
                address = left.popleft()
                loop = asyncio.get_running_loop()
                task = self._asks.spawn(_awaited(attempt(address)))
                waiting[task] = None
                loop.call_later(HEDGE_MS / 1000, self._silent, address, task)
            patience = HEDGE_MS / 1000 if left else None
            await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in waiting if task.done()]
            for task in ended:
                del waiting[task]
                try:
                    found = task.result()
                except ELSEWHERE as cause:
                    error = cause
                    continue
                return found
            if not ended:
                at_once = len(waiting) + 1
        raise error

    def _silent(self, address: str, task: asyncio.Task[Any]) -> None:
        if not task.done():
            self._doubt(address)

    async def retrying(
        self,
        attempt: Callable[[int], Awaitable[T]],
        timeout_ms: int,
        *,
        final: type[errors.PkError] | tuple[type[errors.PkError], ...] = (),
    ) -> T:
        """Call `attempt(its time-out)` until it succeeds or raises an error that is not retriable,
        or until the time is up.

        Errors of the kinds `final` are not retried.
        """
        clock = self.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        backoff = self.new_backoff()
        last: errors.PkError = errors.RequestTimedOut("no answer came")
        while True:
            left = max(1, deadline - clock.monotonic_ms())
            try:
                async with asyncio.timeout((left + LAST_WORD_MS) / 1000):
                    return await attempt(min(left, self.request_timeout_ms))
            # K1: one attempt may ask several brokers, each with its own time-out
            except TimeoutError:
                raise given_up(last, timeout_ms) from None
            except errors.RetriableError as cause:
                hasty = isinstance(cause, errors.RequestTimedOut) and left < self.request_timeout_ms
                # An attempt cut short by the deadline does not replace the earlier error.
                if not (hasty and backoff.attempts):
                    last = cause
                left = deadline - clock.monotonic_ms()
                wait = min(backoff.next_ms(), left - LAST_TRY_MS)
                if wait <= 0 or self._closed or isinstance(cause, final):
                    raise given_up(last, timeout_ms) from cause
                _log.debug("retrying in %d ms: %s", wait, cause)
                await clock.sleep_ms(wait)

    def new_backoff(self) -> Backoff:
        """Return a new back-off with the bounds of the client's options."""
        return Backoff(self._backoff_ms, client_jitter(self.world.rng))

    def call_in_background(self, address: str, request: Message) -> None:
        """Call one address once, without waiting for the answer."""
        self._asks.spawn(self.call_at(address, request, timeout_ms=self.request_timeout_ms))

    def is_doubted(self, address: str) -> bool:
        """Return whether a broker failed to answer lately, and has not answered since."""
        return address in self._doubted

    # -- metadata (client/metadata_updater) --------------------------------------------------------

    def start(self) -> None:
        """Begin to keep metadata fresh (idempotent)."""
        self._updater.start()

    def watch_topics(self, names: Iterable[str] | None) -> None:
        """Keep these topics' metadata fresh, too; None = all topics.  Raises `InvalidTopic`."""
        self._updater.watch_topics(names)

    def want_metadata(self) -> None:
        """Ask for the metadata of all topics of interest soon."""
        self._updater.want_metadata()

    async def news(self, timeout_ms: float) -> None:
        """Wait for the next answer (or failure) of a metadata request.  Raises `TimeoutError`."""
        await self._updater.news(timeout_ms)

    async def topic(
        self,
        name: str,
        timeout_ms: int,
        unknown_ms: int | None = None,
        *,
        whole_ms: int | None = None,
    ) -> TopicMetadata:
        """Return a topic's metadata.  Waits for brokers, and for `unknown_ms` (by default a moment)
        for a topic that does not exist: it may just have been created.

        whole_ms: the time-out of the whole call, of which `timeout_ms` is the rest; an error names
        it.
        """
        self.start()
        self.watch_topics([name])
        clock = self.world.clock
        begun = clock.monotonic_ms()
        patience = UNKNOWN_TOPIC_MS if unknown_ms is None else unknown_ms
        while name not in self.metadata.topics:
            problem = self.metadata.problem(name)
            now = clock.monotonic_ms()
            until = begun + (timeout_ms if problem is None else min(timeout_ms, patience))
            if problem is not None and not isinstance(problem, errors.UnknownTopicOrPartition):
                raise problem
            if now >= until or self._closed:
                silence = f"no metadata of topic {name} from {', '.join(self.bootstrap)}"
                nothing = errors.RequestTimedOut(silence)
                raise given_up(
                    problem or self._updater.last_error or nothing, whole_ms or timeout_ms
                )
            if isinstance(
                self._updater.last_error, errors.OperatorError | errors.UnsupportedFeature
            ):
                raise self._updater.last_error
            if not self._updater.is_asked(name):
                self.want_metadata()
            try:
                await self.news(until - now)
            except TimeoutError:
                continue
        return self.metadata.topics[name]

    async def check_partitions(self, places: Iterable[TopicPartition], timeout_ms: int) -> None:
        """Wait until the metadata contain every one of `places`; new partitions get a moment to
        appear.  Raises `UnknownTopicOrPartition`, `RequestTimedOut`.
        """
        clock = self.world.clock
        deadline = clock.monotonic_ms() + timeout_ms
        last: dict[str, int] = {}
        for place in places:
            last[place.topic] = max(place.partition, last.get(place.topic, 0))
        for name, partition in last.items():
            found = await self.topic(
                name, max(1, deadline - clock.monotonic_ms()), whole_ms=timeout_ms
            )
            until = min(clock.monotonic_ms() + UNKNOWN_TOPIC_MS, deadline)
            while partition >= found.partitions:
                if (left := until - clock.monotonic_ms()) <= 0:
                    raise given_up(no_partition(name, partition, found.partitions))
                self.want_metadata()
                with contextlib.suppress(TimeoutError):
                    await self.news(left)
                found = self.metadata.topic(name)

    def apply(
        self, reply: wire.MetadataReply, names: list[str] | None, *, whole: bool = True
    ) -> None:
        before = set(self.metadata.brokers.values())
        self.metadata.update(reply, names, self.world.clock.monotonic_ms(), whole=whole)
        # connections to another cluster are refused from now on
        self.hello.cluster_id = reply.cluster_id
        now = set(self.metadata.brokers.values())
        for address in list(self._callers):
            caller = self._callers[address]
            left = address in before and address not in now  # K2: calls to it fail at once
            if left or not (caller.connected or address in now or address in self.bootstrap):
                del self._callers[address]
                self._updater.left(address)
                self._answered_ms.pop(address, None)
                self._asks.spawn(caller.close())
        for call in list(self.on_change):
            call()

    def _on_break(self, address: str) -> None:
        self._answered_ms.pop(address, None)
        self._updater.broke(address)

    def leader_address(self, key: PartitionKey) -> str | None:
        leader = self.metadata.leader(key)
        return None if leader is None else self.metadata.brokers.get(leader.node)

    async def close(self) -> None:
        self._closed = True
        await self._updater.close()
        await self._asks.close()
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            await caller.close()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _body(frame: frames.Frame) -> Message:
    body: Message = getattr(frame.head, frame.head.WhichOneof("body") or "error")
    return body
