"""Brokers with several data directories in a cluster: a failed directory takes only its own
replicas offline.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pk import errors
from tests.kit.cluster import Kit, Ledger

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def kit() -> Iterator[Kit]:
    made = Kit(31, directories=2, auto_leader_rebalance_enable=False)
    yield made
    made.sim.close()


def test_a_directory_that_fails_and_comes_back(kit: Kit) -> None:
    """broker/metadata_publisher M4, M6, L2, L3: its replicas leave the ISR and are not created in
    another directory; the other directory's replicas stay.  When the directory is back, its logs
    are compared with the leaders' before they count.
    """
    names = [f"t{number}" for number in range(4)]
    for name in names:
        kit.create(name, min_insync_replicas=2)
    ledgers = {name: Ledger(kit, name) for name in names}
    for ledger in ledgers.values():
        ledger.more(30)
    n = kit.state("t0").leader
    on_second = [name for name in names if kit.lies_on_second(n, name)]
    assert 0 < len(on_second) < len(names)
    kit.second[n].failed = errors.StorageFailed("gone")
    kit.until(lambda: all(n not in kit.state(name).isr for name in on_second))
    for name, ledger in ledgers.items():
        ledger.more(30)
        assert (n in kit.state(name).isr) is (name not in on_second)
    kit.kill(n)
    kit.second[n].failed = errors.StorageFailed("still gone")
    kit.boot(n)
    kit.until(lambda: kit.serves(n))
    kit.until(lambda: all(n in kit.state(name).isr for name in names if name not in on_second))
    kit.wait(3_000)
    here = {partition.topic for partition in kit.brokers[n].core.partitions.values()}
    assert here == set(names) - set(on_second), "M6"
    for name, ledger in ledgers.items():
        ledger.more(30)
        assert (n in kit.state(name).isr) is (name not in on_second)
    kit.kill(n)
    kit.second[n].failed = None
    kit.boot(n)
    kit.until(lambda: all(len(kit.state(name).isr) == 3 for name in names))
    for ledger in ledgers.values():
        ledger.stop()
        ledger.check()
    kit.until(lambda: all(kit.in_sync(name) for name in names))
    for name in names:
        assert len({kit.content(each, name) for each in (1, 2, 3)}) == 1


def test_a_directory_that_hangs_keeps_nobody_in_the_isr(kit: Kit) -> None:
    """broker/scheduler U4: only the leader sees that a follower makes no progress.  The partitions
    of the leader's other directory wait for that, and must not wait for a disk.
    """
    names = [f"t{number}" for number in range(6)]
    for name in names:
        kit.create(name, min_insync_replicas=2, flush_ms=200)
    n = kit.state("t0").leader
    led = [name for name in names if kit.state(name).leader == n]
    on_second = [name for name in led if kit.lies_on_second(n, name)]
    assert 0 < len(on_second) < len(led)
    for name in on_second:
        Ledger(kit, name).more(10)  # there is something to flush
    kit.second[n].lag_ms = 3_600_000
    follower = next(each for each in (1, 2, 3) if each != n)
    kit.sim.network.cut(f"b{n}", f"b{follower}")
    there = [name for name in led if name not in on_second]
    for name in there:
        Ledger(kit, name)
    kit.wait(10_000)
    assert all(follower not in kit.state(name).isr for name in there)
    for name in there:
        Ledger(kit, name).more(20)
