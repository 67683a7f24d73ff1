"""Voters are added and removed while three controllers serve (raft/membership M1–M3, KIP-853)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pk import errors, settings
from pk.server.controller.node import ControllerNode
from pk.server.metadata.records import record_of
from pk.server.node.run_config import RunConfig
from pk.server.raft import membership
from pk.server.raft.messages import Voter
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.world import World

# tasks of a killed node are unwound when its world ends, and may raise errors
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RUN = RunConfig(
    dirs=("/d",), directory_ids=("data",), run_dir="/d/run", cluster_id="cluster", node_id=0,
    server=settings.SERVER.resolve({}),
)  # fmt: skip
FIRST = {Voter(n, f"dir-{n}"): f"c{n}:1" for n in (1, 2, 3)}


class Controllers:
    """Nodes 1 to 3 are the first voters; others may be started."""

    def __init__(self, seed: int) -> None:
        self.sim = SimWorld(seed)
        self.storages: dict[str, SimStorage] = {}
        self.nodes: dict[int, ControllerNode] = {}
        self.fatal: list[BaseException] = []
        for n in (1, 2, 3):
            self.boot(n, f"dir-{n}")

    def boot(self, n: int, directory: str) -> None:
        async def main(world: World) -> None:
            storage = self.storages.setdefault(
                directory, SimStorage(directory, self.sim.random(directory))
            )
            run = replace(RUN, node_id=n, metadata_directory_id=directory)
            disk = SimDisk(storage, world.clock, world.rng)
            node = ControllerNode(
                world, disk, run, on_fatal=self.fatal.append, voters=FIRST, address=f"c{n}:1"
            )
            await node.start()
            self.nodes[n] = node

        self.sim.start(f"c{n}", main)

    def down(self, n: int) -> None:
        node = self.nodes.pop(n)
        self.sim.kill(f"c{n}")
        self.storages[node.run.metadata_directory_id].power_loss()

    def active(self) -> int:
        def terms() -> list[int]:
            return [n for n, node in self.nodes.items() if node.active is not None]

        self.sim.run_until(lambda: bool(terms()))
        return max(terms(), key=lambda n: self.nodes[n].metadata.epoch)

    def ask(self, request: Any, n: int = 0) -> Any:
        """Ask node `n` one question; the default is the active controller."""
        address = f"c{n or self.active()}:1"

        async def story(world: World) -> Any:
            hello = wire.Hello(client_id="t", protocol=PROTOCOL, cluster_id="cluster")
            caller = Caller(world.network, world.clock, address, hello)
            try:
                return (await caller.call(request, timeout_ms=5_000)).head
            finally:
                await caller.close()

        return self.sim.run(story(self.sim.world_of("client")))

    def describe(self) -> wire.DescribeQuorumReply:
        reply: wire.DescribeQuorumReply = self.ask(
            wire.DescribeQuorumRequest()
        ).describe_quorum_reply
        return reply

    def observers(self) -> list[wire.QuorumReplica]:
        leading = [n for n in self.nodes.values() if n.metadata.quorum.leader_state is not None]
        if not leading:
            return []
        node = max(leading, key=lambda n: n.metadata.epoch)
        log, now_ms = node.metadata, node.world.clock.monotonic_ms()
        return list(membership.describe(log.quorum, log.address_of, now_ms).observers)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Controllers] = []

    def one(seed: int) -> Controllers:
        made.append(Controllers(seed))
        return made[-1]

    yield one
    for each in made:
        assert not each.fatal
        each.sim.close()


def ids(rows: Any) -> list[int]:
    return [row.node_id for row in rows]


def add(n: int, directory: str) -> wire.AddVoterRequest:
    return wire.AddVoterRequest(node_id=n, directory_id=directory, address=f"c{n}:1")


def test_a_description(make: Any) -> None:
    world = make(1)
    leader = world.active()
    world.boot(4, "dir-4")
    world.sim.loop.run_for_ms(2_000)
    found = world.describe()
    assert (found.leader_id, ids(found.voters), ids(found.observers)) == (leader, [1, 2, 3], [4])
    assert {row.log_end for row in [*found.voters, *found.observers]} == {found.high_watermark}
    assert all(0 <= row.last_fetch_ago_ms <= 600 for row in found.voters)
    other = next(n for n in (1, 2, 3) if n != leader)
    world.down(other)
    world.sim.loop.run_for_ms(3_000)
    (gone,) = [row for row in world.describe().voters if row.node_id == other]
    assert gone.last_fetch_ago_ms >= 3_000
    assert gone.last_caught_up_ago_ms >= 3_000
    third = next(n for n in (1, 2, 3) if n not in (leader, other))
    with pytest.raises(errors.ControllerUnavailable) as told:
        world.ask(wire.DescribeQuorumRequest(), third)
    assert told.value.details["address"] == f"c{leader}:1"


def test_a_controller_is_added_and_elects(make: Any) -> None:
    world = make(2)
    leader = world.active()
    with pytest.raises(errors.OffsetNotAvailable):  # raft/membership M1
        world.ask(add(4, "dir-4"))
    world.boot(4, "dir-4")
    world.sim.loop.run_for_ms(2_000)
    reply = world.ask(add(4, "dir-4")).change_voters_reply
    assert ids(reply.voters) == [1, 2, 3, 4]
    assert reply.voters[3].address == "c4:1"
    again = world.ask(add(4, "dir-4")).change_voters_reply
    assert ids(again.voters) == [1, 2, 3, 4], "who asks again is not refused"
    gone = next(n for n in (1, 2, 3) if n != leader)
    assert ids(world.ask(wire.RemoveVoterRequest(node_id=gone)).change_voters_reply.voters)
    world.sim.loop.run_for_ms(1_000)
    world.down(leader)  # of three voters, one of which is new
    assert world.active() in {1, 2, 3, 4} - {leader, gone}


def test_an_emptied_disk_does_not_vote_until_it_was_added(make: Any) -> None:
    # rule Q1, raft/membership M3
    world = make(3)
    leader = world.active()
    lost = next(n for n in (1, 2, 3) if n != leader)
    world.down(lost)
    world.boot(lost, "replacement")
    world.sim.loop.run_for_ms(2_000)
    found = world.describe()
    assert lost in ids(found.observers)
    with pytest.raises(errors.InvalidRequest, match=f"dir-{lost}: remove"):
        world.ask(add(lost, "replacement"))
    other = next(n for n in (1, 2, 3) if n not in (leader, lost))
    world.down(other)
    world.sim.loop.run_for_ms(8_000)
    assert not [n for n, node in world.nodes.items() if node.active is not None], "no majority"
    world.boot(other, f"dir-{other}")
    world.sim.loop.run_for_ms(4_000)
    world.ask(wire.RemoveVoterRequest(node_id=lost, directory_id=f"dir-{lost}"))
    world.sim.run_until(lambda: lost in ids(world.observers()))
    world.ask(add(lost, "replacement"))
    world.sim.loop.run_for_ms(1_000)
    world.down(other)
    world.sim.loop.run_for_ms(4_000)
    assert world.active() in (leader, lost)


def test_no_change_takes_the_majority_away(make: Any) -> None:
    # raft/membership M2
    world = make(4)
    leader = world.active()
    up, gone = (n for n in (1, 2, 3) if n != leader)
    world.down(gone)
    world.sim.loop.run_for_ms(3_000)
    with pytest.raises(errors.InvalidRequest, match="in contact"):
        world.ask(wire.RemoveVoterRequest(node_id=up))
    with pytest.raises(errors.InvalidRequest, match="is no voter"):
        world.ask(wire.RemoveVoterRequest(node_id=9))
    with pytest.raises(errors.InvalidRequest, match="is no voter"):
        world.ask(wire.RemoveVoterRequest(node_id=gone, directory_id="other"))
    world.ask(wire.RemoveVoterRequest(node_id=gone))
    world.sim.loop.run_for_ms(1_000)
    assert ids(world.describe().voters) == sorted((leader, up))


def test_a_leader_that_is_removed_hands_over(make: Any) -> None:
    world = make(5)
    leader = world.active()
    world.sim.loop.run_for_ms(1_000)
    reply = world.ask(wire.RemoveVoterRequest(node_id=leader)).change_voters_reply
    assert leader not in ids(reply.voters)
    world.sim.loop.run_for_ms(1_000)
    after = world.active()
    assert after != leader
    world.sim.loop.run_for_ms(1_000)
    found = world.describe()
    assert (found.leader_id, leader in ids(found.observers)) == (after, True)


def test_an_address_of_the_settings_counts_more_than_the_log(make: Any) -> None:
    """A node that has moved announces its new address to the quorum when it leads."""
    world = make(6)
    leader = world.active()
    node = world.nodes[leader]
    record = wire.VotersRecord(
        voters=[
            wire.Voter(node_id=1, directory_id="dir-1", address="old:1"),
            wire.Voter(node_id=7, directory_id="dir-7", address="c7:1"),
        ]
    )
    node.metadata.voters.note(10_000, record_of(record))
    assert node.metadata.address_of(1) == "c1:1"
    assert node.metadata.address_of(7) == "c7:1"


def test_a_leader_that_removes_itself_and_dies_before_the_other_has_heard_of_it(make: Any) -> None:
    """Raft §4.2.2: the only remaining voter then has the shorter log."""
    world = make(1)
    leader = world.active()
    other, third = (n for n in (1, 2, 3) if n != leader)
    world.ask(wire.RemoveVoterRequest(node_id=third))
    world.down(third)
    log, left = world.nodes[leader].metadata, (Voter(other, f"dir-{other}"),)
    world.down(other)
    end = log.end

    async def change(_world: World) -> None:
        with pytest.raises(errors.ControllerUnavailable):
            await log.change_voters(left, {})

    world.sim.start("operator", change)
    world.sim.run_until(lambda: bool(log._state().end > end))
    assert log.voters.now == left
    world.down(leader)
    for n in (leader, other):
        world.boot(n, f"dir-{n}")
    world.sim.loop.run_for_ms(20_000)
    assert (world.active(), ids(world.describe().voters)) == (other, [other])


def test_who_was_away_finds_a_leader_that_was_added_meanwhile(make: Any) -> None:
    """Its own log does not have the leader's address, and no other node may be left to name it."""
    world = make(7)
    leader = world.active()
    away, other = (n for n in (1, 2, 3) if n != leader)
    world.down(away)
    world.boot(4, "dir-4")
    world.sim.loop.run_for_ms(2_000)
    world.ask(add(4, "dir-4"))
    world.ask(wire.RemoveVoterRequest(node_id=leader))
    world.sim.loop.run_for_ms(2_000)
    world.down(leader)
    world.down(other)
    world.boot(away, f"dir-{away}")
    world.sim.loop.run_for_ms(20_000)
    assert [n for n, node in world.nodes.items() if node.active is not None] == [4]
    assert world.nodes[away].metadata.address_of(4) == "c4:1"


