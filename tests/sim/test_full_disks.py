"""Replicas whose disk is full while their log is truncated or replaced: they continue once there is
room.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from pk import errors
from pk.log.partition_log import PartitionLog
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Kit, Ledger, written
from tests.kit.raft_cluster import Node, RaftCluster
from tests.sim.test_metadata_snapshots import OFTEN, away, caught_up

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class _FullBehindLoad:
    """A disk without room from the `step`th operation after a `.load` on, except for snapshot
    pieces.
    """

    def __init__(self, node: Node, step: int) -> None:
        self.hits = 0
        self._left, self._node, self._begun = step, node, False
        node.storage.fault = self

    @property
    def loads(self) -> bool:
        return any(name.endswith(".load") for name in self._node.storage._tree.entries)

    def __call__(self, operation: str, path: str) -> Exception | None:
        self._begun = self._begun or self.loads
        if not self._begun or operation in ("read", "sync", "sync_dir") or path.endswith(".part"):
            return None
        self._left -= 1
        if self._left >= 0:
            return None
        self.hits += 1
        return errors.StorageFull("full")


@pytest.fixture
def make_quorum() -> Iterator[Any]:
    """Make quorums of test_metadata_snapshots.py, and close them at the end."""
    made: list[RaftCluster] = []

    def one(seed: int) -> RaftCluster:
        made.append(RaftCluster(seed, rules=OFTEN))
        return made[-1]

    yield one
    for each in made:
        each.sim.close()


def _parted(kit: Kit) -> tuple[Ledger, int]:
    """Return a replica that is down, and whose log has records that the leader's log lacks."""
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
    """A disk without room from the `step`th operation on the files of a log that is truncated or
    replaced.
    """

    def __init__(self, kit: Kit, n: int, step: int) -> None:
        self.hits = 0
        self._kit, self._n, self._left = kit, n, step
        kit.storages[n].fault = self

    def __call__(self, operation: str, path: str) -> Exception | None:
        if operation == "read" or "topics/t-0" not in path:
            return None
        if not self.hits and not self._kit.brokers[self._n].core.fetchers.changing:
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
    """Rule L2: until then the replica is reported offline, and no restart is needed."""
    kit = make(28, auto_leader_rebalance_enable=False)
    ledger, old = _parted(kit)
    full = _Full(kit, old, step)
    kit.boot(old)
    kit.until(lambda: full.hits and not kit.replica(old, "t").online)
    assert kit.replica(old, "t").log.torn
    core = kit.brokers[old].core
    assert len(core.report.offline_replicas()) == 1
    kit.wait(12_000)
    assert kit.replica(old, "t").log.torn
    assert not kit.replica(old, "t").online
    assert old not in kit.state("t").isr
    full.end()
    kit.until(lambda: kit.in_sync("t"))
    assert not core.report.offline_replicas()
    assert len({kit.content(n, "t") for n in (1, 2, 3)}) == 1
    assert not kit.bugs
    found = ledger.rows().values()
    assert len(set(found)) == len(found)


def test_a_replica_without_a_descriptor_for_its_flush_asks_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/storage D2: the leader counts SYNCED records, so the flush comes before the position.  A
    lack of descriptors passes, and must not keep the replica out until a restart.
    """
    kit = make(28, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 50)
    n = next(each for each in (1, 2, 3) if each != kit.state("t").leader)
    kit.kill(n)
    kit.until(lambda: n not in kit.state("t").isr)
    request = wire.AlterConfigsRequest()
    resource = wire.ConfigResource(type="topic", name="t")
    request.changes.add(resource=resource).set["flush_on_ack"] = "true"
    assert not kit.ask(request).results[0].HasField("error")
    tried: list[PartitionLog] = []
    flush = PartitionLog.flush

    def none_left(self: PartitionLog) -> int:
        tried.append(self)
        if len(tried) <= 3:
            raise errors.StorageFull("too many open files")
        return flush(self)

    monkeypatch.setattr(PartitionLog, "flush", none_left)
    kit.boot(n)
    kit.until(lambda: len(tried) >= 3)
    assert kit.replica(n, "t").online
    kit.until(lambda: kit.in_sync("t"))
    assert not kit.bugs


def test_a_voter_whose_disk_is_full_while_it_loads_a_snapshot_goes_on(make_quorum: Any) -> None:
    """raft/snapshot_files F4: the load is finished once there is room, and nothing else is fetched
    before.
    """
    cluster = make_quorum(3)
    cluster.run(3_000)
    late = next(node for node in cluster.nodes if node is not cluster.leader())
    away(cluster, late)
    saved = copy.deepcopy(late.storage._tree)
    torn = finished = 0
    for step in range(0, 60, 2):
        late.storage._tree = copy.deepcopy(saved)
        late.said.clear()
        full = _FullBehindLoad(late, step)
        cluster.boot(late)
        cluster.until(lambda full=full: full.hits or caught_up(cluster, late))  # type: ignore[misc]
        if not full.hits:
            break
        assert late.log is not None
        fetches = late.log.quorum._fetches
        cluster.run(2_500)
        assert late.log.quorum._fetches == fetches
        assert not late.heard("metadata_snapshot_loaded")
        torn += late.log._open_log.torn
        finished += not full.loads
        late.storage.fault = None
        cluster.until(lambda: bool(late.fatal) or caught_up(cluster, late))
        assert not late.fatal, (step, late.fatal)
        assert late.heard("metadata_snapshot_loaded")
        if step % 8 == 0:
            cluster.same()
        cluster.down(late, power=True)
    assert torn > 3
    assert finished > 0
