"""Replication on production brokers in a simulated world: acknowledged records survive."""

from __future__ import annotations

from typing import Any

import pytest

from pk.limits import HEADER_BYTES
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Ledger

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_replicas_follow_their_leader(make: Any) -> None:
    kit = make(1)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(200)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    assert kit.content(1, "t") == kit.content(2, "t") == kit.content(3, "t") != b""
    ledger.check()
    assert not ledger.failed


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("seed", range(2))
def test_a_dead_follower_leaves_the_isr_and_comes_back(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    follower = kit.state("t").replicas[1]
    kit.kill(follower)
    kit.until(lambda: follower not in kit.state("t").isr)
    ledger.more(200)
    kit.boot(follower)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed


def test_a_follower_that_stands_still_leaves_the_isr(make: Any) -> None:
    """It is alive for the controller; only its leader sees that it does not fetch."""
    kit = make(7)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    leader, follower = kit.state("t").replicas[:2]
    kit.sim.network.cut(f"b{leader}", f"b{follower}")
    ledger.more(20)  # R2: only once the removal is committed
    assert follower not in kit.state("t").isr
    kit.sim.network.heal(f"b{leader}", f"b{follower}")
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()


def test_below_the_minimum_nothing_is_acknowledged(make: Any) -> None:
    # rule R1
    kit = make(8)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    leader, *followers = kit.state("t").replicas
    for n in followers:
        kit.kill(n)
    kit.until(lambda: kit.state("t").isr == (leader,))
    kit.wait(500)
    acked, mark = len(ledger.acked), kit.replica(leader, "t").high_watermark
    kit.wait(5_000)
    assert len(ledger.acked) == acked
    assert kit.replica(leader, "t").high_watermark == mark
    kit.boot(followers[0])
    ledger.more(100)
    kit.boot(followers[1])
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()


@pytest.mark.parametrize("seed", range(2))
def test_an_isolated_leader_acknowledges_nothing(make: Any, seed: int) -> None:
    """Rules R6, L5: the others elect a leader, and parked requests are answered when the cut
    heals.
    """
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    old = kit.state("t").leader
    others = [f"b{n}" for n in (1, 2, 3) if n != old]
    for name in ("controller", *others):
        kit.sim.network.cut(f"b{old}", name)
    kit.until(lambda: kit.state("t").leader != old)
    kit.wait(2_500)
    alone = kit.replica(old, "t")
    mark = alone.high_watermark
    ledger.more(100)
    assert alone.high_watermark == mark, "two histories"
    for name in ("controller", *others):
        kit.sim.network.heal(f"b{old}", name)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed


@pytest.mark.parametrize("seed", range(2))
def test_what_only_the_old_leader_had_is_cut(make: Any, seed: int) -> None:
    """The leader has acks=1 records that no follower has; then another replica leads.  The logs
    diverge, and agree again.
    """
    kit = make(seed)
    kit.create("t", min_insync_replicas=1)
    ledger = Ledger(kit, "t", acks="1", enable_idempotence=False)
    ledger.more(50)
    old = kit.state("t").leader
    for n in (1, 2, 3):
        if n != old:
            kit.sim.network.cut(f"b{old}", f"b{n}")
    ledger.more(50)
    kit.kill(old)
    kit.until(lambda: kit.state("t").leader not in (old, -1))
    for n in (1, 2, 3):
        if n != old:
            kit.sim.network.heal(f"b{old}", f"b{n}")
    ledger.more(50)
    kit.boot(old)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    assert kit.events("log_cut")
    assert kit.content(1, "t") == kit.content(2, "t") == kit.content(3, "t")
    entries = [kit.replica(n, "t").log.epochs.entries for n in (1, 2, 3)]
    assert entries[0] == entries[1] == entries[2]
    assert len(entries[0]) > 1


@pytest.mark.parametrize("seed", range(2))
def test_an_empty_disk_is_filled_again(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(200)
    for n in (1, 2, 3):
        kit.empty_disk(n)
        ledger.more(50)
        kit.boot(n)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed


@pytest.mark.parametrize("seed", range(2))
def test_a_clean_bounce_is_not_noticed(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    for n in (1, 2, 3, 1, 2, 3):
        ledger.more(30)
        kit.drain(n)
        ledger.more(30)
        kit.boot(n)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed


@pytest.mark.parametrize("seed", range(2))
def test_one_power_loss_at_a_time_loses_nothing(make: Any, seed: int) -> None:
    """Rule L3: min ISR 2 survives one power loss, whether acknowledged records were SYNCED or
    not.
    """
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    for n in (1, 2, 3, 1, 2, 3):
        ledger.more(60)
        kit.power_loss(n)
        ledger.more(20)
        kit.boot(n)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed


@pytest.mark.parametrize("seed", range(2))
def test_all_processes_killed_at_once_lose_nothing(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    for _ in range(3):
        ledger.more(100)
        for n in (1, 2, 3):
            kit.kill(n)
        kit.wait(300)
        for n in (1, 2, 3):
            kit.boot(n)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed


def test_a_new_replica_begins_where_the_leaders_log_does(make: Any) -> None:
    """Rule R5: it does not fetch what retention has deleted; idempotence continues to work."""
    kit = make(3, log_retention_check_interval_ms=200)
    kit.create("t", min_insync_replicas=2, segment_bytes=20_000, retention_bytes=40_000)
    ledger = Ledger(kit, "t")
    ledger.more(1_000)
    kit.until(lambda: kit.replica(kit.state("t").leader, "t").log.local_log_start > 0)
    n = kit.state("t").replicas[2]
    kit.empty_disk(n)
    ledger.more(50)
    kit.boot(n)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    leader, fresh = kit.replica(kit.state("t").leader, "t"), kit.replica(n, "t")
    assert kit.events("log_begun_anew") == 1
    assert fresh.log.local_log_start > 0
    kit.until(lambda: fresh.log.log_start == leader.log.log_start)
    (producer_id,) = {1, 2, 3} & set(leader.log.producers._by_id)
    mine, theirs = fresh.log.producers.get(producer_id), leader.log.producers.get(producer_id)
    assert mine is not None
    assert theirs is not None
    assert mine.batches == theirs.batches


def test_a_damaged_replica_is_made_anew(make: Any) -> None:
    """Rule L9: sealed data that was flushed and reads wrong ends the replica, not the partition."""
    kit = make(4, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2, segment_bytes=20_000)
    ledger = Ledger(kit, "t")
    ledger.more(2_000)
    leader, n = kit.state("t").replicas[:2]
    kit.drain(n)  # its checkpoint states that everything is flushed
    storage = kit.storages[n]
    path = next(name for name in sorted(storage.files()) if name.endswith("00000000.log"))
    raw = bytearray(storage.read_file(path))
    raw[HEADER_BYTES] ^= 1  # of the first batch, which a reader asks for again
    storage.replace_file(path, bytes(raw))
    kit.boot(n)
    kit.until(lambda: n in kit.state("t").isr)
    assert kit.state("t").leader != n
    kit.until(lambda: kit.in_sync("t"))
    # No broker reads the batch there, so the damage is not known yet.  Make this replica the
    # leader, and read it.
    for other in (leader, kit.state("t").replicas[2]):
        kit.drain(other)
    kit.until(lambda: kit.state("t").leader == n)
    for other in (leader, kit.state("t").replicas[2]):
        kit.boot(other)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    ledger.check()
    kit.until(lambda: kit.events("replica_made_anew") > 0)  # by its next look at the metadata
    kit.until(lambda: kit.in_sync("t"))
    assert kit.events("replica_made_anew") == 1
    assert kit.content(1, "t") == kit.content(2, "t") == kit.content(3, "t")


@pytest.mark.parametrize("seed", range(2))
def test_an_unclean_leader_is_followed_below_the_watermark(make: Any, seed: int) -> None:
    """Rules R3, R4: only if the topic allows it; then all replicas serve one history."""
    kit = make(seed, unclean_recovery_wait_ms=1_000)
    kit.create("t", min_insync_replicas=1, unclean_leader_election_enable=True)
    ledger = Ledger(kit, "t", enable_idempotence=False)
    ledger.more(50)
    first, second, third = kit.state("t").replicas
    kit.kill(third)
    kit.until(lambda: third not in kit.state("t").isr)
    ledger.more(100)
    kit.kill(second)
    ledger.more(100)
    kit.power_loss(first)
    kit.boot(third)
    kit.until(lambda: kit.state("t").leader == third)
    ledger.more(50)
    kit.boot(first)
    kit.boot(second)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    assert kit.state("t").unclean_epoch > 0
    assert kit.content(1, "t") == kit.content(2, "t") == kit.content(3, "t")
    numbers = list(ledger.rows().values())
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("seed", range(2))
def test_the_only_member_of_the_isr_is_waited_for(make: Any, seed: int) -> None:
    """Rule R3 without permission for loss: the partition stays offline, and no record is lost."""
    kit = make(seed, unclean_recovery_wait_ms=500)
    kit.create("t", min_insync_replicas=1)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    first, second, third = kit.state("t").replicas
    for n in (third, second):
        kit.kill(n)
        kit.until(lambda n=n: n not in kit.state("t").isr)
    ledger.more(100)
    kit.kill(first)
    kit.boot(second)
    kit.boot(third)
    kit.wait(5_000)
    assert kit.state("t").leader == -1
    kit.boot(first)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()


@pytest.mark.parametrize("seed", range(3))
def test_power_lost_everywhere_loses_nothing_that_was_flushed(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2, flush_on_ack=True)
    ledger = Ledger(kit, "t")
    for _ in range(3):
        ledger.more(100)
        for n in (1, 2, 3):
            kit.power_loss(n)
        kit.wait(200)
        for n in (2, 3, 1):
            kit.boot(n)
            kit.wait(100)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed


@pytest.mark.parametrize("seed", range(3))
def test_power_lost_everywhere_leaves_one_history(make: Any, seed: int) -> None:
    """Records were acknowledged from the page cache, and all nodes lose power: a prefix remains,
    the same on all replicas.
    """
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t", enable_idempotence=False, delivery_timeout_ms=3_000)
    ledger.more(300)
    for n in (1, 2, 3):
        kit.power_loss(n)
    kit.wait(200)
    before = dict(ledger.acked)
    for n in (1, 2, 3):
        kit.boot(n)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.more(50)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    assert kit.content(1, "t") == kit.content(2, "t") == kit.content(3, "t")
    rows = ledger.rows()
    kept = [rows.get(offset) == number for number, offset in sorted(before.items())]
    assert kept == sorted(kept, reverse=True), "a hole"


def test_a_topic_that_went_while_a_broker_was_away(make: Any) -> None:
    """Rules L8, Q2: the directory of the earlier topic is a stray, and the new topic has another
    log.
    """
    kit = make(5)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(100)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    n = kit.state("t").replicas[2]
    kit.kill(n)
    kit.delete("t")
    kit.create("t", min_insync_replicas=2)
    again = Ledger(kit, "t")
    again.more(100)
    kit.boot(n)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    again.stop()
    kit.until(lambda: kit.in_sync("t"))
    again.check()
    assert kit.content(1, "t") == kit.content(2, "t") == kit.content(3, "t")


@pytest.mark.parametrize("seed", range(2))
def test_an_acknowledged_deletion_is_not_undone(make: Any, seed: int) -> None:
    """Rule T9, KIP-107: every replica that may lead next knows of a deletion before it is
    acknowledged.
    """
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(200)
    leader = kit.state("t").leader
    partition = kit.replica(leader, "t")
    follower = kit.state("t").replicas[1]
    kit.sim.network.cut(f"b{leader}", f"b{follower}")
    request = wire.DeleteRecordsRequest()
    request.items.add(topic_id=partition.key.topic_id, partition=0, before_offset=150)
    asked = kit.spawn_ask(request, leader)
    kit.wait(1_000)
    assert not asked.done(), "a member of the ISR does not know it"
    kit.until(asked.done)  # it left the ISR
    assert not asked.result().results[0].HasField("error"), asked.result()
    assert follower not in kit.state("t").isr
    kit.kill(leader)
    kit.sim.network.heal(f"b{leader}", f"b{follower}")
    kit.until(lambda: kit.state("t").leader not in (leader, -1))
    assert kit.replica(kit.state("t").leader, "t").log.log_start == 150
    ledger.stop()
    kit.boot(leader)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    kit.until(lambda: all(kit.replica(n, "t").log.log_start == 150 for n in (1, 2, 3)))
