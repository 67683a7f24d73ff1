"""A driver on a standalone cluster, for tests/spark/test_columnar_cluster.py.

    python cluster_driver.py '{"master": URL, "options": {…}, "connect": PORT}'

It reads one JSON command per line, answers each with one line `reply {…}`, and ends with its input.
The driver always has the jar of the columnar reader on its class path.

  start   a session; `shipped`: with the jar in spark.jars, so that executors get it; such a session
          also serves Spark Connect
  read    which executor read each offset, and which way
  hinder  the same read, in which the first task of partition 0 never ends and that of partition 1
          fails
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

CONF = {
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    # both executors are there before the first task
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.minTaskRuntime": "1s",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
}
ROW = "executor long, partition int, offset long"
COUNTS = ("pkRowsInColumns", "pkRowsThroughPython", "pkRangesHandedToPython")


def started(given: dict[str, Any], *, shipped: bool) -> Any:
    from pyspark.sql import SparkSession

    from pk.sparkconnector import columnar_jar, sessions

    conf = sessions.settings(given["master"], False, False, CONF)
    conf["spark.driver.extraClassPath"] = str(columnar_jar.path())
    if shipped:
        conf |= {
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(given["connect"]),
        }
    else:
        del conf["spark.jars"]
    builder = SparkSession.builder.appName("pk cluster tests").master(given["master"])
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def located(batches: Iterator[Any]) -> Iterator[Any]:
    """Say for each row which process the executor is: the parent of the daemon of this worker."""
    import os
    from pathlib import Path

    import pyarrow as pa

    status = Path(f"/proc/{os.getppid()}/stat").read_text()
    executor = int(status.rpartition(")")[2].split()[1])
    for batch in batches:
        places = pa.array([executor] * batch.num_rows, pa.int64())
        columns = [places, batch.column("partition"), batch.column("offset")]
        yield pa.record_batch(columns, names=["executor", "partition", "offset"])


def hindered(batches: Iterator[Any]) -> Iterator[Any]:
    """The same, with a first attempt that stands still and one that fails."""
    import time

    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    is_first = context.attemptNumber() == 0
    for number, batch in enumerate(located(batches)):
        place = batch.column("partition")[0].as_py() if is_first and number == 1 else None
        if place == 0:
            time.sleep(600)  # until Spark kills the task
        if place == 1:
            raise RuntimeError("the first attempt fails")
        yield batch


def read(spark: Any, given: dict[str, Any], through: Any) -> dict[str, Any]:
    frame = spark.read.format("pk").options(**given["options"]).load()
    found = frame.select("partition", "offset", "value").mapInArrow(through, ROW)
    leaf = found._jdf.queryExecution().executedPlan().collectLeaves().head()
    rows = [tuple(row) for row in found.collect()]
    metrics = leaf.metrics()
    counts = [metrics.apply(name).value() for name in COUNTS if metrics.contains(name)]
    return {"rows": rows, "scan": leaf.scan().getClass().getName(), "counts": counts}


def main() -> int:
    given = json.loads(sys.argv[1])
    spark = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            if spark is not None:
                spark.stop()
            spark = started(given, shipped=command["shipped"])
            found: dict[str, Any] = {}
        else:
            found = read(spark, given, {"read": located, "hinder": hindered}[command["do"]])
        print("reply", json.dumps(found), flush=True)
    if spark is not None:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
