"""Bounded scans: read `[start, end)` of one partition from its current leader.

The loop's thread receives frames.  The caller's thread checks and decodes them and then returns
credit, so at most `CREDIT_BYTES` wait between the two threads.  The invariants are
sparkconnector/connection K1–K4.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pk import errors, limits
from pk.client.fetcher import last_epoch
from pk.client.network_client import NetworkClient
from pk.clock import Clock
from pk.sparkconnector.offsets import Range
from pk.tasks import TaskRegistry
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of
from pk.world import Disconnected, Stream

CREDIT_BYTES = limits.FETCH_CREDIT_BYTES
#: Credit is returned in portions of at least this size.
GRANT_BYTES = 2 * limits.MIB
#: How long a scan waits for a topic that no broker knows: the metadata may still be on its way.
UNKNOWN_TOPIC_WAIT_MS = 2_000


class ScannedBatches(NamedTuple):
    """Whole batches of one fetch answer.

    The first and the last batch may reach beyond the scan's range.  The first may also begin below
    `position`; an earlier payload contained those records.
    """

    payload: memoryview
    aborted: tuple[tuple[int, int, int], ...]  #: producer id, first and last offset
    position: int
    next_offset: int
    dense: bool  #: each batch begins where the one before it ends


@dataclass(slots=True)
class PooledStream:
    """A fetch stream, and how many bytes the broker may still send on it."""

    address: str
    stream: Stream
    credit: int = 0
    next_position_id: int = 1


class Received:
    """How far a range has been received.  Its payloads follow one another, as
    sparkconnector/connection K2 says.
    """

    def __init__(self, one: Range, epoch: int = NONE) -> None:
        self.range = one
        self.position = one.start
        self.epoch = epoch  #: leader epoch of the offset before the position (KIP-320)

    @property
    def rest(self) -> Range:
        return self.range._replace(start=self.position)

    @property
    def complete(self) -> bool:
        return self.position >= self.range.end

    def take(self, entry: wire.FetchedPartition, payload: memoryview) -> ScannedBatches | None:
        """Advance by an entry of the range's position; return its batches, if it has some.

        The position does not move when this raises, as it does for an entry with an error.
        """
        if entry.HasField("error"):
            raise frames.raise_error(entry.error)
        if entry.HasField("diverging"):
            raise errors.LogTruncated(f"the log of {self.range} was truncated")
        if entry.next_offset < self.position:
            raise errors.CorruptBatch(f"a fetch went back to {entry.next_offset}")
        position = self.position
        if entry.next_offset > position:
            self.epoch = last_epoch(payload, entry.next_offset)
            self.position = entry.next_offset
        if not len(payload):
            return None
        aborted = tuple((a.producer_id, a.first_offset, a.last_offset) for a in entry.aborted)
        return ScannedBatches(payload, aborted, position, entry.next_offset, entry.dense)


def entries_of(
    line: PooledStream, frame: frames.Frame
) -> Iterator[tuple[wire.FetchedPartition, memoryview]]:
    """Yield the entries of a frame with their payloads, and count the credit that they use."""
    if frame.head.HasField("error"):
        raise frames.raise_error(frame.head.error)
    at = 0
    for entry in frame.head.fetch_reply.partitions:
        payload = frame.payload[at : at + entry.payload_bytes]
        at += entry.payload_bytes
        line.credit -= entry.payload_bytes
        if len(payload) != entry.payload_bytes:
            raise errors.CorruptBatch("a fetch frame is shorter than it says")
        yield entry, payload


_End = BaseException | None


class Follower(Protocol):
    """A scan that learns of new leaders (sparkconnector/connection K4)."""

    def follow(self) -> None: ...


class ReceiverThread(Protocol):
    """The loop thread, which receives the frames."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def clock(self) -> Clock: ...


class Connection(Protocol):
    """What a scan needs from its `ClusterClient` (connection.py); not meant for users."""

    @property
    def _process(self) -> ReceiverThread: ...

    @property
    def _network(self) -> NetworkClient: ...

    @property
    def _settings(self) -> Mapping[str, Any]: ...

    @property
    def _scans(self) -> dict[Follower, None]: ...

    @property
    def _leaders(self) -> dict[tuple[str, int], str]: ...

    @property
    def patience_ms(self) -> int: ...

    def _watch(self, name: str | None) -> None: ...

    async def _reach(self) -> None: ...

    async def _leader(self, key: tuple[str, int]) -> str: ...

    async def _learn_leaders(self, topic_ids: Sequence[str]) -> None: ...

    async def _take_stream(self, address: str) -> PooledStream: ...

    def _keep_stream(self, line: PooledStream) -> None: ...


