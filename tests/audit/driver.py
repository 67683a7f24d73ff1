"""The drivers of the campaign's maintenance jobs: one JVM, and one process for each run of a job.

    python driver.py FOLDER MASTER

A line of the input starts a run: `{"run": …, "job": …, "bootstrap": …, "topic": …, "options": …}`.
The run is a forked process, so it costs no JVM, and it may be killed at any moment: it holds the
lease, plans, and hands files over, and what it asked Spark for goes on without it.  That is what
remains of a driver on a cluster whose executors outlive it.  The output has one line when a run
begins and one when it ends; its result is in FOLDER/RUN.json, which a killed run does not write.
The job `outside` is a statement of Spark SQL, as another engine runs it.

The leases of this process end 2 s after their last renewal, so a killed run holds the next one up
for no longer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from pk import errors
from pk.client.maintenance_lease import MaintenanceLease
from pk.sparkconnector import session
from pk.sparkconnector.maintenance import audit, compaction, optimize, snapshot, sweep
from pk.sparkconnector.maintenance.jobs import SparkHolder, run_job

job_of_compaction: Any = import_module("pk.sparkconnector.maintenance.compaction")
LEASE_MS = 2_000
#: A compaction lands within this time, so tombstones leave the table while the campaign runs.
CLEANING_MS = 150_000
#: What a forked process must not close: connections to the JVM that its parent goes on using.
_KEPT: list[Any] = []
assert all((audit, compaction, optimize, snapshot, sweep))  # loaded once, before the forks


class Session(SparkHolder):
    """The session of this process, as the jobs ask for it."""

    def __init__(self, spark: Any) -> None:
        self._session = spark


def started(master: str) -> Any:
    """Return a session that has started a Python worker."""
    spark = session(
        app_name="audit",
        master=master,
        spark_sql_shuffle_partitions=2,
        **{
            "spark.driver.memory": "1g",
            "spark.ui.showConsoleProgress": "false",
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.range(2).mapInArrow(lambda batches: batches, "id long").collect()
    return spark


def apart_from_the_parent(spark: Any) -> None:
    """Have this process talk to the JVM over a connection of its own."""
    client = spark.sparkContext._gateway._gateway_client
    _KEPT.append((client.thread_connection, client.deque))
    client.thread_connection, client.deque = threading.local(), type(client.deque)()


def carry_out(spark: Any, folder: Path, asked: dict[str, Any]) -> None:
    """Run the job; write its result."""
    apart_from_the_parent(spark)
    assert MaintenanceLease.__init__.__kwdefaults__ is not None
    MaintenanceLease.__init__.__kwdefaults__["ttl_ms"] = LEASE_MS
    job_of_compaction.CLEANING_MS = CLEANING_MS
    try:
        if asked["job"] == "outside":
            spark.sql(asked["options"]["statement"]).collect()
            result: dict[str, Any] = {"outcome": "done", "told": ""}
        else:
            report = run_job(
                Session(spark), asked["bootstrap"], asked["topic"], asked["job"], asked["options"]
            )
            result = {"outcome": report.outcome, "told": report.summary()}
    except errors.PkError as error:
        kind = type(error).__name__
        retriable = isinstance(error, errors.RetriableError)
        result = {"error": kind, "told": error.message, "retriable": retriable}
    except BaseException as error:
        result = {"error": type(error).__name__, "told": str(error)[:2_000], "retriable": False}
    partly = folder / f"{asked['run']}.partly"
    partly.write_text(json.dumps(result))
    partly.rename(folder / f"{asked['run']}.json")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def reap(living: dict[int, str]) -> None:
    """Tell which runs have ended."""
    for pid in list(living):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            say(ended=living.pop(pid))


def main(folder: Path, master: str) -> None:
    """Start runs until the input ends."""
    spark = started(master)
    say(ready=True)
    living: dict[int, str] = {}
    buffered = b""
    while True:
        reap(living)
        if not select.select([0], [], [], 0.02)[0]:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            break
        *lines, buffered = (buffered + chunk).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            pid = os.fork()
            if pid == 0:
                try:
                    carry_out(spark, folder, asked)
                finally:
                    os._exit(0)
            living[pid] = asked["run"]
            say(began=asked["run"], pid=pid)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
