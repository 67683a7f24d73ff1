"""Lists the live files of a version of a topic's Delta table, on the driver.

deltalake reads the table's log.  What it returns is compared with the checksums that pk's commits
carry, and the rows with the partitions' counters.

Invariants
  K1  A table with features that pk does not support, such as deletion vectors, is refused before
      any of it is read (T8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from pk import errors
from pk.sparkconnector.ranges import Spans, TierFile
from pk.sparkconnector.table_store import file_system, with_credentials

if TYPE_CHECKING:
    from pk.tiering.table import Snapshot


class TableFiles(NamedTuple):
    """The files of one version of a table, by partition."""

    files: dict[int, list[TierFile]]
    #: offset where the partition's rows begin; retention deleted those below (T9)
    starts: dict[int, int]
    missing: dict[int, Spans]  #: offsets whose rows another engine deleted (T17)
    ends: dict[int, int]  #: offset where the partition's rows end


def list_files(
    uri: str,
    storage_options: Mapping[str, str],
    topic_id: str,
    partitions: Sequence[int],
    version: int | None = None,
) -> TableFiles:
    """Return the live files of a version of the table, None = the newest.

    Raises `TierUnavailable`, or `TierTableChanged` for a table that pk must not read (K1).
    """
    from pk.tiering import accounting

    snapshot = load_snapshot(uri, storage_options, topic_id, partitions, version)
    accounting.check_rows(uri, snapshot)
    found: dict[int, list[TierFile]] = {partition: [] for partition in partitions}
    for file in snapshot.files.values():
        if file.partition in found:
            found[file.partition].append(
                TierFile(file.path, file.min_offset, file.max_offset, file.size, file.rows)
            )
    starts = {partition: each.start for partition, each in snapshot.counters.items()}
    missing = accounting.missing_of(snapshot, partitions)
    ends = {partition: each.end for partition, each in snapshot.counters.items()}
    return TableFiles(
        found, starts, {partition: each.ranges for partition, each in missing.items()}, ends
    )


def ends_of(
    uri: str,
    storage_options: Mapping[str, str],
    topic_id: str,
    partitions: Sequence[int],
    version: int,
) -> dict[int, int]:
    """Return where the rows of each partition end in a version; raises as `list_files`."""
    from pk.tiering.delta_actions import counters_of

    with _table(uri, storage_options, version) as table:
        counters = counters_of(uri, table, with_credentials(storage_options), topic_id, partitions)
    return {partition: each.end for partition, each in counters.items()}


def load_snapshot(
    uri: str,
    storage_options: Mapping[str, str],
    topic_id: str,
    partitions: Sequence[int],
    version: int | None = None,
) -> Snapshot:
    """Return a version of the table, None = the newest, compared with the checksums of its
    commits.

    Raises `TierUnavailable`, or `TierTableChanged` for a table that pk must not read (K1).
    """
    from pk.tiering import log_check
    from pk.tiering.delta_actions import counters_of, files_of
    from pk.tiering.table import Snapshot

    with _table(uri, storage_options, version) as table:
        files = files_of(pa.table(table.get_add_actions(flatten=True)))
        counters = counters_of(uri, table, with_credentials(storage_options), topic_id, partitions)
        log_check.compare(uri, table.version(), files, _commits(uri, storage_options))
        return Snapshot(table.version(), str(table.metadata().id), files, counters)


def null_values(uri: str, storage_options: Mapping[str, str], version: int) -> dict[str, int]:
    """Return how many values of each file of a version are null, as the table's log states it.

    Files of which it states nothing are missing.  Raises `TierUnavailable`, `TierTableChanged`.
    """
    from pk.tiering.delta_actions import null_values_of

    with _table(uri, storage_options, version) as table:
        return null_values_of(pa.table(table.get_add_actions(flatten=True)))


def _commits(uri: str, storage_options: Mapping[str, str]) -> Callable[[int], bytes | None]:
    """Return a function that reads a commit's JSON by version; None if the log no longer has it."""
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
def _table(
    uri: str, storage_options: Mapping[str, str], version: int | None = None
) -> Iterator[Any]:
    """Open a version of the table, None = the newest; raises the errors of `list_files`."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        options = with_credentials(storage_options) or None
        table = DeltaTable(uri, version=version, storage_options=options)
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
    """Check that the table has the one protocol version that pk writes (K1).

    Raises `TierTableChanged` otherwise.
    """
    from pk.tiering.table import TableProtocol

    found = table.protocol()
    features = {*(found.reader_features or ()), *(found.writer_features or ())}
    TableProtocol(
        found.min_reader_version, found.min_writer_version, tuple(sorted(features))
    ).check(uri)
