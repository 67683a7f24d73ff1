"""Builds the file of one upload: a stable range of a live log → the bytes of one file.

Runs in an upload lane, on a storage that another process writes (`log/readonly.py`).  Every read is
bounded by the LSO that the leader reported.  This module neither waits nor retries; the caller
does.

No checksum covers a batch's base offset or its leader epoch (log/batch.py).  Therefore the base
offset must follow from the batch before it, and the epoch is taken from the leader's report instead
of from the disk.  A flipped bit could otherwise move or hide records; no other file would hold
them, and all replicas delete local records that the table seems to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pk import errors
from pk.log import aborted as aborted_log
from pk.log import batch as log_batch
from pk.log.aborted import AbortedRanges
from pk.log.batch import Header
from pk.log.readonly import open_readonly
from pk.log.segment import LOG, TXNINDEX, base_offset_of, file_name
from pk.log.storage import Storage
from pk.tiering import convert, layout
from pk.tiering.convert import BuiltFile
from pk.tiering.output_buffer import OutputBuffer, OutputBufferFull
from pk.types import NONE, AbortedTransaction, Epoch, Offset
from pk.wire import pk_pb2 as wire

#: Log bytes read at a time.  Memory is this, one decoded batch and the file being built.
READ_BYTES = 4 * 1024 * 1024
#: A file that is this many times larger than its log bytes is ended early.
GROWN_TIMES = 2


@dataclass(slots=True, frozen=True)
class PartitionDirectory:
    """The directory of a partition's live segments, and facts about its log."""

    storage: Storage
    path: str
    decoded_bytes_max: int
    dense: bool = True  #: batches follow each other without gaps: no compaction has removed records
    epochs: tuple[tuple[Epoch, Offset], ...] = ()  #: of the leader's log: (epoch, its first offset)

    def placed(self, header: Header, at: Offset, file: str, *, first: bool) -> Header:
        """Returns the header of the batch in `file` with the epoch that the leader's log has for
        it.  The batch must begin at `at`; the `first` batch that was read need only contain `at`.
        Raises `CorruptLog`."""
        begins = header.base_offset
        fits = begins <= at < header.next_offset if first else begins == at
        if self.dense and not fits:
            raise errors.CorruptLog(
                f"{file}: the batch at offset {at} says that it begins at {begins}",
                file=file,
                offset=str(at),
            )
        known = [epoch for epoch, start in self.epochs if start <= begins]
        return header._replace(leader_epoch=known[-1]) if known else header


@dataclass(slots=True, frozen=True)
class Copied:
    """The range `[start, end)` of the log as a file; no file if the range holds no rows."""

    end: Offset
    epoch: Epoch
    file: BuiltFile | None


def copy(
    source: PartitionDirectory,
    start: Offset,
    limit: Offset,
    max_bytes: int,
    aborted: Sequence[AbortedTransaction],
    buffer: OutputBuffer | None = None,
) -> Copied:
    """Copies whole batches from `start` on into a file in `buffer`, until about `max_bytes` of log
    or `limit`.

    A file ends early if it becomes far larger than its log, which happens where batches are
    compressed and rows are not.  Raises `OffsetOutOfRange` if the range is no longer in the local
    log, `CorruptLog` or `InvalidRecord` for damaged records (rule L9).
    """
    buffer = buffer or OutputBuffer()
    ranges = AbortedRanges(aborted)
    while True:
        builder = convert.FileBuilder(buffer=buffer)
        try:
            return _copy(source, start, limit, max_bytes, ranges, builder)
        except OutputBufferFull:
            buffer.grow()


