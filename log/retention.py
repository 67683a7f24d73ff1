"""Decides which segments may be dropped, and where the log then starts.  It returns a plan; the log
and its leader carry it out.

The segments are walked from the oldest on; the first that must stay ends the walk.  A segment is
dropped when
  E1  it lies below log_start (its records were deleted), or
  E2  retention_ms is set and its newest record is older; not while the clock is not trusted (now_ms
      None, rule L10), or
  E3  retention_bytes is set and the log without the segment still has as many bytes.
With a tier (tiered_end >= 0), E2 and E3 use the local_ settings
  (a compacted topic has no retention of its own, but its local segments are dropped like those of
  other topics: the table keeps the latest record of each key, rule C2), and
  E4  no segment at or above droppable_end is dropped, whatever its age (rule T6: committed,
      confirmed, delay over);
  E5  dropping a segment moves local_log_start only.  log_start moves past records that topic
      retention has expired *and* that the tier covers (rule T9: log_start first, then the rows
      below it).  Records that only the tier has expire before the local ones, because their offsets
      are lower, whatever their timestamps.
In all cases
  E6  no segment at or above the high watermark is dropped, and log_start never passes the hold;
  E7  the active segment is not dropped.  If its newest record has expired and every segment before
      it is dropped, the log is rolled and the plan made again (rule L10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pk.log.index import NO_TIMESTAMP
from pk.log.plan import LogConfig, RetentionPlan

#: Earlier than every record's timestamp: no record counts as older.
NO_TIME = -(2**63)


class SegmentFacts(NamedTuple):
    """The facts about a segment that retention needs; the last segment of a log is the active
    one.
    """

    base_offset: int
    next_offset: int
    size: int
    max_timestamp: int


class _Keep(NamedTuple):
    """How much of a log stays (-1 = all of it), and the settings that say so."""

    ms: int
    bytes: int
    ms_setting: str = "retention_ms"
    bytes_setting: str = "retention_bytes"


def plan(
    segments: Sequence[SegmentFacts],
    config: LogConfig,
    *,
    log_start: int,
    tiered_end: int,
    droppable_end: int,
    high_watermark: int,
    hold: int | None,
    now_ms: int | None,
) -> RetentionPlan:
    """Return which segments to drop and the new log start (rules E1–E7 of the module)."""
    tiered = tiered_end >= 0
    keep = _local(config) if tiered else _Keep(config.retention_ms, config.retention_bytes)
    if not config.deletes and not tiered:
        keep = _Keep(-1, -1)
    now_ms = NO_TIME if now_ms is None else now_ms
    total = sum(segment.size for segment in segments)
    drop: list[int] = []
    reason = ""
    start = log_start
    roll = False
    for segment in segments:
        active = segment is segments[-1]
        why = _why(segment, start, keep, total, now_ms)
        if (
            not why
            or segment.next_offset > high_watermark
            or segment.next_offset == segment.base_offset
        ):
            break  # E6; an empty segment is the active one or about to become it
        if tiered and segment.next_offset > droppable_end and segment.next_offset > start:
            break  # E4
        if not tiered and hold is not None and segment.next_offset > max(hold, start):
            break  # E6
        if active:
            roll = True  # E7
            break
        drop.append(segment.base_offset)
        total -= segment.size
        reason = reason or why
        if not tiered:
            start = max(start, segment.next_offset)
    if tiered and config.deletes and start >= segments[0].base_offset:
        start = max(
            start,
            _expired_end(
                segments, config.retention_ms, min(tiered_end, high_watermark), hold, now_ms
            ),
        )
    return RetentionPlan(start, tuple(drop), roll, reason)


def _why(segment: SegmentFacts, start: int, keep: _Keep, total: int, now_ms: int) -> str:
    if segment.next_offset <= start:
        return "below log_start"  # E1
    if (
        keep.ms >= 0
        and segment.max_timestamp != NO_TIMESTAMP
        and now_ms - segment.max_timestamp > keep.ms
    ):
        return f"older than {keep.ms_setting}"  # E2
    if keep.bytes >= 0 and total - segment.size >= keep.bytes:
        return f"beyond {keep.bytes_setting}"  # E3
    return ""


def _local(config: LogConfig) -> _Keep:
    """Return what the local_ settings keep; -2 stands for the topic's setting."""
    keep = _Keep(config.retention_ms, config.retention_bytes)
    if config.local_retention_ms != -2:
        keep = keep._replace(ms=config.local_retention_ms, ms_setting="local_retention_ms")
    if config.local_retention_bytes != -2:
        keep = keep._replace(
            bytes=config.local_retention_bytes, bytes_setting="local_retention_bytes"
        )
    return keep


def _expired_end(
    segments: Sequence[SegmentFacts], keep_ms: int, bound: int, hold: int | None, now_ms: int
) -> int:
    """Return the end of the local segments that have expired as a whole under topic retention
    (E5).
    """
    end = 0
    if keep_ms < 0:
        return end
    limit = bound if hold is None else min(bound, hold)
    for segment in segments:
        expired = segment.max_timestamp != NO_TIMESTAMP and now_ms - segment.max_timestamp > keep_ms
        if not expired or segment.next_offset > limit:
            break
        end = segment.next_offset
    return end
