"""This broker's follower replicas: one fetch stream to each broker that leads some of them.

World-generic.  A replica sets its fetch position at the leader once per leader epoch
(replica/follower.py).  From then on the leader sends what it appends (rule P4), the writer of the
replica's directory writes it, and the stream reports to the leader how far each log has come.  A
follower confirms records that are WRITTEN, or SYNCED if the topic sets `flush_on_ack` (rule L2).

Invariants
  F1  A replica fetches under the leader epoch that the metadata names.  It takes only data that
      answers its newest position.
  F2  Before the position is set, every append to the log is written or undone, because the leader
      compares the log's end.
  F3  A follower truncates its log, or replaces it with an empty one, only when the current leader's
      answer requires it, and never below the high watermark of a clean history (rule R4).
  F4  The credits of a stream bound the bytes that are fetched and not yet written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol

from pk import errors, limits
from pk.backoff import Backoff, equal_jitter
from pk.log.divergence import EpochEnd
from pk.log.manager import LogManager
from pk.log.storage import Buffer
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import PartitionState
from pk.server.replica import follower
from pk.server.replica.context import BrokerClocks, ControllerChannel, Environment
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.tasks import TaskRegistry
from pk.types import NONE, Epoch, NodeId, Offset, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of, open_stream
from pk.world import Disconnected, Stream, StreamKind

BACKOFF_MS = (50, 1_000)
#: The waits of a replica that the leader refused, before it asks again: the wait doubles with each
#: refusal.  A new leader learns of its election within milliseconds.
AGAIN_MS = (10, 500)
#: The wait of a replica whose disk is full.
FULL_MS = 1_000
CONNECT_MS = 5_000
#: The most positions in a request, and the most bytes of a partition in a frame.
POSITIONS_MAX = 1_000
PARTITION_BYTES = 4 * limits.MIB


class PartitionFetchState:
    """One partition that this broker follows."""

    __slots__ = (
        "fetcher",
        "leader_epoch",
        "log_start",
        "owed",
        "partition",
        "placed",
        "position_id",
        "refusals",
        "unclean_epoch",
    )

    def __init__(
        self, fetcher: ReplicaFetcher, partition: Partition, state: PartitionState
    ) -> None:
        self.fetcher = fetcher
        self.partition = partition
        self.leader_epoch: Epoch = state.leader_epoch
        self.unclean_epoch: Epoch = state.unclean_epoch
        #: number of the newest position; answers to older ones are dropped (F1)
        self.position_id = 0
        self.placed = False  #: the position was sent, or will be, and the log still ends there
        self.log_start: Offset = 0  #: the leader's log start
        self.refusals = Backoff(AGAIN_MS)  #: refusals in a row
        self.owed = 0  #: bytes that were handed to the log and are not stored yet (F4)

    @property
    def key(self) -> PartitionKey:
        return self.partition.key

    @property
    def current(self) -> bool:
        return self.partition.replica is self

    def stored(self, size: int) -> None:
        """Confirm `size` stored bytes to the leader (watchers.Follows)."""
        self.fetcher.stored(self, size)

    def log_start_moved(self) -> None:
        """Report the new log start to the leader (watchers.Follows)."""
        self.fetcher.stored(self, 0)

    def not_stored(self, error: errors.PkError) -> None:
        """Return the credit of undone appends, and fetch them again (watchers.Follows)."""
        self.fetcher.stored(self, self.owed)
        if isinstance(error, errors.StorageFull):
            self.fetcher.storage_full(self)
        else:
            self.fetcher.again(self)


class ShapeChanges(Protocol):
    """Truncations and replacements of logs (replica/fetcher_manager.py)."""

    @property
    def changing(self) -> TaskRegistry: ...

    async def wait_until_idle(self, partition: Partition) -> None: ...


class ReplicaFetcher:
    """The fetch stream to one leader, and the replicas that it serves."""

    def __init__(
        self,
        env: Environment,
        hello: wire.Hello,
        logs: LogManager,
        hosted: HostedReplicas,
        metadata: MetadataCache,
        controller: ControllerChannel,
        clocks: BrokerClocks,
        shapes: ShapeChanges,
        leader: NodeId,
    ) -> None:
        self._env = env
        self._hello = hello
        self._logs = logs
        self._hosted = hosted
        self._metadata = metadata
        self._controller = controller
        self._clocks = clocks
        self._shapes = shapes
        self.leader = leader
        self._replicas: dict[PartitionKey, PartitionFetchState] = {}
        self._tasks = TaskRegistry(partial(env.bug, "following a leader"))
        self._started = False
        self._stream: Stream | None = None
        self._jitter = equal_jitter(env.world.rng)
        self._session: tuple[str, int] = ("", NONE)  #: address and broker epoch of the stream
        self._positions: deque[PartitionFetchState] = deque()  #: positions to set
        self._position_id = 0  #: the number of the newest position
        self._confirm: dict[PartitionKey, PartitionFetchState] = {}
        self._forget: list[PartitionKey] = []
        self._full: dict[
            PartitionKey, PartitionFetchState
        ] = {}  #: replicas whose disk had no room for the fetched data (L16)
        self._owed = 0  #: credit that returns when the fetched bytes are written
        self._credit = 0  #: credit to grant with the next request
        self._wake = asyncio.Event()
        self._poked = asyncio.Event()  #: set when the stream should connect now

    # -- replicas ----------------------------------------------------------------------------------

    def add(self, replica: PartitionFetchState) -> None:
        self._replicas[replica.key] = replica
        if not self._started:
            self._started = True
            self._tasks.spawn(self._run())
        self._poked.set()
        self._place_soon(replica)

    def remove(self, replica: PartitionFetchState) -> None:
        if self._replicas.get(replica.key) is replica:
            del self._replicas[replica.key]
            self._confirm.pop(replica.key, None)
            self._full.pop(replica.key, None)
            self._forget.append(replica.key)
            self._returns(replica, replica.owed)
            self._wake.set()

    def look_again(self) -> None:
        """Close a stream whose address or broker epoch is outdated; else connect without delay."""
        self._poked.set()
        if self._stream is not None and self._session != self._wanted_session():
            self._stream.close()

    def again(self, replica: PartitionFetchState, wait_ms: int = 0) -> None:
        """Set the position of `replica` again after a back-off of at least `wait_ms`."""
        replica.placed = False
        self._tasks.spawn(self._later(replica, max(wait_ms, replica.refusals.next_ms())))

    def storage_full(self, replica: PartitionFetchState) -> None:
        """Report to the leader that `replica` has no room, so that its ISR need not wait (L16)."""
        self._full[replica.key] = replica
        self._wake.set()
        self.again(replica, FULL_MS)

    async def _later(self, replica: PartitionFetchState, wait_ms: float) -> None:
        await self._env.clock.sleep_ms(self._jitter(wait_ms))
        self._place_soon(replica)

    def _place_soon(self, replica: PartitionFetchState) -> None:
        if replica.current and self._stream is not None:
            self._tasks.spawn(self._place(replica))

    async def _place(self, replica: PartitionFetchState) -> None:
        """Set the fetch position once every append to the log is written or undone (F2)."""
        replica.placed = False
        await self._shapes.wait_until_idle(replica.partition)
        if replica.current and not replica.placed:
            if replica.partition.log.blank:
                if replica.key not in self._shapes.changing:
                    self._change(replica, self._begin_blank(replica))
                return
            # An unclean leader may lack what its predecessor had committed beyond this log's end.
            replica.partition.cut_watermark(replica.partition.log.written_end)
            self._position_id += 1  # F1: answers to an older position may still arrive
            replica.position_id = self._position_id
            replica.placed = True
            self._confirm.pop(replica.key, None)
            self._positions.append(replica)
            self._wake.set()

    def stored(self, replica: PartitionFetchState, size: int) -> None:
        """Confirm the replica's new end to the leader, after `size` fetched bytes were stored."""
        self._returns(replica, size)
        if replica.placed:
            self._confirm[replica.key] = replica
        self._wake.set()

    def _returns(self, replica: PartitionFetchState, size: int) -> None:
        """Return the credit of `size` bytes that were stored, undone or dropped (F4)."""
        replica.owed -= (returned := min(size, replica.owed))
        self._owed -= (returned := min(returned, self._owed))
        self._credit += returned

    # -- life --------------------------------------------------------------------------------------

    async def close(self) -> None:
        await self._tasks.close()
        if self._stream is not None:
            self._stream.close()

    def _wanted_session(self) -> tuple[str, int]:
        return self._metadata.address_of(self.leader), self._controller.broker_epoch

    async def _run(self) -> None:
        """Keep a connection to the leader while it leads partitions that this broker follows.

        A connection that ends is replaced.
        """
        backoff = Backoff(BACKOFF_MS, self._jitter)
        while True:
            if self._replicas:
                try:
                    await self._connection()
                    backoff.reset()
                except (Disconnected, TimeoutError, errors.PkError) as cause:
                    self._env.metrics.fetch_breaks.inc()
                    if isinstance(cause, errors.PkError):
                        self._env.metrics.refused(cause)
                except Exception as bug:
                    self._env.bug("fetching from a leader", bug)
            if await self._pause(backoff.next_ms() if self._replicas else None):
                backoff.reset()

    async def _pause(self, wait_ms: float | None) -> bool:
        """Wait before the next connection; True if the wait was cut short to try at once."""
        self._poked.clear()
        if wait_ms is None:
            await self._poked.wait()
            return True
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._poked.wait()
        except TimeoutError:
            return False
        return True

    async def _connection(self) -> None:
        session = self._wanted_session()
        if not session[0] or session[1] == NONE:
            return
        async with asyncio.timeout(CONNECT_MS / 1000):
            stream, _ = await open_stream(
                self._env.world.network, session[0], StreamKind.FETCH, self._hello
            )
        if session != self._wanted_session():  # the change came while there was no stream to close
            stream.close()
            return
        self._stream, self._session = stream, session
        self._positions.clear()
        self._confirm.clear()
        self._forget.clear()
        self._full.clear()
        self._owed, self._credit = 0, limits.FETCH_CREDIT_BYTES
        for replica in list(self._replicas.values()):
            replica.owed = 0
            self._place_soon(replica)
        writer = self._tasks.spawn(self._write(stream, session[1]))
        try:
            while (raw := await stream.recv()) is not None:
                self._take(frames.decode(raw))
        finally:
            self._stream = None
            writer.cancel()
            stream.close()

    # -- requests to the leader --------------------------------------------------------------------

    async def _write(self, stream: Stream, broker_epoch: int) -> None:
        try:
            while True:
                self._wake.clear()
                request = self._request(broker_epoch)
                if request is None:
                    await self._wake.wait()
                    continue
                await stream.send(frames.encode(head_of(request)))
        except Disconnected:
            return  # the reader notices too
        except Exception as bug:
            self._env.bug("telling a leader", bug)
            stream.close()

    def _request(self, broker_epoch: int) -> wire.FetchRequest | None:
        """Build the request with all new positions, confirmations and credit; None = nothing to
        send.
        """
        if not (self._positions or self._confirm or self._forget or self._credit or self._full):
            return None
        request = wire.FetchRequest(
            replica_id=self._env.node_id,
            replica_epoch=broker_epoch,
            max_bytes=limits.FRAME_BYTES,
            credit_bytes=self._credit,
        )
        self._credit = 0
        forget, self._forget = self._forget, []
        for key in forget:
            if key not in self._replicas:
                request.forgotten.add(topic_id=key.topic_id, partition=key.partition)
        while self._positions and len(request.positions) < POSITIONS_MAX:
            replica = self._positions.popleft()
            if replica.current and replica.placed:
                self._add_position(request, replica)
        full, self._full = self._full, {}
        for key, replica in full.items():
            request.full.add(
                topic_id=key.topic_id, partition=key.partition, leader_epoch=replica.leader_epoch
            )
        confirm, self._confirm = self._confirm, {}
        for key, replica in confirm.items():
            if replica.current and replica.placed:
                request.confirmed.add(
                    topic_id=key.topic_id,
                    partition=key.partition,
                    position_id=replica.position_id,
                    log_end=_kept_end(replica.partition),
                    log_start=replica.partition.log.log_start,
                )
        return request

    def _add_position(self, request: wire.FetchRequest, replica: PartitionFetchState) -> None:
        log = replica.partition.log
        assert log.log_end == log.written_end, "F2"
        end = _kept_end(replica.partition)
        # the leader counts SYNCED records only: sync first, then set the position
        if end < log.log_end:
            replica.placed = False
            self._tasks.spawn(self._sync(replica))
            return
        request.positions.add(
            topic_id=replica.key.topic_id,
            partition=replica.key.partition,
            position_id=replica.position_id,
            current_leader_epoch=replica.leader_epoch,
            fetch_offset=end,
            last_fetched_epoch=log.epochs.epoch_of(end - 1) if end > 0 else NONE,
            log_start=log.log_start,
            partition_max_bytes=PARTITION_BYTES,
        )

    async def _sync(self, replica: PartitionFetchState) -> None:
        partition = replica.partition
        try:
            await partition.writer.disk.write(partition.log.flush)
        # no descriptor to open a sealed segment: no data is lost
        except errors.StorageFull as passing:
            self._env.metrics.refused(passing)
            self.again(replica, FULL_MS)
            return
        except errors.PkError as error:
            partition.storage_failed(error)
            return
        await self._place(replica)

    # -- what the leader answers -------------------------------------------------------------------

    def _take(self, frame: frames.Frame) -> None:
        if frame.head.HasField("error"):
            raise frames.raise_error(frame.head.error)
        at = 0
        for entry in frame.head.fetch_reply.partitions:
            end = at + entry.payload_bytes
            if end > len(frame.payload):
                raise errors.CorruptBatch("a fetch frame is shorter than its head says")
            self._owed += entry.payload_bytes
            if not self._take_entry(entry, frame.payload[at:end]):
                self._give_back(entry.payload_bytes)
            at = end

    def _give_back(self, size: int) -> None:
        self._owed -= size
        self._credit += size
        if size:
            self._wake.set()

    def _take_entry(self, entry: wire.FetchedPartition, payload: Buffer) -> bool:
        """Append the batches of one entry; return False if the log did not get the payload."""
        replica = self._replicas.get(PartitionKey(entry.topic_id, entry.partition))
        if replica is None or entry.position_id != replica.position_id or not replica.placed:
            return False  # F1
        if entry.HasField("error"):
            self._env.metrics.refused(frames.raise_error(entry.error))
            self.again(replica)
            return False
        if entry.HasField("diverging"):
            divergence = entry.diverging
            theirs = EpochEnd(divergence.epoch, divergence.end_offset)
            self._change(replica, self._cut(replica, theirs))
            return False
        if entry.HasField("start_at"):
            self._change(replica, self._start_anew(replica, entry.start_at, entry.log_start))
            return False
        return self._append(replica, entry, payload)

    def _append(
        self, replica: PartitionFetchState, entry: wire.FetchedPartition, payload: Buffer
    ) -> bool:
        partition, taken = replica.partition, bool(entry.payload_bytes)
        if taken:
            try:
                partition.append_fetched(
                    payload, self._clocks.now().activity_ms, entry.leader_epoch
                )
            except errors.PkError as error:
                self._env.metrics.refused(error)
                self._env.warn(
                    "fetched_batch_refused", partition=str(partition), error=error.message
                )
                self.again(replica)
                return False
        replica.refusals.reset()
        if self._hosted.compared(replica.key):  # broker/metadata_publisher M8
            self._controller.replica_online(replica.key)
        replica.owed += entry.payload_bytes
        partition.update_high_watermark(entry.high_watermark)
        replica.log_start = entry.log_start
        partition.update_retention(entry.log_start, entry.tiered_end, entry.droppable_end)
        return taken

    # -- changes of the log's shape ----------------------------------------------------------------

    def _change(self, replica: PartitionFetchState, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which truncates or replaces the replica's log, then set the position again.

        Nothing else changes the log meanwhile.
        """
        replica.placed = False
        changing, key = self._shapes.changing, replica.key
        assert key not in changing, "a position is answered once"
        task = changing.spawn(self._try(replica, work), key)

        def done(ended: asyncio.Task[bool]) -> None:
            if not ended.cancelled() and not ended.exception() and not ended.result():
                self.storage_full(replica)
            else:
                self._place_soon(replica)

        task.add_done_callback(done)

    async def _try(self, replica: PartitionFetchState, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`; False if a full disk left the log unchanged, so that it must run again."""
        try:
            await work
        except errors.PkError as error:
            if isinstance(error, errors.StorageFull) and not replica.partition.log.torn:
                self._env.metrics.refused(error)
                replica.partition.writer.space.storage_full(self._env.now_ms)
                return False
            replica.partition.storage_failed(error)
        return True

    async def _cut(self, replica: PartitionFetchState, theirs: EpochEnd) -> None:
        """Truncate the log to the end of the newest epoch that both logs may share (F3)."""
        partition, log, env = replica.partition, replica.partition.log, self._env
        await partition.writer.settled(partition)
        if not replica.current:
            return
        known = partition.high_watermark
        try:
            cut = follower.cut_at(
                theirs,
                log.epochs,
                log_end=log.log_end,
                high_watermark=known,
                unclean=_given_up(replica, known),
            )
        except errors.LogTruncated as refusal:
            _refused(env, partition, refusal)
            return
        facts = {"partition": str(partition), "log_end": log.log_end, "offset": cut.offset}
        if cut.offset < log.log_end:
            env.metrics.truncations.inc()
            env.warn("log_cut", leader_epoch=replica.leader_epoch, **facts)
        if cut.below_watermark:
            env.metrics.committed_cut.inc(known - cut.offset)
            env.warn("committed_records_cut", high_watermark=known, **facts)
        partition.cut_watermark(cut.offset)
        await self._logs.cut(partition.key, cut.offset)

    async def _start_anew(
        self, replica: PartitionFetchState, told: wire.StartAt, log_start: Offset
    ) -> None:
        """Drop the local log and begin at the leader's START_AT answer (rule R5)."""
        partition, env = replica.partition, self._env
        await partition.writer.settled(partition)
        if not replica.current:
            return
        offset, known = told.local_log_start, partition.high_watermark
        try:
            follower.check_start(offset, high_watermark=known, unclean=_given_up(replica, known))
        except errors.LogTruncated as refusal:
            _refused(env, partition, refusal)
            return
        if known > offset:
            env.metrics.committed_cut.inc(known - offset)
        await self._begin(replica, offset, told.producer_snapshot, log_start)

    async def _begin_blank(self, replica: PartitionFetchState) -> None:
        """Start a blank log as a new replica, which takes the producers' state from its leader.

        (log/loading O2)
        """
        if replica.current:
            await self._begin(replica, 0, b"", 0)

    async def _begin(
        self, replica: PartitionFetchState, offset: Offset, snapshot: bytes, log_start: Offset
    ) -> None:
        partition, log, env = replica.partition, replica.partition.log, self._env
        env.metrics.starts_anew.inc()
        facts = {
            "log_end": log.log_end,
            "offset": offset,
            "high_watermark": partition.high_watermark,
        }
        env.warn("log_begun_anew", partition=str(partition), **facts)
        partition.cut_watermark(0)
        await self._logs.start_anew(partition.key, offset, snapshot, log_start=log_start)


def _given_up(replica: PartitionFetchState, known: Offset) -> bool:
    """Whether an unclean election followed the last record known to be committed (rule R4)."""
    return replica.unclean_epoch > replica.partition.log.epochs.epoch_of(known - 1)


def _refused(env: Environment, partition: Partition, refusal: errors.LogTruncated) -> None:
    """Take the replica offline: one of the two logs is damaged, and an operator must look (F3)."""
    env.metrics.violations.inc()
    partition.replica_failed(errors.CorruptLog(refusal.message, **refusal.details))


def _kept_end(partition: Partition) -> Offset:
    """Return the log end that this follower confirms to the leader (rule L2)."""
    log = partition.log
    return log.synced_end if partition.settings["flush_on_ack"] else log.written_end
