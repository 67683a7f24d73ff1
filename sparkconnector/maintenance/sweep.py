"""The job `sweep`: removes uploads that no version of a table names.  It needs no Spark.

    lease ─► the store's time ─► list the files ─► load the newest version and the log ─► delete

The listing comes before the load, so a file that was committed in between is named.  The lease
keeps other jobs from handing files over meanwhile.  The tier process sends a HEAD for each file
that replaces others before it commits it, so a job that slept for hours cannot name a deleted file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pk import errors
from pk.schedules import DONE
from pk.sparkconnector import table_store
from pk.sparkconnector.maintenance import sweep_plan, tables
from pk.sparkconnector.maintenance.sweep_plan import StoredFile
from pk.sparkconnector.maintenance.tables import TablePlace

if TYPE_CHECKING:
    from pk.client.maintenance_lease import MaintenanceLease

#: Default age of an upload that is removed.
OLDER_THAN_MS = 24 * 3_600_000
#: Directory below the table, hidden from readers, of the objects that show the store's time.
PROBES = "_pk_sweep"
LOG = "_delta_log"
THREADS = 16
#: Deletes between two looks at the lease.
DELETES = 100


@dataclass(slots=True, frozen=True)
class SweepReport:
    """The result of one run."""

    topic: str
    version: int  #: of the table that was compared
    listed_files: int
    removed_files: int
    removed_bytes: int

    @property
    def outcome(self) -> str:
        return DONE

    def summary(self) -> str:
        """Return the result as one line."""
        return (
            f"version {self.version}: {self.removed_files} of {self.listed_files} files removed, "
            f"{self.removed_bytes} bytes"
        )


def sweep(bootstrap: str, topic: str, *, older_than_ms: int = OLDER_THAN_MS) -> SweepReport:
    """Remove the uploads that no version of a topic's table names and that are old enough.

    older_than_ms: at least an hour

    Raises `LeaseHeld` if another job has the lease of the table, `InvalidRequest` if the topic has
    no table, `TierTableChanged` if its log is damaged, `TierUnavailable`.
    """
    from pk.client.maintenance_lease import MaintenanceLease

    if older_than_ms < sweep_plan.YOUNGEST_MS:
        raise errors.InvalidOption(
            f"a sweep removes nothing younger than an hour, not {older_than_ms} ms: the file of a "
            "hand-over that is under way is named by no version yet"
        )
    place, partitions = tables.place_of(bootstrap, topic)
    with MaintenanceLease(bootstrap, topic, "sweep") as lease:
        if lease.topic_id != place.topic_id:
            raise errors.UnknownTopicId(
                f"topic {topic} was deleted and created again: run it again"
            )
        return _sweep(place, partitions, lease, older_than_ms)


def _sweep(
    place: TablePlace, partitions: Sequence[int], lease: MaintenanceLease, older_than_ms: int
) -> SweepReport:
    source, root = table_store.file_system(place.uri, place.storage_options)
    try:
        now_ms = _store_time(source, root)
        listed = _listed(source, root)
        version = tables.newest(place, partitions).snapshot
        found = sweep_plan.candidates(listed, version.files, now_ms, older_than_ms)
        if found:  # the log is read only if it matters
            named = _named(source, root)
            found = sweep_plan.candidates(found, named, now_ms, older_than_ms)
        with ThreadPoolExecutor(THREADS) as pool:
            for at in range(0, len(found), DELETES):
                lease.check()
                some = [f"{root}/{each.path}" for each in found[at : at + DELETES]]
                list(pool.map(source.delete_file, some))
    except OSError as cause:
        raise errors.TierUnavailable(f"{place.uri}: {cause}") from cause
    size = sum(each.size for each in found)
    return SweepReport(place.topic, version.version, len(listed), len(found), size)


def _store_time(source: Any, root: str) -> int:
    """Return the time of the store's clock, in ms: that of an object written now."""
    directory = f"{root}/{PROBES}"
    source.create_dir(directory)
    path = f"{directory}/{os.urandom(8).hex()}"
    table_store.put_file(source, path, memoryview(b"pk"))
    try:
        return int(source.get_file_info(path).mtime_ns) // 1_000_000
    finally:
        source.delete_file(path)


def _listed(source: Any, root: str) -> list[StoredFile]:
    """Return the data files below the table."""
    from pyarrow import fs

    found = source.get_file_info(fs.FileSelector(root, recursive=True))
    return [
        StoredFile(each.path[len(root) + 1 :], each.size, int(each.mtime_ns) // 1_000_000)
        for each in found
        if each.is_file and not each.path[len(root) + 1 :].startswith("_")
    ]


def _named(source: Any, root: str) -> set[str]:
    """Return every path that the table's log names: its checkpoints, and all commits it still has.

    The log is listed before it is read.  A commit that is cleaned up meanwhile is older than the
    checkpoint that replaced it, which is in a later listing: then read again.
    """
    for _ in range(3):
        try:
            return _named_once(source, root)
        except FileNotFoundError:
            continue
    raise errors.TierUnavailable(f"{root}: the log was cleaned up during each of three attempts")


def _named_once(source: Any, root: str) -> set[str]:
    from pyarrow import fs

    entries = source.get_file_info(fs.FileSelector(f"{root}/{LOG}"))
    commits = [each.path for each in entries if each.path.endswith(".json")]
    checkpoints = [
        each.path
        for each in entries
        if ".checkpoint." in each.base_name and each.extension == "parquet"
    ]
    last = max((os.path.basename(each).split(".")[0] for each in checkpoints), default="")
    newest = [each for each in checkpoints if os.path.basename(each).startswith(last)]  # its parts

    def of_commit(path: str) -> list[str]:
        with source.open_input_stream(path) as stream:
            return list(sweep_plan.paths_in(bytes(stream.read()), path))

    named: set[str] = set()
    with ThreadPoolExecutor(THREADS) as pool:
        for paths in pool.map(of_commit, commits):
            named.update(unquote(path) for path in paths)
    for path in newest:
        named.update(unquote(each) for each in _of_checkpoint(source, path))
    return named


def _of_checkpoint(source: Any, path: str) -> list[str]:
    """Return the paths that a checkpoint adds or has as removed."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found: list[str] = []
    with source.open_input_file(path) as file, pq.ParquetFile(file) as opened:
        for kind in ("add", "remove"):
            if kind in opened.schema_arrow.names:
                column = opened.read(columns=[f"{kind}.path"]).column(kind)
                paths = pc.struct_field(column, "path").drop_null()
                found += paths.to_pylist()
    return found
