"""A client's connections to the cluster: metadata kept fresh, requests sent to whoever answers
them.

World-generic.  One `Caller` per broker address.  Metadata is asked of two brokers at once, and both
go on to push what changes (`watch`): a leader that fell silent is then told of by the other one.
What is pushed is whole, and taken over as it is; who is asked, known brokers before bootstrap
addresses, is tried last for a while after it refused or did not answer.

Invariants
  K1  one round of metadata requests at a time; everybody who waits for news waits for the same one.
      What is to be known besides is asked in the next one: no answer to an older question settles
      it.
  K2  every call has a deadline that bounds the whole of it: connecting, every broker that is asked
      in turn, every retry.  Retries back off with jitter and stop at the deadline.
  K3  a broker that is silent delays nobody for longer than HEDGE_MS while another one answers; one
      that left the metadata (fenced, or moved to another address) keeps no call waiting.
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
from pk.tasks import TaskRegistry, awaited
from pk.types import PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, open_stream
from pk.world import Stream, StreamKind, World

T = TypeVar("T")

_log = logging.getLogger("pk.client")

#: How long a topic nobody knows is asked for again before that is believed: metadata travels.
UNKNOWN_TOPIC_MS = 2_000
#: The id of no topic: for requests that are about the brokers alone.
NOBODY = "-"
#: So many brokers push changes; one more is asked whenever those asked are silent for HEDGE_MS.
WATCHES = 2
HEDGE_MS = 500
#: A broker that lives answers a hello at once.
HELLO_TIMEOUT_MS = 5_000
#: How long a broker that did not answer is tried last, and one that did is trusted to answer again.
DOUBT_MS = 10_000
TRUST_MS = 1_000
#: How often those that push are asked whether they are still there: both may have fallen silent.
PING_MS = 10_000
PING_TIMEOUT_MS = 2_000
#: How much longer than its time-out an attempt may take to say why it failed (K2).
LAST_WORD_MS = 50
#: What is kept of a time-out for the last attempt.
LAST_TRY_MS = 100
#: A client that reaches no broker for the first time says so in the log, then once a minute.
UNREACHED_MS = 10_000
UNREACHED_AGAIN_MS = 60_000


class NetworkClient:
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
        self._backoff_ms = (retry_backoff_ms, retry_backoff_max_ms)
        self.metadata = Metadata(
            max_age_ms=metadata_max_age_ms, backoff_ms=max(retry_backoff_ms, 10)
        )
        self.client_id = client_id
        self.hello = wire.Hello(client_id=client_id, build=pk.__version__, protocol=PROTOCOL)
        self._callers: dict[str, Caller] = {}
        self._names: dict[str, None] | None = {}  #: topics of interest; None = all
        self._interest = 0  #: counts what else is to be known
        self._answered = 0  #: … up to here it was asked for, and an answer came
        self._asking: dict[str, None] = {}  #: addresses whose answer is on its way
        self._refreshing = TaskRegistry()
        self._poked: asyncio.Event | None = None
        self._news: asyncio.Future[None] | None = None
        self._last_error: errors.PkError | None = None
        self._say_ms: int | None = None  #: when to log that nobody answers; None = somebody does
        self._watched: dict[str, bool] = {}  #: address → it watches all topics; oldest first
        self._doubted: dict[str, float] = {}  #: address → when it failed to answer
        self._heard: dict[str, float] = {}  #: address → when it answered last
        self._asks = TaskRegistry(awaited)  #: the asker may have another broker's answer
        self._closed = False
        self.reached = False  #: some broker has answered
        self.on_change: list[Callable[[], None]] = []  #: called after every update

    # -- calls -------------------------------------------------------------------------------------

    def caller(self, address: str) -> Caller:
        found = self._callers.get(address)
        if found is None:
            if self._closed:
                raise errors.ClosedError("the client was closed")
            found = Caller(
                self.world.network, self.world.clock, address, self.hello,
                on_push=partial(self._on_push, address), on_break=partial(self._on_break, address),
            )  # fmt: skip
            self._callers[address] = found
        return found

    async def call_at(self, address: str, request: Message, *, timeout_ms: int) -> Message:
        """One attempt at one address; who does not answer is tried last for a while (K3)."""
        try:
            frame = await self.caller(address).call(request, timeout_ms=timeout_ms)
            reply = _body(frame)
            check_answers(address, request, reply)
        except errors.PkError as cause:
            if isinstance(cause, ELSEWHERE):
                self._doubt(address)
            raise
        self._doubted.pop(address, None)
        self._heard[address] = self.world.clock.monotonic_ms()
        self.reached = True
        return reply

    async def open_stream(self, node: int, kind: StreamKind, timeout_ms: int) -> tuple[Stream, str]:
        """A stream to a broker, and its address.  Raises `BrokerUnavailable`, or what the broker
        answers to the hello.
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
        self._heard.pop(address, None)

    def _order(self) -> list[str]:
        """Whom to ask: known brokers in any order, bootstrap addresses, then who did not answer."""
        now_ms = self.world.clock.monotonic_ms()
        known = list(self.metadata.brokers.values())
        if len(known) > 1:
            self.world.rng.shuffle(known)
        found = list(dict.fromkeys([*known, *self.bootstrap]))
        doubted = {each for each in found if now_ms - self._doubted.get(each, -DOUBT_MS) < DOUBT_MS}
        return sorted(found, key=doubted.__contains__)

    async def call_node(self, node: int, request: Message, *, timeout_ms: int) -> Message:
        """One attempt at one broker; the reply's body.

        Fails at once when the metadata drops that broker: it was fenced, or came back elsewhere.
        """
        address = self.metadata.brokers.get(node)
        if address is None:
            self.want_metadata()
            raise errors.BrokerUnavailable(f"broker {node} is not known")
        return await self.call_at(address, request, timeout_ms=timeout_ms)

    async def call_any(self, request: Message, *, timeout_ms: int) -> Message:
        """One round over the brokers we know and the bootstrap addresses, one after another: the
        request may have been carried out by one that did not answer.
        """
        left = self._order()
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
        """The brokers that are in service, and their addresses, as any of them says now."""
        reply = await self.call_any(wire.MetadataRequest(topic_ids=[NOBODY]), timeout_ms=timeout_ms)
        assert isinstance(reply, wire.MetadataReply)
        del reply.topics[:]
        self._update(reply, [])
        return dict(self.metadata.brokers)

    async def _responsive(self, addresses: list[str], timeout_ms: int) -> str:
        """The first of these that is known to answer, or does so when asked; else simply the
        first.
        """
        since = self.world.clock.monotonic_ms() - TRUST_MS
        for address in addresses:
            if self._heard.get(address, since - 1) >= since:
                return address
        if len(addresses) == 1:
            return addresses[0]

        async def ping(address: str) -> str:
            request = wire.MetadataRequest(topic_ids=[NOBODY])
            await self.call_at(address, request, timeout_ms=timeout_ms)
            return address

        try:
            return await self._first(ping, addresses, at_once=1)
        except errors.PkError:
            return addresses[0]

    async def _first(
        self, attempt: Callable[[str], Awaitable[T]], addresses: Iterable[str], *, at_once: int
    ) -> T:
        """The first answer; one more is asked whenever there is none for HEDGE_MS (K3).

        Attempts that are still under way then go on: their answers are news, too.
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
        """`attempt(timeout of this one)` until it raises no retriable error, or time is up.

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
            except TimeoutError:  # K2: one attempt may ask several brokers, each in its own time
                raise given_up(last, timeout_ms) from None
            except errors.RetriableError as cause:
                hasty = isinstance(cause, errors.RequestTimedOut) and left < self.request_timeout_ms
                if not (hasty and backoff.attempts):  # it had too little time to be the reason
                    last = cause
                left = deadline - clock.monotonic_ms()
                wait = min(backoff.next_ms(), left - LAST_TRY_MS)
                if wait <= 0 or self._closed or isinstance(cause, final):
                    raise given_up(last, timeout_ms) from cause
                _log.debug("retrying in %d ms: %s", wait, cause)
                await clock.sleep_ms(wait)

    def new_backoff(self) -> Backoff:
        """The waits of one operation that is retried, as the client's options have them."""
        return Backoff(self._backoff_ms, client_jitter(self.world.rng))

    # -- metadata ----------------------------------------------------------------------------------

    def watch_topics(self, names: Iterable[str] | None) -> None:
        """Keep these topics' metadata fresh too; None = all topics.  Raises `InvalidTopic`."""
        names = None if names is None else list(names)
        for name in names or ():
            if not isinstance(name, str) or not name or not name.isprintable():
                raise errors.InvalidTopic(f"{name!r} is not a topic name")
        if names is None:
            self._names = None
            self._want_more()
        elif self._names is not None:
            new = [name for name in names if name not in self._names]
            if new:
                self._names.update(dict.fromkeys(new))
                self._want_more()

    def _want_more(self) -> None:
        """What no answer tells that was asked for before (K1)."""
        self._interest += 1
        self.want_metadata()

    def want_metadata(self) -> None:
        self.metadata.want()
        if self._poked is not None:
            self._poked.set()

    def start(self) -> None:
        """Begin to keep metadata fresh (idempotent)."""
        if self._poked is None and not self._closed:
            self._poked = asyncio.Event()
            self._refreshing.spawn(self._keep_fresh())
            self._asks.spawn(self._keep_watched())

    async def news(self, timeout_ms: float) -> None:
        """Wait for the next answer (or failure) of the metadata loop.  Raises `TimeoutError`."""
        self.start()
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(timeout_ms / 1000):
            await asyncio.shield(self._news)

    async def topic(
        self,
        name: str,
        timeout_ms: int,
        unknown_ms: int | None = None,
        *,
        whole_ms: int | None = None,
    ) -> TopicMetadata:
        """A topic's metadata; waits for brokers, and for `unknown_ms` (a moment, unless given) for
        a topic that does not exist: it may just have been created.

        whole_ms: the time-out of the whole call, of which `timeout_ms` is what is left; an error
        names it.
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
                raise given_up(problem or self._last_error or nothing, whole_ms or timeout_ms)
            if isinstance(self._last_error, errors.OperatorError | errors.UnsupportedFeature):
                raise self._last_error
            self.want_metadata()
            try:
                await self.news(until - now)
            except TimeoutError:
                continue
        return self.metadata.topics[name]

    async def check_partitions(self, places: Iterable[TopicPartition], timeout_ms: int) -> None:
        """Returns once the metadata name every one of `places`; what may just have been created is
        waited for a moment.  Raises `UnknownTopicOrPartition`, `RequestTimedOut`.
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

    async def _keep_fresh(self) -> None:
        clock = self.world.clock
        assert self._poked is not None
        backoff = self.new_backoff()
        while not self._closed:
            self._poked.clear()
            wait = self.metadata.next_refresh_ms(clock.monotonic_ms()) - clock.monotonic_ms()
            if backoff.attempts:
                wait = max(wait, int(backoff.wait_ms()))
            if wait > 0:
                try:
                    async with asyncio.timeout(wait / 1000):
                        await self._poked.wait()
                        if backoff.attempts or wait <= self.metadata.backoff_ms:
                            await clock.sleep_ms(wait)
                    continue
                except TimeoutError:
                    pass
            if await self._ask():
                backoff.reset()
            else:
                backoff.failed()
            news, self._news = self._news, None
            if news is not None and not news.done():
                news.set_result(None)

    async def _keep_watched(self) -> None:
        """K3 for those that push: both may have fallen silent."""
        while not self._closed:
            await self.world.clock.sleep_ms(PING_MS)
            await asyncio.gather(*[self._ping(address) for address in list(self._watched)])

    async def _ping(self, address: str) -> None:
        request = wire.MetadataRequest(topic_ids=[NOBODY])
        try:
            await self.call_at(address, request, timeout_ms=PING_TIMEOUT_MS)
        except errors.PkError as cause:
            _log.debug("%s tells of no change any more: %s", address, cause)
            if self._watched.pop(address, None) is not None:
                self.want_metadata()

    async def _ask(self) -> bool:
        names = None if self._names is None else list(self._names)
        interest = self._interest
        self.metadata.asked(self.world.clock.monotonic_ms())
        if names == []:  # only the brokers: a name that no topic has
            request = wire.MetadataRequest(topic_ids=[NOBODY], watch=False)
        else:
            request = wire.MetadataRequest(topics=names or [], watch=True)
        timeout_ms = min(self.request_timeout_ms, 10_000)

        async def attempt(address: str) -> None:
            self._asking[address] = None
            try:
                reply = await self.call_at(address, request, timeout_ms=timeout_ms)
            finally:
                self._asking.pop(address, None)
            assert isinstance(reply, wire.MetadataReply)
            self._answered = max(self._answered, interest)
            if names == []:
                del reply.topics[:]
            else:
                self._watched.pop(address, None)
                self._watched[address] = names is None
            self._update(reply, names)

        # One that watches already and another one, so that two know all there is to know.
        order = self._order()
        watching = [each for each in order if each in self._watched and each not in self._doubted]
        order = list(dict.fromkeys([*watching[:1], *order]))
        try:
            await self._first(attempt, order, at_once=WATCHES)
        except errors.PkError as cause:
            self._unanswered(cause)
            return False
        except Exception as bug:  # the loop goes on: without it every later call would time out
            _log.exception("metadata")
            self._unanswered(errors.InternalError(f"metadata: {bug!r}"))
            return False
        self._last_error = self._say_ms = None
        self._unwatch()
        if names != []:
            asyncio.get_running_loop().call_later(HEDGE_MS / 1000, self._complete_watch)
        return True

    def _unanswered(self, cause: errors.PkError) -> None:
        self._last_error = cause
        _log.debug("metadata: %s", cause)
        now_ms = self.world.clock.monotonic_ms()
        if self._say_ms is None:
            self._say_ms = now_ms + UNREACHED_MS
        elif now_ms >= self._say_ms:
            self._say_ms = now_ms + UNREACHED_AGAIN_MS
            _log.warning("no broker answers at %s: %s", ", ".join(self._order()), cause)

    def _complete_watch(self) -> None:
        """One that was asked to watch may have refused, after another one had answered."""
        known = [each for each in self.metadata.brokers.values() if each not in self._doubted]
        watching = [each for each in known if each in self._watched]
        if len(watching) < min(WATCHES, len(known)) and not self._closed:
            self.want_metadata()

    def _unwatch(self) -> None:
        """Who was asked to watch long ago need not any more."""
        fresh = [address for address in self._watched if address not in self._doubted]
        for address in fresh[:-WATCHES]:
            del self._watched[address]
            request = wire.MetadataRequest(
                topic_ids=[NOBODY], watch=True
            )  # in the other one's place
            call = self.call_at(address, request, timeout_ms=self.request_timeout_ms)
            self._asks.spawn(call)

    def _update(self, reply: wire.MetadataReply, names: list[str] | None) -> None:
        before = set(self.metadata.brokers.values())
        self.metadata.update(reply, names, self.world.clock.monotonic_ms())
        if self._answered < self._interest:
            self.metadata.want()  # it was not asked for yet: this is no answer to it
        self.hello.cluster_id = reply.cluster_id  # from now on another cluster is refused
        now = set(self.metadata.brokers.values())
        for address in list(self._callers):
            caller = self._callers[address]
            left = address in before and address not in now  # K3: nobody waits for it any more
            if left or not (caller.connected or address in now or address in self.bootstrap):
                del self._callers[address]
                self._watched.pop(address, None)
                self._heard.pop(address, None)
                self._asks.spawn(caller.close())
        for call in list(self.on_change):
            call()

    def _on_push(self, address: str, frame: frames.Frame) -> None:
        """Something changed that this broker was asked for: what it says now is the whole of it."""
        if frame.head.WhichOneof("body") != "metadata_reply":
            return
        if address in self._asking:  # it overtakes the answer, which says what it is about
            self._want_more()
        if address not in self._watched:
            return
        reply = frame.head.metadata_reply
        everything = self._watched[address]
        self._update(reply, None if everything else [info.name for info in reply.topics])

    def _on_break(self, address: str) -> None:
        self._heard.pop(address, None)
        if self._watched.pop(address, None) is not None and not self._closed:
            self.want_metadata()  # somebody else must watch in its place

    def leader_address(self, key: PartitionKey) -> str | None:
        leader = self.metadata.leader(key)
        return None if leader is None else self.metadata.brokers.get(leader.node)

    async def close(self) -> None:
        self._closed = True
        await self._refreshing.close()
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)
        await self._asks.close()
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            await caller.close()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _body(frame: frames.Frame) -> Message:
    body: Message = getattr(frame.head, frame.head.WhichOneof("body") or "error")
    return body
