"""Three controllers, and brokers that follow the active one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pk import errors, settings
from pk.server.broker.node import BrokerNode
from pk.server.controller.node import ControllerNode
from pk.server.node.run_config import RunConfig
from pk.server.raft.messages import Voter
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.world import World

# tasks of a killed node are unwound when its world ends, and may raise errors
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

IDS = (1, 2, 3)
VOTERS = {Voter(n, f"meta-{n}"): f"c{n}:1" for n in IDS}
BROKER = 7


def config(node_id: int, role: str, **server: Any) -> RunConfig:
    listen = {"controller": "", "broker": f"b{node_id}:1"}[role]
    given = {
        "node_id": node_id,
        "process_roles": role,
        "controller_quorum_voters": ",".join(f"{v.node_id}@{VOTERS[v]}" for v in VOTERS),
        **({"listen": listen} if listen else {}),
        **server,
    }
    return RunConfig(
        dirs=("/d",),
        directory_ids=(f"{role}-{node_id}",),
        run_dir="/d/run",
        cluster_id="cluster",
        node_id=node_id,
        server=settings.SERVER.resolve(given),
        metadata_directory_id=f"meta-{node_id}" if role == "controller" else "",
    )


class Cluster:
    """The controllers c1, c2, c3 and the broker b7."""

    def __init__(self, seed: int) -> None:
        self.sim = SimWorld(seed)
        names = [*(f"c{n}" for n in IDS), f"b{BROKER}"]
        self.storages = {name: SimStorage(name, self.sim.random(name)) for name in names}
        self.controllers: dict[int, ControllerNode] = {}
        self.broker: BrokerNode | None = None
        self.fatal: list[BaseException] = []

    def boot(self, n: int, **server: Any) -> None:
        async def main(world: World) -> None:
            disk = SimDisk(self.storages[f"c{n}"], world.clock, world.rng)
            run = config(n, "controller", **server)
            node = ControllerNode(world, disk, run, on_fatal=self.fatal.append, voters=VOTERS)
            await node.start()
            self.controllers[n] = node

        self.sim.start(f"c{n}", main)

    def boot_broker(self, **server: Any) -> None:
        async def main(world: World) -> None:
            disk = SimDisk(self.storages[f"b{BROKER}"], world.clock, world.rng)
            self.broker = BrokerNode(
                world,
                [disk],
                config(BROKER, "broker", **server),
                boot_id="boot",
                incarnation_id=world.new_id(),
                on_fatal=self.fatal.append,
            )
            await self.broker.start()

        self.sim.start(f"b{BROKER}", main)

    def start(self, **server: Any) -> int:
        """Start all nodes; return the active controller."""
        for n in IDS:
            self.boot(n)
        self.boot_broker(**server)
        self.sim.run_until(lambda: self.broker is not None and self.broker._serving.is_set())
        return self.active()

    def terms(self) -> list[int]:
        return [n for n, node in self.controllers.items() if node.active is not None]

    def active(self) -> int:
        self.sim.run_until(lambda: bool(self.terms()))
        return max(self.terms(), key=lambda n: self.controllers[n].metadata.epoch)

    def down(self, n: int) -> None:
        del self.controllers[n]
        self.sim.kill(f"c{n}")
        self.storages[f"c{n}"].power_loss()

    def cut(self, n: int, *others: str) -> None:
        for name in others:
            self.sim.network.cut(f"c{n}", name)

    def fenced(self) -> bool:
        """Return whether the newest active controller has the broker as fenced."""
        node = self.controllers[self.active()]
        return node.machine.image.brokers[BROKER].fenced

    def watch(self, ms: int, holds: Callable[[], bool]) -> None:
        """Check that `holds` is true at every step of the next `ms`."""
        for _ in range(ms // 20):
            self.sim.loop.run_for_ms(20)
            if self.terms():
                assert holds()

    def create(self, name: str) -> wire.CreateTopicsReply:
        async def story(world: World) -> Any:
            hello = wire.Hello(client_id="t", protocol=PROTOCOL, cluster_id="cluster")
            caller = Caller(world.network, world.clock, f"b{BROKER}:1", hello)
            topic = wire.NewTopic(name=name, partitions=1, replication_factor=1)
            try:
                while True:
                    try:
                        request = wire.CreateTopicsRequest(topics=[topic])
                        return (await caller.call(request, timeout_ms=30_000)).head
                    except errors.RetriableError:
                        await world.clock.sleep_ms(100)
            finally:
                await caller.close()

        reply: wire.CreateTopicsReply = self.sim.run(
            story(self.sim.world_of("client"))
        ).create_topics_reply
        return reply


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Cluster] = []

    def one(seed: int) -> Cluster:
        made.append(Cluster(seed))
        return made[-1]

    yield one
    for each in made:
        assert not each.fatal
        assert not each.sim.loop.failures, each.sim.loop.failures
        each.sim.close()


def names(cluster: Cluster) -> list[str]:
    assert cluster.broker is not None
    return sorted(cluster.broker.core.metadata.image.topic_ids)


@pytest.mark.parametrize("seed", range(3))
def test_a_broker_finds_the_active_controller_and_follows_the_next(seed: int, make: Any) -> None:
    cluster = make(seed)
    first = cluster.start()
    assert cluster.broker.core.lifecycle.address == f"c{first}:1"
    epoch = cluster.broker.core.lifecycle.broker_epoch
    cluster.create("one")
    cluster.down(first)
    cluster.watch(6_000, lambda: not cluster.fenced())
    second = cluster.active()
    assert cluster.broker.core.lifecycle.address == f"c{second}:1"
    assert cluster.broker.core.lifecycle.broker_epoch == epoch, "K1: the same incarnation"
    assert cluster.broker.core.lifecycle.in_contact()
    cluster.create("two")
    assert names(cluster) == ["one", "two"]
    cluster.boot(first)
    cluster.down(second)
    cluster.create("three")
    assert names(cluster) == ["one", "three", "two"]
    assert cluster.broker.core.lifecycle.broker_epoch == epoch


@pytest.mark.parametrize("seed", range(8))
def test_a_silent_controller_does_not_cost_a_broker_its_session(seed: int, make: Any) -> None:
    """The controller was stopped: it accepts connections and does not answer."""
    cluster = make(seed)
    first = cluster.start()
    cluster.create("one")
    cluster.sim.loop.run_for_ms(cluster.sim.random("when").uniform(0, 2_000))
    others = [f"c{n}" for n in IDS if n != first]
    cluster.cut(first, *others, f"b{BROKER}", "client")
    del cluster.controllers[first]  # it may believe that it leads
    cluster.watch(16_000, lambda: not cluster.fenced())
    assert cluster.broker.core.lifecycle.in_contact()
    cluster.create("two")
    assert names(cluster) == ["one", "two"]


def test_two_silent_controllers_of_five_addresses(make: Any) -> None:
    """broker/controller_search K5: the timeouts of addresses without a server do not add up."""
    cluster = make(3)
    dark = "8@dark1:1,9@dark2:1"
    voters = ",".join(f"{v.node_id}@{VOTERS[v]}" for v in VOTERS)
    for n in IDS:  # the broker gets no answer from missing nodes either
        cluster.sim.network.cut(f"b{BROKER}", f"dark{n}:1")
    first = cluster.start(controller_quorum_voters=f"{dark},{voters}")
    cluster.cut(first, *(f"c{n}" for n in IDS if n != first), f"b{BROKER}")
    del cluster.controllers[first]
    cluster.watch(16_000, lambda: not cluster.fenced())
    assert cluster.broker.core.lifecycle.in_contact()


def test_a_controller_that_stops_leading_is_left_though_it_answers(make: Any) -> None:
    cluster = make(4)
    old = cluster.start()
    cluster.cut(old, *(f"c{n}" for n in IDS if n != old))
    cluster.watch(16_000, lambda: True)
    new = cluster.active()
    assert new != old
    assert cluster.controllers[old].active is None
    assert cluster.broker.core.lifecycle.address == f"c{new}:1"
    assert not cluster.fenced()
    cluster.create("after")
    assert names(cluster) == ["after"]


@pytest.mark.parametrize("seed", range(6))
def test_no_broker_trusts_a_controller_that_was_deposed(seed: int, make: Any) -> None:
    """R6: when the next controller fences a broker, the broker knows that it may be fenced,
    although the former controller still answers it.
    """
    cluster = make(seed)
    old = cluster.start()
    others = [n for n in IDS if n != old]
    cluster.cut(old, *(f"c{n}" for n in others))
    for n in others:
        cluster.cut(n, f"b{BROKER}")
    del cluster.controllers[old]
    fenced = 0
    for _ in range(900):
        cluster.sim.loop.run_for_ms(20)
        if cluster.terms() and cluster.fenced():
            fenced += 1
            assert not cluster.broker.core.lifecycle.in_contact()
    assert fenced


def test_a_probe_goes_where_the_settings_say(make: Any) -> None:
    """R7 through a proxy of the test: if the proxy refuses the connection, the broker counts as
    refused.
    """
    cluster = make(9)
    active = cluster.start()
    term = cluster.controllers[active].active
    term._run = config(active, "controller", peer_addresses=f"{BROKER}=nowhere:1")
    session = term.sessions._by_broker[BROKER]
    session.stream = None

    task = cluster.sim.spawn(f"c{active}", term._probe(session))
    cluster.sim.run_until(task.done)
    task.result()
    assert cluster.fenced()


def test_metadata_is_never_followed_back(make: Any) -> None:
    """A controller that was deposed without knowing has fewer records than the broker has applied:
    the broker waits for a controller that has more.
    """
    cluster = make(5)
    old = cluster.start()
    cluster.cut(old, *(f"c{n}" for n in IDS if n != old), f"b{BROKER}")
    cluster.sim.run_until(lambda: any(n != old for n in cluster.terms()))
    cluster.create("new")
    follower = cluster.broker.core.publisher
    applied = follower.next_offset
    node = cluster.controllers[old]
    assert applied > node.metadata.end
    cluster.sim.network.heal(f"c{old}", f"b{BROKER}")

    async def ask(world: World) -> None:
        hello = wire.Hello(client_id="t", protocol=PROTOCOL, cluster_id="cluster")
        caller = Caller(world.network, world.clock, f"c{old}:1", hello)
        request = wire.FetchMetadataLogRequest(from_offset=applied, max_bytes=1000)
        try:
            await caller.call(request, timeout_ms=2_000)
        finally:
            await caller.close()

    with pytest.raises(errors.ControllerUnavailable):
        cluster.sim.run(ask(cluster.sim.world_of("client")))
    cluster.watch(3_000, lambda: follower.next_offset >= applied)


def test_a_silent_controller_is_left_after_a_quarter_of_the_session(make: Any) -> None:
    cluster = make(10)
    first = cluster.start()
    cluster.sim.loop.run_for_ms(3_000)
    cluster.cut(first, f"b{BROKER}")
    lifecycle = cluster.broker.core.lifecycle
    cluster.sim.loop.run_for_ms(1_000 + 1_500 + 100)
    assert lifecycle.address != f"c{first}:1"


def _stall(cluster: Any, stall_ms: int) -> list[str]:
    """Let the metadata disk hang once while a topic is written; return what the controller
    logged.
    """
    first = cluster.start()
    said: list[str] = []
    cluster.controllers[first].active._say = lambda event, **facts: said.append(event)
    cluster.storages[f"c{first}"].lag_ms = stall_ms

    async def write(world: World) -> None:
        hello = wire.Hello(client_id="t", protocol=PROTOCOL, cluster_id="cluster")
        caller = Caller(world.network, world.clock, f"b{BROKER}:1", hello)
        topic = wire.NewTopic(name="one", partitions=1, replication_factor=1)
        try:
            await caller.call(wire.CreateTopicsRequest(topics=[topic]), timeout_ms=30_000)
        except errors.RetriableError:
            pass
        finally:
            await caller.close()

    cluster.sim.spawn("client", write(cluster.sim.world_of("client")))
    cluster.sim.loop.run_for_ms(100)
    cluster.storages[f"c{first}"].lag_ms = 0.0  # the running write is slow, once
    return said


@pytest.mark.parametrize("stall_ms", [4_000, 8_000, 16_000])
def test_a_disk_that_stalls_at_the_controller_fences_nobody(stall_ms: int, make: Any) -> None:
    """R7: the heartbeats of a broker with an offline replica have to wait, so the broker takes its
    controller for silent and reconnects.  Its new registration waits too, and shows that the broker
    is alive.
    """
    cluster = make(1)
    broken = [wire.FetchPartition(topic_id="broken")]
    said = _stall(cluster, stall_ms)
    cluster.broker.core.lifecycle._offline_replicas = lambda: broken
    cluster.sim.loop.run_for_ms(stall_ms + 6_000)
    assert "broker_registered" in said, "it looked for another controller meanwhile"
    assert "broker_fenced" not in said
    assert cluster.broker.core.lifecycle.in_contact()


@pytest.mark.parametrize("stall_ms", [4_000, 16_000])
def test_a_disk_that_stalls_at_the_controller_takes_no_contact(stall_ms: int, make: Any) -> None:
    """R6: a heartbeat that changes nothing is answered, and the broker continues to serve."""
    cluster = make(1)
    said = _stall(cluster, stall_ms)
    lifecycle = cluster.broker.core.lifecycle
    for _ in range(stall_ms // 100 + 20):
        cluster.sim.loop.run_for_ms(100)
        assert lifecycle.in_contact()
    assert [event for event in said if event != "topic_created"] == []


def test_another_process_of_the_same_id_is_no_sign_of_life(make: Any) -> None:
    """R7: only the incarnation that has the session renews it by a request."""
    cluster = make(1)
    term = cluster.controllers[cluster.start()].active
    session = term.sessions._by_broker[BROKER]
    session.deadline_ms -= 500  # as long ago is its last heartbeat
    before, stream = session.deadline_ms, session.stream
    mine = cluster.broker.core.lifecycle.identity.incarnation_id
    request = wire.RegisterBrokerRequest(broker_id=BROKER, incarnation_id="other")
    term._resume(stream + 1, request)
    assert (session.deadline_ms, session.stream) == (before, stream)
    request.incarnation_id = mine
    term._resume(stream + 1, request)
    assert session.deadline_ms > before
    assert session.stream == stream + 1


def test_the_age_of_contact_counts_from_the_sending_of_what_was_answered(make: Any) -> None:
    """broker/lifecycle K2: the metric shows how near a broker came to its session timeout."""
    cluster = make(10)
    first = cluster.start()
    lifecycle, ages = cluster.broker.core.lifecycle, list[int]()
    lifecycle._on_contact = ages.append
    cluster.sim.loop.run_for_ms(10_000)
    interval_ms = settings.SERVER.by_name["broker_heartbeat_interval_ms"].default
    assert len(ages) >= 8
    assert all(interval_ms <= age < interval_ms + 100 for age in ages)
    before = lifecycle._contact_ms
    assert before is not None
    ages.clear()
    cluster.cut(first, f"b{BROKER}")
    cluster.sim.loop.run_for_ms(1_000)
    cluster.sim.network.heal(f"c{first}", f"b{BROKER}")
    cluster.sim.run_until(lambda: lifecycle._contact_ms != before)
    assert len(ages) == 1
    now_ms = lifecycle._world.clock.monotonic_ms()
    assert ages[0] == now_ms - before > 1_000
    assert lifecycle._contact_ms < now_ms, "the answer took its time: contact is older than this"


def test_a_broker_that_was_fenced_has_no_contact_before_it_knows(make: Any) -> None:
    """broker/lifecycle K7: it registers again before it has heard who leads by now."""
    cluster = make(3)
    cluster.start()
    cluster.create("one")
    lifecycle, publisher = cluster.broker.core.lifecycle, cluster.broker.core.publisher
    for each in IDS:
        cluster.cut(each, f"b{BROKER}")
    cluster.sim.loop.run_for_ms(20_000)
    assert cluster.fenced()
    assert not lifecycle.in_contact()
    known = cluster.controllers[cluster.active()].machine.image.brokers[BROKER].changed_offset
    assert publisher.reacted < known
    for each in IDS:
        cluster.sim.network.heal(f"c{each}", f"b{BROKER}")
    registered: list[int] = []

    def back() -> bool:
        if lifecycle._registered.is_set():
            registered.append(publisher.reacted)
        return lifecycle.in_contact()

    cluster.sim.run_until(back)
    assert registered[0] < known <= registered[-1]
    assert not cluster.fenced()


def test_a_broker_starts_though_the_first_addresses_are_silent(make: Any) -> None:
    cluster = make(6)
    for n in IDS:
        cluster.boot(n)
    cluster.active()
    cluster.sim.network.cut(f"b{BROKER}", "dark1:1")
    cluster.sim.network.cut(f"b{BROKER}", "dark2:1")
    voters = ",".join(f"{v.node_id}@{VOTERS[v]}" for v in VOTERS)
    dark = "8@dark1:1,9@dark2:1"
    before = cluster.sim.loop.now_us
    cluster.boot_broker(controller_quorum_voters=f"{dark},{voters}")
    cluster.sim.run_until(lambda: cluster.broker is not None and cluster.broker._serving.is_set())
    assert cluster.sim.loop.now_us - before < 5_000_000, "two quarters of a session, and a bit"


def test_peers_replace_the_addresses_that_controllers_are_known_by(make: Any) -> None:
    """For tests with a proxy in every link: hints in refusals are followed through the proxy,
    too.
    """
    cluster = make(7)
    for n in IDS:  # a broker that is cut off from the true addresses by their names alone
        cluster.sim.network.refuse(f"proxy{n}:1")
    first = cluster.start()
    lifecycle = cluster.broker.core.lifecycle
    lifecycle._peers = {first: f"proxy{first}:1"}
    refusal = errors.ControllerUnavailable("x", controller=str(first), address=f"c{first}:1")
    assert lifecycle._named_in(refusal) == f"proxy{first}:1"
    other = errors.ControllerUnavailable("x", controller="99", address="c99:1")
    assert lifecycle._named_in(other) == "c99:1"
    assert lifecycle._named_in(errors.RequestTimedOut("x")) == ""


def test_a_controller_goes_to_its_peers_where_the_settings_say(make: Any) -> None:
    """Node 1 opens no connection: the other nodes elect, and return the true addresses to any
    client.
    """
    cluster = make(11)
    cluster.boot(1, peer_controller_addresses="2=nowhere:1,3=nowhere:2")
    cluster.boot(2)
    cluster.boot(3)
    assert cluster.active() in (2, 3)
    cluster.sim.loop.run_for_ms(5_000)
    lone, active = cluster.controllers[1], cluster.controllers[cluster.active()]
    assert lone.metadata.end == 0 < active.metadata.end
    assert lone.metadata.address_of(2) == "c2:1"


def test_a_call_with_a_short_patience_moves_nothing(make: Any) -> None:
    # broker/lifecycle K6
    cluster = make(8)
    first = cluster.start()
    lifecycle = cluster.broker.core.lifecycle
    request = wire.DescribeConfigsRequest()

    async def hurried() -> None:
        with pytest.raises(errors.ControllerUnavailable):
            await lifecycle.call(request, 1)

    cluster.sim.network.link(f"b{BROKER}", f"c{first}").delay_us = (20_000, 20_000)
    task = cluster.sim.spawn(f"b{BROKER}", hurried())
    cluster.sim.run_until(task.done)
    task.result()
    assert lifecycle.address == f"c{first}:1"
    assert lifecycle._registered.is_set()


def test_controllers_that_came_later_are_found_by_what_the_metadata_say(make: Any) -> None:
    """None of the first voters, which the settings name, is left to name the active controller."""
    cluster = make(8)
    cluster.start()
    for n in (4, 5):
        cluster.storages[f"c{n}"] = SimStorage(f"c{n}", cluster.sim.random(f"c{n}"))
        cluster.boot(n, controller_listen=f"c{n}:1")
    cluster.sim.loop.run_for_ms(2_000)
    voters = dict(VOTERS)
    for change in (4, 5, -1, -2):
        voter = Voter(abs(change), f"meta-{abs(change)}")
        voters[voter] = f"c{abs(change)}:1"
        if change < 0:
            del voters[voter]
        log = cluster.controllers[cluster.active()].metadata
        where = {each.node_id: address for each, address in voters.items()}
        cluster.sim.run(log.change_voters(tuple(voters), where))
        cluster.sim.loop.run_for_ms(3_000)
    for n in IDS:
        cluster.down(n)
        cluster.sim.loop.run_for_ms(3_000)
    cluster.down(cluster.active())
    for n in {4, 5} - cluster.controllers.keys():
        cluster.boot(n, controller_listen=f"c{n}:1")
    cluster.sim.loop.run_for_ms(20_000)
    assert cluster.active() in (4, 5)
    assert not cluster.fenced()
