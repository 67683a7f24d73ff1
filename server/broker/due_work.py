"""Flushes and retention visits that parts of the broker ask the scheduler for.

World-generic.  The scheduler (broker/scheduler.py) takes from both at each tick.
"""

from __future__ import annotations

from pk.server.replica.partition import Partition
from pk.server.replica.purgatory import TimerHeap
from pk.types import PartitionKey


class DueWork:
    """The partitions of one broker that wait for a flush or for retention."""

    def __init__(self) -> None:
        self.flushes: TimerHeap[PartitionKey] = TimerHeap()  #: with flush_ms and unsynced data
        self.retain_now: dict[PartitionKey, None] = {}  #: whose retention should not wait

    def retain_soon(self, key: PartitionKey) -> None:
        """Apply retention to the partition at the next tick."""
        self.retain_now[key] = None

    def flush_if_asked(self, partition: Partition) -> None:
        """Flush the partition soon if `flush_on_ack` is set: only SYNCED records then count as
        stored, on every replica (L2).
        """
        if partition.settings["flush_on_ack"]:
            self.flushes.set(partition.key, 0)  # or a checkpoint synced unreported
