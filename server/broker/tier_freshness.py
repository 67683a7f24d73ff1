"""How long stable records have waited for their topic's table, of each partition.

The broker looks every few seconds.  A look notes the last stable offset, if it has moved, and the
time.  The oldest note above the end of the table says since when its records were stable, so the
result is exact up to the interval of the looks.  A partition whose records are all in the table has
no notes.

Invariants
  N1  Notes of a partition grow in offset and time, and lie above the end of the table.
  N2  A partition has at most MARKS_MAX notes.  If there are more, every second one goes; the result
      is then too small by at most the distance of two notes.
"""

from __future__ import annotations

from collections.abc import Collection

from pk.types import Offset, PartitionKey

MARKS_MAX = 64


class TierFreshness:
    """The notes of the partitions that a broker leads."""

    def __init__(self) -> None:
        self._marks: dict[PartitionKey, list[tuple[Offset, int]]] = {}

    def look(self, key: PartitionKey, stable: Offset, tiered_end: Offset, now_ms: int) -> int:
        """Return for how many ms the oldest stable record has not been in the table; 0 = all are.

        now_ms: of a monotonic clock
        """
        marks = [mark for mark in self._marks.get(key, ()) if tiered_end < mark[0] <= stable]
        if stable > (marks[-1][0] if marks else tiered_end):
            marks.append((stable, now_ms))
        if len(marks) > MARKS_MAX:
            del marks[1:-1:2]
        if not marks:
            self._marks.pop(key, None)
            return 0
        self._marks[key] = marks
        return now_ms - marks[0][1]

    def keep(self, keys: Collection[PartitionKey]) -> None:
        """Forget the partitions that the broker no longer leads."""
        for gone in [key for key in self._marks if key not in keys]:
            del self._marks[gone]
