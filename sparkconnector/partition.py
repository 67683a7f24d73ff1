"""The unit that Spark sends to an executor: one task of a read."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from pk.sparkconnector.planner import Task


class PkPartition(InputPartition):
    """An input partition of Spark that carries one `Task`."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __repr__(self) -> str:
        one = self.task.range
        where = "tier" if self.task.cold is not None else "log"
        return f"{one.topic}-{one.partition} [{one.start}, {one.end}) of the {where}"
