"""The holds of queries on the retention of this broker's partitions (rule S1).

World-generic.  The decisions are those of replica/retention_holds; this module gives it the reports
of the coordinators, the logs and the clock.  Retention, the deletion of rows of the tier and the
cleaner of compacted logs ask `apply` before they plan.

Invariants
  O1  `apply` is asked before each plan and waits for nothing.  The size of a hold is measured by
      `visit`, once in a visit of retention.
  O2  Only the leader of a partition reports a fall: in its log, in its metrics, and to the
      coordinator.
  O3  Internal topics have no holds: no query reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from pk import errors
from pk.group_ids import PARTITIONS, TOPIC
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import Environment
from pk.server.replica.partition import Partition
from pk.server.replica.retention_holds import Fall, Hold, RetentionHolds
from pk.topic_names import is_internal
from pk.types import NONE, Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire


class HoldKeeper:
    """The holds at one broker."""

    def __init__(
        self,
        env: Environment,
        partitions: Mapping[PartitionKey, Partition],
        metadata: MetadataCache,
    ) -> None:
        self._env = env
        self._partitions = partitions
        self._metadata = metadata
        self._bytes_max: int = env.server["hold_max_bytes"]
        self._holds = RetentionHolds(env.server["hold_max_ms"], env.server["hold_grace_ms"])

    # -- of the coordinators -----------------------------------------------------------------------

    def report(self, request: wire.ReportHoldsRequest) -> wire.ReportHoldsReply:
        """Take over the holds of coordinators; return those that have fallen here (O2)."""
        for each in request.coordinators:
            number = each.coordinator_partition
            if not 0 <= number < PARTITIONS:
                raise errors.InvalidRequest(f"no coordinator has partition {number} of {TOPIC}")
            if each.leader_epoch >= self._epoch(number):
                now_ms = self._env.now_ms
                self._holds.report(number, each.leader_epoch, _holds(each), now_ms)
        keys = self._holds.keys()
        self._holds.forget(self._partitions)
        for key in keys:
            if key in self._partitions:
                self.apply(self._partitions[key])
        led = [key for key in keys if self._leads(key)]
        self._env.metrics.retention_holds.set(self._holds.count(led, self._env.now_ms))
        reply = wire.ReportHoldsReply()
        reported = {group.group_id for each in request.coordinators for group in each.groups}
        for key in led:
            for fall in self._holds.fallen(key):
                if fall.group_id in reported:
                    reply.fallen.add(
                        group_id=fall.group_id,
                        topic_id=key.topic_id,
                        partition=key.partition,
                        why=fall.why,
                    )
        return reply

    def _epoch(self, number: int) -> Epoch:
        """Return the newest leader epoch of a coordinator partition that this broker knows."""
        topic = self._metadata.image.topic(TOPIC)
        state = None if topic is None else topic.partitions.get(number)
        return NONE if state is None else state.leader_epoch

    def _leads(self, key: PartitionKey) -> bool:
        partition = self._partitions.get(key)
        return partition is not None and partition.leader is not None

    # -- of the partitions -------------------------------------------------------------------------

    def apply(self, partition: Partition) -> Offset | None:
        """Set and return the hold of a log: nothing at or above it expires or is compacted (O1).

        None = nothing is held.
        """
        log, now_ms = partition.log, self._env.now_ms
        log.retention_hold = None
        if is_internal(partition.topic):  # O3
            return None
        known = self._metadata.image.topic(TOPIC) is not None
        if not self._holds.settled(
            partition.key, partition.leader_epoch, PARTITIONS if known else 0, now_ms
        ):
            log.retention_hold = log.log_start
            return log.retention_hold
        lowest = self._holds.lowest(partition.key, now_ms)
        if lowest is not None:
            log.retention_hold = max(lowest[0], log.log_start)
        return log.retention_hold

    async def visit(self, partition: Partition) -> Offset | None:
        """Let the holds of a partition fall that are over their bounds; then `apply`."""
        key, now_ms = partition.key, self._env.now_ms
        falls = self._holds.expire(key, partition.log.written_end, now_ms)
        if self._bytes_max >= 0:
            for offset, group_id in self._holds.too_large(key):
                self._holds.fall(key, group_id, await self._too_large(partition, offset))
            while (lowest := self._holds.lowest(key, now_ms)) is not None:
                offset, group_id = lowest
                why = await self._too_large(partition, offset)
                if not why:
                    break
                fall = self._holds.fall(key, group_id, why)
                falls += [] if fall is None else [fall]
        if partition.leader is not None:
            self._fell(partition, falls)
        return self.apply(partition)

    def _fell(self, partition: Partition, falls: Iterable[Fall]) -> None:
        """Report the holds that have fallen (O2)."""
        for fall in falls:
            self._env.metrics.retention_holds_fallen.inc()
            self._env.warn(
                "retention_hold_fell",
                partition=str(partition),
                group=fall.group_id,
                offset=fall.offset,
                why=fall.why,
            )

    async def _too_large(self, partition: Partition, offset: Offset) -> str:
        """Return why a hold at `offset` is too large; "" = it is not."""
        behind = await self._behind(partition, offset)
        if behind <= self._bytes_max:
            return ""
        return f"{behind} bytes behind the end, {self._bytes_max} allowed (hold_max_bytes)"

    async def _behind(self, partition: Partition, offset: Offset) -> int:
        """Return the bytes from an offset to the end: of the log, and of the tier below it.

        The size of a part of the tier is interpolated.
        """
        log, tier = partition.log, partition.tier
        marks = [max(offset, log.local_log_start), log.written_end]
        below, end = await partition.writer.disk.read(partial(log.bytes_at, marks))
        covered = tier.tiered_end - tier.start
        only = log.local_log_start - max(offset, log.log_start)  # offsets that only the tier has
        if only <= 0 or covered <= 0:
            return end - below
        return end - below + tier.tier_bytes * min(only, covered) // covered

    def passed(self, partition: Partition, before: Offset) -> list[str]:
        """Return the groups whose holds a deletion below `before` passes; log them."""
        groups = self._holds.groups_below(partition.key, before, self._env.now_ms)
        if groups:
            self._env.warn(
                "retention_hold_overridden",
                partition=str(partition),
                deleted_below=before,
                groups=groups,
            )
        return groups


def _holds(told: wire.CoordinatorHolds) -> list[Hold]:
    found = []
    for group in told.groups:
        for topic in group.topics:
            lists = (topic.partitions, topic.offsets, topic.commit_offsets, topic.ages_ms)
            if len({len(each) for each in lists}) != 1:
                raise errors.InvalidRequest("lists of a report of holds differ in length")
            for number, offset, commit_offset, age_ms in zip(*lists, strict=True):
                key = PartitionKey(topic.topic_id, number)
                found.append(Hold(group.group_id, key, offset, commit_offset, age_ms))
    return found
