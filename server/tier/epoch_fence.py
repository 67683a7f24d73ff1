"""Tier wins: a leader elected uncleanly asks the table before it serves (rule T4).

World-generic.  An unclean leader may have lost records that the table already holds, and may hold
records the table has under other contents.  It commits its epoch as the table's claim, so that no
copier of an older epoch can commit any more, and compares: if its log reaches the table's end and
its epoch cache gives the table's epoch for the last tiered offset, both tell the same story and the
local log stays; otherwise it is dropped and begins at `tiered_end`.  While the store is down the
partition is not served.  A log that went on without the table, while the topic was not tiered, has
records of a later epoch than the table has and stays as well (rule T15).

Invariants
  K1  a claimed partition serves only in the epoch the claim was made for
  K2  the claim is committed before the comparison is acted on
  K3  the controller hears `recovered` after the partition serves
  K4  a claim ends with its partition's directory: what waits for the store must not hide that
      nothing can be served from here (rule L2)
  K5  a log that was left half-way is offline, also if its claim is over: neither another claim, nor
      a leader that it would follow, could know what is there
"""

from __future__ import annotations

import asyncio
from functools import partial

from pk import errors
from pk.backoff import Backoff, equal_jitter
from pk.server.metadata.image import PartitionState
from pk.server.replica.partition import Partition
from pk.server.replica.state import ReplicaEvent, ReplicaState
from pk.server.tier.context import TierContext
from pk.tasks import TaskRegistry
from pk.types import Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

BACKOFF_MS = (200, 5_000)
ALTER_TIMEOUT_MS = 5_000


def agrees(
    log_end: int,
    epoch_at_end: int,
    table: wire.TierClaimReply,
    *,
    local_start: int = 0,
    log_start: int = 0,
) -> bool:
    """Whether a local log tells the table's story up to its end (T4).

    `epoch_at_end` is the local epoch of the last tiered offset.  There may be nothing to compare:
    a log that begins just where the table ends was begun there on the table's word, and what
    either holds below its start is deleted (rule T9), wholly perhaps.  Such a log goes on from
    where it ends; but never below the table's end, whose offsets were given away before.
    """
    if not table.exists:
        return True
    if log_end < table.end:
        return False
    nothing_left = table.end <= max(table.start, log_start)
    return nothing_left or local_start == table.end or epoch_at_end == table.end_epoch


def went_on_without(log_epoch: int, table: wire.TierClaimReply) -> bool:
    """Whether a log that does not agree with the table is the later one (T15).

    `log_epoch` is the epoch of the log's last record, NONE without one.  Every leader of a tiered
    topic goes on from what the table has: a record of a later epoch than the table's last one is
    in a log that agrees, or in one that was led while the topic was not tiered.
    """
    return log_epoch > table.end_epoch


def _note_covered(partition: Partition, end: Offset) -> None:
    """Unless the tier was turned off meanwhile: topic retention would wait for copies for ever."""
    if partition.tiered:
        partition.log.tiered_end = partition.log.droppable_end = end


