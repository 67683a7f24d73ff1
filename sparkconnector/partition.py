"""A task as Spark carries it to an executor."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from pk.sparkconnector.planner import Task


class PkPartition(InputPartition):
    """See the module."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __repr__(self) -> str:
        one = self.task.range
        where = "tier" if self.task.cold is not None else "log"
        return f"{one.topic}-{one.partition} [{one.start}, {one.end}) of the {where}"
