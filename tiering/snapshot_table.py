"""The snapshot of a topic: a Delta table with the latest value of each key as of a vector X.

A snapshot is "as of" an offset X for each partition (rule C3): it has the row that is the latest of
its key among the table's rows in `[start, X)`, unless that row is a tombstone.  The table has the
columns and the file names of a tier table, so the same readers verify it.  X is one txn action per
partition, in the commit that has the rows.  Its files hold one bucket of keys each.

    <tier>/<topic>__snapshot/<topic id>/partition=3/…-job-b00007of00016x<attempt>-c…-s….parquet

Invariants
  Z1  A version has either all rows of its X or none of them: rows and X are one commit.
  Z2  The txn `check` is a hash of X and of the live files with their sizes and rows.  A version is
      SnapshotUnusable if another engine changed its files or X, or if its log is damaged.
  Z3  A file is read whole and compared with its name (checksum of the footer, row sum) and with the
      log (rows), before any of its rows is returned.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs

from pk import errors
from pk.tiering import credentials, footers, layout, row_groups, rowhash
from pk.tiering.app_transactions import transaction_versions
from pk.tiering.data_files import DataFile
from pk.tiering.delta_actions import files_of, protocol_of
from pk.tiering.footers import UnreadableFile
from pk.tiering.layout import TABLE_PROPERTIES, TABLE_SCHEMA, TOPIC_ID_PROPERTY
from pk.tiering.table import TableProtocol
from pk.types import Offset

RUN_THE_JOB = "run `pk maintenance run snapshot {topic}`"
_BUCKET = re.compile(r"b(?P<bucket>\d{5})of(?P<buckets>\d{5})x[0-9a-f]+")


@dataclass(slots=True, frozen=True)
class SnapshotVersion:
    """One version of a topic's snapshot."""

    topic: str
    uri: str
    version: int
    positions: Mapping[int, Offset]  #: X of each partition
    files: Mapping[str, DataFile]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files.values())


def snapshot_uri(tier_uri: str, topic: str, topic_id: str) -> str:
    """Return the URI of a topic's snapshot, from that of its tier table."""
    root = tier_uri.rstrip("/").rsplit("/", 2)[0]
    return f"{root}/{layout.snapshot_path(topic, topic_id)}"


def app_id(topic_id: str, partition: int) -> str:
    """Return the application id of a partition's X.  It is none of pk's counters (rule T2)."""
    return f"pk-snapshot:{topic_id}:{partition}"


def check_app_id(topic_id: str) -> str:
    return f"pk-snapshot:{topic_id}:check"


def check_of(positions: Mapping[int, Offset], files: Sequence[DataFile]) -> int:
    """Return the hash of X and of the live files, in [0, 2^63) (Z2)."""
    lines = [f"{partition} {offset}" for partition, offset in sorted(positions.items())]
    lines += sorted(f"{file.path} {file.size} {file.rows}" for file in files)
    digest = blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def attempt_of(bucket: int, buckets: int, drawn: str) -> str:
    """Return the part of a file's name that names its bucket; `drawn`: hexadecimal digits."""
    return f"b{bucket:05d}of{buckets:05d}x{drawn}"


def bucket_of(path: str) -> tuple[int, int] | None:
    """Return the bucket of a file and the number of buckets; None if pk did not make its name."""
    name = layout.parse_job_path(path)
    found = None if name is None else _BUCKET.fullmatch(name.attempt)
    return None if found is None else (int(found["bucket"]), int(found["buckets"]))


def with_credentials(storage_options: Mapping[str, str]) -> dict[str, str]:
    """Return the storage options with credentials from the environment."""
    return credentials.completed(storage_options, os.environ)


# -- the table -------------------------------------------------------------------------------------


def opened(uri: str, options: Mapping[str, str]) -> DeltaTable | None:
    """Open the newest version; None if there is no table.  Raises `TierUnavailable`."""
    try:
        return DeltaTable(uri, storage_options=dict(options) or None)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as cause:
        raise errors.TierUnavailable(f"{uri}: {cause}") from cause


