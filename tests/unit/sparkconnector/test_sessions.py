"""The settings of a session that pk makes."""

from __future__ import annotations

import os

import pytest

from pk.sparkconnector.sessions import settings

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
