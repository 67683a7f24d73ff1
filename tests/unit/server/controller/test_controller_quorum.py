"""Three controllers: one is active, and its successor continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pk import errors, settings
from pk.server.controller.node import ControllerNode
from pk.server.node.run_config import RunConfig
from pk.server.raft.messages import Voter
from pk.server.raft.timing import Timing
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.world import Stream, StreamKind, World

# tasks of a killed node are unwound when its world ends, and may raise errors
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RUN = RunConfig(
    dirs=("/d",), directory_ids=("",), run_dir="/d/run", cluster_id="cluster", node_id=0,
    server=settings.SERVER.resolve({}),
)  # fmt: skip
IDS = (1, 2, 3)
VOTERS = {Voter(n, f"dir-{n}"): f"c{n}:1" for n in IDS}


class Controllers:
    """Three nodes that can be killed and started again."""

    def __init__(self, seed: int) -> None:
        self.sim = SimWorld(seed)
        self.storages = {n: SimStorage(f"c{n}", self.sim.random(f"disk{n}")) for n in IDS}
        self.nodes: dict[int, ControllerNode] = {}
        self.fatal: list[BaseException] = []
        for n in IDS:
            self.boot(n)

    def boot(self, n: int) -> None:
        async def main(world: World) -> None:
            disk = SimDisk(self.storages[n], world.clock, world.rng)
            run = replace(RUN, node_id=n, directory_ids=(f"dir-{n}",))
            node = ControllerNode(
                world, disk, run, on_fatal=self.fatal.append, voters=VOTERS, address=f"c{n}:1"
            )
            await node.start()
            self.nodes[n] = node

        self.sim.start(f"c{n}", main)

    def down(self, n: int) -> None:
        del self.nodes[n]
        self.sim.kill(f"c{n}")
        self.storages[n].power_loss()

    def active(self) -> int:
        def terms() -> list[int]:
            return [n for n, node in self.nodes.items() if node.active is not None]

        self.sim.run_until(lambda: bool(terms()))
        return max(terms(), key=lambda n: self.nodes[n].metadata.epoch)

    def ask(self, request: Any, first: int) -> Any:
        """Ask a controller, and those that it names, until one answers."""

        async def story(world: World) -> Any:
            address = f"c{first}:1"
            for tries in range(200):
                hello = wire.Hello(client_id="t", protocol=PROTOCOL, cluster_id="cluster")
                caller = Caller(world.network, world.clock, address, hello)
                try:
                    frame = await caller.call(request, timeout_ms=2_000)
                    return frame.head
                except errors.RetriableError as refusal:
                    address = refusal.details.get("address") or f"c{1 + tries % 3}:1"
                    await world.clock.sleep_ms(50)
                finally:
                    await caller.close()
            raise AssertionError("no controller answers")

        return self.sim.run(story(self.sim.world_of("client")))


@pytest.fixture
def make() -> Iterator[Any]:
    """Make worlds that are closed at the end of the test, so that no task remains for the garbage
    collector.
    """
    made: list[Controllers] = []

    def one(seed: int) -> Controllers:
        made.append(Controllers(seed))
        return made[-1]

    yield one
    for each in made:
        each.sim.close()


def create(name: str) -> wire.CreateTopicsRequest:
    return wire.CreateTopicsRequest(
        topics=[wire.NewTopic(name=name, partitions=1, replication_factor=1)]
    )


def register(n: int) -> wire.RegisterBrokerRequest:
    return wire.RegisterBrokerRequest(
        broker_id=n, cluster_id="cluster", incarnation_id=f"i{n}", address=f"b{n}:1",
        boot_id="boot", directory_ids=[f"data-{n}"], previous_broker_epoch=-1,
    )  # fmt: skip


def lives(world: Controllers, broker: int, at: int) -> None:
    """Register the broker and check that it is unfenced; `at`: the controller that is asked
    first.
    """
    epoch = world.ask(register(broker), at).register_broker_reply.broker_epoch
    beat = wire.BrokerHeartbeatRequest(broker_id=broker, broker_epoch=epoch, metadata_offset=10_000)
    assert not world.ask(beat, at).broker_heartbeat_reply.fenced


def reachable(world: Controllers, address: str) -> None:
    """A process listens at the broker's address: a broken stream does not end the session at
    once.
    """

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        await stream.recv()

    world.sim.run(world.sim.world_of("broker").network.listen(address, serve))


@pytest.mark.parametrize("seed", range(4))
def test_the_next_active_controller_goes_on_where_the_last_one_stopped(
    seed: int, make: Any
) -> None:
    world = make(seed)
    first = world.active()
    other = next(n for n in IDS if n != first)
    reachable(world, "b7:1")
    epoch = world.ask(register(7), other).register_broker_reply.broker_epoch
    assert epoch > 0
    beat = wire.BrokerHeartbeatRequest(broker_id=7, broker_epoch=epoch, metadata_offset=10_000)
    assert not world.ask(beat, other).broker_heartbeat_reply.fenced
    result = world.ask(create("before"), other).create_topics_reply.results[0]
    assert not result.HasField("error"), result
    world.down(first)
    second = world.active()
    assert second != first
    image = world.nodes[second].machine.image
    assert image.topic("before") is not None
    assert image.brokers[7].broker_epoch == epoch
    again = world.ask(create("before"), other).create_topics_reply.results[0]
    assert again.error.code == errors.TopicAlreadyExists.code
    assert world.ask(beat, second).broker_heartbeat_reply.caught_up, "its session goes on"
    world.boot(first)
    world.down(second)
    third = world.active()
    assert world.nodes[third].machine.image.topic("before") is not None
    assert not world.fatal


def test_a_controller_that_was_deposed_refuses_and_names_its_successor(make: Any) -> None:
    world = make(9)
    old = world.active()
    others = [n for n in IDS if n != old]
    for n in others:
        world.sim.network.cut(f"c{old}", f"c{n}")
    world.sim.loop.run_for_ms(8_000)
    assert world.nodes[old].active is None
    new = world.active()
    assert new in others
    for n in others:
        world.sim.network.heal(f"c{old}", f"c{n}")
    world.sim.loop.run_for_ms(5_000)
    with pytest.raises(errors.ControllerUnavailable) as told:
        world.nodes[old]._active()
    assert told.value.details == {"controller": str(new), "address": f"c{new}:1"}
    assert not world.fatal


def test_what_was_asked_of_a_leader_without_a_majority_is_not_done_twice(make: Any) -> None:
    """The client does not know the outcome.  The log of the majority decides, and the record that
    was never committed is undone.
    """
    world = make(11)
    old = world.active()
    world.ask(register(7), old)
    for n in IDS:
        if n != old:
            world.sim.network.cut(f"c{old}", f"c{n}")
    end = world.nodes[old].metadata.end
    term = world.nodes[old].active
    assert term is not None
    task = world.sim.spawn(f"c{old}", term.handlers(1)["register_broker"](register(8), None))
    world.sim.loop.run_for_ms(10_000)
    assert task.done()
    assert isinstance(task.exception(), errors.ControllerUnavailable)
    assert world.nodes[old].metadata.end > end, "it was written, not committed"
    new = world.active()
    world.ask(register(9), new)
    for n in IDS:
        if n != old:
            world.sim.network.heal(f"c{old}", f"c{n}")
    world.sim.loop.run_for_ms(10_000)
    assert world.nodes[old].metadata.end == world.nodes[new].metadata.end
    brokers = world.nodes[new].machine.image.brokers
    assert (8 in brokers, 9 in brokers) == (False, True)
    assert not world.fatal


def test_a_controller_that_leaves_in_order_is_followed_at_once(make: Any) -> None:
    """EndQuorumEpoch: no voter waits for a timeout, or for a refused connection."""
    world = make(12)
    old = world.active()
    world.sim.loop.run_for_ms(2_000)
    task = world.sim.spawn(f"c{old}", world.nodes.pop(old).close())
    world.sim.run_until(task.done)
    task.result()
    before = world.sim.loop.now_us
    assert world.active() != old
    assert world.sim.loop.now_us - before < 80_000


def test_the_metadata_of_another_directory_is_refused() -> None:
    """Q1: a node with another directory than the only voter's would wait without an end."""
    with SimWorld(3) as sim:
        storage = SimStorage("m", sim.random("disk"))

        async def start(world: World, directory: str) -> None:
            run = replace(RUN, node_id=1, directory_ids=(directory,))
            node = ControllerNode(world, SimDisk(storage, world.clock, world.rng), run)
            await node.start()
            await node.close()

        sim.run(start(sim.world_of("a"), "first"))
        with pytest.raises(errors.DirectoryOfAnotherCluster, match="directory first"):
            sim.run(start(sim.world_of("b"), "second"))


