"""One Spark session in a process of its own: `python -m bench.spark.session NAME`.

It reads one JSON command per line, answers each with one line `reply {…}`, and ends with its input.
Every session is built alike (local[2], 2 GB, no UI), except for its jars.  Seconds are those of the
action alone, as a user of the session sees them.

  ping     a query over nothing
  read     batch: count and sum of value lengths
  stream   AvailableNow into the noop sink, with a new checkpoint
  read_topic  the same, through `read_topic`; the session NAME is delta
  tasks    how many tasks read a batch
  write    the rows of a Parquet folder into a sink
  values   make that folder: `rows` values over `files` files
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: As the connector's own POM wants it, but for the token provider: 4.0 is the newest there is.
KAFKA_CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.1",
    "org.apache.commons:commons-pool2:2.13.1",
)
MASTER = "local[2]"
MEMORY = "2g"
#: A session that is stopped for the other side's round must not take itself for lost.
_PATIENCE = {"spark.network.timeout": "3600s", "spark.executor.heartbeatInterval": "600s"}


def start(name: str) -> Any:
    from pk.sparkconnector import jars, sessions

    conf: dict[str, Any] = {
        "spark.driver.memory": MEMORY,
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": 2,
        **_PATIENCE,
    }
    if name == "kafka":
        conf["spark.jars"] = ",".join(str(jar) for jar in jars.resolve(KAFKA_CONNECTOR))
    if folder := os.environ.get("PK_BENCH_EVENTS"):  # for a look at Spark's own metrics
        conf |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": Path(folder).as_uri()}
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return sessions.session(f"bench {name}", master=MASTER, delta=name == "delta", **conf)


def _loaded(reader: Any, given: dict[str, Any]) -> Any:
    reader = reader.format(given["format"]).options(**given.get("options", {}))
    return reader.load(*given.get("paths", ()))


def ping(spark: Any, given: dict[str, Any]) -> dict[str, float]:
    return {"rows": spark.range(1).count()}


def read(spark: Any, given: dict[str, Any]) -> dict[str, float]:
    begin = time.perf_counter()
    return _summed(_loaded(spark.read, given), begin)


def read_topic(spark: Any, given: dict[str, Any]) -> dict[str, float]:
    from pk.sparkconnector import read_topic

    begin = time.perf_counter()
    return _summed(read_topic(spark, given["topic"], given["bootstrap"]), begin)


def _summed(frame: Any, begin: float) -> dict[str, float]:
    from pyspark.sql import functions as fn

    row = frame.agg(fn.count("*"), fn.sum(fn.length("value"))).first()
    return {"rows": row[0], "bytes": row[1] or 0, "seconds": time.perf_counter() - begin}


def stream(spark: Any, given: dict[str, Any]) -> dict[str, float]:
    checkpoint = tempfile.mkdtemp(dir=given["folder"])
    begin = time.perf_counter()
    query = (
        _loaded(spark.readStream, given)
        .writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    elapsed = time.perf_counter() - begin
    rows = sum(each["numInputRows"] for each in query.recentProgress)
    shutil.rmtree(checkpoint, ignore_errors=True)
    batches = [each for each in query.recentProgress if each["numInputRows"]]
    trigger_ms = sum(each["durationMs"]["triggerExecution"] for each in batches)
    trigger_s = trigger_ms / 1000 / max(1, len(batches))
    return {"rows": rows, "seconds": elapsed, "trigger_s": trigger_s}


def tasks(spark: Any, given: dict[str, Any]) -> dict[str, float]:
    frame = _loaded(spark.read, given)
    return {"rows": 0, "tasks": frame._jdf.queryExecution().toRdd().getNumPartitions()}


def write(spark: Any, given: dict[str, Any]) -> dict[str, float]:
    begin = time.perf_counter()
    frame = spark.read.parquet(given["source"])
    frame.write.format(given["format"]).options(**given["options"]).mode("append").save()
    return {"rows": given["rows"], "seconds": time.perf_counter() - begin}


def values(spark: Any, given: dict[str, Any]) -> dict[str, float]:
    """Write the values of the text file again and again, in files of equal size; untimed."""
    import pyarrow as pa
    from pyarrow import parquet

    from bench import values as vocabulary

    known = vocabulary.read(Path(given["values"]))
    folder = Path(given["source"])
    folder.mkdir(parents=True)
    share = given["rows"] // given["files"]
    for number in range(given["files"]):
        rows = share if number else given["rows"] - share * (given["files"] - 1)
        column = pa.array((known * (rows // len(known) + 1))[:rows], pa.binary())
        parquet.write_table(
            pa.table({"value": column}), folder / f"{number}.parquet", compression="none",
            use_dictionary=False,
        )  # fmt: skip
    return {"rows": given["rows"]}


_COMMANDS = {
    "ping": ping, "read": read, "read_topic": read_topic, "stream": stream, "tasks": tasks,
    "write": write, "values": values,
}  # fmt: skip


def main() -> int:
    spark = start(sys.argv[1])
    print("reply", json.dumps({"rows": 0}), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        reply: dict[str, Any]
        try:
            reply = _COMMANDS[given["do"]](spark, given)
        except Exception as trouble:
            reply = {"error": f"{type(trouble).__name__}: {trouble}"[:3000]}
        print("reply", json.dumps(reply), flush=True)
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
