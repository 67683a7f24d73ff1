"""Compacted topics in a cluster: each replica cleans its own log, and readers and followers step
over offsets that were removed (rules C1, C2).
"""

from __future__ import annotations

from typing import Any

import pytest

from pk.log import batch as batches
from pk.log import columns
from tests.kit.cluster import Kit, Ledger
from tests.kit.in_process_cleaner import InProcessCleaner

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KEYS = 7
CONFIGS = {
    "cleanup_policy": "compact", "segment_bytes": 14_336, "min_insync_replicas": 2,
    "min_cleanable_dirty_ratio": 0.1,
}  # fmt: skip


def compacted(make: Any, seed: int) -> tuple[Kit, Ledger]:
    kit: Kit = make(
        seed, cleaner=InProcessCleaner, log_cleaner_backoff_ms=200,
        auto_leader_rebalance_enable=False,
    )  # fmt: skip
    kit.create("t", **CONFIGS)
    return kit, Ledger(kit, "t", keys=KEYS, size=400)


def rows_of(kit: Kit, n: int) -> dict[int, int]:
    """Return offset -> number of every record of a replica."""
    found: dict[int, int] = {}
    for _, raw in batches.iter_batches(kit.content(n, "t")):
        rows = columns.decode(raw, decoded_bytes_max=1 << 24)
        pairs = zip(
            rows.column("offset").to_pylist(), rows.column("value").to_pylist(), strict=True
        )
        found.update((offset, int(value)) for offset, value in pairs)
    return found


def check(ledger: Ledger, rows: dict[int, int]) -> None:
    """Every reader gets the latest value of each key, and nothing at a wrong offset."""
    newest: dict[int, int] = {}
    for number in rows.values():
        newest[number % KEYS] = number
    for number, offset in ledger.acked.items():
        assert rows.get(offset, number) == number
        assert newest[number % KEYS] >= number
    assert list(rows.values()) == sorted(rows.values())


def check_all(kit: Kit, ledger: Ledger) -> None:
    check(ledger, ledger.rows())
    for n in kit.boots:
        check(ledger, rows_of(kit, n))


def test_readers_follow_leaders_that_clean_their_logs(make: Any) -> None:
    """The leader dies twice; each replica has removed other records by then."""
    kit, ledger = compacted(make, 31)
    for _ in range(3):
        ledger.more(300)
        before = kit.events("log_cleaned")
        kit.until(lambda before=before: kit.events("log_cleaned") > before + 2)
        leader = kit.state("t").leader
        kit.kill(leader)
        ledger.more(100)
        kit.boot(leader)
        kit.until(lambda: kit.in_sync("t") or len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    check_all(kit, ledger)
    assert len(ledger.rows()) < len(ledger.acked) / 2


def test_a_replica_is_filled_from_a_cleaned_log(make: Any) -> None:
    """Its copy lacks the same offsets, and ends where the leader's log ends."""
    kit, ledger = compacted(make, 32)
    ledger.more(400)
    kit.until(lambda: kit.events("log_cleaned") > 6)
    leader = kit.state("t").leader
    n = next(each for each in kit.boots if each != leader)
    kit.empty_disk(n)
    ledger.more(100)
    kit.boot(n)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    kit.kill(leader)
    ledger.more(100)
    kit.boot(leader)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    check_all(kit, ledger)


def test_a_cleaned_log_survives_a_power_loss(make: Any) -> None:
    """log/swap W1: wherever the power goes off."""
    kit, ledger = compacted(make, 33)
    for turn in range(4):
        ledger.more(200)
        n = 1 + turn % 3
        kit.until(lambda: kit.events("log_cleaned") > 2)
        kit.wait(37 * turn)
        kit.power_loss(n)
        ledger.more(50)
        kit.boot(n)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    check_all(kit, ledger)
    assert not kit.events("log_damaged")
