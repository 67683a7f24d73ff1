"""One fetch stream of this broker, and the follower replicas that it serves.

World-generic.  The manager (replica/fetcher_manager.py) decides which stream serves a replica.  A
replica sets its fetch position at the leader once per leader epoch and stream
(replica/follower.py).  From then on the leader sends what it appends (rule P4), the writer of the
replica's directory writes it, and the stream reports to the leader how far each log has come.  A
follower confirms records that are WRITTEN, or SYNCED if the topic sets `flush_on_ack` (rule L2).

Invariants
  F1  A replica fetches under the leader epoch that the metadata names.  It takes only data that
      answers its newest position.  A replica is on one stream at a time, and positions have numbers
      from one counter of the broker.  So the leader and the follower drop what an older position,
      of this stream or another, still sends.
  F2  Before the position is set, every append to the log is written or undone, because the leader
      compares the log's end.
  F3  A follower truncates its log, or replaces it with an empty one, only when the current leader's
      answer requires it, and never below the high watermark of a clean history (rule R4).
  F4  The credits of a stream bound the bytes that are fetched and not yet written
      (replica/fetch_limits K1).
  F5  A replica that a reassignment adds sets its position only in its turn (replica/fetch_limits
      K2).  The turn ends when the log has reached the leader's high watermark.  It also ends when
      the replica has to wait, because the leader refused it or its disk is full.  So the others do
      not wait for it.
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
from pk.server.replica import follower
from pk.server.replica.context import BrokerClocks, ControllerChannel, Environment
from pk.server.replica.fetch_limits import CopyTurns, FetchCredit, FetcherId
from pk.server.replica.fetch_state import PartitionFetchState
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.tasks import TaskRegistry
from pk.types import NONE, Offset, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of, open_stream
from pk.world import Disconnected, Stream, StreamKind

BACKOFF_MS = (50, 1_000)
#: The wait of a replica whose disk is full.
FULL_MS = 1_000
CONNECT_MS = 5_000
#: The most positions in a request.
POSITIONS_MAX = 1_000


class FetcherOwner(Protocol):
    """What the fetchers of a broker share (replica/fetcher_manager.py)."""

    @property
    def changing(self) -> TaskRegistry: ...

    async def wait_until_idle(self, partition: Partition) -> None: ...

    def next_position_id(self) -> int: ...

    def connected(self, fetcher: ReplicaFetcher) -> None: ...


class ReplicaFetcher:
    """One fetch stream to a leader, and the replicas that it serves."""

    def __init__(
        self,
        env: Environment,
        hello: wire.Hello,
        logs: LogManager,
        hosted: HostedReplicas,
        metadata: MetadataCache,
        controller: ControllerChannel,
        clocks: BrokerClocks,
        owner: FetcherOwner,
        of: FetcherId,
    ) -> None:
        self._env = env
        self._hello = hello
        self._logs = logs
        self._hosted = hosted
        self._metadata = metadata
        self._controller = controller
        self._clocks = clocks
        self._owner = owner
        self.leader = of.leader
        self._partition_bytes = of.partition_bytes
        self._replicas: dict[PartitionKey, PartitionFetchState] = {}
        self._tasks = TaskRegistry(partial(env.bug, "following a leader"))
        self._started = False
        self._expected = False  #: a replica comes to this stream once it is connected
        self._stream: Stream | None = None
        self._jitter = equal_jitter(env.world.rng)
        self._session: tuple[str, int] = ("", NONE)  #: address and broker epoch of the stream
        self._positions: deque[PartitionFetchState] = deque()  #: positions to set
        self._confirm: dict[PartitionKey, PartitionFetchState] = {}
        self._forget: list[PartitionKey] = []
        self._full: dict[
            PartitionKey, PartitionFetchState
        ] = {}  #: replicas whose disk had no room for the fetched data (L16)
        self._turns = CopyTurns()  #: of the replicas that are being added (F5)
        self._wake = asyncio.Event()
        self.credit = FetchCredit(of.credit_bytes, self._wake.set)
        self._poked = asyncio.Event()  #: set when the stream should connect now

    # -- replicas ----------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def expect(self) -> None:
        """Connect: a replica will move to this stream (FetcherOwner.connected)."""
        self._expected = True
        self._start()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._tasks.spawn(self._run())
        self._poked.set()

    def add(self, replica: PartitionFetchState) -> None:
        self._replicas[replica.key] = replica
        self._start()
        self._place_soon(replica)

    def remove(self, replica: PartitionFetchState) -> None:
        if self._replicas.get(replica.key) is replica:
            self._end_turn(replica)
            del self._replicas[replica.key]
            self._confirm.pop(replica.key, None)
            self._full.pop(replica.key, None)
            self._forget.append(replica.key)
            self._wake.set()

    def copied(self, replica: PartitionFetchState) -> None:
        """Note that `replica` needs no turn any more: it has caught up, or is not being added."""
        if replica.copying:
            replica.copying = False
            self._end_turn(replica)
            if not replica.placed:
                self._place_soon(replica)

    def _end_turn(self, replica: PartitionFetchState) -> None:
        """End the turn of `replica`, or its wait for one; the next waiting replica begins (F5)."""
        if self._replicas.get(replica.key) is replica:
            following = self._turns.leave(replica.key)
            if following is not None:
                self._place_soon(self._replicas[following])

    def look_again(self) -> None:
        """Close a stream whose address or broker epoch is outdated; else connect without delay."""
        self._poked.set()
        if self._stream is not None and self._session != self._wanted_session():
            self._stream.close()

    def again(self, replica: PartitionFetchState, wait_ms: int = 0) -> None:
        """Set the position of `replica` again after a back-off of at least `wait_ms`."""
        replica.placed = False
        self._end_turn(replica)
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
        """Set the fetch position once every append to the log is written or undone (F2), and it is
        the replica's turn (F5).
        """
        replica.placed = False
        await self._owner.wait_until_idle(replica.partition)
        if replica.current and not replica.placed and self._may_fetch(replica):
            if replica.partition.log.blank or self._incomplete(replica):
                if replica.key not in self._owner.changing:
                    self._change(replica, self._begin_blank(replica))
                return
            # An unclean leader may lack what its predecessor had committed beyond this log's end.
            replica.partition.cut_watermark(replica.partition.log.written_end)
            replica.position_id = self._owner.next_position_id()  # F1
            replica.placed = True
            self._confirm.pop(replica.key, None)
            self._positions.append(replica)
            self._wake.set()

    def _incomplete(self, replica: PartitionFetchState) -> bool:
        """Whether the log lacks records, so that it must be copied again (rule C8).

        A member of the ISR has what was committed, as far as its cluster still has it.
        """
        if not replica.partition.log.cleaned.incomplete:
            return False
        state = self._metadata.image.partition(replica.key)
        return state is not None and self._env.node_id not in state.isr

    def _may_fetch(self, replica: PartitionFetchState) -> bool:
        return not replica.copying or self._turns.take(replica.key)

    def stored(self, replica: PartitionFetchState) -> None:
        """Confirm the replica's new end, or its new log start, to the leader."""
        if replica.placed:
            self._confirm[replica.key] = replica
            self._wake.set()

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
            if self._replicas or self._expected:
                try:
                    await self._connection()
                    backoff.reset()
                except (Disconnected, TimeoutError, errors.PkError) as cause:
                    self._env.metrics.fetch_breaks.inc()
                    if isinstance(cause, errors.PkError):
                        self._env.metrics.refused(cause)
                except Exception as bug:
                    self._env.bug("fetching from a leader", bug)
            wanted = self._replicas or self._expected
            if await self._pause(backoff.next_ms() if wanted else None):
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
        self.credit.opened()
        self._expected = False
        for replica in list(self._replicas.values()):
            self._place_soon(replica)
        self._owner.connected(self)
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
        due = self._positions or self._confirm or self._forget or self._full or self.credit.due
        if not due:
            return None
        request = wire.FetchRequest(
            replica_id=self._env.node_id,
            replica_epoch=broker_epoch,
            max_bytes=limits.FRAME_BYTES,
            credit_bytes=self.credit.take(),
        )
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
            if replica.current:
                request.full.add(
                    topic_id=key.topic_id,
                    partition=key.partition,
                    leader_epoch=replica.leader_epoch,
                    position_id=replica.position_id,
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
                    cleaned_end=replica.partition.log.cleaned.end,
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
            partition_max_bytes=self._partition_bytes,
            cleaned_end=log.cleaned.end,
            forgotten_end=log.cleaned.forgotten_end,
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
            self.credit.received(entry.payload_bytes)
            self._take_entry(entry, frame.payload[at:end])
            at = end
        if self.credit.due:  # of dropped payloads
            self._wake.set()

    def _take_entry(self, entry: wire.FetchedPartition, payload: Buffer) -> None:
        """Append the batches of one entry, or do what the answer requires."""
        replica = self._replicas.get(PartitionKey(entry.topic_id, entry.partition))
        if replica is None or entry.position_id != replica.position_id or not replica.placed:
            return  # F1
        if entry.HasField("error"):
            self._env.metrics.refused(frames.raise_error(entry.error))
            self.again(replica)
        elif entry.HasField("diverging"):
            divergence = entry.diverging
            theirs = EpochEnd(divergence.epoch, divergence.end_offset)
            self._change(replica, self._cut(replica, theirs))
        elif entry.HasField("start_at"):
            self._change(replica, self._start_anew(replica, entry.start_at, entry.log_start))
        else:
            self._append(replica, entry, payload)

    def _append(
        self, replica: PartitionFetchState, entry: wire.FetchedPartition, payload: Buffer
    ) -> None:
        partition = replica.partition
        if entry.payload_bytes:
            now_ms = self._clocks.now().activity_ms
            try:
                partition.append_fetched(payload, now_ms, entry.leader_epoch, self.credit)
            except errors.PkError as error:
                self._env.metrics.refused(error)
                self._env.warn(
                    "fetched_batch_refused", partition=str(partition), error=error.message
                )
                self.again(replica)
                return
        replica.refusals.reset()
        if self._hosted.compared(replica.key):  # broker/metadata_publisher M8
            self._controller.replica_online(replica.key)
        partition.update_high_watermark(entry.high_watermark)
        replica.log_start = entry.log_start
        partition.update_retention(entry.log_start, entry.tiered_end, entry.droppable_end)
        partition.leader_settled_end = entry.settled_end
        if partition.log.log_end >= entry.high_watermark:
            self.copied(replica)

    # -- changes of the log's shape ----------------------------------------------------------------

    def _change(self, replica: PartitionFetchState, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which truncates or replaces the replica's log, then set the position again.

        Nothing else changes the log meanwhile.
        """
        replica.placed = False
        changing, key = self._owner.changing, replica.key
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
        known = max(partition.high_watermark, log.cleaned.end)  # only committed records are cleaned
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
        if cut.offset < log.cleaned.end:  # C8: a cleaning removed records in favour of those
            await self._begin(replica, 0, b"", 0)
            return
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
            follower.check_start(
                offset,
                high_watermark=known,
                unclean=_given_up(replica, known),
                forgotten=partition.log.log_end < told.forgotten_end,
            )
        except errors.LogTruncated as refusal:
            _refused(env, partition, refusal)
            return
        if known > offset:
            env.metrics.committed_cut.inc(known - offset)
        forgotten_end = told.forgotten_end
        await self._begin(replica, offset, told.producer_snapshot, log_start, forgotten_end)

    async def _begin_blank(self, replica: PartitionFetchState) -> None:
        """Start a blank log as a new replica, which takes the producers' state from its leader.

        (log/loading O2)
        """
        if replica.current:
            await self._begin(replica, 0, b"", 0)

    async def _begin(
        self,
        replica: PartitionFetchState,
        offset: Offset,
        snapshot: bytes,
        log_start: Offset,
        forgotten_end: Offset = 0,
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
        await self._logs.start_anew(
            partition.key, offset, snapshot, log_start=log_start, forgotten_end=forgotten_end
        )


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
