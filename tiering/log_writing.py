"""The JSON of one commit, and of a table's creation, as pk writes them into its log.  Pure.

pk writes its commits itself, by one put-if-absent, and deltalake only reads them.  deltalake reads
a log several times to write one version: some ten requests, and more with the table's age
(docs/design/0020-store-calls.md).

Invariants
  J1  A commit has the actions of `log_check.expected_actions`, whose checksum it states, and of
      commitInfo the engine's part, which no checksum covers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pk
from pk.tiering import layout, log_check
from pk.tiering.delta_stats import stats_of
from pk.tiering.layout import PARTITION_COLUMN, app_id
from pk.tiering.table import Commit
from pk.types import TopicId

#: Key in commitInfo: the owner that commits.  No checksum covers it, so builds that do not know it
#: read the commit as before.
OWNER = "pk.owner"
#: The engine's part of commitInfo; Spark and deltalake show it in a table's history.
_OPERATION: Mapping[str, Any] = {
    "operation": "WRITE",
    "operationParameters": {"mode": "Append", "partitionBy": f'["{PARTITION_COLUMN}"]'},
    "engineInfo": f"pk/{pk.__version__}",
}
_CREATION: Mapping[str, Any] = {
    "operation": "CREATE TABLE",
    "operationParameters": {"partitionBy": f'["{PARTITION_COLUMN}"]'},
    "engineInfo": f"pk/{pk.__version__}",
}


def creation_json(topic_id: TopicId, table_id: str, schema: str, date_ms: int) -> bytes:
    """Returns the content of version 0 of the table of a topic: protocol and metadata (Delta
    protocol, "Change Metadata").  `table_id`: a new UUID, Delta's id of the table; `schema`:
    the table's schema in Delta's JSON."""
    metadata = {
        "id": table_id,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema,
        "partitionColumns": [PARTITION_COLUMN],
        "createdTime": date_ms,
        "configuration": {**layout.TABLE_PROPERTIES, layout.TOPIC_ID_PROPERTY: topic_id},
    }
    protocol = {
        "minReaderVersion": layout.READER_VERSION,
        "minWriterVersion": layout.WRITER_VERSION,
    }
    info = {log_check.FILES: log_check.FileSums().text()}
    return _lines(date_ms, _CREATION, info, [{"protocol": protocol}, {"metaData": metadata}])


def commit_json(topic_id: TopicId, commit: Commit, date_ms: int) -> bytes:
    """Returns the content of the commit's file; `date_ms` dates it and its removals."""
    removes = [commit.read.files[path] for path in commit.removes]
    info: dict[str, Any] = {"isBlindAppend": True} if commit.blind else {}
    info[log_check.FILES] = commit.read.sums_after(commit).text()
    if commit.owner:
        info[OWNER] = commit.owner
    actions = log_check.expected_actions(
        [(new, stats_of(new)) for new in commit.adds],
        removes,
        commit.data_change,
        date_ms,
        _versions(topic_id, commit),
        info,
    )
    return _lines(date_ms, _OPERATION, info, actions[1:])


def _lines(
    date_ms: int,
    operation: Mapping[str, Any],
    info: Mapping[str, Any],
    actions: Sequence[log_check.Action],
) -> bytes:
    """Returns the lines of a commit: commitInfo with the checksum of all actions, and these."""
    check = log_check.of_actions([{"commitInfo": info}, *actions])
    told = {"timestamp": date_ms, **operation, **info, log_check.CHECK: check}
    lines = [{"commitInfo": told}, *actions]
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def _versions(topic_id: TopicId, commit: Commit) -> dict[str, int]:
    """Returns the txn actions of a commit: the counters that changed, and their hash (T2)."""
    versions: dict[str, int] = {}
    for partition, counters in commit.counters.items():
        before = commit.read.partition(partition)
        for name, value in counters._asdict().items():
            if value >= 0 and value != getattr(before, name):
                versions[app_id(topic_id, partition, name)] = value
        if counters.version > 1:
            versions[app_id(topic_id, partition, layout.VERSION_NAME)] = counters.version
        check = app_id(topic_id, partition, layout.COUNTERS_CHECK)
        versions[check] = log_check.counters_check(counters)
    return versions