class EpochFence:
    """Claims under way, and what is to be told of them, one task each."""

    def __init__(self, core: TierContext) -> None:
        self._core = core
        self._tasks = TaskRegistry(partial(core.bug, "claiming a table"))  #: named by partition
        self._epochs: dict[PartitionKey, int] = {}

    def epoch(self, key: PartitionKey) -> int | None:
        """The leader epoch a claim is under way for; None = no claim."""
        return self._epochs.get(key)

    def begin(self, partition: Partition, state: PartitionState) -> None:
        """Claim for the epoch of `state`; a claim for an older epoch ends."""
        self.cancel(partition.key)
        waits = f"{partition}: an unclean leader waits for the tier's table (rule T4)"
        partition.fail(errors.TierUnavailable(waits), ReplicaEvent.RECOVERY_BEGUN)
        self._tasks.spawn(self._claim(partition, state), partition.key)
        self._epochs[partition.key] = state.leader_epoch

    def give_up(self, partition: Partition) -> None:
        """Another broker leads, or none: a RECOVERING replica stops to claim the table."""
        if partition.state is ReplicaState.RECOVERING:
            self.cancel(partition.key)
            partition.on(ReplicaEvent.RESIGNED)

    def cancel(self, key: PartitionKey) -> bool:
        """The topic or its disk is gone, or a newer epoch claims.  False if there was no claim."""
        self._tasks.cancel(key)
        return self._epochs.pop(key, None) is not None

    async def close(self) -> None:
        self._epochs.clear()
        await self._tasks.close()

    async def _claim(self, partition: Partition, state: PartitionState) -> None:
        core = self._core
        backoff = Backoff(BACKOFF_MS, equal_jitter(core.world.rng))
        while True:
            try:
                await core.fetchers.wait_until_idle(partition)
                table = await core.tier.claim(partition, state.leader_epoch, commit=True)
                await self._compare(partition, table)
                break
            except errors.PkError as error:
                partition.on(ReplicaEvent.RECOVERY_FAILED, error)
            except Exception as bug:
                core.bug("claiming a table", bug)
            await core.clock.sleep_ms(backoff.next_ms())
        self._epochs.pop(partition.key, None)
        partition.on(ReplicaEvent.RECOVERED)
        now = core.publisher.image.partition(partition.key)
        if now is None or now.leader_epoch != state.leader_epoch or now.leader != core.node_id:
            return  # K1: the follower reacts to the newer epoch
        core.publisher.take_office(partition, now)
        await self._report_recovered(partition, state.leader_epoch)

    async def _compare(self, partition: Partition, table: wire.TierClaimReply) -> None:
        log = partition.log
        if not table.exists:
            return
        before = log.log_start
        start = max(before, table.start)
        local_start = log.segments[0].base_offset
        epoch = log.epochs.epoch_of(table.end - 1)
        if agrees(log.written_end, epoch, table, local_start=local_start, log_start=before):
            await self._core.manager.move_log_starts({partition.key: start})
            _note_covered(partition, table.end)
            return
        if went_on_without(log.epochs.epoch_of(log.written_end - 1), table):
            _note_covered(partition, log.local_log_start)
            self._core.warn("log_passed_tier", partition=str(partition), table_end=table.end)
            return
        self._core.warn(
            "tier_wins",
            partition=str(partition),
            local_end=log.written_end,
            table_end=table.end,
        )
        work = self._begin_at_table(partition, table.end, start)
        task = self._core.fetchers.changing.spawn(work, partition.key)
        await asyncio.shield(task)  # a claim that ends must not leave it half done

    async def _begin_at_table(self, partition: Partition, end: Offset, start: Offset) -> None:
        # What the table has below its end is still the log's, but for records that were deleted
        # before, beyond the table's end perhaps (rule T9).
        core, key = self._core, partition.key
        partition.cut_watermark(0)
        try:
            await core.manager.start_anew(key, max(end, start), log_start=start)
        except errors.PkError as error:
            if not partition.log.torn:
                raise
            if core.partitions.get(key) is partition:  # K5
                core.storage_failed(partition, error)
            return
        _note_covered(partition, end)

    async def _report_recovered(self, partition: Partition, leader_epoch: Epoch) -> None:
        """K3; again until the metadata log has it, or another epoch: until then the leader counts
        as one that waits for its table, and is not moved.
        """
        core, key = self._core, partition.key
        backoff = Backoff(BACKOFF_MS, equal_jitter(core.world.rng))
        while True:
            now = core.publisher.image.partition(key)
            if now is None or not now.unclean or partition.leader_epoch != leader_epoch:
                return
            request = wire.AlterPartitionRequest(
                broker_id=core.node_id, broker_epoch=core.lifecycle.broker_epoch
            )
            request.items.add(
                topic_id=key.topic_id,
                partition=key.partition,
                leader_epoch=leader_epoch,
                partition_epoch=now.partition_epoch,
                new_isr=now.isr,
                isr_broker_epochs=[core.lifecycle.broker_epoch] * len(now.isr),
                recovered=True,
            )
            try:
                await core.lifecycle.call(request, ALTER_TIMEOUT_MS)
            except errors.PkError as error:
                core.warn("recovered_not_told", partition=str(partition), error=error.message)
            await core.clock.sleep_ms(backoff.next_ms())
