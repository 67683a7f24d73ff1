"""Nodes of one metadata quorum over simulated disks and networks, which append records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pk import errors
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.record_serde import MetadataRecordSerde
from pk.server.metadata.records import MetadataRecord, record_of
from pk.server.metadata.snapshot_generator import SnapshotGenerator
from pk.server.raft.log import RaftLog
from pk.server.raft.messages import Voter
from pk.server.raft.recovery import SnapshotRules
from pk.sim.cluster import KillableStorage
from pk.sim.disk import SimDisk
from pk.sim.world import SimWorld
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, accept_stream, serve_control
from pk.world import Stream, StreamKind, World


@dataclass
class Node:
    name: str
    voter: Voter
    address: str
    storage: KillableStorage
    log: RaftLog[MetadataRecord] | None = None
    fatal: list[BaseException] = field(default_factory=list)
    said: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def heard(self, event: str) -> int:
        return sum(name == event for name, _ in self.said)


class RaftCluster:
    """Nodes that may die in any operation, and the writes that clients know are committed."""

    def __init__(
        self, seed: int, size: int = 3, rules: SnapshotRules | None = None, voters: int = 9
    ) -> None:
        self.sim = SimWorld(seed)
        self.rng = self.sim.random("faults")
        self.rules = rules or SnapshotRules()
        self.pace_ms = (5.0, 60.0)
        self.nodes = []
        for n in range(1, size + 1):
            storage = KillableStorage(f"c{n}", self.sim.random(f"disk{n}"))
            self.nodes.append(Node(f"c{n}", Voter(n, f"dir{n}"), f"c{n}:1", storage))
        self.voters = {node.voter: node.address for node in self.nodes[:voters]}
        self.committed: list[str] = []
        self.tried = 0
        for node in self.nodes:
            self.boot(node)

    def alive(self, node: Node) -> bool:
        known = self.sim.nodes.get(node.name)
        return known is not None and known.alive

    def boot(self, node: Node) -> None:
        if not self.alive(node):
            node.storage.on_death = lambda: self.sim.kill(node.name)
            self.sim.start(node.name, lambda world: self._main(node, world))

    async def _main(self, node: Node, world: World) -> None:
        disk = SimDisk(node.storage, world.clock, world.rng)
        self.sim.nodes[node.name].on_kill.append(disk.kill)
        log = RaftLog(
            world,
            disk,
            MetadataRecordSerde(),
            SnapshotGenerator,
            me=node.voter,
            address=node.address,
            on_fatal=node.fatal.append,
            voters=self.voters,
            rules=self.rules,
            say=lambda event, **facts: node.said.append((event, facts)),
        )

        async def serve(_kind: StreamKind, stream: Stream) -> None:
            if await accept_stream(stream, wire.HelloReply(protocol=PROTOCOL)) is not None:
                await serve_control(stream, log.handlers())

        try:
            await log.open()
        except errors.PkError as failure:
            node.fatal.append(failure)
            return
        node.log = log
        await world.network.listen(node.address, serve)
        while True:
            await log.lead()
            await self._work(log, world)

    async def _work(self, log: RaftLog[MetadataRecord], world: World) -> None:
        """Append a topic, and a setting again and again, as long as this node leads."""
        while log.leadership.start != NONE:
            await world.clock.sleep_ms(world.rng.uniform(*self.pace_ms))
            self.tried += 1
            name = f"t{self.tried}"
            config = wire.ConfigRecord(
                resource_type="broker", resource_name="", name=f"k{self.tried % 3}", value=name
            )
            topic = wire.TopicRecord(name=name, topic_id=name)
            try:
                log.append([record_of(topic), record_of(config)], 0)
                await log.commit()
            except (errors.ControllerUnavailable, errors.StorageFull):
                continue  # its outcome is open, or nothing is written
            self.committed.append(name)

    def down(self, node: Node, *, power: bool) -> None:
        self.sim.kill(node.name)
        node.log = None
        node.storage.power_loss() if power else node.storage.crash()

    def bury(self, *, power: bool | None = None) -> None:
        """Take dead nodes off the network; their disks lose power, or not."""
        for node in self.nodes:
            if not self.alive(node) and (node.log is not None or node.storage._dead):
                lost = self.rng.random() < 0.6 if power is None else power
                self.down(node, power=lost)

    def leader(self) -> Node | None:
        leaders = [n for n in self.nodes if n.log is not None and n.log.leadership.start != NONE]
        return max(leaders, key=lambda n: n.log.epoch if n.log else 0, default=None)

    def fatal(self) -> list[BaseException]:
        """Return every error that ended a log."""
        return [failure for node in self.nodes for failure in node.fatal]

    def run(self, ms: float) -> None:
        self.sim.loop.run_for_ms(ms)

    def until(self, holds: Callable[[], bool]) -> None:
        self.sim.run_until(holds)

    def heal(self) -> None:
        """Undo all cuts of links."""
        for a in self.nodes:
            for b in self.nodes:
                if a is not b:
                    self.sim.network.heal(a.name, b.name)

    def image(self, node: Node, end: int | None = None) -> MetadataImage:
        """Return the image of the node's log, up to the end that it knows is committed."""
        log, image = node.log, MetadataImage()
        assert log is not None
        self.sim.run(log._open_reader.replay(image.apply, log.committed if end is None else end))
        return image

    def same(self) -> None:
        """Check that every log has the same content and all committed records."""
        ends = [node.log.committed for node in self.nodes if node.log is not None]
        assert len(ends) == len(self.nodes)
        newest = max((n.log.newest_snapshot.end for n in self.nodes
                      if n.log and n.log.newest_snapshot), default=0)  # fmt: skip
        upto = max(min(ends), newest)
        self.until(lambda: all(n.log is not None and n.log.committed >= upto for n in self.nodes))
        images = [self.image(node, upto) for node in self.nodes if node.log is not None]
        for image in images[1:]:
            assert image == images[0]
            assert list(image.topics) == list(images[0].topics)
        known = self.image(self.nodes[0]).topics
        lost = [name for name in self.committed[:-20] if name not in known]
        assert not lost, lost
