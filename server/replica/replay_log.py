"""The log of a coordinator: a partition that this broker leads, in one leader epoch.

World-generic.  A `ReplayLog` of runtime/replayed_host.py over `Partition`.  Each record is a row of
a batch; `encode` returns its key and its value, and a row without a value is a tombstone.  The
batches are the broker's own.  They have no producer id, except those of a machine that takes part
in transactions of producers (`TransactionalRecords`).

Invariants
  J1  Only the host appends, except markers.  The machine gets a marker as a foreign record once it
      is committed, after records with higher offsets.  A replay may have applied it before.
  J2  A record is committed when the high watermark covers it.  A written record is never undone:
      the next replay reads it.  A failed write undoes the records that are decided and not written.
  J3  Once this broker does not lead in the epoch, nothing is appended and nothing counts as
      committed.  So no reply is released.
  J4  A replay reads at most `READ_BYTES` at once, off the loop, and applies at most `SLICE_RECORDS`
      records in one turn of the loop (rule P1).
  J5  After a write that found no room, appends are refused for `FULL_MS`: each attempt costs the
      host a replay.
  J6  The records of one round of the host are one batch: they are gathered, and `commit` appends
      them.  A round is one turn of the loop, so nothing else is appended meanwhile, and a gathered
      record has its offset at once.  Gathered are only records whose batch the partition cannot
      refuse: it is asked before, `GATHER_BYTES` bounds them, and records of a transaction, which
      the log checks by their producer, are a batch of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from pk import errors, limits
from pk.clock import Clock
from pk.log import batch as batches
from pk.log import columns
from pk.log.control_rows import Marker, decode_markers
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
#: Bytes of keys and values that are gathered for one batch (J6).
GATHER_BYTES = 256 * 1024
#: How long a batch is parked.  The log then waits for the high watermark by itself.
PARKED_MS = 30_000
#: How long appends are refused after a write that found no room (J5).
FULL_MS = 1_000
#: How long a replay waits after a read that found no descriptor.
READ_AGAIN_MS = 100

R = TypeVar("R")


class ProducerStamp(NamedTuple):
    """The transaction that a record belongs to."""

    producer_id: int
    producer_epoch: int
    base_sequence: int = NONE  #: of the record's batch; NONE = not said (after a replay)


class TransactionalRecords(Protocol[R]):
    """Records of a machine that belong to transactions of producers."""

    def stamp_of(self, record: R) -> ProducerStamp | None:
        """Return the transaction of a record; None = it belongs to none.  All records of one
        decision have the same one.
        """
        ...

    def stamped(self, record: R, stamp: ProducerStamp) -> R:
        """Return a record that was read from a transactional batch."""
        ...

    def ended(self, marker: Marker) -> R:
        """Return the foreign record of a marker."""
        ...


#: A row of the log: the key, and the value; None = a tombstone.
_Row = tuple[bytes, bytes | None]
Encode = Callable[[R], _Row]
Decode = Callable[[bytes | None, bytes | None], R]


class _Rows(NamedTuple):
    """The rows of one batch, or the markers of a control batch."""

    rows: Sequence[tuple[Offset, bytes | None, bytes | None]] = ()
    stamp: ProducerStamp | None = None
    markers: Sequence[tuple[Offset, Marker]] = ()


class _Piece(NamedTuple):
    """A part of the log: its batches, and the offset behind it."""

    batches: Sequence[_Rows]
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
        transactional: TransactionalRecords[R] | None = None,
    ) -> None:
        self.leader_epoch = leader_epoch
        self._partition = partition
        self._clock = clock
        self._encode = encode
        self._decode = decode
        self._transactional = transactional
        self._foreign: deque[tuple[Offset, Marker]] = deque()  #: appended, not yet taken (J1)
        self._gathered: list[_Row] = []  #: decided, and not appended yet (J6)
        self._gathered_bytes = 0
        self._moved = asyncio.Event()
        self._error: errors.PkError | None = None  #: of an append that is not committed
        self._full_until_ms = 0  #: appends are refused until then (J5)
        partition.watch(self)
        if transactional is not None:
            partition.marker_listener = self

    def __str__(self) -> str:
        return f"{self._partition} in leader epoch {self.leader_epoch}"

    def close(self) -> None:
        """Stop watching the partition."""
        self._partition.unwatch(self)
        if self._partition.marker_listener is self:
            self._partition.marker_listener = None

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None:
        """React to a new high watermark, or to the end of the leader epoch."""
        self._moved.set()

    # -- the log of a host (runtime/replayed_host.py) --------------------------------------------

    @property
    def end(self) -> Offset:
        return self._partition.log.log_end + len(self._gathered)

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
        """Decide records that are applied together; return the offset of the first one.

        If it raises, nothing changed.  Raises `NotLeaderOrFollower` or `FencedLeaderEpoch` if the
        epoch is over, `NotEnoughReplicas`, `ThrottledError`, `RecordTooLarge`, `StorageFull`.
        """
        if self._clock.monotonic_ms() < self._full_until_ms:
            raise errors.StorageFull(f"{self}: the disk had no room for the last append")
        rows = [self._encode(each) for each in records]
        stamp = self._stamp_of(records)
        size = sum(len(key) + len(value or b"") for key, value in rows)
        self._partition.check_own(self.leader_epoch)
        if stamp is not None or self._gathered_bytes + size > GATHER_BYTES:
            self._append_gathered(now_ms)
        if stamp is not None or size > GATHER_BYTES:
            return self._append(rows, stamp, now_ms)
        first = self.end
        self._gathered += rows
        self._gathered_bytes += size
        return first

    def _append_gathered(self, now_ms: int) -> None:
        rows, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if rows:
            first = self._partition.log.log_end
            assert self._append(rows, None, now_ms) == first, "J6: nothing else was appended"

    def _append(self, rows: Sequence[_Row], stamp: ProducerStamp | None, now_ms: int) -> Offset:
        """Append a batch of rows; return its first offset."""
        keys, values = zip(*rows, strict=True)
        batch = b"".join(
            columns.encode_lists(values, keys, default_timestamp=now_ms)
            if stamp is None
            else columns.encode_lists(
                values,
                keys,
                default_timestamp=now_ms,
                producer_id=stamp.producer_id,
                producer_epoch=stamp.producer_epoch,
                base_sequence=stamp.base_sequence,
                transactional=True,
            )
        )
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

    def _stamp_of(self, records: Sequence[R]) -> ProducerStamp | None:
        if self._transactional is None:
            return None
        stamps = {self._transactional.stamp_of(each) for each in records}
        assert len(stamps) == 1, f"one batch belongs to one transaction: {stamps}"
        return stamps.pop()

    def markers_appended(self, offset: Offset, markers: Sequence[Marker]) -> None:
        """Keep the markers of a control batch at `offset` until they are committed."""
        self._foreign += ((offset + n, each) for n, each in enumerate(markers))

    def appends_undone(self, written_end: Offset) -> None:
        """Drop the markers that a failed write undid."""
        while self._foreign and self._foreign[-1][0] >= written_end:
            self._foreign.pop()

    def take_foreign(self) -> Sequence[tuple[Offset, R]]:
        """Return the markers that were committed since the last call (J1)."""
        if self._transactional is None or not self._foreign:
            return ()
        committed, taken = self.committed, []
        while self._foreign and self._foreign[0][0] < committed:
            offset, marker = self._foreign.popleft()
            taken.append((offset, self._transactional.ended(marker)))
        return taken

    async def commit(self) -> None:
        """Append what was gathered; return when the high watermark covers the end of the log (J2).

        Raises `StorageFull` if a write failed, `NotLeaderOrFollower` if this broker no longer leads
        in the epoch.  After `NotLeaderOrFollower` the outcome is open.
        """
        self._append_gathered(self._clock.wall_ms())
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
        self._gathered, self._gathered_bytes = [], 0
        await partition.writer.settled(partition)  # also appends of an earlier leader epoch
        self._error = None
        offset, count = log.log_start, 0
        while True:
            self._check_leads()
            if offset >= log.written_end:
                return
            piece = await self._read(offset)
            for at, record in self._records(piece):
                apply(at, record)
                count += 1
                if count % SLICE_RECORDS == 0:
                    await self._clock.sleep_ms(0)
            offset = piece.next_offset

    def _records(self, piece: _Piece) -> Iterator[tuple[Offset, R]]:
        """Yield the records of a piece.  Raises what `decode` raises."""
        known = self._transactional
        for batch in piece.batches:
            for at, key, value in batch.rows:
                record = self._decode(key, value)
                if batch.stamp is not None and known is not None:
                    record = known.stamped(record, batch.stamp)
                yield at, record
            if known is not None:
                for at, marker in batch.markers:
                    yield at, known.ended(marker)

    async def _read(self, offset: Offset) -> _Piece:
        """Read the rows at and above `offset`.  Records that were deleted meanwhile are skipped."""
        while True:
            try:
                return await self._read_once(offset)
            except errors.StorageFull:  # no descriptor for the read: this passes (log/storage D2)
                self._check_leads()
                await self._clock.sleep_ms(READ_AGAIN_MS)

    async def _read_once(self, offset: Offset) -> _Piece:
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
    pieces: list[_Rows] = []
    for header, raw in batches.iter_batches(found.data):
        if header.control:
            base = header.base_offset
            markers = [(base + n, each) for n, each in enumerate(decode_markers(raw))]
            pieces.append(_Rows(markers=markers))
            continue
        rows = columns.key_values_of(raw, header, DECODED_BYTES_MAX)
        if header.base_offset < offset:  # the log start lies within a batch
            rows = [row for row in rows if row[0] >= offset]
        stamp = None
        if header.transactional:
            stamp = ProducerStamp(header.producer_id, header.producer_epoch)
        pieces.append(_Rows(rows, stamp))
    return _Piece(pieces, found.next_offset)
