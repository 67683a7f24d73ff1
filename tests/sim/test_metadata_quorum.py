"""Metadata logs of three and five nodes over simulated disks and networks: kills, power, cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pk import errors
from pk.server.metadata.record_serde import MetadataRecordSerde
from pk.server.metadata.records import MetadataRecord, record_of
from pk.server.metadata.snapshot_generator import SnapshotGenerator
from pk.server.raft.log import RaftLog
from pk.server.raft.messages import Voter
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, accept_stream, serve_control
from pk.world import Stream, StreamKind, World

# what a killed node left half done is unwound when its world ends, and may complain
pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@dataclass
class Node:
    name: str
    voter: Voter
    address: str
    storage: SimStorage
    log: RaftLog[MetadataRecord] | None = None
    fatal: list[BaseException] = field(default_factory=list)


class Cluster:
    """Nodes that may die and come back, and the writes that clients know are committed."""

    def __init__(self, seed: int, size: int = 3) -> None:
        self.sim = SimWorld(seed)
        self.rng = self.sim.random("faults")
        self.nodes = [
            Node(
                f"c{n}",
                Voter(n, f"dir{n}"),
                f"c{n}:1",
                SimStorage(f"c{n}", self.sim.random(f"disk{n}")),
            )
            for n in range(1, size + 1)
        ]
        self.voters = {node.voter: node.address for node in self.nodes}
        self.committed: list[str] = []
        self.tried = 0
        for node in self.nodes:
            self.boot(node)

    def boot(self, node: Node) -> None:
        known = self.sim.nodes.get(node.name)
        if known is None or not known.alive:
            self.sim.start(node.name, lambda world: self._main(node, world))

    async def _main(self, node: Node, world: World) -> None:
        disk = SimDisk(node.storage, world.clock, world.rng)
        log = RaftLog(
            world,
            disk,
            MetadataRecordSerde(),
            SnapshotGenerator,
            me=node.voter,
            address=node.address,
            on_fatal=node.fatal.append,
            voters=self.voters,
        )

        async def serve(_kind: StreamKind, stream: Stream) -> None:
            if await accept_stream(stream, wire.HelloReply(protocol=PROTOCOL)) is not None:
                await serve_control(stream, log.handlers())

        await log.open()
        node.log = log
        await world.network.listen(node.address, serve)
        while True:
            await log.lead()
            await self._work(log, world)

    async def _work(self, log: RaftLog[MetadataRecord], world: World) -> None:
        """Append topics as long as this node leads."""
        while log.leadership.start != NONE:
            await world.clock.sleep_ms(world.rng.uniform(5, 60))
            self.tried += 1
            name = f"t{self.tried}"
            try:
                log.append([record_of(wire.TopicRecord(name=name, topic_id=name))], 0)
                await log.commit()
            except errors.ControllerUnavailable:
                continue  # its outcome is open
            self.committed.append(name)

    def down(self, node: Node, *, power: bool) -> None:
        if node.log is not None:
            self.sim.kill(node.name)
            node.log = None
            node.storage.power_loss() if power else node.storage.crash()

    def leader(self) -> Node | None:
        leaders = [n for n in self.nodes if n.log is not None and n.log.leadership.start != NONE]
        return max(leaders, key=lambda n: n.log.epoch if n.log else 0, default=None)

    def fault(self) -> None:
        one, two = self.rng.sample(self.nodes, 2)
        leader = self.leader()
        kind = self.rng.choice(["kill", "power", "leader", "boot", "boot", "cut", "heal", "break"])
        if kind in ("kill", "power"):
            self.down(one, power=kind == "power")
        elif kind == "leader" and leader is not None:
            self.down(leader, power=self.rng.random() < 0.5)
        elif kind == "boot":
            for node in self.nodes:
                self.boot(node)
        elif kind == "cut":
            self.sim.network.cut(one.name, two.name, both=self.rng.random() < 0.5)
        elif kind == "heal":
            self.heal_network()
        elif kind == "break":
            self.sim.network.break_streams(one.name, two.name)

    def heal_network(self) -> None:
        for a in self.nodes:
            for b in self.nodes:
                if a is not b:
                    self.sim.network.heal(a.name, b.name)

    def run(self, ms: float) -> None:
        self.sim.loop.run_for_ms(ms)

    def held(self, node: Node) -> list[str]:
        """The topics in a node's log, up to what it knows is committed."""
        log, found = node.log, []
        assert log is not None

        async def read() -> None:
            def take(offset: int, record: Any) -> None:
                if record.WhichOneof("record") == "topic" and offset < log.committed:
                    found.append(record.topic.name)

            await log.replay(take)

        self.sim.run(read())
        return found


@pytest.fixture
def make() -> Iterator[Any]:
    """Worlds that end with the test, so that nothing of them is left to be collected later."""
    made: list[Cluster] = []

    def one(*given: Any, **more: Any) -> Cluster:
        made.append(Cluster(*given, **more))
        return made[-1]

    yield one
    for each in made:
        each.sim.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_was_committed_is_in_every_log_in_one_order(seed: int, make: Any) -> None:
    cluster = make(seed, size=5 if seed % 4 == 3 else 3)
    for _ in range(25):
        cluster.run(cluster.rng.uniform(50, 2_500))
        cluster.fault()
    cluster.heal_network()
    for node in cluster.nodes:
        cluster.boot(node)
    cluster.run(20_000)
    before = len(cluster.committed)
    cluster.run(2_000)
    assert len(cluster.committed) > before, "it does not go on"
    assert not [bug for node in cluster.nodes for bug in node.fatal]
    logs = [cluster.held(node) for node in cluster.nodes]
    longest = max(logs, key=len)
    for found in logs:
        assert found == longest[: len(found)]
        assert len(longest) - len(found) < 5
    assert len(set(longest)) == len(longest)
    lost = set(cluster.committed[:-5]) - set(longest)
    assert not lost
    assert set(longest) <= {f"t{n + 1}" for n in range(cluster.tried)}


def test_the_next_leader_is_there_long_before_a_timeout(make: Any) -> None:
    """R7's idea in the quorum: a refused connection says more than silence."""
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
    """KIP-996: the epoch of the others stays what it is."""
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
    cluster.heal_network()
    cluster.run(15_000)
    assert {node.log.epoch for node in cluster.nodes if node.log} == {epoch}
    assert cluster.leader() is new
