"""The id of a snapshot: its end offset and the epoch of its last record (KIP-630)."""

from __future__ import annotations

from dataclasses import dataclass

SUFFIX = ".checkpoint"


@dataclass(slots=True, frozen=True)
class SnapshotId:
    """The snapshot of everything below `end`, whose last record is of `epoch`."""

    end: int
    epoch: int


#: The start of a log without a snapshot.
NOTHING = SnapshotId(0, 0)


def file_name(snapshot: SnapshotId) -> str:
    """Return the file name in Kafka's form, which sorts by age."""
    return f"{snapshot.end:020d}-{snapshot.epoch:010d}{SUFFIX}"


def id_of(name: str) -> SnapshotId | None:
    """Return the id that a file name encodes; None for other files."""
    stem = name.removesuffix(SUFFIX)
    end, dash, epoch = stem.partition("-")
    known = name.endswith(SUFFIX) and dash and len(end) == 20 and len(epoch) == 10
    if not known or not (end.isdecimal() and epoch.isdecimal()):
        return None
    return SnapshotId(int(end), int(epoch))
