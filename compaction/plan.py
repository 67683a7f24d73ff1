"""Decides whether a compacted log is due for a cleaning, and which offsets the cleaning covers.

Pure.  A log is a sequence of *parts*: the sealed segments of a local log, or the files of one
partition of a tier table.  Offsets below `cleaned_end` were cleaned before; the offsets from there
on are *dirty* (Kafka: first dirty offset).

The cleanable range is `[first_dirty, end)`.  It ends at the first of (rule C1)
  A  the last stable offset: the outcome of every transaction below it is known.  For a table: its
     end, because a table has stable records only;
  B  the base of the active segment;
  C  the hold of a reader that must see every record;
  D  the first dirty part with a record younger than min_compaction_lag_ms.

The log is due when the range has bytes and
  E  dirty bytes / (clean bytes + dirty bytes) >= min_cleanable_dirty_ratio, or
  F  a dirty part begins with a record older than max_compaction_lag_ms (KIP-354).  If the active
     segment begins with such a record, and nothing but B keeps it out of the range, it is rolled
     first.

  G  While the clock is not trusted (now_ms None, rule L10) no age is known: every record counts as
     younger than a min_compaction_lag_ms above 0, and none as older than max_compaction_lag_ms.
  H  `cleaned_end` counts only if it is an offset of the log.  Below the log start or above the log
     end it belongs to a log that was replaced or truncated, and the whole log is dirty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pk.log.index import NO_TIMESTAMP
from pk.types import Offset


class CleanablePart(NamedTuple):
    """A segment of a log, or a file of a table.  Parts are in offset order; there may be gaps
    between them.
    """

    base_offset: Offset
    next_offset: Offset
    size: int  #: bytes
    first_timestamp: int  #: ms, of the first batch, or the smallest; NO_TIMESTAMP = no record
    max_timestamp: int  #: ms; NO_TIMESTAMP = no record


class CompactionLimits(NamedTuple):
    """The settings of a topic that say when it is cleaned."""

    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int


class CompactionPlan(NamedTuple):
    """What a cleaning of a log would do now."""

    start: Offset  #: the log start: the cleaning reads every record from here on
    first_dirty: Offset
    end: Offset  #: the dirty range is `[first_dirty, end)`
    clean_bytes: int
    dirty_bytes: int
    due: bool
    roll: bool  #: roll the active segment first, then plan again (F)

    @property
    def dirty_ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0


def plan(
    parts: Sequence[CleanablePart],
    limits: CompactionLimits,
    *,
    active: CleanablePart | None,
    log_start: Offset,
    cleaned_end: Offset,
    last_stable_offset: Offset,
    hold: Offset | None,
    now_ms: int | None,
) -> CompactionPlan:
    """Return the cleanable range and whether it is due (rules A–H of the module).

    parts: the sealed segments, or the files of the table
    active: the active segment; None for a table
    hold: the lowest offset that a reader holds; None = none
    now_ms: None = the clock is not trusted
    """
    first_dirty = _first_dirty(parts, active, log_start, cleaned_end)
    dirty = [part for part in parts if part.next_offset > first_dirty]
    bound = last_stable_offset if hold is None else min(last_stable_offset, hold)
    end = max(_end(dirty, active, limits, bound, now_ms), first_dirty)
    clean_bytes = sum(part.size for part in parts if log_start < part.next_offset <= first_dirty)
    cleanable = [part for part in dirty if part.base_offset < end]
    dirty_bytes = sum(part.size for part in cleanable) if end > first_dirty else 0
    found = CompactionPlan(log_start, first_dirty, end, clean_bytes, dirty_bytes, False, False)
    enough = found.dirty_ratio >= limits.min_cleanable_dirty_ratio
    overdue = any(_overdue(part, limits, now_ms) for part in cleanable)
    return found._replace(
        due=dirty_bytes > 0 and (enough or overdue),
        roll=active is not None
        and end == active.base_offset < bound
        and _overdue(active, limits, now_ms),
    )


def _first_dirty(
    parts: Sequence[CleanablePart],
    active: CleanablePart | None,
    log_start: Offset,
    cleaned_end: Offset,
) -> Offset:
    last = active if active is not None else parts[-1] if parts else None
    log_end = log_start if last is None else last.next_offset
    return cleaned_end if log_start <= cleaned_end <= log_end else log_start  # H


def _end(
    dirty: Sequence[CleanablePart],
    active: CleanablePart | None,
    limits: CompactionLimits,
    bound: Offset,
    now_ms: int | None,
) -> Offset:
    """Return the end of the cleanable range (A–D); `bound` is that of A and C."""
    end = bound if active is None else min(bound, active.base_offset)
    lag = limits.min_compaction_lag_ms
    for part in dirty if lag > 0 else ():
        if part.max_timestamp == NO_TIMESTAMP:
            continue
        if now_ms is None or now_ms - part.max_timestamp < lag:
            return min(end, part.base_offset)
    return end


def _overdue(part: CleanablePart, limits: CompactionLimits, now_ms: int | None) -> bool:
    """Return whether the part has waited for longer than max_compaction_lag_ms (F, G)."""
    if now_ms is None or part.first_timestamp == NO_TIMESTAMP:
        return False
    return now_ms - part.first_timestamp > limits.max_compaction_lag_ms
