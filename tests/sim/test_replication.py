"""Replication on production brokers in a simulated world: what is acknowledged survives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.replication_kit import Kit, Ledger

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Kit] = []

    def one(seed: int, **given: Any) -> Kit:
        made.append(Kit(seed, **given))
        return made[-1]

    yield one
    for kit in made:
        kit.sim.close()


def test_replicas_follow_their_leader(make: Any) -> None:
    kit = make(1)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(200)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    logs = [kit.replica(n, "t").log for n in (1, 2, 3)]
    first = logs[0].read(0, bound=logs[0].written_end, max_bytes=1 << 30).data
    for log in logs:
        assert log.read(0, bound=log.written_end, max_bytes=1 << 30).data == first
    ledger.check()
    assert not ledger.failed


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_is_killed_takes_nothing_with_it(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    for _ in range(4):
        ledger.more(100)
        leader = kit.state("t").leader
        kit.kill(leader)
        ledger.more(100)
        assert kit.state("t").leader != leader
        kit.boot(leader)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed
