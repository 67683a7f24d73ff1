"""The copies of the cluster's metadata in the tier: names, and when one is due (rule T13).

Pure.  A copy is a snapshot of the metadata (server/metadata/snapshot.py) in one object:

    _cluster/<cluster id>/<restore generation>/metadata/<epoch>-<end>.checkpoint

Names order: of two copies, the one whose last record is of the later epoch counts, then the one
with the higher end.

Every tier process of a cluster looks at the copies at each interval; no process is elected for it.
The first one to look writes what is missing, and the others leave the next interval to it.  Equal
names have equal bytes (server/metadata/snapshot N1), so two writers at once do no harm.

Invariants
  M1  A process writes only if the newest copy lacks records, and has been the newest one for an
      interval.
  M2  Nothing is written while the store has a copy of a later epoch, which this cluster's log does
      not have: the log was restored from an older backup.
  M3  The newest copies stay, of any writer.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

from pk.tiering.cluster_directory import FIRST_GENERATION, directory_of

#: How many copies stay: a reader reads one, and the newest may be damaged.
KEEP = 2
#: The most copies that a pass removes.
REMOVED_MAX = 100

_NAME = re.compile(r"^(?P<epoch>\d{10})-(?P<end>\d{20})\.checkpoint$")


class MetadataName(NamedTuple):
    """What orders the copies."""

    epoch: int  #: of the last record
    end: int  #: the copy has every record below this offset


class CopyLook(Enum):
    """What a look at the copies shows."""

    COVERED = auto()  #: the newest copy has every record
    RESTS = auto()  #: another process wrote it since the last look (M1)
    SUPERSEDED = auto()  #: it is of a later epoch (M2)
    WRITE = auto()  #: a copy is due


def metadata_directory(cluster_id: str, generation: int = FIRST_GENERATION) -> str:
    return f"{directory_of(cluster_id, generation)}/metadata"


def metadata_path(cluster_id: str, name: MetadataName, generation: int = FIRST_GENERATION) -> str:
    """Return the path of a copy below the tier's root."""
    directory = metadata_directory(cluster_id, generation)
    return f"{directory}/{name.epoch:010d}-{name.end:020d}.checkpoint"


def parse_metadata_path(path: str) -> MetadataName | None:
    """Return the name of the copy at `path`; None = the object is no copy."""
    match = _NAME.match(path.rpartition("/")[2])
    return None if match is None else MetadataName(int(match["epoch"]), int(match["end"]))


class MetadataCopies:
    """What one process knows of the copies."""

    def __init__(self) -> None:
        self._newest: MetadataName | None = None
        self._whole_ms: int | None = None
        self._looked_ms: int | None = None

    def look(self, names: Collection[MetadataName], now: MetadataName, now_ms: int) -> CopyLook:
        """Return what the copies in the store show.

        now: what a copy would be called now
        now_ms: monotonic
        """
        newest, before = max(names, default=None), self._newest
        looked_ms, self._looked_ms, self._newest = self._looked_ms, now_ms, newest
        if newest is not None and newest.epoch > now.epoch:
            return CopyLook.SUPERSEDED
        if newest is not None and newest >= now:
            self._whole_ms = now_ms
            return CopyLook.COVERED
        if newest is not None and newest != before:
            self._whole_ms = looked_ms
            return CopyLook.RESTS
        return CopyLook.WRITE

    def wrote(self, name: MetadataName, now_ms: int) -> None:
        """Note a copy of everything that was committed at `now_ms` (monotonic)."""
        self._newest, self._whole_ms = name, now_ms

    def age_ms(self, now_ms: int, started_ms: int) -> int:
        """Return how long ago the newest copy had every record, as far as this process knows."""
        return now_ms - (started_ms if self._whole_ms is None else self._whole_ms)


def obsolete(names: Collection[MetadataName]) -> list[MetadataName]:
    """Return the copies to remove, the oldest first (M3)."""
    return sorted(names)[:-KEEP][:REMOVED_MAX]