def test_a_broker_that_died_with_the_last_controller_is_not_waited_for(make: Any) -> None:
    """R7: the new term lost no stream of the broker, so it probes the address once; 7 refuses, 8
    listens.
    """
    world = make(3)
    first = world.active()
    other = next(n for n in IDS if n != first)

    async def listen(at: World) -> None:
        async def accept(_kind: Any, _stream: Any) -> None: ...

        await at.network.listen("b8:1", accept)

    world.sim.start("b8", listen)
    for n in (7, 8):
        lives(world, n, other)
    world.down(first)
    second = world.active()
    began_ms = world.sim.loop.now_us // 1000
    image = world.nodes[second].machine.image
    world.sim.run_until(lambda: image.brokers[7].fenced)
    assert world.sim.loop.now_us // 1000 - began_ms < 1_000
    assert not image.brokers[8].fenced


@pytest.mark.parametrize("killed", [False, True])
def test_what_was_without_a_controller_counts_for_the_sessions(killed: bool, make: Any) -> None:
    """R7: a broker that died with the active controller is fenced one session timeout later, and
    not one session timeout after the next controller has noticed.
    """
    world = make(13)
    first = world.active()
    others = [n for n in IDS if n != first]
    reachable(world, "b7:1")
    lives(world, 7, first)
    began_us = world.sim.loop.now_us
    if killed:
        world.down(first)
    else:
        for n in others:
            world.sim.network.cut(f"c{first}", f"c{n}")
    world.sim.run_until(lambda: any(world.nodes[n].active for n in others))
    (second,) = (n for n in others if world.nodes[n].active is not None)
    image = world.nodes[second].machine.image
    world.sim.run_until(lambda: image.brokers[7].fenced)
    timeout_ms = RUN.server["broker_session_timeout_ms"]
    took_ms = (world.sim.loop.now_us - began_us) / 1000
    assert timeout_ms - 100 < took_ms < timeout_ms + (500 if killed else 2_000)


