"""After an unclean election nothing of the lost history counts in the new one: no high watermark,
no log start, and no confirmation from before.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.server.broker.flushes import flush
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Kit, Ledger, written

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def on_disk(kit: Kit, n: int, work: Any) -> None:
    """Run `work` on the disk of broker `n`, to its end."""
    task = kit.sim.spawn(f"b{n}", work)
    kit.until(task.done)
    task.result()


def test_a_watermark_of_lost_records_does_not_outlive_them(make: Any) -> None:
    """R4, replica/leader I2: the checkpointed watermark covers more than the power loss left.
    Other records are appended there, and the process dies before the next checkpoint.
    """
    kit = make(1, auto_leader_rebalance_enable=False, replica_lag_time_max_ms=60_000)
    kit.create("t", min_insync_replicas=3)
    written(kit, "t", 300)
    for n in (1, 2, 3):
        core = kit.brokers[n].core
        on_disk(kit, n, flush(core.env, core.due, kit.replica(n, "t")))
    written(kit, "t", 600)
    for n in (1, 2, 3):
        on_disk(kit, n, kit.brokers[n].core.manager.checkpoint())
    named = kit.replica(1, "t").high_watermark
    for n in (1, 2, 3):
        kit.power_loss(n)
    for n in (1, 2, 3):
        kit.boot(n)
    kit.until(lambda: all(kit.serves(n) for n in (1, 2, 3)) and kit.in_sync("t"))
    leader = kit.state("t").leader
    n, behind = (each for each in kit.state("t").replicas if each != leader)
    left = kit.replica(behind, "t").log.written_end
    assert left < named
    kit.sim.network.cut(f"b{leader}", f"b{behind}")
    Ledger(kit, "t", acks=1, enable_idempotence=False)
    kit.until(lambda: kit.replica(n, "t").log.written_end > named)
    kit.kill(behind)  # it has every committed record and no other: it may lead next
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    kit.kill(n)
    kit.boot(n)
    kit.until(lambda: kit.serves(n))
    kit.kill(leader)
    kit.until(lambda: kit.state("t").leader == n and kit.replica(n, "t").leader is not None)
    assert behind in kit.state("t").elr
    assert kit.replica(n, "t").log.written_end > named
    assert kit.replica(n, "t").high_watermark <= left


def test_committed_records_are_not_dropped_on_the_word_of_a_clean_leader(make: Any) -> None:
    """replica/follower F3, R4: this replica is the last copy of records that its leader has lost.
    This also holds if it has just started and knows the watermark from its checkpoint only.
    """
    kit = make(3, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 100)
    leader, _, n = kit.state("t").replicas
    on_disk(kit, n, kit.brokers[n].core.manager.checkpoint())
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    kit.kill(n)
    kit.boot(n)
    kit.until(lambda: kit.serves(n) and kit.replica(n, "t").replica is not None)
    partition = kit.replica(n, "t")
    end = partition.log.written_end
    assert partition.high_watermark == end
    follower: Any = partition.replica
    on_disk(kit, n, follower.fetcher._start_anew(follower, wire.StartAt(local_log_start=50), 0))
    assert isinstance(partition.hosted.cause, errors.CorruptLog)
    assert (partition.log.segments[0].base_offset, partition.log.written_end) == (0, end)
    assert kit.events("log_begun_anew") == 0


def test_a_log_start_of_records_that_never_came_is_forgotten(make: Any) -> None:
    """R4, T9: a former leader reported it for its own records; those of the next leader, at the
    same offsets, are not deleted.
    """
    kit = make(2, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 100)
    leader, second, n = kit.state("t").replicas
    replica = kit.replica(n, "t")
    end = replica.log.written_end
    replica.update_log_start(end + 50)
    kit.kill(leader)
    kit.until(lambda: kit.state("t").leader == second)
    more = Ledger(kit, "t")
    more.more(100)
    more.stop()
    kit.until(lambda: replica.high_watermark > end + 50)
    kit.wait(2_000)
    assert replica.log.log_start <= end
