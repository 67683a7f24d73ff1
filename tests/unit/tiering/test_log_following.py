"""One version further, from the JSON of a commit alone (tiering/log_following)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.tiering import layout, log_check, log_writing
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.layout import PartitionCounters
from pk.tiering.log_following import followed
from pk.tiering.table import Commit, Snapshot

ID = "2f1c6a2e-55a0-4c87-9a6d-0d6f4f7f8f10"
URI = "mem://t"


def new(partition: int, start: int, end: int) -> NewFile:
    path = layout.data_path(layout.DataName(partition, start, end, 0, "a", 0, 0))
    times = 1_700_000_000_003, 1_700_000_000_999
    return NewFile(DataFile(path, partition, start, end - 1, *times, end - start, 10), 17, 1, 2)


def known() -> Snapshot:
    empty = Snapshot(0, "id", {}, {0: PartitionCounters(), 1: PartitionCounters()})
    counters = {0: PartitionCounters(end=10, epoch=0, rows=10, sum=5)}
    return empty.after(Commit(empty, (new(0, 0, 10),), (), counters), 1)


def next_commit() -> Commit:
    """Return a commit that appends, removes, claims, and counts what compaction removed."""
    read = known()
    counters = {
        0: PartitionCounters(10, 20, 0, 3, 20, 9, 10, removed_sum=5),
        1: PartitionCounters(claim=7),
    }
    return Commit(read, (new(0, 10, 20),), tuple(read.files), counters)


def altered(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    lines = [json.loads(line) for line in data.splitlines()]
    for line in lines:
        change(line)
    info = next(line["commitInfo"] for line in lines if "commitInfo" in line)
    if log_check.CHECK in info:
        info[log_check.CHECK] = log_check.of_actions(lines)
    return b"\n".join(json.dumps(line).encode() for line in lines)


def test_a_commit_is_followed_exactly() -> None:
    commit = next_commit()
    found = followed(URI, ID, commit.read, log_writing.commit_json(ID, commit, 1_000))
    expected = commit.read.after(commit, 2)
    assert found is not None
    assert (found.version, found.table_id) == (2, "id")
    assert found.files == expected.files
    assert found.counters == expected.counters
    assert found.sums == expected.sums


def test_partitions_that_were_not_asked_for_stay_unknown() -> None:
    commit = next_commit()
    one = Snapshot(1, "id", commit.read.files, {0: commit.read.partition(0)})
    found = followed(URI, ID, one, log_writing.commit_json(ID, commit, 1_000))
    assert found is not None
    assert list(found.counters) == [0]


@pytest.mark.parametrize("what", ["no check", "metadata", "a path of others", "a sum", "a topic"])
def test_what_is_unusual_is_read_whole(what: str) -> None:
    commit = next_commit()

    def change(line: dict[str, Any]) -> None:
        if what == "no check" and "commitInfo" in line:
            del line["commitInfo"][log_check.CHECK]
        if what == "no check" and "txn" in line:
            line["txn"]["appId"] = "other"
        if what == "metadata" and "remove" in line:
            line["metaData"] = line.pop("remove")
            line["metaData"]["id"] = "another"
        if what == "a path of others" and "add" in line:
            line["add"]["path"] = "partition=0/part-1.parquet"
        if what == "a sum" and "commitInfo" in line:
            line["commitInfo"][log_check.FILES] = "1-0000000000000001-0000000000000002"
        if what == "a topic" and "txn" in line:
            line["txn"]["appId"] = line["txn"]["appId"].replace(ID, "another")

    data = altered(log_writing.commit_json(ID, commit, 1_000), change)
    assert followed(URI, ID, commit.read, data) is None


def test_a_damaged_commit_is_refused() -> None:
    commit = next_commit()
    data = log_writing.commit_json(ID, commit, 1_000).replace(b'"version":20', b'"version":21', 1)
    with pytest.raises(errors.TierTableChanged, match="version 2"):
        followed(URI, ID, commit.read, data)


def test_counters_of_a_newer_build_are_refused() -> None:
    commit = next_commit()

    def change(line: dict[str, Any]) -> None:
        if line.get("txn", {}).get("appId", "").endswith(":version"):
            line["txn"]["version"] = layout.COUNTERS_VERSION + 1

    data = altered(log_writing.commit_json(ID, commit, 1_000), change)
    with pytest.raises(errors.NewerFormat):
        followed(URI, ID, commit.read, data)
