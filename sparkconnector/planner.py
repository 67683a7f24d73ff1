"""The driver's side of a read: which topics, which offsets, which tasks.

Spark pickles the planner, so it holds options only and looks its connection up when needed.  The
modules options, offsets and ranges decide everything that needs no broker.

The planner cuts a range at the end of the topic's Delta table.  Executors read the cold part, below
that end, from the table's files, and the hot part from the broker.  A stream that keeps up reads
from the broker only: for a few records that were tiered a moment ago, reading a table version and a
file footer would cost more than the fetch.

Each piece is a `Task`.  If the pieces are small, one task of Spark reads several of them, one after
the other (sparkconnector/packing).  Small hot pieces share requests (sparkconnector/joint_scan).
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from pk import errors, generations
from pk.sparkconnector import offsets, packing, ranges
from pk.sparkconnector.offsets import Bounds, Loss, Range, SourceProgress
from pk.sparkconnector.options import Column, OffsetRangeLimit, Source
from pk.types import NONE

if TYPE_CHECKING:
    import pyarrow as pa

    from pk.sparkconnector import rows
    from pk.sparkconnector.connection import ClusterClient, TopicLeaders
    from pk.sparkconnector.joint_scan import JointRange
    from pk.sparkconnector.opened_files import TaskFiles
    from pk.sparkconnector.ranges import Curve, Spans, TierFile
    from pk.sparkconnector.rows import Found, Shape
    from pk.sparkconnector.scan import ScannedBatches
    from pk.sparkconnector.table_files import TableFiles
    from pk.sparkconnector.tier_scan import ColdRange

#: A stream reads fewer tiered records than this from the broker, if its disk still has them.
STREAM_COLD_RECORDS_LEAST = 20_000
#: Samples of a partition's byte curve.
CURVE_SAMPLES = 256
#: How often the planner starts over because a topic was deleted between two of its calls.
_RESTARTS_MAX = 5
_TAKEN = errors.DataLoss("another engine deleted its rows from the table (pk tier describe)")
_RESTORED = errors.DataLoss(
    "the cluster was restored from its tier, which did not hold them (pk tier describe)"
)
_AGED_OUT = "it was deleted or aged out while it was read"


def taken(part: Range, missing: Spans) -> errors.DataLoss:
    """Return why a table lacks these rows, which its counters say it had.

    A restore goes on in the next block of offsets (pk.generations): the gap ends where it begins.
    missing: all that the table lacks.  The read may end within the gap, the gap itself does not.
    """
    for start, end in missing:
        inside = start <= part.start and part.end <= end
        if inside and start // generations.OFFSETS != end // generations.OFFSETS:
            return _RESTORED
    return _TAKEN


class PkWarning(UserWarning):
    """A warning to the user about a read or a write."""


@dataclass(slots=True, frozen=True)
class Task:
    """What one task reads: offsets of one partition, from the table if `cold` is given."""

    range: Range
    read_committed: bool
    cold: ColdRange | None = None
    #: of a hot range, as its leader says; NONE = not known, and the range is read by itself
    bytes: int = field(default=NONE, compare=False)


class PartitionTable(NamedTuple):
    """A partition's files in one version of the topic's table, and where its rows begin."""

    place: ColdRange
    files: Sequence[TierFile]
    start: int
    missing: Spans  #: offsets whose rows another engine deleted (T17), or a restore left out (T13)

    @classmethod
    def of(cls, place: ColdRange, found: TableFiles, partition: int) -> PartitionTable:
        """Return one partition of a listed version."""
        missing = found.missing.get(partition, ())
        return cls(place, found.files[partition], found.starts[partition], missing)


def warn(words: str) -> None:
    """Warn in the log of the driver or executor: Spark forwards a worker's stderr."""
    warnings.warn(words, PkWarning, stacklevel=3)
    sys.stderr.flush()


