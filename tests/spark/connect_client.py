"""A client of Spark Connect, for tests/spark/test_columnar_cluster.py: what it found, as JSON.

    python connect_client.py '{"remote": "sc://HOST:PORT", "options": {…}, "checkpoint": PATH}'

It has no JVM.  It reads a topic as a batch and as a stream.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any


def batch(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    frame = spark.read.format("pk").options(**given["options"]).load()
    frame = frame.select("partition", "offset")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        frame.explain("formatted")
    readers = [line for line in text.getvalue().splitlines() if line.startswith("Reader:")]
    rows = sorted(tuple(row) for row in frame.collect())
    _, nodes = frame.executionInfo.metrics.extract_graph()
    metrics = {one.name: one.value for each in nodes.values() for one in each.metrics}
    return {"rows": rows, "readers": readers, "metrics": metrics}


def stream(spark: Any, given: dict[str, Any]) -> list[dict[str, str]]:
    frame = spark.readStream.format("pk").options(**given["options"]).load()
    query = (
        frame.writeStream.format("noop").option("checkpointLocation", given["checkpoint"])
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination(240)
    # A progress over Spark Connect has the rows of its sources, not their sum.
    sources = [each["sources"][0] for each in query.recentProgress]
    return [each["metrics"] for each in sources if each["numInputRows"]]


def main() -> int:
    from pyspark.sql import SparkSession

    given = json.loads(sys.argv[1])
    spark = SparkSession.builder.remote(given["remote"]).getOrCreate()
    print(json.dumps({"batch": batch(spark, given), "stream": stream(spark, given)}))
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
