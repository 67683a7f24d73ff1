"""A leader that not every in-sync replica has fetched from reports no gap as final (rule L6).

The history, with min_insync_replicas=1 and an ISR of three replicas
  1  Leader A appends batches 1 and 2; no follower can fetch them.  Batch 1 reaches its delivery
     timeout, batch 2 does not
  2  B is elected and lacks both batches.  The producer sends batch 2 to B, where it is out of order
  3  A is elected again before it could fetch from B, so its log was never truncated
If B answers batch 2 as a gap, the producer sends it again under a new epoch, and A stores it twice.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from pk import errors
from pk.server.replica.leader import Leader
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Kit, Ledger, assign

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DELIVERY_MS = 4_000


class Sender(Ledger):
    """A ledger that sends a record only when the test asks for it."""

    wanted = 0

    async def _run(self) -> None:
        self.engine.cluster.start()
        accumulator = await self.engine.open(self.topic, 5_000)
        while self._going:
            await self._world.clock.sleep_ms(5)
            if self.sent < self.wanted:
                self._append(accumulator)
                self.engine.poke()

    def send(self) -> None:
        """Send one record and run until the leader has appended it."""
        leader = self.kit.replica(self.kit.state(self.topic).leader, self.topic)
        end = leader.log.written_end
        self.wanted += 1
        self.kit.until(lambda: leader.log.written_end > end)


def _elect(kit: Kit, first: int) -> None:
    """Make a replica the preferred one and elect it."""
    replicas = kit.state("t").replicas
    assign(kit, "t", first, *(each for each in replicas if each != first))
    kit.ask(wire.ElectLeadersRequest())
    kit.until(lambda: kit.state("t").leader == first and kit.replica(first, "t").leader is not None)


def _history(make: Any) -> Sender:
    """Play the module's history; return the producer after all replicas agree again."""
    kit: Kit = make(1, replica_lag_time_max_ms=60_000, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=1)
    sender = Sender(kit, "t", delivery_timeout_ms=DELIVERY_MS)
    sender.send()
    kit.until(lambda: len(sender.acked) == 1 and kit.in_sync("t"))
    former, successor, third = kit.state("t").replicas
    links = [(f"b{former}", f"b{each}") for each in (successor, third)]
    for link in links:
        kit.sim.network.cut(*link)
    sender.send()
    kit.wait(DELIVERY_MS // 2)
    sender.send()
    kit.until(lambda: len(sender.failed) == 1)
    _elect(kit, successor)
    assert kit.state("t").isr == (former, successor, third)
    kit.wait(500)
    _elect(kit, former)
    for link in links:
        kit.sim.network.heal(*link)
    sender.stop()
    kit.until(lambda: kit.in_sync("t"))
    return sender


def test_a_gap_is_final_only_once_all_in_sync_replicas_have_fetched(make: Any) -> None:
    sender = _history(make)
    sender.check()
    assert list(sender.acked) == [0, 2]
    assert isinstance(sender.failed[1], errors.DeliveryTimedOut)


def test_a_gap_that_is_final_too_early_stores_a_batch_twice(make: Any) -> None:
    with patch.object(Leader, "settled", property(lambda _: True)):
        sender = _history(make)
    with pytest.raises(AssertionError, match="twice"):
        sender.check()
