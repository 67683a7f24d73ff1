"""L16 in a cluster: leaders whose disk is full hand over; full followers delay no other replica."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from tests.kit.cluster import Kit, Ledger, written

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RESERVE = 100_000


@pytest.fixture
def make_kit() -> Any:
    made: list[Kit] = []

    def one(seed: int, **server: Any) -> Kit:
        made.append(Kit(seed, **{"disk_reserve_bytes": RESERVE, **server}))
        return made[-1]

    yield one
    for each in made:
        assert not each.bugs, each.bugs
        each.sim.close()


def fill(kit: Kit, n: int, leave: int = 0) -> None:
    kit.storages[n].capacity = kit.storages[n].used_bytes() + leave


def now_ms(kit: Kit) -> float:
    return kit.sim.loop.now_us / 1000


@pytest.mark.parametrize("leave", [RESERVE - 1, 0])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_full_leader_hands_over_and_produce_goes_on(make_kit: Any, seed: int, leave: int) -> None:
    """Also if the former leader cannot store a byte of what it fetches from then on."""
    kit = make_kit(seed, replica_lag_time_max_ms=600_000)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    old = kit.state("t").leader
    fill(kit, old, leave)
    full_ms = now_ms(kit)
    kit.until(lambda: kit.state("t").leader != old)
    ledger.more(50)
    assert now_ms(kit) - full_ms < 1_000 + 2_000, "after the next measurement"
    ledger.more(500)
    assert now_ms(kit) - full_ms < 10_000, "nothing waits for the lag of a full follower"
    kit.storages[old].capacity = None
    kit.until(lambda: kit.in_sync("t"))
    ledger.stop()
    ledger.check()
    assert not ledger.failed


def test_a_full_leader_that_nobody_can_relieve_keeps_the_lead_and_refuses(make_kit: Any) -> None:
    """The other brokers have less than twice the reserve: they do not become leaders for a minute
    each.
    """
    kit = make_kit(3)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t", delivery_timeout_ms=3_000, request_timeout_ms=1_000)
    ledger.more(20)
    old, epoch = kit.state("t").leader, kit.state("t").leader_epoch
    for n in kit.brokers:
        fill(kit, n, 2 * RESERVE - 10_000 if n != old else RESERVE // 2)
    kit.wait(5_000)
    assert ledger.failed
    assert {type(each) for each in ledger.failed.values()} == {errors.DeliveryTimedOut}
    assert "disk_reserve_bytes" in next(iter(ledger.failed.values())).message
    assert (kit.state("t").leader, kit.state("t").leader_epoch) == (old, epoch)
    other = next(n for n in kit.brokers if n != old)
    kit.storages[other].capacity = None
    ledger.more(20)
    assert kit.state("t").leader == other
    ledger.stop()
    ledger.check()


def test_a_broker_that_starts_full_is_not_preferred(make_kit: Any) -> None:
    """The free space is measured before the broker registers."""
    kit = make_kit(4)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 50)
    old = kit.state("t").leader
    kit.kill(old)
    kit.until(lambda: kit.state("t").leader not in (old, -1))
    fill(kit, old, RESERVE // 2)
    kit.boot(old)
    kit.until(lambda: kit.serves(old) and kit.in_sync("t"))
    kit.wait(400_000)  # preferred leaders were elected meanwhile
    assert kit.state("t").leader != old
    kit.storages[old].capacity = None
    kit.until(lambda: kit.state("t").leader == old)
    ledger.check()
