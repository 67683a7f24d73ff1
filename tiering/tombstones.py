"""Decides which files a vacuum deletes: those that the log removed long enough ago, each once.

deltalake finds these files by reading the whole log, and lists a file at every vacuum while its
tombstone exists (a week).  With a short interval between vacuums this cost more CPU time than the
copying, and the cost grew.
The removals of this process's own commits are known without the log.  The log is read only for
removals that another engine or process may have made, or that are older than this process.

Invariants
  M1  A file is deleted only if a commit removed it at least one retention ago.  The age of an own
      removal is measured with a monotonic clock.  All times here are times of that clock, except
      those of `RemovalDates`.
  M2  After `foreign(t)`, every vacuum reads the log, up to and including the first one after t +
      retention.  From then on, no removal made before t is missing here.
  M3  Memory is bounded: at most PATHS_MAX paths of own removals that are not deleted yet (with
      more, the log is read again), and the paths of deleted files that the log still names.
  M4  The wall clock that dates a removal for other processes, and for this process after a restart,
      may be behind.  The date is never before a time that the store or an earlier commit has shown.
      A date written by a clock that was ahead makes later removals wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

PATHS_MAX = 100_000


class Tombstones:
    """The files that a table's commits removed and that are not deleted yet.  Pure."""

    def __init__(self, now_ms: int) -> None:
        self._removed: deque[tuple[int, str]] = deque()  #: (when, path), oldest first
        self._gone: set[str] = set()  #: deleted here, but perhaps still named by the log
        self._foreign_ms = now_ms  #: the log may name unknown removals made before this time
        self._looked_ms: int | None = None  #: when the log was read since then; None = not yet

    def foreign(self, now_ms: int) -> None:
        """Notes that a version was loaded that this process did not commit."""
        self._foreign_ms, self._looked_ms = now_ms, None

    def removed(self, paths: Iterable[str], now_ms: int) -> None:
        """Notes files that this process's own commit removed."""
        self._removed += [(now_ms, path) for path in paths]
        if len(self._removed) > PATHS_MAX:
            self._removed.clear()
            self.foreign(now_ms)

    def must_look(self, retention_ms: int) -> bool:
        """Returns whether the next vacuum must read the log (M2)."""
        return self._looked_ms is None or self._looked_ms < self._foreign_ms + retention_ms

    def looked(self, named: Sequence[str], now_ms: int) -> list[str]:
        """Returns the files that the log names as deletable at `now_ms` and that were not deleted
        here yet.  Own removals are left out: `expired` knows their age better (M1)."""
        self._looked_ms = now_ms
        self._gone &= set(named)
        known = self._gone.union(path for _, path in self._removed)
        return [path for path in named if path not in known]

    def expired(self, retention_ms: int, now_ms: int) -> list[str]:
        """Returns the own removals that are old enough."""
        found = []
        while self._removed and self._removed[0][0] + retention_ms <= now_ms:
            found.append(self._removed.popleft()[1])
        return found

    def deleted(self, paths: Iterable[str], retention_ms: int) -> None:
        """Notes files that were deleted from the store."""
        if self.must_look(retention_ms):
            self._gone.update(paths)
        else:
            self._gone.clear()


class RemovalDates:
    """The dates that a table's commits write into their removals (M4).  Pure."""

    def __init__(self) -> None:
        self._newest_ms = 0
        self._known_ms = 0  #: by the monotonic clock

    def seen(self, date_ms: int, now_ms: int) -> None:
        """Notes that the true time is at least `date_ms` when the monotonic clock says `now_ms`."""
        if date_ms > self._at(now_ms):
            self._newest_ms, self._known_ms = date_ms, now_ms

    def date(self, wall_ms: int, now_ms: int) -> int:
        """Returns the date for a removal now; `wall_ms` is the wall clock's time."""
        self.seen(wall_ms, now_ms)
        return self._at(now_ms)

    def _at(self, now_ms: int) -> int:
        return self._newest_ms + max(0, now_ms - self._known_ms)
