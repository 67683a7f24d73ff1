"""Translates Delta's actions and properties to and from pk's classes, and deltalake's errors to
pk's.

The stateless parts of `delta.py`: the actions of a commit, the facts that a handle states about its
table, and the check of what pk accepts (rule T8).
"""

from __future__ import annotations

import functools
import itertools
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from pk import errors
from pk.tiering import layout, log_check
from pk.tiering.app_transactions import transaction_versions
from pk.tiering.data_files import OFFSET_MAX, DataFile, NewFile, by_offset
from pk.tiering.layout import PARTITION_COLUMN, TABLE_SCHEMA, PartitionCounters, app_id
from pk.tiering.live_files import LiveFiles
from pk.tiering.store_errors import error_text
from pk.tiering.table import CommitConflict, TableProtocol

_SCHEME = re.compile("[a-zA-Z][a-zA-Z0-9+.-]*:")
#: Files that are made at once when a version is read.
FILES_AT_ONCE = 4_096
_COUNTER_NAMES = (*layout.COUNTERS, layout.COUNTERS_CHECK, layout.VERSION_NAME)


def add_action(new: NewFile, stats: str) -> AddAction:
    """Returns the add action of a file."""
    file = new.file
    return AddAction(
        log_check.quoted(file.path),
        file.size,
        {PARTITION_COLUMN: str(file.partition)},
        new.modified_ms,
        new.data_change,
        stats,
    )


def files_of(actions: pa.Table) -> LiveFiles:
    """Returns the live files from deltalake's flattened add actions; missing statistics become
    "anything".  Raises `TierTableChanged` for a path that leads out of the table."""
    table = pa.table(
        {
            "path": actions.column("path"),
            "partition": _numbers(actions, f"partition.{PARTITION_COLUMN}", 0),
            "min_offset": _numbers(actions, "min.offset", 0),
            "max_offset": _numbers(actions, "max.offset", OFFSET_MAX),
            "min_timestamp_ms": _numbers(actions, "min.timestamp", -(2**62)),
            "max_timestamp_ms": _numbers(actions, "max.timestamp", 2**62),
            "rows": _numbers(actions, "num_records", 0),
            "size": _numbers(actions, "size_bytes", 0),
            "stats": _have_stats(actions),
        }
    )
    if pc.count_distinct(table["path"]).as_py() < table.num_rows:  # a damaged log
        return LiveFiles.of(_files(table, np.arange(table.num_rows)))
    keys = [table[name].to_numpy() for name in ("max_offset", "min_offset", "partition")]
    files = _files(table, np.lexsort(keys))
    same = itertools.groupby(files, lambda file: (file.partition, *by_offset(file)[:2]))
    return LiveFiles.ordered(file for _, some in same for file in sorted(some, key=by_offset))


def _files(table: pa.Table, order: npt.NDArray[np.int64]) -> Iterator[DataFile]:
    """Returns the rows of a table as files; makes few of them at once, for they are large."""
    for at in range(0, len(order), FILES_AT_ONCE):
        some = table.take(order[at : at + FILES_AT_ONCE])
        for path, *facts in zip(*(column.to_pylist() for column in some.columns), strict=True):
            yield DataFile(_relative(path), *facts)


def _numbers(actions: pa.Table, name: str, default: int) -> pa.ChunkedArray | pa.Array:
    if name not in actions.column_names:
        return pa.repeat(pa.scalar(default, pa.int64()), actions.num_rows)
    values = actions.column(name)
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("ms", tz="UTC"), safe=False)
    return pc.fill_null(values.cast(pa.int64()), default)


def null_values_of(actions: pa.Table) -> dict[str, int]:
    """Returns how many values of each file are null; files without this statistic are missing."""
    if "null_count.value" not in actions.column_names:
        return {}
    paths, counts = (actions.column(n).to_pylist() for n in ("path", "null_count.value"))
    found = zip(paths, counts, strict=True)
    return {_relative(path): int(count) for path, count in found if count is not None}


def _relative(quoted: str) -> str:
    """Returns the path of a file, which is relative to its table (rule T8).

    A table may name files elsewhere, for example after a shallow clone.  Readers of pk would look
    for them inside the table.
    """
    path = urllib.parse.unquote(quoted)
    if path.startswith("/") or _SCHEME.match(path) or ".." in path.split("/"):
        raise errors.TierTableChanged(
            f"the table names the file {path}, which is not inside it: pk reads tables whose paths "
            "are relative"
        )
    return path


def _have_stats(actions: pa.Table) -> pa.ChunkedArray | pa.Array:
    """Returns which files have the statistics by which rows are counted and found."""
    wanted = ("num_records", "min.offset", "max.offset")
    if not set(wanted) <= set(actions.column_names):
        return pa.repeat(pa.scalar(False), actions.num_rows)
    return functools.reduce(pc.and_, [actions.column(name).is_valid() for name in wanted])


def protocol_of(handle: DeltaTable) -> TableProtocol:
    protocol = handle.protocol()
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    return TableProtocol(
        protocol.min_reader_version, protocol.min_writer_version, tuple(sorted(features))
    )


