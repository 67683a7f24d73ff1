"""Replicas whose disk is full just when their log is reshaped: they go on once there is room."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from tests.sim.replication_kit import Kit, Ledger

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def _parted(kit: Kit) -> tuple[Ledger, int]:
    """A replica that is down, and whose log holds what the leader's does not."""
    kit.create("t", min_insync_replicas=1)
    ledger = Ledger(kit, "t", acks="1", enable_idempotence=False)
    ledger.more(50)
    old = kit.state("t").leader
    others = [n for n in (1, 2, 3) if n != old]
    for n in others:
        kit.sim.network.cut(f"b{old}", f"b{n}")
    ledger.more(50)
    kit.kill(old)
    kit.until(lambda: kit.state("t").leader in others)
    for n in others:
        kit.sim.network.heal(f"b{old}", f"b{n}")
    ledger.more(50)
    ledger.stop()
    return ledger, old


class _Full:
    """A disk that has no room from the `step`th operation on a log's files that is reshaped."""

    def __init__(self, kit: Kit, n: int, step: int) -> None:
        self.hits = 0
        self._kit, self._n, self._left = kit, n, step
        kit.storages[n].fault = self

    def __call__(self, operation: str, path: str) -> Exception | None:
        if operation == "read" or "topics/t-0" not in path:
            return None
        if not self.hits and not self._kit.brokers[self._n].core.replicas.changing:
            return None
        self._left -= 1
        if self._left >= 0:
            return None
        self.hits += 1
        return errors.StorageFull("full")

    def end(self) -> None:
        self._kit.storages[self._n].fault = None


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_log_that_was_left_half_way_goes_on_when_there_is_room(make: Any, step: int) -> None:
    """Rule L2: until then it is told to be offline, and no restart is needed."""
    kit = make(28, auto_leader_rebalance_enable=False)
    ledger, old = _parted(kit)
    full = _Full(kit, old, step)
    kit.boot(old)
    kit.until(lambda: full.hits and kit.replica(old, "t").problem is not None)
    assert kit.replica(old, "t").log.torn
    core = kit.brokers[old].core
    assert len(core.offline_replicas()) == 1
    kit.wait(12_000)
    assert kit.replica(old, "t").log.torn
    assert kit.replica(old, "t").problem is not None
    assert old not in kit.state("t").isr
    full.end()
    kit.until(lambda: kit.in_sync("t"))
    assert not core.offline_replicas()
    assert len({kit.content(n, "t") for n in (1, 2, 3)}) == 1
    assert not kit.bugs
    found = ledger.rows().values()
    assert len(set(found)) == len(found)