class Planner:
    """Plans the reads of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def cluster(self) -> ClusterClient:
        from pk.sparkconnector.connection import cluster

        source = self.source
        return cluster(source.bootstrap, source.client, source.connect_timeout_ms)

    # -- what is there -----------------------------------------------------------------------------

    def bounds(self) -> list[Bounds]:
        """Return the readable offsets of every partition of the subscription."""
        restarts = 0
        while True:
            topics = self.topics()
            try:
                return self.cluster.bounds(topics, read_committed=self.source.read_committed)
            except errors.UnknownTopicId:  # deleted between the two calls
                restarts += 1
                if restarts > _RESTARTS_MAX:
                    raise

    def topics(self) -> list[TopicLeaders]:
        """Return the topics of the subscription, each with the partitions to read."""
        source = self.source
        if source.pattern is not None:
            matcher = re.compile(source.pattern)
            return [topic for topic in self.cluster.topics() if matcher.fullmatch(topic.name)]
        if source.assigned is None:
            return self.cluster.topics(source.topics)
        found = []
        for topic in self.cluster.topics(sorted(source.assigned)):
            wanted = source.assigned[topic.name]
            lacking = [p for p in wanted if p not in topic.leaders]
            if lacking:
                raise errors.UnknownTopicOrPartition(
                    f"assign names {topic.name}-{lacking[0]}; there are {len(topic.leaders)}"
                )
            found.append(topic._replace(leaders={p: topic.leaders[p] for p in wanted}))
        return found

    def at(self, position: OffsetRangeLimit, bounds: Sequence[Bounds], name: str) -> SourceProgress:
        """Return the progress that a position option names; raise or warn about losses."""
        times = offsets.times_of(position, bounds)
        found: dict[tuple[str, int], int | None] = {}
        if times:
            ids = {(one.topic, one.partition): one.topic_id for one in bounds}
            by_id = {(ids[key], key[1]): at_ms for key, at_ms in times.items()}
            answered = self.cluster.first_at(by_id)
            found = {key: answered[ids[key], key[1]] for key in times}
        strategy = self.source.when_no_such_time if name.startswith("starting") else "latest"
        progress, losses = offsets.at_position(position, bounds, found, name, strategy)
        self.settle(losses)
        return progress

    def settle(self, losses: Sequence[Loss]) -> None:
        """Raise the losses if failOnDataLoss is set; otherwise warn about them."""
        if not losses:
            return
        error = offsets.error_of(losses)
        if self.source.fail_on_data_loss:
            raise error
        warn("; ".join(loss.words for loss in losses) + " (failOnDataLoss is false: going on)")

    # -- limits ------------------------------------------------------------------------------------

    def curves(self, wanted: Sequence[Range]) -> dict[tuple[str, int], Curve]:
        """Return how the bytes are spread over each range, by topic and partition."""
        asked = [one for one in wanted if one.size]
        answers = self.cluster.curves(asked, CURVE_SAMPLES) if asked else []
        found = {}
        for one, (xs, ys) in zip(asked, answers, strict=True):
            if len(xs) > 1:
                found[one.topic, one.partition] = ranges.curve(xs, ys, one)
        return found

    def without_gaps(self, wanted: Sequence[Range]) -> list[Range]:
        """Return what of the ranges a limit may count: nothing that a restore left out (T13)."""
        block = generations.OFFSETS
        crossing = [one for one in wanted if one.start // block != one.end // block]
        tables = self._tables(crossing, {(one.topic, one.partition): one.end for one in crossing})
        found = []
        for one in wanted:
            table = tables.get((one.topic, one.partition))
            found.append(one if table is None else ranges.without_gap(one, table.missing))
        return found

    # -- tasks -------------------------------------------------------------------------------------

    def tasks(self, wanted: Sequence[Range], *, streaming: bool) -> list[Task]:
        """Return the tasks: ranges split as the options say, then cut into cold and hot parts."""
        source = self.source
        whole = [one for one in wanted if one.size]
        ends = self._cold_ends(whole, streaming)
        tables = self._tables(whole, ends)
        whole = self.left(whole, tables)
        curves = self.curves(whole) if source.max_bytes_per_partition else {}
        return self.pieces(whole, ends, tables, curves)

    def pieces(
        self,
        whole: Sequence[Range],
        ends: Mapping[tuple[str, int], int],
        tables: Mapping[tuple[str, int], PartitionTable],
        curves: Mapping[tuple[str, int], Curve],
    ) -> list[Task]:
        """Return the tasks of the ranges.

        ends: the end of each partition's cold part.  tables: the files of the cold parts.
        """
        source = self.source
        pieces = ranges.split(
            whole,
            min_partitions=source.min_partitions,
            max_records=source.max_records_per_partition,
            max_bytes=source.max_bytes_per_partition,
            curves=curves,
        )
        tasks: list[Task] = []
        for one in pieces:
            key = (one.topic, one.partition)
            cold, hot = ranges.cut_at(one, ends.get(key, 0) if key in tables else 0)
            if cold is not None:
                tasks += self._cold(cold, tables[key])
            if hot is not None:
                tasks.append(Task(hot, source.read_committed))
        return tasks

    def packed(self, tasks: Sequence[Task]) -> list[tuple[Task, ...]]:
        """Return what each task of Spark reads.  Asks the leaders for the bytes of hot ranges."""
        source, cores = self.source, os.cpu_count() or 1
        least = source.min_partitions
        if not source.pack_partitions or len(tasks) <= max(cores, least):
            return [(task,) for task in tasks]
        hot = [task.range for task in tasks if task.cold is None]
        try:
            curves = iter(self.cluster.curves(hot, 2) if hot else [])
        except errors.UnknownTopicId:  # deleted meanwhile: its task reports the loss
            curves = iter([([], [])] * len(hot))
        sizes, known = [], []
        for task in tasks:
            if task.cold is not None:
                size = sum(file.size for file in task.cold.files)
            else:
                xs, ys = next(curves)
                size = _last_bytes(task.range, xs, ys)
                if len(xs) > 1:
                    task = replace(task, bytes=size)
            sizes.append(packing.Size(task.range.size, size))
            known.append(task)
        groups = packing.pack(
            sizes,
            cores=cores,
            least=least,
            open_cost=source.open_cost_bytes,
            max_records=source.max_records_per_partition,
            max_bytes=source.max_bytes_per_partition,
        )
        return [tuple(known[at] for at in group) for group in groups]

    def left(
        self, wanted: Sequence[Range], tables: Mapping[tuple[str, int], PartitionTable]
    ) -> list[Range]:
        """Return the ranges without the offsets that retention removed from the tables meanwhile.

        A table does not list files below its start, so no task would notice that their records are
        missing.  The method therefore reports these records, and rows that another engine deleted,
        as losses.
        """
        left, losses = [], []
        for one in wanted:
            table = tables.get((one.topic, one.partition))
            start = min(table.start, one.end) if table is not None else one.start
            if start > one.start:
                cause = errors.OffsetOutOfRange(_AGED_OUT)
                losses.append(_loss(one._replace(end=start), cause))
                one = one._replace(start=start)
            if table is not None and one.size:
                parts = ranges.within(table.missing, one)
                losses += [_loss(part, taken(part, table.missing)) for part in parts]
            left.append(one)
        self.settle(losses)
        return [one for one in left if one.size]

    def _cold(self, one: Range, table: PartitionTable) -> Iterator[Task]:
        most = self.source.max_records_per_partition
        for part, here in ranges.cold_tasks(one, table.files, max_records=most):
            cold = replace(table.place, files=tuple(here))
            yield Task(part, self.source.read_committed, cold)

    def _cold_ends(self, wanted: Sequence[Range], streaming: bool) -> dict[tuple[str, int], int]:
        """Return each partition's end of the cold part, if reading that from the table pays."""
        if not wanted:
            return {}
        found = {}
        for one, (local_start, tiered_end) in self.cluster.tier_bounds(wanted).items():
            cold = min(one.end, tiered_end) - one.start
            needed = one.start < local_start
            if cold > 0 and (needed or not streaming or cold >= STREAM_COLD_RECORDS_LEAST):
                found[one.topic, one.partition] = tiered_end
        return found

    def _tables(
        self, wanted: Sequence[Range], ends: Mapping[tuple[str, int], int]
    ) -> dict[tuple[str, int], PartitionTable]:
        """Return each partition's files in the table; no entry if the table cannot be reached from
        here.

        The broker serves cold reads too, so the read continues when only the broker can reach the
        store.
        """
        found: dict[tuple[str, int], PartitionTable] = {}
        if not ends:
            return found  # no cold part: the modules that read tables are not even imported
        from pk.sparkconnector import table_files, tier_scan

        ids = {one.topic: one.topic_id for one in wanted}
        for topic in sorted({topic for topic, _ in ends}):
            tier = self.cluster.tier(topic)
            mine = [partition for name, partition in sorted(ends) if name == topic]
            if not tier.uri:
                continue
            try:
                now = table_files.list_files(tier.uri, tier.storage_options, ids[topic], mine)
            except errors.TierUnavailable as cause:
                warn(f"the tier of {topic} is read through the broker: {cause.message}")
                continue
            place = tier_scan.ColdRange(tier.uri, tier.storage_options)
            for partition in mine:
                found[topic, partition] = PartitionTable.of(place, now, partition)
        return found


