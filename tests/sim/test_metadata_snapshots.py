"""Metadata logs that are shortened: snapshots, a power loss in every step, voters far behind."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pk import errors
from pk.log import sealed
from pk.server.raft import codec
from pk.server.raft.messages import VoteRequest, VotersChange
from pk.server.raft.quorum_state_store import QUORUM_STATE
from pk.server.raft.recovery import LOG_DIR, SnapshotRules
from pk.server.raft.snapshot_id import file_name, id_of
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from tests.kit.raft_cluster import Node, RaftCluster

# tasks of a killed node are unwound when its world ends, and may raise errors
pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: A snapshot at nearly every look.
OFTEN = SnapshotRules(max_bytes=1_500, max_interval_ms=0)


@pytest.fixture
def make() -> Iterator[Any]:
    """Make worlds that are closed at the end of the test."""
    made: list[RaftCluster] = []

    def one(*given: Any, **more: Any) -> RaftCluster:
        made.append(RaftCluster(*given, **{"rules": OFTEN, **more}))
        return made[-1]

    yield one
    for each in made:
        each.sim.close()


def fault(cluster: RaftCluster) -> None:
    rng = cluster.rng
    one, two = rng.sample(cluster.nodes, 2)
    kind = rng.choice(["off", "leader", "dies", "dies", "dies", "boot", "boot", "cut", "heal"])
    if kind == "off":
        cluster.down(one, power=rng.random() < 0.6)
    elif kind == "leader" and (leader := cluster.leader()) is not None:
        cluster.down(leader, power=rng.random() < 0.6)
    elif kind == "dies":
        one.storage.crash_at = rng.randrange(80)
    elif kind == "boot":
        for node in cluster.nodes:
            cluster.boot(node)
    elif kind == "cut":
        cluster.sim.network.cut(one.name, two.name)
    elif kind == "heal":
        cluster.heal()


@pytest.mark.parametrize("seed", range(3))
def test_what_was_committed_survives_snapshots_and_deaths_in_any_step(seed: int, make: Any) -> None:
    cluster = make(seed)
    for _ in range(25):
        cluster.run(cluster.rng.uniform(50, 3_000))
        cluster.bury()
        fault(cluster)
    cluster.run(200)
    cluster.bury()
    cluster.heal()
    for node in cluster.nodes:
        node.storage.crash_at = None
        cluster.boot(node)
    cluster.run(20_000)
    assert not [failure for node in cluster.nodes for failure in node.fatal]
    before = len(cluster.committed)
    cluster.run(2_000)
    assert len(cluster.committed) > before, "it does not go on"
    cluster.same()
    assert all(node.log.log_start > 0 for node in cluster.nodes)


def test_the_histories_load_snapshots(make: Any) -> None:
    loaded = 0
    for seed in range(4):
        cluster = make(seed + 50)
        for _ in range(12):
            cluster.run(cluster.rng.uniform(500, 3_000))
            cluster.bury()
            fault(cluster)
        loaded += sum(node.heard("metadata_snapshot_loaded") for node in cluster.nodes)
    assert loaded > 0


def away(cluster: RaftCluster, node: Node) -> None:
    """Keep `node` off until the others' logs begin behind its end."""
    cluster.until(lambda: len(cluster.committed) > 20)
    node.storage.crash_at = None
    cluster.down(node, power=True)
    end = 2 * len(cluster.committed) + 50
    others = [each for each in cluster.nodes if each is not node]
    cluster.until(lambda: all(n.log is not None and n.log.log_start > end for n in others))


def caught_up(cluster: RaftCluster, node: Node) -> bool:
    leader = cluster.leader()
    if node.log is None or leader is None or leader.log is None:
        return False
    return node.log.log_start > 0 and node.log.committed + 30 > leader.log.committed


