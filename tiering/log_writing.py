"""The JSON of one commit, as pk writes it into a table's log.  Pure.

pk writes its commits itself, by one put-if-absent, and deltalake only reads them.  deltalake reads
a log several times to write one version: some ten requests, and more with the table's age
(docs/design/0020-store-calls.md).

Invariants
  J1  A commit has the actions of `log_check.expected_actions`, whose checksum it states, and of
      commitInfo the engine's part, which no checksum covers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pk
from pk.tiering import layout, log_check
from pk.tiering.delta_stats import stats_of
from pk.tiering.layout import PARTITION_COLUMN, app_id
from pk.tiering.table import Commit
from pk.types import TopicId

#: The engine's part of commitInfo; Spark and deltalake show it in a table's history.
_OPERATION: Mapping[str, Any] = {
    "operation": "WRITE",
    "operationParameters": {"mode": "Append", "partitionBy": f'["{PARTITION_COLUMN}"]'},
    "engineInfo": f"pk/{pk.__version__}",
}


def commit_json(topic_id: TopicId, commit: Commit, date_ms: int) -> bytes:
    """Returns the content of the commit's file; `date_ms` dates it and its removals."""
    removes = [commit.read.files[path] for path in commit.removes]
    info: dict[str, Any] = {"isBlindAppend": True} if commit.blind else {}
    info[log_check.FILES] = commit.read.sums_after(commit).text()
    actions = log_check.expected_actions(
        [(new, stats_of(new)) for new in commit.adds],
        removes,
        commit.data_change,
        date_ms,
        _versions(topic_id, commit),
        info,
    )
    told = {"timestamp": date_ms, **_OPERATION, **info, log_check.CHECK: ""}
    told[log_check.CHECK] = log_check.of_actions(actions)
    lines = [{"commitInfo": told}, *actions[1:]]
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