# -- the executor's side
# ----------------------------------------------------------------------------


def read(
    tasks: Sequence[Task], source: Source, columns: Sequence[Column]
) -> Iterator[pa.RecordBatch]:
    """Return the rows of the tasks, one after the other, each in offset order, with the given
    `columns`.  Raises typed errors that name the range.
    """
    from pk.sparkconnector import rows, worker

    worker.begin_task()
    shape = rows.Shape(columns)
    return rows.right_sized(_each(tasks, source, shape), shape)


def _each(tasks: Sequence[Task], source: Source, shape: Shape) -> Iterator[Found]:
    cold = [(each.range, each.cold) for each in tasks if each.cold is not None]
    with ExitStack() as opened:
        files = scans = None
        if cold:
            from pk.sparkconnector import opened_files, tier_scan

            files = opened_files.TaskFiles(tier_scan.files_of(cold))
            opened.enter_context(closing(files))
        if len(cold) < len(tasks):
            from pk.sparkconnector.connection import cluster
            from pk.sparkconnector.joint_scan import Small, TaskScans

            client = cluster(source.bootstrap, source.client, source.connect_timeout_ms)
            small = [Small(each.range, each.bytes) if each.bytes >= 0 else None for each in tasks]
            scans = TaskScans(client, small, read_committed=source.read_committed)
            opened.enter_context(closing(scans))
        for at, task in enumerate(tasks):
            if task.cold is not None:
                found = _cold(task, source, shape, files)
            else:
                assert scans is not None
                found = _hot(task, source, client, scans.of(at))
            yield from _named(task.range, found)


