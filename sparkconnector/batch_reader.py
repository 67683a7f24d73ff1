"""A batch read: the driver fixes the offset ranges when Spark plans, and one task reads each range.

Spark plans a DataFrame once and keeps the plan.  Every action on the DataFrame therefore reads up
to the end that the log had at planning; "latest" is not looked up again.

With `spark.sql.python.filterPushdown.enabled=true` Spark offers its filters to the reader.  Filters
on topic, partition, offset and timestamp narrow the ranges.  Spark applies every filter again, so
narrowing may keep rows that a filter rejects, but must never drop a row that it accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pk import errors
from pk.sparkconnector.offsets import Bounds, Range, SourceProgress
from pk.sparkconnector.options import Column, Source
from pk.sparkconnector.plan import PkPartition, partitions_of
from pk.sparkconnector.planner import Planner, Task, read
from pk.sparkconnector.worker_errors import sentence_alone

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

OFFSET_MAX = 2**63 - 1


class Narrowed:
    """The part of a read that pushed filters leave: topics, partitions, offsets, least time."""

    def __init__(self) -> None:
        #: "topic" or "partition" → the values that the filters allow
        self.allowed: dict[str, set[Any]] = {}
        self.start = 0
        self.end = OFFSET_MAX
        self.since_ms: int | None = None  #: earliest timestamp that the filters allow; None = any

    def add(self, one: Filter) -> None:
        """Narrow the read by `one` if that is a filter on topic, partition, offset or timestamp."""
        column = getattr(one, "attribute", None)
        if not isinstance(column, tuple) or len(column) != 1:
            return
        name, kind = column[0].lower(), type(one).__name__
        value = getattr(one, "value", None)
        if name in ("topic", "partition") and kind in ("EqualTo", "In"):
            values = set(value) if isinstance(value, (tuple, list)) else {value}
            self.allowed[name] = self.allowed.get(name, values) & values
        elif name == "offset" and isinstance(value, int):
            self._offset(kind, value)
        elif name == "timestamp" and kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual"):
            self._since(value)

    def _since(self, value: Any) -> None:
        if isinstance(value, datetime) and value.tzinfo is not None:
            since_ms = int(value.timestamp() * 1000)
            self.since_ms = max(self.since_ms or since_ms, since_ms)

    def _offset(self, kind: str, value: int) -> None:
        least = {"EqualTo": value, "GreaterThanOrEqual": value, "GreaterThan": value + 1}.get(kind)
        end = {"EqualTo": value + 1, "LessThanOrEqual": value + 1, "LessThan": value}.get(kind)
        if least is not None:
            self.start = max(self.start, least)
        if end is not None:
            self.end = min(self.end, end)

    def admits(self, one: Bounds) -> bool:
        """Return whether the partition may hold a row that the filters accept."""
        return one.topic in self.allowed.get(
            "topic", {one.topic}
        ) and one.partition in self.allowed.get("partition", {one.partition})


class _PushFilters:
    """A replacement for the method `pushFilters`, which a reader must not override while push-down
    is off.

    Push-down is off by default, and Spark then refuses a reader that overrides the method.  To find
    out, Spark compares `reader.pushFilters.__func__` with the base class's function.  This object
    has the attribute with that function, so Spark accepts the reader.  Spark calls the object only
    if push-down is on.  If Spark changes the comparison, its own error names the setting to change.
    """

    def __init__(self, reader: PkReader) -> None:
        self._reader = reader
        # set on the instance: set on the class, it would become a bound method
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: Iterable[Filter]) -> Iterable[Filter]:
        for one in filters:
            self._reader.narrowed.add(one)
            yield one  # handed back, so Spark applies the filter again


class PkReader(DataSourceReader):
    """The batch reader: plans on the driver and reads on executors.

    Spark pickles it in between, so it holds options only.
    """

    def __init__(self, source: Source, columns: Sequence[Column]) -> None:
        self._source = source
        self._columns = tuple(columns)
        self.narrowed = Narrowed()

    @property
    def pushFilters(self) -> _PushFilters:
        return _PushFilters(self)

    @sentence_alone
    def partitions(self) -> Sequence[InputPartition]:
        planner = Planner(self._source)
        packed = planner.packed(self._tasks(planner))
        return partitions_of(packed, planner)

    def _tasks(self, planner: Planner) -> list[Task]:
        if self._source.as_of is not None:
            from pk.sparkconnector import as_of

            return as_of.tasks(planner, partial(self._ranges, planner))
        bounds = planner.bounds()
        start = planner.at(self._source.starting, bounds, "startingOffsets")
        end = planner.at(self._source.ending, bounds, "endingOffsets")
        return planner.tasks(self._ranges(planner, bounds, start, end), streaming=False)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, PkPartition):
            return iter(())  # Spark's own placeholder partition, for a plan without tasks
        return read(partition.tasks, self._source, self._columns)

    def _ranges(
        self, planner: Planner, bounds: Sequence[Bounds], start: SourceProgress, end: SourceProgress
    ) -> list[Range]:
        narrowed = self.narrowed
        kept = [one for one in bounds if narrowed.admits(one)]
        since: dict[tuple[str, int], int | None] = {}
        if narrowed.since_ms is not None and self._source.as_of is None:
            asked = {(one.topic_id, one.partition): narrowed.since_ms for one in kept}
            since = planner.cluster.first_at(asked) if asked else {}
        found = []
        for one in kept:
            first = start[one.topic].offsets[one.partition]
            last = end[one.topic].offsets[one.partition]
            if last < first and self._source.starting.kind == self._source.ending.kind == "offsets":
                raise errors.InvalidOption(
                    f"startingOffsets {first} is behind endingOffsets {last}: "
                    f"{one.topic}-{one.partition}"
                )
            first, last = max(first, narrowed.start), min(last, narrowed.end)
            begins = since.get((one.topic_id, one.partition), first)
            first = last if begins is None else max(first, begins)
            found.append(Range(one.topic, one.topic_id, one.partition, first, last))
        return found