def created(uri: str, options: Mapping[str, str], topic_id: str) -> DeltaTable:
    """Create the table if there is none, and open it.  Raises `TierUnavailable`."""
    try:
        return DeltaTable.create(
            uri,
            schema=TABLE_SCHEMA,
            mode="ignore",
            partition_by=[layout.PARTITION_COLUMN],
            configuration={**TABLE_PROPERTIES, TOPIC_ID_PROPERTY: topic_id},
            storage_options=dict(options) or None,
            raise_if_key_not_exists=False,
        )
    except (DeltaError, OSError) as cause:
        raise errors.TierUnavailable(f"{uri}: {cause}") from cause


def version_of(
    table: DeltaTable,
    uri: str,
    options: Mapping[str, str],
    topic: str,
    topic_id: str,
    partitions: Sequence[int],
) -> SnapshotVersion:
    """Return the version that a handle has loaded.  options: with which it was opened

    Raises `SnapshotUnusable` if it has no X yet, or was changed (Z2).
    """
    try:
        files = files_of(pa.table(table.get_add_actions(flatten=True)))
        apps = {each: app_id(topic_id, each) for each in partitions}
        check_app = check_app_id(topic_id)
        found = transaction_versions(table, options, [*apps.values(), check_app])
        protocol = protocol_of(table)
    except errors.TierTableChanged as cause:
        raise unusable(uri, topic, cause.message) from cause
    except (DeltaError, OSError) as cause:
        raise unusable(uri, topic, f"its log cannot be read: {cause}") from cause
    positions = {each: found[app] for each, app in apps.items() if app in found}
    check = found.get(check_app)
    if not positions or check is None:
        raise unusable(uri, topic, "it has no positions")
    if protocol != TableProtocol() or check != check_of(positions, list(files.values())):
        why = f"version {table.version()} is not as the job wrote it: another engine changed it"
        raise unusable(uri, topic, f"{why}, or its log is damaged")
    return SnapshotVersion(topic, uri, table.version(), positions, files)


def load(
    uri: str, options: Mapping[str, str], topic: str, topic_id: str, partitions: Sequence[int]
) -> SnapshotVersion:
    """Return the newest version of a topic's snapshot.

    Raises `SnapshotUnusable` if there is none, or it was changed; `TierUnavailable`.
    """
    table = opened(uri, options)
    if table is None:
        raise unusable(uri, topic, "there is none")
    return version_of(table, uri, options, topic, topic_id, partitions)


def unusable(uri: str, topic: str, why: str) -> errors.SnapshotUnusable:
    return errors.SnapshotUnusable(
        f"the snapshot of topic {topic} ({uri}): {why}; {RUN_THE_JOB.format(topic=topic)}"
    )


# -- rows ------------------------------------------------------------------------------------------


def rows_of(
    uri: str, options: Mapping[str, str], topic: str, file: DataFile
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in the columns of a tier file, in offset order (Z3).

    Raises `SnapshotUnusable` if the file is missing or damaged, `TierUnavailable`.
    """
    try:
        handler: Any = DeltaStorageHandler(uri, dict(options) or None)
        with fs.PyFileSystem(handler).open_input_file(file.path) as handle:
            raw = bytes(handle.read())
    except FileNotFoundError as cause:
        raise unusable(uri, topic, f"{file.path} is not in the store") from cause
    except (DeltaError, OSError) as cause:
        if "not found" in str(cause).lower():
            raise unusable(uri, topic, f"{file.path} is not in the store") from cause
        raise errors.TierUnavailable(f"{uri}/{file.path}: {cause}") from cause
    try:
        batches = _verified(file, raw)
    except UnreadableFile as cause:
        raise unusable(uri, topic, f"{file.path} is damaged: {cause}") from cause
    yield from batches


def _verified(file: DataFile, raw: bytes) -> list[pa.RecordBatch]:
    name = layout.parse_job_path(file.path)
    if name is None or len(raw) != file.size:
        raise UnreadableFile(f"it has {len(raw)} bytes, the log says {file.size}")
    footer = footers.open_footer(file, raw)
    batches = [
        row_groups.read_group(footer, each, raw[each.start : each.start + each.size], len(raw))
        for each in footer.groups
    ]
    total = sum(rowhash.row_sum(each) for each in batches) % layout.SUM_MODULUS
    if total != name.row_sum:
        raise UnreadableFile(f"its rows add up to {total:x}, its name says {name.row_sum:x}")
    return batches