def test_a_slow_disk_makes_no_session_longer(make: Any) -> None:
    """R7: a term begins with records that must be written first; brokers get no answer
    meanwhile.
    """
    world = make(13)
    first = world.active()
    others = [n for n in IDS if n != first]
    reachable(world, "b7:1")
    lives(world, 7, first)
    for n in others:
        world.sim.network.cut(f"c{first}", f"c{n}")
    nodes = [world.nodes[n] for n in others]
    world.sim.run_until(lambda: any(node.metadata.leads for node in nodes))
    (node,) = (node for node in nodes if node.metadata.leads)
    elected_ms = world.sim.loop.now_us // 1000
    world.storages[node.run.node_id].lag_ms = 100
    world.sim.run_until(lambda: node.active is not None and 7 in node.active.sessions._by_broker)
    assert world.sim.loop.now_us // 1000 - elected_ms >= 300
    timing, timeout_ms = Timing(), RUN.server["broker_session_timeout_ms"]
    ends_ms = node.active.sessions._by_broker[7].deadline_ms
    assert ends_ms - elected_ms == timeout_ms - (timing.fetch_ms - timing.lease_ms)


def test_brokers_register_after_the_voters_changed(make: Any) -> None:
    """controller/machine M3: the term applies the record that the quorum itself appends, and
    continues behind it.
    """
    world = make(5)
    first = world.active()
    node = world.nodes[first]
    gone = next(n for n in IDS if n != first)
    rest = {voter: at for voter, at in VOTERS.items() if voter.node_id != gone}
    world.ask(register(7), first)
    world.sim.run(node.metadata.change_voters(tuple(rest), {n.node_id: a for n, a in rest.items()}))
    epoch = world.ask(register(8), first).register_broker_reply.broker_epoch
    image = node.machine.image
    assert image.brokers[8].broker_epoch == epoch
    assert {each.node_id for each in image.voters} == {n.node_id for n in rest}
    assert not world.fatal
    assert world.active() == first
