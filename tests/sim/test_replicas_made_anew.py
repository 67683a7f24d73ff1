"""Damaged replicas that are created again (rule L9): who may still rely on the records they had."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors
from pk.server.broker.metadata_publisher import POLL_WAIT_MS
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Kit, Ledger, written

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def outside(kit: Kit, topic: str) -> tuple[int, int]:
    """Return (leader, n): replica n has every record and is not in the ISR, because its broker is
    fenced.
    """
    leader, _, n = kit.state(topic).replicas
    kit.sim.network.cut(f"b{n}", "controller")
    kit.until(lambda: n not in kit.state(topic).isr)
    partition = kit.replica(leader, topic)
    assert partition.leader is not None
    known = partition.leader
    kit.until(lambda: n not in known.isr)
    # compared with the leader's log again
    kit.until(lambda: known.end_of(n) == partition.log.written_end)
    return leader, n


def damage(kit: Kit, topic: str, n: int) -> None:
    kit.brokers[n].core.failures.storage_failed(kit.replica(n, topic), errors.CorruptLog("damaged"))


def test_a_replica_made_anew_joins_when_its_leader_has_compared_it(make: Any) -> None:
    """broker/metadata_publisher M8, replica/isr M4: the leader still knows which offsets the
    replica had, and cannot learn of the damage.
    """
    kit = make(21, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, n = outside(kit, "t")
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    damage(kit, "t", n)
    kit.sim.network.heal(f"b{n}", "controller")
    kit.until(lambda: kit.events("replica_made_anew") == 1)
    kit.wait(6_000)  # its leader asks again and again
    assert kit.serves(n)
    assert n not in kit.state("t").isr
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    kit.until(lambda: len(kit.state("t").isr) == 3)
    kit.until(lambda: kit.in_sync("t"))
    assert not kit.brokers[n].core.replicas.uncompared
    ledger.check()


def test_a_replica_damaged_outside_the_isr_is_made_anew(make: Any) -> None:
    """broker/metadata_publisher M7, L9: no record reports that it left ISR or ELR, because it was
    in neither.
    """
    kit = make(22, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    leader, _, n = kit.state("t").replicas
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    ledger.more(200)
    kit.until(lambda: n not in kit.state("t").isr)
    ledger.stop()
    damage(kit, "t", n)
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    kit.until(lambda: len(kit.state("t").isr) == 3)
    assert kit.events("replica_made_anew") == 1
    ledger.check()


def test_what_was_on_its_way_to_a_replica_made_anew_is_no_answer_to_it(make: Any) -> None:
    """replica/fetcher F1, broker/metadata_publisher M8: the leader has not compared the new log,
    but its answer for the old log arrives on the old log's stream, or on the new one's.
    """
    kit = make(26, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    _, n = outside(kit, "t")
    old: Any = kit.replica(n, "t").replica
    key, replicas = old.key, kit.brokers[n].core.replicas
    stale = wire.FetchedPartition(topic_id=key.topic_id, partition=0, high_watermark=100)
    kit.sim.network.heal(f"b{n}", "controller")
    damage(kit, "t", n)
    new: Any = None

    def placed() -> bool:
        nonlocal new
        partition = kit.brokers[n].core.partitions.get(key)
        new = None if partition is None else partition.replica
        return new not in (None, old) and new.placed

    kit.until(placed)
    assert key in replicas.uncompared
    for position_id in range(1, old.position_id + 1):
        stale.position_id = position_id
        for fetcher in (old.fetcher, new.fetcher):
            fetcher._take_entry(stale, b"")
    assert key in replicas.uncompared
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.check()


def test_a_replica_is_not_made_anew_before_the_controller_knows(make: Any) -> None:
    """broker/metadata_publisher M7: it may be joining the ISR at this moment, because of records
    that it still seems to have.
    """
    kit = make(23, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    leader, _, n = kit.state("t").replicas
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    ledger.more(200)
    core = kit.brokers[n].core
    key = kit.replica(n, "t").key
    kit.until(lambda: n not in core.metadata.image.partition(key).isr)
    ledger.stop()
    damage(kit, "t", n)
    task = kit.sim.spawn(f"b{n}", core.replica_manager.settle(key))
    kit.until(task.done)
    assert kit.events("replica_made_anew") == 0
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    kit.until(lambda: len(kit.state("t").isr) == 3)
    assert kit.events("replica_made_anew") == 1
    ledger.check()


def test_a_replica_is_not_made_anew_on_an_image_from_before_the_answer(make: Any) -> None:
    """broker/metadata_publisher M7: the replica may have joined the ISR and been elected, and the
    damage ended its lead.  Its log is the last copy then, and this broker's image does not show
    that yet.
    """
    kit = make(26, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, n = outside(kit, "t")
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    core = kit.brokers[n].core
    key, call, go_on = kit.replica(n, "t").key, core.lifecycle.call, asyncio.Event()

    async def stands(request: Any, timeout_ms: int) -> Any:
        if isinstance(request, wire.FetchMetadataLogRequest):
            await go_on.wait()
        return await call(request, timeout_ms)

    kit.sim.network.heal(f"b{n}", "controller")
    kit.until(lambda: n not in core.metadata.image.partition(key).isr)
    core.lifecycle.call = stands
    kit.wait(POLL_WAIT_MS)  # requests under way are answered
    damage(kit, "t", n)
    kit.until(lambda: key in core.lifecycle.offline_reports.acknowledged)
    task = kit.sim.spawn(f"b{n}", core.replica_manager.settle(key))
    kit.until(task.done)
    assert kit.events("replica_made_anew") == 0
    core.lifecycle.call = call
    go_on.set()
    kit.until(lambda: kit.events("replica_made_anew") == 1)
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.check()


def test_what_is_well_again_when_a_heartbeat_is_answered_is_no_more_told(make: Any) -> None:
    """broker/metadata_publisher M7: a replica that is damaged a second time is reported a second
    time, because it may have joined the ISR meanwhile.
    """
    kit = make(27, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, n = outside(kit, "t")
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    core, key = kit.brokers[n].core, kit.replica(n, "t").key
    damage(kit, "t", n)
    kit.sim.network.heal(f"b{n}", "controller")
    kit.until(lambda: kit.events("replica_made_anew") == 1)
    ask, answered = core.lifecycle._ask, asyncio.Event()
    held: list[Any] = []
    told: list[bool] = []

    async def late(request: Any, timeout_ms: int, **more: Any) -> Any:
        if held:
            told.append(key in core.lifecycle.offline_reports.acknowledged)
            return await ask(request, timeout_ms, **more)
        reply = await ask(request, timeout_ms, **more)
        if list(request.offline_replicas):
            held.append(request)
            await answered.wait()
        return reply

    core.lifecycle._ask = late
    kit.until(lambda: bool(held))
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    kit.until(lambda: not core.replicas.uncompared)
    answered.set()
    kit.until(lambda: bool(told))
    assert not told[0]
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.check()


def test_who_has_less_than_was_asked_for_waits_until_that_is_decided(make: Any) -> None:
    """R2, replica/alter_partition A2: the leader is cut off from the controller, and its pending
    request counts on records that the replica has lost.  If the logs were compared now, the replica
    would count as online, and the old request could be granted.
    """
    kit = make(24, auto_leader_rebalance_enable=False, broker_session_timeout_ms=8_000)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, n = outside(kit, "t")
    known: Any = kit.replica(leader, "t").leader
    call, lost = kit.brokers[leader].core.lifecycle.call, []

    async def loses(request: Any, timeout_ms: int) -> Any:
        if isinstance(request, wire.AlterPartitionRequest):
            lost.append(request)
            raise errors.ControllerUnavailable("lost")
        return await call(request, timeout_ms)

    kit.brokers[leader].core.lifecycle.call = loses
    kit.sim.network.heal(f"b{n}", "controller")
    kit.until(lambda: bool(lost))
    damage(kit, "t", n)
    kit.until(lambda: kit.events("replica_made_anew") == 1)
    kit.wait(1_000)
    assert known.end_of(n) == known.log_end, "it was not compared"
    assert kit.brokers[n].core.replicas.uncompared
    kit.brokers[leader].core.lifecycle.call = call
    kit.until(lambda: len(kit.state("t").isr) == 3)
    assert kit.replica(n, "t").log.written_end == known.log_end
    ledger.check()
