"""Internal topics of a simulated cluster: their replicas, and a machine over one partition."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.effects import Decision
from pk.server.replica.replay_log import PartitionReplayLog
from pk.server.runtime.replayed_host import ReplayedHost
from pk.sim.disk import SimStorage
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Kit

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NAME = transactional_ids.TOPIC


def find(kit: Kit, key: str) -> wire.FindCoordinatorReply:
    reply: wire.FindCoordinatorReply = kit.ask(wire.FindCoordinatorRequest(key=key, key_type=1))
    return reply


def has_replicas(kit: Kit, count: int) -> bool:
    """Whether every partition has so many replicas, all in sync, and no reassignment runs."""
    states = [kit.state(NAME, n) for n in range(transactional_ids.PARTITIONS)]
    return all(
        len(state.isr) == len(state.replicas) == count and not state.adding for state in states
    )


def add_broker(kit: Kit, n: int) -> None:
    kit.storages[n] = SimStorage(f"d{n}", kit.sim.random(f"disk{n}"))
    kit.boots[n] = 1
    kit.boot(n)
    kit.until(lambda: kit.serves(n))


class Counter:
    """Counts the rows; a command is a row to append, or "?"."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []

    def decide(self, command: Any, now_ms: int) -> Decision[bytes]:
        return Decision([] if command == "?" else [command], list(self.rows))

    def apply(self, offset: int, record: bytes) -> None:
        assert offset == len(self.rows)
        self.rows.append(record)


def host_on(kit: Kit, n: int) -> ReplayedHost[Any, bytes]:
    """Return a host over partition 0 on broker `n`, which leads it."""
    partition = kit.replica(n, NAME)
    assert partition.leader is not None
    log = PartitionReplayLog[bytes](
        partition, partition.leader_epoch, kit.brokers[n].world.clock,
        lambda row: (row, b"value"), lambda key, value: key or b"",
    )  # fmt: skip
    return ReplayedHost(
        Counter, log, kit.brokers[n].world.clock, on_fatal=lambda failure: kit.bugs.append("fatal"),
        unavailable=errors.CoordinatorUnavailable,
    )  # fmt: skip


def ask(kit: Kit, n: int, host: ReplayedHost[Any, bytes], command: Any) -> Any:
    task = kit.sim.spawn(f"b{n}", host.ask(command))
    kit.until(task.done)
    return task.result()


def start(kit: Kit, n: int) -> ReplayedHost[Any, bytes]:
    host = host_on(kit, n)
    task = kit.sim.spawn(f"b{n}", host.start())
    kit.until(task.done)
    task.result()
    return host


def test_three_brokers_hold_three_replicas_at_once(make: Any) -> None:
    kit: Kit = make(3)
    found = find(kit, "job")
    assert found.partition == transactional_ids.partition_of_id("job")
    assert kit.state(NAME, found.partition).leader == found.node_id
    assert found.address == f"b{found.node_id}:9292"
    kit.soon(lambda: has_replicas(kit, 3))
    leads = {kit.state(NAME, n).leader for n in range(transactional_ids.PARTITIONS)}
    assert leads == {1, 2, 3}
    kit.soon(lambda: all(len(each.core.partitions) == 16 for each in kit.brokers.values()))
    partition = kit.replica(kit.state(NAME).leader, NAME)
    assert partition.leader is not None
    assert partition.leader.in_sync_required == 2


def test_what_a_machine_has_answered_outlives_its_broker(make: Any) -> None:
    """The next leader's host replays every row that was answered, in order."""
    kit: Kit = make(4)
    find(kit, "job")
    kit.soon(lambda: has_replicas(kit, 3))
    first = kit.state(NAME).leader
    host = start(kit, first)
    for n in range(5):
        ask(kit, first, host, b"%d" % n)
    kit.power_loss(first)
    kit.soon(lambda: kit.state(NAME).leader not in (-1, first))
    second = kit.state(NAME).leader
    kit.soon(lambda: kit.replica(second, NAME).leader is not None)
    host = start(kit, second)
    assert ask(kit, second, host, "?") == [b"%d" % n for n in range(5)]
    ask(kit, second, host, b"5")
    assert len(ask(kit, second, host, "?")) == 6


def test_brokers_that_join_get_replicas_of_what_is_there(make: Any) -> None:
    """The leader does not change meanwhile, so its host goes on."""
    kit: Kit = make(5, brokers=1)
    find(kit, "job")
    assert has_replicas(kit, 1)
    host = start(kit, 1)
    ask(kit, 1, host, b"0")
    epoch = kit.state(NAME).leader_epoch
    add_broker(kit, 2)
    kit.soon(lambda: has_replicas(kit, 2))
    add_broker(kit, 3)
    kit.soon(lambda: has_replicas(kit, 3))
    assert (kit.state(NAME).leader, kit.state(NAME).leader_epoch) == (1, epoch)
    assert len(ask(kit, 1, host, b"1")) == 1
    kit.soon(lambda: kit.in_sync(NAME))
    assert kit.content(2, NAME) == kit.content(3, NAME) == kit.content(1, NAME) != b""
    assert kit.events("replication_raised") >= 2
