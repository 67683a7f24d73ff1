"""Reads the application transactions of a table's version in one pass over its log.

deltalake answers for one application at a time, and reads the log since the checkpoint again for
each.  A partition has a dozen counters (rule T2).  So the first look at a table of 100 partitions
took more than 1,000 requests, one after the other.

Shell; runs in a thread.  The requests are those of deltalake's own object store.

Delta's protocol ("Action Reconciliation"): of the `txn` actions of an application, the newest one
counts.

Invariants
  A1  The pass reads one checkpoint in one file, or none, and every commit behind it up to the
      version.  For anything else (a checkpoint in several files, a missing commit, text that does
      not parse) deltalake is asked for each application.
  A2  The callers compare what they get with its checksum (rule T2), so a damaged log is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, PyFileSystem

#: Number of commits that are read at once.
COMMITS_AT_ONCE = 8
#: The most commits behind a checkpoint that are read; other engines may write no checkpoint.
COMMITS_MOST = 1_000
_LOG = "_delta_log"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
#: Fields of `_last_checkpoint` of a checkpoint in several files.
IN_PARTS = ("parts", "v2Checkpoint", "sidecarFiles")


def transaction_versions(
    handle: DeltaTable, options: Mapping[str, str] | None, wanted: Collection[str]
) -> dict[str, int]:
    """Returns the newest transaction version of each application id that has one.

    options: the storage options with which the table was opened.  Raises what deltalake raises.
    """
    found = None
    if len(wanted) > 1:
        try:
            found = _one_pass(handle, options)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
            pass  # A1: deltalake reads the log, or says what is wrong
    if found is None:
        asked = {app: handle.transaction_version(app) for app in wanted}
    else:
        asked = {app: found.get(app) for app in wanted}
    return {app: version for app, version in asked.items() if version is not None}


def _one_pass(handle: DeltaTable, options: Mapping[str, str] | None) -> dict[str, int] | None:
    """Returns the transaction versions of all applications; None = deltalake must be asked."""
    version = handle.version()
    store = PyFileSystem(DeltaStorageHandler(handle.table_uri, dict(options or {}) or None))
    base = _checkpoint_of(store, version)
    if base is None or version - base > COMMITS_MOST:
        return None

    def commit(number: int) -> bytes:
        with store.open_input_file(f"{_LOG}/{number:020d}.json") as file:
            return bytes(file.read())

    found: dict[str, int] = {}
    with ThreadPoolExecutor(COMMITS_AT_ONCE, "pk-transactions") as pool:
        commits = pool.map(commit, range(base + 1, version + 1))
        if base >= 0:
            with store.open_input_file(f"{_LOG}/{base:020d}.checkpoint.parquet") as file:
                found.update(_of_checkpoint(file))
        for data in commits:
            found.update(_of_commit(data))
    return found


def _checkpoint_of(store: PyFileSystem, version: int) -> int | None:
    """Returns the newest checkpoint up to a version; -1 = there is none, None = it has parts."""
    try:
        with store.open_input_file(f"{_LOG}/_last_checkpoint") as file:
            fields = json.loads(file.read())
    except FileNotFoundError:
        return -1
    if any(fields.get(name) is not None for name in IN_PARTS):
        return None
    newest = int(fields["version"])
    if newest <= version:
        return newest
    # an older version was asked for
    names = (each.base_name for each in store.get_file_info(FileSelector(_LOG)))
    found = (int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name)))
    return max((each for each in found if each <= version), default=-1)


def _of_checkpoint(file: pa.NativeFile) -> dict[str, int]:
    column = pq.ParquetFile(file).read(["txn"]).column("txn").combine_chunks().drop_null()
    apps, versions = column.field("appId").to_pylist(), column.field("version").to_pylist()
    return dict(zip(apps, versions, strict=True))


def _of_commit(data: bytes) -> dict[str, int]:
    found = {}
    for line in data.split(b"\n"):
        if b'"txn"' not in line:
            continue
        action = json.loads(line)
        if "txn" in action:
            found[str(action["txn"]["appId"])] = int(action["txn"]["version"])
    return found
