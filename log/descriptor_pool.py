"""The descriptors of files that stay open: a bounded resource of a process.

Each partition of a broker keeps its active segment open.  The number of partitions must not be
bounded by `ulimit -n`, so a file that stays open has its descriptor for a while only.  The pool
closes those that were not used for the longest time.  The next use opens the file again
(`log/real_file`).

Invariants
  K1  The pool holds at most `limit` descriptors, and one more for each running operation.
  K2  A descriptor is closed only if no operation uses it and no write through it is unsynced.  An
      error of the page cache is reported to the descriptors that were open when it happened, so a
      descriptor that is closed before a sync would hide the error (log/storage D2).
  K3  No lock is held while a file is synced or opened.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from typing import Protocol

from pk import descriptors

#: The pool looks at this many of its oldest files for one that needs no sync.
LOOK = 32


class Parkable(Protocol):
    """A file whose descriptor can be closed for a while."""

    def park(self, *, sync: bool) -> bool:
        """Close the descriptor if no operation uses it; returns whether it is closed now.

        sync: sync the file first if a write is unsynced; otherwise such a file stays open.
        """
        ...


class DescriptorPool:
    """The open descriptors of a process's files, least recently used first.  Any thread may call.

    limit: how many stay open; None = a share of the process's limit, as it is at each call.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._guard = threading.Lock()
        #: by `id`; a file that was not closed must not live on because it is here
        self._open: OrderedDict[int, weakref.ref[Parkable]] = OrderedDict()

    @property
    def limit(self) -> int:
        if self._limit is not None:
            return self._limit
        return descriptors.share(descriptors.FILES_SHARE)

    def opened(self, file: Parkable) -> None:
        """Note that a file has a descriptor.  Closes others if there are too many now (K1)."""
        with self._guard:
            self._open[id(file)] = weakref.ref(file)
            excess = len(self._open) - self.limit
        if excess > 0:
            self.release(excess, keep=file)

    def used(self, file: Parkable) -> None:
        with self._guard:
            if id(file) in self._open:
                self._open.move_to_end(id(file))

    def closed(self, file: Parkable) -> None:
        with self._guard:
            self._open.pop(id(file), None)

    def release(self, count: int, keep: Parkable | None = None) -> int:
        """Close up to `count` of the descriptors that were used least recently, but not that of
        `keep`; returns how many were closed.
        """
        released = 0
        for sync in (False, True):  # a sync takes time, so files that need none go first (K2)
            with self._guard:
                oldest = list(itertools.islice(self._open.items(), count + LOOK))
            for key, reference in oldest:
                if released >= count:
                    return released
                file = reference()
                if file is keep is not None:
                    continue
                if file is None or file.park(sync=sync):
                    with self._guard:
                        if self._open.get(key) is reference:
                            del self._open[key]
                    released += 1
        return released


#: The pool of this process.
POOL = DescriptorPool()
