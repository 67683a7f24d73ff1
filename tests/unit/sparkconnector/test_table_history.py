"""What a commit of a table's log says that it changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pk import errors
from pk.sparkconnector import table_history
from pk.sparkconnector.table_history import TableChange
from pk.tiering import layout
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.layout import PartitionCounters
from pk.tiering.log_writing import commit_json, creation_json
from pk.tiering.table import Commit, Snapshot

URI = "file:///lake/t"
TOPIC_ID = "2f1c6a2e-55a0-4c87-9a6d-0d6f4f7f8f10"


def data(start: int, end: int) -> DataFile:
    path = layout.data_path(layout.DataName(0, start, end, 0, "a", 0, 0))
    return DataFile(path, 0, start, end - 1, 5, 9, end - start, 10)


def change(commit: Commit) -> TableChange:
    content = commit_json(TOPIC_ID, commit, 7)
    return table_history.change_of(URI, 3, 7, TOPIC_ID, content)


@pytest.fixture
def empty() -> Snapshot:
    return Snapshot(0, "id", {}, {})


def counters(**given: int) -> Mapping[int, PartitionCounters]:
    return {0: PartitionCounters()._replace(**given)}


def test_the_creation() -> None:
    content = creation_json(TOPIC_ID, "id", '{"type":"struct","fields":[]}', 7)
    found = table_history.change_of(URI, 0, 7, TOPIC_ID, content)
    assert (found.operation, found.files_added, found.starts, found.ends) == ("create", 0, {}, {})
    assert found.engine.startswith("pk/")


def test_an_append(empty: Snapshot) -> None:
    adds = (NewFile(data(0, 5), 1), NewFile(data(5, 8), 1))
    found = change(Commit(empty, adds, (), counters(end=8, epoch=0, rows=8)))
    assert found.operation == "append"
    assert (found.files_added, found.files_removed, found.rows_added) == (2, 0, 8)
    assert (found.starts, found.ends) == ({}, {0: 8})
    assert found.engine.startswith("pk/")


def test_retention_merge_and_compaction(empty: Snapshot) -> None:
    file = data(0, 5)
    filled = Snapshot(1, "id", {file.path: file}, {0: PartitionCounters(end=5, epoch=0, rows=5)})
    gone = (file.path,)
    aged = change(Commit(filled, (), gone, counters(start=5, end=5, epoch=0, rows=5, removed=5)))
    assert (aged.operation, aged.files_removed, aged.starts) == ("retention", 1, {0: 5})
    whole = NewFile(replace(file, path=file.path.replace("-a-", "-b-")), 1, data_change=False)
    merged = change(Commit(filled, (whole,), gone, {}, data_change=False))
    assert (merged.operation, merged.ends) == ("merge", {})
    cleaned = counters(end=5, epoch=0, rows=5, removed=2, cleaned=5)
    compacted = change(Commit(filled, (NewFile(data(3, 5), 1),), gone, cleaned))
    assert compacted.operation == "compaction"
    assert change(Commit(filled, (), (), counters(claim=4))).operation == "counters"


def test_commits_of_other_engines_name_their_operation() -> None:
    def foreign(*actions: Mapping[str, Any]) -> TableChange:
        content = b"\n".join(json.dumps(each).encode() for each in actions)
        return table_history.change_of(URI, 9, 7, TOPIC_ID, content)

    info = {"commitInfo": {"operation": "OPTIMIZE", "engineInfo": "Apache-Spark/4.2.0"}}
    add = {"add": {"path": "a", "partitionValues": {}, "size": 1, "modificationTime": 1,
                   "dataChange": False, "stats": '{"numRecords": 6}'}}  # fmt: skip
    found = foreign(info, add)
    assert (found.operation, found.engine, found.rows_added) == (
        "optimize",
        "Apache-Spark/4.2.0",
        6,
    )
    assert foreign({"commitInfo": {}}).operation == "unknown"
    properties = {"metaData": {"id": "x", "configuration": {}}}
    set_them = {"commitInfo": {"operation": "SET TBLPROPERTIES"}}
    assert foreign(set_them, properties).operation == "set tblproperties"


def test_a_damaged_commit_is_named(empty: Snapshot) -> None:
    content = bytearray(commit_json(TOPIC_ID, Commit(empty, (), (), counters(claim=4)), 7))
    content[len(content) // 2] ^= 1
    with pytest.raises(errors.TierTableChanged):
        table_history.change_of(URI, 3, 7, TOPIC_ID, bytes(content))
