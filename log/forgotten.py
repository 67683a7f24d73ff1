"""Which tombstones and markers a compacted log no longer has, and whether it lacks records.

A cleaning removes a tombstone once no copy of the partition has an older record of its key (rule
C4).  A copy that was absent then, for example a replica that left the assignment and returns with
its old directory, may still have that record, and would never get the tombstone.  So each log
knows its *forgotten end*: one above the highest tombstone or marker that a cleaning of this log
removed, or of the log that it was copied from.  A log that ends below the forgotten end of its
leader, and was not begun as a copy of such a log, is begun again (rule C8).

File `forgotten-offset-checkpoint`, a checkpoint (log/checkpoints.py).  Its lines:

    forgotten_end <offset> <cleaned end>
    incomplete

The line `incomplete` is there if a cut removed offsets below the cleaned end.  The log then lacks
records that a cleaning had removed in favour of records that the cut removed.  Such a replica is
rebuilt from the leader; an only copy serves what it has.

Rules
  H1  The file is SYNCED before a swap that removes a tombstone or a marker is decided.  So a
      forgotten end is never too low.  One that is too high costs a copy of the log.
  H2  Builds before this file removed tombstones, too.  Without the file, or if the log was cleaned
      further than the file says, everything below the cleaned end counts as forgotten.
  H3  A log that begins again takes over the forgotten end of its leader once it is empty.  A crash
      before that begins the log once more.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from pk.log import checkpoints
from pk.log.storage import Storage
from pk.types import Offset

FILE = "forgotten-offset-checkpoint"


class Forgotten(NamedTuple):
    """What a log lacks that no reader of the log can see."""

    forgotten_end: Offset = 0  #: one above the highest tombstone or marker that was removed
    cleaned_end: Offset = 0  #: the cleaned end up to which that counts every cleaning (H2)
    incomplete: bool = False  #: a cut removed offsets below the cleaned end


def encode(found: Forgotten) -> bytes:
    """Encode the content of the checkpoint."""
    more = ["incomplete"] if found.incomplete else []
    return checkpoints.encode(
        FILE, [f"forgotten_end {found.forgotten_end} {found.cleaned_end}", *more]
    )


def decode(raw: bytes) -> Forgotten:
    """Decode the checkpoint.  Raises `checkpoints.CorruptCheckpoint`, `NewerFormat`."""
    first, *rest = checkpoints.decode(FILE, raw)
    _, end, cleaned_end = first.split(" ")
    return Forgotten(int(end), int(cleaned_end), "incomplete" in rest)


def read(storage: Storage, path: str, cleaned_end: Offset) -> Forgotten:
    """Return the checkpoint of the log in `path`, which was cleaned up to `cleaned_end` (H2)."""
    found = Forgotten()
    with contextlib.suppress(FileNotFoundError, checkpoints.CorruptCheckpoint):
        found = decode(storage.read_file(f"{path}/{FILE}"))
    if found.cleaned_end < cleaned_end:
        forgotten_end = max(found.forgotten_end, cleaned_end)
        return found._replace(forgotten_end=forgotten_end, cleaned_end=cleaned_end)
    return found


def write(storage: Storage, path: str, found: Forgotten) -> None:
    """Write the checkpoint, SYNCED."""
    storage.replace_file(f"{path}/{FILE}", encode(found))
