"""The driver of the campaign: one run of a streaming query from topic to topic, and its own death.

    python driver.py BOOTSTRAP CHECKPOINT FOLDER [TABLE]

FOLDER/death.json, if it exists, says where this run dies: `{"step": …, "count": n, "whole": bool}`.
At the n-th time that the run passes the step, the process that passes it kills the whole run
(driver, JVM and Python workers), or only itself.  The steps of pk's data source:

    task-begin    a task was started and has not joined
    task-middle   a task has sent rows
    task-end      a task has all acknowledgements and has not reported
    commit-begin  all tasks have reported, and the driver has not asked for the commit
    commit-end    the batch is committed, and Spark's checkpoint does not have it

With TABLE, a Delta table, each micro-batch goes to the topic and the table by `commit_together`.
Its tasks pass the same steps, its driver these:

    prepare-begin  all tasks have reported, and the batch is not prepared
    table-begin    the batch is prepared, and the table does not have it
    table-end      the table has the batch, and the log's transaction is open
    decide-end     both are committed, and Spark's checkpoint does not have the batch

The data source and `commit_together` are pk's, with these steps around them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pk.client import table_driver
from pk.sparkconnector import commit_together, session, together
from pk.sparkconnector.source import PkDataSource
from pk.sparkconnector.stream_writer import PkStreamWriter
from pk.sparkconnector.task_writer import write_all

SOURCE, TARGET = "in", "out"
BATCH_RECORDS = 300


def pass_step(folder: str, step: str) -> None:
    """Count the step; die if it is the one."""
    plan = Path(folder) / "death.json"
    try:
        death = json.loads(plan.read_text())
    except FileNotFoundError:
        return
    if death["step"] != step:
        return
    counter = Path(folder) / "passed"
    with counter.open("a") as file:
        file.write(".")
    if counter.stat().st_size < death["count"]:
        return
    plan.rename(plan.with_suffix(".done"))
    if death["whole"]:
        os.killpg(death["group"], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def passing(folder: str, rows: Iterator[Any]) -> Iterator[Any]:
    """Yield a task's rows, and pass its middle after each."""
    for each in rows:
        yield each
        pass_step(folder, "task-middle")


class DyingWriter(PkStreamWriter):
    """pk's writer, which passes the steps."""

    folder = ""

    def write(self, iterator: Iterator[Any]) -> Any:
        pass_step(self.folder, "task-begin")
        message = super().write(passing(self.folder, iterator))
        pass_step(self.folder, "task-end")
        return message

    def commit(self, messages: Any, batchId: int) -> None:
        pass_step(self.folder, "commit-begin")
        super().commit(messages, batchId)
        pass_step(self.folder, "commit-end")


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


def pass_steps_together(folder: str) -> None:
    """Put the steps around those of `commit_together`, in the driver and in its tasks."""
    perform = together._Driver.perform

    def write_rows(settings: Any, columns: Any, rows: Iterator[Any], batch: Any) -> Any:
        pass_step(folder, "task-begin")
        message = write_all(settings, columns, passing(folder, rows), batch)
        pass_step(folder, "task-end")
        return message

    def perform_and_pass(driver: Any, step: table_driver.Step) -> Any:
        if isinstance(step, table_driver.Prepare):
            pass_step(folder, "prepare-begin")
        if isinstance(step, table_driver.WriteTable):
            pass_step(folder, "table-begin")
        result = perform(driver, step)
        if isinstance(step, table_driver.WriteTable):
            pass_step(folder, "table-end")
        if isinstance(step, table_driver.Decide):
            pass_step(folder, "decide-end")
        return result

    together.write_all = write_rows  # type: ignore[attr-defined]
    together._Driver.perform = perform_and_pass  # type: ignore[method-assign]


def start(frame: Any, options: dict[str, str], checkpoint: str, folder: str, table: str) -> Any:
    """Start the query that writes the frame to the target, and to the table if there is one."""
    if not table:
        writer = frame.writeStream.format("pk-dying")
        writer = writer.options(topic=TARGET, **options, **{"dying.folder": folder})
    else:
        pass_steps_together(folder)

        def both(rows: Any, batch: int) -> None:
            commit_together(rows, batch, "both", table, TARGET, options=options)

        writer = frame.writeStream.foreachBatch(both)
    return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()


def main(bootstrap: str, checkpoint: str, folder: str, table: str = "") -> None:
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
    start(frame.select("key", "value"), given, checkpoint, folder, table).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
