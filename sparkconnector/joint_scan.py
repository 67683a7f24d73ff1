"""Joint scans: one fetch request to each leader for many small ranges of a task.

A scan of its own (scan.py) costs a range of a few records mostly round trips and changes of
threads.  A joint scan sets the positions of many ranges with one request on a pooled stream, and
hands over the payloads of a whole frame at once.  It is an optimisation and retries nothing.  Each
range ends complete or is left over, and the caller reads what is left of it with a scan.  So the
deadlines, the retries and the errors that name a range are those of scans, and a range that fails
costs the others nothing.

The loop's thread receives frames, the caller's thread takes payloads in the order of the ranges.

Invariants
  J1  The payloads of a range are in offset order, without gap or repetition.  A range that is left
      over goes on at the position that they reach, with the leader epoch before it (KIP-320).
  J2  A joint scan ends: a stream without progress of any of its ranges is waited for up to
      `PATIENCE_MS`, or half of the patience of scans.
  J3  At most `CREDIT_BYTES` and a frame of each leader wait for the caller.  The request grants the
      credit, and no other follows.  If ranges are unfinished when it is used up, their known bytes
      were wrong, and they are left over.
  J4  A range whose leader moves is left over at once, as sparkconnector/connection K4 says.  A
      stream is kept if the broker has ended each position on it (sparkconnector/connection K3).
  J5  A joint scan has at most one range of a partition: a stream has one position for each.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pk import errors
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.scan import (
    CREDIT_BYTES,
    Connection,
    PooledStream,
    Received,
    ScannedBatches,
    add_position,
    empty_request,
    entries_of,
)
from pk.types import PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of
from pk.world import Disconnected

#: A larger range gains nothing from sharing a request.
RANGE_BYTES_MAX = 1 << 20
#: The known bytes of a joint scan: they wait until the caller comes to their range.
BYTES_MAX = 4 << 20
#: The ranges of a joint scan: a broker examines as many positions for one frame.
RANGES_MAX = 512
#: How long a stream without progress is waited for.  Scans have a deadline of their own.
PATIENCE_MS = 5_000


class Small(NamedTuple):
    """A hot range and its known bytes."""

    range: Range
    bytes: int


def runs(found: Sequence[Small | None]) -> list[range]:
    """Return the groups of adjacent ranges that joint scans read, each of at least two (J5).

    None: something else, which is read by itself.
    """
    groups: list[range] = []
    start, size = 0, 0
    keys: set[tuple[str, int]] = set()
    for at, each in enumerate([*found, None]):
        small = None if each is None or each.bytes > RANGE_BYTES_MAX else each
        if (
            small is None
            or _key(small.range) in keys
            or size + small.bytes > BYTES_MAX
            or at - start >= RANGES_MAX
        ):
            if at - start > 1:
                groups.append(range(start, at))
            start, size, keys = at, 0, set()
        if small is None:
            start = at + 1
            continue
        size += small.bytes
        keys.add(_key(small.range))
    return groups


def _key(one: Range) -> tuple[str, int]:
    return one.topic_id, one.partition


class Client(Protocol):
    """Where joint scans begin: a `ClusterClient` (connection.py)."""

    def joint_scan(self, ranges: Sequence[Range], *, read_committed: bool) -> JointScan: ...


class TaskScans:
    """The joint scans of a task, for the caller's thread: while it takes the payloads of one, the
    next one receives.
    """

    def __init__(
        self, client: Client, found: Sequence[Small | None], *, read_committed: bool
    ) -> None:
        self._client = client
        self._found = found
        self._read_committed = read_committed
        self._runs = runs(found)
        self._places = {
            at: (number, at - run.start) for number, run in enumerate(self._runs) for at in run
        }
        self._scans: dict[int, JointScan] = {}

    def of(self, at: int) -> JointRange | None:
        """Return the range at this index of the task; None if it is read by itself."""
        if at not in self._places:
            return None
        number, index = self._places[at]
        for before in [each for each in self._scans if each < number]:
            self._scans.pop(before).close()
        for each in (number, number + 1):
            if each < len(self._runs) and each not in self._scans:
                ranges = [small.range for at in self._runs[each] if (small := self._found[at])]
                self._scans[each] = self._client.joint_scan(
                    ranges, read_committed=self._read_committed
                )
        return JointRange(self._scans[number], index)

    def close(self) -> None:
        """Give up what is not received yet."""
        for scan in self._scans.values():
            scan.close()


@dataclass(slots=True, frozen=True)
class JointRange:
    """One range of a joint scan."""

    scan: JointScan
    index: int

    def batches(self) -> Iterator[ScannedBatches]:
        """Yield what is received of the range; `received` then says what is left of it."""
        return self.scan.batches(self.index)

    @property
    def received(self) -> Received:
        return self.scan.places[self.index]


@dataclass(slots=True, eq=False)
class _Fetch:
    """The ranges of one leader, on its stream."""

    line: PooledStream
    waiting: dict[int, int]  #: by position id the index of each unfinished range
    clean: bool = True  #: the broker has ended all positions that are not waiting


class JointScan:
    """One joint scan: `run` and `follow` run on the loop, the rest on the caller's thread."""

    def __init__(self, owner: Connection, ranges: Sequence[Range], isolation: int) -> None:
        self._owner = owner
        self._isolation = isolation
        self.places = [Received(one) for one in ranges]  #: written by the loop until a range ends
        #: payloads of ranges, and None behind the last payload of a range
        self._items: queue.SimpleQueue[list[tuple[int, ScannedBatches | None]] | BaseException]
        self._items = queue.SimpleQueue()
        self._future: Future[None] | None = None
        # of the caller's thread
        self._taken: list[deque[ScannedBatches]] = [deque() for _ in ranges]
        self._over: set[int] = set()
        # of the loop
        self._unfinished = set(range(len(ranges)))
        self._fetches: list[_Fetch] = []
        self._size = 0  #: bytes of all payloads

    # -- the caller's thread -----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to receive."""
        self._future = asyncio.run_coroutine_threadsafe(self.run(), self._owner._process.loop)

    def close(self) -> None:
        """Give up what is not received yet."""
        if self._future is not None:
            self._future.cancel()

    def batches(self, index: int) -> Iterator[ScannedBatches]:
        """Yield the payloads of a range; wait until it is complete or left over.

        Raises the error of a first contact that fails.
        """
        taken = self._taken[index]
        while True:
            while taken:
                yield taken.popleft()
            if index in self._over:
                return
            item = self._items.get()
            if isinstance(item, BaseException):
                raise item
            for each, found in item:
                if found is None:
                    self._over.add(each)
                else:
                    self._taken[each].append(found)

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fetch the ranges until each is complete or left over."""
        owner = self._owner
        owner._scans[self] = None
        try:
            await owner._reach()  # sparkconnector/connection K6: a scan would wait a second time
            groups = await self._by_leader()
            await asyncio.gather(*[self._fetch(*each) for each in groups.items()])
        except asyncio.CancelledError:
            raise
        except BaseException as cause:  # includes bugs: the caller's thread waits for a result
            self._items.put(cause)
        finally:
            owner._scans.pop(self, None)
            self._leave(range(len(self.places)))

    @property
    def _patience_s(self) -> float:
        return min(PATIENCE_MS, self._owner.patience_ms // 2) / 1000

    async def _by_leader(self) -> Mapping[str, list[int]]:
        """Return the ranges of each leader's address; a range without a leader is left over."""
        owner = self._owner
        keys = [_key(place.range) for place in self.places]
        for topic in dict.fromkeys(place.range.topic for place in self.places):
            owner._watch(topic)
        unknown = list(dict.fromkeys(key[0] for key in keys if not owner._leaders.get(key)))
        if unknown:
            try:
                async with asyncio.timeout(self._patience_s):
                    await owner._learn_leaders(unknown)
            except (errors.PkError, TimeoutError):
                pass  # a scan reports what concerns its range
        groups: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            address = owner._leaders.get(key)
            if address:
                groups.setdefault(address, []).append(index)
            else:
                self._leave([index])
        return groups

    async def _fetch(self, address: str, group: Sequence[int]) -> None:
        """Fetch the ranges of one leader, and leave over what it does not send."""
        owner = self._owner
        now_s = asyncio.get_running_loop().time
        fetch = None
        try:
            async with asyncio.timeout(self._patience_s) as limit:
                line = await owner._take_stream(address)
                fetch = _Fetch(line, {})
                self._fetches.append(fetch)
                await line.stream.send(frames.encode(head_of(self._request(fetch, group))))
                while fetch.waiting:
                    raw = await line.stream.recv()
                    if raw is None:
                        raise Disconnected("the broker closed the stream")
                    if self._take(fetch, frames.decode(raw)):
                        limit.reschedule(now_s() + self._patience_s)
                    if line.credit <= 0 or self._size > CREDIT_BYTES:
                        break  # J3
        except (errors.PkError, Disconnected, TimeoutError):
            for index in self._unfinished.intersection(group):
                owner._leaders.pop(_key(self.places[index].range), None)
        except Exception as bug:
            self._items.put(bug)  # before the ranges that are left over, which would hide it
        finally:
            if fetch is not None:
                self._fetches.remove(fetch)
                if fetch.clean and not fetch.waiting:
                    owner._keep_stream(fetch.line)
                else:
                    fetch.line.stream.close()
            self._leave(group)

    def _request(self, fetch: _Fetch, group: Sequence[int]) -> wire.FetchRequest:
        """Return the request for the unfinished ranges of a group, which then wait."""
        line, settings = fetch.line, self._owner._settings
        granted = max(0, CREDIT_BYTES - line.credit)
        line.credit += granted
        request = empty_request(self._isolation, settings, granted)
        for index in group:
            add_position(request, self.places[index].range, settings, line.next_position_id)
            fetch.waiting[line.next_position_id] = index
            line.next_position_id += 1
        return request

    def _take(self, fetch: _Fetch, frame: frames.Frame) -> bool:
        """Hand over the payloads of a frame; return whether a range made progress."""
        found: list[tuple[int, ScannedBatches | None]] = []
        moved = False
        try:
            for entry, payload in entries_of(fetch.line, frame):
                self._size += len(payload)
                index = fetch.waiting.get(entry.position_id)
                if index is None:
                    continue
                place = self.places[index]
                before = place.position
                try:
                    batches = place.take(entry, payload)
                except errors.PkError:
                    # an error ends the position at the broker (server/handlers/fetch)
                    fetch.clean = fetch.clean and entry.HasField("error")
                    self._owner._leaders.pop(_key(place.range), None)
                    over = True
                else:
                    moved = moved or place.position > before
                    over = place.complete
                    if batches is not None:
                        found.append((index, batches))
                if over:
                    del fetch.waiting[entry.position_id]
                    self._unfinished.discard(index)
                    found.append((index, None))
        finally:
            if found:
                self._items.put(found)
        return moved

    def _leave(self, group: Sequence[int]) -> None:
        """Leave over the ranges of a group that are unfinished."""
        left = [index for index in group if index in self._unfinished]
        self._unfinished.difference_update(left)
        if left:
            self._items.put([(index, None) for index in left])

    def follow(self) -> None:
        """Leave over the ranges whose leader is another one now (J4)."""
        network = self._owner._network
        for fetch in self._fetches:
            moved = {}
            for position_id, index in fetch.waiting.items():
                address = network.leader_address(PartitionKey(*_key(self.places[index].range)))
                if address is not None and address != fetch.line.address:
                    moved[position_id] = index
            for position_id in moved:
                del fetch.waiting[position_id]
                fetch.clean = False
            self._leave(list(moved.values()))
            if moved and not fetch.waiting:
                fetch.line.stream.close()  # wakes its fetch
