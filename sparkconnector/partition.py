"""The unit that Spark sends to an executor: what one task of Spark reads."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.datasource import InputPartition

from pk.sparkconnector.planner import Task


class PkPartition(InputPartition):
    """An input partition of Spark that carries one or several `Task`s, read one after the other."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tuple(tasks)

    def __repr__(self) -> str:
        return "; ".join(map(_words, self.tasks))


def _words(task: Task) -> str:
    one = task.range
    where = "tier" if task.cold is not None else "log"
    return f"{one.topic}-{one.partition} [{one.start}, {one.end}) of the {where}"
