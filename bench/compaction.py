"""The rate at which compaction cleans dirty bytes: of a local log, and of a table by Spark.

    python -m bench.compaction [--records 2000000] [--keys 200000] [--only local|spark]

Both sides get the same records: keys of 12 bytes, drawn at random, and values of 100 bytes, in
segments of 64 MiB or files of the copier.  It prints one line of JSON for each side: seconds, bytes
of keys and values in dirty records, MB/s, and rows before and after.  `local` also prints the marks
of its window (bench/runs).

    local   the work of the cleaner process (compaction/local_cleaner), in this process
    spark   `pk.sparkconnector.maintenance.compaction` on local[2], from the lease to its release;
            the session has run a query before
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

KEY_BYTES, VALUE_BYTES = 12, 100
BATCH = 10_000
SEGMENT_BYTES = 64 << 20
MAP_BYTES = 512 << 20


def records(count: int, keys: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield keys and values, a batch at a time."""
    rng = np.random.default_rng(7)
    for start in range(0, count, BATCH):
        some = rng.integers(0, keys, min(BATCH, count - start)).tolist()
        raw = rng.bytes(VALUE_BYTES * len(some))
        values = [raw[n * VALUE_BYTES : (n + 1) * VALUE_BYTES] for n in range(len(some))]
        yield [b"key-%08d" % key for key in some], values


def local(count: int, keys: int, root: Path) -> dict[str, Any]:
    """Clean a log of one partition."""
    from pk.clock import MedianTime
    from pk.compaction import local_cleaner
    from pk.compaction.cleaning_job import make_job
    from pk.compaction.offset_map import key_hasher
    from pk.compaction.plan import CleanablePart, CompactionLimits, plan
    from pk.log.files import RealStorage
    from pk.log.index import NO_TIMESTAMP

    storage = RealStorage(str(root))
    log = _filled(storage, records(count, keys))
    parts = [
        CleanablePart(
            each.base_offset, each.next_offset, each.size, NO_TIMESTAMP, each.max_timestamp
        )
        for each in log.segments
    ]
    found = plan(
        parts[:-1], CompactionLimits(0.0, 0, 2**63 - 1), active=parts[-1],
        log_start=0, cleaned_end=0, last_stable_offset=log.written_end, hold=None, now_ms=1,
    )  # fmt: skip
    job = make_job(
        log, found, root=str(root), tail=".bench.cleaned", settled_end=0,
        delete_retention_ms=1, map_bytes=MAP_BYTES, now=MedianTime(1, 1),
    )  # fmt: skip
    print("open {}", flush=True)
    start = time.perf_counter()
    result = local_cleaner.clean(storage, job, key_hasher(os.urandom(32)))
    seconds = time.perf_counter() - start
    left = result.end - result.superseded
    figures = _figures("local", seconds, result.end, left)
    mark = {"value": figures["mb_s"], "records": result.end, "rows left": left}
    print("close", json.dumps(mark), flush=True)
    log.close()
    return figures


def _filled(storage: Any, batches: Iterator[tuple[list[bytes], list[bytes]]]) -> Any:
    from pk import settings
    from pk.log import batch as log_batch
    from pk.log import columns
    from pk.log.partition_log import PartitionLog
    from pk.log.plan import LogConfig
    from pk.types import TopicPartition

    storage.make_dir("topics/t-0")
    config = LogConfig.of(settings.TOPIC.resolve({"cleanup_policy": "compact"}))
    log = PartitionLog.open(
        storage, "topics/t-0", TopicPartition("t", 0), "id",
        replace(config, segment_bytes=SEGMENT_BYTES), clean=True, same_boot=True, now_ms=1,
    )  # fmt: skip

    def write() -> None:
        made = log.take_writes()
        assert made is not None
        log.perform(made)
        log.complete(made)

    for keys, values in batches:
        raw = b"".join(columns.encode_lists(values, keys, timestamps=[1] * len(keys)))
        log.decide(log_batch.check(raw), raw, leader_epoch=0, now_ms=1, from_client=False)
        write()
    if log.roll():
        write()
    return log


def spark(count: int, keys: int, root: Path) -> dict[str, Any]:
    """Clean the table of a topic with two partitions."""
    from pk import AdminClient, Producer
    from pk.cli.embedded import EmbeddedServer
    from pk.sparkconnector import session
    from pk.sparkconnector.maintenance import compaction

    (root / "tier").mkdir()
    configs = {"cleanup_policy": "compact", "tier_max_lag_ms": 1_000, "retention_ms": -1}
    with EmbeddedServer(root, tier_url=(root / "tier").as_uri()) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic("t", 2, configs)
            with Producer(server.address) as producer:
                for some, values in records(count, keys):
                    for key, value in zip(some, values, strict=True):
                        producer.send("t", value, key=key)
                producer.flush(600)
            while any(each.lag for each in admin.describe_tier("t").partitions):
                time.sleep(0.2)
        found = session("bench compaction", master="local[2]")
        found.sparkContext.setLogLevel("ERROR")
        found.range(10).count()
        start = time.perf_counter()
        report = compaction(found, server.address, "t")
        seconds = time.perf_counter() - start
        found.stop()
    before = sum(each.rows_before for each in report.partitions)
    after = sum(each.rows_after for each in report.partitions)
    return _figures("spark", seconds, before, after)


def _figures(side: str, seconds: float, before: int, after: int) -> dict[str, Any]:
    size = before * (KEY_BYTES + VALUE_BYTES)
    return {
        "side": side,
        "seconds": round(seconds, 2),
        "dirty_bytes": size,
        "mb_s": round(size / seconds / 1e6, 1),
        "rows_before": before,
        "rows_after": after,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the sides, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--only", choices=("local", "spark"))
    given = parser.parse_args(arguments)
    for side in (local, spark):
        if given.only in (None, side.__name__):
            with tempfile.TemporaryDirectory(prefix="pk-bench-") as root:
                print(json.dumps(side(given.records, given.keys, Path(root))), flush=True)


if __name__ == "__main__":
    main()