def counter_apps(topic_id: str, partitions: Sequence[int]) -> list[str]:
    """Returns the application ids of the counters of `partitions`."""
    return [app_id(topic_id, each, name) for each in partitions for name in _COUNTER_NAMES]


def counters_of(
    uri: str,
    handle: DeltaTable,
    options: Mapping[str, str] | None,
    topic_id: str,
    partitions: Sequence[int],
) -> dict[int, PartitionCounters]:
    """Returns the counters of `partitions` in the version of `handle`, as `counters_from`.

    options: the storage options with which the table was opened
    """
    found = transaction_versions(handle, options, counter_apps(topic_id, partitions))
    return counters_from(uri, handle.version(), topic_id, partitions, found)


def counters_from(
    uri: str,
    version: int,
    topic_id: str,
    partitions: Sequence[int],
    transactions: Mapping[str, int],
) -> dict[int, PartitionCounters]:
    """Returns the counters of `partitions` (rule T2).  Raises `TierTableChanged` if they are
    damaged, `NewerFormat` if a newer build wrote them.

    transactions: the transaction versions of `counter_apps` that the table has
    """
    found: dict[int, PartitionCounters] = {}
    for partition in partitions:
        values = {
            name: transactions.get(app_id(topic_id, partition, name)) for name in _COUNTER_NAMES
        }
        check = values.pop(layout.COUNTERS_CHECK)
        layout.check_version(uri, partition, values.pop(layout.VERSION_NAME))
        known = {name: value for name, value in values.items() if value is not None}
        found[partition] = PartitionCounters(**known)
        log_check.check_counters(uri, version, partition, found[partition], check)
    return found


def check_columns(uri: str, handle: DeltaTable) -> None:
    """Raises `TierTableChanged` unless pk's columns are there with their types (rule T10)."""
    partitioned = list(handle.metadata().partition_columns)
    found = {field.name: field.type for field in pa.schema(handle.schema().to_arrow())}
    problem = ""
    if partitioned != [PARTITION_COLUMN]:
        problem = f"is partitioned by {partitioned}, not by {PARTITION_COLUMN}"
    for field in TABLE_SCHEMA:
        kind = found.get(field.name)
        if kind is None:
            problem = f"has no column {field.name}"
        elif not pa.types.is_nested(field.type) and pa.field("x", kind).type != field.type:
            problem = f"has column {field.name} as {kind}, not as {field.type}"
    if problem:
        raise errors.TierTableChanged(
            f"{uri}: the table {problem}; restore its schema{layout.OR_DAMAGED}", uri=uri
        )


def check_properties(uri: str, handle: DeltaTable, topic_id: str) -> None:
    """Raises `TierTableChanged` unless the table has the properties that pk set (rule T8)."""
    found = handle.metadata().configuration
    wanted = {**layout.TABLE_PROPERTIES, layout.TOPIC_ID_PROPERTY: topic_id}
    problem = ""
    for name, value in wanted.items():
        if found.get(name) != value:
            problem = (
                f"property {name} is {found.get(name)!r}, pk set {value!r}: set it back with ALTER "
                "TABLE … SET TBLPROPERTIES"
            )
    for name in layout.REFUSED_PROPERTIES:
        if name in found:
            problem = (
                f"property {name} is set: pk's counters would expire; remove it with ALTER TABLE "
                "… UNSET TBLPROPERTIES"
            )
    if problem:
        raise errors.TierTableChanged(f"{uri}: the table's {problem}{layout.OR_DAMAGED}", uri=uri)


class LogUnreadable(errors.TierUnavailable):
    """deltalake could not read the table's log: the store did not answer, or the log is damaged."""

    code = -1  # never leaves this process


def is_panic(cause: BaseException) -> bool:
    """Returns whether the error is a Rust panic, with which deltalake reacts to unforeseen damage.
    A panic is no `Exception`."""
    return type(cause).__name__ == "PanicException"


_DENIED = (
    "permission denied",
    "access denied",
    "accessdenied",
    "read-only file system",
    "forbidden",
)


def translated(uri: str, doing: str, cause: BaseException) -> errors.PkError:
    """Returns deltalake's error as an error of pk.

    An unknown error becomes `TierUnavailable`: the caller loads the table again and looks for its
    change (T5).
    """
    if isinstance(cause, errors.PkError):
        return cause
    text, low = error_text(str(cause)), str(cause).lower()
    if any(word in low for word in _DENIED):
        return errors.StoreRefused(f"{uri}: {doing}: {text}", uri=uri)
    if "nosuchbucket" in low:
        return errors.StoreRefused(f"{uri}: {doing}: the bucket does not exist: create it", uri=uri)
    if "unsupported table features" in low or "table has set these" in low:
        return errors.TierTableChanged(
            f"{uri}: {doing}: {text}; drop the feature{layout.OR_DAMAGED}", uri=uri
        )
    if isinstance(cause, CommitFailedError):
        return CommitConflict(f"{uri}: {doing}: {text}")
    if isinstance(cause, DeltaError | OSError | TimeoutError):
        return errors.TierUnavailable(f"{uri}: {doing}: {text}", uri=uri)
    return errors.TierUnavailable(f"{uri}: {doing}: {cause!r}", uri=uri)
