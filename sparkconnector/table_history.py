"""The history of a topic's table: what each version did, when, and how far its rows then went.

A commit says what it changed: files added and removed, and the counters of partitions (rule T2).
From pk's commits, which have a checksum, the counters tell what the version is for; commits of
other engines name their operation themselves (Delta protocol, "Commit Provenance Information").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pk import errors
from pk.sparkconnector import table_versions
from pk.tiering import log_check
from pk.tiering.layout import commit_file

#: A partition's counters that a history shows.
_SHOWN = ("start", "end")


class TableChange(NamedTuple):
    """What one version of a table changed."""

    version: int
    time_ms: int
    #: append, retention, compaction, merge, counters, create; of other engines their operation
    operation: str
    engine: str  #: engineInfo of the commit: name and version of what wrote it
    files_added: int
    files_removed: int
    rows_added: int  #: as the statistics of the added files say
    starts: dict[int, int]  #: new start of the partitions where it moved
    ends: dict[int, int]  #: new end of the partitions where it moved


def change_of(uri: str, version: int, time_ms: int, topic_id: str, data: bytes) -> TableChange:
    """Return what a commit's JSON says.  Raises `TierTableChanged` if it is damaged."""
    log_check.read_commit(uri, version, data)
    actions = [json.loads(line) for line in data.split(b"\n") if line.strip()]
    infos = [each["commitInfo"] for each in actions if "commitInfo" in each]
    info: dict[str, Any] = infos[0] if infos else {}
    adds = [each["add"] for each in actions if "add" in each]
    removes = [each["remove"] for each in actions if "remove" in each]
    counters = dict(_counters(topic_id, actions))
    starts, ends = (
        {partition: value for (partition, name), value in counters.items() if name == shown}
        for shown in _SHOWN
    )
    if any("metaData" in each for each in actions) and not (adds or removes):
        operation = "create" if version == 0 else str(info.get("operation", "alter")).lower()
    elif log_check.CHECK in info:
        operation = _operation(adds, removes, {name for _, name in counters})
    else:
        operation = str(info.get("operation", "unknown")).lower()
    return TableChange(
        version,
        time_ms,
        operation,
        str(info.get("engineInfo", "")),
        len(adds),
        len(removes),
        sum(_rows(each) for each in adds),
        starts,
        ends,
    )


def _operation(adds: list[Any], removes: list[Any], counters: set[str]) -> str:
    """Return what a commit of pk is for."""
    changes = any(each.get("dataChange", True) for each in removes)
    if changes:
        return "compaction" if adds or "cleaned" in counters else "retention"
    if removes:
        return "merge"
    if adds:
        return "append"
    return "retention" if "start" in counters else "counters"


def _counters(topic_id: str, actions: list[Any]) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield the counters that the actions set: ((partition, name), value)."""
    for each in actions:
        app, _, rest = str(each.get("txn", {}).get("appId", "")).partition(f"pk:{topic_id}:")
        partition, _, name = rest.partition(":")
        if not app and partition.isdigit():
            yield (int(partition), name), int(each["txn"]["version"])


def _rows(add: Mapping[str, Any]) -> int:
    stats = add.get("stats")
    try:
        return int(json.loads(stats)["numRecords"]) if isinstance(stats, str) else 0
    except (ValueError, KeyError, TypeError):
        return 0


def history(
    uri: str, storage_options: Mapping[str, str], topic_id: str, limit: int
) -> list[TableChange]:
    """Return the newest `limit` versions of a table, newest first.

    Raises `TierUnavailable`, `TierTableChanged`.
    """
    from pk.sparkconnector.table_store import file_system

    known = table_versions.log_versions(uri, storage_options)
    source, root = file_system(uri, storage_options)
    found = []
    for version in range(known.newest, max(known.first, known.newest - limit + 1) - 1, -1):
        try:
            with source.open_input_stream(f"{root}/{commit_file(version)}") as stream:
                data = bytes(stream.read())
        except FileNotFoundError:
            break  # the log was cleaned meanwhile
        except OSError as cause:
            raise errors.TierUnavailable(f"{uri}: {cause}") from cause
        time_ms = known.times[version - known.first]
        found.append(change_of(uri, version, time_ms, topic_id, data))
    return found
