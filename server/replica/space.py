"""Room for the appends of clients in one data directory (rule L16).

Sans-IO.  Free space is measured off the loop now and then (`server/broker/scheduler.py`); between
two measurements, and while one is under way, what is decided for the directory is taken off.  So
the estimate is too high by what others write there within one measurement only: another process,
and this one's indexes, checkpoints and logs.

  | free space after the append   | appends of clients  | leadership                       |
  |-------------------------------|---------------------|----------------------------------|
  | less than `disk_reserve_bytes`| refused             | given up (*full*)                |
  | less than twice as much       | taken               | as it was                        |
  | more                          | taken               | taken (*roomy*)                  |

An append that found no room makes the directory full, too, whatever was measured: a quota shows in
no measurement.

Invariants
  D1  a full directory stays full until a measurement finds twice the reserve, and FAILED_MS have
      passed since an append found no room
  D2  the reserve binds the appends of clients only: what followers fetch, metadata and checkpoints
      never ask here
"""

from __future__ import annotations

from collections.abc import Callable

from pk import errors, limits

#: What a new leader has at least, should the reserve be smaller: one batch of the default size.
ROOM_LEAST_BYTES = 8 * limits.MIB
#: An append found no room: for so long no measurement says otherwise.
FAILED_MS = 10_000


class DirectorySpace:
    """See the module.  `on_change`: the directory became full, or roomy, or neither."""

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
        """A leader may come here."""
        return not self.full and self.free is not None and self.free >= self._mark

    def refusal(self, size: int) -> errors.StorageFull | None:
        """Why clients may not append `size` bytes now; None = they may.  Without a reserve they may
        try.
        """
        if not self._reserve or self.free is None or self.free - size >= self._reserve:
            return None
        self.full = True
        self._changed()
        return errors.StorageFull(
            f"{self._root} would have less than disk_reserve_bytes ({self._reserve}) of free space",
            directory=self._root,
        )

    def spend(self, size: int) -> None:
        """`size` bytes more will be written."""
        self.spent += size
        if self.free is not None:
            self.free -= size

    def no_room(self, now_ms: int) -> None:
        """An append failed for want of room."""
        self.full, self._failed_ms = True, now_ms
        self._changed()

    def measured(self, free: int, now_ms: int) -> None:
        """`free` bytes, less what is decided and may not be written yet."""
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
