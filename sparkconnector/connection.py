"""A worker process's line to the cluster: calls for the driver, bounded scans for tasks.

Spark's Python workers are reused over tasks and batches, so the event loop (on a thread of its
own), its channels and idle fetch streams live in the module, one set per process; a forked worker
starts its own. Nothing here is pickled.

A scan reads `[start, end)` of one partition and then ends.  The loop's thread receives; the
caller's thread checks, decodes and hands back credit, so at most `CREDIT_BYTES` wait between the
two.

Invariants
  K1  calls and scans retry what is retriable, with back-off, until `default_api_timeout_ms` passed
      without progress: Spark itself retries neither a planner call nor (locally) a task.
  K2  a scan yields payloads in offset order, without gap or repetition, also across reconnects.
  K3  a stream is reused only if its last scan ended on it cleanly.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pk import __version__, errors, limits
from pk.settings import CONSUMER
from pk.sparkconnector.offsets import Bounds, Range
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, head_of, open_stream
from pk.world import Disconnected, Stream, StreamKind

T = TypeVar("T")

CREDIT_BYTES = limits.FETCH_CREDIT_BYTES
#: Credit is handed back in pieces of at least this.
GRANT_BYTES = 2 * limits.MIB
#: Idle fetch streams kept for the next scan.
STREAMS_IDLE_MAX = 8
#: How long a topic that is not there is waited for: metadata may still travel.
UNKNOWN_TOPIC_WAIT_MS = 2_000
EARLIEST, LATEST, EARLIEST_LOCAL, TIERED_END = -2, -1, -4, -5
READ_UNCOMMITTED, READ_COMMITTED = 0, 1


class Topic(NamedTuple):
    """A topic's identity and its partitions' leaders ("" = none now)."""

    name: str
    topic_id: str
    leaders: dict[int, str]
    internal: bool


class Tier(NamedTuple):
    """Where the topic's table stands; empty uri = there is none."""

    uri: str
    version: int
    storage_options: dict[str, str]
    ends: dict[int, int]  #: partition → tiered_end


class Fetched(NamedTuple):
    """Whole batches of one answer; the outer ones may reach beyond the scan's range."""

    payload: memoryview
    aborted: tuple[tuple[int, int, int], ...]  #: producer id, first and last offset
    next_offset: int


class _Process:
    """This process's share of the clients' loop thread, held until the process ends."""

    def __init__(self) -> None:
        from pk.client import connection

        self.pid = os.getpid()
        self._thread = connection.acquire()
        self.loop = self._thread.loop
        self.clock = self._thread.world.clock
        self.network = self._thread.world.network
        self.rng = self._thread.world.rng
        self.clusters: dict[tuple[str, str], Cluster] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop, wait for the result."""
        return self._thread.run(work)


_process: _Process | None = None
_lock = threading.Lock()


def cluster(bootstrap: str, client: Mapping[str, Any] | None = None) -> Cluster:
    """This process's connection to the cluster at `bootstrap`, made at the first use."""
    global _process
    settings = CONSUMER.resolve(dict(client or {}))
    with _lock:
        if _process is None or _process.pid != os.getpid():
            _process = _Process()
        key = (bootstrap, repr(sorted(settings.items())))
        found = _process.clusters.get(key)
        if found is None:
            found = _process.clusters[key] = Cluster(_process, bootstrap, settings)
        return found


@dataclass(slots=True)
class _Line:
    """A fetch stream and how much the broker may still send on it."""

    address: str
    stream: Stream
    credit: int = 0
    next_position_id: int = 1


