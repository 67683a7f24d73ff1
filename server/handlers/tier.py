"""Requests between broker and tier process: partitions to copy, progress reports, describe.

World-generic.  `tier_partitions` is a long poll with generations (rule P6).  It answers when
something changed, at most every REPORT_INTERVAL_MS, so that a busy log does not cause a busy poll.

Invariants
  Y1  Only the leader describes a partition.  `ready` means that its watermark has caught up (T1).
  Y2  A report moves `tiered_end` and `droppable_end` only forward, and never past the last stable
      offset.
  Y3  `aborted` names every aborted transaction with records between the end of the table and
      `aborted_end`, and the copier goes no further.  A reply names a bounded number; the next
      part follows once the table has grown.
"""

from __future__ import annotations

import asyncio
import os

from pk import errors
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.due_work import DueWork
from pk.server.broker.failures import FailureHandler
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.handlers import aborted_lists
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.leases import check_token, lease_of
from pk.server.replica.context import Environment
from pk.server.replica.corruption import CorruptionManager, unreadable
from pk.server.replica.partition import Partition
from pk.server.tier.client import TierClient
from pk.server.tier.view import REPORT_INTERVAL_MS, TierFeed
from pk.types import PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

WAIT_MAX_MS = 30_000
#: Settings of a topic that the copier and the owner use.
_FOR_TIER = (
    "cleanup_policy",
    "file_delete_delay_ms",
    "local_drop_delay_ms",
    "local_retention_bytes",
    "local_retention_ms",
    "retention_bytes",
    "retention_ms",
    "segment_bytes",
    "tier_file_bytes",
    "tier_max_lag_ms",
    "tier_small_file_bytes",
)


class _Page:
    """The room of one reply for aborted transactions."""

    def __init__(self) -> None:
        self.room = aborted_lists.REPLY_MAX
        self.without: list[PartitionKey] = []  #: partitions that found no room


