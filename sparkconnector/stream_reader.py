"""A streaming read: offsets in Spark's checkpoint, one range per partition and trigger.

Spark keeps one reader per query in a Python process of the driver.  At each trigger it calls
latestOffset(start, limit) → partitions(start, end) → commit(end).  After a restart it continues
from the checkpoint, and a batch that was planned but not committed is read again with the same
start and end.  An exception ends the query, so connection.py retries transient errors
(sparkconnector/connection K1).

Rules
  B1  If there is nothing new, latestOffset returns `start` unchanged.  Spark compares offsets as
      text, and a different spelling would start a batch.
  B2  Of several limits, the smallest applies.  The reader computes it, because Spark only passes
      the reader's own limit back.  `Trigger.Once` reads everything.
  B3  AvailableNow fixes its target once, for the partitions that exist then.  Limits apply to each
      batch, but minOffsetsPerTrigger does not: the query could wait for it without end.
  B4  A batch with fewer than minOffsetsPerTrigger new offsets waits until maxTriggerDelay has
      passed since the last batch.  The first batch of a run does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from pk import clock
from pk.sparkconnector import offsets, ranges
from pk.sparkconnector.offsets import Bounds, Range, SourceProgress, TopicProgress
from pk.sparkconnector.options import Column, Source
from pk.sparkconnector.plan import PkPartition, partitions_of
from pk.sparkconnector.planner import Planner, read, warn
from pk.sparkconnector.worker_errors import sentence_alone

if TYPE_CHECKING:
    import pyarrow as pa


class PkStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming reader: plans on the driver and reads on executors.

    Spark pickles it in between, so it holds options only.
    """

    def __init__(self, source: Source, columns: Sequence[Column]) -> None:
        self._source = source
        self._columns = tuple(columns)
        self._planner = Planner(source)
        self._newest: SourceProgress | None = (
            None  # what latestOffset last found, for the progress report
        )
        self._target: SourceProgress | None = None  # the target of AvailableNow (B3)
        self._turn = 0
        self._last_batch_s: float | None = None  # B4

    # -- offsets -----------------------------------------------------------------------------------

    @sentence_alone
    def initialOffset(self) -> dict[str, Any]:
        bounds = self._planner.bounds()
        begin = self._planner.at(self._source.starting, bounds, "startingOffsets")
        return offsets.to_json(offsets.with_epochs(begin, bounds))

    @sentence_alone
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = offsets.from_json(start)
        if self._source.group_id:
            self._planner.cluster.publish(
                self._source.group_id, begin, warn, holds_retention=self._source.hold_retention
            )
        bounds = self._planner.bounds()
        self._newest = offsets.latest(bounds)
        end = self._newest if self._target is None else self._target
        wanted, losses = offsets.between(begin, end, bounds)
        self._planner.settle(losses)
        unlimited = isinstance(limit, ReadAllAvailable)
        if not unlimited and self._target is None and self._waits_for_more(wanted):
            return start
        limited = wanted if unlimited else self._limited(wanted)
        reached = _advanced(begin, end, bounds, limited)
        if offsets.same_offsets(reached, begin):
            return start  # B1
        self._turn += 1
        self._last_batch_s = clock.monotonic_s()
        return offsets.to_json(offsets.with_epochs(reached, bounds))

    def getDefaultReadLimit(self) -> ReadLimit:
        source = self._source
        if source.max_offsets:
            return ReadMaxRows(source.max_offsets)
        if source.max_bytes:
            return ReadMaxBytes(source.max_bytes)
        if source.min_offsets:
            return ReadMinRows(source.min_offsets)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the newest readable offsets; Spark's progress shows the lag from them."""
        return None if self._newest is None else offsets.to_json(self._newest)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.latest(self._planner.bounds())

    # -- tasks -------------------------------------------------------------------------------------

    @sentence_alone
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, stop = offsets.from_json(start), offsets.from_json(end)
        if begin == stop:
            return []
        wanted, losses = offsets.between(begin, stop, self._planner.bounds())
        self._planner.settle(losses)
        planner = self._planner
        packed = planner.packed(planner.tasks(wanted, streaming=True))
        return partitions_of(packed, planner)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, PkPartition):
            return iter(())
        return read(partition.tasks, self._source, self._columns)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint holds the progress.

        Spark never commits the last batch, so a group's progress comes from latestOffset (S1).
        """

    def stop(self) -> None:
        """Do nothing: Spark kills the process, which closes its connections."""

    # -- limits ------------------------------------------------------------------------------------

    def _waits_for_more(self, wanted: Sequence[Range]) -> bool:
        """Return whether the batch waits for minOffsetsPerTrigger offsets (B4)."""
        least = self._source.min_offsets
        there = sum(one.size for one in wanted)
        if not least or there >= least or self._last_batch_s is None:
            return False
        waited_ms = (clock.monotonic_s() - self._last_batch_s) * 1000
        return waited_ms < self._source.max_trigger_delay_ms

    def _limited(self, wanted: list[Range]) -> list[Range]:
        """Cut the ranges to both limits, first records, then bytes; some record remains (B2), or a
        partition passes the gap of a restore.
        """
        source = self._source
        wanted = self._planner.without_gaps(wanted)
        if source.max_offsets:
            wanted = ranges.limit_records(wanted, source.max_offsets, self._turn)
        if source.max_bytes and any(one.size for one in wanted):
            curves = self._planner.curves(wanted)
            wanted = ranges.limit_bytes(wanted, curves, source.max_bytes, self._turn)
        return wanted


def _advanced(
    begin: SourceProgress, end: SourceProgress, bounds: Sequence[Bounds], limited: Sequence[Range]
) -> SourceProgress:
    """Return the progress after `limited`; a partition with nothing to read keeps its offset."""
    reached = {(one.topic, one.partition): one.end for one in limited}
    earliest = {(one.topic, one.partition): one.earliest for one in bounds}
    progress: SourceProgress = {}
    for topic in sorted(end):
        before = begin.get(topic)
        same = before is not None and before.topic_id == end[topic].topic_id
        entry = TopicProgress(end[topic].topic_id)
        for partition, stop in sorted(end[topic].offsets.items()):
            stands = before.offsets.get(partition) if before is not None and same else None
            if stands is None:
                stands = min(earliest.get((topic, partition), 0), stop)
            entry.offsets[partition] = reached.get((topic, partition), min(stands, stop))
        progress[topic] = entry
    return progress