def test_an_observer_finds_a_leader_that_was_added_before_it(make: Any) -> None:
    """It knows only the first voters, and they know only who leads."""
    world = make(7)
    leader = world.active()
    gone, other = (n for n in (1, 2, 3) if n != leader)
    world.boot(4, "dir-4")
    world.sim.loop.run_for_ms(2_000)
    world.ask(add(4, "dir-4"))
    world.ask(wire.RemoveVoterRequest(node_id=gone))
    world.down(gone)
    world.ask(wire.RemoveVoterRequest(node_id=leader))
    world.down(leader)
    world.sim.loop.run_for_ms(2_000)
    if world.active() != 4:
        world.down(other)
        world.sim.loop.run_for_ms(100)
        world.boot(other, f"dir-{other}")
    assert world.active() == 4
    world.boot(5, "dir-5")
    world.sim.loop.run_for_ms(10_000)
    assert 5 in ids(world.observers())


def test_what_is_learned_of_a_leaders_address(make: Any) -> None:
    """The leader's own message has precedence over those of others; the settings have precedence
    over both.
    """
    world = make(6)
    voters = world.nodes[world.active()].metadata.voters

    def told(leader: int, address: str, sender: int) -> None:
        named = wire.QuorumVoter(node_id=leader, directory_id="d", address=address)
        by = wire.QuorumVoter(node_id=sender, directory_id="d")
        voters.learn(wire.QuorumHeardReply(sender=by, epoch=1, leader=named))

    told(7, "c7:1", sender=2)
    assert voters.addresses[7] == "c7:1"
    told(7, "old:1", sender=2)
    told(7, "", sender=7)
    assert voters.addresses[7] == "c7:1"
    told(7, "moved:1", sender=7)
    told(1, "moved:1", sender=1)
    assert (voters.addresses[7], voters.addresses[1]) == ("moved:1", "c1:1")


