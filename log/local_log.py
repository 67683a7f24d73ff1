"""The stored part of one partition's log: its segments, and how far they are written and SYNCED.

The loop, the write lane and the readers share one `LocalLog`.  Each field has one writer at a time:

    config, retired         loop
    segments, written_end   loop: a plan was completed, segments are dropped, or found missing
                            write lane: the log is cut or re-opened; nothing is decided meanwhile
    log_start               loop; write lane, as above
    synced_by_loop          loop; write lane, as above
    synced_by_lane          write lane
    cuts, closed            write lane
    swapped, swaps          write lane; the loop empties `swapped` once the swap's job has ended
    cleaned_end, forgotten  write lane

Invariants
  M1  `segments` is one immutable tuple, oldest first, never empty.  It is replaced as a whole, so
      that a reader that took it once sees no change (log/reading A1).
  M2  The written end never exceeds the decided end (log/appending).
  M3  A swap (log/swap.py) may run beside the loop, which may replace `segments` at the same time.
      So the write lane does not replace the tuple: it sets `swapped`, which `segments` applies.
  M4  `swapped` is set before `swaps` grows, and `swaps` grows before a file is renamed.  A reader
      that finds `swaps` as it was before it took the segments has read the files that it meant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from pk.log.damage import Damage
from pk.log.forgotten import Forgotten
from pk.log.index_cache import IndexCache
from pk.log.plan import LogConfig
from pk.log.segment import Segment
from pk.log.storage import Storage
from pk.types import Offset, TopicPartition


def segment_at(segments: Sequence[Segment], offset: Offset) -> int:
    """The position of the last segment that begins at or below `offset`; -1 = all begin above."""
    return bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1


class LocalLog:
    """The stored part of one partition's log.

    path: the partition's directory, relative to the storage's root
    segments: at least one, oldest first; the last is the active one
    synced_end: everything below this offset is SYNCED
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        topic_partition: TopicPartition,
        config: LogConfig,
        segments: Iterable[Segment],
        *,
        log_start: Offset,
        synced_end: Offset,
        cache: IndexCache,
    ) -> None:
        self.storage = storage
        self.path = path
        self.topic_partition = topic_partition
        self.config = config
        self.cache = cache
        self._segments: tuple[Segment, ...] = tuple(segments)
        #: segments that a swap replaces; None = by the new segment of an earlier one (M3)
        self.swapped: Mapping[Segment, Segment | None] = {}
        self.swaps = 0  #: how often files were swapped: a read that began before is void (M4)
        self.cleaned_end: Offset = 0  #: every offset below was cleaned
        self.forgotten = Forgotten()
        self.written_end: Offset = self.segments[-1].written.next_offset
        self.log_start = log_start
        #: How far the log is SYNCED by the write lane, and how far the loop knows it to be SYNCED.
        #: Each thread sets its own field, so that neither undoes the progress of the other.
        self.synced_by_lane: Offset = synced_end
        self.synced_by_loop: Offset = 0
        self.cuts = 0  #: how often the log was cut back: what was read before is void
        self.drops = 0  #: how often segments were dropped; bytes read before are still right
        self.retired = False  #: the partition is being closed or deleted
        self.closed = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments (M1)."""
        swapped = self.swapped
        if not swapped:
            return self._segments
        found = (swapped.get(each, each) for each in self._segments)
        return tuple(each for each in found if each is not None)

    @segments.setter
    def segments(self, segments: tuple[Segment, ...]) -> None:
        self._segments = segments

    def show_swapped(self, swapped: Mapping[Segment, Segment | None]) -> None:
        """Show the new segments to readers, before their files are renamed (write lane)."""
        self.swapped = swapped
        self.swaps += 1
        for segment in swapped:
            segment.dropped = True
            self.cache.forget(segment)

    def settle_swap(self) -> None:
        """Replace the tuple after a swap (loop)."""
        self._segments = self.segments
        self.swapped = {}

    @property
    def first_offset(self) -> Offset:
        """The first offset of the oldest segment.  Replicas copy from there on, also below
        log_start (rule R5).
        """
        return self.segments[0].base_offset

    @property
    def voided(self) -> int:
        """How often what was read before became void: the log was cut back, or files swapped."""
        return self.cuts + self.swaps

    @property
    def local_log_start(self) -> Offset:
        """The first offset that can be read here.  Records below it are in the tier, or deleted."""
        return max(self.segments[0].base_offset, self.log_start)

    @property
    def synced_end(self) -> Offset:
        """The offset below which everything is SYNCED."""
        return max(self.synced_by_lane, self.synced_by_loop)

    def begin_segments(self, fresh: Sequence[Segment]) -> None:
        """Add the segments that completed plans rolled to; the last becomes the active one."""
        sealed = self.segments[-1], *fresh[:-1]
        self.segments = (*self.segments, *fresh)
        for segment in sealed:
            segment.index = None  # the index is on disk by now

    def drop_oldest(self, gone: Sequence[Segment]) -> None:
        """Hide the oldest segments from readers.  Their files still exist."""
        assert list(gone) == list(self.segments[: len(gone)]), "segments go from the oldest on"
        self.segments = self.segments[len(gone) :]
        self.drops += 1
        for segment in gone:
            segment.dropped = True
            self.cache.forget(segment)

    def begin_with_hole(self, lost: Damage) -> Segment:
        """Insert an empty segment in front of the first one, for offsets whose files are
        missing.
        """
        hole = Segment(self.storage, self.path, lost.start)
        hole.damage, hole.synced = (lost,), True
        hole.written = hole.decided = hole.written.beyond(0, lost.end)
        self.segments = (hole, *self.segments)
        return hole

    def replace_segments(self, segments: Iterable[Segment]) -> None:
        """Replace the segments by those that were found in the files after a cut or another
        opening.
        """
        self.segments = tuple(segments)
        self.cuts += 1
        self.written_end = self.segments[-1].written.next_offset
