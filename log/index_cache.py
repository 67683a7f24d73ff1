"""The cache of the indexes of sealed segments."""

from __future__ import annotations

from collections import OrderedDict

from pk.log import index
from pk.log.index import SparseIndex
from pk.log.segment import Segment


class IndexCache:
    """The indexes of sealed segments that readers asked for, bounded by bytes.  The logs of a
    process share it.
    """

    def __init__(self, bytes_max: int = 64 * 1024 * 1024) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[Segment, SparseIndex] = OrderedDict()

    def get(self, segment: Segment, interval: int, *, dense: bool = False) -> SparseIndex:
        """Return the segment's index: loaded, or rebuilt if the files are missing or torn.  May be
        called from any thread: each step is atomic, and two threads may load the same index.
        """
        own = segment.index
        if own is not None:
            return own
        found = self._entries.pop(segment, None)
        if found is not None:
            self._entries[segment] = found
            return found
        try:
            found, extent = segment.load_index()
            if extent.size != segment.written.size:
                found = segment.reindexed(interval, dense=dense)
        except (index.CorruptIndex, FileNotFoundError):
            found = segment.reindexed(interval, dense=dense)
        self._entries[segment] = found
        self._trim()
        return found

    def _trim(self) -> None:
        """Remove the oldest indexes.  Their size is summed up each time, because a sum that several
        threads update would drift.
        """
        held = list(self._entries.items())
        size = sum(sparse.nbytes() for _, sparse in held)
        for segment, sparse in held[:-1]:
            if size <= self._bytes_max:
                return
            self._entries.pop(segment, None)
            size -= sparse.nbytes()

    def forget(self, segment: Segment) -> None:
        self._entries.pop(segment, None)
