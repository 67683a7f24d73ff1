"""Reads cold offsets straight from the Parquet files of the topic's Delta table.

The driver takes one version of the table and cuts the cold range into tasks, each with the list of
files that may hold its records (ranges.cold_tasks).  An executor reads the row groups that may hold
its offsets, filters them and sorts them.  A task's list may be stale: OPTIMIZE or retention
replaced a file and VACUUM deleted it.  The executor then plans the rest of its range again on the
newest version (rule T10).

pk's own files are sorted and do not overlap, so their rows are yielded as they are read.  After
another engine's Z-order, a row group may hold any offsets.  The range is then halved until its rows
fit `MERGE_BYTES`, and the rows are sorted.

tiering/row_groups reads and verifies row groups, as in the broker's cold reads.  A row group that
fails is read once more as plain bytes.  This distinguishes a failing store from a damaged file, and
the two raise different errors.

Invariants
  Y1  All rows below the position were yielded once, in offset order; a new plan continues at the
      position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa

from pk import errors
from pk.sparkconnector import rows, table_files, table_versions
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.opened_files import (
    FailedTierFile,
    OpenTierFile,
    TableFile,
    TaskFiles,
    open_file,
    read_part,
)
from pk.sparkconnector.ranges import TierFile, within
from pk.sparkconnector.rows import Found, Shape
from pk.tiering import row_groups
from pk.tiering.damage import damaged
from pk.tiering.footers import Group, Part, UnreadableFile
from pk.tiering.layout import FILE_SCHEMA

#: The most uncompressed bytes that a merge holds.
MERGE_BYTES = 64 << 20
#: Row groups are read together up to this size.
READ_BYTES = 8 << 20
#: Plans tried without progress before a damaged file is an error.
REPLANS_MAX = 3
_FILE_TYPES = {
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_type": pa.int32(),
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": rows.HEADERS,
}


@dataclass(slots=True, frozen=True)
class ColdRange:
    """The place of a task's cold records: the table and the files that were live at planning."""

    uri: str
    storage_options: dict[str, str]
    files: tuple[TierFile, ...] = field(default=())
    version: int = -1  #: the version that a read as of a version pins; -1 = newer ones will do


class _RowGroup(NamedTuple):
    """A row group that may hold offsets of the range."""

    file: TierFile
    group: Group

    @property
    def least(self) -> int:
        return self.group.min_offset

    @property
    def most(self) -> int:
        return self.group.max_offset


def whole_file(
    uri: str,
    source: Any,
    root: str,
    file: TierFile,
    partition: int,
    schema: pa.Schema = FILE_SCHEMA,
) -> Iterator[pa.RecordBatch]:
    """Yield every row of a file, as it is stored, in the columns of `schema`, by row group.

    Raises `DamagedTierFile`, `TierUnavailable`.
    """
    try:
        opened = open_file(source, root, file)
    except FailedTierFile as cause:
        raise damaged(uri, file, partition, str(cause)) from cause
    try:
        for group in opened.footer.groups:
            try:
                yield _read_columns(opened, group, schema)
            except (FailedTierFile, UnreadableFile) as cause:
                raise damaged(uri, file, partition, str(cause)) from cause
            except (OSError, pa.ArrowException) as cause:
                raise errors.TierUnavailable(f"{file.path}: {cause}") from cause
    finally:
        opened.handle.close()


