"""Puts the segments of a cleaning in the place of those that they replace.

A cleaning (compaction/local_cleaner.py) writes its segments beside the log, under names with a
tail: `00000000000000000000.log.<id>.cleaned`.  The write lane swaps them in one job:

    1  SYNCED: the forgotten end (log/forgotten), every segment below the cleaned end, the names of
       the written files
    2  the checkpoint names the new cleaned end and every segment of the swap, SYNCED: from here on
       the swap is decided
    3  readers see the new segments, under either name (log/local_log M4)
    4  the files are renamed, in ascending order, and the replaced files removed; the directory is
       SYNCED
    5  the checkpoint names the cleaned end alone, SYNCED

File `cleaner-offset-checkpoint`, a checkpoint (log/checkpoints.py).  Its lines:

    cleaned_end <offset>
    swap <tail> <base offset> <base offset>,…

A line `swap` names a new segment and the segments that it replaces.

Rules
  W1  A process that dies before step 2 has changed nothing: the next opening removes the written
      files.  After step 2 the next opening does steps 4 and 5 (again).  Both can be repeated.
  W2  Nothing else changes the files of the log between steps 2 and 5.  If step 4 fails, the lane
      finishes it before any other job of the log.  A truncation in between would remove a segment
      that a later repetition brings back.  Until then the swap counts as running (log/swapping):
      nothing is dropped, and no other cleaning begins.
  W3  Only sealed segments are swapped.  The first and the last offset that a swap covers do not
      change, so segments still join without a gap.
  W5  A power loss does not take a record for which a cleaning removed an older one: that record is
      SYNCED before the older one is removed (step 1), also if its segment stays as it is.
  W4  The cleaned end never exceeds the log end: an opening lowers it, SYNCED, before anything is
      appended, and notes that the log is incomplete (log/forgotten).  Every cut of the log reads
      the files back through an opening.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from pk import errors
from pk.log import aborted, checkpoints
from pk.log.segment import (
    CLEANED,
    INDEX,
    LOG,
    SNAPSHOT,
    TIMEINDEX,
    TXNINDEX,
    Segment,
    file_name,
)
from pk.log.storage import Storage
from pk.types import Offset

FILE = "cleaner-offset-checkpoint"
#: The files of a segment that a cleaning writes, in the order in which they are renamed.
WRITTEN = (TXNINDEX, INDEX, TIMEINDEX, LOG)


class Replacement(NamedTuple):
    """A new segment, and the segments that it replaces."""

    base_offset: Offset
    replaces: tuple[Offset, ...]  #: base offsets, ascending; the first is `base_offset`


class Swap(NamedTuple):
    """The files of one cleaning that are put in place."""

    cleaned_end: Offset
    tail: str = ""
    replacements: tuple[Replacement, ...] = ()
    #: one above the highest tombstone or marker that the cleaning removed; 0 = none.  It is stored
    #: in a file of its own (log/forgotten H1).
    forgotten_end: Offset = 0


def tail_of(cleaning_id: str) -> str:
    """Return what the names of the files of a cleaning end with."""
    return f".{cleaning_id}{CLEANED}"


def encode(swap: Swap) -> bytes:
    """Encode the content of the checkpoint."""
    lines = [f"cleaned_end {swap.cleaned_end}"]
    for each in swap.replacements:
        replaced = ",".join(map(str, each.replaces))
        lines.append(f"swap {swap.tail} {each.base_offset} {replaced}")
    return checkpoints.encode(FILE, lines)


def decode(raw: bytes) -> Swap:
    """Decode the checkpoint.  Raises `checkpoints.CorruptCheckpoint`, `NewerFormat`."""
    first, *rest = checkpoints.decode(FILE, raw)
    tail, replacements = "", []
    for line in rest:
        _, tail, base, replaced = line.split(" ")
        replacements.append(Replacement(int(base), tuple(map(int, replaced.split(",")))))
    return Swap(int(first.split(" ")[1]), tail, tuple(replacements))


def read(storage: Storage, path: str) -> Swap:
    """Return the checkpoint of the log in `path`; cleaned end 0 if there is none, or if it is
    damaged: the whole log counts as dirty then.
    """
    with contextlib.suppress(FileNotFoundError, checkpoints.CorruptCheckpoint):
        return decode(storage.read_file(f"{path}/{FILE}"))
    return Swap(0)


def write(storage: Storage, path: str, swap: Swap) -> None:
    """Write the checkpoint, SYNCED."""
    storage.replace_file(f"{path}/{FILE}", encode(swap))


def carry_out(storage: Storage, path: str, swap: Swap) -> None:
    """Put the files in place (steps 4 and 5).  A repetition does what is left."""
    for base_offset, replaces in swap.replacements:
        for suffix in WRITTEN:
            name = f"{path}/{file_name(base_offset, suffix)}"
            with contextlib.suppress(FileNotFoundError):  # it is in place
                storage.rename(name + swap.tail, name)
        for other in replaces[1:]:
            for suffix in (*WRITTEN[:-1], SNAPSHOT, LOG):
                storage.remove(f"{path}/{file_name(other, suffix)}")
    storage.sync_dir(path)
    write(storage, path, Swap(swap.cleaned_end))


def resume(storage: Storage, path: str) -> Offset:
    """Finish a swap that an earlier process had decided (W1); return the cleaned end."""
    found = read(storage, path)
    if found.replacements:
        carry_out(storage, path, found)
    return found.cleaned_end


def discard(storage: Storage, path: str, tail: str) -> None:
    """Remove the files of a cleaning that is not swapped in.  A checkpoint that names them was
    removed, and must not come back without them.
    """
    storage.sync_dir(path)
    for name in storage.list(path):
        if name.endswith((tail, tail + ".tmp")):
            storage.remove(f"{path}/{name}")


def open_cleaned(storage: Storage, path: str, tail: str, replaced: Sequence[Segment]) -> Segment:
    """Open a segment that a cleaning has written, in the read lane.

    replaced: the segments that it replaces, ascending

    Raises `FileNotFoundError` if an opening of the log has removed the files, and `InternalError`
    if they are not whole, or end elsewhere (W3): the log itself is not damaged then (rule L9).
    """
    found = Segment(storage, path, replaced[0].base_offset, tail)
    for suffix in WRITTEN:
        if not storage.exists(found.path(suffix)):
            raise FileNotFoundError(found.path(suffix))
    try:
        _, extent = found.load_index()
        found.aborted = aborted.decode(found.read_file(TXNINDEX))
        whole = found.stored_bytes() == extent.size > 0
    except (ValueError, FileNotFoundError) as cause:
        raise errors.InternalError(f"{found.path()}: {cause}") from cause
    if not whole or extent.next_offset != replaced[-1].written.next_offset:
        raise errors.InternalError(
            f"{found.path()} ends at offset {extent.next_offset}, the segments that it replaces at "
            f"{replaced[-1].written.next_offset}"
        )
    found.written = found.decided = extent
    found.index = None
    found.synced = True
    return found