class TierRequests:
    """What the tier process asks of its broker, and what clients ask of the tier."""

    def __init__(
        self,
        env: Environment,
        partitions: HostedPartitions,
        metadata: MetadataCache,
        clocks: ClockWatch,
        corruption: CorruptionManager,
        failures: FailureHandler,
        feed: TierFeed,
        tier: TierClient,
        due: DueWork,
    ) -> None:
        self._clock = env.clock
        self._partitions = partitions
        self._metadata = metadata
        self._clocks = clocks
        self._corruption = corruption
        self._failures = failures
        self._feed = feed
        self._tier = tier
        self._due = due
        self._cut: set[PartitionKey] = set()  #: described with a part of their aborted transactions

    async def tier_partitions(
        self, request: wire.TierPartitionsRequest
    ) -> wire.TierPartitionsReply:
        """Return the partitions that changed since the request's generation; wait if none did."""
        feed = self._feed
        deadline_ms = self._clock.monotonic_ms() + min(max(0, request.max_wait_ms), WAIT_MAX_MS)
        waited = False
        while not feed.news(request.session_id, request.generation):
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                break
            waited = True
            feed.moved.clear()
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await feed.moved.wait()
            except TimeoutError:
                break
        if waited or request.session_id == feed.session_id:
            await self._clock.sleep_ms(REPORT_INTERVAL_MS)  # gather the changes of the next moments
        page = _Page()
        reply = feed.reply(request, lambda key: self._describe(key, page))
        for key in page.without:
            feed.touch(key)  # Y3: the next reply has room for it
        reply.clock_doubted = self._clocks.trusted_ms() is None
        return reply

    def _describe(self, key: PartitionKey, page: _Page) -> wire.TierPartition | None:
        self._cut.discard(key)
        partition = self._partitions.get(key)
        if partition is None or partition.leader is None or not partition.tiered:
            return None
        log = partition.log
        stable = partition.last_stable_offset
        described = wire.TierPartition(
            topic=partition.topic,
            topic_id=key.topic_id,
            partition=key.partition,
            path=os.path.join(partition.writer.disk.storage.root, log.path),
            leader_epoch=partition.leader.leader_epoch,
            unclean=partition.unclean,
            log_start=log.log_start,
            local_log_start=log.local_log_start,
            last_stable_offset=stable,
            high_watermark=partition.high_watermark,
            log_end=log.written_end,
            ready=partition.leader.ready,
            tiered_end=log.tiered_end,
            known_log_start=partition.known_log_start,
            epochs=[
                wire.EpochStart(epoch=each.epoch, start_offset=each.start_offset)
                for each in log.epochs.entries
            ],
        )
        self._name_aborted(partition, described, page)
        lease = lease_of(self._metadata.image, key.topic_id)
        described.lease_token = 0 if lease is None else lease.token
        for name in _FOR_TIER:
            described.configs[name] = str(partition.settings[name])
        return described

    def _name_aborted(
        self, partition: Partition, described: wire.TierPartition, page: _Page
    ) -> None:
        """Name the aborted transactions from the end of the table on, as far as there is room
        (Y3).
        """
        stable = described.last_stable_offset
        start = max(described.local_log_start, described.tiered_end)
        if start >= stable:
            return
        if page.room <= 0:
            described.aborted_end = start
            page.without.append(partition.key)
            return
        limit = min(page.room, aborted_lists.PARTITION_MAX)
        told, end = partition.log.aborted_in(start, stable, limit)
        aborted_lists.add_all(described, told)
        page.room -= len(told)
        if end < stable:
            described.aborted_end = end
            self._cut.add(partition.key)

    def tier_progress(self, request: wire.TierProgressRequest) -> wire.TierProgressReply:
        """Apply the reports of the tier; the local log may then drop covered segments (rule T6)."""
        for progress in request.partitions:
            partition = self._partitions.get(PartitionKey(progress.topic_id, progress.partition))
            if partition is None or partition.leader is None or not partition.tiered:
                continue
            try:
                moved = partition.tier.report(
                    progress, partition.leader.leader_epoch, partition.last_stable_offset
                )
            except errors.TierTableChanged as changed:
                # A partition that is not ready does not know its stable end; the report comes
                # again.
                partition.tier.problem = changed if partition.leader.ready else None
                continue
            # T9: a former leader moved log_start and died before this broker learned of it.  The
            # rows below it are deleted.
            partition.update_log_start(partition.tier.start)
            self._corruption.look_in_front(partition)
            problem = partition.tier.problem
            if isinstance(problem, errors.CorruptLog | errors.OffsetOutOfRange):
                self._failures.examine(
                    partition, problem
                )  # L9: the copier did not find records that the broker listed
            if not moved:
                continue
            if partition.key in self._cut:
                self._feed.touch(partition.key)  # Y3
                self._feed.moved.set()
            log = partition.log
            before = log.droppable_end
            log.tiered_end = max(log.tiered_end, partition.tier.tiered_end)
            log.droppable_end = max(log.droppable_end, partition.tier.droppable_end)
            if log.droppable_end > before:
                self._due.retain_soon(partition.key)
        return wire.TierProgressReply()

    async def tier_rows(self, request: wire.TierRowsRequest) -> wire.TierRowsReply:
        """Repair or accept missing rows of partitions that this broker leads (rule T17)."""
        partition = self._partitions.find(PartitionKey(request.topic_id, request.partition))
        partition.serving()
        if not partition.tiered:
            raise errors.InvalidRequest(f"{partition}: the topic has no tier")
        return await self._tier.rows(request)

    async def tier_now(self, request: wire.TierNowRequest) -> wire.TierNowReply:
        """Apply retention to a partition that this broker leads, or vacuum the table, without
        waiting for the interval.

        The reply to retention has the log start before it: the pass begins at the next tick.
        """
        partition = self._partitions.find(PartitionKey(request.topic_id, request.partition))
        partition.serving()
        if not partition.tiered:
            raise errors.InvalidRequest(f"{partition}: the topic has no tier")
        if request.work == "retention":
            self._due.retain_soon(partition.key)
            return wire.TierNowReply(log_start=partition.log.log_start)
        if request.work != "vacuum":
            raise errors.InvalidRequest(f"{request.work[:40]!r} is no work of a tier")
        return await self._tier.vacuum(request)

    async def commit_to_table(self, request: wire.CommitToTableRequest) -> wire.CommitToTableReply:
        """Hand the files of a maintenance job to the owner of the table (rules C5, T3).

        Raises `LeaseHeld` unless the job has the newest lease of the table.
        """
        topic = self._metadata.image.topics.get(request.topic_id)
        if topic is None or topic.name != request.topic:
            raise errors.UnknownTopicId(f"topic {request.topic} has no id {request.topic_id[:40]}")
        if not request.lease_token:
            raise errors.InvalidRequest("a hand-over to a table needs the lease of a job (rule C5)")
        check_token(self._metadata.image, request.topic_id, request.lease_token)
        return await self._tier.commit(request)

    async def describe_tier(self, request: wire.DescribeTierRequest) -> wire.DescribeTierReply:
        """Describe the table of a topic: the owner's view, and this broker's view of damage."""
        topic = self._metadata.image.topic(request.topic)
        if topic is None:
            raise errors.UnknownTopicOrPartition(f"topic {request.topic!r} does not exist")
        wanted = self._metadata.settings_of(request.topic)
        if not self._metadata.is_tiered(request.topic, wanted):
            why = (
                "the server has no tier_url"
                if not self._tier.enabled
                else "tier_enable is off for this topic"
            )
            return wire.DescribeTierReply(
                topic=request.topic, topic_id=topic.topic_id, version=-1, status=f"off: {why}"
            )
        try:
            reply = await self._tier.describe(request.topic, request.suspects)
        except errors.TierUnavailable as error:
            reply = wire.DescribeTierReply(
                version=-1, status="unavailable", problem=frames.error_of(error)
            )
        if reply.topic_id not in (
            "",
            topic.topic_id,
        ):  # the table of a deleted topic with this name
            reply = wire.DescribeTierReply(version=-1, status="nothing tiered yet")
        reply.topic, reply.topic_id = request.topic, topic.topic_id
        described = {each.partition: each for each in reply.partitions}
        for number in sorted(topic.partitions):
            partition = self._partitions.get(PartitionKey(topic.topic_id, number))
            if partition is not None:
                self._add_view(partition, reply, described.get(number))
        return reply

    def _add_view(
        self,
        partition: Partition,
        reply: wire.DescribeTierReply,
        state: wire.TierPartitionState | None,
    ) -> None:
        tier = partition.tier
        if state is None:
            state = reply.partitions.add(
                partition=partition.key.partition,
                start=tier.start,
                end=max(0, tier.tiered_end),
                bytes=tier.tier_bytes,
            )
        state.lag = max(0, partition.last_stable_offset - max(state.end, partition.log.log_start))
        if not reply.uri:
            reply.uri = tier.uri
        problem = partition.hosted.cause  # the cause of the tier's problem
        # the copier stops there (L9)
        if problem is None and unreadable(partition, state.end):
            problem = self._corruption.problem_of(partition)
        if problem is not None:
            reply.problem.CopyFrom(frames.error_of(problem))
        elif tier.problem is not None and not reply.HasField("problem"):
            reply.problem.CopyFrom(frames.error_of(tier.problem))