@pytest.mark.parametrize("power", [False, True])
def test_a_voter_that_dies_in_any_step_of_loading_a_snapshot_comes_back(
    power: bool, make: Any
) -> None:
    """raft/snapshot_files F2: an interrupted load is finished before the log is used."""
    cluster = make(3)
    cluster.run(3_000)
    late = next(node for node in cluster.nodes if node is not cluster.leader())
    away(cluster, late)
    saved = copy.deepcopy(late.storage._tree)
    deaths = loads = 0
    for step in range(200):
        late.storage._tree = copy.deepcopy(saved)
        late.said.clear()
        cluster.boot(late)
        late.storage.crash_at = step
        cluster.until(lambda: not cluster.alive(late) or caught_up(cluster, late))
        loads += late.heard("metadata_snapshot_loaded")
        done = cluster.alive(late)
        late.storage.crash_at = None  # it must not die in operations after the load
        if not done:
            deaths += 1
            cluster.down(late, power=power)
            cluster.boot(late)
            cluster.until(lambda: bool(late.fatal) or caught_up(cluster, late))
        assert not late.fatal, (step, late.fatal)
        if step % 8 == 0 or done:
            cluster.same()
        cluster.down(late, power=power)
        if done:
            break
    assert deaths > 15
    assert loads > 0
    assert done


@pytest.mark.parametrize("power", [False, True])
def test_a_controller_that_dies_in_any_step_of_making_one_comes_back(
    power: bool, make: Any
) -> None:
    cluster = make(4, size=1)
    (node,) = cluster.nodes
    cluster.pace_ms = (100.0, 150.0)
    cluster.until(lambda: node.heard("metadata_snapshot") == 3)
    cluster.down(node, power=False)
    saved, sure = copy.deepcopy(node.storage._tree), list(cluster.committed)
    steps = 0
    for step in range(400):
        node.storage._tree = copy.deepcopy(saved)
        cluster.committed = list(sure)
        node.said.clear()
        cluster.boot(node)
        node.storage.crash_at = step
        cluster.until(lambda: not cluster.alive(node) or node.heard("metadata_snapshot") == 2)
        done = cluster.alive(node)
        cluster.down(node, power=power)
        cluster.boot(node)
        cluster.until(lambda: bool(node.fatal) or leads(node))
        assert not node.fatal, (step, node.fatal)
        image = cluster.image(node)
        assert set(cluster.committed) <= set(image.topics), step
        files = [name for name in node.storage.list("") if "checkpoint" in name]
        assert all(id_of(name) for name in files), files
        assert len(files) <= 3
        cluster.down(node, power=False)
        steps = step
        if done:
            break
    assert steps > 20
    assert done