def test_who_came_once_and_died_is_told_again(make: Any) -> None:
    """It forgot what it had received, and its log names only voters that no longer exist."""
    world = make(7)
    leader = world.active()
    away, other = (n for n in (1, 2, 3) if n != leader)
    world.down(away)
    for n in (4, 5):
        world.boot(n, f"dir-{n}")
        world.sim.loop.run_for_ms(2_000)
        world.ask(add(n, f"dir-{n}"))
    for gone in (other, leader):
        world.ask(wire.RemoveVoterRequest(node_id=gone))
        world.sim.loop.run_for_ms(2_000)
        world.down(gone)
    now = world.active()
    world.boot(away, f"dir-{away}")
    state = world.nodes[now].metadata.quorum.leader_state
    world.sim.run_until(lambda: Voter(away, f"dir-{away}") in state.ends)
    world.down(away)
    world.boot(away, f"dir-{away}")
    world.sim.run_until(lambda: away in world.nodes)
    assert {each.node_id for each in world.nodes[away].metadata.voters.now} == {1, 2, 3}
    world.sim.loop.run_for_ms(20_000)
    assert world.nodes[now].metadata.quorum.leader_state is state, "nobody had to be elected"
    assert {each.node_id for each in world.nodes[away].metadata.voters.now} == {away, 4, 5}
