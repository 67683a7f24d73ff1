"""The log of a coordinator: a partition that this broker leads, in one leader epoch.

World-generic.  A `ReplayLog` of runtime/replayed_host.py over `Partition`.  Each record is a row of
a batch; `encode` returns its key and its value, and a row without a value is a tombstone.  The
batches are the broker's own: they have no producer id and are not transactional.

Invariants
  J1  Only the host appends.  So the log has no record that the machine must apply from elsewhere.
  J2  A record is committed when the high watermark covers it.  A written record is never undone:
      the next replay reads it.  A failed write undoes the records that are decided and not written.
  J3  Once this broker does not lead in the epoch, nothing is appended and nothing counts as
      committed.  So no reply is released.
  J4  A replay reads at most `READ_BYTES` at once, off the loop, and applies at most `SLICE_RECORDS`
      records in one turn of the loop (rule P1).
  J5  After a write that found no room, appends are refused for `FULL_MS`: each attempt costs the
      host a replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from pk import errors, limits
from pk.clock import Clock
from pk.log import batch as batches
from pk.log import columns
from pk.log.partition_log import PartitionLog
from pk.log.plan import Now
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.leader import ACKS_ALL
from pk.server.replica.partition import Partition
from pk.types import NONE, Epoch, Offset, PartitionKey

READ_BYTES = limits.MIB
SLICE_RECORDS = 128
#: Most decoded bytes of one batch.
DECODED_BYTES_MAX = 64 * limits.MIB
#: How long a batch is parked.  The log then waits for the high watermark by itself.
PARKED_MS = 30_000
#: How long appends are refused after a write that found no room (J5).
FULL_MS = 1_000

R = TypeVar("R")

#: A row of the log: the key, and the value; None = a tombstone.
Encode = Callable[[R], tuple[bytes, bytes | None]]
Decode = Callable[[bytes | None, bytes | None], R]


class _Piece(NamedTuple):
    """A part of the log: its rows, and the offset behind it."""

    rows: Sequence[tuple[Offset, bytes | None, bytes | None]]
    next_offset: Offset


class PartitionReplayLog(Generic[R]):
    """The log under the Replayed machine of one led partition; see the module.

    `decode` may raise `NewerFormat` or `CorruptLog`; then `replay` raises it.
    """

    def __init__(
        self,
        partition: Partition,
        leader_epoch: Epoch,
        clock: Clock,
        encode: Encode[R],
        decode: Decode[R],
    ) -> None:
        self.leader_epoch = leader_epoch
        self._partition = partition
        self._clock = clock
        self._encode = encode
        self._decode = decode
        self._moved = asyncio.Event()
        self._error: errors.PkError | None = None  #: of an append that is not committed
        self._full_until_ms = 0  #: appends are refused until then (J5)
        partition.watch(self)

    def __str__(self) -> str:
        return f"{self._partition} in leader epoch {self.leader_epoch}"

    def close(self) -> None:
        """Stop watching the partition."""
        self._partition.unwatch(self)

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None:
        """React to a new high watermark, or to the end of the leader epoch."""
        self._moved.set()

    # -- the log of a host (runtime/replayed_host.py) --------------------------------------------

    @property
    def end(self) -> Offset:
        return self._partition.log.log_end

    @property
    def committed(self) -> Offset:
        """The high watermark of this leader epoch; NONE once the epoch is over (J3)."""
        leader = self._partition.leader
        return leader.high_watermark if leader is not None and self.leads else NONE

    @property
    def leads(self) -> bool:
        leader = self._partition.leader
        in_epoch = leader is not None and leader.leader_epoch == self.leader_epoch
        return in_epoch and self.failed is None

    @property
    def failed(self) -> Exception | None:
        """The error that took this replica, or its directory, offline; None = it is online."""
        return self._partition.hosted.cause or self._partition.writer.disk.storage.failed

    def append(self, records: Sequence[R], now_ms: int) -> Offset:
        """Decide one batch; return the offset of its first record.  If it raises, nothing changed.

        Raises `NotLeaderOrFollower` or `FencedLeaderEpoch` if the epoch is over,
        `NotEnoughReplicas`, `ThrottledError`, `RecordTooLarge`, `StorageFull`.
        """
        if self._clock.monotonic_ms() < self._full_until_ms:
            raise errors.StorageFull(f"{self}: the disk had no room for the last append")
        keys, values = zip(*map(self._encode, records), strict=True)
        batch = b"".join(columns.encode_lists(values, keys, default_timestamp=now_ms))
        deadline_ms = self._clock.monotonic_ms() + PARKED_MS
        delayed = DelayedProduce(self._answered, 0, 0, ACKS_ALL, deadline_ms)
        self._partition.append_own(batch, self.leader_epoch, Now(now_ms, now_ms), delayed)
        return delayed.base_offset

    def _answered(self, delayed: DelayedProduce, error: errors.PkError | None) -> None:
        if error is not None and not isinstance(error, errors.RequestTimedOut):
            self._error = self._error or error
            if isinstance(error, errors.StorageFull):
                self._full_until_ms = self._clock.monotonic_ms() + FULL_MS
        self._moved.set()

    def take_foreign(self) -> Sequence[tuple[Offset, R]]:
        """Return nothing (J1)."""
        return ()

    async def commit(self) -> None:
        """Return when the high watermark covers the end of the log (J2).

        Raises `StorageFull` if a write failed, `NotLeaderOrFollower` if this broker no longer leads
        in the epoch.  After `NotLeaderOrFollower` the outcome is open.
        """
        end = self.end
        while self._error is None and self.committed < end:
            self._check_leads()
            self._moved.clear()
            await self._moved.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _check_leads(self) -> None:
        if not self.leads:
            raise errors.NotLeaderOrFollower(f"{self}: this broker no longer leads in the epoch")

    async def replay(self, apply: Callable[[Offset, R], None]) -> None:
        """Call `apply` with every record from the log start to the end.

        Raises `NotLeaderOrFollower` if the epoch ends meanwhile, `CorruptLog`, `DataLoss`, and
        what `decode` raises.
        """
        partition, log = self._partition, self._partition.log
        await partition.writer.settled(partition)  # also appends of an earlier leader epoch
        self._error = None
        offset, count = log.log_start, 0
        while True:
            self._check_leads()
            if offset >= log.written_end:
                return
            piece = await self._read(offset)
            for at, key, value in piece.rows:
                apply(at, self._decode(key, value))
                count += 1
                if count % SLICE_RECORDS == 0:
                    await self._clock.sleep_ms(0)
            offset = piece.next_offset

    async def _read(self, offset: Offset) -> _Piece:
        """Read the rows at and above `offset`.  Records that were deleted meanwhile are skipped."""
        partition, log = self._partition, self._partition.log
        try:
            return await partition.writer.disk.read(
                partial(_read_rows, log, offset, log.written_end)
            )
        except errors.OffsetOutOfRange:
            if log.log_start <= offset:
                raise
            return _Piece((), log.log_start)
        except errors.CorruptLog as damage:
            if self.leads:
                partition.storage_failed(damage)  # L9
            raise


def _read_rows(log: PartitionLog, offset: Offset, bound: Offset) -> _Piece:
    """Read a piece of the log in the read lane, and split it into rows."""
    found = log.read(offset, bound=bound, max_bytes=READ_BYTES, verify=True)
    rows: list[tuple[Offset, bytes | None, bytes | None]] = []
    for header, raw in batches.iter_batches(found.data):
        if not header.control:
            rows += columns.key_values_of(raw, header, DECODED_BYTES_MAX)
    if rows and rows[0][0] < offset:  # the log start lies within a batch
        rows = [row for row in rows if row[0] >= offset]
    return _Piece(rows, found.next_offset)
