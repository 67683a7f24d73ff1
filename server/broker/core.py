"""State that the broker's handlers, publisher and scheduler share: partitions, writers, purgatory.

World-generic.  The event loop owns everything here.  All disk access goes through the lanes of a
`Disk`.

Invariants
  B1  `partitions` holds the partitions that this broker has a log of.  The metadata image decides
      which of them it leads.
  B2  Without contact to the controller for `broker_session_timeout_ms` the broker acknowledges
      nothing under acks=0|1 and accepts no new session (rule R6).  Under acks=all the high
      watermark decides, and readers read up to it.
  B3  A directory that failed takes only its own partitions offline (rule L2).  Damaged data takes
      only its partition offline (rule L9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pk import errors, limits, settings
from pk.clock import Clock
from pk.log.batch import Header
from pk.log.manager import LogManager
from pk.log.storage import Buffer, Disk
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.lifecycle import BrokerLifecycleManager
from pk.server.broker.metadata_publisher import MetadataPublisher
from pk.server.controller.reports import STORAGE_FULL
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.corruption import CorruptionManager, unreadable
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.directory_writer import LogDirWriter
from pk.server.replica.fetcher import ReplicaFetcherManager
from pk.server.replica.leader import ACKS_ALL
from pk.server.replica.metrics import BrokerMetrics
from pk.server.replica.partition import Partition
from pk.server.replica.purgatory import ProducePurgatory, TimerHeap
from pk.server.replica.state import HostedReplicas
from pk.server.tier.client import TierClient
from pk.server.tier.purges import Purges
from pk.server.tier.view import TierFeed
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, Offset, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import World

OnBug = Callable[[str, BaseException], None]


#: Refusals that follow from the state that the log has of a producer.
NO_LAST_WORD = (
    errors.OutOfOrderSequence,
    errors.UnknownProducerId,
    errors.InvalidProducerEpoch,
)


@dataclass(slots=True)
class ProducerStream:
    """The producer that sent last on one produce stream (handlers/produce D5)."""

    number: int  #: number of the stream; a newer stream has a higher one
    producer_id: int = NONE
    given_up: bool = False  #: whether its producer uses a newer stream


class BrokerCore:
    """Shared state of one broker process."""

    publisher: MetadataPublisher
    lifecycle: BrokerLifecycleManager
    tier: TierClient
    hello: wire.Hello  #: how this broker greets others

    def __init__(
        self,
        world: World,
        manager: LogManager,
        node_id: NodeId,
        server: Mapping[str, Any],
        metrics: BrokerMetrics,
        on_bug: OnBug,
        on_warning: Callable[..., None],
    ) -> None:
        self.world = world
        self.manager = manager
        self.node_id = node_id
        self.server = server
        self.metrics = metrics
        self.bug = on_bug  #: reports an exception that is a bug of pk
        self.warn = on_warning  #: (event, **facts): one line in the process's log
        self.peer_addresses: Mapping[NodeId, str] = {}  #: used instead of advertised ones
        self.replicas = HostedReplicas()
        self.partitions: dict[PartitionKey, Partition] = {}  #: of those replicas whose log is open
        self.purgatory: ProducePurgatory[DelayedProduce] = ProducePurgatory()
        self.clocks = ClockWatch(self)
        self.fetchers = ReplicaFetcherManager(self)
        self.alter_partition = AlterPartitionManager(self)
        self.purges = Purges(self)
        self.corruption = CorruptionManager(self)
        self.feed = TierFeed(world.new_id())
        self.feed_moved = asyncio.Event()
        self.draining = False
        self.streams_opened: int = 0  #: number of produce streams so far
        self.speakers: dict[int, ProducerStream] = {}  #: producer id → its newest stream
        self.flushes: TimerHeap[PartitionKey] = (
            TimerHeap()
        )  #: partitions with flush_ms and unsynced data
        self.retain_now: dict[
            PartitionKey, None
        ] = {}  #: partitions whose retention should not wait
        self._writers: dict[int, LogDirWriter] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = 0
        self._tasks = TaskRegistry(partial(self.bug, "a background task"))
        self._suspected: dict[PartitionKey, None] = {}
        self._offline: dict[LogDirWriter, None] = {}  #: writers of directories known to have failed
        #: writers of directories that were reported full
        self._full: dict[LogDirWriter, None] = {}

    # -- what handlers ask -----------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return self.world.clock

    @property
    def now_ms(self) -> int:
        """Return the monotonic time."""
        return self.world.clock.monotonic_ms()

    def find(self, key: PartitionKey) -> Partition:
        """Return the partition if this broker has its log.

        Raises `UnknownTopicId`, `UnknownTopicOrPartition`, `NotLeaderOrFollower`.
        """
        partition = self.partitions.get(key)
        if partition is not None:
            return partition
        raise self.publisher.why_not_here(key).with_traceback(None)

    def leader_hint(self, key: PartitionKey) -> NodeId:
        """Return the leader of the partition, as far as this broker knows."""
        return self.publisher.leader_of(key)

    def address_of(self, node_id: NodeId) -> str:
        """Return the address at which this broker reaches another one; '' if unknown."""
        direct = self.peer_addresses.get(node_id)
        broker = self.publisher.image.brokers.get(node_id)
        return direct or ("" if broker is None else broker.address)

    def batch_bounds(self, key: PartitionKey) -> tuple[int, int]:
        """Return the largest batch size, encoded and decoded, that the partition's topic takes."""
        partition = self.partitions.get(key)
        if partition is None:
            defaults = settings.TOPIC.by_name
            return defaults["max_message_bytes"].default, defaults["decoded_bytes_max"].default
        return partition.settings["max_message_bytes"], partition.settings["decoded_bytes_max"]

    def frame_bytes_max(self) -> int:
        """Return the size of the largest frame that a producer may send (rule L17)."""
        default = int(settings.TOPIC.by_name["max_message_bytes"].default)
        sizes = (int(each.settings["max_message_bytes"]) for each in self.partitions.values())
        return limits.frame_bytes_max(max(sizes, default=default))

    def any_disk(self) -> Disk:
        """Return a disk, for work that only needs its compute lane."""
        return self.manager.directories[0].disk

    def append(
        self, key: PartitionKey, header: Header, batch: Buffer, epoch: int, delayed: DelayedProduce
    ) -> None:
        """Decide a checked batch.  Raises typed errors; then nothing changed.

        Before the leader is `settled`, its state of a producer may be outdated.  A refusal that
        follows from it is answered as retriable: a producer that gets a gap as final would send
        the later batches again under a new epoch (rule L6).
        """
        if self.draining:
            raise errors.BrokerUnavailable("this broker is shutting down")
        if delayed.acks != ACKS_ALL and not self.lifecycle.in_contact():
            raise errors.ControllerUnavailable(
                "no contact to the controller: only acks=all is accepted (rule R6)"
            )
        partition = self.find(key)
        try:
            partition.append(header, batch, epoch, self.clocks.now(), delayed)
        except errors.InvalidRecord as refusal:
            raise self.clocks.explained(refusal) from None
        except NO_LAST_WORD as refusal:
            if partition.leader is None or partition.leader.settled:
                raise
            raise errors.OffsetNotAvailable(
                f"{partition}: not every in-sync replica has fetched from the new leader yet: "
                f"{refusal.message}"
            ) from refusal

    def check_new_session(self) -> None:
        """Refuse a new session without contact to the controller (rule R6) or during shutdown."""
        if self.draining:
            raise errors.BrokerUnavailable("this broker is shutting down")
        if not self.lifecycle.in_contact():
            raise errors.ControllerUnavailable(
                "no contact to the controller: no new sessions (rule R6)"
            )

    def retain_soon(self, key: PartitionKey) -> None:
        self.retain_now[key] = None

    # -- writers -----------------------------------------------------------------------------------

    def writer_of(self, disk: Disk) -> LogDirWriter:
        """Return the one writer of a directory."""
        writer = self._writers.get(id(disk))
        if writer is None:
            writer = self._writers[id(disk)] = LogDirWriter(
                disk,
                on_bug=self.bug,
                reserve_bytes=self.server["disk_reserve_bytes"],
                on_space=self._space_changed,
            )
        return writer

    def writers(self) -> list[LogDirWriter]:
        return list(self._writers.values())

    def _space_changed(self, writer: LogDirWriter) -> None:
        """Report a directory that is full, or has room again, to the controller at once (L16)."""
        root, free = writer.disk.storage.root, writer.space.free
        if writer.space.full and writer not in self._full:
            self._full[writer] = None
            self.warn("directory_full", directory=root, free_bytes=free)
        elif not writer.space.full and writer in self._full:
            del self._full[writer]
            self.warn("directory_has_room", directory=root, free_bytes=free)
        if hasattr(self, "lifecycle"):
            self.lifecycle.heartbeat_soon()

    def writer_full(self, key: PartitionKey) -> bool:
        partition = self.partitions.get(key)
        return partition is not None and partition.writer.full

    async def writer_room(self, key: PartitionKey) -> None:
        partition = self.partitions.get(key)
        if partition is not None:
            await partition.writer.room()

    # -- partition.Host --------------------------------------------------------------------------

    def partition_moved(self, partition: Partition) -> None:
        """Pass changed bounds, epoch or settings to the tier, the checkpoint and the flush
        timer.
        """
        self.manager.set_high_watermark(partition.key, partition.high_watermark)
        if partition.leader is not None and partition.tiered:
            self.feed.touch(partition.key)
            self.feed_moved.set()
        flush_ms = partition.settings["flush_ms"]  # followers flush too
        if flush_ms < settings.DAY_MS and partition.key not in self.flushes:
            self.flushes.set(partition.key, self.clock.monotonic_ms() + flush_ms)

    def storage_failed(self, partition: Partition, error: errors.PkError) -> None:
        """Take the failed directory's partitions offline (B3); for a full disk, only this one."""
        if isinstance(error, errors.CorruptLog):
            if not self.corruption.examine(partition, error):
                self.damaged(partition, error)
            return
        if isinstance(error, errors.StorageFull):  # only this log is half written
            self.replica_failed(partition, errors.StorageFailed(error.message, **error.details))
            return
        self._directory_offline(partition.writer, error)

    def notice_failed_directories(self) -> None:
        """Take the partitions of directories offline that failed outside an append (B3).

        That is in a checkpoint, a new segment or a removal.  This also covers a partition that was
        created before the failure was noticed and hosted after it.
        """
        for writer in self.writers():
            failure = writer.disk.storage.failed
            if failure is not None:
                root = writer.disk.storage.root
                told = f"{root} is offline: {failure}"
                self._directory_offline(writer, errors.StorageFailed(told, directory=root))

    def _directory_offline(self, writer: LogDirWriter, error: errors.PkError) -> None:
        if writer not in self._offline:
            self._offline[writer] = None
            self.warn("directory_offline", directory=writer.disk.storage.root, error=error.message)
            self.lifecycle.heartbeat_soon()
        for each in self.partitions.values():
            if each.writer is not writer:
                continue
            if self._goes_down(each):
                self._fail(each, error)

    def _goes_down(self, partition: Partition) -> bool:
        """Whether a failure changes the state of `partition`: not if it is OFFLINE or removed.

        Also ends a claim of the tier's table (tier/epoch_fence K4).
        """
        return partition.online or self.publisher.epoch_fence.cancel(partition.key)

    def replica_failed(self, partition: Partition, error: errors.PkError) -> None:
        """Take this replica offline (rules R4, L9); other replicas of the partition may serve."""
        if self._goes_down(partition):
            self.warn("partition_offline", partition=str(partition), error=error.message)
            self._fail(partition, error)

    def damaged(self, partition: Partition, error: errors.CorruptLog) -> None:
        """Report a damaged range and take this replica offline; no record is skipped (rule L9)."""
        if not self._goes_down(partition):
            return
        self.metrics.damaged.inc()
        self.warn(
            "partition_offline",
            partition=str(partition),
            error=error.message,
            directory=partition.writer.disk.storage.root,
        )
        self._fail(partition, error)

    def _fail(self, partition: Partition, error: errors.PkError) -> None:
        self.fetchers.leave(partition)
        partition.fail(error)
        if partition.tiered:  # the copier stops its work on it
            self.feed.remove(partition.key, partition.topic)
            self.feed_moved.set()
        self.lifecycle.heartbeat_soon()  # the controller elects another replica

    def examine(self, partition: Partition, told: errors.PkError) -> None:
        """Check a log in which the tier's copier found damage, or no records, before acting
        (L9).
        """
        copied = max(partition.tier.tiered_end, partition.log.tiered_end)
        offset = int(told.details.get("offset", copied))
        if unreadable(partition, offset):
            return  # known damage waits for `pk log repair`
        if partition.online and partition.key not in self._suspected:
            self._suspected[partition.key] = None
            self.spawn(self._look(partition, offset))

    async def _look(self, partition: Partition, offset: Offset) -> None:
        leader = partition.leader
        look = partial(
            partition.log.read, offset, bound=partition.high_watermark, max_bytes=1, verify=True
        )
        try:
            await partition.writer.disk.read(look)
        except errors.CorruptLog as damage:
            if partition.leader is leader:  # else the log was truncated meanwhile
                self.storage_failed(partition, damage)
        except errors.PkError as error:  # it may have been dropped meanwhile
            self.metrics.refused(error)
        finally:
            self._suspected.pop(partition.key, None)

    def offline_directories(self) -> list[str]:
        """Return the ids of the directories that failed."""
        return [
            each.directory_id
            for each in self.manager.directories
            if each.failed is not None or each.disk.storage.failed is not None
        ]

    def offline_replicas(self) -> list[wire.FetchPartition]:
        """Return the replicas that the broker reports to the controller as offline.

        Lost ones, damaged or in a failed directory (L2, L9); UNOPENED ones; those whose log an
        operator adopted or discarded (L15); rebuilt ones that their leader has not compared yet
        (broker/metadata_publisher M8).  A replica that waits for its tier's table is not reported:
        it will be served.
        """
        lost = {key: None for key, each in self.partitions.items() if each.hosted.lost}
        image, uncompared = self.publisher.image, self.replicas.uncompared
        unopened = dict.fromkeys(self.replicas.unopened())
        closed = {**lost, **unopened, **self.manager.operator_marked}
        found = []
        for key in {**uncompared, **closed}:
            state = image.partition(key)
            if state is None or self.node_id not in state.replicas:
                continue
            if key in closed or state.leader_epoch == uncompared.get(key):
                found.append(wire.FetchPartition(topic_id=key.topic_id, partition=key.partition))
        return found

    def unfit(self) -> list[wire.Unfit]:
        """Return which replicas here should not lead, and why (rules L10, L16)."""
        writers = [
            self.writer_of(each.disk) for each in self.manager.directories if each.failed is None
        ]
        full = [writer for writer in writers if writer.space.full]
        short = [writer for writer in writers if not writer.space.full and not writer.space.roomy]
        found = self.clocks.unfit()
        for some, gives_up in ((full, True), (short, False)):
            if not some:
                continue
            said = wire.Unfit(reason=STORAGE_FULL, gives_up=gives_up, all=len(some) == len(writers))
            for key, partition in {} if said.all else self.partitions.items():
                if partition.writer in some:
                    said.replicas.add(topic_id=key.topic_id, partition=key.partition)
            found.append(said)
        return found

    def positions(self, asked: Sequence[wire.FetchPartition]) -> list[wire.ReplicaPosition]:
        """Return the log ends of those requested replicas that have no leader and no writes (R3).

        The controller asks for the others again; their pending writes are about to end.
        """
        found = []
        for each in asked:
            key = PartitionKey(each.topic_id, each.partition)
            partition, state = self.partitions.get(key), self.publisher.image.partition(key)
            if partition is None or state is None or state.leader != NONE:
                continue
            log, lost = partition.log, partition.hosted.lost
            if lost or log.written_end != log.log_end or key in self.fetchers.changing:
                continue
            found.append(
                wire.ReplicaPosition(
                    topic_id=key.topic_id,
                    partition=key.partition,
                    last_epoch=log.epochs.latest,
                    log_end=log.written_end,
                )
            )
        return found

    # -- timers ----------------------------------------------------------------------------------

    def parked(self) -> None:
        """Set the timer for the earliest deadline in purgatory."""
        at_ms = self.purgatory.next_at_ms()
        if at_ms is None or (self._alarm is not None and self._alarm_ms <= at_ms):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        delay_ms = max(0, at_ms - self.clock.monotonic_ms())
        self._alarm_ms = at_ms
        self._alarm = asyncio.get_running_loop().call_later(delay_ms / 1000, self._expire)

    def _expire(self) -> None:
        self._alarm = None
        for delayed in self.purgatory.on_time(self.clock.monotonic_ms()):
            delayed.answer(
                errors.RequestTimedOut(
                    "the batch is written, but the in-sync replicas did not confirm it in time"
                )
            )
        self.parked()

    # -- background ------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task that ends with the broker."""
        self._tasks.spawn(work)

    async def close_tasks(self) -> None:
        await self.purges.close()
        await self._tasks.close()

    def close_timers(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
