"""The cluster connection of a Spark Python process: calls for the driver, scans for tasks.

Spark reuses its Python workers for many tasks and batches.  The event loop (on its own thread), its
channels and its idle fetch streams therefore live in this module, one set per process.  A forked
worker starts its own set.  Nothing here is pickled.

The clients' own `Cluster` says which broker leads a partition, and it receives every metadata
change.  When a scan's leader (scan.py) moves, dies or stops answering, the scan continues at the
new leader from its current position.

Invariants
  K1  Calls and scans retry retriable errors with back-off, until `default_api_timeout_ms` has
      passed without progress.  Spark retries neither a planner call nor, in local mode, a task.
  K2  A scan yields payloads in offset order, without gap or repetition, also across reconnects.
  K3  A stream is reused only if its last scan ended on it cleanly.
  K4  No scan keeps waiting for a broker that no longer leads the partition or that has left the
      cluster.
  K5  Metadata from a broker that lags behind is rejected: it may list fewer partitions than a query
      has read already, or lack a new topic.
  K6  The first contact of a process takes at most `connectTimeoutMs`, whatever the later time-outs
      are, so a wrong address is reported soon.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pk import errors
from pk.settings import CONSUMER
from pk.sparkconnector import prepared_fetch
from pk.sparkconnector.joint_scan import JointScan
from pk.sparkconnector.offsets import Bounds, Range, SourceProgress
from pk.sparkconnector.option_names import CONNECT_TIMEOUT_MS
from pk.sparkconnector.query_progress import QueryProgress
from pk.sparkconnector.scan import (
    UNKNOWN_TOPIC_WAIT_MS,
    Follower,
    PooledStream,
    Scan,
    ScannedBatches,
)
from pk.types import NONE, READ_COMMITTED, READ_UNCOMMITTED, EpochStart, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import open_stream
from pk.world import StreamKind

T = TypeVar("T")

#: Idle fetch streams kept for the next scan.
STREAMS_IDLE_MAX = 8
#: A live broker answers the hello within milliseconds.
HELLO_TIMEOUT_MS = 5_000
#: After the patience is over, an attempt has this time to raise its own error.
LAST_WORD_MS = 50
EARLIEST, LATEST, EARLIEST_LOCAL, TIERED_END = -2, -1, -4, -5


class TopicLeaders(NamedTuple):
    """A topic's name and id, and the address of each partition's leader ("" = no leader now)."""

    name: str
    topic_id: str
    leaders: dict[int, str]
    internal: bool


class Tier(NamedTuple):
    """Where the topic's Delta table is; an empty uri means there is no table."""

    uri: str
    version: int
    storage_options: dict[str, str]
    ends: dict[int, int]  #: partition → tiered_end (first offset beyond the table)


class _Process:
    """This process's reference to the clients' loop thread, held until the process ends."""

    def __init__(self) -> None:
        from pk.client import connection

        self.pid = os.getpid()
        self._thread = connection.acquire()
        self.world = self._thread.world
        self.loop = self._thread.loop
        self.clock = self._thread.world.clock
        self.network = self._thread.world.network
        self.clusters: dict[tuple[str, str], ClusterClient] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop thread and return its result."""
        return self._thread.run(work)


_process: _Process | None = None
_lock = threading.Lock()


def cluster(
    bootstrap: str,
    client: Mapping[str, Any] | None = None,
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
) -> ClusterClient:
    """Return this process's connection to the cluster at `bootstrap`; the first use creates it."""
    global _process
    settings = CONSUMER.resolve(dict(client or {}))
    with _lock:
        if _process is None or _process.pid != os.getpid():
            _process = _Process()
        key = (bootstrap, repr((connect_timeout_ms, sorted(settings.items()))))
        found = _process.clusters.get(key)
        if found is None:
            found = _process.clusters[key] = ClusterClient(
                _process, bootstrap, settings, connect_timeout_ms
            )
        return found


