"""Cleanings of a real log on a simulated disk, compared with a naive oracle, for any history:
transactions, tombstones, new leader epochs, any memory, and openings in between.
"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pk.compaction import local_cleaner
from pk.compaction.offset_map import ENTRY_BYTES
from pk.sim.disk import Crashed
from tests.kit.cleaned_log import FAR, PATH, RETENTION_MS, CleanedLog, random_step

SEEDS = st.integers(0, 2**32)
SMALL = 2 * (ENTRY_BYTES + 17)


def clean(log: CleanedLog, rng: random.Random, *, roomy: bool = False) -> None:
    """Clean the log, with options drawn at random.

    roomy: the memory suffices.  Otherwise it depends on the blocks how far a cleaning reaches
    """
    log.now_ms += rng.choice([0, 30, 3 * RETENTION_MS, 200_000])
    memory = rng.choice([1 << 20, 1 << 20, SMALL])
    log.clean(
        memory=1 << 20 if roomy else memory,
        settled_end=rng.choice([FAR, FAR, log.log.log_end // 2, 0]),
        clock=rng.random() < 0.8,
    )


def check_opened_again(log: CleanedLog, *, clean: bool) -> None:
    """An opening finds the same log, and the producers that write on find their state."""
    before, rows, at = log.log, log.raw(), log.log.cleaned.end
    producers = before.producers.items()
    if clean:
        before.close()
    log.reopen(clean=clean)
    assert (log.raw(), log.log.cleaned.end, log.log.log_end) == (rows, at, before.log_end)
    assert log.log.producers.open_transactions == before.producers.open_transactions
    for who, entry in producers:
        found = log.log.producers.get(who)
        assert found is not None
        assert (found.epoch, found.last_sequence) == (entry.epoch, entry.last_sequence)
        assert found.batches[len(found.batches) - len(entry.batches) :] == entry.batches


@given(SEEDS)
def test_every_reader_sees_the_latest_record_of_each_key(seed: int) -> None:
    rng = random.Random(seed)
    log = CleanedLog()
    for _ in range(30):
        random_step(log, rng)
        if rng.random() < 0.15:
            clean(log, rng)
            log.check()
        if rng.random() < 0.08:
            check_opened_again(log, clean=rng.random() < 0.5)
            log.check()
    log.check()
    for start in range(0, log.log.log_end, 7):
        assert log.records(start) == [each for each in log.records() if each.offset >= start]


@given(SEEDS)
def test_a_lost_derived_file_changes_nothing(seed: int) -> None:
    """Indexes, aborted indexes and producer snapshots are rebuilt from the cleaned batches."""
    rng = random.Random(seed)
    log = CleanedLog()
    for _ in range(30):
        random_step(log, rng)
        if rng.random() < 0.15:
            clean(log, rng)
    committed = log.records(committed=True)
    for name in log.storage.names(PATH):
        if name.endswith((".txnindex", ".index", ".timeindex", ".snapshot")) and rng.random() < 0.7:
            log.storage.remove(f"{PATH}/{name}")
    check_opened_again(log, clean=False)
    assert log.records(committed=True) == committed
    log.check()


@given(SEEDS)
def test_a_crash_at_any_moment_loses_nothing(seed: int) -> None:
    """The process dies, or the machine loses power, while a cleaning is written or put in place."""
    rng = random.Random(seed)
    log = CleanedLog()
    for _ in range(6):
        for _ in range(6):
            random_step(log, rng)
        log.log.flush()
        end, producers = log.log.log_end, log.log.producers.items()
        log.storage.crash_at = rng.randrange(60)
        try:
            clean(log, rng)
        except Crashed:
            power = rng.random() < 0.5
            if power:
                log.storage.power_loss(rng)
            else:
                log.storage.crash()
            log.reopen(same_boot=not power)
        log.storage.crash_at = None
        assert log.log.log_end == end
        assert [each for each, _ in log.log.producers.items()] == [each for each, _ in producers]
        for record in log.records():
            if record.offset < log.log.cleaned.end:
                log.first_cleaned_ms.setdefault(record.offset, log.now_ms)
        log.check()
    check_opened_again(log, clean=True)


@given(SEEDS)
def test_blocks_make_no_difference(seed: int) -> None:
    found = []
    for size in (64, local_cleaner.BLOCK_BYTES):
        local_cleaner.BLOCK_BYTES, before = size, local_cleaner.BLOCK_BYTES
        try:
            rng, log = random.Random(seed), CleanedLog()
            for _ in range(25):
                random_step(log, rng)
                if rng.random() < 0.15:
                    clean(log, rng, roomy=True)
            found.append(log.raw())
        finally:
            local_cleaner.BLOCK_BYTES = before
    assert found[0] == found[1]
