"""What a clean stop vouches for: logs whose files the next start need not read.

`closed-logs-checkpoint` at the root of a data directory has one line for each log that was closed
properly: the stamp of its directory (log/storage D5), and what an opening of the log would find.
The next start compares the stamp.  If it is the same, the log is opened without a look into its
files, and its active segment is opened at its first use.  A log without a line, or with another
stamp, is opened as ever (log/loading).

The next stop writes nothing for a log whose directory still has the stamp of its opening.

Invariants
  B1  What a line says follows from the files of the directory alone.  So a line whose stamp is that
      of the directory is right, however old it is.
  B2  A line is used only after a clean stop.  After any other end the tail of a log is examined.
  B3  A log has no line if an opening would change its files, or if a part of its state is not in
      the line: damage, cleaned segments, aborted transactions, files to be removed.
  B5  A *short* active segment has no derived files: an opening finds what they would say by a walk
      over at most WALKED_MAX bytes, or in the line.  So the line may be lost like any derived file.
  B6  A clean stop leaves derived files that are up to date, or none: a segment that has an index
      is not short, whatever its size.

The file itself is in `log/closed_logs_file`.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Container, Sequence
from typing import Any

from pk.log import swap
from pk.log.epochs import LeaderEpochs
from pk.log.forgotten import Forgotten
from pk.log.index import CorruptIndex, Extent, SparseIndex
from pk.log.loading import CUTTING, SWEPT, Loaded
from pk.log.local_log import LocalLog
from pk.log.producers import CorruptSnapshot, Producers
from pk.log.segment import INDEX, SNAPSHOT, Segment, file_name
from pk.log.storage import Storage
from pk.types import EpochStart, Offset

#: A line holds the index and the producers of a log if they are small.  Others are read from their
#: files, which have checksums of their own.
ENTRIES_MAX = 64
SNAPSHOT_BYTES_MAX = 512
#: B5: so much of a segment costs one read.
WALKED_MAX = 64 * 1024


def topic_id_of(line: str) -> str:
    """Return the topic id of a line's log."""
    return line.split(" ", 2)[1]


def is_short(local: LocalLog) -> bool:
    """Whether the active segment needs no indexes (B5).  An aborted transaction is never left to an
    older index, which looks as whole as the newest.
    """
    active = local.segments[-1]
    return (
        active.written.size <= WALKED_MAX
        and active.index is not None
        and len(active.index) <= ENTRIES_MAX
        and not (active.damage or active.aborted)
        and not local.storage.exists(active.path(INDEX))
    )


def is_enough(local: LocalLog, snapshots: Container[Offset], snapshot: bytes) -> bool:
    """Whether a clean stop needs no derived files beside the line (B5).

    snapshots: the offsets of the producer snapshots that are stored
    snapshot: the producers at the end of the log

    The producers at the base of the active segment must be known without a walk over older ones.
    """
    base = local.segments[-1].base_offset
    return (
        _is_plain(local)
        and (base == 0 or base in snapshots)
        and len(snapshot) <= SNAPSHOT_BYTES_MAX
        and is_short(local)
    )


def _is_plain(local: LocalLog) -> bool:
    return not local.cleaned_end and local.forgotten == Forgotten()


def line_of(
    local: LocalLog, topic_id: str, epochs: LeaderEpochs, producers: Producers, end: Offset
) -> str:
    """In the write lane: describe a log that was closed properly; "" = it has no line (B3)."""
    segments = local.segments
    names = local.storage.list(local.path)
    to_do = any(name.endswith(SWEPT) or name in (CUTTING, swap.FILE) for name in names)
    if to_do or not _is_plain(local) or any(each.damage or each.aborted for each in segments):
        return ""
    sparse, snapshot = segments[-1].index, producers.snapshot(end)
    entries = None
    if sparse is not None and len(sparse) <= ENTRIES_MAX:
        entries = [list(sparse.offsets), list(sparse.positions), list(sparse.times)]
    facts = [
        [[each.base_offset, *each.written] for each in segments],
        entries,
        [[each.epoch, each.start_offset] for each in epochs.entries],
        b64encode(snapshot).decode() if len(snapshot) <= SNAPSHOT_BYTES_MAX else None,
    ]
    name, stamp = local.path.rpartition("/")[2], local.storage.stamp(local.path)
    return " ".join((name, topic_id, stamp, json.dumps(facts, separators=(",", ":"))))


def stands(line: str, storage: Storage, path: str) -> bool:
    """Whether the directory is as it was when the line was written (B1)."""
    return bool(line) and line.split(" ", 3)[2] == storage.stamp(path)


def opened(
    line: str, storage: Storage, path: str, recovery_point: Offset, log_start: Offset
) -> Loaded | None:
    """In the read lane: return what an opening of the log would find; None = it has to look.

    recovery_point, log_start: as checkpointed.  A log that ends below one of them needs a repair.
    """
    if not stands(line, storage, path):
        return None
    try:
        extents, entries, epochs, snapshot = json.loads(line.split(" ", 3)[3])
        segments = [_segment(storage, path, *each) for each in extents]
        end = segments[-1].written.next_offset
        if end < max(recovery_point, log_start):
            return None
        segments[-1].index = _index(segments[-1], entries)
        at, producers = Producers.from_snapshot(
            b64decode(snapshot)
            if snapshot is not None
            else storage.read_file(f"{path}/{file_name(end, SNAPSHOT)}")
        )
    except (ValueError, FileNotFoundError, CorruptSnapshot, CorruptIndex):
        return None
    if at != end:
        return None
    known = LeaderEpochs([EpochStart(*each) for each in epochs])
    return Loaded(segments, known, producers, line=line)


def _segment(storage: Storage, path: str, base_offset: Offset, *extent: int) -> Segment:
    segment = Segment(storage, path, base_offset)
    segment.written = segment.decided = Extent(*extent)
    segment.index, segment.synced = None, True
    return segment


def _index(active: Segment, entries: Sequence[Any] | None) -> SparseIndex:
    """Return the index of the active segment, from the line or from its files."""
    if entries is None:
        sparse, extent = active.load_index()
        if extent != active.written:
            raise CorruptIndex("it is not that of the line")
        return sparse
    sparse = SparseIndex(active.base_offset)
    offsets, positions, times = entries
    sparse.offsets, sparse.positions = array("I", offsets), array("I", positions)
    sparse.times = array("q", times)
    return sparse
