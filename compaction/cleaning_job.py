"""What a cleaning of a local log gets from the broker, and what it returns.

The broker and the process of the cleaner exchange both as lines of JSON; one build runs both.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pk.clock import MedianTime
from pk.compaction.offset_map import I64
from pk.compaction.plan import CompactionPlan
from pk.compaction.retain import Cleaning
from pk.log.aborted import AbortedEntry
from pk.log.batch import TIMESTAMP_MS_MAX
from pk.log.partition_log import PartitionLog
from pk.log.swap import Replacement, Swap
from pk.types import AbortedTransaction, Offset

#: A cleaning must be in place within this time and a second for each megabyte; otherwise the
#: broker ends its process, or discards it (compaction/retain: `Cleaning.deadline_ms`).
CLEANING_MS = 60_000


class SealedSegment(NamedTuple):
    """A segment that the cleaning reads."""

    base_offset: Offset
    next_offset: Offset
    size: int  #: bytes


class CleaningJob(NamedTuple):
    """One cleaning of one log."""

    root: str  #: of the storage
    path: str  #: of the log, relative to the root
    tail: str  #: what the names of the written files end with; no other cleaning has it
    segments: Sequence[SealedSegment]  #: every sealed segment with an offset below the end
    first_dirty: Offset
    cleaning: Cleaning
    #: The producers that the log knows, not older than the end; in any order.  The cleaner finds
    #: their windows at the end itself (compaction/local_cleaner N8).
    producer_ids: I64
    #: every aborted transaction with records below the end, wherever its marker lies
    aborted: Sequence[AbortedTransaction]
    entries: Sequence[AbortedEntry]  #: of the segments' aborted indexes
    segment_bytes: int
    index_interval_bytes: int
    map_bytes: int  #: bound of the offset map
    time_limit_ms: int  #: within which the cleaning must be in place


class CleanedSegment(NamedTuple):
    """A segment that the cleaning has written, and the segments that it replaces."""

    base_offset: Offset
    replaces: Sequence[Offset]  #: base offsets, ascending; the first is `base_offset`


class CleaningResult(NamedTuple):
    """What a cleaning has written.  Its files are SYNCED; their names are not."""

    end: Offset  #: the new cleaned end
    segments: Sequence[CleanedSegment]  #: ascending; unchanged segments are missing
    bytes_read: int
    bytes_written: int
    keys: int  #: in the offset map
    superseded: int  #: rows that were dropped, by reason
    aborted: int
    tombstones: int
    without_key: int
    #: one above the highest tombstone or marker that was dropped; 0 = none (log/forgotten)
    forgotten_end: Offset = 0


def make_job(
    log: PartitionLog,
    plan: CompactionPlan,
    *,
    root: str,
    tail: str,
    settled_end: Offset,
    delete_retention_ms: int,
    map_bytes: int,
    now: MedianTime | None,
    least_ms: int = CLEANING_MS,
) -> CleaningJob:
    """Return the job that does what `plan` says.  Called on the loop, after the plan was made.

    now: by the clocks of all nodes; None = they are not known, or not trusted (rule L10)
    least_ms: the time limit of the cleaning of an empty log
    """
    config = log.config
    segments = [
        SealedSegment(each.base_offset, each.next_offset, each.size)
        for each in log.segments[:-1]
        if each.base_offset < plan.end
    ]
    now_ms = deadline_ms = None
    time_limit_ms = least_ms + sum(each.size for each in segments) // 1000
    if now is not None:
        now_ms, deadline_ms = now.earliest_ms, now.latest_ms + time_limit_ms
        delete_retention_ms = min(delete_retention_ms, TIMESTAMP_MS_MAX - deadline_ms)
    return CleaningJob(
        root,
        log.path,
        tail,
        segments,
        plan.first_dirty,
        Cleaning(plan.end, settled_end, delete_retention_ms, now_ms, deadline_ms),
        np.fromiter(log.producers.ids(), np.int64, len(log.producers)),
        log.aborted_in(log.first_offset, plan.end).transactions,
        log.cleaned.aborted_entries(plan.end),
        config.segment_bytes,
        config.index_interval_bytes,
        map_bytes,
        time_limit_ms,
    )


def swap_of(job: CleaningJob, result: CleaningResult) -> Swap:
    """Return the swap that puts the segments of a cleaning in place."""
    replacements = tuple(Replacement(each[0], tuple(each[1])) for each in result.segments)
    return Swap(result.end, job.tail, replacements, result.forgotten_end)


def job_to_json(job: CleaningJob) -> str:
    """Return the job as one line."""
    ids = base64.b64encode(job.producer_ids.astype("<i8").tobytes()).decode()
    return json.dumps({**job._asdict(), "producer_ids": ids})


def job_from_json(line: str) -> CleaningJob:
    """Return the job that `job_to_json` wrote."""
    found: dict[str, Any] = json.loads(line)
    return CleaningJob(**found)._replace(
        segments=[SealedSegment(*each) for each in found["segments"]],
        cleaning=Cleaning(*found["cleaning"]),
        producer_ids=np.frombuffer(base64.b64decode(found["producer_ids"]), "<i8"),
        aborted=[AbortedTransaction(*each) for each in found["aborted"]],
        entries=[AbortedEntry(*each) for each in found["entries"]],
    )


def result_to_json(result: CleaningResult) -> str:
    """Return the result as one line."""
    return json.dumps({"cleaned": result._asdict()})


def result_from_json(found: dict[str, Any]) -> CleaningResult:
    """Return the result that `result_to_json` wrote, after `json.loads`."""
    fields = found["cleaned"]
    segments = [CleanedSegment(*each) for each in fields["segments"]]
    return CleaningResult(**{**fields, "segments": segments})
