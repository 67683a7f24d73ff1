"""What a cleaning of a compacted log asks of the log: its sealed segments, and their swap
(log/swap.py).

A swap *runs* from `begin` on until its job has ended, its result is taken over (`end_job`), and no
part of it is left for later because the disk was full.  Meanwhile nothing is dropped and no other
cleaning begins.  A cut waits until the result is taken over (`when_taken_over`).

Threads (log/partition_log.py): `open_written` and `first_timestamps` belong to the read lane, the
job of `begin` to the write lane, everything else to the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from pk.log.aborted import AbortedEntry
from pk.log.batch import HEADER_BYTES, read_header
from pk.log.local_log import LocalLog
from pk.log.segment import Segment
from pk.log.swap import Swap, open_cleaned
from pk.log.writing import LaneJob, LocalLogWriter
from pk.types import Offset

#: The segments that a swap replaces, each with the new one; None = an earlier segment has it.
Swapped = Mapping[Segment, Segment | None]


class SegmentSwaps:
    """The swaps of one partition's log."""

    def __init__(self, local: LocalLog, writer: LocalLogWriter) -> None:
        self._local = local
        self._writer = writer
        self._has_job = False  #: from `begin` on until `end_job`
        self._waiting: list[Callable[[], None]] = []

    @property
    def end(self) -> Offset:
        """The cleaned end: every offset below was cleaned (rule C1)."""
        return self._local.cleaned_end

    @property
    def forgotten_end(self) -> Offset:
        """One above the highest tombstone or marker that was removed (log/forgotten)."""
        return self._local.forgotten.forgotten_end

    @property
    def incomplete(self) -> bool:
        """Whether the log was cut below its cleaned end, and so lacks records (log/forgotten)."""
        return self._local.forgotten.incomplete

    def hides_from(self, offset: Offset, forgotten_end: Offset | None) -> bool:
        """Whether a replica whose log ends at `offset` would miss a removed tombstone or marker of
        records that it has (rule C8).

        forgotten_end: of that log; None = its build does not know, and only a log that ends where
            this one begins has surely no such records
        """
        if offset >= self.forgotten_end:
            return False
        if forgotten_end is None:
            return offset > self._local.first_offset
        return forgotten_end < self.forgotten_end

    @property
    def count(self) -> int:
        """How often segments were swapped.  A plan of retention that was made before is void."""
        return self._local.swaps

    @property
    def running(self) -> bool:
        """Whether a swap runs, or is pending: no segment may be dropped meanwhile."""
        return self._has_job or self.pending

    @property
    def pending(self) -> bool:
        """Whether a full disk interrupted a swap: it is decided, and the lane will finish it."""
        return self._writer.swap_pending

    def finish(self) -> None:
        """Finish a pending swap (write lane).  Raises `StorageFull`; it is pending then."""
        self._writer.finish_swap()

    def aborted_entries(self, end: Offset) -> list[AbortedEntry]:
        """The entries of the aborted indexes of the sealed segments that begin below `end`."""
        sealed = self._local.segments[:-1]
        return [entry for s in sealed if s.base_offset < end for entry in s.aborted]

    def first_timestamps(self) -> dict[Offset, int]:
        """Return the timestamp of the first batch of each segment with dirty offsets, by base
        offset (any thread).  A segment that is removed meanwhile is left out.
        """
        found: dict[Offset, int] = {}
        for segment in self._local.segments:
            if segment.written.size and segment.written.next_offset > self.end:
                with contextlib.suppress(FileNotFoundError):
                    header = read_header(segment.read_at(0, HEADER_BYTES))
                    found[segment.base_offset] = header.max_timestamp
        return found

    def open_written(self, swap: Swap) -> Swapped | None:
        """Open the segments of a cleaning (read lane); see `swap.open_cleaned`, also for what is
        raised.  None = the log lacks a segment that was cleaned: the cleaning is void.  So it is if
        the log was cut since the job was made, which the caller checks (`PartitionLog.cuts`).
        """
        segments = {each.base_offset: each for each in self._local.segments[:-1]}
        found: dict[Segment, Segment | None] = {}
        for _, bases in swap.replacements:
            if any(base not in segments for base in bases):
                return None
            replaced = [segments[base] for base in bases]
            new = open_cleaned(self._local.storage, self._local.path, swap.tail, replaced)
            found.update({replaced[0]: new, **dict.fromkeys(replaced[1:])})
        return found

    def begin(self, swap: Swap, segments: Swapped | None) -> LaneJob | None:
        """Return the job for the write lane that puts the segments of a cleaning in place.  The
        caller submits it at once and calls `end_job` after it.  None = the log has changed in the
        meantime, and the cleaning is void.
        """
        present = dict.fromkeys(self._local.segments[:-1])
        if segments is None or self.running or not all(each in present for each in segments):
            return None
        self._has_job = True
        return lambda: self._writer.swap(swap, segments)

    def end_job(self) -> None:
        """Note that the job of `begin` has ended."""
        self._local.settle_swap()
        self._has_job = False
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def when_taken_over(self, then: Callable[[], None]) -> None:
        """Call `then` once the loop has taken over the result of a swap's job: now, if there is no
        job.  The loop and the write lane would otherwise replace the segments at the same time.
        """
        if self._has_job:
            self._waiting.append(then)
        else:
            then()