def _named(one: Range, found: Iterator[Found]) -> Iterator[Found]:
    """Yield what is found, and name the range in its errors."""
    try:
        yield from found
    except errors.PkError as cause:
        name = f"{one.topic}-{one.partition}"
        if name in cause.message:
            raise
        raise type(cause)(f"{name}: {cause.message}", **cause.details) from cause


def _cold(task: Task, source: Source, shape: Shape, files: TaskFiles | None) -> Iterator[Found]:
    from pk.sparkconnector import tier_scan

    def lost(part: Range) -> None:
        cause = errors.OffsetOutOfRange(_AGED_OUT)
        _report_loss(source, _loss(part, cause), cause)

    def elsewhere(rest: Range, error: errors.DamagedTierFile) -> Iterator[Found]:
        """Report the file to the broker and read `rest` from the broker, which may still have the
        records."""
        from pk.sparkconnector.connection import cluster

        warn(f"{error.message}; {rest} is read through the broker")
        client = cluster(source.bootstrap, source.client, source.connect_timeout_ms)
        client.tier(rest.topic, [error.details["path"]])
        return _hot(replace(task, range=rest, cold=None), source, client)

    assert task.cold is not None
    return tier_scan.scan(task.range, task.cold, shape, lost, elsewhere, files)


def _hot(
    task: Task, source: Source, client: ClusterClient, joint: JointRange | None = None
) -> Iterator[rows.LogRows]:
    from pk.sparkconnector import rows

    rest = task.range
    doubted: int | None = None
    while rest.size:
        try:
            received, joint = _received(client, rest, task.read_committed, joint), None
            for fetched in received:
                # A read of the tier may end inside a batch; the next leader may return that batch
                # whole.
                rest = rest._replace(start=fetched.position)
                yield from rows.from_log(
                    fetched.payload,
                    fetched.aborted,
                    rest,
                    client.decoded_bytes_max,
                    fetched.next_offset,
                    fetched.dense,
                )
                rest = rest._replace(start=fetched.next_offset)
            return
        except (errors.OffsetOutOfRange, errors.UnknownTopicId) as cause:
            gone = isinstance(cause, errors.UnknownTopicId)
            left = rest.end if gone or source.fail_on_data_loss else _first_left(client, rest)
            _report_loss(source, _loss(rest._replace(end=left), cause), cause)
            rest = rest._replace(start=left)
        except errors.DataLoss as cause:  # the only copy is damaged (rule L9)
            left = min(rest.end, int(cause.details["next_offset"]))
            _report_loss(source, _loss(rest._replace(end=left), cause), cause)
            rest = rest._replace(start=left)
        except (errors.CorruptBatch, errors.InvalidRecord) as cause:
            # Ask again from here: the broker checks the first batch of an answer and reports if its
            # own copy is damaged. A second failure at the same position is raised.
            rest = rest._replace(start=max(rest.start, int(cause.details["position"])))
            if doubted == rest.start:
                raise
            doubted = rest.start


