"""The broker's calls to the tier process.

World-generic.  The store may be slow or dead; the hot log never waits for it.  Every call has a
timeout and ends with a result or a typed error.  At most CALLS_MAX run at once, and the wait for a
turn counts against the timeout.  So a dead store costs each cold reader `remote_fetch_max_wait_ms`,
and costs other readers nothing.

Invariants
  B1  A call raises `TierUnavailable`, or the typed error that the tier answered.
  B2  A fetch that answers without progress is an error, so that a reader never spins (rule L12).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from google.protobuf.message import Message

from pk import errors
from pk.server.replica.partition import Partition
from pk.types import Epoch, Offset
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Caller
from pk.world import World

CALLS_MAX = 64
#: Timeout of a claim, which reads and commits a table (T4), and of a confirmation by HEAD (T6).
STORE_CALL_TIMEOUT_MS = 30_000
#: Timeout of a hand-over, which the owner answers within its own time-out (owner.py).
COMMIT_TIMEOUT_MS = 60_000
#: Timeout of a repair, which copies rows from the local log again (rule T17).
ROWS_TIMEOUT_MS = 300_000


class TierClient:
    """Cold reads, look-ups, claims and confirmations."""

    def __init__(
        self, world: World, address: str, hello: wire.Hello, *, enabled: bool, fetch_wait_ms: int
    ) -> None:
        self.enabled = enabled  #: whether the server has an object store
        self._fetch_wait_ms = fetch_wait_ms
        self._clock = world.clock
        self._caller = Caller(world.network, world.clock, address, hello)
        self._turns = asyncio.Semaphore(CALLS_MAX)
        self._readers = itertools.count(1)

    def new_reader(self) -> int:
        """Return a number for a client, by which the tier recognises that it reads straight on."""
        return next(self._readers)

    async def fetch(
        self, partition: Partition, offset: Offset, max_bytes: int, reader: int = 0
    ) -> tuple[memoryview, Offset]:
        """Return batches from `offset` on, and the next offset; ends at the local log start."""
        local = partition.log.local_log_start
        request = wire.TierFetchRequest(
            topic_id=partition.key.topic_id,
            topic=partition.topic,
            partition=partition.key.partition,
            offset=offset,
            end_offset=local,
            max_bytes=max_bytes,
            reader=reader,
        )
        frame = await self._call(request, self._fetch_wait_ms)
        next_offset = frame.head.tier_fetch_reply.next_offset
        if next_offset <= offset:
            raise errors.UnknownTierRange(f"{partition}: the tier has nothing at {offset}")  # B2
        return frame.payload, next_offset

    async def offset_for_time(
        self, partition: Partition, timestamp_ms: int, *, known: bool = False
    ) -> wire.TierOffsetForTimeReply:
        """Return the first tiered offset >= log_start with a timestamp >= `timestamp_ms` (T11).

        NONE only if the tier has searched everything below the local log.  known: search the
        version that the tier process knows, which other engines may have changed since.
        """
        request = wire.TierOffsetForTimeRequest(
            topic_id=partition.key.topic_id,
            topic=partition.topic,
            partition=partition.key.partition,
            timestamp_ms=timestamp_ms,
            from_offset=partition.log.log_start,
            end_offset=partition.log.local_log_start,
            known=known,
        )
        frame = await self._call(request, self._fetch_wait_ms)
        return frame.head.tier_offset_for_time_reply

    async def claim(
        self, partition: Partition, epoch: Epoch, *, commit: bool
    ) -> wire.TierClaimReply:
        """Return what the table covers (rule T4).

        With `commit`, `epoch` becomes the claim of the table.
        """
        request = wire.TierClaimRequest(
            topic_id=partition.key.topic_id,
            topic=partition.topic,
            partition=partition.key.partition,
            leader_epoch=epoch,
            commit=commit,
        )
        return (await self._call(request, STORE_CALL_TIMEOUT_MS)).head.tier_claim_reply

    async def confirm(self, partition: Partition, start: Offset, end: Offset) -> list[str]:
        """Return the files of `[start, end)` that are missing in the store (rule T6)."""
        request = wire.TierConfirmRequest(
            topic_id=partition.key.topic_id,
            topic=partition.topic,
            partition=partition.key.partition,
            start=start,
            end=end,
        )
        frame = await self._call(request, STORE_CALL_TIMEOUT_MS)
        return list(frame.head.tier_confirm_reply.missing)

    async def describe(self, topic: str, suspects: Sequence[str] = ()) -> wire.DescribeTierReply:
        """Describe the table of a topic; the owner examines suspected files first."""
        request = wire.DescribeTierRequest(topic=topic, suspects=suspects)
        frame = await self._call(request, STORE_CALL_TIMEOUT_MS)
        return frame.head.describe_tier_reply

    async def rows(self, request: wire.TierRowsRequest) -> wire.TierRowsReply:
        """Repair or accept missing rows (rule T17)."""
        return (await self._call(request, ROWS_TIMEOUT_MS)).head.tier_rows_reply

    async def vacuum(self, request: wire.TierNowRequest) -> wire.TierNowReply:
        """Delete the files that the table dropped long enough ago, now."""
        return (await self._call(request, ROWS_TIMEOUT_MS)).head.tier_now_reply

    async def commit(self, request: wire.CommitToTableRequest) -> wire.CommitToTableReply:
        """Hand the files of a maintenance job to the owner of the table (rule C5)."""
        frame = await self._call(request, COMMIT_TIMEOUT_MS)
        return frame.head.commit_to_table_reply

    async def purge(self, topic_id: str, topic: str) -> wire.TierPurgeReply:
        """Remove the table of a deleted topic (rule T7)."""
        request = wire.TierPurgeRequest(topic_id=topic_id, topic=topic)
        frame = await self._call(request, STORE_CALL_TIMEOUT_MS)
        return frame.head.tier_purge_reply

    async def close(self) -> None:
        await self._caller.close()

    async def _call(self, request: Message, timeout_ms: int) -> frames.Frame:
        if not self.enabled:
            raise errors.TierUnavailable(
                "this server has no tier_url, but part of the log is in the tier"
            )
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                async with self._turns:
                    left_ms = max(0, deadline_ms - self._clock.monotonic_ms())
                    return await self._caller.call(request, timeout_ms=left_ms)
        except (TimeoutError, errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
            raise errors.TierUnavailable(
                f"the tier did not answer {request.DESCRIPTOR.name} within {timeout_ms} ms"
            ) from cause