@pytest.mark.parametrize("seed", range(2))
def test_a_snapshot_is_loaded_in_visits_and_begun_again_when_nobody_has_it(
    seed: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny pieces, a slow network: leaders change and make snapshots during the load."""
    cluster = make(seed + 20)
    cluster.run(3_000)
    late = next(node for node in cluster.nodes if node is not cluster.leader())
    away(cluster, late)
    monkeypatch.setattr("pk.server.raft.snapshot_fetcher.PIECE_BYTES", 64)
    cluster.boot(late)
    for _ in range(4):
        cluster.run(1_500)
        leader = cluster.leader()
        if leader is not None and leader is not late:
            cluster.down(leader, power=True)
            cluster.run(2_500)
            cluster.boot(leader)
    monkeypatch.undo()
    cluster.run(15_000)
    cluster.until(lambda: caught_up(cluster, late))
    assert not [failure for node in cluster.nodes for failure in node.fatal]
    cluster.same()


def test_a_leader_waits_for_a_voter_that_loads_its_snapshot(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader commits nothing alone; if it stepped down meanwhile, the load would never end."""
    cluster = make(31)
    cluster.until(lambda: len(cluster.committed) > 250)
    leader = cluster.leader()
    assert leader is not None
    late = next(node for node in cluster.nodes if node is not leader)
    away(cluster, late)
    leader = cluster.leader()
    other = next(node for node in cluster.nodes if node not in (late, leader))
    assert leader is not None
    cluster.down(other, power=True)
    monkeypatch.setattr("pk.server.raft.snapshot_fetcher.PIECE_BYTES", 3)
    cluster.boot(late)
    epoch, began_us = leader.log.epoch if leader.log else 0, cluster.sim.loop.now_us
    cluster.until(lambda: caught_up(cluster, late))
    assert cluster.sim.loop.now_us - began_us > 5_000_000, "that was no test"
    assert leader.log is not None
    assert leader.log.epoch == epoch, "it stayed in office"
    cluster.boot(other)
    cluster.run(5_000)
    cluster.same()


def test_a_damaged_snapshot_costs_nothing_while_the_one_before_it_is_there(make: Any) -> None:
    cluster = make(5, size=1)
    (node,) = cluster.nodes
    cluster.until(lambda: node.heard("metadata_snapshot") >= 4)
    cluster.down(node, power=False)
    names = [name for name in node.storage.list("") if id_of(name)]
    assert len(names) == 2
    spoil(node, names[1])
    cluster.boot(node)
    cluster.until(lambda: bool(node.fatal) or leads(node))
    assert not node.fatal
    assert node.heard("metadata_snapshot_damaged") == 1
    assert set(cluster.committed) <= set(cluster.image(node).topics)
    cluster.until(lambda: node.heard("metadata_snapshot") >= 6)
    assert names[1] not in node.storage.list("")
    cluster.down(node, power=True)
    for name in node.storage.list(""):
        if id_of(name):
            spoil(node, name)
    cluster.boot(node)
    cluster.until(lambda: bool(node.fatal))
    (failure,) = node.fatal
    assert isinstance(failure, errors.CorruptLog)
    assert "checksum" in str(failure) or "damaged" in str(failure), failure


def test_one_that_is_found_damaged_later_costs_nothing_either(make: Any) -> None:
    """raft/log_reader H2: the snapshot was undamaged when the process started."""
    cluster = make(6, size=1)
    (node,) = cluster.nodes
    cluster.until(lambda: node.heard("metadata_snapshot") >= 3)
    log = node.log
    assert log is not None
    assert log.newest_snapshot is not None
    spoil(node, file_name(log.newest_snapshot))
    image = cluster.image(node)
    assert node.heard("metadata_snapshot_damaged") == 1
    assert set(cluster.committed[:-1]) <= set(image.topics)
    made = node.heard("metadata_snapshot")
    cluster.until(lambda: node.heard("metadata_snapshot") > made + 2)
    assert not node.fatal


def test_a_log_that_lost_what_a_snapshot_was_made_of_is_refused(make: Any) -> None:
    """raft/recovery O2: the records behind it may have been committed, too."""
    cluster = make(7, size=1)
    (node,) = cluster.nodes
    cluster.until(lambda: node.heard("metadata_snapshot") >= 3)
    cluster.down(node, power=False)
    logs = [name for name in node.storage.list(LOG_DIR) if name.endswith(".log")]
    file = node.storage.open(f"{LOG_DIR}/{logs[0]}")
    file.truncate(1_000)
    file.close()
    state = sealed.decode(node.storage.read_file(QUORUM_STATE))
    node.storage.replace_file(QUORUM_STATE, sealed.encode({**state, "synced_end": 0}))
    cluster.boot(node)
    cluster.until(lambda: bool(node.fatal) or node.log is not None)
    (failure,) = node.fatal
    assert isinstance(failure, errors.CorruptLog)
    assert failure.details["position"] == "999", "where the last whole batch ends"


def leads(node: Node) -> bool:
    """Wait until the node leads and all of its log is committed again."""
    log = node.log
    return log is not None and NONE != log.leadership.start < log.committed


def spoil(node: Node, name: str) -> None:
    file = node.storage.open(name)
    file.write_at(random.Random(1).randrange(file.size() - 8), b"\xff\x00\xa5\x5a")
    file.sync()
    file.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_vote_does_not_wait_for_a_snapshot_and_ends_its_loading(
    hangs: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rules L3, P1; raft/snapshot_fetcher D2
    cluster = make(41)
    cluster.until(lambda: len(cluster.committed) > 100)
    leader = cluster.leader()
    assert leader is not None
    late = next(node for node in cluster.nodes if node is not leader)
    away(cluster, late)
    monkeypatch.setattr("pk.server.raft.snapshot_fetcher.PIECE_BYTES", 3)
    cluster.boot(late)
    cluster.until(lambda: late.log is not None and late.log._fetcher._part is not None)
    log, leader = late.log, cluster.leader()
    assert log is not None
    assert leader is not None
    other = next(node for node in cluster.nodes if node not in (late, leader))
    for node in cluster.nodes:  # it receives messages from no other node
        cluster.sim.network.cut(other.name, node.name)
    if hangs:
        cluster.sim.network.cut(leader.name, late.name)
        cluster.run(50)
    request = codec.encode(
        VoteRequest(other.voter, log.epoch + 5, log.epoch + 4, 1_000_000, late.voter)
    )

    async def ask() -> Any:
        world = cluster.sim.world_of("client")
        hello = wire.Hello(client_id="t", protocol=PROTOCOL)
        caller = Caller(world.network, world.clock, late.address, hello)
        await caller.connect()
        began = world.clock.monotonic_ms()
        reply = (await caller.call(request, timeout_ms=5_000)).head.quorum_vote_reply
        await caller.close()
        return reply, world.clock.monotonic_ms() - began

    reply, took_ms = cluster.sim.run(ask())
    assert reply.granted
    assert took_ms < 100, took_ms
    cluster.run(100)
    assert log.quorum._writing == hangs, "the leader that was followed then is followed no longer"


def test_what_is_not_committed_is_in_no_snapshot(make: Any) -> None:
    """metadata/snapshot_generator K1: uncommitted records may be truncated."""
    for seed in range(51, 53):
        cluster = make(seed, rules=SnapshotRules(max_bytes=1, max_interval_ms=0))
        cluster.run(5_000)
        leader = cluster.leader()
        assert leader is not None
        log = leader.log
        assert log is not None
        for node in cluster.nodes:
            cluster.sim.network.cut(leader.name, node.name)
        cluster.run(2_500)
        assert log.committed < log.end, "nobody confirms it"
        assert log.newest_snapshot is not None
        assert log.newest_snapshot.end <= log.committed
        cluster.run(5_000)
        cluster.heal()
        cluster.run(15_000)
        assert not [failure for node in cluster.nodes for failure in node.fatal]
        cluster.same()


def test_the_voters_are_those_of_the_snapshot(make: Any) -> None:
    """KIP-853: no record behind it names them, neither after a load nor after a restart."""
    cluster = make(42, size=4, voters=3)
    cluster.run(3_000)
    late, first = cluster.nodes[3], cluster.nodes[0]
    away(cluster, late)
    leader = cluster.leader()
    assert leader is not None
    assert leader.log is not None
    four = tuple(node.voter for node in cluster.nodes)
    leader.log.voters.addresses[4] = late.address
    answer: Any = asyncio.Future(loop=cluster.sim.loop)
    leader.log._post(VotersChange(answer, four))
    cluster.until(answer.done)
    assert answer.result() is None
    end = leader.log.end
    cluster.until(lambda: all(n.log.log_start > end for n in cluster.nodes[:3]))
    cluster.boot(late)
    cluster.until(lambda: caught_up(cluster, late))
    assert late.heard("metadata_snapshot_loaded")
    assert late.log.quorum.voters == four
    assert first.log.quorum.voters == four
    cluster.down(late, power=True)
    cluster.boot(late)
    cluster.until(lambda: late.log is not None and bool(late.log.quorum.voters))
    assert late.log.quorum.voters == four
    assert late.log.voters.addresses == {node.voter.node_id: node.address for node in cluster.nodes}


def test_one_is_made_in_time_if_there_is_anything_new(make: Any) -> None:
    cluster = make(8, size=1, rules=SnapshotRules(max_bytes=1 << 40, max_interval_ms=5_000))
    (node,) = cluster.nodes
    cluster.run(4_500)
    assert node.heard("metadata_snapshot") == 0
    cluster.run(2_000)
    assert node.heard("metadata_snapshot") == 1
    cluster.run(5_500)
    assert node.heard("metadata_snapshot") == 2
    cluster.pace_ms = (1e9, 1e9)
    cluster.run(20_000)
    assert node.heard("metadata_snapshot") == 3
    silent = make(9, size=1, rules=SnapshotRules(max_bytes=1 << 40, max_interval_ms=0))
    silent.run(20_000)
    assert silent.nodes[0].heard("metadata_snapshot") == 0


def test_one_that_cannot_be_made_is_made_later(make: Any) -> None:
    """metadata/snapshot_generator K3: the disk is full; no file remains, no listener is called."""
    cluster = make(10, size=1)
    (node,) = cluster.nodes
    cluster.until(lambda: node.heard("metadata_snapshot") >= 1)

    def full(operation: str, path: str) -> Exception | None:
        wrong = operation == "append" and path.endswith(".part")
        return errors.StorageFull("full") if wrong else None

    node.storage.fault = full
    before = node.heard("metadata_snapshot")
    cluster.until(lambda: node.heard("metadata_snapshot_failed") >= 2)
    assert node.heard("metadata_snapshot") == before
    assert not [name for name in node.storage.list("") if name.endswith(".part")]
    node.storage.fault = None
    cluster.until(lambda: node.heard("metadata_snapshot") > before)
    assert not node.fatal
    cluster.same()
