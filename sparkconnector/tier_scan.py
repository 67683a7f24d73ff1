"""Cold offsets straight from the table's Parquet files: the driver lists, executors read.

The driver takes one version of the topic's Delta table and cuts the cold range into tasks with file
hints (ranges.cold_tasks).  An executor reads the row groups that may hold its offsets, filters and
orders them. A hint may be stale: OPTIMIZE or retention replaced the file and VACUUM deleted it.
Then the rest of the range is planned anew on the newest version (rule T10).

pk's own files are sorted and disjoint, so rows come out as they are read.  After an outside Z-order
a row group may hold any offsets; then the range is narrowed until what it keeps fits `MERGE_BYTES`,
and sorted.

Footers are compared with the checksum in their file's name before Arrow parses them, pages with
their own (rule T10).  What Arrow refuses is read once more, as plain bytes: so a store that fails
and a file that is damaged are two errors.

Invariants
  Y1  everything below the position was handed out, once, in offset order; a re-plan continues
      there.
  Y2  a table with features pk does not know, deletion vectors above all, is refused, never half
      read (T8).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pk import errors
from pk.sparkconnector import rows
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.ranges import Spans, TierFile, within
from pk.sparkconnector.rows import Shape
from pk.tiering import footers
from pk.tiering.damage import damaged
from pk.tiering.footers import Footer, Group, UnreadableFile, check_rows

#: What a merge may hold, uncompressed.
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
    """A task's cold part: what to read and where it was when it was planned."""

    uri: str
    storage_options: dict[str, str]
    files: tuple[TierFile, ...] = field(default=())


class _DamagedFile(Exception):
    """A file of the plan is gone, or its bytes are not those that were written."""

    def __init__(self, file: TierFile, why: str) -> None:
        super().__init__(why)
        self.file = file


class _Group(NamedTuple):
    """One row group that may hold offsets of the range."""

    file: TierFile
    number: int
    least: int
    most: int
    size: int


class _Open(NamedTuple):
    """A file that is being read."""

    file: TierFile
    handle: Any  #: for its bytes
    parquet: Any
    footer: Footer


# -- the table ------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """One version of a table, by partition."""

    files: dict[int, list[TierFile]]
    starts: dict[int, int]  #: where its rows begin: what lay below was deleted (T9)
    missing: dict[int, Spans]  #: offsets whose rows another engine took away (T17)


def list_files(
    uri: str, storage_options: Mapping[str, str], topic_id: str, partitions: Sequence[int]
) -> Listed:
    """The live files of the newest version.

    Raises `TierUnavailable`, or `TierTableChanged` for a table pk must not read (Y2).
    """
    from pk.tiering import accounting, log_check
    from pk.tiering.delta_actions import counters_of, files_of
    from pk.tiering.table import Snapshot

    with _table(uri, storage_options) as table:
        files = files_of(pa.table(table.get_add_actions(flatten=True)))
        counters = counters_of(uri, table, topic_id, partitions)
        log_check.compare(uri, table.version(), files, _commits(uri, storage_options))
        snapshot = Snapshot(table.version(), str(table.metadata().id), files, counters)
    accounting.check_rows(uri, snapshot)
    found: dict[int, list[TierFile]] = {partition: [] for partition in partitions}
    for file in files.values():
        if file.partition in found:
            found[file.partition].append(
                TierFile(file.path, file.min_offset, file.max_offset, file.size, file.rows)
            )
    starts = {partition: each.start for partition, each in counters.items()}
    missing = accounting.missing_of(snapshot, partitions)
    return Listed(found, starts, {partition: each.ranges for partition, each in missing.items()})


