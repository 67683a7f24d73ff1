"""Decides when the committed offsets of a partition are copied to the tier, and which copies go
(rule T13).

Pure.  The shell (server/tier/offset_copier) asks the broker which partitions it coordinates and how
far their logs are committed, reads the offsets, and does what is decided here.

Invariants
  D1  A partition is written at most once in an interval, and only if its offsets have changed since
      the newest copy that this process knows.
  D2  Nothing is written if the store had a copy that is as new, when it was listed last: one of a
      later coordinator, or of the same one.
  D3  The newest copies stay, of any coordinator.  So a deposed coordinator, whose leader epoch
      orders below that of its successor, removes its own copies only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pk.tiering.offset_files import CopyName

#: How many copies stay: a reader reads one, and the newest may be damaged.
KEEP = 2
#: The most copies of a partition that a pass removes.
REMOVED_MAX = 100


@dataclass(slots=True)
class _Copied:
    """What is known of the copies of one partition."""

    epoch: int  #: the leader epoch in which this broker coordinates it
    newest: CopyName | None = None  #: in the store
    listed: bool = False  #: whether the store was asked in this leader epoch
    covered: CopyName | None = None  #: up to here the offsets are those of `digest`
    digest: int | None = None  #: of the newest copy, if this process wrote it
    written_ms: int | None = None  #: monotonic


class OffsetCopies:
    """The copies of the partitions of one coordinating broker.

    interval_ms: the least time between two copies of a partition
    """

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._known: dict[int, _Copied] = {}
        self._failing = False

    def due(self, coordinated: Iterable[tuple[int, CopyName]], now_ms: int) -> list[int]:
        """Return the partitions whose offsets may be copied now.

        coordinated: every partition that the broker coordinates, and what a copy of it would be
        now_ms: monotonic
        """
        before, self._known = self._known, {}
        found = []
        for partition, name in coordinated:
            known = before.get(partition)
            if known is None or known.epoch != name.leader_epoch:
                known = _Copied(name.leader_epoch, written_ms=known.written_ms if known else None)
            self._known[partition] = known
            rests = known.written_ms is not None and now_ms - known.written_ms < self._interval_ms
            if not rests and (not known.listed or self.is_needed(partition, name)):
                found.append(partition)
        return found

    def is_listed(self, partition: int) -> bool:
        """Return whether the copies in the store are known in this leader epoch."""
        return self._known[partition].listed

    def listed(self, partition: int, names: Collection[CopyName]) -> None:
        """Take the names of the copies in the store."""
        known = self._known[partition]
        newest = max(names, default=None)
        if newest != known.newest:
            known.newest, known.digest = newest, None
        known.listed = True

    def is_needed(self, partition: int, name: CopyName) -> bool:
        """Return whether there is something that no copy has (D1, D2)."""
        known = self._known[partition]
        return not any(each is not None and each >= name for each in (known.newest, known.covered))

    def changed(self, partition: int, name: CopyName, digest: int, offsets: int) -> bool:
        """Return whether the offsets that were read are to be written (D1).

        digest: of their lines; offsets: how many they are
        """
        known = self._known[partition]
        nothing = known.newest is None and not offsets
        if nothing or (known.digest is not None and known.digest == digest):
            known.covered = name
            return False
        return True

    def wrote(self, partition: int, name: CopyName, digest: int | None, now_ms: int) -> None:
        """Note a copy.  digest: None = an earlier attempt wrote it, maybe with older offsets."""
        known = self._known.get(partition)
        if known is not None and known.epoch == name.leader_epoch:
            known.newest, known.digest, known.written_ms = name, digest, now_ms

    def failed(self) -> bool:
        """Note that the store fails; return whether a log line is due."""
        was, self._failing = self._failing, True
        return not was

    def succeeded(self) -> bool:
        """Note that the store works; return whether a log line is due."""
        was, self._failing = self._failing, False
        return was


def obsolete(names: Collection[CopyName]) -> list[CopyName]:
    """Return the copies to remove, the oldest first (D3)."""
    return sorted(names)[:-KEEP][:REMOVED_MAX]
