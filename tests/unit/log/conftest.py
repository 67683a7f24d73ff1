"""Shared parts of the log's unit tests: small batches, and a small log on a simulated disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pk import settings
from pk.log import batch as batches
from pk.log import columns
from pk.log.batch import Header
from pk.log.partition_log import PartitionLog
from pk.log.plan import Appended, Completion, Duplicate, LogConfig
from pk.sim.disk import SimStorage
from pk.types import TopicPartition

NOW = 1_700_000_000_000


def make_batch(count: int = 1, size: int = 10, **options: Any) -> bytes:
    options.setdefault("default_timestamp", NOW)
    return b"".join(columns.encode_lists([b"v" * size] * count, **options))


def make_config(**given: Any) -> LogConfig:
    """Return settings for small segments; sizes below the minimum of the settings are fine here."""
    base = LogConfig.of(settings.TOPIC.resolve({"index_interval_bytes": 300}))
    return replace(base, **{"segment_bytes": 2000, **given})


class Bench:
    """A log with its directory, and the three steps of an append in one call."""

    def __init__(self, storage: SimStorage | None = None, **config: Any) -> None:
        self.storage = storage or SimStorage()
        self.storage.make_dir("topics")
        self.config = make_config(**config)
        self.log = self.open(clean=True)

    def open(self, **options: Any) -> PartitionLog:
        options = {"clean": False, "same_boot": True, "now_ms": NOW, **options}
        self.log = PartitionLog.open(
            self.storage, "topics/t-0", TopicPartition("t", 0), "id", self.config, **options
        )
        return self.log

    def decide(
        self, raw: bytes, epoch: int = 0, now_ms: int = NOW, **options: Any
    ) -> Appended | Duplicate:
        header: Header = batches.check(raw)
        return self.log.decide(header, raw, leader_epoch=epoch, now_ms=now_ms, **options)

    def write(self) -> Completion:
        plan = self.log.take_writes()
        assert plan is not None
        try:
            self.log.perform(plan)
        except Exception as error:
            return self.log.complete(plan, error)
        return self.log.complete(plan)

    def append(self, *raws: bytes, epoch: int = 0, now_ms: int = NOW) -> Completion:
        for raw in raws:
            self.decide(raw, epoch, now_ms)
        return self.write()

    def fill(self, batches_count: int, records: int = 1, **options: Any) -> None:
        for _ in range(batches_count):
            self.append(make_batch(records, 100, **options))

    def values(self, start: int | None = None, max_bytes: int = 10**6) -> list[int]:
        """Return the offsets that are served from `start` on; each batch is checked."""
        offset = self.log.local_log_start if start is None else start
        found: list[int] = []
        while offset < self.log.written_end:
            read = self.log.read(
                offset, bound=self.log.written_end, max_bytes=max_bytes, verify=True
            )
            assert read.next_offset > offset
            for _, raw in batches.iter_batches(read.data):
                rows = columns.decode(raw, decoded_bytes_max=10**7)
                found += [o for o in rows.column("offset").to_pylist() if o >= offset]
            offset = read.next_offset
        return found


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench
