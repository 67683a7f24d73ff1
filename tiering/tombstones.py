"""Which files a vacuum deletes: those the log has removed for long enough, each once.

deltalake finds them by reading the whole log, and names a file again at every vacuum for as long as
its tombstone stands (a week): with a short interval that was more work than the copying, and it
grew.  What our own commits remove we know; the log is read only for removals that may be somebody
else's, or older than this process.

Invariants
  M1  a file is to be deleted only if a commit removed it at least the retention ago.  How long ago
      this process removed one, a monotonic clock says: all times here but `RemovalDates` are its.
  M2  after `foreign(t)`, the log is read by every vacuum up to and including the first one after
      t + retention: later than that, nothing removed before t is missing here.
  M3  memory: paths of own removals not yet deleted, at most PATHS_MAX (more: back to the log), and
      of what the log still names although it is gone.
  M4  the wall clock that dates a removal for other processes, and for this one's next life, may be
      behind: the date is never before a time that the store or an earlier commit has shown.  One
      that was written by a clock that was ahead makes later removals wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

PATHS_MAX = 100_000


class Tombstones:
    """What was removed from one table and not deleted yet.  Pure."""

    def __init__(self, now_ms: int) -> None:
        self._removed: deque[tuple[int, str]] = deque()  #: (when, path), oldest first
        self._gone: set[str] = set()  #: deleted here, perhaps still named by the log
        self._foreign_ms = now_ms  #: the log may name removals before this that are not known
        self._looked_ms: int | None = None  #: the log was read since

    def foreign(self, now_ms: int) -> None:
        """Another version than our own commit's was loaded."""
        self._foreign_ms, self._looked_ms = now_ms, None

    def removed(self, paths: Iterable[str], now_ms: int) -> None:
        """Our own commit removed them."""
        self._removed += [(now_ms, path) for path in paths]
        if len(self._removed) > PATHS_MAX:
            self._removed.clear()
            self.foreign(now_ms)

    def must_look(self, retention_ms: int) -> bool:
        """Whether the next vacuum must read the log (M2)."""
        return self._looked_ms is None or self._looked_ms < self._foreign_ms + retention_ms

    def looked(self, named: Sequence[str], now_ms: int) -> list[str]:
        """What the log names as deletable at `now_ms` and was not deleted here yet; of own removals
        `expired` knows better how old they are (M1).
        """
        self._looked_ms = now_ms
        self._gone &= set(named)
        known = self._gone.union(path for _, path in self._removed)
        return [path for path in named if path not in known]

    def expired(self, retention_ms: int, now_ms: int) -> list[str]:
        """Own removals that are old enough."""
        found = []
        while self._removed and self._removed[0][0] + retention_ms <= now_ms:
            found.append(self._removed.popleft()[1])
        return found

    def deleted(self, paths: Iterable[str], retention_ms: int) -> None:
        """They are gone from the store."""
        if self.must_look(retention_ms):
            self._gone.update(paths)
        else:
            self._gone.clear()


class RemovalDates:
    """The dates that one table's commits write into their removals (M4).  Pure."""

    def __init__(self) -> None:
        self._newest_ms = 0
        self._known_ms = 0  #: by the monotonic clock

    def seen(self, date_ms: int, now_ms: int) -> None:
        """It was not before `date_ms` when the monotonic clock stood at `now_ms`."""
        if date_ms > self._at(now_ms):
            self._newest_ms, self._known_ms = date_ms, now_ms

    def date(self, wall_ms: int, now_ms: int) -> int:
        """For a removal now; `wall_ms` is what the wall clock says."""
        self.seen(wall_ms, now_ms)
        return self._at(now_ms)

    def _at(self, now_ms: int) -> int:
        return self._newest_ms + max(0, now_ms - self._known_ms)