def _read_columns(opened: OpenTierFile, group: Group, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of a row group; of its bytes only the columns of `schema` are read."""
    if schema is FILE_SCHEMA:
        data = read_part(opened.handle, Part(group.start, group.size))
        return row_groups.read_group(opened.footer, group, data, opened.handle.size())
    try:
        return row_groups.read_rows(opened.handle, opened.footer, [group], schema, buffered=True)
    except UnreadableFile:
        return _read_again(opened, [group], schema)


# -- reading --------------------------------------------------------------------------------------


def _fail(rest: Range, error: errors.DamagedTierFile) -> Iterator[Found]:
    """Raise the error: there is no other place to read from."""
    raise error


def scan(
    one: Range,
    cold: ColdRange,
    shape: Shape,
    lost: Callable[[Range], None],
    elsewhere: Callable[[Range, errors.DamagedTierFile], Iterator[Found]] = _fail,
    task_files: TaskFiles | None = None,
) -> Iterator[Found]:
    """Yield the rows of `one` in offset order; plan again when a file is missing (Y1).

    Calls `lost` with each range that the table lost since planning, before it reads the rest.
    Calls `elsewhere` for the rest of the range when a file of the newest version is damaged.
    task_files: the files of the task, of which this range is a part; None = the range is all of it
    """
    if task_files is None:
        with closing(TaskFiles(files_of([(one, cold)]))) as own:
            yield from scan(one, cold, shape, lost, elsewhere, own)
        return
    files: Sequence[TierFile] = cold.files
    position = one.start
    replans = 0
    while True:
        try:
            rest = one._replace(start=position)
            for found, done in _scan(rest, _Files(task_files, cold), files, shape):
                yield rows.from_tier(found, shape, one)
                position, replans = done, 0
            return
        except FailedTierFile as cause:
            if cold.version >= 0:
                raise _unreadable(one, cold, cause) from cause
            replans += 1
            now = table_files.list_files(
                cold.uri, cold.storage_options, one.topic_id, [one.partition]
            )
            files, start = now.files[one.partition], min(now.starts[one.partition], one.end)
            if replans > REPLANS_MAX or cause.file.path in {file.path for file in files}:
                rest = one._replace(start=position)
                yield from elsewhere(rest, damaged(cold.uri, cause.file, one.partition, str(cause)))
                return
            if start > position:
                lost(one._replace(start=position, end=start))
                position = start
            for part in within(now.missing.get(one.partition, ()), one._replace(start=position)):
                lost(part)


def _unreadable(one: Range, cold: ColdRange, cause: FailedTierFile) -> errors.PkError:
    """Return the error for a file of a pinned version: no newer version may replace it."""
    if not cause.missing:
        return damaged(cold.uri, cause.file, one.partition, str(cause))
    return table_versions.lost(
        cold.uri, cold.storage_options, cold.version, cause.file, [one.partition], one.topic_id
    )


def files_of(ranges: Iterable[tuple[Range, ColdRange]]) -> Iterator[TableFile]:
    """Yield the files of some ranges in the order in which `scan` reads them."""
    for one, cold in ranges:
        for together in _overlapping(cold.files, one):
            for file in together:
                yield TableFile(cold.uri, cold.storage_options, file)


def _scan(
    one: Range, opened: _Files, files: Sequence[TierFile], shape: Shape
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield `(rows, position)` over one plan; all rows below the position have been yielded."""
    names = rows.tier_columns(shape)
    try:
        for together in _overlapping(files, one):
            groups = [group for file in together for group in _groups(opened.get(file), one)]
            groups.sort(key=lambda group: (group.least, group.most))
            yield from _merge(one, groups, opened, names)
    finally:
        opened.close()


def _overlapping(files: Sequence[TierFile], one: Range) -> Iterator[list[TierFile]]:
    """Yield the files of the range in order, in lists of files whose offsets overlap."""
    together: list[TierFile] = []
    most = -1
    for file in sorted(files, key=lambda f: (f.min_offset, f.max_offset, f.path)):
        if file.min_offset >= one.end or file.max_offset < one.start:
            continue
        if together and file.min_offset > most:
            yield together
            together = []
        together.append(file)
        most = max(most, file.max_offset)
    if together:
        yield together


class _Files:
    """The open Parquet files of one scan, at most eight."""

    def __init__(self, task_files: TaskFiles, cold: ColdRange) -> None:
        self._task_files = task_files
        self._cold = cold
        self._open: dict[str, OpenTierFile] = {}

    def get(self, file: TierFile) -> OpenTierFile:
        found = self._open.get(file.path)
        if found is None:
            if len(self._open) >= 8:
                self._open.pop(next(iter(self._open))).handle.close()
            cold = self._cold
            place = TableFile(cold.uri, cold.storage_options, file)
            found = self._open[file.path] = self._task_files.get(place)
        return found

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].handle.close()


def _groups(opened: OpenTierFile, one: Range) -> list[_RowGroup]:
    return [
        _RowGroup(opened.file, each)
        for each in opened.footer.groups
        if each.min_offset < one.end and each.max_offset >= one.start
    ]


