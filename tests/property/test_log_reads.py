"""Reads compared with a naive model: any batches, index, bounds; damaged derived files change
nothing.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pk import settings
from pk.log import batch as batches
from pk.log import columns
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.readonly import open_readonly
from pk.sim.disk import SimStorage
from pk.types import TopicPartition

PATH = "t-0"
BASE = LogConfig.of(settings.TOPIC.resolve({}))


class Model:
    """A log and, beside it, the plain list of its batches."""

    def __init__(
        self, sizes: list[tuple[int, int]], segment: int, interval: int, seed: int
    ) -> None:
        self.rng = random.Random(seed)
        self.storage = SimStorage()
        self.config = replace(BASE, segment_bytes=segment, index_interval_bytes=interval)
        self.log = self.open(clean=True)
        self.batches: list[tuple[int, int, int, int]] = []  # base, next, bytes, timestamp
        for count, size in sizes:
            stamp = self.rng.randint(0, 50)
            raw = b"".join(columns.encode_lists([b"v" * size] * count, default_timestamp=stamp))
            base = self.log.log_end
            self.log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=100)
            self.batches.append((base, base + count, len(raw), stamp))
            if self.rng.random() < 0.6:
                self.write()
        self.write()

    def open(self, *, clean: bool) -> PartitionLog:
        point = self.log.synced_end if hasattr(self, "log") else 0
        return PartitionLog.open(
            self.storage,
            PATH,
            TopicPartition("t", 0),
            "id",
            self.config,
            clean=clean,
            same_boot=True,
            recovery_point=point,
            now_ms=1,
        )

    def write(self) -> None:
        plan = self.log.take_writes()
        if plan is not None:
            self.log.perform(plan)
            self.log.complete(plan)

    def expected(
        self, offset: int, bound: int, max_bytes: int, segments: list[int]
    ) -> tuple[int, int]:
        """Return (first base, next offset) that a read must give; without bytes (offset,
        offset).
        """
        bound = min(bound, self.log.written_end)
        first = next((b for b in self.batches if b[1] > offset), None)
        if first is None or offset >= bound or first[1] > bound:
            return offset, offset
        limit = next((s for s in segments if s > first[0]), 2**62)
        size, end = 0, first[1]
        for base, following, length, _ in self.batches:
            if base < first[0]:
                continue
            if following > bound or base >= limit or (size and size + length > max_bytes):
                break
            size, end = size + length, following
            if size > max_bytes:
                break
        return first[0], end

    def check(self, reads: int = 12) -> None:
        log = self.log
        segments = [facts.base_offset for facts in log.segments]
        view = open_readonly(self.storage, PATH)
        for _ in range(reads):
            offset = self.rng.randint(0, log.written_end)
            bound = self.rng.choice([log.written_end, self.rng.randint(0, log.written_end)])
            max_bytes = self.rng.choice([0, 1, 200, 1000, 10**6])
            found = log.read(offset, bound=bound, max_bytes=max_bytes, verify=True)
            assert (found.base_offset, found.next_offset) == self.expected(
                offset, bound, max_bytes, segments
            )
            same = view.read(
                offset, bound=min(bound, log.written_end), max_bytes=max_bytes, verify=True
            )
            assert (same.data, same.next_offset) == (found.data, found.next_offset)
            time = self.rng.randint(0, 55)
            hit = next((b for b in self.batches if b[3] >= time), None)
            looked_up = log.offset_for_time(time, log.written_end)
            assert (looked_up and looked_up.offset) == (hit and hit[0])


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 120)), min_size=1, max_size=25)


@given(
    sizes=SIZES,
    segment=st.sampled_from([100, 700, 3000, 10**6]),
    interval=st.sampled_from([0, 1, 250, 10**6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_reads_give_what_a_plain_list_gives(
    sizes: list[tuple[int, int]], segment: int, interval: int, seed: int
) -> None:
    model = Model(sizes, segment, interval, seed)
    model.check()
    model.log.close()
    names = [n for n in model.storage.list(PATH) if not n.endswith(".log")]
    for name in names:
        path = f"{PATH}/{name}"
        chance = model.rng.random()
        if chance < 0.3:
            model.storage.remove(path)
        elif chance < 0.6:
            file = model.storage.open(path)
            file.write_at(model.rng.randrange(file.size()), bytes([model.rng.randrange(256)]))
        elif chance < 0.7:
            file = model.storage.open(path)
            file.truncate(model.rng.randrange(file.size()))
    model.log = model.open(clean=model.rng.random() < 0.5)
    model.check()