class Cluster:
    """Synchronous façade; methods may be called from any thread."""

    def __init__(self, process: _Process, bootstrap: str, settings: Mapping[str, Any]) -> None:
        self._process = process
        self._bootstrap = [part for part in bootstrap.split(",") if part]
        self._settings = settings
        self._hello = wire.Hello(
            client_id=settings["client_id"] or "spark", build=__version__, protocol=PROTOCOL
        )
        self._callers: dict[str, Caller] = {}
        self._idle: list[_Line] = []
        self._leaders: dict[tuple[str, int], str] = {}
        self._turn = 0

    # -- retrying ----------------------------------------------------------------------------------

    @property
    def _timeout_ms(self) -> int:
        return int(self._settings["request_timeout_ms"])

    @property
    def patience_ms(self) -> int:
        """How long without progress before an operation fails (K1)."""
        return int(self._settings["default_api_timeout_ms"])

    async def _pause(self, attempt: int) -> None:
        least, most = self._settings["retry_backoff_ms"], self._settings["retry_backoff_max_ms"]
        wait = min(most, least * 2 ** min(attempt, 10))
        await self._process.clock.sleep_ms(wait * (0.8 + 0.4 * self._process.rng.random()))

    async def _retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """K1 for a call without side effects."""
        clock = self._process.clock
        deadline = clock.monotonic_ms() + self.patience_ms
        attempt = 0
        while True:
            try:
                return await work()
            except errors.RetriableError as cause:
                patience = UNKNOWN_TOPIC_WAIT_MS if _unknown(cause) else self.patience_ms
                now_ms = clock.monotonic_ms()
                if now_ms >= min(deadline, deadline - self.patience_ms + patience):
                    raise
                await self._pause(attempt)
                attempt += 1

    async def _call(self, address: str, request: Any) -> Any:
        caller = self._callers.get(address)
        if caller is None:
            caller = Caller(self._process.network, self._process.clock, address, self._hello)
            self._callers[address] = caller
        frame = await caller.call(request, timeout_ms=self._timeout_ms)
        body = frame.head.WhichOneof("body")
        return getattr(frame.head, body or "")

    async def _ask(self, request: Any) -> Any:
        """Any broker: the bootstrap addresses in turn."""
        last: errors.PkError | None = None
        for _ in self._bootstrap:
            address = self._bootstrap[self._turn % len(self._bootstrap)]
            try:
                return await self._call(address, request)
            except (errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
                last = cause
                self._turn += 1
        assert last is not None
        raise last

    # -- metadata ----------------------------------------------------------------------------------

    def topics(self, names: Sequence[str] = ()) -> list[Topic]:
        """The named topics, or all that are not internal.  Raises `UnknownTopicOrPartition`."""
        return self._process.run(self._retried(lambda: self._topics(names)))

    async def _topics(self, names: Sequence[str]) -> list[Topic]:
        reply = await self._ask(wire.MetadataRequest(topics=list(names)))
        brokers = {node.node_id: node.address for node in reply.brokers}
        found = []
        for info in reply.topics:
            if info.HasField("error"):
                raise _named(frames.raise_error(info.error), info.name)
            if info.internal and not names:
                continue
            leaders = {p.partition: brokers.get(p.leader, "") for p in info.partitions}
            found.append(Topic(info.name, info.topic_id, leaders, info.internal))
            for partition, address in leaders.items():
                self._leaders[info.topic_id, partition] = address
        return sorted(found)

    # -- offsets -----------------------------------------------------------------------------------

    def bounds(self, topics: Sequence[Topic], *, read_committed: bool) -> list[Bounds]:
        """What can be read of every partition of `topics` now.  Raises `UnknownTopicId`."""
        isolation = READ_COMMITTED if read_committed else READ_UNCOMMITTED
        keys = [(t.topic_id, p) for t in topics for p in sorted(t.leaders)]
        asked = [(key, what) for key in keys for what in (EARLIEST, LATEST)]
        found = self._process.run(self._retried(lambda: self._list(asked, isolation)))
        return [
            Bounds(
                t.name,
                t.topic_id,
                p,
                found[(t.topic_id, p), EARLIEST],
                max(found[(t.topic_id, p), LATEST], found[(t.topic_id, p), EARLIEST]),
            )
            for t in topics
            for p in sorted(t.leaders)
        ]

    def first_at(self, times: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int | None]:
        """By (topic id, partition): the first offset at or after that time, None if none is."""
        asked = [(key, max(0, at_ms)) for key, at_ms in times.items()]
        found = self._process.run(self._retried(lambda: self._list(asked, READ_COMMITTED)))
        return {key: None if offset < 0 else offset for (key, _), offset in found.items()}

    async def _list(
        self, asked: Sequence[tuple[tuple[str, int], int]], isolation: int
    ) -> dict[tuple[tuple[str, int], int], int]:
        by_leader: dict[str, list[tuple[tuple[str, int], int]]] = {}
        for key, what in asked:
            by_leader.setdefault(await self._leader(key), []).append((key, what))
        found: dict[tuple[tuple[str, int], int], int] = {}
        for address, part in by_leader.items():
            request = wire.ListOffsetsRequest(isolation=isolation)
            for (topic_id, partition), what in part:
                request.queries.add(
                    topic_id=topic_id,
                    partition=partition,
                    timestamp_ms=what,
                    current_leader_epoch=-1,
                )
            reply = await self._on_leader(address, request)
            for (key, what), answer in zip(part, reply.answers, strict=True):
                if answer.HasField("error"):
                    self._leaders.pop(key, None)
                    raise frames.raise_error(answer.error)
                found[key, what] = answer.offset
        return found

    async def _leader(self, key: tuple[str, int]) -> str:
        if not self._leaders.get(key):
            reply = await self._ask(wire.MetadataRequest(topic_ids=[key[0]]))
            brokers = {node.node_id: node.address for node in reply.brokers}
            for info in reply.topics:
                if info.HasField("error"):
                    raise frames.raise_error(info.error)
                for p in info.partitions:
                    self._leaders[info.topic_id, p.partition] = brokers.get(p.leader, "")
        address = self._leaders.get(key)
        if not address:
            raise errors.NotLeaderOrFollower(f"partition {key[1]} of {key[0]} has no leader now")
        return address

    async def _on_leader(self, address: str, request: Any) -> Any:
        try:
            return await self._call(address, request)
        except errors.RetriableError:
            self._forget(address)
            raise

    def _forget(self, address: str) -> None:
        for key in [key for key, leader in self._leaders.items() if leader == address]:
            del self._leaders[key]

    def delete_before(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Remove records below the given offset, by (topic id, partition)."""
        self._process.run(self._retried(lambda: self._delete_before(offsets)))

    async def _delete_before(self, offsets: Mapping[tuple[str, int], int]) -> None:
        by_leader: dict[str, wire.DeleteRecordsRequest] = {}
        for key, offset in sorted(offsets.items()):
            request = by_leader.setdefault(await self._leader(key), wire.DeleteRecordsRequest())
            request.items.add(topic_id=key[0], partition=key[1], before_offset=offset)
        for address, request in by_leader.items():
            reply = await self._on_leader(address, request)
            for result in reply.results:
                if result.HasField("error"):
                    raise frames.raise_error(result.error)

    def curves(self, ranges: Sequence[Range], samples: int) -> list[tuple[list[int], list[int]]]:
        """Per range: sampled offsets and the bytes below them; empty if the broker cannot tell."""
        return self._process.run(self._retried(lambda: self._curves(ranges, samples)))

    async def _curves(
        self, ranges: Sequence[Range], samples: int
    ) -> list[tuple[list[int], list[int]]]:
        found: dict[int, tuple[list[int], list[int]]] = {}
        by_leader: dict[str, list[int]] = {}
        for at, one in enumerate(ranges):
            address = await self._leader((one.topic_id, one.partition))
            by_leader.setdefault(address, []).append(at)
        for address, part in by_leader.items():
            request = wire.ByteOffsetsRequest()
            for at in part:
                one = ranges[at]
                request.queries.add(
                    topic_id=one.topic_id,
                    partition=one.partition,
                    start=one.start,
                    end=one.end,
                    samples_max=samples,
                )
            reply = await self._on_leader(address, request)
            for at, answer in zip(part, reply.answers, strict=True):
                if answer.HasField("error"):
                    raise frames.raise_error(answer.error)
                found[at] = list(answer.offsets), list(answer.cumulative_bytes)
        return [found[at] for at in range(len(ranges))]

    @property
    def decoded_bytes_max(self) -> int:
        return int(self._settings["decoded_bytes_max"])

    # -- the tier ----------------------------------------------------------------------------------

    def tier_bounds(self, ranges: Sequence[Range]) -> dict[Range, tuple[int, int]]:
        """Per range: the first offset the broker has on disk, and the end of the table."""
        keys = [(one.topic_id, one.partition) for one in ranges]
        asked = [(key, what) for key in keys for what in (EARLIEST_LOCAL, TIERED_END)]
        found = self._process.run(self._retried(lambda: self._list(asked, READ_COMMITTED)))
        return {
            one: (found[key, EARLIEST_LOCAL], found[key, TIERED_END])
            for one, key in zip(ranges, keys, strict=True)
        }

    def tier(self, topic: str) -> Tier:
        """The topic's table; an empty uri when it has none (yet) or the tier is away."""
        return self._process.run(self._tier(topic))

    async def _tier(self, topic: str) -> Tier:
        nothing = Tier("", -1, {}, {})
        try:
            reply = await self._retried(lambda: self._ask(wire.DescribeTierRequest(topic=topic)))
        except (errors.TierUnavailable, errors.UnsupportedFeature, errors.InvalidRequest):
            return nothing  # the broker serves cold reads too, or says why it cannot
        if reply.HasField("problem") or not reply.uri or reply.version < 0:
            return nothing
        ends = {p.partition: p.end for p in reply.partitions}
        return Tier(reply.uri, reply.version, dict(reply.storage_options), ends)

    # -- scans -------------------------------------------------------------------------------------

    def scan(self, one: Range, *, read_committed: bool) -> Iterator[Fetched]:
        """The batches of `one`, in order (K2).  Raises typed errors; retries inside (K1)."""
        scan = _Scan(self, one, READ_COMMITTED if read_committed else READ_UNCOMMITTED)
        future = asyncio.run_coroutine_threadsafe(scan.run(), self._process.loop)
        try:
            while (fetched := scan.next()) is not None:
                yield fetched
                scan.consumed(len(fetched.payload))
        finally:
            future.cancel()

    async def _take_line(self, address: str) -> _Line:
        for at, line in enumerate(self._idle):
            if line.address == address:
                return self._idle.pop(at)
        try:
            stream, _ = await open_stream(
                self._process.network, address, StreamKind.FETCH, self._hello
            )
        except errors.BrokerUnavailable:
            self._forget(address)
            raise
        return _Line(address, stream)

    def _keep_line(self, line: _Line) -> None:
        self._idle.append(line)
        while len(self._idle) > STREAMS_IDLE_MAX:
            self._idle.pop(0).stream.close()


_End = BaseException | None


class _Scan:
    """One bounded scan: `run` on the loop, `next` and `consumed` on the caller's thread."""

    def __init__(self, owner: Cluster, one: Range, isolation: int) -> None:
        self._owner = owner
        self._range = one
        self._isolation = isolation
        self._items: queue.SimpleQueue[Fetched | _End] = queue.SimpleQueue()
        self._position = one.start
        self._owed = 0  # consumed, not yet granted anew; touched on the loop only
        self._line: _Line | None = None
        self._sending: set[asyncio.Task[None]] = set()

    # -- the caller's thread -----------------------------------------------------------------------

    def next(self) -> Fetched | None:
        """The next payload; None at the end."""
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def consumed(self, size: int) -> None:
        self._owner._process.loop.call_soon_threadsafe(self._grant, size)

    # -- the loop ----------------------------------------------------------------------------------

    def _grant(self, size: int) -> None:
        self._owed += size
        line = self._line
        if line is None or self._owed < GRANT_BYTES:
            return
        granted, self._owed = self._owed, 0
        line.credit += granted
        request = wire.FetchRequest(credit_bytes=granted)
        task = asyncio.get_running_loop().create_task(_send(line.stream, request))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def run(self) -> None:
        """Fetch until the end is reached, whatever happens in between (K1)."""
        owner = self._owner
        clock = owner._process.clock
        attempt = 0
        deadline = clock.monotonic_ms() + owner.patience_ms
        try:
            while self._position < self._range.end:
                before = self._position
                try:
                    await self._attempt()
                except (errors.RetriableError, Disconnected) as cause:
                    now_ms = clock.monotonic_ms()
                    if self._position > before:
                        attempt, deadline = 0, now_ms + owner.patience_ms
                    elif now_ms >= deadline:
                        raise _final(cause, self._range) from cause
                    owner._leaders.pop((self._range.topic_id, self._range.partition), None)
                    await owner._pause(attempt)
                    attempt += 1
            self._items.put(None)
        except asyncio.CancelledError:
            raise
        except BaseException as cause:  # also bugs: the caller's thread waits for an answer
            self._items.put(cause)

    async def _attempt(self) -> None:
        """Fetch on one stream until the end or an error."""
        owner, one = self._owner, self._range
        line = await owner._take_line(await owner._leader((one.topic_id, one.partition)))
        clean = False
        try:
            position_id = line.next_position_id
            line.next_position_id += 1
            granted = max(0, CREDIT_BYTES - line.credit)
            line.credit += granted
            self._owed = 0
            self._line = line
            await line.stream.send(frames.encode(head_of(self._request(position_id, granted))))
            while self._position < one.end:
                async with asyncio.timeout(owner.patience_ms / 1000):
                    raw = await line.stream.recv()
                if raw is None:
                    raise Disconnected("the broker closed the stream")
                self._take(line, frames.decode(raw), position_id)
            clean = True
        except TimeoutError:
            raise errors.RequestTimedOut(f"{line.address}: nothing more of {one}") from None
        finally:
            self._line = None
            if clean:
                owner._keep_line(line)  # K3
            else:
                line.stream.close()

    def _request(self, position_id: int, credit: int) -> wire.FetchRequest:
        settings = self._owner._settings
        request = wire.FetchRequest(
            replica_id=-1,
            isolation=self._isolation,
            max_wait_ms=settings["fetch_max_wait_ms"],
            min_bytes=1,
            max_bytes=settings["fetch_max_bytes"],
            credit_bytes=credit,
        )
        request.positions.add(
            topic_id=self._range.topic_id,
            partition=self._range.partition,
            current_leader_epoch=-1,
            last_fetched_epoch=-1,
            fetch_offset=self._position,
            end_offset=self._range.end,
            partition_max_bytes=settings["max_partition_fetch_bytes"],
            position_id=position_id,
        )
        return request

    def _take(self, line: _Line, frame: frames.Frame, position_id: int) -> None:
        if frame.head.HasField("error"):
            raise frames.raise_error(frame.head.error)
        at = 0
        for entry in frame.head.fetch_reply.partitions:
            payload = frame.payload[at : at + entry.payload_bytes]
            at += entry.payload_bytes
            line.credit -= entry.payload_bytes
            if len(payload) != entry.payload_bytes:
                raise errors.CorruptBatch("a fetch frame is shorter than it says")
            if entry.position_id != position_id:
                continue
            if entry.HasField("error"):
                raise frames.raise_error(entry.error)
            if entry.HasField("diverging"):
                raise errors.LogTruncated(f"the log of {self._range} was truncated")
            if entry.next_offset < self._position:
                raise errors.CorruptBatch(f"a fetch went back to {entry.next_offset}")
            self._position = entry.next_offset
            if len(payload):
                aborted = tuple(
                    (a.producer_id, a.first_offset, a.last_offset) for a in entry.aborted
                )
                self._items.put(Fetched(payload, aborted, entry.next_offset))


async def _send(stream: Stream, request: Any) -> None:
    try:
        await stream.send(frames.encode(head_of(request)))
    except Disconnected:
        pass  # the scan sees the break in recv


def _unknown(error: errors.PkError) -> bool:
    return isinstance(error, errors.UnknownTopicOrPartition)


def _named(error: errors.PkError, topic: str) -> errors.PkError:
    """`error` with the topic's name in its text."""
    if topic in error.message:
        return error
    return type(error)(f"{topic}: {error.message}", **error.details)


def _final(cause: BaseException, one: Range) -> errors.PkError:
    where = f"{one.topic}-{one.partition}"
    if isinstance(cause, errors.PkError):
        return type(cause)(f"{where}: {cause.message}")
    return errors.BrokerUnavailable(f"{where}: {cause}")
