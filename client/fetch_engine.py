"""The consumer's loop: steps the fetcher, runs the fetch streams, and looks offsets up.

World-generic; `pk.client.consumer` is the thread-safe façade over it.  The loop appends fetched
data to `ready` and errors to `problems`, and calls `on_ready` after each.  Only the loop appends to
them, and only the reader removes items.  The reader checks whether an item is void when it removes
it (client/fetcher F4).

Invariants
  E1  The machine is stepped on the loop only.  Effects are performed in the order they came.
  E2  The size of `ready` is bounded by the credit that was granted (client/fetcher F2).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pk import errors
from pk.client.completed_fetch import rows_of
from pk.client.endings import given_up
from pk.client.fetcher import Fetcher
from pk.client.fetcher_events import (
    Assign,
    CompletedFetch,
    Consumed,
    FetchedPartition,
    FetcherEvent,
    FetcherOptions,
    FetchError,
    FetchRequestData,
    OffsetFound,
    OffsetWanted,
    Refresh,
    StreamClosed,
)
from pk.client.network_client import UNKNOWN_TOPIC_MS, NetworkClient
from pk.client.offsets import EARLIEST, ISOLATION, lookup_offsets
from pk.effects import Effect, Publish, Send, SetTimer
from pk.tasks import TaskRegistry
from pk.types import NONE, AbortedTransaction, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of
from pk.world import Disconnected, Stream, StreamKind, World

_log = logging.getLogger("pk.client")

#: With this many unreported errors, an error that is already among them is not added again.
PROBLEMS_MANY = 1_000


class FetchEngine:
    """The engine of one consumer.  `options` are resolved (settings.CONSUMER)."""

    def __init__(self, world: World, cluster: NetworkClient, options: Mapping[str, Any]) -> None:
        self.world = world
        self.cluster = cluster
        self.options = options
        self.isolation = ISOLATION[options["isolation_level"]]
        self.ready: deque[CompletedFetch] = deque()
        self.problems: deque[FetchError] = deque()
        self.on_ready: Callable[[], None] = lambda: None
        self.fetcher = Fetcher(
            FetcherOptions(
                auto_offset_reset=options["auto_offset_reset"],
                buffer_bytes=options["fetch_buffer_bytes"],
                retry_backoff_ms=options["retry_backoff_ms"],
                retry_backoff_max_ms=options["retry_backoff_max_ms"],
                report_after_ms=options["request_timeout_ms"],
            ),
            cluster.metadata,
            world.rng,
        )
        self._names: list[str] | None = None  #: subscribed topics
        self._pattern: re.Pattern[str] | None = None
        #: topic → number of its partitions that are assigned; None before the first assignment
        self._known: dict[str, int] | None = None
        self._unknown_ms: dict[str, int] = {}
        self._looking = False  #: a repeated metadata request for missing topics is scheduled
        self._sessions: dict[int, FetchConnection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = TaskRegistry()
        self._closed = False
        cluster.on_change.append(self._on_metadata)

    # -- what the façade calls, on the loop --------------------------------------------------------

    def assign(self, places: Iterable[TopicPartition]) -> None:
        """Assign exactly these partitions."""
        self._names = self._pattern = self._known = None
        self._drop_subscription_problems()
        wanted = dict.fromkeys(places)
        self.cluster.watch_topics(dict.fromkeys(place.topic for place in wanted))
        self.cluster.start()
        self.step(Assign(dict(wanted)))

    def assign_for_group(
        self,
        starts: Mapping[TopicPartition, int | None],
        keys: Mapping[TopicPartition, PartitionKey],
    ) -> None:
        """Assign exactly these partitions.  A new one begins at its offset; None = where
        auto_offset_reset says.  The group's membership watches the topics.
        """
        self._names = self._pattern = self._known = None
        self._drop_subscription_problems()
        self.step(Assign(dict(starts), keys))

    def subscribe(self, names: Sequence[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Subscribe to all partitions of these topics, or of the matching topics, including later
        ones.
        """
        self._names = list(names) if names is not None else None
        self._pattern = pattern
        self._known = None
        self._unknown_ms = {}
        self._drop_subscription_problems()
        self.step(Assign({}))
        self.cluster.watch_topics(None if pattern is not None else names)
        self.cluster.start()
        if self._names is not None and all(
            name in self.cluster.metadata.topics for name in self._names
        ):
            self._on_metadata()
        else:
            self.cluster.want_metadata()

    def _on_metadata(self) -> None:
        if self._names is not None or self._pattern is not None:
            self._take_partitions()
        for link in list(self._sessions.values()):
            link.follow()
        self.step(Refresh())

    def _take_partitions(self) -> None:
        """Assign the subscribed partitions.

        Partitions of the first assignment begin where auto_offset_reset says.  Partitions that are
        created later begin at their first offset.
        """
        metadata = self.cluster.metadata
        names = self._names
        if self._pattern is not None:
            if not metadata.complete:
                return  # no answer about all topics has arrived yet
            names = metadata.matching(self._pattern)
        first = self._known is None
        known = dict(self._known or {})
        places: dict[TopicPartition, int | None] = {}
        for name in names or ():
            topic = metadata.topics.get(name)
            if topic is None:
                problem = metadata.problem(name)
                if problem is not None:
                    known[name] = 0
                    self._missing(name, problem)
                continue
            self._unknown_ms.pop(name, None)
            at_first = topic.partitions if first or self._pattern is None else 0
            before = known.get(name, at_first)
            for partition in range(topic.partitions):
                start = None if partition < before else EARLIEST
                places[TopicPartition(name, partition)] = start
            known[name] = topic.partitions
        for name in [name for name in known if name not in metadata.topics]:
            known[name] = 0  # a topic created again is another log
        self._known = known
        if set(places) != set(self.fetcher.assignment):
            self.step(Assign(places))

    def _missing(self, name: str, problem: errors.PkError) -> None:
        """Report once that a subscribed topic does not exist, after metadata had time to
        propagate.
        """
        now_ms = self.world.clock.monotonic_ms()
        since = self._unknown_ms.setdefault(name, now_ms)
        if since >= 0 and now_ms - since >= UNKNOWN_TOPIC_MS:
            self._unknown_ms[name] = NONE
            self._raise(FetchError(None, NONE, given_up(problem)))
        if not self._looking:  # this runs after each broker's metadata reply
            self._looking = True
            self._tasks.spawn(self._look_again())

    async def _look_again(self) -> None:
        await self.world.clock.sleep_ms(500)
        self._looking = False
        self.cluster.want_metadata()

    async def offsets(
        self,
        places: Iterable[TopicPartition],
        timestamps: Mapping[TopicPartition, int],
        timeout_ms: int,
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Look up `(offset, timestamp)` by time or special value (LATEST …) at each partition's
        leader.
        """
        return await lookup_offsets(self.cluster, places, timestamps, self.isolation, timeout_ms)

    def decoded(self, fetched: CompletedFetch) -> Iterator[tuple[int, pa.RecordBatch | None]]:
        """Return `(next position, rows or None)` of each batch.  CPU-bound; safe in any thread."""
        options = self.options
        return rows_of(
            fetched,
            committed=bool(self.isolation),
            check_crcs=options["check_crcs"],
            decoded_bytes_max=options["decoded_bytes_max"],
        )

    def take_error(self, place: TopicPartition | None = None) -> FetchError | None:
        """Remove and return the first valid error, or the first that concerns `place`."""
        kept: list[FetchError] = []
        found: FetchError | None = None
        while self.problems and found is None:
            told = self.problems.popleft()
            if self.fetcher.stands(told):
                if place is None or told.place is None or told.place == place:
                    found = told
                else:
                    kept.append(told)
        self.problems.extendleft(reversed(kept))
        return found

    def has_error(self, place: TopicPartition | None = None) -> bool:
        """Return whether `take_error(place)` would find an error."""
        return any(
            (place is None or told.place in (None, place)) and self.fetcher.stands(told)
            for told in self.problems.copy()
        )

    def _drop_subscription_problems(self) -> None:
        self.problems = deque([told for told in self.problems if told.place is not None])

    def drain(self) -> list[tuple[TopicPartition, pa.RecordBatch]]:
        """Return everything that is ready, decoded; raises a pending error.  For callers on the
        loop.
        """
        told = self.take_error()
        if told is not None:
            raise told.error
        found = []
        while self.ready:
            fetched = self.ready.popleft()
            if self.fetcher.position_id(fetched.place) == fetched.position_id:
                found += [
                    (fetched.place, rows) for _, rows in self.decoded(fetched) if rows is not None
                ]
            self.step(Consumed(fetched.node, len(fetched.payload)))
        return found

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._sessions.values()):
            await link.close()
        await self._tasks.close()
        await self.cluster.close()

    # -- the machine -------------------------------------------------------------------------------

    def step(self, event: FetcherEvent) -> None:
        if self._closed:
            return
        for effect in self.fetcher.step(event, self.world.clock.monotonic_ms()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            link = self._sessions.get(effect.peer)
            if link is None or link.ended:
                link = self._sessions[effect.peer] = FetchConnection(
                    self.cluster, self.options, self.isolation, self.step, effect.peer
                )
            link.put(effect.message)
        elif isinstance(effect, SetTimer):
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if effect.at_ms is not None:
                wait = max(0, effect.at_ms - self.world.clock.monotonic_ms()) / 1000
                self._timer = asyncio.get_running_loop().call_later(wait, self.step, Refresh())
        elif isinstance(effect, Publish):
            self._published(effect.name, effect.value)

    def _published(self, name: str, value: Any) -> None:
        if name == "data":
            self.ready.append(value)
            self.on_ready()
        elif name == "error":
            value.error = given_up(value.error)
            self._raise(value)
        elif name == "metadata":
            self.cluster.want_metadata()
        elif name == "offset":
            self._tasks.spawn(self._find_offset(value))
        elif name == "leaderless":
            place, absent = value
            names = f": it waits for one of the brokers {absent}" if absent else ""
            _log.warning("%s has no reachable leader%s", place, names)
        elif name == "reset":
            place, offset, policy, why = value
            _log.warning(
                "%s: position %s is out of range (%s); reset to %s", place, offset, why, policy
            )

    def _raise(self, told: FetchError) -> None:
        # No error may be dropped: a partition that waits for a seek reports its error only once.
        full = len(self.problems) >= PROBLEMS_MANY and told.place is not None
        if not full or not any(_same(told, each) for each in self.problems.copy()):
            self.problems.append(told)
        self.on_ready()

    async def _find_offset(self, wanted: OffsetWanted) -> None:
        request = wire.ListOffsetsRequest(isolation=self.isolation)
        request.queries.add(
            topic_id=wanted.key.topic_id,
            partition=wanted.key.partition,
            current_leader_epoch=wanted.leader_epoch,
            timestamp_ms=wanted.special,
        )
        try:
            reply = await self.cluster.call_node(
                wanted.node, request, timeout_ms=self.options["request_timeout_ms"]
            )
            assert isinstance(reply, wire.ListOffsetsReply)
            if len(reply.answers) != 1:
                raise errors.InternalError(f"{len(reply.answers)} answers to one offset query")
            answer = reply.answers[0]
            if answer.HasField("error"):
                raise frames.raise_error(answer.error)
            self.step(OffsetFound(wanted.place, wanted.position_id, answer.offset))
        except errors.PkError as cause:
            self.step(OffsetFound(wanted.place, wanted.position_id, error=cause))


class FetchConnection:
    """One fetch stream, from its first request to its end."""

    def __init__(
        self,
        cluster: NetworkClient,
        options: Mapping[str, Any],
        isolation: int,
        step: Callable[[FetcherEvent], None],
        node: int,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._isolation = isolation
        self._step = step
        self._node = node
        self._asks: deque[FetchRequestData] = deque()
        self._filled = asyncio.Event()
        self.ended = False
        self._tasks = TaskRegistry()
        self._stream: Stream | None = None
        self._address = ""
        self._task = self._tasks.spawn(self._run())

    def put(self, ask: FetchRequestData) -> None:
        self._asks.append(ask)
        self._filled.set()

    def follow(self) -> None:
        """End the stream if its broker has moved to another address."""
        address = self._cluster.metadata.brokers.get(self._node, self._address)
        if self._stream is not None and not self.ended and address != self._address:
            self.ended = True
            self._task.cancel()
            self._step(StreamClosed(self._node))

    async def close(self) -> None:
        self.ended = True
        await self._tasks.close()
        if self._stream is not None:
            self._stream.close()

    async def _run(self) -> None:
        writer: asyncio.Task[None] | None = None
        try:
            timeout_ms = self._options["request_timeout_ms"]
            self._stream, self._address = await self._cluster.open_stream(
                self._node, StreamKind.FETCH, timeout_ms
            )
            writer = self._tasks.spawn(self._write(self._stream))
            while (raw := await self._stream.recv()) is not None:
                self._take(frames.decode(raw))
        except (Disconnected, errors.PkError) as cause:
            _log.debug("fetch stream to broker %d: %s", self._node, cause)
        except Exception:
            _log.exception("fetch stream to broker %d", self._node)
        finally:
            if writer is not None:
                writer.cancel()
            if self._stream is not None:
                self._stream.close()
            if not self.ended:
                self.ended = True
                self._step(StreamClosed(self._node))

    async def _write(self, stream: Stream) -> None:
        options = self._options
        try:
            while True:
                while not self._asks:
                    self._filled.clear()
                    await self._filled.wait()
                ask = self._asks.popleft()
                request = wire.FetchRequest(
                    replica_id=NONE,
                    isolation=self._isolation,
                    max_wait_ms=options["fetch_max_wait_ms"],
                    min_bytes=options["fetch_min_bytes"],
                    max_bytes=options["fetch_max_bytes"],
                    credit_bytes=ask.credit,
                )
                for item in ask.positions:
                    request.positions.add(
                        topic_id=item.key.topic_id,
                        partition=item.key.partition,
                        current_leader_epoch=item.leader_epoch,
                        fetch_offset=item.offset,
                        last_fetched_epoch=item.last_fetched_epoch,
                        partition_max_bytes=options["max_partition_fetch_bytes"],
                        position_id=item.position_id,
                    )
                for key in ask.forgotten:
                    request.forgotten.add(topic_id=key.topic_id, partition=key.partition)
                await stream.send(frames.encode(head_of(request)))
        except Disconnected:
            return  # the reader meets the same error

    def _take(self, frame: frames.Frame) -> None:
        if frame.head.HasField("error"):
            raise frames.raise_error(frame.head.error)
        at = 0
        for entry in frame.head.fetch_reply.partitions:
            end = at + entry.payload_bytes
            if end > len(frame.payload):
                raise errors.CorruptBatch("a fetch frame is shorter than its head says")
            self._step(_arrived(self._node, entry, frame.payload[at:end]))
            at = end


def _same(one: FetchError, other: FetchError) -> bool:
    return (one.place, one.about, type(one.error)) == (other.place, other.about, type(other.error))


def _arrived(node: int, entry: wire.FetchedPartition, payload: memoryview) -> FetchedPartition:
    diverging = None
    if entry.HasField("diverging"):
        diverging = (entry.diverging.epoch, entry.diverging.end_offset)
    return FetchedPartition(
        node,
        PartitionKey(entry.topic_id, entry.partition),
        entry.position_id,
        payload,
        entry.next_offset,
        [AbortedTransaction(a.producer_id, a.first_offset, a.last_offset) for a in entry.aborted],
        frames.raise_error(entry.error) if entry.HasField("error") else None,
        diverging,
        entry.high_watermark,
        entry.last_stable_offset,
        entry.log_start,
        entry.dense,
    )
