"""Before an uncleanly elected leader serves, it compares its log with the tier's table (rule T4).

World-generic.  An unclean leader may lack records that the table has, and may have other records at
the table's offsets.  The leader first commits its epoch to the table as a *claim*, so no copier of
an older epoch can commit any more.  Then it compares:

  - If the log reaches the table's end, and its epoch cache gives the table's epoch for the last
    tiered offset, log and table have the same history, and the log stays.
  - If the topic was not tiered for a while and the log grew meanwhile, its last record has a later
    epoch than the table.  This log stays as well (rule T15).
  - Any other log is dropped, and begins again empty at `tiered_end`.

While the store is unavailable the partition is not served.

Invariants
  K1  A claimed partition serves only in the epoch for which the claim was made.
  K2  The claim is committed before the log is kept or dropped.
  K3  The leader reports `recovered` to the controller after the partition serves.
  K4  A claim ends with its partition's directory.  A wait for the store must not hide that the
      partition cannot be served from here (rule L2).
  K5  A log whose restart at `tiered_end` was interrupted is offline, also if its claim has ended:
      neither another claim, nor a leader that it would follow, could know what it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from pk import errors
from pk.backoff import Backoff, equal_jitter
from pk.log.manager import LogManager
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import PartitionState
from pk.server.replica.context import ControllerChannel, Environment
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.server.replica.partition import Partition
from pk.server.replica.state import ReplicaEvent, ReplicaState
from pk.server.tier.client import TierClient
from pk.tasks import TaskRegistry
from pk.types import Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

BACKOFF_MS = (200, 5_000)
ALTER_TIMEOUT_MS = 5_000

#: Makes this broker the leader of a partition whose table is claimed.
Lead = Callable[[Partition, PartitionState], None]


def agrees(
    log_end: int,
    epoch_at_end: int,
    table: wire.TierClaimReply,
    *,
    local_start: int = 0,
    log_start: int = 0,
) -> bool:
    """Whether a local log has the same history as the table, up to the table's end (T4).

    `epoch_at_end` is the local epoch of the last tiered offset.  In two cases there is nothing to
    compare, and the log agrees: it begins exactly at the table's end, because it was begun there
    after an earlier claim; or all records of the table are deleted (rule T9).  A log that ends
    below the table's end never agrees, because those offsets were given to records before.
    """
    if not table.exists:
        return True
    if log_end < table.end:
        return False
    nothing_left = table.end <= max(table.start, log_start)
    return nothing_left or local_start == table.end or epoch_at_end == table.end_epoch


def went_on_without(log_epoch: int, table: wire.TierClaimReply) -> bool:
    """Whether a log that does not agree with the table is the later history (T15).

    `log_epoch` is the epoch of the log's last record; NONE = no record.  A leader of a tiered topic
    starts from the table's records.  So a record of a later epoch than the table's last one is in a
    log that agrees, or in a log that was written while the topic was not tiered.
    """
    return log_epoch > table.end_epoch


def _note_covered(partition: Partition, end: Offset) -> None:
    """Note that the table covers the log up to `end`.

    Does nothing if the tier was turned off meanwhile: topic retention would wait for copies that
    are never made.
    """
    if partition.tiered:
        partition.log.tiered_end = partition.log.droppable_end = end


class EpochFence:
    """The claims that are under way, one task per partition, and the reports about them."""

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        partitions: Mapping[PartitionKey, Partition],
        metadata: MetadataCache,
        fetchers: ReplicaFetcherManager,
        tier: TierClient,
        controller: ControllerChannel,
    ) -> None:
        self._env = env
        self._manager = manager
        self._partitions = partitions
        self._metadata = metadata
        self._fetchers = fetchers
        self._tier = tier
        self._controller = controller
        self._tasks = TaskRegistry(partial(env.bug, "claiming a table"))  #: tasks by partition
        self._epochs: dict[PartitionKey, int] = {}

    def epoch(self, key: PartitionKey) -> int | None:
        """Return the leader epoch of the running claim; None = no claim."""
        return self._epochs.get(key)

    def begin(self, partition: Partition, state: PartitionState, lead: Lead) -> None:
        """Claim the table for the epoch of `state`, then call `lead`; an older claim ends."""
        self.cancel(partition.key)
        waits = f"{partition}: an unclean leader waits for the tier's table (rule T4)"
        partition.fail(errors.TierUnavailable(waits), ReplicaEvent.RECOVERY_BEGUN)
        self._tasks.spawn(self._claim(partition, state, lead), partition.key)
        self._epochs[partition.key] = state.leader_epoch

    def give_up(self, partition: Partition) -> None:
        """End the claim of a RECOVERING replica, because another broker leads or none does."""
        if partition.state is ReplicaState.RECOVERING:
            self.cancel(partition.key)
            partition.on(ReplicaEvent.RESIGNED)

    def cancel(self, key: PartitionKey) -> bool:
        """End a claim: the topic or its disk is gone, or a newer epoch claims.  False if there was
        none.
        """
        self._tasks.cancel(key)
        return self._epochs.pop(key, None) is not None

    async def close(self) -> None:
        self._epochs.clear()
        await self._tasks.close()

    async def _claim(self, partition: Partition, state: PartitionState, lead: Lead) -> None:
        env = self._env
        backoff = Backoff(BACKOFF_MS, equal_jitter(env.world.rng))
        while True:
            try:
                await self._fetchers.wait_until_idle(partition)
                table = await self._tier.claim(partition, state.leader_epoch, commit=True)
                await self._compare(partition, table)
                break
            except errors.PkError as error:
                partition.on(ReplicaEvent.RECOVERY_FAILED, error)
            except Exception as bug:
                env.bug("claiming a table", bug)
            await env.clock.sleep_ms(backoff.next_ms())
        self._epochs.pop(partition.key, None)
        partition.on(ReplicaEvent.RECOVERED)
        now = self._metadata.image.partition(partition.key)
        if now is None or now.leader_epoch != state.leader_epoch or now.leader != env.node_id:
            return  # K1: the replica follows the leader of the newer epoch
        lead(partition, now)
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
            await self._manager.move_log_starts({partition.key: start})
            _note_covered(partition, table.end)
            return
        if went_on_without(log.epochs.epoch_of(log.written_end - 1), table):
            _note_covered(partition, log.local_log_start)
            self._env.warn("log_passed_tier", partition=str(partition), table_end=table.end)
            return
        self._env.warn(
            "tier_wins",
            partition=str(partition),
            local_end=log.written_end,
            table_end=table.end,
        )
        work = self._begin_at_table(partition, table.end, start)
        task = self._fetchers.changing.spawn(work, partition.key)
        # If the claim ends, the change of the log is still completed.
        refusal = await asyncio.shield(task)
        if refusal is not None:
            raise refusal

    async def _begin_at_table(
        self, partition: Partition, end: Offset, start: Offset
    ) -> errors.PkError | None:
        """Begin the log at the table's end; return the error that left the log as it was.

        The table's records below its end still belong to the log, except those that were deleted
        before (rule T9).  The log start may lie beyond the table's end.
        """
        key = partition.key
        partition.cut_watermark(0)
        try:
            await self._manager.start_anew(key, max(end, start), log_start=start)
        except errors.PkError as error:
            if not partition.log.torn:
                return error
            if self._partitions.get(key) is partition:  # K5
                partition.storage_failed(error)
            return None
        _note_covered(partition, end)
        return None

    async def _report_recovered(self, partition: Partition, leader_epoch: Epoch) -> None:
        """Report `recovered` to the controller until the metadata log has it, or another epoch
        begins (K3).

        Until then the controller counts the leader as waiting for its table, and does not move the
        lead.
        """
        env, controller, key = self._env, self._controller, partition.key
        backoff = Backoff(BACKOFF_MS, equal_jitter(env.world.rng))
        while True:
            now = self._metadata.image.partition(key)
            if now is None or not now.unclean or partition.leader_epoch != leader_epoch:
                return
            request = wire.AlterPartitionRequest(
                broker_id=env.node_id, broker_epoch=controller.broker_epoch
            )
            request.items.add(
                topic_id=key.topic_id,
                partition=key.partition,
                leader_epoch=leader_epoch,
                partition_epoch=now.partition_epoch,
                new_isr=now.isr,
                isr_broker_epochs=[controller.broker_epoch] * len(now.isr),
                recovered=True,
            )
            try:
                await controller.call(request, ALTER_TIMEOUT_MS)
            except errors.PkError as error:
                env.warn("recovered_not_told", partition=str(partition), error=error.message)
            await env.clock.sleep_ms(backoff.next_ms())
