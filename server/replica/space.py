"""Room for the appends of clients in one data directory (rule L16).

Sans-IO.  The scheduler (`server/broker/scheduler.py`) measures the free space from time to time,
off the loop.  Between two measurements, and during one, the bytes of decided appends are subtracted
from the last result.  Other writes (of other processes, or of this process's indexes, checkpoints
and log files) are not subtracted, so the estimate is too high by what they write until the next
measurement.

  | free space after the append   | appends of clients  | leadership                       |
  |-------------------------------|---------------------|----------------------------------|
  | less than `disk_reserve_bytes`| refused             | given up (*full*)                |
  | less than twice as much       | taken               | as it was                        |
  | more                          | taken               | taken (*roomy*)                  |

An append that found no room also makes the directory full, whatever was measured, because a
measurement does not show a quota.

Invariants
  D1  A full directory stays full until a measurement finds twice the reserve, and FAILED_MS have
      passed since an append found no room.
  D2  The reserve limits only the appends of clients, and work that may wait: a cleaning does not
      begin if its files would not leave the reserve.  It does not limit the data that followers
      fetch, batches that the leader itself made, metadata or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

from pk import errors, limits

#: Free bytes that a new leader needs even if the reserve is smaller: one batch of default size.
ROOM_LEAST_BYTES = 8 * limits.MIB
#: How long after an append that found no room measurements are ignored.
FAILED_MS = 10_000


class DirectorySpace:
    """The estimated free space of one directory, and whether clients may append.

    `on_change` is called when the directory becomes full, or roomy, or neither.
    """

    def __init__(self, root: str, reserve_bytes: int, on_change: Callable[[], None]) -> None:
        self.free: int | None = None  #: estimated; None = not measured yet
        self.spent = 0  #: bytes decided since the start
        self.full = False
        self._root = root
        self._reserve = reserve_bytes
        self._mark = 2 * max(reserve_bytes, ROOM_LEAST_BYTES)
        self._on_change = on_change
        self._failed_ms: int | None = None
        self._was = (False, False)

    @property
    def roomy(self) -> bool:
        """Whether the directory has room enough for new leaders."""
        return not self.full and self.free is not None and self.free >= self._mark

    def refusal(self, size: int) -> errors.StorageFull | None:
        """Return why clients may not append `size` bytes now; None = they may.

        Without a reserve they may always try.
        """
        if not self._reserve or self.free is None or self.free - size >= self._reserve:
            return None
        self.full = True
        self._changed()
        return errors.StorageFull(
            f"{self._root} would have less than disk_reserve_bytes ({self._reserve}) of free space",
            directory=self._root,
        )

    def room_refusal(self, size: int) -> errors.StorageFull | None:
        """Return why work that may wait must not write `size` bytes now; None = it may.  The
        answer does not affect appends.
        """
        if not self._reserve or self.free is None or self.free - size >= self._reserve:
            return None
        return errors.StorageFull(
            f"{self._root} has {self.free} bytes free: {size} more would leave less than "
            f"disk_reserve_bytes ({self._reserve})",
            directory=self._root,
        )

    def spend(self, size: int) -> None:
        """Subtract `size` bytes of a decided append from the estimate."""
        self.spent += size
        if self.free is not None:
            self.free -= size

    def storage_full(self, now_ms: int) -> None:
        """Make the directory full, after an append failed for lack of room."""
        self.full, self._failed_ms = True, now_ms
        self._changed()

    def measured(self, free: int, now_ms: int) -> None:
        """Take over a measurement: `free` bytes, less decided appends that may not be written
        yet.
        """
        self.free = free
        if self._failed_ms is not None and now_ms - self._failed_ms >= FAILED_MS:
            self._failed_ms = None
        if free < self._reserve:
            self.full = True
        elif free >= self._mark and self._failed_ms is None:
            self.full = False  # D1
        self._changed()

    def _changed(self) -> None:
        now = (self.full, self.roomy)
        if now != self._was:
            self._was = now
            self._on_change()