def _commits(uri: str, storage_options: Mapping[str, str]) -> Callable[[int], bytes | None]:
    """Reads a commit's JSON by version; None if the log does not have it any more."""
    from pk.tiering.layout import commit_file

    source, root = file_system(uri, storage_options)

    def read(version: int) -> bytes | None:
        try:
            with source.open_input_stream(f"{root}/{commit_file(version)}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    return read


@contextmanager
def _table(uri: str, storage_options: Mapping[str, str]) -> Iterator[Any]:
    """The newest version of the table; raises what `list_files` raises."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        table = DeltaTable(uri, storage_options=with_credentials(storage_options) or None)
        check_protocol(table, uri)
        yield table
    except TableNotFoundError as cause:
        raise errors.TierTableChanged(f"{uri}: there is no table (any more): {cause}") from cause
    except (DeltaError, OSError) as cause:
        raise errors.TierUnavailable(f"{uri}: {cause}") from cause
    except BaseException as cause:
        if type(cause).__name__ != "PanicException":
            raise
        raise errors.TierTableChanged(f"{uri}: the table's log does not parse: {cause}") from cause


def check_protocol(table: Any, uri: str) -> None:
    """Y2: pk reads the one protocol it writes.  Raises `TierTableChanged`."""
    from pk.tiering.table import TableProtocol

    found = table.protocol()
    features = {*(found.reader_features or ()), *(found.writer_features or ())}
    TableProtocol(
        found.min_reader_version, found.min_writer_version, tuple(sorted(features))
    ).check(uri)


def with_credentials(storage_options: Mapping[str, str]) -> dict[str, str]:
    """The server tells no secrets: the store's own variables count, else a pk server's."""
    found = dict(storage_options)
    if found and "AWS_ACCESS_KEY_ID" not in {*found, *os.environ}:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            value = os.environ.get(f"PK_TIER_{name}")
            if value:
                found[f"AWS_{name}"] = value
    return found


def file_system(uri: str, storage_options: Mapping[str, str]) -> tuple[Any, str]:
    """An Arrow file system and the table's root in it.  Raises `StoreRefused` for other schemes."""
    from pyarrow import fs

    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return fs.LocalFileSystem(), (unquote(parts.path) if parts.scheme else uri).rstrip("/")
    if parts.scheme not in ("s3", "s3a"):
        raise errors.StoreRefused(
            f"{uri}: {parts.scheme}:// is not yet tried; file:// and s3:// are"
        )
    options = {name.lower(): value for name, value in with_credentials(storage_options).items()}
    arguments: dict[str, Any] = {"connect_timeout": 10, "request_timeout": 30}
    endpoint = options.get("aws_endpoint_url") or options.get("endpoint_url") or ""
    if endpoint:
        target = urlsplit(endpoint)
        arguments |= {"endpoint_override": target.netloc, "scheme": target.scheme or "http"}
    for ours, theirs in (
        ("access_key", "aws_access_key_id"),
        ("secret_key", "aws_secret_access_key"),
        ("session_token", "aws_session_token"),
        ("region", "aws_region"),
    ):
        if options.get(theirs):
            arguments[ours] = options[theirs]
    return fs.S3FileSystem(**arguments), f"{parts.netloc}{unquote(parts.path)}".rstrip("/")


# -- reading --------------------------------------------------------------------------------------


def _fail(rest: Range, error: errors.DamagedTierFile) -> Iterator[pa.RecordBatch]:
    """There is nowhere else to read from."""
    raise error


def scan(
    one: Range,
    cold: ColdRange,
    shape: Shape,
    lost: Callable[[Range], None],
    elsewhere: Callable[[Range, errors.DamagedTierFile], Iterator[pa.RecordBatch]] = _fail,
) -> Iterator[pa.RecordBatch]:
    """The rows of `one` in offset order, re-planned when a file is gone (Y1).

    `lost` is told what the table gave up meanwhile, before what is left of it is read.
    `elsewhere` reads what is left when a file of the newest version is damaged.
    """
    source, root = file_system(cold.uri, cold.storage_options)
    files: Sequence[TierFile] = cold.files
    position = one.start
    replans = 0
    while True:
        try:
            rest = one._replace(start=position)
            for found, done in _scan(rest, files, source, root, shape):
                yield rows.from_tier(found, shape)
                position, replans = done, 0
            return
        except _DamagedFile as cause:
            replans += 1
            now = list_files(cold.uri, cold.storage_options, one.topic_id, [one.partition])
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


def _scan(
    one: Range, files: Sequence[TierFile], source: Any, root: str, shape: Shape
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """`(rows, everything below is out)`, over one plan."""
    opened = _Files(source, root)
    names = rows.tier_columns(shape)
    try:
        for together in _overlapping(files, one):
            groups = [group for file in together for group in _groups(opened.get(file), one)]
            groups.sort(key=lambda group: (group.least, group.most))
            yield from _merge(one, groups, opened, names)
    finally:
        opened.close()


def _overlapping(files: Sequence[TierFile], one: Range) -> Iterator[list[TierFile]]:
    """Files of the range in order; those whose offsets overlap come together."""
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
    """Open Parquet files of one scan: the few that are in use."""

    def __init__(self, source: Any, root: str) -> None:
        self._source = source
        self._root = root
        self._open: dict[str, _Open] = {}

    def get(self, file: TierFile) -> _Open:
        found = self._open.get(file.path)
        if found is None:
            if len(self._open) >= 8:
                self._open.pop(next(iter(self._open))).parquet.close(force=True)
            found = self._open[file.path] = _open(self._source, self._root, file)
        return found

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].parquet.close(force=True)


def _open(source: Any, root: str, file: TierFile) -> _Open:
    from pyarrow import parquet

    path = file.path if "://" in file.path else f"{root}/{file.path}"
    try:
        handle = source.open_input_file(path)
        found = handle.size()
        size = min(found, footers.TAIL_BYTES)
        tail = handle.read_at(size, found - size)
        needed = footers.footer_size(tail)
        if size < needed <= found:
            tail = handle.read_at(needed, found - needed)
    except FileNotFoundError:
        raise _DamagedFile(file, "it is not in the store") from None
    except footers.UnreadableFile as cause:
        raise _DamagedFile(file, str(cause)) from cause
    except (OSError, pa.ArrowException) as cause:
        if "does not exist" in str(cause) or "NoSuchKey" in str(cause):
            raise _DamagedFile(file, "it is not in the store") from cause
        raise errors.TierUnavailable(f"{path}: {cause}") from cause
    try:
        footer = footers.open_footer(file, tail)
    except footers.UnreadableFile as cause:
        raise _DamagedFile(file, str(cause)) from cause
    opened = parquet.ParquetFile(
        handle, metadata=footer.metadata, pre_buffer=True, page_checksum_verification=True
    )
    return _Open(file, handle, opened, footer)


def _groups(opened: _Open, one: Range) -> list[_Group]:
    return [
        _Group(opened.file, each.number, each.min_offset, each.max_offset, each.decoded)
        for each in opened.footer.groups
        if each.min_offset < one.end and each.max_offset >= one.start
    ]


def _merge(
    one: Range, groups: Sequence[_Group], files: _Files, names: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Groups in order; runs that overlap are merged within MERGE_BYTES (module docstring)."""
    for run in _runs(groups):
        start, end = max(one.start, run[0].least), min(one.end, max(g.most for g in run) + 1)
        part = one._replace(start=start, end=end)
        if len(run) == 1 or _disjoint(run):
            yield from _sequential(part, run, files, names)
        else:
            yield from _sorted(part, run, files, names)


def _runs(groups: Sequence[_Group]) -> Iterator[list[_Group]]:
    """Groups whose offsets overlap come together; so do disjoint neighbours, up to READ_BYTES."""
    run: list[_Group] = []
    most = size = 0
    overlapping = False
    for group in groups:
        overlaps = bool(run) and group.least <= most
        full = bool(run) and (size + group.size > READ_BYTES or group.file != run[-1].file)
        if not overlaps and (overlapping or full):
            yield run
            run, size, overlapping = [], 0, False
        overlapping = overlapping or overlaps
        run.append(group)
        most = max(most, group.most) if len(run) > 1 else group.most
        size += group.size
    if run:
        yield run


def _disjoint(run: Sequence[_Group]) -> bool:
    return all(a.most < b.least for a, b in pairwise(run))


def _sequential(
    part: Range, run: Sequence[_Group], files: _Files, names: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Disjoint groups of one file, read at one go."""
    table = _read(files.get(run[0].file), [group.number for group in run], names)
    for batch in _ordered(_filtered(table, part), part).to_batches(rows.BATCH_ROWS_MOST):
        if batch.num_rows:
            yield batch, int(batch.column("offset")[-1].as_py()) + 1


def _sorted(
    part: Range, run: Sequence[_Group], files: _Files, names: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Scattered groups: narrowed until what is kept fits, then sorted."""
    kept = sum(_share(group, part) for group in run)
    if kept > MERGE_BYTES and part.size > 1:
        middle = part.start + part.size // 2
        for half in (part._replace(end=middle), part._replace(start=middle)):
            inside = [g for g in run if g.least < half.end and g.most >= half.start]
            yield from _sorted(half, inside, files, names)
        return
    pieces = [_filtered(_read(files.get(g.file), [g.number], names), part) for g in run]
    if pieces:
        table = _ordered(pa.concat_tables(pieces), part)
        for batch in table.combine_chunks().to_batches(rows.BATCH_ROWS_MOST):
            if batch.num_rows:
                yield batch, int(batch.column("offset")[-1].as_py()) + 1


def _share(group: _Group, part: Range) -> int:
    """Bytes of the group that probably lie in `part`."""
    span = group.most - group.least + 1
    inside = min(part.end, group.most + 1) - max(part.start, group.least)
    return max(0, group.size * inside // span)


def _read(opened: _Open, indexes: list[int], names: Sequence[str]) -> pa.Table:
    wanted = pa.schema([pa.field(name, _FILE_TYPES[name]) for name in names])
    groups = [opened.footer.groups[index] for index in indexes]
    try:
        table = opened.parquet.read_row_groups(indexes, columns=list(names))
        table = table.select(list(names))
        table = table if table.schema.equals(wanted) else table.cast(wanted)
        check_rows(table, groups)
    except (OSError, pa.ArrowException, ValueError, KeyError, UnreadableFile):
        return _read_again(opened, groups, wanted)
    return table


def _read_again(opened: _Open, groups: Sequence[Group], wanted: pa.Schema) -> pa.Table:
    """The groups from their plain bytes: what does not decode now is damaged."""
    from pk.tiering.parquet_parts import read_group

    pieces = []
    for group in groups:
        try:
            data = opened.handle.read_at(group.size, group.start)
        except (OSError, pa.ArrowException) as cause:
            raise errors.TierUnavailable(f"{opened.file.path}: {cause}") from cause
        try:
            pieces.append(read_group(opened.footer, group, data, opened.file.size, wanted))
        except UnreadableFile as cause:
            raise _DamagedFile(opened.file, str(cause)) from cause
    return pa.Table.from_batches(pieces, wanted)


def _filtered(table: pa.Table, part: Range) -> pa.Table:
    offsets = table.column("offset")
    bounds = pc.min_max(offsets).as_py()
    if bounds["min"] is None or (bounds["min"] >= part.start and bounds["max"] < part.end):
        return table
    return table.filter(pc.and_(pc.greater_equal(offsets, part.start), pc.less(offsets, part.end)))


def _ordered(table: pa.Table, part: Range) -> pa.Table:
    offsets = table.column("offset").to_numpy()
    if len(offsets) < 2 or bool(np.all(offsets[1:] > offsets[:-1])):
        return table
    return table.take(pa.array(np.argsort(offsets, kind="stable")))
