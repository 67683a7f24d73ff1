"""The settings of a session that pk makes."""

from __future__ import annotations

import os

import pytest

from pk.sparkconnector import sessions
from pk.sparkconnector.as_of import TopicVersion
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.ranges import TierFile
from pk.sparkconnector.sessions import settings
from pk.sparkconnector.table_files import TableFiles

TASKS = (
    "spark.sql.shuffle.partitions",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism",
    "spark.databricks.delta.snapshotPartitions",
)


@pytest.mark.parametrize("master", [None, "local", "local[2]"])
def test_on_one_machine_spark_and_delta_use_a_task_for_each_core(master: str | None) -> None:
    found = settings(master, False, False, {})
    assert {found[name] for name in TASKS} == {str(os.cpu_count())}
    assert found["spark.driver.host"] == "127.0.0.1"


def test_on_a_cluster_the_numbers_of_tasks_are_left_alone() -> None:
    found = settings("spark://host:7077", False, False, {})
    assert not set(TASKS) & set(found)
    assert "spark.driver.host" not in found


def test_what_is_given_wins() -> None:
    given = {"spark_sql_shuffle_partitions": 9, "spark.databricks.delta.snapshotPartitions": 8}
    found = settings("local[2]", False, False, given)
    assert (found[TASKS[0]], found[TASKS[2]]) == ("9", "8")


def _version(files: dict[int, list[TierFile]]) -> TopicVersion:
    return TopicVersion("file:///t", {}, 7, TableFiles(files, {}, {}, {}))


def _file(least: int, most: int) -> TierFile:
    return TierFile(f"{least}.parquet", least, most, 100, most - least + 1)


def test_offsets_are_compared_only_where_a_file_has_other_rows() -> None:
    """Otherwise Spark would read a column for nothing: the table has only rows of the ranges."""
    table = _version({0: [_file(0, 9), _file(10, 19)], 1: [_file(5, 9)], 2: []})
    whole = [Range("t", "id", 0, 0, 20), Range("t", "id", 1, 5, 10)]
    assert sessions._inside(table, whole) == ""
    assert sessions._inside(table, whole[:1]) == "(partition = 0)"
    straddling = [whole[0], Range("t", "id", 1, 7, 10)]
    expected = "(partition = 0) OR (partition = 1 AND offset >= 7)"
    assert sessions._inside(table, straddling) == expected
    middle = [Range("t", "id", 0, 3, 12)]
    assert sessions._inside(table, middle) == "(partition = 0 AND offset >= 3 AND offset < 12)"
