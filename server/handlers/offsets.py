"""Requests about offsets: list_offsets, byte offsets, and delete_records, which moves log starts.

World-generic.  An offset that is in memory is answered at once.  Look-ups in indexes run in a
reader thread, one call per directory.  Offsets below the local log are looked up in the tier (rule
T11).

Invariants
  O1  "latest" is the bound of the isolation level, never the log end.  A new leader whose watermark
      lags answers OFFSET_NOT_AVAILABLE (KIP-207).
  O2  delete_records answers after the new log_start is SYNCED (rule T9).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple

from pk import errors
from pk.log.manager import LogManager
from pk.log.plan import TimeOffset
from pk.log.storage import Disk
from pk.server.broker.due_work import DueWork
from pk.server.broker.hold_keeper import HoldKeeper
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.leader import ACKS_ALL, Leader
from pk.server.replica.partition import Partition
from pk.server.tier.client import TierClient
from pk.topic_names import is_internal
from pk.types import NONE, Offset, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
TIERED_END = -5

#: Longest wait of a deletion for the in-sync replicas.
DELETE_WAIT_MS = 10_000
QUERIES_MAX = 100_000
SAMPLES_MAX = 10_000
#: The number of newest leader epochs that an answer to "latest" carries.
EPOCHS_MAX = 64
#: Most concurrent look-ups in the tier of one request.
TIER_LOOKUPS = 8


class _Lookup(NamedTuple):
    """An answer that needs an index."""

    answer: wire.OffsetAnswer
    partition: Partition
    leader: Leader  #: the leader epoch of the log
    timestamp_ms: int  #: or MAX_TIMESTAMP
    bound: Offset


class OffsetRequests:
    """Offsets, byte positions and deletions of the partitions that this broker leads."""

    def __init__(
        self,
        partitions: HostedPartitions,
        manager: LogManager,
        corruption: CorruptionManager,
        tier: TierClient,
        due: DueWork,
        holds: HoldKeeper,
    ) -> None:
        self._partitions = partitions
        self._manager = manager
        self._corruption = corruption
        self._tier = tier
        self._due = due
        self._holds = holds

    async def list_offsets(self, request: wire.ListOffsetsRequest) -> wire.ListOffsetsReply:
        """Return offsets by special value or by time; each answer has its own error."""
        if len(request.queries) > QUERIES_MAX:
            raise errors.InvalidRequest(
                f"{len(request.queries)} queries; {QUERIES_MAX} are allowed"
            )
        reply = wire.ListOffsetsReply()
        lookups: list[_Lookup] = []
        for query in request.queries:
            answer = reply.answers.add(
                topic_id=query.topic_id,
                partition=query.partition,
                offset=NONE,
                timestamp_ms=NONE,
                leader_epoch=NONE,
            )
            try:
                partition = self._partitions.find(PartitionKey(query.topic_id, query.partition))
                lookup = _answer_at_once(partition, query, request.isolation, answer)
            except errors.PkError as error:
                answer.error.CopyFrom(frames.error_of(error))
                continue
            if lookup is not None:
                lookups.append(lookup)
        while lookups:
            lookups = await self._look_in_both(lookups)
        return reply

    async def _look_in_both(self, lookups: list[_Lookup]) -> list[_Lookup]:
        """Look up times in the tier, then in the local log (rule T11).

        Segments may leave the local log between both steps.  Then the look-up is repeated, so that
        their offsets are not skipped.
        """
        starts = [lookup.partition.log.local_log_start for lookup in lookups]
        local = [lookup for lookup in lookups if not _in_tier(lookup)]
        local += await self._ask_tier([lookup for lookup in lookups if _in_tier(lookup)])
        await self._ask_disks(local)
        looked, again = {id(lookup) for lookup in local}, []
        for lookup, start in zip(lookups, starts, strict=True):
            answer = lookup.answer
            moved = lookup.partition.log.local_log_start != start
            if moved and id(lookup) in looked and _in_tier(lookup):
                answer.ClearField("error")
                answer.offset = answer.timestamp_ms = answer.leader_epoch = NONE
                again.append(lookup)
        return again

    async def _ask_tier(self, lookups: list[_Lookup]) -> list[_Lookup]:
        """Answer from the tier; returns the look-ups whose answer is local (rule T11)."""
        gate = asyncio.Semaphore(TIER_LOOKUPS)
        rest: list[_Lookup] = []

        async def ask(lookup: _Lookup) -> None:
            answer, partition, _, timestamp_ms, _ = lookup
            async with gate:
                try:
                    found = await self._tier.offset_for_time(partition, timestamp_ms)
                except errors.PkError as error:
                    answer.error.CopyFrom(frames.error_of(error))
                    return
            if found.offset == NONE or found.offset >= partition.log.local_log_start:
                rest.append(lookup)
            else:
                answer.offset, answer.timestamp_ms = found.offset, found.timestamp_ms
                answer.leader_epoch = found.leader_epoch

        await asyncio.gather(*(ask(lookup) for lookup in lookups))
        return rest

    async def _ask_disks(self, lookups: list[_Lookup]) -> None:
        by_disk: dict[int, tuple[Disk, list[_Lookup]]] = {}
        for lookup in lookups:
            disk = lookup.partition.writer.disk
            by_disk.setdefault(id(disk), (disk, []))[1].append(lookup)
        for disk, mine in by_disk.values():
            found = await disk.read(partial(_look_up_all, mine))
            for (answer, partition, leader, *_), outcome in zip(mine, found, strict=True):
                if (
                    partition.leader is not leader
                ):  # the log may have been truncated during the look-up
                    gone = errors.NotLeaderOrFollower(
                        f"{partition}: its leader epoch ended during the look-up"
                    )
                    answer.error.CopyFrom(frames.error_of(gone))
                    continue
                if isinstance(outcome, errors.CorruptLog):
                    partition.storage_failed(outcome)  # L9
                if isinstance(outcome, errors.PkError):
                    outcome = self._corruption.client_error(partition, outcome)
                    answer.error.CopyFrom(frames.error_of(outcome))
                elif outcome is not None:
                    answer.offset, answer.timestamp_ms = outcome.offset, outcome.timestamp_ms
                    answer.leader_epoch = outcome.leader_epoch

    async def byte_offsets(self, request: wire.ByteOffsetsRequest) -> wire.ByteOffsetsReply:
        """Return cumulative bytes at sampled offsets, by which readers split ranges."""
        if len(request.queries) > QUERIES_MAX:
            raise errors.InvalidRequest(
                f"{len(request.queries)} queries; {QUERIES_MAX} are allowed"
            )
        reply = wire.ByteOffsetsReply()
        for query in request.queries:
            answer = reply.answers.add(topic_id=query.topic_id, partition=query.partition)
            try:
                await self._sample(query, answer)
            except errors.PkError as error:
                answer.error.CopyFrom(frames.error_of(error))
        return reply

    async def _sample(self, query: wire.ByteOffsetsQuery, answer: wire.ByteOffsetsAnswer) -> None:
        partition = self._partitions.find(PartitionKey(query.topic_id, query.partition))
        partition.serving()
        log = partition.log
        start, end = max(query.start, log.log_start), min(query.end, partition.high_watermark)
        wanted = min(max(2, query.samples_max or 100), SAMPLES_MAX)
        if end <= start:
            answer.offsets.append(start)
            answer.cumulative_bytes.append(0)
            return
        points = [(start, 0)]
        hot = max(start, min(log.local_log_start, end))
        if start < hot:  # in the tier: bytes are taken to be spread evenly
            covered = max(1, partition.tier.tiered_end - partition.tier.start)
            per_offset = partition.tier.tier_bytes / covered
            steps = max(1, wanted // 2)
            for step in range(1, steps + 1):
                offset = start + (hot - start) * step // steps
                if offset > points[-1][0]:
                    points.append((offset, int((offset - start) * per_offset)))
        if hot < end:
            base = points[-1][1]
            samples = await partition.writer.disk.read(lambda: log.sample_offsets(hot, end, wanted))
            for offset, size in samples:
                if offset > points[-1][0]:
                    points.append((offset, base + size))
        for offset, size in points:
            answer.offsets.append(offset)
            answer.cumulative_bytes.append(size)

    async def delete_records(self, request: wire.DeleteRecordsRequest) -> wire.DeleteRecordsReply:
        """Move log starts forward; retention deletes the data below them (KIP-107).

        A deletion passes the holds of queries, and the reply says whose (S1).
        """
        reply = wire.DeleteRecordsReply()
        moved: dict[Partition, Offset] = {}
        for item in request.items:
            result = reply.results.add(
                topic_id=item.topic_id, partition=item.partition, log_start=NONE
            )
            try:
                partition = self._partitions.find(PartitionKey(item.topic_id, item.partition))
                if is_internal(partition.topic):
                    raise errors.InvalidTopic(
                        f"{partition.topic} is pk's own: its records cannot be deleted",
                        topic=partition.topic,
                    )
                leader = partition.serving()
                leader.check_acks(ACKS_ALL)
                if partition.settings["cleanup_policy"] == "compact":
                    raise errors.InvalidRequest(
                        f"{partition}: the topic's cleanup_policy is compact (KIP-107)"
                    )
                before = leader.high_watermark if item.before_offset == NONE else item.before_offset
                if not leader.ready and not 0 <= item.before_offset <= leader.high_watermark:
                    raise errors.OffsetNotAvailable(
                        f"{partition}: the new leader's high watermark is still catching up"
                    )
                if not 0 <= before <= leader.high_watermark:
                    raise errors.OffsetOutOfRange(
                        f"{partition}: cannot delete below {before}, "
                        f"the high watermark is {leader.high_watermark}"
                    )
                if before > partition.log.log_start:
                    moved[partition] = max(before, moved.get(partition, 0))
                    result.holds.extend(self._holds.passed(partition, before))
                result.log_start = max(before, partition.log.log_start)
            except errors.PkError as error:
                result.error.CopyFrom(frames.error_of(error))
        if moved:
            moves = {partition.key: before for partition, before in moved.items()}
            await self._manager.move_log_starts(moves)  # O2
            for partition in moved:
                partition.bounds_moved(urgent=True)
                self._due.retain_soon(partition.key)
        asked = zip(request.items, reply.results, strict=True)
        waits = (self._until_known(*each) for each in asked if not each[1].HasField("error"))
        await asyncio.gather(*waits)  # concurrently: a silent replica costs one wait in all
        return reply

    async def _until_known(
        self, item: wire.DeleteRecordsItem, result: wire.DeleteRecordsResult
    ) -> None:
        """Wait until every in-sync replica knows the new log start (rule T9).

        Otherwise the next leader could undo an acknowledged deletion.
        """
        try:
            partition = self._partitions.find(PartitionKey(item.topic_id, item.partition))
            async with asyncio.timeout(DELETE_WAIT_MS / 1000):
                await partition.deleted(result.log_start)
        except TimeoutError:
            slow = errors.RequestTimedOut("in-sync replicas did not confirm the deletion in time")
            result.error.CopyFrom(frames.error_of(slow))
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))


def _in_tier(lookup: _Lookup) -> bool:
    """Whether the record may be in the tier only."""
    log = lookup.partition.log
    return lookup.timestamp_ms >= 0 and log.log_start < log.local_log_start


def _answer_at_once(
    partition: Partition, query: wire.OffsetQuery, isolation: int, answer: wire.OffsetAnswer
) -> _Lookup | None:
    """Fill `answer` from memory, or return the look-up that it needs."""
    leader = partition.serving(query.current_leader_epoch)
    asked = query.timestamp_ms
    if asked < TIERED_END:
        raise errors.InvalidRequest(f"timestamp {asked} has no meaning")
    log = partition.log
    if asked in (LATEST, MAX_TIMESTAMP) or asked >= 0:
        if not leader.ready:
            raise errors.OffsetNotAvailable(
                f"{partition}: the new leader's high watermark is still catching up"
            )
        if asked != LATEST:
            return _Lookup(answer, partition, leader, asked, partition.bound(isolation))
        answer.offset, answer.leader_epoch = partition.bound(isolation), leader.leader_epoch
        if query.with_epochs:
            for epoch, start in log.epochs.entries[-EPOCHS_MAX:]:
                answer.epochs.add(epoch=epoch, start_offset=start)
        return None
    answer.offset = {
        EARLIEST: log.log_start,
        EARLIEST_LOCAL: log.local_log_start,
        TIERED_END: partition.tiered_end,
    }[asked]
    answer.leader_epoch = log.epochs.epoch_of(answer.offset)
    return None


def _look_up_all(lookups: list[_Lookup]) -> list[TimeOffset | errors.PkError | None]:
    """Look up times in the indexes of one directory; runs in a reader thread."""
    return [_look_up(lookup) for lookup in lookups]


def _look_up(lookup: _Lookup) -> TimeOffset | errors.PkError | None:
    _, partition, _, timestamp_ms, bound = lookup
    try:
        if timestamp_ms == MAX_TIMESTAMP:
            return partition.log.offset_of_max_timestamp(bound)
        return partition.log.offset_for_time(timestamp_ms, bound)
    except errors.PkError as error:
        return error


# -- bytes ---------------------------------------------------------------------------------------


# -- delete records ------------------------------------------------------------------------------
