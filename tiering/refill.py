"""Repairs a table from which another engine removed rows: copies them again from the local log, or
settles them (rule T17).

World-generic.  Both are commands of an operator.  pk never does either by itself, because the
DELETE may have been intended.

Invariants
  F1  A range is copied again as a whole or not at all, because a file of the copier's counts as
      whole.
  F2  All files of a range land in one commit, together with the removal of the files they replace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pk import errors
from pk.tiering.accounting import Suspect, suspects
from pk.tiering.copier import Upload, Uploaded
from pk.tiering.reader import TablePartition
from pk.tiering.table import Snapshot
from pk.types import Offset
from pk.wire import pk_pb2 as wire

#: Maximum number of ranges per command; the next command continues.
STRETCHES_MAX = 100


class TableCommitter(Protocol):
    """The parts of the worker that a repair needs."""

    async def commit_to_table(
        self, request: wire.CommitToTableRequest
    ) -> wire.CommitToTableReply: ...


async def carry_out(
    host: TableCommitter,
    told: wire.TierPartition,
    accepting: bool,
    place: Callable[[], Awaitable[TablePartition]],
    copy: Callable[[Upload], Awaitable[Uploaded]],
) -> wire.TierRowsReply:
    """Carries out one command for one partition; `place` loads the table's newest version."""
    snapshot = (await place()).snapshot
    if accepting:
        rows = await accept(host, snapshot, told)
    else:
        rows = await repair(host, snapshot, told, copy)
    snapshot = (await place()).snapshot
    reply = wire.TierRowsReply(rows=rows, version=snapshot.version)
    left = snapshot.rows_missing(told.partition)
    if left is not None:
        reply.missing = left.rows
        for start, end in left.ranges:
            reply.ranges.add(start=start, end=end)
    return reply


async def accept(host: TableCommitter, snapshot: Snapshot, told: wire.TierPartition) -> int:
    """Settles the missing rows of the partition; returns how many."""
    missing = snapshot.rows_missing(told.partition)
    if missing is None:
        return 0
    request = _request(snapshot, told)
    request.accept = True
    await host.commit_to_table(request)
    return missing.rows


async def repair(
    host: TableCommitter,
    snapshot: Snapshot,
    told: wire.TierPartition,
    copy: Callable[[Upload], Awaitable[Uploaded]],
) -> int:
    """Copies the ranges with missing rows again, as far as the local log still holds them; returns
    how many rows were restored.  Raises `UnsupportedFeature` for a compacted topic: superseded rows
    would return without the tombstones that followed them."""
    if "compact" in told.configs["cleanup_policy"]:
        raise errors.UnsupportedFeature(
            f"{told.topic} is compacted: deleted rows and superseded ones look alike; "
            "restore the table's version, or accept the loss"
        )
    if snapshot.rows_missing(told.partition) is None:
        return 0
    back = 0
    for each in suspects(snapshot, told.partition)[:STRETCHES_MAX]:
        if told.local_log_start <= each.start:
            back += await _refill(host, snapshot, told, each, copy)
    return back


async def _refill(
    host: TableCommitter,
    snapshot: Snapshot,
    told: wire.TierPartition,
    stretch: Suspect,
    copy: Callable[[Upload], Awaitable[Uploaded]],
) -> int:
    request = _request(snapshot, told)
    request.refill = True
    at: Offset = stretch.start
    while at < stretch.end:
        size = int(told.configs["tier_file_bytes"])
        done = await copy(Upload(at, stretch.end, size, told.leader_epoch))
        if done.add is not None:
            request.adds.append(done.add)
        if done.end <= at:
            return 0  # the log has no rows there (F1)
        at = done.end
    for file in stretch.files:
        request.removes.add(path=file.path, partition=told.partition, rows=file.rows)
    rows = sum(add.rows for add in request.adds) - sum(file.rows for file in stretch.files)
    if rows <= 0 or at > stretch.end:
        return 0
    await host.commit_to_table(request)
    return rows


def _request(snapshot: Snapshot, told: wire.TierPartition) -> wire.CommitToTableRequest:
    request = wire.CommitToTableRequest(
        topic_id=told.topic_id, topic=told.topic, version_read=snapshot.version, data_change=True
    )
    request.counters.add(partition=told.partition, claim=told.leader_epoch)
    return request
