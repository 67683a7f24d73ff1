"""Bounds of the lists of aborted transactions in replies (KIP-98).

A head of a frame is bounded (limits.FRAME_HEAD_BYTES_MAX), and a reader can be far behind.  So one
reply covers only a range whose aborted transactions it can name; the next reply covers the range
behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pk import errors, limits
from pk.log import batch as batches
from pk.log.partition_log import PartitionLog
from pk.log.plan import Read
from pk.types import AbortedTransaction, Offset
from pk.wire import pk_pb2 as wire

#: Most aborted transactions in a reply, apart from those that are open where the range of a
#: partition begins.
REPLY_MAX = 50_000
#: Most of them for one partition in a reply to the tier.
PARTITION_MAX = 10_000
#: Bytes of one aborted transaction in a head: three varints of up to ten bytes, and their tags.
ENTRY_BYTES_MAX = 36

assert REPLY_MAX * ENTRY_BYTES_MAX <= limits.FRAME_HEAD_BYTES_MAX // 4


def with_aborted(
    log: PartitionLog, start: Offset, read: Read, limit: int
) -> tuple[Read, Sequence[AbortedTransaction]]:
    """Return a read from `start` on with the aborted transactions of its range.

    If they are more than `limit`, the read ends before the batch at which the first one that is
    left out begins.  It has at least one batch.
    """
    told, end = log.aborted_in(start, read.next_offset, limit)
    return (read if end >= read.next_offset else _until(read, end)), told


def _until(read: Read, end: Offset) -> Read:
    """Return the batches of a read that begin below `end`, at least the first one."""
    last: batches.Header | None = None
    try:
        for position, header in batches.iter_headers(read.data):
            if last is not None and header.base_offset >= end:
                return Read(
                    read.data[:position], last.next_offset, read.base_offset, last.leader_epoch
                )
            last = header
    except errors.CorruptBatch:
        pass  # the reader stops there, too, and asks again from there (rule L9)
    return read


def add_all(
    to: wire.FetchedPartition | wire.TierPartition, told: Sequence[AbortedTransaction]
) -> None:
    """Name aborted transactions in a reply."""
    for each in told:
        to.aborted.add(
            producer_id=each.producer_id,
            first_offset=each.first_offset,
            last_offset=each.last_offset,
        )