class Scan:
    """One bounded scan: `run` runs on the loop, `next` and `consumed` on the caller's thread."""

    def __init__(self, owner: Connection, one: Range, isolation: int, epoch: int = NONE) -> None:
        self._owner = owner
        self._range = one
        self._isolation = isolation
        self._items: queue.SimpleQueue[ScannedBatches | _End] = queue.SimpleQueue()
        self._received = Received(one, epoch)
        self._owed = 0  # bytes consumed but not yet granted again; used on the loop only
        self._line: PooledStream | None = None
        # the scan fails if it makes no progress until then (sparkconnector/connection K1)
        self._deadline_ms = 0
        self._sending = TaskRegistry()

    # -- the caller's thread -----------------------------------------------------------------------

    def next(self) -> ScannedBatches | None:
        """Return the next payload; None at the end.  Raises the error that ended the scan."""
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
        self._sending.spawn(_send(line.stream, request))

    def follow(self) -> None:
        """Close the stream to a former leader (sparkconnector/connection K4)."""
        line, key = self._line, (self._range.topic_id, self._range.partition)
        address = self._owner._network.leader_address(PartitionKey(*key))
        if line is not None and address is not None and address != line.address:
            line.stream.close()

    async def run(self) -> None:
        """Fetch to the range's end; retry retriable errors (sparkconnector/connection K1)."""
        owner = self._owner
        owner._scans[self] = None
        owner._watch(self._range.topic)
        clock = owner._process.clock
        backoff = owner._network.new_backoff()
        self._deadline_ms = clock.monotonic_ms() + owner.patience_ms
        unknown_ms: float | None = None  # when brokers began to report the topic as unknown
        last: BaseException | None = None
        try:
            await owner._reach()
            while not self._received.complete:
                before = self._received.position
                try:
                    await self._attempt()
                except (errors.RetriableError, errors.UnknownTopicId, Disconnected) as cause:
                    now_ms = clock.monotonic_ms()
                    if not isinstance(cause, errors.UnknownTopicId):
                        unknown_ms = None
                    elif unknown_ms is None:
                        # the topic was deleted, or this broker does not know it yet
                        unknown_ms = now_ms
                    elif now_ms - unknown_ms >= UNKNOWN_TOPIC_WAIT_MS:
                        raise
                    if self._received.position > before:
                        backoff.reset()
                    elif now_ms >= self._deadline_ms:
                        # The last attempt may only have run out of time; the error before it names
                        # the cause.
                        hasty = isinstance(cause, errors.RequestTimedOut)
                        raise _final((hasty and last) or cause, self._range) from cause
                    last = cause
                    owner._leaders.pop((self._range.topic_id, self._range.partition), None)
                    await clock.sleep_ms(backoff.next_ms())
            self._items.put(None)
        except asyncio.CancelledError:
            raise
        except BaseException as cause:  # includes bugs: the caller's thread waits for a result
            self._items.put(cause)
        finally:
            owner._scans.pop(self, None)

    async def _attempt(self) -> None:
        """Fetch on one stream until the end of the range or an error."""
        owner, one = self._owner, self._range
        try:
            async with asyncio.timeout(self._left_s()):
                line = await owner._take_stream(await owner._leader((one.topic_id, one.partition)))
        except TimeoutError:
            raise errors.RequestTimedOut(f"no broker names the leader of {one}") from None
        clean = False
        try:
            position_id = line.next_position_id
            line.next_position_id += 1
            granted = max(0, CREDIT_BYTES - line.credit)
            line.credit += granted
            self._owed = 0
            self._line = line
            await line.stream.send(frames.encode(head_of(self._request(position_id, granted))))
            while not self._received.complete:
                async with asyncio.timeout(self._left_s()):
                    raw = await line.stream.recv()
                if raw is None:
                    raise Disconnected("the broker closed the stream")
                self._take(line, frames.decode(raw), position_id)
            clean = True
        except TimeoutError:
            raise errors.RequestTimedOut(f"{line.address} sent no more of {one}") from None
        finally:
            self._line = None
            if clean:
                owner._keep_stream(line)  # sparkconnector/connection K3
            else:
                line.stream.close()

    def _left_s(self) -> float:
        return max(1, self._deadline_ms - self._owner._process.clock.monotonic_ms()) / 1000

    def _request(self, position_id: int, credit: int) -> wire.FetchRequest:
        received = self._received
        return fetch_request(
            received.rest,
            self._isolation,
            self._owner._settings,
            position_id,
            credit,
            received.epoch,
        )

    def _take(self, line: PooledStream, frame: frames.Frame, position_id: int) -> None:
        owner, received = self._owner, self._received
        for entry, payload in entries_of(line, frame):
            if entry.position_id != position_id:
                continue
            before = received.position
            found = received.take(entry, payload)
            if received.position > before:
                self._deadline_ms = owner._process.clock.monotonic_ms() + owner.patience_ms
            if found is not None:
                self._items.put(found)


def fetch_request(
    one: Range,
    isolation: int,
    settings: Mapping[str, Any],
    position_id: int,
    credit: int,
    epoch: int = NONE,
) -> wire.FetchRequest:
    """Return the request for a range; `epoch` is that of the offset before it, NONE = unknown."""
    request = empty_request(isolation, settings, credit)
    add_position(request, one, settings, position_id, epoch)
    return request


def empty_request(isolation: int, settings: Mapping[str, Any], credit: int) -> wire.FetchRequest:
    """Return a request without positions."""
    return wire.FetchRequest(
        replica_id=-1,
        isolation=isolation,
        max_wait_ms=settings["fetch_max_wait_ms"],
        min_bytes=1,
        max_bytes=settings["fetch_max_bytes"],
        credit_bytes=credit,
    )


def add_position(
    request: wire.FetchRequest,
    one: Range,
    settings: Mapping[str, Any],
    position_id: int,
    epoch: int = NONE,
) -> None:
    """Add a range to a request; one request has at most one range of a partition."""
    request.positions.add(
        topic_id=one.topic_id,
        partition=one.partition,
        current_leader_epoch=-1,
        last_fetched_epoch=epoch,
        fetch_offset=one.start,
        end_offset=one.end,
        partition_max_bytes=settings["max_partition_fetch_bytes"],
        position_id=position_id,
    )


async def _send(stream: Stream, request: Any) -> None:
    try:
        await stream.send(frames.encode(head_of(request)))
    except Disconnected:
        pass  # the scan gets the same error from recv


def _final(cause: BaseException, one: Range) -> errors.PkError:
    where = f"{one.topic}-{one.partition}"
    if isinstance(cause, errors.PkError):
        return type(cause)(f"{where}: {cause.message}")
    return errors.BrokerUnavailable(f"{where}: {cause}")