def _merge(
    one: Range, groups: Sequence[_RowGroup], files: _Files, names: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield the rows of the groups in order; overlapping groups are merged within MERGE_BYTES."""
    for run in _runs(groups):
        start, end = max(one.start, run[0].least), min(one.end, max(g.most for g in run) + 1)
        part = one._replace(start=start, end=end)
        if len(run) == 1 or _disjoint(run):
            yield from _sequential(part, run, files, names)
        else:
            yield from _sorted(part, run, files, names)


def _runs(groups: Sequence[_RowGroup]) -> Iterator[list[_RowGroup]]:
    """Yield lists of groups to read together.

    Groups whose offsets overlap form one list.  Disjoint neighbours of one file form a list of at
    most READ_BYTES.
    """
    run: list[_RowGroup] = []
    most = size = 0
    overlapping = False
    for group in groups:
        overlaps = bool(run) and group.least <= most
        full = bool(run) and (size + group.group.decoded > READ_BYTES or group.file != run[-1].file)
        if not overlaps and (overlapping or full):
            yield run
            run, size, overlapping = [], 0, False
        overlapping = overlapping or overlaps
        run.append(group)
        most = max(most, group.most) if len(run) > 1 else group.most
        size += group.group.decoded
    if run:
        yield run


def _disjoint(run: Sequence[_RowGroup]) -> bool:
    return all(a.most < b.least for a, b in pairwise(run))


def _sequential(
    part: Range, run: Sequence[_RowGroup], files: _Files, names: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Read disjoint groups of one file together."""
    found = _read(files.get(run[0].file), [each.group for each in run], names)
    yield from _batches(row_groups.in_offset_order(found, part.start, part.end))


def _sorted(
    part: Range, run: Sequence[_RowGroup], files: _Files, names: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Merge overlapping groups; halve the range until its rows fit MERGE_BYTES."""
    kept = sum(_share(group, part) for group in run)
    if kept > MERGE_BYTES and part.size > 1:
        middle = part.start + part.size // 2
        for half in (part._replace(end=middle), part._replace(start=middle)):
            inside = [g for g in run if g.least < half.end and g.most >= half.start]
            yield from _sorted(half, inside, files, names)
        return
    pieces = (_read(files.get(each.file), [each.group], names) for each in run)
    found = row_groups.merge(pieces, part.start, part.end)
    if found is not None:
        yield from _batches(found)


def _batches(found: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Cut the rows to Spark's batch size; yield with each batch the offset after its last row."""
    for at in range(0, found.num_rows, rows.BATCH_ROWS_MOST):
        batch = found.slice(at, rows.BATCH_ROWS_MOST)
        yield batch, int(batch.column("offset")[-1].as_py()) + 1


def _share(group: _RowGroup, part: Range) -> int:
    """Estimate the bytes of the group that lie in `part`."""
    span = group.most - group.least + 1
    inside = min(part.end, group.most + 1) - max(part.start, group.least)
    return max(0, group.group.decoded * inside // span)


def _read(opened: OpenTierFile, groups: Sequence[Group], names: Sequence[str]) -> pa.RecordBatch:
    wanted = pa.schema([pa.field(name, _FILE_TYPES[name]) for name in names])
    try:
        return row_groups.read_rows(opened.handle, opened.footer, groups, wanted, buffered=True)
    except UnreadableFile:
        return _read_again(opened, groups, wanted)


def _read_again(opened: OpenTierFile, groups: Sequence[Group], wanted: pa.Schema) -> pa.RecordBatch:
    """Read the groups from their plain bytes.  Raises `FailedTierFile`, `TierUnavailable`."""
    pieces = []
    for group in groups:
        try:
            data = read_part(opened.handle, Part(group.start, group.size))
        except (OSError, pa.ArrowException) as cause:
            raise errors.TierUnavailable(f"{opened.file.path}: {cause}") from cause
        try:
            size = opened.file.size
            pieces.append(row_groups.read_group(opened.footer, group, data, size, wanted))
        except UnreadableFile as cause:
            raise FailedTierFile(opened.file, str(cause)) from cause
    return pa.concat_batches(pieces)
