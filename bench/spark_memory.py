"""What an executor of Spark needs beside its heap to read a topic, through Python and in the JVM.

    python -m bench.spark_memory [--records 1000000] [--heap-mb 1024] [--only "hot zstd"]

The executor is a process of its own with two cores (local-cluster).  The limit of its container is
`spark.executor.memory`, the heap, and `spark.executor.memoryOverhead`, which has to hold the rest
of the JVM and the Python workers.  Each reading (hot: the log, without and with zstd; cold: the
table) gets a new executor for each way, and runs three times.  The query needs the values of all
records.  One line of JSON for each:

  peak_mb    the most that the executor and its workers had at one time (PSS, asked every 250 ms)
  beside_mb  the same where the heap is touched as a whole at the start (-Xms, AlwaysPreTouch), less
             the heap: what spark.executor.memoryOverhead has to hold
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from bench import processes

VALUE_BYTES = 100
PARTITIONS = 2
RUNS = 3
_LOOK_S = 0.25  # the kernel walks all pages at each look, and the process waits
_EXECUTOR = b"CoarseGrainedExecutorBackend"
Compression = Literal["none", "lz4", "zstd"]
KINDS: dict[str, tuple[Compression, bool]] = {
    "hot": ("none", False), "hot zstd": ("zstd", False), "cold": ("zstd", True),
}  # fmt: skip


def fill(address: str, topic: str, count: int, codec: Compression) -> None:
    """Produce values of 100 bytes that zstd halves."""
    import numpy as np
    import pyarrow as pa

    from pk import Producer

    rng = np.random.default_rng(1)
    rows = 100_000
    with Producer(address, compression=codec) as producer:
        for first in range(0, count, rows):
            found = min(rows, count - first)
            raw = rng.integers(0, 16, found * VALUE_BYTES, dtype=np.uint8)
            starts = pa.array(np.arange(found + 1, dtype=np.int32) * VALUE_BYTES)
            values = pa.BinaryArray.from_buffers(
                pa.binary(), found, [None, starts.buffers()[1], pa.py_buffer(raw)]
            )
            places = pa.array(np.arange(found, dtype=np.int32) % PARTITIONS)
            batch = pa.record_batch({"value": values, "partition": places})
            producer.send_batch(topic, batch)
        producer.flush(600)


def pss_mb(pid: int) -> float:
    """Return the memory of a process; what several share counts once for all of them."""
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def program(pid: int) -> str:
    """Return the file that a process executes; "" = it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


class Watch:
    """Asks for the memory of the executor and its Python workers again and again."""

    def __init__(self, root: int) -> None:
        self.peak_mb = 0.0
        self.workers_mb = 0.0
        self._root = root
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(_LOOK_S):
            first, *others = processes.children(self._root)
            # before it executes its program, a child that the JVM spawned has the JVM's memory
            workers = [each for each in others if program(each) != program(first)]
            beside = sum(map(pss_mb, workers))
            self.workers_mb = max(self.workers_mb, beside)
            self.peak_mb = max(self.peak_mb, pss_mb(first) + beside)


@contextmanager
def session(heap_mb: int, *, touched: bool) -> Iterator[Any]:
    """A session with one executor of two cores."""
    from pk.sparkconnector import session as spark_session

    conf: dict[str, Any] = {"spark.executor.memory": f"{heap_mb}m"}
    if touched:
        conf["spark.executor.extraJavaOptions"] = f"-Xms{heap_mb}m -XX:+AlwaysPreTouch"
    master = f"local-cluster[1,2,{heap_mb}]"
    found = spark_session("bench memory", master=master, delta=False, **conf)
    found.sparkContext.setLogLevel("ERROR")
    try:
        found.range(10).count()  # the executor is there
        yield found
    finally:
        found.stop()


def executor_of(spark: Any) -> int:
    """Return the process of the executor, a child of the driver's JVM."""
    driver = int(spark._jvm.java.lang.ProcessHandle.current().pid())
    for pid in processes.children(driver)[1:]:
        try:
            if _EXECUTOR in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue
    raise RuntimeError("there is no executor")


def measured(heap_mb: int, options: dict[str, str], count: int, *, touched: bool) -> Watch:
    """Read the topic a few times with a new executor."""
    from pyspark.sql import functions as fn

    with session(heap_mb, touched=touched) as spark, Watch(executor_of(spark)) as watch:
        for _ in range(RUNS):
            frame = spark.read.format("pk").options(**options).load()
            row = frame.agg(fn.count("*"), fn.sum(fn.length("value"))).first()
            if row[0] != count:
                raise RuntimeError(f"{row[0]} rows instead of {count}")
        time.sleep(2 * _LOOK_S)
    return watch


def reading(kind: str, count: int, heap_mb: int, root: Path) -> Iterator[dict[str, Any]]:
    """Measure one kind of reading, on both ways."""
    from pk import AdminClient
    from pk.cli.embedded import EmbeddedServer

    codec, cold = KINDS[kind]
    (root / "tier").mkdir(parents=True)
    configs = {"retention_ms": -1, "tier_enable": cold, "tier_max_lag_ms": 200}
    with EmbeddedServer(root, tier_url=(root / "tier").as_uri()) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic("t", PARTITIONS, configs)
            fill(server.address, "t", count, codec)
            while cold and any(each.lag for each in admin.describe_tier("t").partitions):
                time.sleep(0.2)
        for columnar in ("false", "true"):
            options = {"pk.bootstrap.servers": server.address, "subscribe": "t"}
            options["columnar"] = columnar
            free = measured(heap_mb, options, count, touched=False)
            whole = measured(heap_mb, options, count, touched=True)
            yield {
                "reading": kind,
                "way": "JVM" if columnar == "true" else "Python",
                "heap_mb": heap_mb,
                "peak_mb": round(free.peak_mb),
                "beside_mb": round(whole.peak_mb - heap_mb),
                "of_that_workers_mb": round(whole.workers_mb),
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--heap-mb", type=int, default=1024)
    parser.add_argument("--only", choices=tuple(KINDS))
    given = parser.parse_args(arguments)
    for kind in KINDS:
        if given.only in (None, kind):
            with tempfile.TemporaryDirectory(prefix="pk-bench-") as root:
                for line in reading(kind, given.records, given.heap_mb, Path(root)):
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
