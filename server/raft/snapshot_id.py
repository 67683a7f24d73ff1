"""What a snapshot is called: by where it ends and the epoch of its last record (KIP-630)."""

from __future__ import annotations

from dataclasses import dataclass

SUFFIX = ".checkpoint"


@dataclass(slots=True, frozen=True)
class SnapshotId:
    """Everything below `end`, whose last record is of `epoch`."""

    end: int
    epoch: int


#: Where a log without a snapshot begins.
NOTHING = SnapshotId(0, 0)


def file_name(snapshot: SnapshotId) -> str:
    """As Kafka names them: they sort by age."""
    return f"{snapshot.end:020d}-{snapshot.epoch:010d}{SUFFIX}"


def id_of(name: str) -> SnapshotId | None:
    """What a file's name says; None for other files."""
    stem = name.removesuffix(SUFFIX)
    end, dash, epoch = stem.partition("-")
    known = name.endswith(SUFFIX) and dash and len(end) == 20 and len(epoch) == 10
    if not known or not (end.isdecimal() and epoch.isdecimal()):
        return None
    return SnapshotId(int(end), int(epoch))
