"""Follows a table's log by one version, from the JSON of the next commit alone.  Pure.

An owner that finds a commit of another owner reads this one object and needs no list and no
checkpoint.  Commits of other engines, and everything unusual, are read through deltalake.

Invariants
  F1  A version that this module returns has been compared as `log_reading.compare` compares it: the
      commit's checksum, the number and hashes of the live files after it, and the checksums of the
      counters (rule T2).
  F2  A commit that this module does not understand whole gives None, never a guess.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from pk.tiering import layout, log_check
from pk.tiering.commit_pacing import UNNAMED
from pk.tiering.data_files import NewFile
from pk.tiering.delta_stats import added_file
from pk.tiering.layout import PartitionCounters
from pk.tiering.log_writing import OWNER
from pk.tiering.table import Commit, Snapshot, first_epoch
from pk.types import NONE, Epoch, TopicId

_KNOWN = frozenset(("commitInfo", "add", "remove", "txn"))


def followed(uri: str, topic_id: TopicId, read: Snapshot, data: bytes) -> Snapshot | None:
    """Returns the version after `read`, whose commit is `data`; None = it must be read whole.

    The partitions of `read` keep their counters up to date; others are not added.  Raises
    `TierTableChanged` for a damaged commit, `NewerFormat` for counters of a newer build.
    """
    version = read.version + 1
    facts = log_check.read_commit(uri, version, data)
    if not facts.ours or facts.files is None:
        return None
    actions = [json.loads(line) for line in data.split(b"\n") if line.strip()]
    try:
        adds, removes = _files_of(read, actions)
        counters, checks, claim = _counters_of(uri, topic_id, read, actions)
        owner = _owner_of(actions)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    commit = Commit(read, tuple(adds), tuple(removes), counters, owner=owner)
    later = read.after(commit, version)
    later.restored = max(later.restored, first_epoch(claim))
    if later.sums != facts.files:
        return None
    log_check.check_names(uri, version, [new.file for new in adds])
    for partition, after in counters.items():
        log_check.check_counters(uri, version, partition, after, checks.get(partition))
    return later


def _files_of(
    read: Snapshot, actions: list[Mapping[str, Any]]
) -> tuple[list[NewFile], dict[str, None]]:
    """Returns the files that the actions add and remove.  Raises `ValueError` if the actions do not
    fit the version."""
    adds: dict[str, NewFile] = {}
    removes: dict[str, None] = {}
    for action in actions:
        (kind,) = action
        if kind not in _KNOWN:
            raise ValueError(kind)
        if kind not in ("add", "remove"):
            continue
        path = urllib.parse.unquote(action[kind]["path"])
        if (kind == "remove") != (path in read.files) or path in adds or path in removes:
            raise ValueError(path)
        if kind == "remove":
            removes[path] = None
        elif layout.parse_written_path(path) is None:
            raise ValueError(path)
        else:
            adds[path] = added_file(path, action[kind])
    return list(adds.values()), removes


def _counters_of(
    uri: str, topic_id: TopicId, read: Snapshot, actions: list[Mapping[str, Any]]
) -> tuple[dict[int, PartitionCounters], dict[int, int], Epoch]:
    """Returns the changed counters of the partitions of `read`, their stated checksums, and the
    highest claim of any partition."""
    changed: dict[int, PartitionCounters] = {}
    checks: dict[int, int] = {}
    claim = NONE
    for action in actions:
        if "txn" not in action:
            continue
        app, value = str(action["txn"]["appId"]), int(action["txn"]["version"])
        prefix, topic, number, name = app.split(":")
        if f"{prefix}:" != log_check.APP_PREFIX or topic != topic_id:
            raise ValueError(app)
        partition = int(number)
        if name == layout.VERSION_NAME:
            layout.check_version(uri, partition, value)
        elif name == layout.COUNTERS_CHECK:
            checks[partition] = value
        elif name not in layout.COUNTERS:
            raise ValueError(name)
        if name == "claim":
            claim = max(claim, value)
        if partition in read.counters and name in layout.COUNTERS:
            before = changed.get(partition, read.partition(partition))
            changed[partition] = before._replace(**{name: value})
    return changed, checks, claim


def _owner_of(actions: list[Mapping[str, Any]]) -> str:
    """Returns who made the commit; one that does not say it counts as one owner."""
    infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
    return str(infos[0].get(OWNER, UNNAMED))
