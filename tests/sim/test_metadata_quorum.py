"""Metadata logs of three and five nodes over simulated disks and networks: kills, power, cuts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pk.server.raft.reserve import RESERVE_FILE
from pk.types import NONE
from tests.kit.raft_cluster import Node, RaftCluster

# tasks of a killed node are unwound when its world ends, and may raise errors
pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def fault(cluster: RaftCluster) -> None:
    one, two = cluster.rng.sample(cluster.nodes, 2)
    leader = cluster.leader()
    kind = cluster.rng.choice(["kill", "power", "leader", "boot", "boot", "cut", "heal", "break"])
    if kind in ("kill", "power"):
        cluster.down(one, power=kind == "power")
    elif kind == "leader" and leader is not None:
        cluster.down(leader, power=cluster.rng.random() < 0.5)
    elif kind == "boot":
        for node in cluster.nodes:
            cluster.boot(node)
    elif kind == "cut":
        cluster.sim.network.cut(one.name, two.name, both=cluster.rng.random() < 0.5)
    elif kind == "heal":
        cluster.heal()
    elif kind == "break":
        cluster.sim.network.break_streams(one.name, two.name)


def held(cluster: RaftCluster, node: Node) -> list[str]:
    """Return the topics in a node's log, up to the end that it knows is committed."""
    log, found = node.log, []
    assert log is not None

    async def read() -> None:
        def take(offset: int, record: Any) -> None:
            if record.WhichOneof("record") == "topic" and offset < log.committed:
                found.append(record.topic.name)

        await log.replay(take)

    cluster.sim.run(read())
    return found


@pytest.fixture
def make() -> Iterator[Any]:
    """Make worlds that are closed at the end of the test, so that no task remains for the garbage
    collector.
    """
    made: list[RaftCluster] = []

    def one(*given: Any, **more: Any) -> RaftCluster:
        made.append(RaftCluster(*given, **more))
        return made[-1]

    yield one
    for each in made:
        each.sim.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_was_committed_is_in_every_log_in_one_order(seed: int, make: Any) -> None:
    cluster = make(seed, size=5 if seed % 4 == 3 else 3)
    for _ in range(25):
        cluster.run(cluster.rng.uniform(50, 2_500))
        fault(cluster)
    cluster.heal()
    for node in cluster.nodes:
        cluster.boot(node)
    cluster.run(20_000)
    before = len(cluster.committed)
    cluster.run(2_000)
    assert len(cluster.committed) > before, "it does not go on"
    assert not cluster.fatal()
    logs = [held(cluster, node) for node in cluster.nodes]
    longest = max(logs, key=len)
    for found in logs:
        assert found == longest[: len(found)]
        assert len(longest) - len(found) < 5
    assert len(set(longest)) == len(longest)
    lost = set(cluster.committed[:-5]) - set(longest)
    assert not lost
    assert set(longest) <= {f"t{n + 1}" for n in range(cluster.tried)}


def test_the_next_leader_is_there_long_before_a_timeout(make: Any) -> None:
    """The idea of R7 in the quorum: a refused connection shows a death sooner than silence does."""
    cluster = make(5)
    cluster.run(5_000)
    leader = cluster.leader()
    assert leader is not None
    cluster.down(leader, power=False)
    cluster.run(900)
    successor = cluster.leader()
    assert successor is not None
    assert successor is not leader


def test_a_leader_that_is_cut_off_stops_and_deposes_nobody_when_it_returns(make: Any) -> None:
    """KIP-996: the epoch of the other nodes does not change."""
    cluster = make(6)
    cluster.run(5_000)
    old = cluster.leader()
    assert old is not None
    others = [node for node in cluster.nodes if node is not old]
    for node in others:
        cluster.sim.network.cut(old.name, node.name)
    cluster.run(8_000)
    assert old.log is not None
    assert old.log.leadership.start == NONE
    new = cluster.leader()
    assert new is not None
    assert new.log is not None
    epoch = new.log.epoch
    cluster.heal()
    cluster.run(15_000)
    assert {node.log.epoch for node in cluster.nodes if node.log} == {epoch}
    assert cluster.leader() is new


@pytest.mark.parametrize("leave", [0, 2_000])
def test_a_leader_without_room_lets_a_voter_with_room_lead(make: Any, leave: int) -> None:
    """Rule L16: otherwise no leader of a partition could hand over, and no ISR could change."""
    cluster = make(7)
    cluster.run(5_000)
    old = cluster.leader()
    assert old is not None
    old.storage.remove(RESERVE_FILE)  # followers of partitions take its room in the same moment
    old.storage.capacity = old.storage.used_bytes() + leave
    cluster.until(lambda: cluster.leader() not in (None, old))
    before = len(cluster.committed)
    cluster.run(10_000)
    assert len(cluster.committed) > before + 50, "it does not go on"
    assert old.heard("metadata_leader_full")
    old.storage.capacity = None
    cluster.run(20_000)
    assert not cluster.fatal()
    logs = [held(cluster, node) for node in cluster.nodes]
    longest = max(logs, key=len)
    assert all(found == longest[: len(found)] for found in logs)
    assert min(map(len, logs)) > len(longest) - 5, "the full node has all again"
    assert not set(cluster.committed[:-5]) - set(longest)


def test_a_node_alone_leads_on_without_room(make: Any) -> None:
    cluster = make(8, size=1)
    cluster.run(5_000)
    (alone,) = cluster.nodes
    assert alone.log is not None
    epoch = alone.log.epoch
    alone.storage.capacity = alone.storage.used_bytes()
    cluster.run(5_000)
    alone.storage.capacity = None
    before = len(cluster.committed)
    cluster.run(5_000)
    assert alone.log.epoch == epoch
    assert len(cluster.committed) > before
    assert not cluster.fatal()
