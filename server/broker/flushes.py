"""Flushes the partitions whose `flush_ms` has passed, and those with `flush_on_ack` (L2).

World-generic.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pk import errors
from pk.log.storage import Disk
from pk.server.broker.disk_jobs import DiskJobs
from pk.server.broker.due_work import DueWork
from pk.server.replica.context import Environment
from pk.server.replica.partition import Partition
from pk.types import PartitionKey


class Flushes:
    """The flushes of one broker, one job per directory."""

    def __init__(
        self,
        env: Environment,
        partitions: Mapping[PartitionKey, Partition],
        due: DueWork,
        jobs: DiskJobs,
    ) -> None:
        self._env = env
        self._partitions = partitions
        self._due = due
        self._jobs = jobs
        self._unflushed: dict[Disk, dict[PartitionKey, None]] = {}  #: whose flush is due

    def start_due(self, now_ms: int) -> None:
        for key in self._due.flushes.pop_due(now_ms):
            partition = self._partitions.get(key)
            if partition is not None:
                self._unflushed.setdefault(partition.writer.disk, {})[key] = None
        for disk, due in self._unflushed.items():
            if due:
                self._jobs.beside("flush", disk, partial(self._flush, disk))

    async def _flush(self, disk: Disk) -> None:
        due, self._unflushed[disk] = self._unflushed[disk], {}
        for key in due:
            partition = self._partitions.get(key)
            if partition is None or not partition.online:
                continue
            if partition.log.synced_end < partition.log.written_end:
                await flush(self._env, self._due, partition)
            else:  # a checkpoint synced it, which reports nothing
                partition.synced(partition.log.synced_end)
            if (
                partition.settings["flush_on_ack"]
                and partition.log.synced_end < partition.log.log_end
            ):
                self._due.flushes.set(
                    key, self._env.now_ms
                )  # appends that were decided before the flush


async def flush(env: Environment, due: DueWork, partition: Partition) -> None:
    """Make everything that is written to the partition's log SYNCED.

    A failed fsync takes the directory offline and is never retried (L2).
    """
    try:
        synced_end = await partition.writer.disk.write(partition.log.flush)
    except errors.StorageFull as passing:  # no descriptor for a sealed segment: nothing is lost
        env.metrics.refused(passing)
        due.flushes.set(partition.key, env.now_ms)  # at the next tick
        return
    except errors.PkError as error:
        env.metrics.refused(error)
        partition.storage_failed(error)
        return
    partition.synced(synced_end)
