"""The end of a log in memory compared with the log itself, whatever happens to it in between."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors, settings
from pk.log import batch as batches
from pk.log import batch_cache, columns
from pk.log.batch_cache import BatchCache
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.sim.disk import SimStorage
from pk.types import TopicPartition

BASE = LogConfig.of(settings.TOPIC.resolve({}))


class Life:
    """A log that is appended to, truncated, rolled and shortened; some of its writes fail."""

    def __init__(self, seed: int, recent_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.log = PartitionLog.open(
            SimStorage(),
            "t-0",
            TopicPartition("t", 0),
            "id",
            replace(BASE, segment_bytes=3_000, index_interval_bytes=250),
            clean=True,
            now_ms=1,
        )
        self.log.recent = BatchCache(recent_bytes)
        self.hits = 0

    def append(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            size = self.rng.choice([1, 50, 50, 400])
            values = [self.rng.randbytes(size)] * self.rng.randint(1, 4)
            raw = b"".join(columns.encode_lists(values, default_timestamp=1))
            epoch = max(0, self.log.epochs.latest)
            self.log.decide(batches.check(raw), raw, leader_epoch=epoch, now_ms=2)
        plan = self.log.take_writes()
        assert plan is not None
        if self.rng.random() < 0.1:
            self.log.complete(plan, errors.StorageFull("full"))
            return
        self.log.perform(plan)
        self.log.complete(plan)

    def cut(self) -> None:
        end = self.log.written_end
        offset = self.rng.randint(max(0, end - 12), end + 3)
        (self.log.truncate_to if self.rng.random() < 0.7 else self.log.reset_to)(offset)

    def shorten(self) -> None:
        self.log.advance_log_start(self.rng.randint(0, self.log.written_end))

    def step(self) -> None:
        (act,) = self.rng.choices(
            [self.append, self.cut, self.shorten, self.log.roll], [12, 2, 1, 1]
        )
        act()
        if not self.log.idle():  # a roll waits for the next append
            self.append()

    def check(self) -> None:
        log, rng = self.log, self.rng
        on_disk: list[tuple[int, int, bytes]] = []
        offset = log.local_log_start
        while offset < log.written_end:
            got = log.read(offset, bound=log.written_end, max_bytes=10**6, verify=True)
            on_disk += [(h.base_offset, h.next_offset, bytes(raw))
                        for h, raw in batches.iter_batches(got.data)]  # fmt: skip
            offset = got.next_offset
        for _ in range(6):
            offset = rng.randint(max(0, log.written_end - 15), log.written_end + 1)
            bound = min(log.written_end, offset + rng.randint(0, 15))
            room, one = rng.choice([0, 150, 700, 10**6]), rng.random() < 0.7
            found = log.read_recent(offset, bound=bound, max_bytes=room, min_one_batch=one)
            if found is None:
                continue
            self.hits += 1
            assert log.local_log_start <= offset < bound
            wanted = [each for each in on_disk if offset < each[1] <= bound]
            fits = 0
            while fits < len(wanted) and sum(len(raw) for _, _, raw in wanted[: fits + 1]) <= room:
                fits += 1
            wanted = wanted[: max(fits, int(one))]
            assert found.data == b"".join(raw for _, _, raw in wanted)
            assert (found.base_offset, found.next_offset) == (wanted[0][0], wanted[-1][1])
            assert found.last_epoch == log.epochs.epoch_of(found.next_offset - 1)


@given(seed=st.integers(0, 2**32 - 1), recent_bytes=st.sampled_from([3_000, 10**6]))
def test_memory_gives_what_the_log_gives_or_nothing(seed: int, recent_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_cache, "APPEND_BYTES_MAX", 1_800)
        patch.setattr(batch_cache, "LOG_BYTES_MAX", 4_000)
        life = Life(seed, recent_bytes)
        for _ in range(40):
            life.step()
            life.check()
            assert life.log.recent is not None
            assert 0 <= life.log.recent.bytes <= min(4_000, recent_bytes)


def test_it_is_asked_and_answers() -> None:
    """Checks that the test above really reads from the cache."""
    life = Life(1, 10**6)
    for _ in range(40):
        life.step()
        life.check()
    assert life.hits > 40
