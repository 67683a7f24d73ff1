"""Failures of directories and replicas: what goes offline, and who learns of it.

World-generic.  A partition reports a failure through its host (broker/partition_host.py).

Invariants
  B3  A directory that failed takes only its own partitions offline (rule L2).  Damaged data takes
      only its partition offline (rule L9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pk import errors
from pk.server.replica.context import Environment
from pk.server.replica.corruption import CorruptionManager, unreadable
from pk.server.replica.directory_writer import LogDirWriter
from pk.server.replica.directory_writers import LogDirWriters
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.server.replica.partition import Partition
from pk.server.tier.epoch_fence import EpochFence
from pk.server.tier.view import TierFeed
from pk.tasks import TaskRegistry
from pk.types import Offset, PartitionKey


class FailureHandler:
    """Takes the replicas of failed directories, and damaged replicas, offline."""

    def __init__(
        self,
        env: Environment,
        partitions: Mapping[PartitionKey, Partition],
        writers: LogDirWriters,
        fetchers: ReplicaFetcherManager,
        corruption: CorruptionManager,
        epoch_fence: EpochFence,
        feed: TierFeed,
        tasks: TaskRegistry,
        heartbeat_soon: Callable[[], None],
    ) -> None:
        self._env = env
        self._partitions = partitions
        self._writers = writers
        self._fetchers = fetchers
        self._corruption = corruption
        self._epoch_fence = epoch_fence
        self._feed = feed
        self._tasks = tasks  #: end with the broker
        self._heartbeat_soon = heartbeat_soon
        self._suspected: dict[PartitionKey, None] = {}
        self._offline: dict[LogDirWriter, None] = {}  #: writers of directories known to have failed

    def storage_failed(self, partition: Partition, error: errors.PkError) -> None:
        """Take the failed directory's partitions offline (B3); for a full disk, only this one."""
        if isinstance(error, errors.CorruptLog):
            if not self._corruption.examine(partition, error):
                self.damaged(partition, error)
            return
        if isinstance(error, errors.StorageFull):  # only this log is half written
            self.replica_failed(partition, errors.StorageFailed(error.message, **error.details))
            return
        self._directory_offline(partition.writer, error)

    def notice_failed_directories(self) -> None:
        """Take the partitions of directories offline that failed outside an append (B3).

        A checkpoint, a new segment or a removal can fail, too.  A repeated call also takes down a
        partition that was being created when the failure was noticed, and was added afterwards.
        """
        for writer in self._writers.all():
            failure = writer.disk.storage.failed
            if failure is not None:
                root = writer.disk.storage.root
                told = f"{root} is offline: {failure}"
                self._directory_offline(writer, errors.StorageFailed(told, directory=root))

    def _directory_offline(self, writer: LogDirWriter, error: errors.PkError) -> None:
        if writer not in self._offline:
            self._offline[writer] = None
            root = writer.disk.storage.root
            self._env.warn("directory_offline", directory=root, error=error.message)
            self._heartbeat_soon()
        for each in self._partitions.values():
            if each.writer is not writer:
                continue
            if self._goes_down(each):
                self._fail(each, error)

    def _goes_down(self, partition: Partition) -> bool:
        """Whether a failure changes the state of `partition`: not if it is OFFLINE or removed.

        Also ends a claim of the tier's table (tier/epoch_fence K4).
        """
        return partition.online or self._epoch_fence.cancel(partition.key)

    def replica_failed(self, partition: Partition, error: errors.PkError) -> None:
        """Take this replica offline (rules R4, L9); other replicas of the partition may serve."""
        if self._goes_down(partition):
            self._env.warn("partition_offline", partition=str(partition), error=error.message)
            self._fail(partition, error)

    def damaged(self, partition: Partition, error: errors.CorruptLog) -> None:
        """Report a damaged range and take this replica offline; no record is skipped (rule L9)."""
        if not self._goes_down(partition):
            return
        self._env.metrics.damaged.inc()
        self._env.warn(
            "partition_offline",
            partition=str(partition),
            error=error.message,
            directory=partition.writer.disk.storage.root,
        )
        self._fail(partition, error)

    def _fail(self, partition: Partition, error: errors.PkError) -> None:
        self._fetchers.leave(partition)
        partition.fail(error)
        if partition.tiered:  # the copier stops its work on it
            self._feed.remove(partition.key, partition.topic)
            self._feed.moved.set()
        self._heartbeat_soon()  # the controller elects another replica

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
            self._tasks.spawn(self._look(partition, offset))

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
            self._env.metrics.refused(error)
        finally:
            self._suspected.pop(partition.key, None)
