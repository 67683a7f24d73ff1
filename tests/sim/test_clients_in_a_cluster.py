"""Clients of a cluster of several production brokers: leaders die, move, fall silent and come back
elsewhere, and applications that send or read need not do anything.

Times are simulated.  A client that waits for the wrong thing misses every bound here.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.client.fetcher_events import Seek
from pk.client.metadata_updater import HEDGE_MS, PING_MS
from pk.types import TopicPartition
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import SESSION_MS, Lines, Reader

#: Clients as people configure them, for the fixture `make`.
KIT = {"client_defaults": True}

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# -- producers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_leader_is_replaced_at_once(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    lines, reader = Lines(kit, "t"), Reader(kit, "t")
    for _ in range(3):
        lines.after()
        leader = kit.state("t").leader
        kit.kill(leader)
        assert lines.after() < 100  # of which the election takes 5
        assert reader.after() < 100
        kit.boot(leader)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed
    assert not reader.told


@pytest.mark.parametrize("seed", range(2))
def test_a_silent_leader_is_left_when_another_is_elected(make: Any, seed: int) -> None:
    """The stream stays open and the leader does not answer: batches in flight are sent to the new
    leader.
    """
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    lines, reader = Lines(kit, "t"), Reader(kit, "t")
    lines.after()
    leader = kit.state("t").leader
    kit.silence(leader)
    assert lines.after() < SESSION_MS + 500
    assert reader.after() < 500
    kit.silence(leader, heal=True)  # it continues, and handles the waiting requests
    kit.until(lambda: len(kit.state("t").isr) == 3)
    lines.after()
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed
    assert not reader.told


@pytest.mark.parametrize("seed", range(1))
def test_two_that_push_may_fall_silent(make: Any, seed: int) -> None:
    """The client asks the broker that pushes changes whether it is still there
    (client/network_client K2).
    """
    kit = make(seed, brokers=5)
    kit.create("t", min_insync_replicas=1)
    lines, reader = Lines(kit, "t"), Reader(kit, "t")
    lines.after()
    kit.wait(1_000)
    watched = list(reader.engine.cluster._updater._watched)
    assert len(watched) == 2
    replicas = kit.state("t").replicas
    silent = dict.fromkeys([int(address[1]) for address in watched] + [replicas[0]])
    for n in silent:
        kit.silence(n)
    if set(replicas) <= set(silent):
        return  # no broker is left to lead
    assert lines.after() < PING_MS + SESSION_MS + 4_000
    assert reader.after() < PING_MS + 4_000
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)


@pytest.mark.parametrize("seed", range(2))
def test_a_leader_that_only_clients_reach_is_left(make: Any, seed: int) -> None:
    """It is cut off from the cluster, and would still tell its clients that it leads."""
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    lines, reader = Lines(kit, "t"), Reader(kit, "t")
    lines.after()
    leader = kit.state("t").leader
    for name in ("controller", *[f"b{n}" for n in kit.boots if n != leader]):
        kit.sim.network.cut(f"b{leader}", name)
    assert lines.after() < SESSION_MS + 500
    assert reader.after() < 500
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed


@pytest.mark.parametrize("seed", range(1))
def test_leadership_moves_without_a_pause(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.spread("t", min_insync_replicas=2)
    lines, reader = Lines(kit, "t", 3), Reader(kit, "t", 3)
    for n in (1, 2):
        for partition in range(3):
            lines.after(partition)
        kit.drain(n)
        for partition in range(3):
            assert lines.after(partition) < 200
            assert reader.after(partition) < 200
        kit.boot(n)
        kit.until(lambda: all(len(kit.state("t", p).isr) == 3 for p in range(3)))
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed
    assert not reader.told


@pytest.mark.parametrize("seed", range(1))
def test_a_silent_leader_stops_its_own_partitions_only(make: Any, seed: int) -> None:
    kit = make(seed, replica_lag_time_max_ms=500)
    kit.spread("t", min_insync_replicas=1)
    lines, reader = Lines(kit, "t", 3), Reader(kit, "t", 3)
    for partition in range(3):
        lines.after(partition)
        reader.after(partition)
    silent = 1 + seed
    kit.silence(silent)
    kit.wait(600)  # R2: it is a follower now, and the others wait for it for that long
    for partition in range(3):
        if kit.state("t", partition).leader != silent:
            assert lines.after(partition) < 200
            assert reader.after(partition) < 200
    for partition in range(3):
        lines.after(partition)
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed


def test_what_cannot_be_sent_again_is_said_to_be_unknown(make: Any) -> None:
    """Rule L7: the old leader has a moment to answer; if it is silent, the outcome is unknown."""
    kit = make(1)
    kit.create("t", min_insync_replicas=1)
    lines = Lines(kit, "t", acks="1", enable_idempotence=False)
    lines.after()
    kit.silence(kit.state("t").leader)
    kit.wait(100)
    mark, begun = lines.sent, kit.now_ms
    kit.until(lambda: lines.newest[0] >= mark)
    assert kit.now_ms - begun < SESSION_MS + 2_000
    assert lines.failed
    assert all(isinstance(each, errors.OutcomeUnknown) for each in lines.failed.values())
    lines.stop()
    assert not set(lines.failed) & set(lines.acked)


def test_dead_bootstrap_addresses_are_passed_over(make: Any) -> None:
    kit = make(2)
    kit.create("t", min_insync_replicas=2)
    for name in ("hole", "pit"):  # these addresses do not refuse and do not answer
        kit.sim.network.cut("producer", f"{name}:9292")
    lines = Lines(kit, "t", bootstrap=["hole:9292", "gone:9292", "pit:9292", "b2:9292"])
    assert lines.after() < 2 * HEDGE_MS + 100
    kit.kill(2)  # the only bootstrap address that was right
    assert lines.after() < 100
    lines.stop()
    assert not lines.failed


@pytest.mark.parametrize("seed", range(2))
def test_a_silent_broker_delays_no_newcomer(make: Any, seed: int) -> None:
    """A client that starts while a broker hangs is served by the other brokers."""
    kit = make(seed, brokers=4)
    kit.create("t", min_insync_replicas=1)
    (idle,) = set(kit.boots) - set(kit.state("t").replicas)
    kit.silence(idle)
    lines = Lines(kit, "t", bootstrap=[f"b{idle}:9292", *[f"b{n}:9292" for n in kit.boots]])
    assert lines.after() < 4 * HEDGE_MS
    lines.stop()
    assert not lines.failed


def test_a_request_goes_to_a_broker_that_answers(make: Any) -> None:
    """A broker that does not answer may have executed the request.  So the client does not send it
    to two brokers, but first pings to find one that answers.
    """
    kit = make(3)
    kit.create("t")
    request = wire.InitProducerIdRequest(producer_id=-1, producer_epoch=-1)
    cluster = kit.cluster("producer")
    kit.done("producer", cluster.brokers(1_000))
    kit.wait(2_000)
    for n in (1, 2):
        kit.silence(n)
    for _ in range(4):
        begun = kit.now_ms
        kit.done("producer", cluster.call_any(request, timeout_ms=30_000))
        assert kit.now_ms - begun < 3 * HEDGE_MS
        kit.wait(2_000)


def test_two_brokers_go_on_to_push(make: Any) -> None:
    kit = make(4, brokers=5)
    kit.create("t", factor=1)
    reader, leader = Reader(kit, "t"), kit.state("t").leader
    kit.wait(1_000)
    watched = reader.engine.cluster._updater._watched
    dead = next(n for n in kit.boots if f"b{n}:9292" in watched and n != leader)
    kit.kill(dead)
    kit.wait(1_500)
    assert len(watched) == 2
    assert f"b{dead}:9292" not in watched


def test_a_broker_that_comes_back_elsewhere_is_found(make: Any) -> None:
    kit = make(3)
    kit.create("t", factor=1)
    lines, reader = Lines(kit, "t"), Reader(kit, "t")
    lines.after()
    leader = kit.state("t").leader
    kit.kill(leader)
    kit.port = 9393
    kit.wait(3_000)  # long enough for every back-off to be at its longest
    kit.boot(leader)
    kit.soon(lambda: kit.state("t").leader == leader)
    begun = kit.now_ms
    assert lines.after() < 100
    reader.after()
    assert kit.now_ms - begun < 100
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed


@pytest.mark.parametrize("seed", range(2))
def test_an_elected_leader_that_does_not_know_is_waited_for(make: Any, seed: int) -> None:
    """Metadata take time to arrive: a broker that is behind refuses, or answers from older
    metadata.
    """
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    lines, reader = Lines(kit, "t"), Reader(kit, "t")
    lines.after()
    leader = kit.state("t").leader
    behind = kit.state("t").replicas[1]
    kit.sim.network.cut("controller", f"b{behind}", both=False)
    kit.kill(leader)
    kit.wait(10)
    kit.sim.network.heal("controller", f"b{behind}", both=False)
    begun = kit.now_ms
    lines.after()
    reader.after()
    assert kit.now_ms - begun < 150  # of which the followers' own back-off takes most
    kit.boot(leader)
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed


def test_a_partition_without_leader_is_waited_for_and_named(make: Any) -> None:
    kit = make(4)
    kit.create("t", min_insync_replicas=2)
    lines = Lines(kit, "t", delivery_timeout_ms=5_000, request_timeout_ms=3_000)
    lines.after()
    leader = kit.state("t").leader
    followers = [n for n in kit.boots if n != leader]
    for n in followers:
        kit.kill(n)
    kit.until(lambda: kit.state("t").isr == (leader,))
    kit.kill(leader)
    behind = next(n for n in followers if n not in kit.state("t").elr)  # it may not lead
    kit.boot(behind)
    kit.until(lambda: kit.serves(behind))
    kit.wait(2_000)
    mark = lines.sent
    kit.until(lambda: (0, mark) in lines.failed)
    error = lines.failed[0, mark]
    assert isinstance(error, errors.DeliveryTimedOut)
    named = ", ".join(map(str, kit.state("t").elr))
    assert str(leader) in named
    assert f"no reachable leader: it waits for one of the brokers {named}" in error.message
    assert error.acts == "operator"
    kit.boot(leader)
    assert lines.after() < 2_000
    reader = Reader(kit, "t")
    lines.stop()
    reader.catch_up(lines)
    for (_, number), offset in lines.acked.items():
        assert dict(reader.rows[0])[offset] == number


# -- readers of a log that was cut -----------------------------------------------------------------


def test_an_unclean_election_is_told_to_readers(make: Any) -> None:
    """KIP-320, rule R4: the records that were read are lost; the reader gets an error and continues
    at the offset that the error names.
    """
    kit = make(9)
    kit.create("t", min_insync_replicas=1)
    lines, reader = Lines(kit, "t", acks="1", enable_idempotence=False), Reader(kit, "t")
    lines.after()
    leader, *followers = kit.state("t").replicas
    kit.soon(lambda: len(kit.state("t").isr) == 3)
    for n in followers:
        kit.kill(n)
    kit.soon(lambda: kit.state("t").isr == (leader,))
    lines.after()
    reader.after()
    kit.power_loss(leader)  # it alone was in sync, and comes back without the unflushed records
    read = len(reader.rows[0])
    for n in kit.boots:
        kit.boot(n)
    kit.soon(lambda: bool(reader.told))
    (error,) = reader.told
    assert isinstance(error, errors.LogTruncated)
    end = int(error.details["end_offset"])
    assert 0 <= end < read
    assert len(reader.rows[0]) == read
    kit.done("reader", seek(reader, end))
    lines.after()
    reader.after()
    again = [offset for offset, _ in reader.rows[0][read:]]
    assert again == list(range(end, end + len(again)))
    assert len(reader.told) == 1


async def seek(reader: Reader, offset: int) -> None:
    reader.engine.step(Seek(TopicPartition("t", 0), offset))


# -- all of it at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(1))
def test_whatever_happens_nothing_is_lost_doubled_or_swapped(make: Any, seed: int) -> None:
    kit = make(seed)
    kit.spread("t", min_insync_replicas=2)
    lines, reader = Lines(kit, "t", 3), Reader(kit, "t", 3)
    rng = kit.sim.random("events")
    for _ in range(4):
        for partition in range(3):
            lines.after(partition)
        n = rng.choice(list(kit.boots))
        what = rng.choice(["kill", "silence", "drain", "break", "alone"])
        if what == "kill":
            kit.kill(n)
        elif what == "drain":
            kit.drain(n)
        elif what == "silence":
            kit.silence(n)
        elif what == "alone":
            for name in ("controller", *[f"b{each}" for each in kit.boots if each != n]):
                kit.sim.network.cut(f"b{n}", name)
        else:
            kit.sim.network.break_streams("producer", f"b{n}")
            kit.sim.network.break_streams("reader", f"b{n}")
        kit.wait(rng.randint(1, 3 * SESSION_MS))
        kit.silence(n, heal=True)
        if n not in kit.brokers:
            kit.boot(n)
        kit.until(lambda: all(len(kit.state("t", p).isr) == 3 for p in range(3)))
    lines.stop()
    reader.catch_up(lines)
    reader.check(lines)
    assert not lines.failed
    assert not reader.told


def test_metadata_names_the_offset_that_its_content_is_of(make: Any) -> None:
    """Clients compare brokers by this offset (client/metadata M2).  Content newer than its offset
    would be replaced by an older reply, and a consumer would begin a topic twice.
    """
    kit = make(9)
    kit.create("t")
    core = kit.brokers[1].core
    kit.until(lambda: core.publisher.reacted == core.metadata.image.offset)
    core.publisher.reacted -= 1  # the reaction to the last records is under way
    reply = kit.brokers[1]._streams_of.metadata.reply(wire.MetadataRequest())
    assert [topic.name for topic in reply.topics] == ["t"]
    assert reply.metadata_offset == core.metadata.image.offset
