"""Changes of in-sync sets, from a leader's request to the committed record (rule R2, KIP-497).

World-generic.  A leader that wants another ISR first records the proposal in its `Leader`
(replica/leader.py); from then on the replicas to be added hold the high watermark back.  Then it
sends the change to the controller.  The metadata log decides whether the change was made.  One
request carries the pending changes of many partitions, and one request is under way at a time.

Invariants
  A1  A pending change ends when the metadata log moves past the partition epoch it was made for,
      when the leader epoch ends, or when the controller has certainly refused it.
  A2  A change whose outcome is unknown stays pending, and the leader sends it again: the controller
      may have made it already, and may elect the new member.  If the controller then refuses it,
      the leader asks for the committed ISR instead.  That change moves the partition epoch, so no
      earlier copy of the request can be granted any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pk import errors
from pk.backoff import Backoff, equal_jitter
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import ControllerChannel, Environment
from pk.server.replica.leader import Leader
from pk.server.replica.partition import Partition
from pk.tasks import TaskRegistry
from pk.types import NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

ASK_TIMEOUT_MS = 3_000
AGAIN_MS = (50, 1_000)
ITEMS_MAX = 1_000
#: How long a leader waits after a refused change before it asks for another one.
REFUSED_MS = 200


class PendingIsrChange(NamedTuple):
    """The ISR that a partition's leader asks the controller for."""

    leader: Leader
    partition_epoch: int
    isr: tuple[NodeId, ...]
    broker_epochs: tuple[int, ...]


class AlterPartitionManager:
    """The pending changes of one broker."""

    def __init__(
        self,
        env: Environment,
        partitions: Mapping[PartitionKey, Partition],
        metadata: MetadataCache,
        controller: ControllerChannel,
    ) -> None:
        self._env = env
        self._partitions = partitions
        self._metadata = metadata
        self._controller = controller
        self._pending: dict[PartitionKey, PendingIsrChange] = {}
        #: Changes that were sent and whose outcome is unknown (A2).
        self._unsure: dict[PartitionKey, None] = {}
        self._not_before_ms: dict[PartitionKey, int] = {}
        self._tasks = TaskRegistry()
        self._asking = False

    async def close(self) -> None:
        await self._tasks.close()

    def consider(self, partition: Partition) -> None:
        """Ask the controller for another ISR if the progress of the followers requires it."""
        leader, env = partition.leader, self._env
        if leader is None or len(leader.replicas) < 2 or self._controller.want_shutdown:
            return
        now_ms = env.now_ms
        if self._not_before_ms.get(partition.key, 0) > now_ms:
            return
        brokers = self._metadata.image.brokers
        eligible = {
            replica: brokers[replica].broker_epoch
            for replica in leader.replicas
            if replica in brokers and brokers[replica].available
        }
        lag_max_ms = env.server["replica_lag_time_max_ms"]
        wanted = leader.wanted_isr(eligible, now_ms, lag_max_ms, partition.log.log_start)
        if wanted is None:
            return
        leader.on_isr_proposed(wanted)
        epochs = tuple(
            self._controller.broker_epoch
            if member == env.node_id
            else leader.broker_epoch_of(member)
            for member in wanted
        )
        self._unsure.pop(partition.key, None)
        self._not_before_ms.pop(partition.key, None)
        self._pending[partition.key] = PendingIsrChange(
            leader, leader.partition_epoch, wanted, epochs
        )
        if not self._asking:
            self._asking = True
            self._tasks.spawn(self._run())

    async def _run(self) -> None:
        backoff = Backoff(AGAIN_MS, equal_jitter(self._env.world.rng))
        try:
            while self._open():
                try:
                    await self._ask()
                    backoff.reset()
                    if not self._open():
                        return
                except errors.PkError as failure:
                    self._env.metrics.refused(failure)
                except Exception as bug:
                    self._env.bug("changing in-sync sets", bug)
                # After a reply, pending changes wait for the metadata log.  Without, ask again.
                await self._env.clock.sleep_ms(backoff.next_ms())
        finally:
            self._asking = False

    def _open(self) -> bool:
        """Remove the changes that have ended (A1); return whether any is still pending."""
        for key, pending in list(self._pending.items()):
            partition = self._partitions.get(key)
            if (
                partition is None
                or partition.leader is not pending.leader
                or pending.leader.partition_epoch != pending.partition_epoch
            ):
                del self._pending[key]
                self._unsure.pop(key, None)
        return bool(self._pending)

    async def _ask(self) -> None:
        controller, partitions = self._controller, self._partitions
        asked = dict(list(self._pending.items())[:ITEMS_MAX])
        request = wire.AlterPartitionRequest(
            broker_id=self._env.node_id, broker_epoch=controller.broker_epoch
        )
        for key, pending in asked.items():
            request.items.add(
                topic_id=key.topic_id,
                partition=key.partition,
                leader_epoch=pending.leader.leader_epoch,
                partition_epoch=pending.partition_epoch,
                new_isr=pending.isr,
                isr_broker_epochs=pending.broker_epochs,
                recovered=not partitions[key].tiered and partitions[key].unclean,
            )
        try:
            frame = await controller.call(request, ASK_TIMEOUT_MS)
        except errors.PkError:
            self._unsure.update(dict.fromkeys(asked))
            raise
        for result in frame.head.alter_partition_reply.results:
            key = PartitionKey(result.topic_id, result.partition)
            if key in asked:
                self._answered(key, asked[key], result)

    def _answered(
        self, key: PartitionKey, pending: PendingIsrChange, result: wire.AlterPartitionResult
    ) -> None:
        """Handle the result for one partition: end the change if it is certainly refused (A1).

        A change that was not refused stays pending until the metadata log has it.
        """
        if not result.HasField("error"):
            if set(pending.isr) == set(pending.leader.isr):
                return  # A2
            change = "shrink" if len(pending.isr) < len(pending.leader.isr) else "expand"
            self._env.metrics.isr_changes.labels(change).inc()
            return
        error = frames.raise_error(result.error)
        self._env.metrics.refused(error)
        if not isinstance(error, errors.IneligibleReplica) or self._pending.get(key) is not pending:
            return
        if key in self._unsure:
            self._pending[key] = pending._replace(isr=pending.leader.isr, broker_epochs=())
            return
        del self._pending[key]
        self._not_before_ms[key] = self._env.now_ms + REFUSED_MS
        partition = self._partitions.get(key)
        moved = pending.leader.on_isr_refused(pending.isr)
        if moved and partition is not None and partition.leader is pending.leader:
            partition.watermark_moved()
