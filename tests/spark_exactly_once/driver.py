"""The driver of the campaign: one run of a streaming query from topic to topic, and its own death.

    python driver.py BOOTSTRAP CHECKPOINT FOLDER

FOLDER/death.json, if it exists, says where this run dies: `{"step": …, "count": n, "whole": bool}`.
At the n-th time that the run passes the step, the process that passes it kills the whole run
(driver, JVM and Python workers), or only itself.  The steps:

    task-begin    a task was started and has not joined
    task-middle   a task has sent rows
    task-end      a task has all acknowledgements and has not reported
    commit-begin  all tasks have reported, and the driver has not asked for the commit
    commit-end    the batch is committed, and Spark's checkpoint does not have it

The data source is pk's, with these steps around it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pk.sparkconnector import session
from pk.sparkconnector.source import PkDataSource
from pk.sparkconnector.stream_writer import PkStreamWriter

SOURCE, TARGET = "in", "out"
BATCH_RECORDS = 300


class DyingWriter(PkStreamWriter):
    """pk's writer, which passes the steps."""

    folder = ""

    def write(self, iterator: Iterator[Any]) -> Any:
        self._pass("task-begin")

        def passing() -> Iterator[Any]:
            for batch in iterator:
                yield batch
                self._pass("task-middle")

        message = super().write(passing())
        self._pass("task-end")
        return message

    def commit(self, messages: Any, batchId: int) -> None:
        self._pass("commit-begin")
        super().commit(messages, batchId)
        self._pass("commit-end")

    def _pass(self, step: str) -> None:
        """Count the step; die if it is the one."""
        plan = Path(self.folder) / "death.json"
        try:
            death = json.loads(plan.read_text())
        except FileNotFoundError:
            return
        if death["step"] != step:
            return
        counter = Path(self.folder) / "passed"
        with counter.open("a") as file:
            file.write(".")
        if counter.stat().st_size < death["count"]:
            return
        plan.rename(plan.with_suffix(".done"))
        if death["whole"]:
            os.killpg(death["group"], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class DyingSource(PkDataSource):
    """The data source `format("pk-dying")`."""

    @classmethod
    def name(cls) -> str:
        return "pk-dying"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        folder = self.options["dying.folder"]
        inner = PkDataSource({k: v for k, v in self.options.items() if k != "dying.folder"})
        writer = inner.streamWriter(schema, overwrite)
        writer.__class__ = DyingWriter
        writer.folder = folder
        return writer


def main(bootstrap: str, checkpoint: str, folder: str) -> None:
    """Run the query until the source has no more records."""
    spark = session(
        app_name="spark-exactly-once",
        master="local[2,4]",  # a task that dies is tried again
        spark_sql_shuffle_partitions=2,
        **{"spark.driver.memory": "1g", "spark.ui.showConsoleProgress": "false"},
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(DyingSource)
    given = {"pk.bootstrap.servers": bootstrap}
    frame = (
        spark.readStream.format("pk")
        .options(subscribe=SOURCE, startingOffsets="earliest", **given)
        .option("maxOffsetsPerTrigger", str(BATCH_RECORDS))
        .load()
    )
    query = (
        frame.select("key", "value")
        .writeStream.format("pk-dying")
        .options(topic=TARGET, **given, **{"dying.folder": folder})
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4])
