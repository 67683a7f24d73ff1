"""The rounds of metadata requests of one client, and the pushes that follow them.

World-generic; Kafka's client calls this part the metadata updater.  Metadata is requested from two
brokers at once, and both then push changes (`watch`): if a leader stops answering, the other broker
pushes its successor.  A push contains the whole state and replaces what was known.

Invariants
  U1  One round of metadata requests runs at a time, and all callers that wait for metadata wait for
      this round.  Interest in more topics is served by the next round: an answer to an earlier
      request does not cover it.
  U2  A round for new topics begins as soon as the round before is over, unless everything is asked
      for anyway.  It names the new topics only and adds them to what the brokers watch, so a client
      that touches one topic after another does not ask for all of them each time.
  U3  A broker that may not watch all topics of interest counts as one that watches nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from google.protobuf.message import Message

from pk import errors
from pk.backoff import Backoff
from pk.client.metadata import Metadata
from pk.clock import Clock
from pk.tasks import TaskRegistry
from pk.wire import frames
from pk.wire import pk_pb2 as wire

_log = logging.getLogger("pk.client")

#: A topic id that no topic has, for requests that concern the brokers only.
NO_TOPIC = "-"
#: Number of brokers that push changes; one more is asked if those asked are silent for HEDGE_MS.
WATCHES = 2
HEDGE_MS = 500
#: How often the pushing brokers are checked: both may have stopped.
PING_MS = 10_000
PING_TIMEOUT_MS = 2_000
#: A client that reaches no broker logs a warning after this time, then once a minute.
UNREACHED_MS = 10_000
UNREACHED_AGAIN_MS = 60_000


class Brokers(Protocol):
    """How the updater reaches brokers, and passes on what they answer (`NetworkClient`)."""

    metadata: Metadata
    request_timeout_ms: int

    async def call_at(self, address: str, request: Message, *, timeout_ms: int) -> Message: ...
    async def first_answer(
        self, attempt: Callable[[str], Awaitable[None]], addresses: Iterable[str], *, at_once: int
    ) -> None: ...
    def call_in_background(self, address: str, request: Message) -> None: ...
    def by_preference(self) -> list[str]: ...
    def is_doubted(self, address: str) -> bool: ...
    def new_backoff(self) -> Backoff: ...
    def apply(
        self, reply: wire.MetadataReply, names: list[str] | None, *, whole: bool = True
    ) -> None: ...


class MetadataUpdater:
    """Keeps the metadata of the topics of interest fresh."""

    def __init__(self, brokers: Brokers, clock: Clock) -> None:
        self._brokers = brokers
        self._metadata = brokers.metadata
        self._clock = clock
        self._names: dict[str, None] | None = {}  #: topics of interest; None = all
        self._new: dict[str, None] = {}  #: topics of interest that no request has named yet
        self._asked: frozenset[str] = frozenset()  #: the new topics of the round in progress
        self._interest = 0  #: counts what an earlier request does not cover
        self._answered = 0  #: the value of _interest that the last answer covers
        #: address → how many of its requests in progress ask for all of interest
        self._asking: Counter[str] = Counter()
        #: address → whether it watches all topics; oldest first
        self._watched: dict[str, bool] = {}
        self._tasks = TaskRegistry()
        self._poked: asyncio.Event | None = None
        self._news: asyncio.Future[None] | None = None
        self._say_ms: int | None = None  #: when to log that no broker answers; None = one does
        self._closed = False
        self.last_error: errors.PkError | None = None  #: why the last round failed

    # -- what the client calls ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep metadata fresh (idempotent)."""
        if self._poked is None and not self._closed:
            self._poked = asyncio.Event()
            self._tasks.spawn(self._keep_fresh())
            self._tasks.spawn(self._keep_watched())

    def watch_topics(self, names: Iterable[str] | None) -> None:
        """Keep these topics' metadata fresh, too; None = all topics.  Raises `InvalidTopic`."""
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
                self._new.update(dict.fromkeys(new))
                if self._watched:
                    self._poke()
                else:
                    self.want_metadata()

    def is_asked(self, name: str) -> bool:
        """Return whether the next answer, or the one after it, says whether the topic exists."""
        return name in self._new or name in self._asked

    def want_metadata(self) -> None:
        """Ask for the metadata of all topics of interest soon."""
        self._metadata.want()
        self._poke()

    async def news(self, timeout_ms: float) -> None:
        """Wait for the next answer (or failure) of the metadata loop.  Raises `TimeoutError`."""
        self.start()
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(timeout_ms / 1000):
            await asyncio.shield(self._news)

    def broke(self, address: str) -> None:
        """Note that the connection to a broker ended."""
        if self._watched.pop(address, None) is not None and not self._closed:
            self.want_metadata()  # another broker must push in its place

    def left(self, address: str) -> None:
        """Note that a broker is not part of the cluster any more."""
        self._watched.pop(address, None)

    def pushed(self, address: str, frame: frames.Frame) -> None:
        """Apply a push, which contains all that the broker was asked to watch."""
        if frame.head.WhichOneof("body") != "metadata_reply":
            return
        if self._asking[address]:  # it overtook the answer, which would say what it covers
            self._want_more()
        if address not in self._watched:
            return
        reply = frame.head.metadata_reply
        everything = self._watched[address]
        self._apply(reply, None if everything else [info.name for info in reply.topics])

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()
        self._tell()

    def _tell(self) -> None:
        """End the waits for news."""
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    def _want_more(self) -> None:
        """Note that a new request is necessary: answers to earlier requests do not cover it
        (U1).
        """
        self._interest += 1
        self.want_metadata()

    def _poke(self) -> None:
        if self._poked is not None:
            self._poked.set()

    # -- rounds ------------------------------------------------------------------------------------

    async def _keep_fresh(self) -> None:
        clock = self._clock
        assert self._poked is not None
        backoff = self._brokers.new_backoff()
        while not self._closed:
            self._poked.clear()
            wait = self._metadata.next_refresh_ms(clock.monotonic_ms()) - clock.monotonic_ms()
            if backoff.attempts:
                wait = max(wait, int(backoff.wait_ms()))
            elif self._new:  # U2; an answer that did not name them has met the wish for a round
                wait = 0
            if wait > 0:
                try:
                    async with asyncio.timeout(wait / 1000):
                        await self._poked.wait()
                        if backoff.attempts:
                            await clock.sleep_ms(wait)
                    continue
                except TimeoutError:
                    pass
            if await self._ask():
                backoff.reset()
            else:
                backoff.failed()
            self._asked = frozenset()
            self._tell()

    async def _ask(self) -> bool:
        """Ask for all topics of interest, or for the new ones only; return whether a broker has
        answered.
        """
        names = None if self._names is None else list(self._names)
        interest, new, now_ms = self._interest, list(self._new), self._clock.monotonic_ms()
        self._new, self._asked = {}, frozenset(new)
        order, new = self._plan(names, new, now_ms)
        timeout_ms = min(self._brokers.request_timeout_ms, 10_000)

        async def attempt(address: str) -> None:
            # An answer to a request for everything replaces what was added before it.
            more = new if address in self._watched and not self._asking[address] else []
            if more:
                asked = wire.MetadataRequest(topics=more, watch=True, adds=True)
            elif names == []:  # ask for the brokers only, by the id of no topic
                asked = wire.MetadataRequest(topic_ids=[NO_TOPIC], watch=False)
            else:
                asked = wire.MetadataRequest(topics=names or [], watch=True)
            self._asking[address] += not more
            try:
                reply = await self._brokers.call_at(address, asked, timeout_ms=timeout_ms)
            except errors.PkError:
                if more:
                    self._watched.pop(address, None)  # its pushes may lack the new topics
                raise
            finally:
                self._asking[address] -= not more
                if not self._asking[address]:
                    del self._asking[address]
            assert isinstance(reply, wire.MetadataReply)
            self._answered = max(self._answered, interest)
            if names == []:
                del reply.topics[:]
            elif address in self._watched if more else self._covers(names):
                self._watched.pop(address, None)
                self._watched[address] = names is None
            self._apply(reply, more or names, whole=not more)

        try:
            await self._brokers.first_answer(attempt, order, at_once=WATCHES)
        except errors.PkError as cause:
            self._unanswered(cause)
            return False
        except Exception as bug:  # without this loop every later call would time out
            _log.exception("metadata")
            self._unanswered(errors.InternalError(f"metadata: {bug!r}"))
            return False
        self.last_error = self._say_ms = None
        self._unwatch()
        if names != []:
            asyncio.get_running_loop().call_later(HEDGE_MS / 1000, self._complete_watch)
        return True

    def _plan(
        self, names: list[str] | None, new: list[str], now_ms: int
    ) -> tuple[list[str], list[str]]:
        """Return the brokers in the order in which a round asks them, and the topics that are added
        to what they watch; none = it asks for all topics of interest.
        """
        order = self._brokers.by_preference()
        watching = [
            each for each in order if each in self._watched and not self._brokers.is_doubted(each)
        ]
        if new and names and watching and self._metadata.next_refresh_ms(now_ms) > now_ms:
            for address in self._watched.keys() - watching[:WATCHES]:
                del self._watched[address]  # its pushes would lack the new topics
            return list(dict.fromkeys([*watching, *order])), new
        self._metadata.asked(now_ms)
        # one broker that pushes already and one other, so that two push everything
        return list(dict.fromkeys([*watching[:1], *order])), []

    def _covers(self, names: list[str] | None) -> bool:
        """Return whether later rounds will ask for all topics that a late answer lacks (U3).  The
        topics that no request has named yet are the last ones of interest.
        """
        if names is None or self._names is None:
            return True
        return len(self._names) - len(names) <= len(self._new)

    def _unanswered(self, cause: errors.PkError) -> None:
        self.last_error = cause
        self._metadata.want()
        _log.debug("metadata: %s", cause)
        now_ms = self._clock.monotonic_ms()
        if self._say_ms is None:
            self._say_ms = now_ms + UNREACHED_MS
        elif now_ms >= self._say_ms:
            self._say_ms = now_ms + UNREACHED_AGAIN_MS
            _log.warning(
                "no broker answers at %s: %s", ", ".join(self._brokers.by_preference()), cause
            )

    def _apply(
        self, reply: wire.MetadataReply, names: list[str] | None, *, whole: bool = True
    ) -> None:
        self._brokers.apply(reply, names, whole=whole)
        if self._answered < self._interest:
            # the latest interest was not requested yet: this reply does not cover it
            self._metadata.want()

    # -- watches -----------------------------------------------------------------------------------

    def _complete_watch(self) -> None:
        """Ask again if too few brokers push: one may have refused after another had answered."""
        known = [
            each for each in self._metadata.brokers.values() if not self._brokers.is_doubted(each)
        ]
        watching = [each for each in known if each in self._watched]
        if len(watching) < min(WATCHES, len(known)) and not self._closed:
            self.want_metadata()

    def _unwatch(self) -> None:
        """Cancel the pushes of all but the most recently asked brokers."""
        fresh = [address for address in self._watched if not self._brokers.is_doubted(address)]
        for address in fresh[:-WATCHES]:
            del self._watched[address]
            # it replaces the broker's earlier watch
            request = wire.MetadataRequest(topic_ids=[NO_TOPIC], watch=True)
            self._brokers.call_in_background(address, request)

    async def _keep_watched(self) -> None:
        """Ping the brokers that push changes, because all of them may have stopped."""
        while not self._closed:
            await self._clock.sleep_ms(PING_MS)
            await asyncio.gather(*[self._ping(address) for address in list(self._watched)])

    async def _ping(self, address: str) -> None:
        request = wire.MetadataRequest(topic_ids=[NO_TOPIC])
        try:
            await self._brokers.call_at(address, request, timeout_ms=PING_TIMEOUT_MS)
        except errors.PkError as cause:
            _log.debug("%s tells of no change any more: %s", address, cause)
            if self._watched.pop(address, None) is not None:
                self.want_metadata()