class ClusterClient:
    """A synchronous façade over the asynchronous client; any thread may call it."""

    def __init__(
        self,
        process: _Process,
        bootstrap: str,
        settings: Mapping[str, Any],
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
    ) -> None:
        self._process = process
        self._connect_ms = connect_timeout_ms
        from pk.client.network_client import NetworkClient

        self._settings = settings
        self._network = NetworkClient(
            process.world, bootstrap, client_id=settings["client_id"] or "spark",
            request_timeout_ms=settings["request_timeout_ms"],
            retry_backoff_ms=settings["retry_backoff_ms"],
            retry_backoff_max_ms=settings["retry_backoff_max_ms"],
        )  # fmt: skip
        self._network.on_change.append(self._on_metadata)
        self._names: dict[str, str] = {}  #: topic id → name
        #: cluster id and the highest metadata offset that a broker of it reported (K5)
        self._newest = ("", NONE)
        self._progress: dict[str, QueryProgress] = {}  #: by group
        self._scans: dict[Follower, None] = {}
        self._idle: list[PooledStream] = []
        self._leaders: dict[tuple[str, int], str] = {}

    # -- retrying ----------------------------------------------------------------------------------

    @property
    def _timeout_ms(self) -> int:
        return int(self._settings["request_timeout_ms"])

    @property
    def patience_ms(self) -> int:
        """The time without progress after which an operation fails (K1)."""
        return int(self._settings["default_api_timeout_ms"])

    async def _reach(self) -> None:
        """Connect to a first broker within `connectTimeoutMs` (K6)."""
        if self._network.reached:
            return
        limit = min(self._connect_ms, self.patience_ms)
        try:
            await self._network.retrying(self._network.brokers, limit)
        except (errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
            setattr(cause, "args", (f"{cause.message} (connectTimeoutMs={limit})",))  # noqa: B010
            raise

    async def _retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, a call without side effects, and repeat it on retriable errors (K1)."""
        clock = self._process.clock
        deadline = clock.monotonic_ms() + self.patience_ms
        await self._reach()
        backoff = self._network.new_backoff()
        last: errors.PkError = errors.RequestTimedOut(f"no answer within {self.patience_ms} ms")
        while True:
            left = max(1, deadline - clock.monotonic_ms())
            try:
                async with asyncio.timeout((left + LAST_WORD_MS) / 1000):
                    return await work()
            except TimeoutError:
                raise last from None
            except errors.RetriableError as cause:
                last = cause
                patience = UNKNOWN_TOPIC_WAIT_MS if _unknown(cause) else self.patience_ms
                now_ms = clock.monotonic_ms()
                if now_ms >= min(deadline, deadline - self.patience_ms + patience):
                    raise
                await clock.sleep_ms(backoff.next_ms())

    async def _call(self, address: str, request: Any) -> Any:
        return await self._network.call_at(address, request, timeout_ms=self._timeout_ms)

    async def _ask(self, request: Any) -> Any:
        """Send the request to any broker and return the reply."""
        return await self._network.call_any(request, timeout_ms=self._timeout_ms)

    def _on_metadata(self) -> None:
        """Adopt the leaders of new metadata and move scans away from former leaders (K4)."""
        for key in list(self._leaders):
            address = self._network.leader_address(PartitionKey(*key))
            if address is not None:
                self._leaders[key] = address
        for scan in list(self._scans):
            scan.follow()

    def _watch(self, name: str | None) -> None:
        """Subscribe to changes of this topic's leaders."""
        if name is not None:
            self._network.start()
            self._network.watch_topics([name])

    def publish(
        self,
        group_id: str,
        progress: SourceProgress,
        warn: Callable[[str], None],
        *,
        holds_retention: bool = False,
    ) -> None:
        """Publish the progress of the query that this process runs, without waiting (S1).

        holds_retention: what the query has not processed is kept, within bounds
        """
        found = self._progress.get(group_id)
        if found is None:
            found = QueryProgress(
                self._process.world,
                self._network,
                group_id,
                warn,
                holds_retention=holds_retention,
            )
            self._progress[group_id] = found
        self._process.loop.call_soon_threadsafe(found.publish, progress)

    # -- metadata ----------------------------------------------------------------------------------

    def topics(self, names: Sequence[str] = ()) -> list[TopicLeaders]:
        """Return the named topics, or all topics that are not internal.

        Raises `UnknownTopicOrPartition` for a name that no topic has.
        """
        return self._process.run(self._retried(lambda: self._topics(names)))

    async def _topics(self, names: Sequence[str]) -> list[TopicLeaders]:
        reply = await self._metadata(wire.MetadataRequest(topics=list(names)))
        brokers = {node.node_id: node.address for node in reply.brokers}
        found = []
        for info in reply.topics:
            if info.HasField("error"):
                raise _named(frames.raise_error(info.error), info.name)
            if info.internal and not names:
                continue
            leaders = {p.partition: brokers.get(p.leader, "") for p in info.partitions}
            found.append(TopicLeaders(info.name, info.topic_id, leaders, info.internal))
            self._names[info.topic_id] = info.name
            for partition, address in leaders.items():
                self._leaders[info.topic_id, partition] = address
        silent = set(names) - {one.name for one in found}
        if silent:
            raise errors.BrokerUnavailable(f"the broker's reply lacks topic {min(silent)}")
        return sorted(found)

    async def _metadata(self, request: wire.MetadataRequest) -> Any:
        """Ask any broker for metadata and return its reply.

        Raises `BrokerUnavailable` (retriable) if the reply is older than one received before (K5).
        """
        reply = await self._ask(request)
        cluster_id, newest = self._newest
        if reply.cluster_id == cluster_id and reply.metadata_offset < newest:
            raise errors.BrokerUnavailable(
                f"the broker that was asked is behind: it knows the metadata up to offset "
                f"{reply.metadata_offset}, another one up to {newest}"
            )
        self._newest = reply.cluster_id, reply.metadata_offset
        return reply

    # -- offsets -----------------------------------------------------------------------------------

    def bounds(self, topics: Sequence[TopicLeaders], *, read_committed: bool) -> list[Bounds]:
        """Return the readable offsets of every partition of `topics`.

        Raises `UnknownTopicId` for a topic that was deleted.
        """
        isolation = READ_COMMITTED if read_committed else READ_UNCOMMITTED
        keys = [(t.topic_id, p) for t in topics for p in sorted(t.leaders)]
        asked = [(key, what) for key in keys for what in (EARLIEST, LATEST)]
        found = self._process.run(self._retried(lambda: self._list(asked, isolation)))
        return [
            Bounds(
                t.name,
                t.topic_id,
                p,
                found[(t.topic_id, p), EARLIEST].offset,
                max(
                    found[(t.topic_id, p), LATEST].offset,
                    found[(t.topic_id, p), EARLIEST].offset,
                ),
                tuple(
                    EpochStart(each.epoch, each.start_offset)
                    for each in found[(t.topic_id, p), LATEST].epochs
                ),
            )
            for t in topics
            for p in sorted(t.leaders)
        ]

    def first_at(self, times: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int | None]:
        """By (topic id, partition), return the first offset at or after the time, or None."""
        asked = [(key, max(0, at_ms)) for key, at_ms in times.items()]
        found = self._process.run(self._retried(lambda: self._list(asked, READ_COMMITTED)))
        return {key: None if one.offset < 0 else one.offset for (key, _), one in found.items()}

    async def _list(
        self, asked: Sequence[tuple[tuple[str, int], int]], isolation: int
    ) -> dict[tuple[tuple[str, int], int], wire.OffsetAnswer]:
        by_leader: dict[str, list[tuple[tuple[str, int], int]]] = {}
        for key, what in asked:
            by_leader.setdefault(await self._leader(key), []).append((key, what))
        found: dict[tuple[tuple[str, int], int], wire.OffsetAnswer] = {}

        async def ask(address: str, part: Sequence[tuple[tuple[str, int], int]]) -> None:
            request = wire.ListOffsetsRequest(isolation=isolation)
            for (topic_id, partition), what in part:
                request.queries.add(
                    topic_id=topic_id,
                    partition=partition,
                    timestamp_ms=what,
                    current_leader_epoch=-1,
                    with_epochs=what == LATEST,
                )
            reply = await self._on_leader(address, request)
            for (key, what), answer in zip(part, _all(reply.answers, part), strict=True):
                if answer.HasField("error"):
                    self._leaders.pop(key, None)
                    raise frames.raise_error(answer.error)
                found[key, what] = answer

        await asyncio.gather(*[ask(*each) for each in by_leader.items()])
        return found

    async def _leader(self, key: tuple[str, int]) -> str:
        self._watch(self._names.get(key[0]))
        if not self._leaders.get(key):
            await self._learn_leaders([key[0]])
        address = self._leaders.get(key)
        if not address:
            raise errors.NotLeaderOrFollower(f"partition {key[1]} of {key[0]} has no leader now")
        return address

    async def _learn_leaders(self, topic_ids: Sequence[str]) -> None:
        """Ask for the leaders of topics.  Raises the error of one after those of the others."""
        reply = await self._metadata(wire.MetadataRequest(topic_ids=topic_ids))
        brokers = {node.node_id: node.address for node in reply.brokers}
        failed = None
        for info in reply.topics:
            if info.HasField("error"):
                failed = failed or frames.raise_error(info.error)
            for p in info.partitions:
                self._leaders[info.topic_id, p.partition] = brokers.get(p.leader, "")
        if failed is not None:
            raise failed

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
        """Delete the records below the given offset, by (topic id, partition)."""
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
        """Return per range the sampled offsets and the bytes below each; empty lists if unknown."""
        return self._process.run(self._retried(lambda: self._curves(ranges, samples)))

    async def _curves(
        self, ranges: Sequence[Range], samples: int
    ) -> list[tuple[list[int], list[int]]]:
        found: dict[int, tuple[list[int], list[int]]] = {}
        by_leader: dict[str, list[int]] = {}
        for at, one in enumerate(ranges):
            address = await self._leader((one.topic_id, one.partition))
            by_leader.setdefault(address, []).append(at)

        async def ask(address: str, part: Sequence[int]) -> None:
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
            for at, answer in zip(part, _all(reply.answers, part), strict=True):
                if answer.HasField("error"):
                    raise frames.raise_error(answer.error)
                found[at] = list(answer.offsets), list(answer.cumulative_bytes)

        await asyncio.gather(*[ask(*each) for each in by_leader.items()])
        return [found[at] for at in range(len(ranges))]

    @property
    def decoded_bytes_max(self) -> int:
        return int(self._settings["decoded_bytes_max"])

    # -- the tier ----------------------------------------------------------------------------------

    def tier_bounds(self, ranges: Sequence[Range]) -> dict[Range, tuple[int, int]]:
        """Return per range the first offset on the broker's disk and the end of the Delta table."""
        keys = [(one.topic_id, one.partition) for one in ranges]
        asked = [(key, what) for key in keys for what in (EARLIEST_LOCAL, TIERED_END)]
        found = self._process.run(self._retried(lambda: self._list(asked, READ_COMMITTED)))
        return {
            one: (found[key, EARLIEST_LOCAL].offset, found[key, TIERED_END].offset)
            for one, key in zip(ranges, keys, strict=True)
        }

    def tier(self, topic: str, suspects: Sequence[str] = ()) -> Tier:
        """Return where the topic's Delta table is.

        The uri is empty if the topic has no table yet or the tier cannot be reached. `suspects`
        names files of the table that could not be read; the servers then check them.
        """
        return self._process.run(self._tier(topic, suspects))

    async def _tier(self, topic: str, suspects: Sequence[str] = ()) -> Tier:
        nothing = Tier("", -1, {}, {})
        try:
            replies = await self._retried(lambda: self._tier_views(topic, suspects))
        except (errors.TierUnavailable, errors.UnsupportedFeature, errors.InvalidRequest):
            return nothing  # the broker serves cold reads too, or reports why it cannot
        there = [r for r in replies if _readable(r) and r.uri and r.version >= 0]
        if not there:
            return nothing
        newest = max(there, key=lambda reply: reply.version)
        ends: dict[int, int] = {}
        for reply in there:
            for p in reply.partitions:
                ends[p.partition] = max(p.end, ends.get(p.partition, 0))
        return Tier(newest.uri, newest.version, dict(newest.storage_options), ends)

    async def _tier_views(self, topic: str, suspects: Sequence[str]) -> list[Any]:
        """Ask all leaders of the topic for its table, and return the replies that came.

        A broker that leads no partition of the topic has not seen its table.
        """
        (known,) = await self._topics([topic])
        self._watch(topic)
        request = wire.DescribeTierRequest(topic=topic, suspects=suspects)
        asked = [
            self._on_leader(address, request)
            for address in sorted({address for address in known.leaders.values() if address})
        ] or [self._ask(request)]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        failed = [each for each in replies if isinstance(each, BaseException)]
        if len(failed) == len(replies):
            raise failed[0]
        return [each for each in replies if not isinstance(each, BaseException)]

    # -- scans -------------------------------------------------------------------------------------

    def scan(
        self, one: Range, *, read_committed: bool, epoch: int = NONE
    ) -> Iterator[ScannedBatches]:
        """Yield the batches of `one` in offset order (K2).

        Retries retriable errors (K1) and raises the others as typed errors.  epoch: the leader
        epoch of the offset before the range, if that was read before.
        """
        scan = Scan(self, one, READ_COMMITTED if read_committed else READ_UNCOMMITTED, epoch)
        future = asyncio.run_coroutine_threadsafe(scan.run(), self._process.loop)
        try:
            while (fetched := scan.next()) is not None:
                yield fetched
                scan.consumed(len(fetched.payload))
        finally:
            future.cancel()

    def joint_scan(self, ranges: Sequence[Range], *, read_committed: bool) -> JointScan:
        """Begin a joint scan of ranges, each of another partition (joint_scan.py)."""
        scan = JointScan(self, ranges, READ_COMMITTED if read_committed else READ_UNCOMMITTED)
        scan.begin()
        return scan

    def prepared(
        self, ranges: Sequence[Range], *, read_committed: bool
    ) -> list[dict[str, Any] | None]:
        """Return for each range how the JVM fetches it (prepared_fetch); None if it cannot."""
        isolation = READ_COMMITTED if read_committed else READ_UNCOMMITTED

        async def leaders() -> list[str]:
            return [await self._leader((one.topic_id, one.partition)) for one in ranges]

        addresses = self._process.run(self._retried(leaders))
        return [
            prepared_fetch.details(address, one, isolation, self._network.hello, self._settings)
            for address, one in zip(addresses, ranges, strict=True)
        ]

    async def _take_stream(self, address: str) -> PooledStream:
        for at, line in enumerate(self._idle):
            if line.address == address:
                return self._idle.pop(at)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_MS / 1000):
                stream, _ = await open_stream(
                    self._process.network, address, StreamKind.FETCH, self._network.hello
                )
        except (errors.BrokerUnavailable, TimeoutError) as cause:
            self._forget(address)
            raise errors.BrokerUnavailable(f"{address}: no fetch stream: {cause}") from cause
        return PooledStream(address, stream)

    def _keep_stream(self, line: PooledStream) -> None:
        self._idle.append(line)
        while len(self._idle) > STREAMS_IDLE_MAX:
            self._idle.pop(0).stream.close()


def _readable(reply: wire.DescribeTierReply) -> bool:
    """Return whether the table can be read; a damaged file makes only its own range unreadable."""
    return not reply.HasField("problem") or reply.problem.code == errors.DamagedTierFile.code


def _unknown(error: errors.PkError) -> bool:
    return isinstance(error, errors.UnknownTopicOrPartition)


def _all(answers: Sequence[T], asked: Sequence[Any]) -> Sequence[T]:
    """Return `answers` if there is one for each question.

    Raises `BrokerUnavailable` otherwise, so that the caller asks again.
    """
    if len(answers) != len(asked):
        raise errors.BrokerUnavailable(f"{len(answers)} answers came to {len(asked)} questions")
    return answers


def _named(error: errors.PkError, topic: str) -> errors.PkError:
    """Return `error` with the topic's name in its text."""
    if topic in error.message:
        return error
    return type(error)(f"{topic}: {error.message}", **error.details)
