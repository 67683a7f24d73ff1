"""A thousand partitions on one broker: the cost of creating, using and keeping them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from bench import processes
from bench.plans import Base
from bench.runs import Sample, bare

PARTITIONS = 1000
#: Small enough that every partition gets batches.
BATCH_BYTES = 64 * 1024
_REST_S = 3.0
_IDLE_S = 10.0


class Partitions(Base):
    def round(self, role: str, mode: str) -> Sample:
        side, records = self.side(role), self.counts[role]
        produce, consume = ("lists", "batches") if role == "pk" else ("java", "java")
        topic = self.bench.fresh("partitions")
        begin = time.perf_counter()
        side.create_topic(topic, partitions=PARTITIONS)
        created_s = time.perf_counter() - begin
        try:
            sample = side.produce(
                topic, self.bench.values, records, "none", produce, batch_bytes=BATCH_BYTES
            )
            read = side.consume(topic, records, consume, partitions=PARTITIONS)
            used = sum(path.stat().st_size > 0 for path in side.segment_files(topic) if _log(path))
            memory = processes.rss_mb(side.pids())
            time.sleep(_REST_S)
            before = processes.cpu_s(side.pids())
            time.sleep(_IDLE_S)
            idle = (processes.cpu_s(side.pids()) - before) / _IDLE_S
        finally:
            side.delete_topic(topic)
        parts = {
            "create": bare(created_s),
            "produce": replace(sample, figures={"partitions written": used}),
            "consume": read,
            "memory": bare(memory),
            "idle CPU": bare(100 * idle),
        }
        return replace(sample, parts=parts)


def _log(path: Path) -> bool:
    return path.suffix == ".log"
