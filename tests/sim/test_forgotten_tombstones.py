"""Tombstones that leave a partition with several replicas, and replicas that missed them (rules C4,
C8).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from pk import errors
from pk.client.options import producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.log import batch as batches
from pk.log import columns, forgotten
from pk.log.forgotten import Forgotten
from tests.kit.cluster import RETRIES, Kit, assign
from tests.kit.in_process_cleaner import InProcessCleaner

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIGS = {
    "cleanup_policy": "compact", "segment_bytes": 14_336, "min_insync_replicas": 1,
    "min_cleanable_dirty_ratio": 0.0, "delete_retention_ms": 100,
}  # fmt: skip
KEY = b"deleted"


class Record(NamedTuple):
    offset: int
    key: bytes
    value: bytes | None


def compacted(make: Any, seed: int, server: dict[str, Any] | None = None, **configs: Any) -> Kit:
    kit: Kit = make(
        seed, cleaner=InProcessCleaner, log_cleaner_backoff_ms=200,
        auto_leader_rebalance_enable=False, **(server or {}),
    )  # fmt: skip
    kit.create("t", **{**CONFIGS, **configs})
    return kit


def put(kit: Kit, *rows: tuple[bytes, bytes | None]) -> None:
    """Write rows, one batch each, and wait until they are acknowledged."""
    world = kit.sim.world_of("writer")
    settings, _ = producer_options({"linger_ms": 0, "delivery_timeout_ms": 30_000, **RETRIES})
    engine = ProduceEngine(world, kit.cluster("writer"), settings)
    failures: list[errors.PkError] = []

    async def story() -> None:
        engine.cluster.start()
        accumulator = await engine.open("t", 10_000)
        for key, value in rows:
            outcome: list[Any] = []

            def told(metadata: Any, error: Any, outcome: list[Any] = outcome) -> None:
                outcome.append(error)

            size = record_size(value or b"", key, None, "t")
            assert accumulator.append(value, key, None, 0, None, told, size=size) is not None
            engine.poke()
            while not outcome:
                await world.clock.sleep_ms(5)
            failures.extend(error for error in outcome if error is not None)
        await engine.close()

    kit.done("writer", story())
    assert not failures


def fill(kit: Kit, rounds: int = 2) -> None:
    """Write other keys until segments roll."""
    for _ in range(rounds):
        put(kit, *((b"other", b"v" * 4_000) for _ in range(5)))


def records(kit: Kit, n: int) -> list[Record]:
    found: list[Record] = []
    for header, raw in batches.iter_batches(kit.content(n, "t")):
        if header.record_count and not header.control:
            rows = columns.decode(raw, decoded_bytes_max=1 << 24)
            found += map(
                Record,
                *(rows.column(name).to_pylist() for name in ("offset", "key", "value")),
            )
    return found


def values(kit: Kit, n: int) -> list[bytes | None]:
    """Return the values of the key that is deleted, on one replica."""
    return [each.value for each in records(kit, n) if each.key == KEY]


def until_forgotten(kit: Kit, *replicas: int) -> None:
    """Write on until no replica has a record of the key.  Horizons count from the time limit of a
    cleaning, which is a minute.
    """
    for _ in range(12):
        fill(kit)
        kit.wait(15_000)
        if not any(values(kit, n) for n in replicas):
            return
    raise AssertionError([values(kit, n) for n in replicas])


def test_tombstones_leave_every_replica(make: Any) -> None:
    """Rule C4: replicas report how far they are cleaned, and the leader tells them the lowest."""
    kit = compacted(make, 41)
    put(kit, (KEY, b"1"), (KEY, None))
    until_forgotten(kit, 1, 2, 3)
    assert kit.in_sync("t")
    for n in kit.boots:
        assert kit.replica(n, "t").log.cleaned.forgotten_end == 2


def test_a_tombstone_stays_while_a_replica_is_not_cleaned(make: Any) -> None:
    """Rule C4: the replica may have the older record."""
    kit = compacted(make, 42)
    put(kit, (KEY, b"1"))
    kit.until(lambda: kit.in_sync("t"))
    n = next(n for n in kit.boots if n != kit.state("t").leader)
    kit.kill(n)
    put(kit, (KEY, None))
    for _ in range(8):
        fill(kit)
        kit.wait(15_000)
    others = [each for each in kit.boots if each != n]
    assert [values(kit, each) for each in others] == [[None], [None]]
    assert all(kit.replica(each, "t").log.cleaned.end > 2 for each in others)
    kit.boot(n)
    kit.until(lambda: kit.in_sync("t"))
    until_forgotten(kit, 1, 2, 3)
    assert not kit.events("log_begun_anew")


def test_a_replica_that_returns_does_not_bring_deleted_keys_back(make: Any) -> None:
    """Rule C8: it was removed and added again while its broker was down."""
    kit = compacted(make, 43)
    put(kit, (KEY, b"1"))
    kit.until(lambda: kit.in_sync("t"))
    leader = kit.state("t").leader
    n, other = (n for n in kit.boots if n != leader)
    kit.kill(n)
    kit.soon(lambda: n not in kit.state("t").isr)
    assign(kit, "t", leader, other)
    kit.soon(lambda: set(kit.state("t").replicas) == {leader, other})
    put(kit, (KEY, None))
    until_forgotten(kit, leader, other)
    assign(kit, "t", leader, other, n)
    kit.boot(n)
    kit.until(lambda: kit.in_sync("t"))
    assert not values(kit, n)
    assert kit.events("log_begun_anew")
    begun = kit.events("log_begun_anew")
    kit.kill(n)  # its copy is not taken for an old log
    fill(kit)
    kit.boot(n)
    kit.until(lambda: kit.in_sync("t"))
    assert kit.events("log_begun_anew") == begun


def uncleanly_led(make: Any, seed: int) -> tuple[Kit, int]:
    """A partition with a leader that lacks the newer value of the key; and the former leader, which
    was down and has removed the older value.
    """
    kit = compacted(
        make, seed, {"unclean_recovery_wait_ms": 500}, unclean_leader_election_enable=True
    )
    put(kit, (KEY, b"older"))
    kit.until(lambda: kit.in_sync("t"))
    former = kit.state("t").leader
    others = [n for n in kit.boots if n != former]
    for n in others:
        kit.kill(n)
    kit.soon(lambda: kit.state("t").isr == (former,))
    put(kit, (KEY, b"newer"))
    fill(kit)
    kit.soon(lambda: values(kit, former) == [b"newer"])
    kit.kill(former)
    for n in others:
        kit.boot(n)
    kit.soon(lambda: kit.state("t").leader in others, 60_000)
    return kit, former


def test_a_replica_that_is_cut_below_its_cleaned_end_is_copied_again(make: Any) -> None:
    """Rule C8: it removed the older value in favour of the newer one, which the cut removes."""
    kit, former = uncleanly_led(make, 44)
    kit.boot(former)
    kit.until(lambda: kit.in_sync("t"))
    for n in kit.boots:
        assert values(kit, n) == [b"older"]
    assert kit.events("log_begun_anew") == 1


def test_an_incomplete_replica_is_copied_again(make: Any) -> None:
    """Rule C8: the process died before the log was begun again."""
    kit, former = uncleanly_led(make, 45)
    storage = kit.storages[former]
    path = next(f"topics/{name}" for name in storage.list("topics") if name == "t-0")
    end = kit.replica(kit.state("t").leader, "t").log.log_end
    for name in storage.list(path):
        if name.endswith(".log") and int(name.split(".")[0]) >= end:
            storage.remove(f"{path}/{name}")
    forgotten.write(storage, path, Forgotten(incomplete=True))
    kit.boot(former)
    kit.until(lambda: kit.in_sync("t"))
    assert values(kit, former) == [b"older"]
    assert not kit.replica(former, "t").log.cleaned.incomplete