def _received(
    client: ClusterClient, one: Range, read_committed: bool, joint: JointRange | None
) -> Iterator[ScannedBatches]:
    """Yield the payloads of a range: those of the joint scan, then those of a scan of the rest."""
    if joint is None:
        yield from client.scan(one, read_committed=read_committed)
        return
    yield from joint.batches()
    left = joint.received
    if not left.complete:
        yield from client.scan(left.rest, read_committed=read_committed, epoch=left.epoch)


def _last_bytes(one: Range, xs: Sequence[int], ys: Sequence[int]) -> int:
    """Return the bytes of a range by its samples; without samples one byte a record."""
    return ranges.curve(xs, ys, one).cumulative[-1] if len(xs) > 1 else one.size


def _first_left(client: ClusterClient, one: Range) -> int:
    """Return the first offset of a range that still exists; its end if none does."""
    from pk.sparkconnector.connection import TopicLeaders

    topic = TopicLeaders(one.topic, one.topic_id, {one.partition: ""}, False)
    try:
        (now,) = client.bounds([topic], read_committed=False)
    except errors.UnknownTopicId:
        return one.end
    return now.earliest if one.start < now.earliest < one.end else one.end


def _report_loss(source: Source, loss: Loss, cause: errors.PkError) -> None:
    """Raise the loss if failOnDataLoss is set; otherwise warn (on an executor)."""
    if source.fail_on_data_loss:
        raise offsets.error_of([loss]) from cause
    warn(f"{loss.words} (failOnDataLoss is false: going on)")


def _loss(one: Range, cause: errors.PkError) -> Loss:
    gone = isinstance(cause, errors.UnknownTopicId)
    words = (
        f"topic re-created or deleted: {one.topic}"
        if gone
        else (f"{one.topic}-{one.partition} [{one.start}, {one.end}) is gone: {cause.message}")
    )
    return Loss(gone, words)
