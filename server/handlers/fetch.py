"""The fetch stream: receives positions and credits, sends frames while credits last (rule P4).

World-generic.  A stream has a *reader* task (positions, credits), a *pump* task (one frame at a
time) and at most COLD_MAX reads from the tier, which run beside the pump.  So a hot position never
waits for a cold one.  When everything was sent, the pump sleeps until the bound of a partition
moves.  A wake-up costs O(partitions whose bound moved) (rule P6).

The process copies a byte twice, both times in the kernel: from the page cache into the read, and
from there into the socket.  A reader that waits at the end of a log for small appends is answered
from memory, on the loop (log/batch_cache.py), because a read in another thread would cost more.

Readers verify the checksums of batches; the broker sends the bytes as they are on the disk.  The
broker verifies one batch: the first that it reads after a position was set.  A reader that finds a
damaged batch sets its position there again.  So the broker finds the damage too, and takes the
partition offline (rule L9).

For readers
  - Each position is answered at least once, without payload if there is nothing to read yet, so
    that the reader learns the partition's bounds.
  - An entry with an error ends its position.  The reader sets it again once it has handled the
    error.
  - `diverging` without payload also ends the position (KIP-320): the reader truncates or reports
    LogTruncated.
  - Batches are complete: the first may begin below the position, the last may pass `end_offset`.

Invariants
  E1  Nothing at or above the bound of the isolation level is sent: high watermark or last stable
      offset.
  E2  `next_offset` of an entry is at or above the end of the offsets that the entry covers, also if
      the entry has no payload (L12).
  E3  The pump holds at most one frame.  A cold read holds at most its share of one.
  E4  A batch that is larger than every bound is sent alone.
  E5  A position at a bound is woken when the bound moves.  Each turn registers as a watcher of the
      partition before it reads the bound, because the partition may have been created, or replaced,
      since the position was set.
  E6  Bytes that were read are sent only if this broker still leads in the same epoch.  Otherwise
      the log may have been truncated, and filled by the next leader, before the disk was read.
  E7  A frame names a bounded number of aborted transactions.  An entry that would need more covers
      fewer batches, and one for which no room is left waits for the next frame.
  E8  The aborted transactions of an entry are those of the segments that its bytes were read from.
      If segments were dropped or swapped during the read, the position is read again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from pk import errors
from pk.log.plan import Read
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.handlers import aborted_lists
from pk.server.handlers.fetch_session import FetchSession, Position
from pk.server.handlers.replica_fetch import ReplicaEnd
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.context import Environment
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.leader import Leader
from pk.server.replica.partition import Partition
from pk.server.tier.client import TierClient
from pk.tasks import TaskRegistry
from pk.types import NONE, READ_COMMITTED, AbortedTransaction, Offset, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import error_head, head_of
from pk.world import Disconnected, Stream

#: Most concurrent reads from the tier of one stream.
COLD_MAX = 2
#: Most positions that are examined for one frame.
TURNS_MAX = 512


class _Plan(NamedTuple):
    """A position with something to read."""

    position: Position
    partition: Partition
    bound: Offset
    leader: Leader | None  #: the leader epoch of the log that is read (E6)
    reshapes: int  #: of the log before the read (E8)
    stored: bool = False  #: whether records below log_start are read too, for a replica


class _Cold(NamedTuple):
    """The answer of the tier for a position."""

    position: Position
    payload: bytes | memoryview
    next_offset: Offset
    error: errors.PkError | None


class FetchStream:
    """One accepted fetch stream."""

    def __init__(
        self,
        env: Environment,
        partitions: HostedPartitions,
        corruption: CorruptionManager,
        tier: TierClient,
        alter_partition: AlterPartitionManager,
        stream: Stream,
    ) -> None:
        self._env = env
        self._clock = env.clock
        self._now_s = asyncio.get_running_loop().time
        self._partitions = partitions
        self._corruption = corruption
        self._tier = tier
        self._cold_reader = tier.new_reader()
        self._alter_partition = alter_partition
        self._stream = stream
        self._session = FetchSession()
        self._wake = asyncio.Event()
        self._aborted_room = 0  #: how many aborted transactions the frame may still name (E7)
        self._cold_waiting: deque[Position] = deque()
        self._cold_done: deque[_Cold] = deque()
        self._tasks = TaskRegistry()
        self._cold_tasks = TaskRegistry()
        self._replica: ReplicaEnd | None = None  #: a follower is at the other end

    # -- life ------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until the stream ends."""
        self._tasks.spawn(self._pump())
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
            await self._tasks.close()
            await self._cold_tasks.close()
            for key in list(self._session.positions):
                self._unwatch(key)
            if self._replica is not None:
                self._replica.close()
            self._stream.close()

    def watermark_moved(self, key: PartitionKey) -> None:
        """The high watermark of a partition moved (watchers.EndWatcher)."""
        if self._replica is not None:
            self._replica.watermark_moved(key)

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None:
        """The bound of a partition moved (partition.Watcher)."""
        self._session.mark(key, self._clock.monotonic_ms(), urgent=urgent)
        self._wake.set()

    def _unwatch(self, key: PartitionKey) -> None:
        partition = self._partitions.get(key)
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
                    self._env,
                    self._partitions,
                    self._alter_partition,
                    self,
                    head.fetch.replica_id,
                    head.fetch.replica_epoch,
                )
            if self._replica is not None:
                self._replica.check(head.fetch)
                self._replica.confirmed(head.fetch)
                self._replica.full(head.fetch)
            removed = self._session.apply(head.fetch, self._clock.monotonic_ms())
            if self._replica is not None:
                self._replica.forgotten(removed)
            for key in removed:
                self._unwatch(key)
            self._wake.set()

    def _watch(self, key: PartitionKey) -> None:
        """Watch the partition of a position (E5)."""
        partition = self._partitions.get(key)
        if partition is None:
            return  # its turn answers with an error
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
            self._env.bug("fetch", bug)
            self._stream.close()

    def _wait_ms(self) -> int | None:
        """Return the time until a frame can be sent.

        0 = now; None = until the pump is woken.
        """
        session = self._session
        if session.credit <= 0:
            return None
        if self._cold_done:
            return 0
        if not session.may_send:
            return None
        now_ms = self._clock.monotonic_ms()
        if session.min_bytes > 1:
            for position in session.take_unweighed():
                session.weigh(position, self._available(position))
        return session.due_at_ms(now_ms) - now_ms if session.due_at_ms(now_ms) > now_ms else 0

    async def _sleep(self, wait_ms: int | None) -> None:
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _available(self, position: Position) -> int:
        """Return the bytes below the bound, to compare with min_bytes.

        The number has the granularity of segments and indexes, and is never too small.
        """
        partition = self._partitions.get(position.key)
        if (
            partition is None
            or partition.leader is None
            or position.next_offset < partition.log.local_log_start
        ):
            return self._session.min_bytes  # an error or a cold read: due now
        bound = partition.bound(self._session.isolation)
        if position.next_offset >= bound:
            return 0
        try:
            start, end = partition.log.bytes_at([position.next_offset, bound])
        except errors.PkError:  # a rebuilt index found damage; the turn reports it
            return self._session.min_bytes
        return max(1, end - start)

    async def _send_frame(self) -> None:
        session = self._session
        begun_s = self._now_s()
        reply = wire.FetchReply()
        pieces: list[frames.Buffer] = []
        self._aborted_room = aborted_lists.REPLY_MAX
        budget = min(session.max_bytes, max(1, session.credit))
        sent = self._add_cold(reply, pieces, budget)
        turns = session.take_turns(TURNS_MAX)
        plans = [plan for each in turns if (plan := self._plan(each, reply)) is not None]
        while plans and sent < budget:
            recent = _read_at_once(plans[0], budget - sent, sent == 0)
            if recent is not None:
                sent += self._add(reply, pieces, plans.pop(0), recent, None)
                continue
            disk = plans[0].partition.writer.disk
            turn = [plan for plan in plans if plan.partition.writer.disk is disk]
            plans = [plan for plan in plans if plan.partition.writer.disk is not disk]
            room, force = budget - sent, sent == 0
            done = await disk.read(partial(_read_all, turn, room, force))
            for plan, (read, error) in zip(turn, done, strict=False):
                sent += self._add(reply, pieces, plan, read, error)
            plans = turn[len(done) :] + plans
            if not done:
                break
        session.first_again([plan.position for plan in plans])
        if reply.partitions:
            frame = frames.pieces(head_of(reply), pieces)
            session.sent(sent, self._clock.monotonic_ms())
            self._env.metrics.fetched(sum(map(len, frame)))
            read_s = self._now_s()
            await self._stream.send(*frame)
            self._env.metrics.sent(read_s - begun_s, self._now_s() - read_s)
        else:
            session.sent(0, self._clock.monotonic_ms())

    # -- hot -------------------------------------------------------------------------------------

    def _plan(self, position: Position, reply: wire.FetchReply) -> _Plan | None:
        """Decide about a position: read it, leave it, ask the tier, or answer at once."""
        self._watch(position.key)
        if self._replica is not None:
            return self._plan_replica(self._replica, position, reply)
        try:
            partition = self._partitions.find(position.key)
            partition.serving(position.leader_epoch)
            # First: a reader above the end of a truncated log must get LogTruncated.  With
            # OffsetOutOfRange it would reset its position silently (rule R4).
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
            # a cold read is running: its answer gives the position another turn
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
        return _Plan(position, partition, bound, partition.leader, partition.log.reshapes)

    def _add(
        self,
        reply: wire.FetchReply,
        pieces: list[frames.Buffer],
        plan: _Plan,
        read: Read | None,
        error: errors.PkError | None,
    ) -> int:
        """Add one read to the frame; return its bytes."""
        position, partition = plan.position, plan.partition
        session = self._session
        if not session.current(position):
            return 0  # the position was set again or forgotten during the read
        if partition.leader is not plan.leader:
            session.again(position)  # E6
            return 0
        if error is not None:
            if isinstance(error, errors.OffsetOutOfRange):
                session.again(position)  # retention passed it meanwhile: its next turn decides
            else:
                if isinstance(error, errors.CorruptLog):
                    partition.storage_failed(error)  # L9
                self._fail(reply, position, self._corruption.client_error(partition, error))
            return 0
        assert read is not None
        told: Sequence[AbortedTransaction] = ()
        if session.isolation == READ_COMMITTED:
            if partition.log.reshapes != plan.reshapes:
                session.again(position)  # E8
                return 0
            if (room := self._aborted_room) <= 0:
                session.again(position)  # E7
                return 0
            read, told = aborted_lists.with_aborted(partition.log, position.next_offset, read, room)
            self._aborted_room -= len(told)
        if read.next_offset <= position.next_offset:
            session.again(position)
            return 0
        position.arriving = position.arriving and not read.data
        entry = self.entry(reply, position, partition)
        entry.next_offset = read.next_offset
        entry.payload_bytes = len(read.data)
        # a topic that is compacted stays compacted (C2), so the read was dense if this says so
        entry.dense = not partition.log.config.compacted
        aborted_lists.add_all(entry, told)
        if read.data:
            pieces.append(read.data)
            if self._replica is None:
                partition.log.count_out(read.next_offset - position.next_offset, len(read.data))
        session.served(position, read.next_offset)
        if not session.current(position):
            self._unwatch(position.key)  # a bounded scan that is complete
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
        """Answer with an error, which ends the position."""
        partition = self._partitions.get(position.key)
        if partition is not None:
            entry = self.entry(reply, position, partition)
        else:
            entry = reply.partitions.add(
                topic_id=position.key.topic_id,
                partition=position.key.partition,
                position_id=position.position_id,
                next_offset=position.next_offset,
                leader_hint=self._partitions.leader_hint(position.key),
            )
        entry.error.CopyFrom(frames.error_of(error))
        self._env.metrics.refused(error)
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
        reshapes = partition.log.reshapes
        return _Plan(position, partition, bound, partition.leader, reshapes, stored=True)

    def position(self, key: PartitionKey) -> Position | None:
        """Return the present position of this id, if it still exists."""
        return self._session.positions.get(key)

    def served(self, position: Position) -> None:
        """Note that the position was answered without data."""
        self._session.served(position, position.next_offset)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that answers a position after a disk read; at most one per position."""
        task = self._cold_tasks.spawn(self._guarded(work))
        task.add_done_callback(self._cold_ended)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Disconnected:
            return  # the reader notices too and ends the stream
        except errors.PkError as error:
            self._env.metrics.refused(error)
            self._stream.close()
        except Exception as bug:
            self._env.bug("answering a replica", bug)
            self._stream.close()

    async def answer(self, position: Position, reply: wire.FetchReply) -> None:
        """Send `reply` unless `position` was set again meanwhile; the position ends."""
        if self._session.current(position):
            self.end(position)
            await self._stream.send(*frames.pieces(head_of(reply), []))

    # -- cold ------------------------------------------------------------------------------------

    def _start_cold(self) -> None:
        while self._cold_waiting and len(self._cold_tasks) + len(self._cold_done) < COLD_MAX:
            position = self._cold_waiting.popleft()
            if self._session.current(position):
                task = self._cold_tasks.spawn(self._read_cold(position))
                task.add_done_callback(self._cold_ended)

    def _cold_ended(self, _: asyncio.Task[None]) -> None:
        self._start_cold()  # its answer may be sent already
        self._wake.set()

    async def _read_cold(self, position: Position) -> None:
        """Read a position from the tier: one delayed remote fetch."""
        share = max(1, self._session.max_bytes // COLD_MAX)
        begun_s = self._now_s()
        try:
            partition = self._partitions.find(position.key)
            payload, next_offset = await self._tier.fetch(
                partition, position.next_offset, min(position.max_bytes, share), self._cold_reader
            )
            done = _Cold(position, payload, next_offset, None)
        except errors.PkError as error:
            done = _Cold(position, b"", position.next_offset, error)
        except Exception as bug:
            self._env.bug("cold fetch", bug)
            done = _Cold(position, b"", position.next_offset, errors.InternalError(repr(bug)))
        self._env.metrics.read_cold(self._now_s() - begun_s)
        self._cold_done.append(done)

    def _add_cold(self, reply: wire.FetchReply, pieces: list[frames.Buffer], budget: int) -> int:
        """Add the answers of the tier to the frame, before hot reads."""
        sent = 0
        while self._cold_done and (sent == 0 or sent + len(self._cold_done[0].payload) <= budget):
            cold = self._cold_done.popleft()
            position = cold.position
            position.cold = False
            partition = self._partitions.get(position.key)
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
    """Serve the first plan from memory, on the loop; None = a disk read is needed.

    Only the first plan is tried.  Otherwise positions at the ends of logs could overtake
    another position without limit.
    """
    position, partition, bound, *_ = plan
    if position.arriving:
        return None  # L9: its first batch is verified on disk
    return partition.log.read_recent(
        position.next_offset,
        bound=bound,
        max_bytes=min(position.max_bytes, room),
        min_one_batch=force,
    )


def _read_all(
    plans: list[_Plan], room: int, force: bool
) -> list[tuple[Read | None, errors.PkError | None]]:
    """Read, in a reader thread, as many plans as fit into `room` bytes.

    The first is read whatever its size (E4).  The result is shorter than `plans` if the room ran
    out.
    """
    done: list[tuple[Read | None, errors.PkError | None]] = []
    for position, partition, bound, _, _, stored in plans:
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
            break  # its first batch does not fit: it begins the next frame
        done.append((read, None))
        room -= len(read.data)
        force = force and read.empty
    return done
