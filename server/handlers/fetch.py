"""The fetch stream: positions in, frames out, for as long as credits last (rule P4).

World-generic.  A stream has a *reader* (positions, credits), a *pump* (one frame at a time) and at
most COLD_MAX reads from the tier, which run beside the pump: a hot position never waits for a cold
one.  When everything was sent the pump sleeps until a partition's bound moves; waking costs what
moved (rule P6).

A byte is copied twice in this process, both times by the kernel: page cache into the read, the
read into the socket.  Who waits at the end of a log for small appends is answered from memory, on
the loop (log/batch_cache.py): a trip to the read lane and back would cost more than the answer.

The log's checksums are the readers' to verify: bytes go out as they lie on the disk.  One batch is
looked at here, the first that is read after a position was set: a reader that tripped over damage
sets its position there again, and so the broker learns of it and takes the partition offline (rule
L9).

For readers
  - a position is answered at least once, without payload if there is nothing to read yet: the
    reader learns the partition's bounds;
  - an entry with an error ends its position; the reader sets it again when it has dealt with the
    error;
  - `diverging` without payload also ends the position (KIP-320): the reader truncates or reports
    LogTruncated;
  - batches are whole: the first may begin below the position, the last may pass `end_offset`.

Invariants
  E1  nothing at or above the bound of the isolation level is sent: high watermark or last stable
      offset
  E2  `next_offset` of an entry >= what it covers, also when it carries nothing (rule L12)
  E3  the pump holds at most one frame; a cold read holds at most its share of one
  E4  one batch larger than every bound still travels, alone
  E5  whoever stands at a bound is woken when that moves: each turn watches the partition it looks
      at before it looks, for that may be there only since the position was set, or be another one
  E6  what was read goes out only while the leader that was asked leads: when it does not, its log
      may have been cut, and filled by the next one, before the disk came to it
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pk import errors
from pk.log.plan import Read
from pk.server.handlers.fetch_session import FetchSession, Position
from pk.server.handlers.replica_fetch import ReplicaEnd
from pk.server.replica.leader import Leader
from pk.server.replica.partition import Partition
from pk.types import NONE, READ_COMMITTED, Offset, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import error_head, head_of
from pk.world import Disconnected, Stream

if TYPE_CHECKING:
    from pk.server.broker.core import BrokerCore

#: Reads from the tier that one stream may have under way.
COLD_MAX = 2
#: Positions looked at for one frame.
TURNS_MAX = 512


class _Plan(NamedTuple):
    """A position with something to read."""

    position: Position
    partition: Partition
    bound: Offset
    leader: Leader | None  #: of whose log this is (E6)
    stored: bool = False  #: a replica reads what lies in the segments, below log_start too


class _Cold(NamedTuple):
    """What the tier answered for a position."""

    position: Position
    payload: bytes | memoryview
    next_offset: Offset
    error: errors.PkError | None


class FetchStream:
    """One accepted fetch stream."""

    def __init__(self, core: BrokerCore, stream: Stream) -> None:
        self._core = core
        self._stream = stream
        self._session = FetchSession()
        self._wake = asyncio.Event()
        self._cold_waiting: deque[Position] = deque()
        self._cold_done: deque[_Cold] = deque()
        self._cold_tasks: dict[asyncio.Task[None], None] = {}
        self._replica: ReplicaEnd | None = None  #: a follower is at the other end

    # -- life ------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Until the stream ends."""
        pump = asyncio.get_running_loop().create_task(self._pump())
        try:
            await self._read()
        except Disconnected:
            pass
        except errors.PkError as refusal:
            try:
                await self._stream.send(frames.encode(error_head(0, refusal)))
            except Disconnected:
                pass
        finally:
            self._cold_waiting.clear()
            tasks = [pump, *self._cold_tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for key in list(self._session.positions):
                self._unwatch(key)
            if self._replica is not None:
                self._replica.close()
            self._stream.close()

    def watermark_moved(self, key: PartitionKey) -> None:
        """watchers.EndWatcher."""
        if self._replica is not None:
            self._replica.watermark_moved(key)

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None:
        """A partition's bound moved (partition.Watcher)."""
        self._session.mark(key, self._core.clock.monotonic_ms(), urgent=urgent)
        self._wake.set()

    def _unwatch(self, key: PartitionKey) -> None:
        partition = self._core.partitions.get(key)
        if partition is not None:
            partition.unwatch(self)

    # -- reader ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (raw := await self._stream.recv()) is not None:
            head = frames.decode(raw).head
            if head.WhichOneof("body") != "fetch":
                raise errors.InvalidRequest("a fetch stream carries fetch requests only")
            if head.fetch.replica_epoch > 0 and self._replica is None:
                self._replica = ReplicaEnd(
                    self._core, self, head.fetch.replica_id, head.fetch.replica_epoch
                )
            if self._replica is not None:
                self._replica.check(head.fetch)
                self._replica.confirmed(head.fetch)
                self._replica.full(head.fetch)
            removed = self._session.apply(head.fetch, self._core.clock.monotonic_ms())
            if self._replica is not None:
                self._replica.forgotten(removed)
            for key in removed:
                self._unwatch(key)
            self._wake.set()

    def _watch(self, key: PartitionKey) -> None:
        """Wake this stream when the bound of `key` moves (E5)."""
        partition = self._core.partitions.get(key)
        if partition is None:
            return  # its turn is answered with an error
        if self._replica is None:
            partition.watch(self)
        else:
            partition.watch_end(self)

    # -- pump ------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        try:
            while True:
                self._wake.clear()
                wait_ms = self._wait_ms()
                if wait_ms != 0:
                    await self._sleep(wait_ms)
                    continue
                await self._send_frame()
        except Disconnected:
            return  # the reader notices too and ends the stream
        except Exception as bug:
            self._core.bug("fetch", bug)
            self._stream.close()

    def _wait_ms(self) -> int | None:
        """How long until there is something to send:

        0 = now, None = until somebody wakes the pump.
        """
        session = self._session
        if session.credit <= 0:
            return None
        if self._cold_done:
            return 0
        if not session.may_send:
            return None
        now_ms = self._core.clock.monotonic_ms()
        if session.min_bytes > 1:
            for position in session.take_unweighed():
                session.weigh(position, self._available(position))
        return session.due_at_ms(now_ms) - now_ms if session.due_at_ms(now_ms) > now_ms else 0

    async def _sleep(self, wait_ms: int | None) -> None:
        if wait_ms is None:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _available(self, position: Position) -> int:
        """Bytes below the bound, to weigh against min_bytes:

        at segment and index granularity, never too few.
        """
        partition = self._core.partitions.get(position.key)
        if (
            partition is None
            or partition.leader is None
            or position.next_offset < partition.log.local_log_start
        ):
            return self._session.min_bytes  # an error or a cold read: to be looked at now
        bound = partition.bound(self._session.isolation)
        if position.next_offset >= bound:
            return 0
        try:
            start, end = partition.log.bytes_at([position.next_offset, bound])
        except errors.PkError:  # an index was made anew, of what is damaged: its turn will tell
            return self._session.min_bytes
        return max(1, end - start)

    async def _send_frame(self) -> None:
        session = self._session
        reply = wire.FetchReply()
        pieces: list[frames.Buffer] = []
        budget = min(session.max_bytes, max(1, session.credit))
        sent = self._add_cold(reply, pieces, budget)
        plans = []
        for position in session.take_turns(TURNS_MAX):
            plan = self._plan(position, reply)
            if plan is not None:
                plans.append(plan)
        while plans and sent < budget:
            recent = _read_at_once(plans[0], budget - sent, sent == 0)
            if recent is not None:
                sent += self._add(reply, pieces, plans.pop(0), recent, None)
                continue
            disk = plans[0].partition.writer.disk
            turn = [plan for plan in plans if plan.partition.writer.disk is disk]
            plans = [plan for plan in plans if plan.partition.writer.disk is not disk]
            room = budget - sent
            force = sent == 0
            done = await disk.read(partial(_read_all, turn, room, force))
            for plan, (read, error) in zip(turn, done, strict=False):
                sent += self._add(reply, pieces, plan, read, error)
            plans = turn[len(done) :] + plans
            if not done:
                break
        session.first_again([plan.position for plan in plans])
        if reply.partitions:
            frame = frames.pieces(head_of(reply), pieces)
            session.sent(sent, self._core.clock.monotonic_ms())
            self._core.metrics.fetched(sum(map(len, frame)))
            await self._stream.send(*frame)
        else:
            session.sent(0, self._core.clock.monotonic_ms())

    # -- hot -------------------------------------------------------------------------------------

    def _plan(self, position: Position, reply: wire.FetchReply) -> _Plan | None:
        """What to do about a position:

        read it, leave it, send it to the tier, or answer it at once.
        """
        self._watch(position.key)
        if self._replica is not None:
            return self._plan_replica(self._replica, position, reply)
        try:
            partition = self._core.find(position.key)
            partition.serving(position.leader_epoch)
            # First: a reader above the end of a log that was cut must hear that it was cut, not
            # that it is out of range, or it would reset in silence (rule R4).
            diverging = partition.diverging(position.last_fetched_epoch, position.next_offset)
            if diverging is None:
                partition.check_fetch(position.leader_epoch, position.next_offset)
        except errors.PkError as error:
            self._fail(reply, position, error)
            return None
        if diverging is not None:
            entry = self.entry(reply, position, partition)
            entry.diverging.CopyFrom(diverging)
            self.end(position)
            return None
        position.last_fetched_epoch = NONE
        if position.cold:
            # marked while the tier reads: its turn comes with the answer
            # (handlers/fetch_session F2)
            return None
        bound = partition.bound(self._session.isolation)
        if position.next_offset < min(partition.log.local_log_start, bound):
            position.cold = True
            self._cold_waiting.append(position)
            self._start_cold()
            return None
        if position.next_offset >= bound:
            if position.announce:
                self.entry(reply, position, partition).next_offset = position.next_offset
                self._session.served(position, position.next_offset)
            return None
        return _Plan(position, partition, bound, partition.leader)

    def _add(
        self,
        reply: wire.FetchReply,
        pieces: list[frames.Buffer],
        plan: _Plan,
        read: Read | None,
        error: errors.PkError | None,
    ) -> int:
        """One read into the frame; returns its bytes."""
        position, partition = plan.position, plan.partition
        session = self._session
        if not session.current(position):
            return 0  # set again or forgotten while the disk worked
        if partition.leader is not plan.leader:
            session.again(position)  # E6
            return 0
        if error is not None:
            if isinstance(error, errors.OffsetOutOfRange):
                session.again(
                    position
                )  # retention passed it meanwhile: judged anew on its next turn
            else:
                if isinstance(error, errors.CorruptLog):
                    self._core.storage_failed(partition, error)  # L9
                self._fail(reply, position, self._core.corruption.told(partition, error))
            return 0
        assert read is not None
        if read.next_offset <= position.next_offset:
            session.again(position)
            return 0
        position.arriving = position.arriving and not read.data
        entry = self.entry(reply, position, partition)
        entry.next_offset = read.next_offset
        entry.payload_bytes = len(read.data)
        if session.isolation == READ_COMMITTED:
            for aborted in partition.log.aborted_in(position.next_offset, read.next_offset):
                entry.aborted.add(
                    producer_id=aborted.producer_id,
                    first_offset=aborted.first_offset,
                    last_offset=aborted.last_offset,
                )
        if read.data:
            pieces.append(read.data)
        session.served(position, read.next_offset)
        if not session.current(position):
            self._unwatch(position.key)  # a bounded scan that is through
        elif read.next_offset < self._bound(partition):
            session.again(position)
        return len(read.data)

    def entry(
        self, reply: wire.FetchReply, position: Position, partition: Partition
    ) -> wire.FetchedPartition:
        high_watermark = partition.high_watermark
        entry = reply.partitions.add(
            topic_id=position.key.topic_id,
            partition=position.key.partition,
            position_id=position.position_id,
            high_watermark=high_watermark,
            last_stable_offset=partition.last_stable_offset,
            log_start=partition.log.log_start,
            tiered_end=partition.tiered_end,
            next_offset=position.next_offset,
            leader_epoch=partition.leader_epoch,
            leader_hint=partition.leader_hint,
        )
        if self._replica is not None:
            self._replica.describe(entry, partition)
        return entry

    def _bound(self, partition: Partition) -> Offset:
        if self._replica is not None:
            return partition.log.written_end
        return partition.bound(self._session.isolation)

    def _fail(self, reply: wire.FetchReply, position: Position, error: errors.PkError) -> None:
        """Answer with an error; that ends the position."""
        partition = self._core.partitions.get(position.key)
        if partition is not None:
            entry = self.entry(reply, position, partition)
        else:
            entry = reply.partitions.add(
                topic_id=position.key.topic_id,
                partition=position.key.partition,
                position_id=position.position_id,
                next_offset=position.next_offset,
                leader_hint=self._core.leader_hint(position.key),
            )
        entry.error.CopyFrom(frames.error_of(error))
        self._core.metrics.refused(error)
        self.end(position)

    def end(self, position: Position) -> None:
        self._session.drop(position.key)
        self._unwatch(position.key)

    # -- replicas --------------------------------------------------------------------------------

    def _plan_replica(
        self, replica: ReplicaEnd, position: Position, reply: wire.FetchReply
    ) -> _Plan | None:
        try:
            found = replica.compare(position, reply)
        except errors.PkError as error:
            self._fail(reply, position, error)
            return None
        if found is None:
            return None
        partition, bound = found
        return _Plan(position, partition, bound, partition.leader, stored=True)

    def position(self, key: PartitionKey) -> Position | None:
        """Where the reader stands now."""
        return self._session.positions.get(key)

    def served(self, position: Position) -> None:
        """It was told where the partition stands, without data."""
        self._session.served(position, position.next_offset)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that answers a position when a disk has answered; bounded by the positions."""
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._cold_tasks[task] = None
        task.add_done_callback(self._cold_ended)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Disconnected:
            return  # the reader notices too and ends the stream
        except errors.PkError as error:
            self._core.metrics.refused(error)
            self._stream.close()
        except Exception as bug:
            self._core.bug("answering a replica", bug)
            self._stream.close()

    async def answer(self, position: Position, reply: wire.FetchReply) -> None:
        """Send `reply`, unless `position` was set again meanwhile; it ends here."""
        if self._session.current(position):
            self.end(position)
            await self._stream.send(*frames.pieces(head_of(reply), []))

    # -- cold ------------------------------------------------------------------------------------

    def _start_cold(self) -> None:
        while self._cold_waiting and len(self._cold_tasks) + len(self._cold_done) < COLD_MAX:
            position = self._cold_waiting.popleft()
            if self._session.current(position):
                task = asyncio.get_running_loop().create_task(self._read_cold(position))
                self._cold_tasks[task] = None
                task.add_done_callback(self._cold_ended)

    def _cold_ended(self, task: asyncio.Task[None]) -> None:
        self._cold_tasks.pop(task, None)
        self._start_cold()  # its answer may have been sent already
        self._wake.set()

    async def _read_cold(self, position: Position) -> None:
        """One delayed remote fetch."""
        share = max(1, self._session.max_bytes // COLD_MAX)
        try:
            partition = self._core.find(position.key)
            payload, next_offset = await self._core.tier.fetch(
                partition, position.next_offset, min(position.max_bytes, share)
            )
            done = _Cold(position, payload, next_offset, None)
        except errors.PkError as error:
            done = _Cold(position, b"", position.next_offset, error)
        except Exception as bug:
            self._core.bug("cold fetch", bug)
            done = _Cold(position, b"", position.next_offset, errors.InternalError(repr(bug)))
        self._cold_done.append(done)

    def _add_cold(self, reply: wire.FetchReply, pieces: list[frames.Buffer], budget: int) -> int:
        """What the tier answered meanwhile goes into the frame first."""
        sent = 0
        while self._cold_done and (sent == 0 or sent + len(self._cold_done[0].payload) <= budget):
            cold = self._cold_done.popleft()
            position = cold.position
            position.cold = False
            partition = self._core.partitions.get(position.key)
            if not self._session.current(position):
                continue
            if cold.error is not None or partition is None:
                self._fail(
                    reply, position, cold.error or errors.UnknownTopicId("the topic was deleted")
                )
                continue
            entry = self.entry(reply, position, partition)
            entry.cold = True
            entry.next_offset = cold.next_offset
            entry.payload_bytes = len(cold.payload)
            if len(cold.payload):
                pieces.append(cold.payload)
                sent += len(cold.payload)
            self._session.served(position, cold.next_offset)
            if self._session.current(position):
                self._session.again(position)
            else:
                self._unwatch(position.key)
        self._start_cold()
        return sent


def _read_at_once(plan: _Plan, room: int, force: bool) -> Read | None:
    """On the loop: what memory has for the plan; None = the read lane must be asked.

    Of the plans the first is asked for only, so that no position is overtaken for ever by others
    that stand at the ends of their logs.
    """
    position, partition, bound, *_ = plan
    if position.arriving:
        return None  # L9: its first batch is verified where it lies
    return partition.log.read_recent(
        position.next_offset,
        bound=bound,
        max_bytes=min(position.max_bytes, room),
        min_one_batch=force,
    )


def _read_all(
    plans: list[_Plan], room: int, force: bool
) -> list[tuple[Read | None, errors.PkError | None]]:
    """In the read lane: as many plans as fit into `room` bytes; the first one whatever it takes
    (E4).

    Shorter than `plans` when the room ran out.
    """
    done: list[tuple[Read | None, errors.PkError | None]] = []
    for position, partition, bound, _, stored in plans:
        if room <= 0:
            break
        try:
            read = partition.log.read(
                position.next_offset,
                bound=bound,
                max_bytes=min(position.max_bytes, room),
                min_one_batch=force,
                verify_first=position.arriving,
                stored=stored,
            )
        except errors.PkError as error:
            done.append((None, error))
            continue
        if read.empty and read.next_offset <= position.next_offset:
            break  # its first batch does not fit any more: it leads the next frame
        done.append((read, None))
        room -= len(read.data)
        force = force and read.empty
    return done