def _copy(
    source: PartitionDirectory,
    start: Offset,
    limit: Offset,
    max_bytes: int,
    aborted: AbortedRanges,
    builder: convert.FileBuilder,
) -> Copied:
    reader = open_readonly(source.storage, source.path)
    at, taken, epoch = start, 0, NONE
    follows = start  #: offset where the next batch begins
    large = GROWN_TIMES * max_bytes
    while at < limit and taken < max_bytes and builder.size < large:
        size = min(READ_BYTES, max_bytes - taken)
        piece = reader.read(at, bound=limit, max_bytes=size)
        if not piece.data:
            break
        taken += len(piece.data)
        damaged = (piece.base_offset, piece.next_offset)
        try:
            for header, batch in log_batch.iter_batches(piece.data):
                header = source.placed(
                    header, follows, reader.file_of(follows), first=follows == start
                )
                follows = header.next_offset
                if header.base_offset >= limit or header.next_offset <= at:
                    continue
                if builder.size >= large:
                    return Copied(header.base_offset, epoch, builder.finish())
                epoch, damaged = header.leader_epoch, (header.base_offset, header.next_offset)
                builder.add_batch(header, batch, at, limit, aborted, source.decoded_bytes_max)
                # reported if the next batch does not parse
                damaged = (header.next_offset, piece.next_offset)
        except errors.CorruptBatch as cause:
            raise _corrupt(reader.file_of(damaged[0]), damaged, cause) from cause
        at = min(max(at, piece.next_offset), limit)
    if at == start:
        raise errors.OffsetOutOfRange(f"{source.path} has nothing stable at {start} yet")
    return Copied(at, epoch, builder.finish())


def named(
    copied: Copied, partition: int, start: Offset, leader_epoch: Epoch, attempt: str, now_ms: int
) -> wire.AddFile:
    """Returns the file of `[start, copied.end)` as it is added to the table: its name
    (tiering/layout N2) and its facts."""
    file = copied.file
    assert file is not None
    name = layout.DataName(
        partition, start, copied.end, leader_epoch, attempt, file.footer_crc, file.row_sum
    )
    return wire.AddFile(
        path=layout.data_path(name),
        partition=name.partition,
        start=name.start,
        end=name.end,
        size=len(file.data),
        rows=file.rows,
        row_sum=file.row_sum,
        leader_epoch=name.epoch,
        min_offset=file.min_offset,
        max_offset=file.max_offset,
        min_timestamp_ms=file.min_timestamp_ms,
        max_timestamp_ms=file.max_timestamp_ms,
        modified_ms=now_ms,
        null_keys=file.null_keys,
        null_values=file.null_values,
    )


def _corrupt(
    path: str, damaged: tuple[Offset, Offset], cause: errors.CorruptBatch
) -> errors.CorruptLog:
    """Returns the error that names the damaged offsets and their file (rule L9)."""
    start, end = damaged
    return errors.CorruptLog(
        f"{path}: offsets [{start}, {end}) are damaged: {cause.message}",
        offset=str(start),
        next_offset=str(end),
    )


def measure(source: PartitionDirectory, start: Offset, limit: Offset, log_end: Offset) -> int:
    """Returns the approximate number of log bytes in `[start, limit)`.

    The bytes of a segment are taken to be spread evenly over its offsets.
    """
    bases = _bases(source)
    if not bases:
        return 0  # the topic was deleted meanwhile
    total = 0
    for base, following in zip(bases, [*bases[1:], max(log_end, limit)], strict=True):
        low, high = max(base, start), min(following, limit)
        if low >= high:
            continue
        try:
            file = source.storage.open(f"{source.path}/{file_name(base, LOG)}", write=False)
        except FileNotFoundError:
            continue  # the segment was deleted meanwhile
        try:
            total += file.size() * (high - low) // max(1, following - base)
        finally:
            file.close()
    return total


def aborted_from(source: PartitionDirectory, start: Offset) -> list[AbortedTransaction]:
    """Returns the aborted transactions of sealed segments from `start` on; a repair needs those
    below `tiered_end`."""
    found: list[AbortedTransaction] = []
    for base in _bases(source):
        try:
            raw = source.storage.read_file(f"{source.path}/{file_name(base, TXNINDEX)}")
            found += aborted_log.find([aborted_log.decode(raw)], start, 2**63 - 1).transactions
        except (FileNotFoundError, aborted_log.CorruptTransactionIndex):
            continue  # the active segment: the leader reports its aborted transactions
    return found


def _bases(source: PartitionDirectory) -> list[Offset]:
    names = source.storage.list(source.path)
    return [base for name in names if (base := base_offset_of(name, LOG)) is not None]
